"""Low-rank adapters in the format of PEFT, and their sum with the model they were trained on.

A folder has `adapter_config.json` and `adapter_model.safetensors`, where layer N has A [rank, in] as
`base_model.model.N.lora_A.weight` and B [out, rank] as `base_model.model.N.lora_B.weight` (arXiv 2106.09685, section
4.1): W becomes W + alpha / rank * B A.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_flash.errors import ModelError, first_line
from roll_flash.models.folder import read_object, require_all_tensors
from roll_flash.models.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "alora_invocation_tokens",
    "layer_replication",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)
"""Settings of PEFT with which the sum is another one, or with weights beside the factors."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights alone. With others, such as `pissa` and `olora`,
PEFT subtracts the first B A from them each time it loads the adapter."""


def is_adapter_folder(path: Path) -> bool:
    """True for a folder of PEFT without the model itself."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def base_of(folder: Path) -> tuple[str, str | None]:
    """Return the name or folder of the model that an adapter is for, and its revision. Raises ModelError if the adapter
    cannot be merged."""
    config = read_object(folder / ADAPTER_CONFIG)
    base, kind = config.get("base_model_name_or_path"), config.get("peft_type")
    odd = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias") not in (None, "none"):
        odd.append("bias")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        odd.append(f"init_lora_weights={config['init_lora_weights']}")
    if kind != "LORA" or odd:
        why = f"it is of type {kind}" if kind != "LORA" else f"it uses {odd[0]}"
        raise ModelError(
            f"{folder}: only plain LoRA adapters are merged here, and {why}; merge it with PEFT (merge_and_unload) and "
            "give the folder that save_pretrained writes"
        )
    if not isinstance(base, str) or not base:
        raise ModelError(f"{folder / ADAPTER_CONFIG}: names no base_model_name_or_path; put the model's name or folder")
    revision = config.get("revision")
    return base, revision if isinstance(revision, str) else None


def scale_of(config: Mapping[str, Any]) -> float:
    """alpha / rank; alpha / sqrt(rank) with `use_rslora` (arXiv 2312.03732)."""
    rank = config["r"]
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def write_merged(folder: Path, base: Path, target: Path) -> None:
    """Write the sum of the adapter in `folder` and the model in `base` into an empty folder, in the model's dtype, with
    the adapter's tokenizer if it has one. Raises ModelError if they do not fit each other."""
    from transformers import AutoModelForCausalLM

    scale, factors = scale_of(read_object(folder / ADAPTER_CONFIG)), _factors(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", output_loading_info=True)
    model = loaded[0]
    require_all_tensors(base, model, loaded[1]["missing_keys"])
    for name, (down, up) in factors.items():
        _add(folder, base, model, name, scale * up.float() @ down.float())
    model.save_pretrained(target)
    _copy_tokenizer(base, target)
    if (folder / "tokenizer_config.json").is_file():
        _copy_tokenizer(folder, target)


def _add(folder: Path, base: Path, model: Any, name: str, change: Tensor) -> None:
    from torch import nn, no_grad

    try:
        layer = model.get_submodule(name)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear) or layer.weight.shape != change.shape:
        found = f"shape {tuple(layer.weight.shape)}" if isinstance(layer, nn.Linear) else "no such linear layer"
        raise ModelError(
            f"{folder}: the adapter changes {name} by {tuple(change.shape)}, and {base} has {found}; put the model "
            f"that it was trained on in {ADAPTER_CONFIG}"
        )
    if layer.weight is model.get_input_embeddings().weight:
        raise ModelError(
            f"{folder}: the adapter changes {name}, which is the embedding too; untie them, and merge with PEFT"
        )
    with no_grad():
        layer.weight.copy_(layer.weight.float() + change)


def _factors(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by the name of their layer."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder}: no {ADAPTER_WEIGHTS}; save the adapter again with safe_serialization=True")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read ({first_line(error)}); copy the file again") from None
    names = {name.removesuffix(end) for name in tensors for end in _FACTORS if name.endswith(end)}
    odd = sorted(tensors.keys() - {name + end for name in names for end in _FACTORS})
    single = [name for name in sorted(names) if not all(name + end in tensors for end in _FACTORS)]
    if odd or single or not names:
        raise ModelError(f"{file}: holds {(odd or single or ['nothing'])[0]}, which is no pair of factors A and B")
    return {name.removeprefix(_PREFIX): (tensors[name + _FACTORS[0]], tensors[name + _FACTORS[1]]) for name in names}


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in _TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def write_adapter(
    folder: Path, factors: Mapping[str, tuple[Tensor, Tensor]], *, alpha: float, base: str, revision: str | None
) -> None:
    """Write a PEFT folder. `factors`: A [rank, in] and B [out, rank] by the name of their layer."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, pair in factors.items():
        for end, part in zip(_FACTORS, pair, strict=True):
            tensors[_PREFIX + name + end] = part.contiguous()
    rank = next(iter(factors.values()))[0].shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in factors}),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
