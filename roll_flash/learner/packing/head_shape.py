"""The attention heads of a model, for tests of attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Numbers of query heads and of key/value heads, sizes of a query (or key) and of a value, scale of the scores."""

    heads: int
    kv_heads: int
    size: int
    value_size: int
    scale: float

    def random_inputs(self, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [1, H, N, D], key [1, H_kv, N, D] and value [1, H_kv, N, E], always the same."""
        generator = torch.Generator(device)
        generator.manual_seed(0)
        shapes = (self.heads, self.size), (self.kv_heads, self.size), (self.kv_heads, self.value_size)
        query, key, value = (
            torch.randn(1, heads, tokens, size, device=device, generator=generator).to(dtype) for heads, size in shapes
        )
        return query, key, value


def head_shape(config: Any, model: torch.nn.Module | None = None) -> HeadShape:
    """Return the heads of a model of transformers from its config; the scale from its layers, if `model` is given."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_nope_head_dim", None):  # latent attention (DeepSeek-V2, arXiv 2405.04434)
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
    layers = [] if model is None else [layer for layer in model.modules() if "Attention" in type(layer).__name__]
    scales = [scale for layer in layers if isinstance(scale := getattr(layer, "scaling", None), float)]
    shared = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None)
    return HeadShape(
        heads,
        shared or heads,
        size,
        getattr(config, "v_head_dim", None) or size,
        scales[0] if scales else size**-0.5,
    )
