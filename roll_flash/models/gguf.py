"""GGUF files, as llama.cpp uses them: transformers computes dense weights from the quantized ones."""

from __future__ import annotations

import re
from pathlib import Path

from roll_flash.errors import ModelError, first_line

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf")


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
    """Write the model of a GGUF file, with its tokenizer, as dense float32 into an empty folder. Raises ModelError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if _SPLIT.search(source.name):
        raise ModelError(f"{source}: is one part of a split model; join them first (llama-gguf-split --merge)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except ImportError as error:
        raise ModelError(f"{source}: {first_line(error)}; pip install accelerate gguf") from None
    except Exception as error:  # of many kinds, for files that are cut short or of models that it does not know
        raise ModelError(f"{source}: transformers cannot read this GGUF file: {first_line(error)}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
