"""Folders that the ranks write while the learner goes on: copied aside first, then written, then named, atomically."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from roll_flash.errors import CheckpointError
from roll_flash.learner.ranks import checkpoint
from roll_flash.processes.background import begin_in_background, in_thread

_POLL_S = 0.1
"""Between two questions whether all is written."""


async def write_in_background(
    folder: Path,
    *,
    begin: Callable[[Path], Awaitable[Any]],
    has_written: Callable[[Path], Awaitable[bool]],
    timeout_s: float,
    replaces: bool = False,
    manifest: dict[str, Any] | None = None,
) -> asyncio.Task[None]:
    """Returns when `begin` has copied what is to be written; the task ends when `folder` is complete.

    `manifest`: metadata of a checkpoint, written last. Raises CheckpointError, here or from the task, when the disk
    says no or it takes longer than `timeout_s`, and whatever `begin` and `has_written` raise; nothing is left then.
    """

    async def write(copied: asyncio.Event) -> None:
        async with in_thread(checkpoint.new_folder(folder, replaces=replaces)) as partial:
            await begin(partial)
            copied.set()
            await _until_written(folder, partial, has_written, timeout_s)
            if manifest is not None:
                await asyncio.to_thread(checkpoint.write_manifest, partial, manifest)

    return await begin_in_background(write)


async def _until_written(
    folder: Path, partial: Path, has_written: Callable[[Path], Awaitable[bool]], timeout_s: float
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await has_written(partial):  # noqa: ASYNC110 - another process writes, and can set no event here
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise CheckpointError(f"{folder}: not written within {timeout_s:g} s (learner.step_timeout_s)") from None
