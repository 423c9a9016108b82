"""Errors that users can see. Each message names the problem, the object and the action to take.

The command line prints only the message and exits with `exit_code`: 2 for usage and configuration, 1 for a failure.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty; its type's name if there is none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


MAX_DESCRIBED = 10_000
"""Characters of a foreign error that are kept: it may quote megabytes."""


def type_and_text(error: BaseException) -> str:
    """Return type and text of an error of a user's code, whose text may be long, or raise an error itself."""
    try:
        text = str(error)
    except Exception as another:
        text = f"no text, because of {type(another).__name__}"
    whole = f"{type(error).__name__}: {text}"
    return whole if len(whole) <= MAX_DESCRIBED else f"{whole[:MAX_DESCRIBED]} [... {len(whole)} characters]"


class RollFlashError(Exception):
    """Base class of all errors that this package raises on purpose."""

    exit_code = 1
    page: str | None = None
    """Page of the documentation that tells more, where one does; the command line names it."""


class ConfigError(RollFlashError):
    """The configuration or command is invalid."""

    exit_code = 2


class KeysError(ConfigError):
    """Keys or values of the config are none that it has."""

    page = "docs/config.md"


class TaskError(ConfigError):
    """An environment or a task source of the config cannot be used."""

    page = "docs/environments.md"


class DataError(TaskError):
    """The rows of a data set cannot be used."""

    page = "docs/data.md"


class ModelError(ConfigError):
    """The model folder is missing, incomplete or not usable."""

    page = "docs/models.md"


class EnvError(RollFlashError):
    """The environment cannot be made, or violates its interface."""

    page = "docs/environments.md"


class InferenceError(RollFlashError):
    """An inference server did not start, died, or sent an invalid answer."""

    page = "docs/inference.md"


class LearnerError(RollFlashError):
    """The learner could not complete a step."""


class LearnerLostError(LearnerError):
    """The learner has no processes: one of them died or did not answer, or they were never started, or are closed."""


class ParityError(RollFlashError):
    """Server and learner compute different log-probabilities with the same weights."""

    page = "docs/inference.md"


class CheckpointError(RollFlashError):
    """The checkpoint is missing, incomplete or of another model."""

    page = "docs/operations.md"


class RunError(RollFlashError):
    """The run cannot continue."""


class PlacementError(RunError):
    """The nodes of the cluster have no room for a part of the run."""

    page = "docs/scaling.md"


class StreamError(RollFlashError):
    """The trajectory stream was used incorrectly, or lost data."""

    page = "docs/streaming.md"


class StreamStarvedError(StreamError):
    """Stages wrote no reward before the deadline."""
