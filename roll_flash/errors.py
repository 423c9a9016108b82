"""The errors a user can meet. Each message says what happened, to what, and what to do.

The command line prints the message alone and exits with `exit_code`: 2 for usage and configuration, 1 for a failure.
"""

from __future__ import annotations

from collections.abc import Sequence


class RollFlashError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(RollFlashError):
    """A configuration or a command that cannot be run as written."""

    exit_code = 2


class ModelError(ConfigError):
    """A model folder that is missing, incomplete or not usable."""


class EnvError(RollFlashError):
    """An environment that cannot be made, or that breaks its contract."""


class InferenceError(RollFlashError):
    """An inference server that did not start, died, or answered with garbage."""


class LearnerError(RollFlashError):
    """The learner could not take a step."""


class ParityError(RollFlashError):
    """Server and learner disagree about the same weights."""


class CheckpointError(RollFlashError):
    """A checkpoint that is missing, incomplete or of another model."""


class RunError(RollFlashError):
    """The run cannot go on."""


class StreamError(RollFlashError):
    """The trajectory stream was used in a way it cannot be, or lost a part."""


class StreamFullError(StreamError):
    """There was no room in the stream until the deadline. Nothing was put."""


class StreamStarvedError(StreamError):
    """No row became ready for a consumer until its deadline."""


class ShardDiedError(StreamError):
    """A process that holds a part of the stream's data is gone, and with it the rows `row_ids` of those asked for."""

    def __init__(self, message: str, row_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.row_ids = list(row_ids)
