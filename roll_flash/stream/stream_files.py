"""A stream's state in a folder of a checkpoint: `stream.json` and `stream.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from roll_flash.errors import CheckpointError
from roll_flash.stream.stream import SavedRows, TrajectoryStream

CONTROL, DATA = "stream.json", "stream.safetensors"


async def save_stream(stream: TrajectoryStream, folder: Path) -> None:
    """Write what is left in the stream into an existing folder. Raises CheckpointError when it cannot be written."""
    control, rows = await stream.state()
    arrays = {
        f"{row_id}/{name}": np.ascontiguousarray(array) for row_id, row in rows.items() for name, array in row.items()
    }
    try:
        save_file(arrays, folder / DATA)
        (folder / CONTROL).write_text(json.dumps(control))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the stream could not be saved: {error}") from error


async def load_stream(stream: TrajectoryStream, folder: Path) -> None:
    """Bring back what `save_stream` wrote, into a stream of the same consumers that nothing was put into.

    Raises CheckpointError for files that are missing or damaged, StreamError for another stream's.
    """
    try:
        control = json.loads((folder / CONTROL).read_text())
        arrays = load_file(folder / DATA)
        rows: SavedRows = {row_id: {} for row_id, *_ in control["rows"]}
        for key, array in arrays.items():
            row_id, _, name = key.partition("/")
            rows[int(row_id)][name] = array
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: not readable as a saved stream: {error}") from None
    await stream.restore(control, rows)
