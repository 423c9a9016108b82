"""Who owns a sandbox, in a way that survives the reuse of process ids and a reboot."""

from __future__ import annotations

import hashlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

LABEL = "roll-flash.sandbox"
LABEL_RUN = "roll-flash.run"
LABEL_OWNER = "roll-flash.owner"
LABEL_DEADLINE = "roll-flash.deadline"
LABEL_CREATED = "roll-flash.created"
LABEL_NETWORK = "roll-flash.network"

_STARTED_FIELD = 19


DOCKER_USERS = range(0x78000000, 0x7C000000)
LOCAL_USERS = range(0x7C000000, 0x7FFFFFFF)
"""Users that nobody else gives out: above what directory services (SSSD) and containers (subuid, systemd) take."""
REMAPPED_USERS = range(10_000, 65_000)
"""In a user namespace, which has 65,536; the engine maps them to users of the machine that are nobody else's."""
GROUP = 1000


def new_user(users: range) -> tuple[str, int]:
    """A sandbox's name, and the user that belongs to it.

    An engine has a name only once, so no two of its live containers have one user, whoever made them, and a user is
    free again when its container is gone, also if its controller was killed.
    """
    user = random.SystemRandom().choice(users)
    return f"roll-flash-{user:08x}", user


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: machine boot, process id, and when it started (clock ticks since boot)."""

    boot: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.boot}:{self.pid}:{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Raises ValueError."""
        boot, pid, started = text.split(":")
        return cls(boot, int(pid), int(started))

    @classmethod
    def current(cls) -> Owner:
        pid = os.getpid()
        started = process_started(pid)
        assert started is not None, "a process can read its own /proc entry"
        return cls(boot_id(), pid, started)

    def lives(self) -> bool | None:
        """None if it is a process of another machine (or another process namespace), of which nothing is known."""
        if self.boot != boot_id():
            return None
        return process_started(self.pid) == self.started


def boot_id() -> str:
    """Names this boot of this machine and this process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def short_boot_id() -> str:
    """The same for names: eight hexadecimal digits."""
    return hashlib.sha256(boot_id().encode()).hexdigest()[:8]


def process_started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[_STARTED_FIELD])


def labels(run: str, deadline: float | None, network: str = "") -> dict[str, str]:
    """`deadline` in seconds since 1970; None for none. `network`: the sandbox whose internal network it is on."""
    return {
        LABEL: "1",
        LABEL_RUN: run,
        LABEL_OWNER: str(Owner.current()),
        LABEL_DEADLINE: "" if deadline is None else f"{deadline:.0f}",
        LABEL_CREATED: f"{time.time():.0f}",
        LABEL_NETWORK: network,
    }
