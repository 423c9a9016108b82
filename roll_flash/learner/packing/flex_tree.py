"""Computes attention over a prefix tree on GPUs with FlexAttention (arXiv 2412.05496), which skips fully masked blocks.

Rows are padded to powers of two inside attention only, so that a few compiled kernels serve rows of all lengths.
Padding tokens attend only to themselves and cost almost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from roll_flash.errors import first_line

_MIN_PADDED_TOKENS = 128
_MAX_VARIANTS = 64
"""Maximum number of compiled kernels: one per padded length, with and without gradient."""
_TOLERANCE = 0.05


def tree_mask(subtree_end: Tensor) -> BlockMask:
    """Return the block mask of a padded row. `subtree_end` is int64 [N], on the GPU."""
    tokens = subtree_end.shape[0]
    length = max(_MIN_PADDED_TOKENS, 1 << (tokens - 1).bit_length())
    ends = torch.arange(1, length + 1, device=subtree_end.device)
    ends[:tokens] = subtree_end

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return create_block_mask(visible, None, None, length, length, device=str(subtree_end.device))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Compute attention: query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, H, N, D]."""
    tokens = query.shape[2]
    padding = (0, 0, 0, mask.shape[-1] - tokens)
    query, key, value = (nn.functional.pad(tensor, padding) for tensor in (query, key, value))
    kernel: Any = _compiled() if query.device.type == "cuda" else flex_attention
    attended: Tensor = kernel(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended[:, :, :tokens]


def unsupported_reason(device: torch.device) -> str | None:
    """Return why FlexAttention cannot be used here; None if forward and backward agree with plain attention.

    Compiles a first kernel. FlexAttention needs Triton, a C compiler and a recent GPU.
    """
    if device.type != "cuda":
        return "there is no GPU"
    try:
        difference = _largest_difference(device)
    except Exception as error:  # compilers, drivers and libraries may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    return None if difference < _TOLERANCE else f"it differs by {difference:.3g} from plain attention"


def _largest_difference(device: torch.device) -> float:
    """Return the largest relative error of outputs and gradients on a tree: 60 tokens, then two branches of 60."""
    ends = torch.tensor([180] * 60 + [120] * 60 + [180] * 60, device=device)
    index = torch.arange(180, device=device)
    dense = (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])
    generator = torch.Generator(device)
    generator.manual_seed(0)
    made = [torch.randn(1, heads, 180, 64, device=device, generator=generator) for heads in (4, 2, 2)]
    query, key, value = (tensor.bfloat16().requires_grad_() for tensor in made)
    flexible = attend(query, key, value, tree_mask(ends), 0.125)
    flexible.float().square().sum().backward()
    found = [flexible, query.grad, key.grad, value.grad]
    query.grad = key.grad = value.grad = None
    plain = nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=dense, scale=0.125
    )
    plain.float().square().sum().backward()
    expected = [plain, query.grad, key.grad, value.grad]
    return max(_relative(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def _relative(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


@functools.cache
def _compiled() -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = max(_MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)
