"""Errors of the sandbox itself. A command that fails is a result, never one of these errors.

Every error here means that the episode says nothing about the model: the caller masks the sample.
"""

from __future__ import annotations

from roll_flash.errors import RollFlashError


class SandboxError(RollFlashError):
    """Base of every sandbox error."""

    page = "docs/sandboxes.md"


class SandboxUnavailable(SandboxError):
    """No provider works on this machine: no engine, no permission, no bubblewrap."""

    exit_code = 2


class SandboxPermissionDenied(SandboxUnavailable):
    """This user may not use the engine's socket."""


class SandboxSpecError(SandboxError, ValueError):
    """An impossible spec: more memory than the machine has, or contradictory limits."""

    exit_code = 2


class SandboxImageError(SandboxError):
    """An image is missing, cannot be pulled or cannot be built."""


class SandboxImageMissing(SandboxImageError):
    """The engine has no image with this name."""


class SandboxStartError(SandboxError):
    """A sandbox did not start."""


class SandboxDiskFull(SandboxStartError):
    """The engine has no disk space for another sandbox or image."""


class SandboxUnreachable(SandboxError):
    """The engine or the sandbox does not answer in time; the sandbox may still be alive."""


class SandboxDied(SandboxError):
    """The sandbox has ended. `reason`: `oom`, `killed`, `daemon`, `protocol`, `agent`, `closed` or `lease`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SandboxDied], tuple[str, str]]:
        return type(self), (str(self), self.reason)


class SandboxFileError(SandboxError):
    """The sandbox refused a file operation. `errno` is the kernel's number; the sandbox stays usable."""

    def __init__(self, message: str, errno: int) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[SandboxFileError], tuple[str, int]]:
        return type(self), (str(self), self.errno)


class SandboxHostError(SandboxError):
    """This machine cannot read or write a file, whatever a sandbox has: its disk is full, or this process has too many
    open files."""


class SandboxBusy(SandboxFileError):
    """What runs inside was killed and does not end in time, because of what it did before: the exception to the rule
    above. Score it 0, or a model could avoid a certain 0."""
