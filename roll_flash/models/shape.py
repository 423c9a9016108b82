"""The sizes of a model from its config.json alone: transformers builds it on the meta device, without memory.

`read_shape` takes a model folder, or the name of a model whose config.json comes with this package (`shapes/`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from roll_flash.checked_files import decode, read_checked
from roll_flash.errors import ModelError, first_line
from roll_flash.models import hub
from roll_flash.models.prepare import RECIPES, cache_folder, resolve_model

SHAPES = Path(__file__).parent / "shapes"
"""Folder of config.json files by the name of their model's folder, such as `Qwen3-0.6B.json`."""
SHAPE_VERSION = 1
"""Increased when `shape_of` changes, so that shapes in the cache are computed again."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_IN_A_CONFIG = (*_NUM_EXPERTS, "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of parameters, and sizes of the layers. A tied output head counts once, as `embedding`."""

    name: str
    parameters: int
    embedding: int
    head: int
    """0 if it is tied to the embedding."""
    experts: int
    """Parameters of routed experts, which are only partly used for each token."""
    num_experts: int
    """Routed experts of a layer; 0 without any."""
    experts_per_token: int
    """Routed experts that one token uses; 0 without any."""
    largest_layer: int
    """Parameters of the largest decoder layer."""
    layers: int
    hidden: int
    query: int
    """Heads x head size: the width of the queries."""
    key: int
    """Heads of keys and values x head size: the width of the keys, and of the values."""
    heads: int
    feed_forward: int
    """Width of the feed-forward layer; of all experts together that one token uses."""
    vocabulary: int
    linear: Mapping[str, tuple[int, int]]
    """Last part of the name of the linear layers in the decoder -> (number of layers, sum of inputs + outputs)."""

    @property
    def outside_layers(self) -> int:
        """Parameters of embedding and output head, which each forward pass holds as a whole."""
        return self.embedding + self.head

    @property
    def computed(self) -> int:
        """Parameters that a token is multiplied with: without the embedding and the experts it does not use."""
        unused = self.experts * (1 - self.experts_per_token / self.num_experts) if self.num_experts else 0
        return self.parameters - self.outside_layers - round(unused) + (self.head or self.embedding)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in bfloat16, over all layers."""
        return 2 * 2 * self.layers * self.key

    def adapter_parameters(self, rank: int, targets: Iterable[str]) -> int:
        """Parameters of low-rank adapters of `rank` on the linear layers with these names."""
        return rank * sum(self.linear[name][1] for name in targets if name in self.linear)


def read_shape(path_or_name: str, revision: str | None = None) -> ModelShape:
    """Return the shape of a model, given as to `resolve_model`; of one on a hub, only config.json is downloaded. Raises
    ModelError.

    What does not exist here yet is taken for the model of its name, if that is one of those in `SHAPES`.
    """
    file = _config_file(path_or_name, revision)
    return _read_shape(file, Path(path_or_name).name, file.stat().st_mtime_ns)


def _config_file(path_or_name: str, revision: str | None) -> Path:
    path, known = Path(path_or_name).expanduser(), SHAPES / f"{Path(path_or_name).name}.json"
    is_hub_id = hub.is_hub_id(path_or_name)
    folder = (hub.cached_folder(path_or_name, revision) if is_hub_id else None) or path
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if path_or_name in RECIPES or folder.exists():  # it may be a GGUF file or an adapter
        return resolve_model(path_or_name, revision) / "config.json"
    if known.is_file():
        return known
    if is_hub_id:
        return hub.download_config(path_or_name, revision)
    names = ", ".join(sorted(path.stem for path in SHAPES.glob("*.json")))
    raise ModelError(f"{path_or_name}: no config.json is there; shapes that are known without a folder: {names}")


@lru_cache(maxsize=8)
def _read_shape(file: Path, name: str, changed_ns: int) -> ModelShape:
    """`changed_ns`: when the file changed, so that a changed one is read again. Building a model takes seconds, most of
    them for imports, so its shape is kept in the cache folder."""
    versions = f"{SHAPE_VERSION} {version('transformers')} {name} "
    digest = hashlib.sha256(versions.encode() + read_checked(file)).hexdigest()[:16]
    kept = cache_folder().with_name("shapes") / f"{digest}.json"
    try:
        return decode(read_checked(kept), ModelShape)
    except (OSError, ValueError):  # there is none yet, or not a whole one
        shape = shape_of(model_on_meta(file), name)
    with suppress(OSError):  # without a cache the next run takes these seconds again
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f".{digest}-{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(shape))
        partial.replace(kept)
    return shape


def model_on_meta(config_json: Path) -> Any:
    """Return the model of a config.json on the meta device: modules without weights. Raises ModelError."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(config_json)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ModelError(f"{config_json}: transformers cannot read this model: {first_line(error)}") from error


