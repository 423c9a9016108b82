"""Computes attention over a prefix tree on GPUs with FlexAttention (arXiv 2412.05496), which skips fully masked blocks.

The lists of blocks come from the tree itself, so the mask of a row of 131,072 tokens takes 16 MiB. Inside attention,
rows are padded to multiples of the block size; one kernel, compiled for any number of blocks, serves all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from roll_flash.errors import first_line
from roll_flash.learner.packing.head_shape import HeadShape

BLOCK_TOKENS = 128
_MIN_BLOCKS = 2
"""torch compiles sizes of 1 separately: rows of one block get a second one, so that they share the kernel of others."""
_MAX_VARIANTS = 64
"""Maximum number of compiled kernels: with and without gradient, for each head shape and scale."""
_TOLERANCE = 0.05


def tree_mask(subtree_end: Tensor) -> BlockMask:
    """Return the block mask of a padded row. `subtree_end` is int64 [N], on the GPU; a padding token sees itself only.

    Equal to what `create_block_mask` finds by evaluating all N^2 pairs of tokens. A block of queries sees something of
    an earlier block of keys if one of the keys' subtrees reaches into it, and everything if all of them cover it.
    """
    tokens = subtree_end.shape[0]
    length = max(_MIN_BLOCKS, -(-tokens // BLOCK_TOKENS)) * BLOCK_TOKENS
    ends = torch.cat([subtree_end, torch.arange(tokens + 1, length + 1, device=subtree_end.device)])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    first, last = (found(ends.view(-1, BLOCK_TOKENS), 1) for found in (torch.amin, torch.amax))
    queries = torch.arange(0, length, BLOCK_TOKENS, device=ends.device)[:, None]  # the first of each block
    keys = queries.T
    full = (queries > keys) & (queries + BLOCK_TOKENS <= first)
    partial = (queries >= keys) & (queries < last) & ~full
    return BlockMask(
        (length, length),
        *_ordered(partial),
        *_ordered(full),
        *_ordered(partial.T),  # the queries of each block of keys, for the backward pass
        *_ordered(full.T),
        BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
        mask_mod=visible,
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true entries [1, 1, R] of each row of bool [R, C], and their columns [1, 1, R, C] in order,
    followed by the other columns; both int32.

    Rows of columns must lie in memory one after the other: kernels of GPUs step through them without asking for
    strides, and a sort of a transposed tensor is transposed in memory too.
    """
    columns = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], columns.to(torch.int32).contiguous()[None, None]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Compute attention: query [1, H, N, D], key [1, H_kv, N, D] and value [1, H_kv, N, E] -> [1, H, N, E]."""
    tokens = query.shape[2]
    padding = (0, 0, 0, mask.shape[-1] - tokens)
    # Kernels are compiled for a layout in memory, which pad changes or keeps, depending on the length.
    query, key, value = (nn.functional.pad(tensor, padding).contiguous() for tensor in (query, key, value))
    kernel: Any = compiled() if query.device.type == "cuda" else flex_attention
    attended: Tensor = kernel(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # torch does not know that a length known only at run time is a multiple of all blocks, and would check bounds.
        kernel_options={"IS_DIVISIBLE": True},
    )
    return attended[:, :, :tokens]


def unsupported_reason(device: torch.device, heads: HeadShape) -> str | None:
    """Return why FlexAttention cannot be used here; None if forward and backward agree with plain attention.

    Compiles the kernel that rows of this model use. FlexAttention needs Triton, a C compiler and a recent GPU.
    """
    if device.type != "cuda":
        return "there is no GPU"
    try:
        difference = largest_difference(device, heads)
    except Exception as error:  # compilers, drivers and libraries may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    return None if difference < _TOLERANCE else f"it differs by {difference:.3g} from plain attention"


def largest_difference(device: torch.device, heads: HeadShape) -> float:
    """Return the largest relative error of outputs and gradients in bfloat16, on a prompt of 300 tokens with two
    answers of 500: some blocks are full, some partial, some hidden."""
    ends = torch.tensor([1300] * 300 + [800] * 500 + [1300] * 500, device=device)
    index = torch.arange(len(ends), device=device)
    dense = (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])
    inputs = [tensor.requires_grad_() for tensor in heads.random_inputs(len(ends), device, torch.bfloat16)]
    query, key, value = inputs
    flexible = attend(query, key, value, tree_mask(ends), heads.scale)
    key, value = (tensor.repeat_interleave(heads.heads // heads.kv_heads, 1) for tensor in (key, value))
    plain = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense, scale=heads.scale)
    found, expected = (
        (output, *torch.autograd.grad(output.float().square().sum(), inputs)) for output in (flexible, plain)
    )
    return max(_relative(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def _relative(ours: Tensor, theirs: Tensor) -> float:
    difference = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    return float(difference.detach().nan_to_num(nan=torch.inf))


@functools.cache
def compiled(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """Return FlexAttention, which is compiled at its first call, for rows of any length."""
    torch._dynamo.config.recompile_limit = max(_MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    # Kernels take the scale as a constant; a variable would be tried first, and cost a second tracing.
    torch._dynamo.config.specialize_float = True
    return torch.compile(flex_attention, dynamic=True, backend=backend)
