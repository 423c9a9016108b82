"""What can go wrong with a sandbox itself. A command that fails is a result, never one of these.

Every error here means that the episode says nothing about the model: whoever runs it masks the sample.
"""

from __future__ import annotations

from roll_flash.errors import RollFlashError


class SandboxError(RollFlashError):
    """Base of every sandbox error."""


class SandboxUnavailable(SandboxError):
    """No provider can be used on this machine: no engine, no permission, no bubblewrap."""

    exit_code = 2


class SandboxPermissionDenied(SandboxUnavailable):
    """The engine's socket may not be used by this user."""


class SandboxSpecError(SandboxError, ValueError):
    """A spec that cannot be met: more memory than the machine has, limits that contradict each other."""

    exit_code = 2


class SandboxImageError(SandboxError):
    """An image that is missing, cannot be pulled or cannot be built."""


class SandboxImageMissing(SandboxImageError):
    """The engine has no image of that name."""


class SandboxStartError(SandboxError):
    """A sandbox that did not come up."""


class SandboxDiskFull(SandboxStartError):
    """The engine has no room for another sandbox or image."""


class SandboxUnreachable(SandboxError):
    """The engine or the sandbox does not answer in time; whether the sandbox lives is not known."""


class SandboxDied(SandboxError):
    """The sandbox is gone. `reason` is one of `oom`, `killed`, `daemon`, `protocol`, `agent`, `closed`, `lease`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SandboxDied], tuple[str, str]]:
        return type(self), (str(self), self.reason)


class SandboxFileError(SandboxError):
    """A file operation that the sandbox refused. `errno` is the kernel's number; the sandbox lives on."""

    def __init__(self, message: str, errno: int) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[SandboxFileError], tuple[str, int]]:
        return type(self), (str(self), self.errno)