def shape_of(model: Any, name: str) -> ModelShape:
    """Return the shape of a causal language model of transformers, on any device. Raises ModelError for others."""
    layers = decoder_layers(model)
    if not layers or model.get_output_embeddings() is None:
        raise ModelError(f"{name}: {type(model).__name__} is not a decoder-only language model with an output head")
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    experts = sum(_size(layer, experts_only=True) for layer in layers)
    num_experts = next((n for key in _NUM_EXPERTS if (n := getattr(config, key, None))), 0) if experts else 0
    per_token = getattr(config, "num_experts_per_tok", None) or 1 if num_experts else 0
    heads = getattr(config, "num_attention_heads", None) or 0  # none in mamba
    head_size = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "moe_intermediate_size", None) if num_experts else None
    width = width or getattr(config, "intermediate_size", None) or 0
    return ModelShape(
        name=name,
        parameters=_size(model),
        embedding=embedding.numel(),
        head=0 if head is embedding else head.numel(),
        experts=experts,
        num_experts=num_experts,
        experts_per_token=per_token,
        largest_layer=max(map(_size, layers)),
        layers=len(layers),
        hidden=config.hidden_size,
        query=heads * head_size,
        key=kv_heads * head_size,
        heads=heads,
        feed_forward=max(1, per_token) * width,
        vocabulary=head.shape[0],
        linear=_linear_layers(layers),
    )


def has_experts(folder: Path) -> bool:
    """Return true if the config.json in `folder` is that of a mixture of experts. Imports nothing."""
    config = json.loads((folder / "config.json").read_text())
    return any(config.get(key) for key in _IN_A_CONFIG)


def expert_sizes(config: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Return, from the config.json of a mixture of experts, the number of decoder layers, of experts that a token uses
    in a layer, and of experts of a layer; None for what it does not name. Imports nothing."""

    def number(*names: str) -> int | None:
        return next((found for name in names if type(found := config.get(name)) is int), None)

    return number("num_hidden_layers"), number("num_experts_per_tok", "moe_k"), number(*_IN_A_CONFIG)


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers of a model of transformers; empty if it has no list of them."""
    if hasattr(model.base_model, "layers"):
        return list(model.base_model.layers)
    kinds = model._no_split_modules or ()
    for module in model.base_model.modules():
        is_list = type(module).__name__ == "ModuleList" and len(module)
        if is_list and all(type(layer).__name__ in kinds for layer in module):
            return list(module)
    return []


def _size(module: Any, *, experts_only: bool = False) -> int:
    """Parameters of a module, each counted once."""
    named = module.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not experts_only or ".experts." in f".{name}")


def _linear_layers(layers: Iterable[Any]) -> dict[str, tuple[int, int]]:
    from torch import nn

    found: dict[str, tuple[int, int]] = {}
    for layer in layers:
        for name, module in layer.named_modules():
            if type(module) is nn.Linear:
                last = name.rsplit(".", 1)[-1]
                count, total = found.get(last, (0, 0))
                found[last] = (count + 1, total + module.in_features + module.out_features)
    return found
