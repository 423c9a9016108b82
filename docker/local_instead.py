"""What is said where no container can be had, and whether sandboxes can be had at all."""

from __future__ import annotations

import sys

from roll_flash.doctor import Check


def use_local(reason: str, bubblewrap: Check) -> int:
    """The exit status: 0 if the weaker `local` sandbox can be used instead, 1 if none can."""
    if bubblewrap.ok:
        print(f"sandbox: the weaker `local` sandbox (bubblewrap) is used, because {reason}")
        return 0
    print(
        f"sandbox: none can be used: {reason}; and bubblewrap: {bubblewrap.detail} ({bubblewrap.fix})", file=sys.stderr
    )
    return 1
