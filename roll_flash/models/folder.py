"""What a Hugging Face model folder must hold: config, tokenizer, weights. Of the weights only headers are read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from roll_flash.checked_files import CONTENT_ERRORS
from roll_flash.errors import ModelError, first_line
from roll_flash.terminal import say

_BY_TOKEN = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of weights that have one row for each token of the vocabulary."""


def check_model_folder(folder: Path) -> None:
    """Raises ModelError naming the missing or unreadable file: config, tokenizer, weights or one weight shard; or if
    they do not fit each other, or `check_config` refuses the model."""
    try:
        _check(folder)
    except (OSError, *CONTENT_ERRORS) as error:  # files of another shape, which anybody may have written
        reason = f"{type(error).__name__}: {first_line(error)}"[:200]
        raise ModelError(f"{folder}: its files are not as save_pretrained writes them: {reason}") from error


def _check(folder: Path) -> None:
    config = check_config(folder)
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


def require_all_tensors(source: Path, model: object, missing: Iterable[str]) -> None:
    """Raises ModelError if tensors of a model are `missing` in what transformers has loaded it from: it gives them
    random values."""
    if names := sorted(missing):
        raise ModelError(
            f"{source}: {len(names)} tensors of {type(model).__name__} are not in its files, such as {names[0]}; "
            "copy the folder again, or look at config.json"
        )


def check_config(folder: Path) -> dict[str, Any]:
    """Return config.json. Raises ModelError if it is missing, or of a model that cannot be trained: one that
    transformers has no code for, with quantized weights, with an encoder, or not of text alone."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder}: no config.json; this is not a Hugging Face model folder")
    config = read_object(file)
    kind = config.get("model_type")
    if parts := [part for part in ("vision", "audio") if f"{part}_config" in config]:
        raise ModelError(
            f"{folder}: {kind} has a part for {' and '.join(parts)}, and only models of text alone "
            "can be trained; save its text part as a folder of its own (docs/models.md shows how)"
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{folder}: {kind} has an encoder, and only decoders can be trained; choose a causal language model, such "
            "as one of docs/models.md"
        )
    if not kind or not isinstance(kind, str):
        raise ModelError(f"{file}: names no model_type; copy the config.json of the model again")
    if not _has_package(kind):
        _check_listed(folder, kind, "auto_map" in config)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"{folder}: its weights are quantized ({method or 'quantization_config'}), and training needs plain ones; "
            "use the model that it was made from, in bfloat16 or float32"
        )
    return config


def _has_package(kind: str) -> bool:
    """True if a `model_type` is also the name of a package in transformers, as most are: that is seen in no time."""
    package = find_spec("transformers")
    places = package.submodule_search_locations if package else None
    return kind.isidentifier() and any((Path(place) / "models" / kind).is_dir() for place in places or ())


def _check_listed(folder: Path, kind: str, has_own_code: bool) -> None:
    """Raises ModelError if transformers does not list a `model_type`. The import of its list takes seconds."""
    say(f"{folder}: looking for model_type {kind!r} in the list of transformers (usually 3-10 s)", error=True)
    from transformers import CONFIG_MAPPING

    if kind in CONFIG_MAPPING:
        return
    own = ", and the code that comes with it (auto_map) is not run" if has_own_code else ""
    near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ModelError(
        f"{folder}: transformers {version('transformers')} has no model_type {kind!r}{own}; {meant}docs/models.md "
        "lists architectures that can be trained"
    )


def check_chat_template(folder: Path) -> None:
    """Raises ModelError if the tokenizer in the folder has no chat template."""
    file = folder / "tokenizer_config.json"
    settings = read_object(file) if file.is_file() else {}
    if "auto_map" in settings or settings.get("chat_template"):
        return
    if not any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        raise ModelError(
            f"{folder}: the tokenizer has no chat template; use an instruct model, or copy the chat_template.jinja of "
            "a model with the same tokenizer into the folder"
        )


def model_type(folder: Path) -> str:
    """Return `model_type` from config.json, such as `llama`; empty if absent."""
    return str(read_object(folder / "config.json").get("model_type", ""))


def read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
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
    model = read_object(file).get("model") or {}
    tokens = model.get("vocab") or ()
    return max(tokens.values(), default=-1) if isinstance(tokens, dict) else len(tokens) - 1


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights. Raises ModelError if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(read_object(index)["weight_map"].values()))
            outside = [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
        except (KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index}: not readable as an index of weights: {error}") from None
        if outside:
            raise ModelError(f"{index}: names {outside[0]!r}, which is not in its folder; copy the model again")
        return names
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder}: no weights (*.safetensors); save them with model.save_pretrained")
    if "model.safetensors" not in found:  # transformers looks for no other name
        raise ModelError(
            f"{folder}: the weights are incomplete: it has {found[0]}, but neither model.safetensors nor the list of "
            "its parts, model.safetensors.index.json; copy the folder again"
        )
    return found
