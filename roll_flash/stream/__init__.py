"""The trajectory stream: rows are trajectories, columns are fields written by stages, nobody waits for a whole batch.

`docs/streaming.md` explains it with examples.
"""

from roll_flash.stream.loader import LEARNER, LearnerLoader, MicroBatch, learner_consumer
from roll_flash.stream.rows import Batch, Claim, Columns, Consumer, Row, RowInfo
from roll_flash.stream.samplers import Groups, Sampler, Sequential, TokenBalanced
from roll_flash.stream.stage import Stage
from roll_flash.stream.store import MemoryStore, Store
from roll_flash.stream.stream import TrajectoryStream
from roll_flash.stream.stream_files import load_stream, save_stream
from roll_flash.stream.trajectories import TRAJECTORY_COLUMNS, group_rows, row_trajectory, trajectory_row

__all__ = [
    "LEARNER",
    "TRAJECTORY_COLUMNS",
    "Batch",
    "Claim",
    "Columns",
    "Consumer",
    "Groups",
    "LearnerLoader",
    "MemoryStore",
    "MicroBatch",
    "Row",
    "RowInfo",
    "Sampler",
    "Sequential",
    "Stage",
    "Store",
    "TokenBalanced",
    "TrajectoryStream",
    "group_rows",
    "learner_consumer",
    "load_stream",
    "row_trajectory",
    "save_stream",
    "trajectory_row",
]
