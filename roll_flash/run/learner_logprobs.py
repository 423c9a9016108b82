"""What the learner said of each token that it computed, in the last steps of a run: `logs/learner_logprobs/`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from roll_flash.engines.learner import SampleName
from roll_flash.monitor.json_lines import JsonLinesFile, read_lines

FOLDER = "learner_logprobs"
KEPT_STEPS = 64


class _Line(TypedDict):
    episode_id: str
    sample: int
    logprobs: list[float]


def write_logprobs(logs: Path, step: int, logprobs: Mapping[SampleName, NDArray[np.float32]]) -> None:
    """Write what a step (from 1) gave, and remove the file that is too old now. `logs` is the run's folder of that
    name. Raises RunError if the disk write fails."""
    path = _file(logs, step)
    path.unlink(missing_ok=True)  # of a step that is made again after a resume
    with closing(JsonLinesFile(path)) as file:
        for (episode_id, sample), values in logprobs.items():
            file.write({"episode_id": episode_id, "sample": sample, "logprobs": values})
    _file(logs, step - KEPT_STEPS).unlink(missing_ok=True)


def read_logprobs(logs: Path, step: int, episode_id: str) -> dict[int, list[float]]:
    """Return the log-probabilities of an episode's trained tokens by sample; empty if they are not there.

    Raises OSError, DamagedFileError.
    """
    lines = (line for line in read_lines(_file(logs, step), _Line) if line["episode_id"] == episode_id)
    return {line["sample"]: line["logprobs"] for line in lines}


def _file(logs: Path, step: int) -> Path:
    return logs / FOLDER / f"step_{step:06d}.jsonl"
