"""`roll-flash checkpoints ls | verify | rm | get`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roll_flash.cli.options import Json, argument, example, runs_like, show
from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.run.checkpoints.store import CheckpointStore
    from roll_flash.run.run_dir import Checkpoint

app = typer.Typer()
RunOrUrl = Annotated[str, argument("RUN", "A run's name or folder, or the URL of its copies.", runs_like)]


@app.command(epilog=example("checkpoints ls mine"))
def ls(run: RunOrUrl, as_json: Json = False) -> int:
    """List checkpoints; files are compared by their sizes only, and those of copies not at all."""
    from roll_flash.run.checkpoints.store import CheckpointStore, is_url
    from roll_flash.run.run_dir import find_run, list_checkpoints

    if is_url(run):
        store = CheckpointStore(run)
        rows = [_row_of_copy(store, copy, reads=False) for copy in store.steps()]
    else:
        rows = [_row(checkpoint, sizes_only=True) for checkpoint in list_checkpoints(find_run(run))]
    show(rows, _table(rows), as_json=as_json)
    return 0


@app.command(epilog=example("checkpoints verify mine"))
def verify(
    run: RunOrUrl,
    step: Annotated[int | None, argument("STEP", "Only the checkpoint of this step.")] = None,
    as_json: Json = False,
) -> int:
    """Read checkpoints from the disk, or copies from their store, and compare their files with the checksums."""
    from roll_flash.run.checkpoints.store import CheckpointStore, is_url
    from roll_flash.run.run_dir import find_checkpoint, find_run, list_checkpoints

    if is_url(run):
        store = CheckpointStore(run)
        steps = store.steps() if step is None else store.require([step])
        rows = [_row_of_copy(store, copy, reads=True) for copy in steps]
    else:
        folder = find_run(run)
        found = list_checkpoints(folder) if step is None else [find_checkpoint(f"{folder}@{step}")]
        rows = [_row(checkpoint, sizes_only=False) for checkpoint in found]
    show(rows, _table(rows), as_json=as_json)
    return 1 if any(row["damage"] for row in rows) else 0


@app.command(epilog=example("checkpoints rm mine 10 20"))
def rm(run: RunOrUrl, steps: Annotated[list[int], argument("STEP...", "Steps of the checkpoints to remove.")]) -> int:
    """Remove checkpoints of a run that has ended, but never the newest whole one; or any copies."""
    from roll_flash.run.checkpoints.store import CheckpointStore, is_url
    from roll_flash.run.run_dir import find_run, remove_checkpoints

    place: object = run
    if is_url(run):
        store = CheckpointStore(run)
        store.remove(store.require(steps))
    else:
        place = find_run(run)
        remove_checkpoints(place, steps)
    say(f"{place}: removed the checkpoints of steps {', '.join(map(str, sorted(set(steps))))}")
    return 0


@app.command(epilog=example("checkpoints get s3://bucket/copies/mine"))
def get(
    url: Annotated[str, argument("URL", "Of the copies of a run: `checkpoint.copy_to` with the run's name.")],
    step: Annotated[int | None, argument("STEP", "Of which checkpoint; the newest by default.")] = None,
) -> int:
    """Copy a checkpoint back into a run folder here, for `train --resume`, `eval` or `export`."""
    from roll_flash.run.checkpoints.store import CheckpointStore, fetch_checkpoint

    checkpoint = fetch_checkpoint(CheckpointStore(url), step)
    config = checkpoint.folder.parents[1] / "config.yaml"
    say(f"{checkpoint.folder}: as it was written; go on with `roll-flash train {config} --resume`")
    return 0


def _row_of_copy(store: CheckpointStore, step: int, *, reads: bool) -> dict[str, Any]:
    return {
        "step": step,
        "time": store.written_at(step),
        "bytes": store.num_bytes(step),
        "has_checksums": True,
        "is_read": reads,
        "damage": store.find_damage(step) if reads else None,
    }


def _row(checkpoint: Checkpoint, *, sizes_only: bool) -> dict[str, Any]:
    from roll_flash.run.checkpoints.checksums import find_damage, has_checksums
    from roll_flash.run.run_dir import COMPLETE

    written = datetime.fromtimestamp((checkpoint.folder / COMPLETE).stat().st_mtime).astimezone()
    sizes = [path.stat().st_size for path in checkpoint.folder.rglob("*") if path.is_file()]
    return {
        "step": checkpoint.step,
        "time": written.isoformat(timespec="seconds"),
        "bytes": sum(sizes),
        "has_checksums": has_checksums(checkpoint.folder),
        "damage": find_damage(checkpoint.folder, sizes_only=sizes_only),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'step':>8}  {'time':25}  {'size':>10}  state"]
    for row in rows:
        whole = "whole" if row["has_checksums"] else "unknown: an older version wrote it without checksums"
        whole = whole if row.get("is_read", True) else "complete, unread"
        state = f"damaged: {row['damage']}" if row["damage"] else whole
        lines.append(f"{row['step']:>8}  {row['time']}  {row['bytes'] / 2**20:>6,.0f} MiB  {state}")
    return "\n".join(lines) if rows else "no complete checkpoints"
