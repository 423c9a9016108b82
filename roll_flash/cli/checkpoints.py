"""`roll-flash checkpoints ls | verify | rm`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roll_flash.cli.options import Json, RunName, argument, example, show
from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.run.run_dir import Checkpoint

app = typer.Typer()


@app.command(epilog=example("checkpoints ls mine"))
def ls(run: RunName, as_json: Json = False) -> int:
    """List checkpoints; files are compared by their sizes only."""
    from roll_flash.run.run_dir import find_run, list_checkpoints

    rows = [_row(checkpoint, sizes_only=True) for checkpoint in list_checkpoints(find_run(run))]
    show(rows, _table(rows), as_json=as_json)
    return 0


@app.command(epilog=example("checkpoints verify mine"))
def verify(
    run: RunName,
    step: Annotated[int | None, argument("STEP", "Only the checkpoint of this step.")] = None,
    as_json: Json = False,
) -> int:
    """Read checkpoints from the disk and compare their files with the checksums."""
    from roll_flash.run.run_dir import find_checkpoint, find_run, list_checkpoints

    folder = find_run(run)
    found = list_checkpoints(folder) if step is None else [find_checkpoint(f"{folder}@{step}")]
    rows = [_row(checkpoint, sizes_only=False) for checkpoint in found]
    show(rows, _table(rows), as_json=as_json)
    return 1 if any(row["damage"] for row in rows) else 0


@app.command(epilog=example("checkpoints rm mine 10 20"))
def rm(run: RunName, steps: Annotated[list[int], argument("STEP...", "Steps of the checkpoints to remove.")]) -> int:
    """Remove checkpoints of a run that has ended, but never the newest whole one."""
    from roll_flash.run.run_dir import find_run, remove_checkpoints

    folder = find_run(run)
    remove_checkpoints(folder, steps)
    say(f"{folder}: removed the checkpoints of steps {', '.join(map(str, sorted(set(steps))))}")
    return 0


def _row(checkpoint: Checkpoint, *, sizes_only: bool) -> dict[str, Any]:
    from roll_flash.run.checksums import find_damage, has_checksums
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
        state = f"damaged: {row['damage']}" if row["damage"] else whole
        lines.append(f"{row['step']:>8}  {row['time']}  {row['bytes'] / 2**20:>6,.0f} MiB  {state}")
    return "\n".join(lines) if rows else "no complete checkpoints"
