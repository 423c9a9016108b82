"""What a check is, what it may report while it runs, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from roll_flash.errors import RollFlashError
from roll_flash.gpu_check.settings import Settings

Status = Literal["passed", "slow", "failed", "not possible", "not run"]
"""`not possible`: not on this machine, for the reason in `Result.text`; `not run`: the check was interrupted before."""


class CheckFailedError(RollFlashError):
    """What was looked at is wrong."""


class NotPossibleError(RollFlashError):
    """This machine, or this configuration, has nothing to look at."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    why: str
    """What it proves, in one sentence."""
    function: str
    """`package.module:function`, called with a `Bench`, what its group opened (if anything), and `arguments`. It fails
    if it raises. The function of `Group.opens` returns an asynchronous context manager."""
    deadline_s: float
    """Maximum time in seconds; then its process is ended."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Checks that run one after another in one process. After a crash the rest runs in a new one."""

    name: str
    checks: tuple[Check, ...]
    opens: Check | None = None
    """Starts what the checks share; if it fails, they are not possible."""
    not_possible: str = ""
    """Reason why the group cannot run here; empty: it can."""
    gpus: int | None = None
    """Maximum number of GPUs that it sees; None: all."""

    @property
    def rows(self) -> tuple[Check, ...]:
        """All that gets a result, in order."""
        return self.checks if self.opens is None else (self.opens, *self.checks)

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Group:
        """Read what `dataclasses.asdict` has made of a group."""
        opens = None if tree["opens"] is None else Check(**tree["opens"])
        return cls(**{**tree, "opens": opens, "checks": tuple(Check(**each) for each in tree["checks"])})


@dataclass(slots=True)
class Result:
    name: str
    group: str
    why: str
    status: Status
    text: str = ""
    """Why it failed or is not possible; or a remark."""
    slow: list[str] = field(default_factory=list)
    """What is slow, and why."""
    fits: list[str] = field(default_factory=list)
    """What fits on this machine, or does not."""
    figures: dict[str, Any] = field(default_factory=dict)
    """By name, with the unit in it."""
    seconds: float = 0.0
    log: str = ""
    """Last lines of the log of its process, if it failed."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """What a check is given. All that it reports is written at once, so that a crash takes none of it."""

    def __init__(self, settings: Settings, emit: Callable[[dict[str, Any]], None]) -> None:
        self.settings = settings
        self._emit = emit

    def note(self, text: str) -> None:
        """Tell the user what is waited for."""
        self._emit({"kind": "note", "text": text})

    def measured(self, **figures: Any) -> None:
        """Report figures; JSON values."""
        self._emit({"kind": "figures", "figures": figures})

    def slow(self, reason: str) -> None:
        """Report that something is slower than it should be. A rehearsal measures no speed, and reports none."""
        if not self.settings.rehearsal:
            self._emit({"kind": "slow", "text": reason})

    def fits(self, line: str) -> None:
        """Report something that fits, or does not fit, on this machine."""
        self._emit({"kind": "fits", "text": line})

    def remark(self, text: str) -> None:
        self._emit({"kind": "remark", "text": text})


def require(condition: bool, otherwise: str) -> None:
    """Raises CheckFailedError with the text `otherwise` unless the condition is true."""
    if not condition:
        raise CheckFailedError(otherwise)
