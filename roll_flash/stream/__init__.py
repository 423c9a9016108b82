"""The trajectory stream: rows are trajectories, columns are written by stages, nobody waits for a whole batch.

`docs/streaming.md` explains it with examples.
"""

from roll_flash.stream.episodes import finished_episode, finished_group
from roll_flash.stream.loader import REWARD, LearnerLoader
from roll_flash.stream.stage import Stage
from roll_flash.stream.stream import Consumer, Row, TrajectoryStream

__all__ = [
    "REWARD",
    "Consumer",
    "LearnerLoader",
    "Row",
    "Stage",
    "TrajectoryStream",
    "finished_episode",
    "finished_group",
]
