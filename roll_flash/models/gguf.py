"""GGUF files, as llama.cpp uses them: transformers computes dense weights from the quantized ones."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from roll_flash.errors import ModelError, first_line
from roll_flash.models.folder import require_all_tensors

FORM = "2"
"""Changed when `write_dense` refuses or writes something else, so that old folders are not used again."""
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf")
_GEMMA_27B = (46, 62)
"""Layers of those of gemma2 and gemma3 whose attention has a scale of its own, by which llama.cpp knows them too."""


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or holds; None if it is something else. Raises ModelError for several."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1 and not _SPLIT.search(found[0].name):
        names = ", ".join(file.name for file in found)
        raise ModelError(f"{path}: holds {len(found)} GGUF files; give the path of one of them: {names}")
    return found[0] if found else None


def write_dense(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file, with its tokenizer, as dense float32 into an empty folder. Raises ModelError,
    also if transformers would leave out something of the file, and so make another model of it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if _SPLIT.search(source.name):
        raise ModelError(f"{source}: is one part of a split model; join them first (llama-gguf-split --merge)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
        model = loaded[0]
        lost = _what_is_lost(source, model)
    except ImportError as error:
        raise ModelError(f"{source}: {first_line(error)}; pip install accelerate gguf") from None
    except Exception as error:  # of many kinds, for files that are cut short or of models that it does not know
        raise ModelError(f"{source}: transformers cannot read this GGUF file: {first_line(error)}") from error
    require_all_tensors(source, model, loaded[1]["missing_keys"])
    if lost is not None:
        raise ModelError(
            f"{source}: transformers does not read {lost} of a GGUF file of this kind, so that it would be another "
            "model; take the folder or the hub's name of the model that it was made from"
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _what_is_lost(source: Path, model: Any) -> str | None:
    """Return what a file says of its model that `model`, which transformers has made of it, does not have."""
    from gguf import GGUFReader

    reader: Any = GGUFReader(source)
    kind = reader.get_field("general.architecture").contents()

    def value(key: str) -> Any:
        field = reader.get_field(f"{kind}.{key}")
        return None if field is None else field.contents()

    if (scaling := value("rope.scaling.type")) not in (None, "none"):
        return f"the scaling of RoPE ({scaling})"
    for tensor in reader.tensors:  # of Llama 3 and longrope; transformers knows gemma4's without them
        if tensor.name.startswith(("rope_freqs", "rope_factors")) and kind != "gemma4" and (tensor.data != 1).any():
            return f"the scaling of RoPE ({tensor.name})"
    rotary = getattr(model.base_model, "rotary_emb", None)
    if (rope := lost_rope(rotary, value("rope.dimension_count"), value("rope.freq_base"))) is not None:
        return rope
    biases = [tensor.name for tensor in reader.tensors if tensor.name.endswith(".bias")]
    if biases and not any(name.endswith("bias") for name in model.state_dict()):
        return f"the biases ({biases[0]})"
    window = value("attention.sliding_window") or math.inf
    if window < (value("context_length") or 0) and window != getattr(model.config, "sliding_window", None):
        return f"the sliding window of {window} tokens"
    if kind in ("gemma2", "gemma3") and value("block_count") in _GEMMA_27B:
        return "the scale of attention"
    return None


def lost_rope(rotary: Any, size: int | None, base: float | None) -> str | None:
    """Return what a file says of RoPE that a model's rotary embedding does not have; None if they agree, or one says
    nothing."""
    import torch

    frequencies = getattr(rotary, "inv_freq", None)
    if frequencies is None or size is None:
        return None
    expected = (base or 10_000.0) ** -(torch.arange(0, size, 2) / size)
    if frequencies.shape == expected.shape and torch.allclose(frequencies.cpu(), expected, rtol=1e-3):
        return None
    return f"the RoPE of {size} dimensions with base {base}"
