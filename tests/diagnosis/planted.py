"""Short real runs of the tiny model with a planted fault, and sound ones: `diagnose` must tell them apart.

    python -m tests.diagnosis.planted            # make all runs again and record them (minutes)
    python -m tests.diagnosis.planted NAME...    # only these

`catalogue.py` lists them. Each run trains with the project's own parts in one process (`one_process.py`). A recorded
run is its folder without tokens, checkpoints and logs, compressed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml

from roll_flash.config.tree import load_config
from roll_flash.monitor.episode_files.steps import open_step, step_files
from tests.diagnosis.catalogue import ALL, BASE, SANDBOX, Planted

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"


def make(planted: Planted, runs: Path) -> tuple[Path, str]:
    """Train it; return the folder of the run, and what the terminal would show."""
    from tests.diagnosis import environments, faults
    from tests.diagnosis.one_process import train_in_one_process

    about = {"name": planted.name, "runs": str(runs), "envs": list(planted.envs), "stages": list(planted.stages)}
    config = load_config({**BASE, **about}, tuple(planted.words))
    uses_sandboxes = any(each["id"] == SANDBOX for each in planted.envs)
    with getattr(faults, planted.fault)() if planted.fault is not None else nullcontext():
        shown = train_in_one_process(
            config,
            uses_sandboxes=uses_sandboxes,
            learner_temperature=planted.learner_temperature,
            stops_after=planted.stops_after,
        )
    environments.KEPT.clear()
    return config.run_folder, shown


def record(folder: Path, archive: Path) -> None:
    """Write the parts of a run folder that a diagnosis reads, without tokens, always the same bytes."""
    archive.parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name, content in _parts(folder):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _parts(folder: Path) -> Iterator[tuple[str, bytes]]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    yield "config.yaml", yaml.safe_dump({**config, "runs": "runs"}).encode()
    for path in [folder / "metrics.jsonl", *step_files(folder / "episodes")]:
        with open_step(path) as written:
            lines = [json.dumps(_short(json.loads(line)), separators=(",", ":")) for line in written]
        yield str(path.relative_to(folder)), "".join(f"{line}\n" for line in lines).encode()
    first, *_ = (folder / "logs/timeline.jsonl").read_text().splitlines()
    yield "logs/timeline.jsonl", f"{first}\n".encode()


LEFT_OUT = ("crc32", "token_ids", "policy_mask", "logprobs", "versions", "messages", "info", "branches", "env_seed")


def _short(value: Any) -> Any:
    """Round numbers and leave out what is large."""
    match value:
        case float():
            return float(f"{value:.5g}") if abs(value) < 1e6 else round(value, 2)
        case dict():
            return {key: _short(item) for key, item in value.items() if key not in LEFT_OUT}
        case list():
            return [_short(item) for item in value]
    return value


def unpack(name: str, folder: Path) -> Path:
    """Unpack a recorded run into a new folder below `folder`."""
    target = folder / name
    target.mkdir()
    with tarfile.open(RECORDED / f"{name}.tar.xz") as tar:
        for member in tar.getmembers():
            path = target / member.name
            path.parent.mkdir(exist_ok=True)
            file = tar.extractfile(member)
            assert file is not None
            path.write_bytes(file.read())
    return target


def main(arguments: Sequence[str]) -> None:
    by_name = {planted.name: planted for planted in ALL}
    os.nice(10)
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as runs:
        for name in arguments or by_name:
            folder, _ = make(by_name[name], Path(runs))
            record(folder, RECORDED / f"{name}.tar.xz")
            print(name, (RECORDED / f"{name}.tar.xz").stat().st_size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
