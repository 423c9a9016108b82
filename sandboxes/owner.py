"""Owner of a sandbox, identified so that a reused process id or a reboot causes no confusion."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

LABEL = "roll-flash.sandbox"
LABEL_RUN = "roll-flash.run"
LABEL_OWNER = "roll-flash.owner"
LABEL_CREATED = "roll-flash.created"
LABEL_NETWORK = "roll-flash.network"

FOREIGN_AGE_S = 86400.0
"""Age in seconds after which an object of another machine, boot or process namespace counts as a leftover."""
_STARTED_FIELD = 19

DOCKER_USERS = range(0x78000000, 0x7C000000)
LOCAL_USERS = range(0x7C000000, 0x7FFFFFFF)
"""User ids that no other software assigns: above the ranges of directory services (SSSD) and containers (subuid,
systemd)."""
REMAPPED_USERS = range(10_000, 65_000)
"""User ids inside a user namespace (which has 65,536); the engine maps them to host users reserved for it."""
GROUP = 1000


def new_user(users: range) -> tuple[str, int]:
    """Return a new sandbox name and its user id.

    Container names are unique per engine, so two live containers of any controllers never share a user id, and an id
    is free again when its container is removed, even if its controller was killed.
    """
    user = random.SystemRandom().choice(users)
    return f"roll-flash-{user:08x}", user


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: machine boot, process id, and start time (clock ticks since boot)."""

    boot: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.boot}:{self.pid}:{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Parse the output of `str`. Raises ValueError."""
        boot, pid, started = text.split(":")
        return cls(boot, int(pid), int(started))

    @classmethod
    def current(cls) -> Owner:
        pid = os.getpid()
        started = process_started(pid)
        assert started is not None, "a process can read its own /proc entry"
        return cls(boot_id(), pid, started)

    def is_gone(self, age_s: float) -> bool:
        """True if what this process made `age_s` seconds ago is a leftover: the process is dead, or unknown and old."""
        lives = self.lives()
        return not lives if lives is not None else age_s > FOREIGN_AGE_S

    def lives(self) -> bool | None:
        """True if the process runs. None if it belongs to another machine or process namespace, or if /proc hides it
        (unknown)."""
        if self.boot != boot_id():
            return None
        try:
            return process_started(self.pid) == self.started
        except PermissionError:
            return None


def boot_id() -> str:
    """Return an identifier of the current boot of this machine and of this process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def short_boot_id() -> str:
    """Return a short form of `boot_id` for names: eight hexadecimal digits."""
    return hashlib.sha256(boot_id().encode()).hexdigest()[:8]


def process_started(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of a process; None if it does not exist or is a zombie.

    Raises PermissionError for a process of another user that /proc hides (mounted with `hidepid`).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except ProcessLookupError:
        return None
    except FileNotFoundError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)  # sends nothing
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[_STARTED_FIELD])


def labels(run: str, network: str = "") -> dict[str, str]:
    """Return container labels. `network`: sandbox that owns its network."""
    return {
        LABEL: "1",
        LABEL_RUN: run,
        LABEL_OWNER: str(Owner.current()),
        LABEL_CREATED: f"{time.time():.0f}",
        LABEL_NETWORK: network,
    }
