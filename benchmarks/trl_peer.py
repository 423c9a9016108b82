"""TRL in an environment of its own, with the torch and transformers of this one: the other side of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from roll_flash.learner.packing.rows import TrainSequence

VERSION = "1.16.0"
INSTALL_TIMEOUT_S = 600
_SIDE = Path(__file__).with_name("learner_trl.py")


class Peer:
    """Answers each `run` with the seconds of one forward and backward pass over all groups."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout
        self._read()  # it is ready

    def run(self) -> dict[str, float]:
        self._stdin.write("\n")
        self._stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        line = self._stdout.readline()
        if not line:
            raise RuntimeError("TRL's side of the benchmark ended; its messages are above")
        found: dict[str, float] = json.loads(line)
        return found


@contextmanager
def open_peer(
    model_folder: Path, groups: Sequence[Sequence[TrainSequence]], threads: int, environment: Path | None = None
) -> Iterator[Peer]:
    """Install TRL (unless `environment` has it) and start its side on `groups`. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = (environment or install(folder / "environment")) / "bin" / "python"
        save_groups(groups, folder / "groups.npz")
        command = [str(python), str(_SIDE), str(model_folder), str(folder / "groups.npz"), str(threads)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield Peer(process)
        finally:
            process.kill()
            process.wait(timeout=30)


def install(folder: Path) -> Path:
    """A virtual environment with TRL whose other packages are those of this interpreter: the same torch."""
    venv.create(folder, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = folder / "lib" / version / "site-packages" / "learner_environment.pth"
    shared.write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, f"trl=={VERSION}"], check=True, timeout=INSTALL_TIMEOUT_S, stdout=sys.stderr)
    return folder


def save_groups(groups: Sequence[Sequence[TrainSequence]], path: Path) -> None:
    """The groups as padded arrays [replicas, tokens]."""
    arrays: dict[str, Any] = {"groups": len(groups)}
    for index, group in enumerate(groups):
        arrays[f"tokens{index}"] = _padded([s.token_ids for s in group], np.int64)
        arrays[f"mask{index}"] = _padded([s.policy_mask for s in group], np.bool_)
        arrays[f"behavior{index}"] = _padded([s.behavior_logprobs for s in group], np.float32)
        arrays[f"lengths{index}"] = np.array([len(s.token_ids) for s in group])
        arrays[f"advantages{index}"] = np.array([s.advantages[0] for s in group], np.float32)
        arrays[f"prompt{index}"] = int(np.argmax(group[0].policy_mask))
    np.savez(path, allow_pickle=False, **arrays)


def _padded(rows: Sequence[Any], dtype: Any) -> Any:
    longest = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows]).astype(dtype)
