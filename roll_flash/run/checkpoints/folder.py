"""Writes and reads complete, atomic folders: models and checkpoints. Imports no torch, for the driver.

A checkpoint has a file `learner.json`, written last, which lists every file with its size. A folder without it, or with
files that differ from it, is incomplete. Each folder is written as a temporary sibling and then renamed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from roll_flash.checked_files import Count, decode, read_checked
from roll_flash.errors import CheckpointError
from roll_flash.processes.background import begin_in_background, in_thread
from roll_flash.run.files import sync, sync_tree

MANIFEST = "learner.json"
_FORMAT = 1
_POLL_S = 0.1
"""Interval in seconds between two checks that all files are written."""


@contextmanager
def new_folder(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling folder, which is synced to disk and renamed to `folder` when the block ends.

    After an error the temporary folder is removed. Raises CheckpointError if `folder` exists (unless `replaces`) or
    cannot be written.
    """
    if folder.exists() and not replaces:
        raise CheckpointError(f"{folder}: exists already; choose a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if partial.exists():  # left by a process that was killed while writing
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        replace_folder(partial, folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def replace_folder(new: Path, final: Path) -> None:
    """Rename `new` to `final`; remove the previous one only after the replacement."""
    old = final.with_name(f"{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


class Manifest(msgspec.Struct):
    """What `write_manifest` wrote, as far as it is read."""

    format: int
    model: str = ""
    version: Count = 0
    entropy_weight: float | None = None
    entropy_applies: bool = True
    """State of `EntropyControl`; none in checkpoints of older versions."""
    frozen: str | None = None
    """Digest of the weights that it does not have; None in checkpoints of older versions, which have them all."""
    files: dict[str, Count] = {}


def write_manifest(folder: Path, metadata: dict[str, Any]) -> None:
    """Write the list of files with their sizes. Must be the last write to the folder."""
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    head = {"format": _FORMAT, "id": secrets.token_hex(16), **metadata}
    (folder / MANIFEST).write_text(json.dumps({**head, "files": files}, indent=1))


def read_manifest(folder: Path, model_fingerprint: str, frozen: str = "") -> Manifest:
    """Return the metadata of a complete checkpoint of this model, whose frozen weights have the digest `frozen`. Raises
    CheckpointError for any mismatch."""
    try:
        manifest = decode(read_checked(folder / MANIFEST), Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a complete checkpoint (no {MANIFEST}); use an older one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read: {error}; use an older checkpoint") from None
    if manifest.format != _FORMAT:
        raise CheckpointError(f"{folder}: format {manifest.format}, this version reads {_FORMAT}")
    if manifest.model != model_fingerprint:
        raise CheckpointError(f"{folder}: written for another model; set model.path to the one it was made from")
    if manifest.frozen not in (None, frozen):
        raise CheckpointError(
            f"{folder}: its adapters were trained on other weights than model.path has now; put those back"
        )
    for name, size in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} of {size} bytes"
            raise CheckpointError(f"{path}: truncated or missing ({state}); use an older checkpoint")
    return manifest


async def write_in_background(
    folder: Path,
    *,
    folders_of_ranks: Callable[[Path], AbstractAsyncContextManager[Sequence[Path]]],
    begin: Callable[[Sequence[Path]], Awaitable[Any]],
    has_written: Callable[[Sequence[Path]], Awaitable[bool]],
    timeout_s: float,
    replaces: bool = False,
    manifest: dict[str, Any] | None = None,
) -> asyncio.Task[None]:
    """Return a task once `begin` has copied the data to write; the task ends when `folder` is complete.

    `folders_of_ranks` gives each rank the folder that it writes into, and collects their files in the end.

    `manifest` is the metadata of a checkpoint, written last. Raises CheckpointError, here or from the task, if the
    folder cannot be written or `timeout_s` expires, and any error of `begin` and `has_written`; no files remain then.
    """

    async def write(copied: asyncio.Event) -> None:
        async with in_thread(new_folder(folder, replaces=replaces)) as partial:
            try:
                async with asyncio.timeout(timeout_s), folders_of_ranks(partial) as folders:
                    await begin(folders)
                    copied.set()
                    while not await has_written(folders):  # noqa: ASYNC110 - another process writes and sets no event here
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                message = f"{folder}: not written within {timeout_s:g} s (learner.step_timeout_s)"
                raise CheckpointError(message) from None
            if manifest is not None:
                await asyncio.to_thread(write_manifest, partial, manifest)

    return await begin_in_background(write)
