"""How many tokens a model can read, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll_flash.errors import ModelError

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_ALREADY_COUNTED = ("default", "llama3", "longrope", "su", "mrope", "proportional")
"""Kinds of RoPE scaling whose `max_position_embeddings` is the longest text, scaling included, as vLLM reads it."""


def context_length(folder: Path) -> int | None:
    """Return the maximum number of tokens, RoPE scaling included; None if config.json does not say."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    lengths = [config[name] for name in _NAMES if isinstance(config.get(name), int)]
    if not lengths:
        return None
    return int(min(lengths) * max([1.0, *(_factor(rope, min(lengths)) for rope in _scalings(config))]))


def check_context_length(folder: Path, max_length: int) -> None:
    """Raises ModelError if episodes of `max_length` tokens are longer than what the model can read."""
    longest = context_length(folder)
    if longest is not None and max_length > longest:
        raise ModelError(
            f"model.max_length={max_length:,} is more than the {longest:,} tokens that {folder} can read (config.json, "
            "RoPE scaling included); lower it"
        )


def within_context(folder: Path, tokens: int) -> int:
    """Return `tokens`, or the number of tokens that the model can read if that is smaller."""
    return min(tokens, context_length(folder) or tokens)


def _scalings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the RoPE settings: one mapping, or one for each type of layer."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    parts = [part for part in found.values() if isinstance(part, Mapping)]
    return parts or [found]


def _factor(rope: Mapping[str, Any], length: int) -> float:
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor", 1.0)
    if kind in _ALREADY_COUNTED or not isinstance(factor, int | float):
        return 1.0
    original = rope.get("original_max_position_embeddings")
    return factor * (original / length if kind == "yarn" and isinstance(original, int) else 1.0)
