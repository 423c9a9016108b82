"""Short real runs of the tiny model with a planted fault, and sound ones: `diagnose` must tell them apart.

    python -m tests.diagnosis.planted            # make all runs again and record them (minutes)
    python -m tests.diagnosis.planted NAME...    # only these

Each run trains with the project's own parts in one process (`one_process.py`). A recorded run is its folder without
tokens, checkpoints and logs, compressed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll_flash.config.tree import load_config
from roll_flash.monitor.episode_files.steps import open_step, step_files
from tests.diagnosis.environments import STOP

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"

BASE: Mapping[str, Any] = {
    "steps": 16,
    "model": {"path": "tiny", "max_length": 256},
    "inference": {"engine": "transformers"},
    "scheduler": {"groups_per_step": 3, "group_size": 4},
    "rollout": {"max_concurrent": 8, "max_new_tokens": 24, "stop": STOP, "retries": 0},
    "learner": {"learning_rate": 1e-3, "warmup_steps": 5},
    "checkpoint": {"every_minutes": 0},
    "eval": {"before_and_after": False},
    "monitor": {"tensorboard": False},
}
SENTENCES = "tests.diagnosis.environments:Sentences-v0"
SANDBOX = "tests.diagnosis.environments:SandboxSentences-v0"
LOOKUP = "tests.diagnosis.environments:Lookup-v0"


def env(id: str = SENTENCES, *, turns: int = 1, weight: float = 1.0, **kwargs: Any) -> dict[str, Any]:
    return {"id": id, "max_turns": turns, "weight": weight, "kwargs": kwargs}


@dataclass(frozen=True)
class Planted:
    """A run: words that change BASE, and a fault of the machinery that no config has."""

    name: str
    expected: tuple[str, ...]
    """Findings that it must have, the first of them first; empty: it must have none at all."""
    envs: Sequence[Mapping[str, Any]]
    words: Sequence[str] = ()
    has_stale_cache: bool = False
    learner_temperature: float | None = None


ONE_CHARACTER = ["rollout.max_new_tokens=1", "rollout.stop=[]"]
SOUND = (
    Planted("sound-letters", (), [env()]),
    Planted("sound-sandbox", (), [env(SANDBOX, turns=2)], ["sandbox.provider=local", "steps=8"]),
    Planted(
        "sound-mixture",
        (),
        [
            {**env(weight=2), "levels": [{"shortest": 1}, {"shortest": 3}]},
            env(seconds=0.02),
        ],
        ["scheduler.async_ratio=2", "scheduler.on_stale=requeue", "steps=12"],
    ),
    Planted(
        "sound-synchronous",
        (),
        [env(LOOKUP, turns=2)],
        [*ONE_CHARACTER, "scheduler.async_ratio=0", "learner.advantage=rloo", "steps=12"],
    ),
)
FAULTY = (
    Planted("reward-for-nothing", ("reward-without-success",), [env(pays_for_nothing=True)], ["steps=24"]),
    Planted(
        "learner-temperature",
        ("mismatch-temperature",),
        [env()],
        ["rollout.temperature=0.6", "steps=12", "learner.warmup_steps=0"],
        learner_temperature=1.0,
    ),
    Planted(
        "stale-cache",
        ("mismatch-stale-cache",),
        [{**env(), "train_seeds": [0, 8]}],
        ["steps=12", "learner.warmup_steps=0"],
        has_stale_cache=True,
    ),
    Planted("broken-level", ("level-always-fails",), [env(), env(impossible=True)], ["steps=9"]),
    Planted(
        "hung-sandbox",
        ("sandbox-hangs",),
        [env(SANDBOX, turns=2, hangs=True)],
        ["sandbox.provider=local", "rollout.step_timeout_s=2", "steps=8", "scheduler.max_failures_in_a_row=1000"],
    ),
    Planted(
        "clipped-lengths",
        ("clipped-answers",),
        [env()],
        ["rollout.max_new_tokens=4", "steps=5", "learner.learning_rate=3e-4"],
    ),
    Planted(
        "lying-tool",
        ("inconsistent-answers",),
        [{**env(LOOKUP, turns=2, lies=0.3), "train_seeds": [0, 4]}],
        [*ONE_CHARACTER, "scheduler.group_size=8", "rollout.max_concurrent=24", "steps=10"],
    ),
    Planted(
        "learning-rate-30",
        ("policy-moves-too-fast",),
        [env()],
        ["learner.learning_rate=3e-2", "learner.warmup_steps=0"],
    ),
)
ALL = (*SOUND, *FAULTY)


def make(planted: Planted, runs: Path) -> Path:
    """Train it; return the folder of the run."""
    from tests.diagnosis.faults import stale_prefix_cache
    from tests.diagnosis.one_process import train_in_one_process

    tree = {**BASE, "name": planted.name, "runs": str(runs), "envs": list(planted.envs)}
    config = load_config(tree, tuple(planted.words))
    uses_sandboxes = any(each["id"] == SANDBOX for each in planted.envs)
    with stale_prefix_cache() if planted.has_stale_cache else nullcontext():
        train_in_one_process(config, uses_sandboxes=uses_sandboxes, learner_temperature=planted.learner_temperature)
    return config.run_folder


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
            folder = make(by_name[name], Path(runs))
            record(folder, RECORDED / f"{name}.tar.xz")
            print(name, (RECORDED / f"{name}.tar.xz").stat().st_size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
