"""Computes exact attention over a prefix tree in blocks; each block reads only the keys that its tokens may see.

A row is a tree in depth-first order (see `rows.py`). For a contiguous block [start, end), the only tokens before
`start` that the block may attend to are the ancestors of `start`: an ancestor of a later token of the block that
precedes `start` contains `start` in its subtree. So each block attends to a short list of keys instead of the whole
row. With replicas of one prompt this is several times less work than a dense mask.

Registered with transformers as the attention implementation `prefix_tree`; the model itself is unchanged.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from roll_flash.learner.packing.rows import attention_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "prefix_tree"
_MIN_BLOCK_TOKENS = 32
"""Minimum length of a block that ends at a branch: smaller blocks cost more in calls than they save in work."""
_MAX_BLOCK_TOKENS = 128
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "indices", "block_indices")


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Queries [start, end) with their keys: `keys` int64 [K], ancestors first, then the block itself; `hidden` bool
    [end - start, H], true if a query may not attend to one of the last H keys. All queries see the other keys."""

    start: int
    end: int
    keys: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """Attention layout of a row; computed once, used by every layer."""

    blocks: tuple[Block, ...]
    mask: Tensor | None
    """Dense mask [N, N] for devices on which one fused call is faster than blocks, else None."""
    flex: BlockMask | None = None
    """Block mask for FlexAttention, if used."""


def tree_layout(
    position_ids: NDArray[np.int64], subtree_end: NDArray[np.int64], device: torch.device, *, flex: bool = False
) -> TreeLayout:
    """Return the layout of a packed row; both arrays are int64 [N]. `flex` selects FlexAttention, except on CPU."""
    if device.type != "cpu" and flex:
        from roll_flash.learner.packing.flex_tree import tree_mask

        return TreeLayout((), None, tree_mask(torch.tensor(subtree_end, device=device)))
    if device.type != "cpu":
        return TreeLayout((), torch.tensor(attention_mask(subtree_end), device=device))
    bounds = _block_bounds(position_ids)
    return TreeLayout(tuple(_block(subtree_end, a, b) for a, b in itertools.pairwise(bounds)), None)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    tree: TreeLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the transformers interface: query [1, H, N, D], key [1, H_kv, N, D], value
    [1, H_kv, N, E]; returns [1, N, H, E]. Raises NotImplementedError for unsupported options."""
    del module
    if tree is None:
        raise NotImplementedError("the model passes no arguments on to its attention")
    refused = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if attention_mask is not None:
        # transformers creates no mask for an unknown implementation: this mask comes from the model and is more than
        # causal (a bias, or a selection of few keys that has an effect only on long texts).
        refused.append("a mask of the model's own")
    if refused or dropout:
        raise NotImplementedError(f"attention with {', '.join(refused) or 'dropout'} cannot be packed")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree.flex is not None:
        from roll_flash.learner.packing.flex_tree import attend

        return attend(query, key, value, tree.flex, scale).transpose(1, 2).contiguous(), None
    if tree.mask is not None:
        # With a mask the fused kernels need as many key heads as query heads.
        share = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=tree.mask, scale=scale)
        return out.transpose(1, 2).contiguous(), None
    attended: Tensor = _TreeAttention.apply(query[0], key[0], value[0], tree.blocks, scale)  # type: ignore[no-untyped-call]
    return attended[None], None


class _TreeAttention(torch.autograd.Function):
    """query [H, N, D], key [H_kv, N, D], value [H_kv, N, E] -> [N, H, E]. The backward pass recomputes the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...], scale: float) -> Tensor:
        (heads, tokens, _), size = query.shape, value.shape[-1]
        out = query.new_empty(tokens, heads, size)
        room, key_room, value_room = _room(query, blocks), key.new_empty(key.numel()), value.new_empty(value.numel())
        log_totals = query.new_empty(key.shape[0], heads // key.shape[0], tokens, 1)
        for block in blocks:
            keys, values = _gather(key, block, key_room), _gather(value, block, value_room)
            scores = _scores(query, keys, block, scale, room)
            peak = scores.amax(-1, keepdim=True)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            attended = torch.bmm(_flat(weights), values).div_(_flat(total))
            out[block.start : block.end] = attended.view(heads, -1, size).transpose(0, 1)
            log_totals[:, :, block.start : block.end] = total.log_().add_(peak)
        ctx.save_for_backward(query, key, value, out, log_totals)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_totals = ctx.saved_tensors
        heads, kv_heads = query.shape[0], key.shape[0]
        query_gradient, key_gradient = torch.empty_like(query), torch.zeros_like(key)
        value_gradient = torch.zeros_like(value)
        # sum_k p_k dp_k of each query, without computing dp_k (FlashAttention, arXiv 2205.14135, appendix B.2).
        overlaps = (gradients[0] * out).sum(-1).T
        room, second_room = _room(query, ctx.blocks), _room(query, ctx.blocks)
        key_room, value_room = key.new_empty(key.numel()), value.new_empty(value.numel())
        for block in ctx.blocks:
            span = slice(block.start, block.end)
            log_total = log_totals[:, :, span]
            keys, values = _gather(key, block, key_room), _gather(value, block, value_room)
            probabilities = _scores(query, keys, block, ctx.scale, room).sub_(log_total).exp_()
            upstream = gradients[0][span].transpose(0, 1).reshape(kv_heads, -1, value.shape[-1])
            score_gradient = second_room[: probabilities.numel()].view_as(probabilities)
            torch.bmm(upstream, values.mT, out=_flat(score_gradient))
            torch.bmm(_flat(probabilities).mT, upstream, out=values)
            value_gradient.index_add_(1, block.keys, values)
            score_gradient.sub_(overlaps[:, span].reshape(log_total.shape)).mul_(probabilities).mul_(ctx.scale)
            flat = _flat(score_gradient)
            query_gradient[:, span] = torch.bmm(flat, keys).view(heads, -1, key.shape[-1])
            torch.bmm(flat.mT, query[:, span].reshape(kv_heads, -1, key.shape[-1]), out=keys)
            key_gradient.index_add_(1, block.keys, keys)
        return query_gradient, key_gradient, value_gradient, None, None


def _room(query: Tensor, blocks: tuple[Block, ...]) -> Tensor:
    """Allocate one buffer for the scores of any block, because per-block allocations would fragment memory."""
    return query.new_empty(query.shape[0] * max((block.end - block.start) * len(block.keys) for block in blocks))


def _gather(tensor: Tensor, block: Block, room: Tensor) -> Tensor:
    """Gather a block's keys or values [H_kv, K, D] from `tensor` [H_kv, N, D] into the buffer `room` [H_kv * N * D]."""
    heads, _, size = tensor.shape
    part = room[: heads * len(block.keys) * size].view(heads, -1, size)
    return torch.index_select(tensor, 1, block.keys, out=part)


def _scores(query: Tensor, keys: Tensor, block: Block, scale: float, room: Tensor) -> Tensor:
    """Compute scores [H_kv, H / H_kv, queries, keys] in the buffer `room`; minus infinity if hidden."""
    kv_heads, number, _ = keys.shape
    queries = query[:, block.start : block.end].reshape(kv_heads, -1, query.shape[-1])
    flat = room[: queries.shape[0] * queries.shape[1] * number].view(kv_heads, -1, number)
    torch.bmm(queries, keys.mT, out=flat).mul_(scale)
    scores = flat.view(kv_heads, -1, block.end - block.start, number)
    scores[..., number - block.hidden.shape[1] :].masked_fill_(block.hidden, float("-inf"))
    return scores


def _flat(scores: Tensor) -> Tensor:
    return scores.flatten(1, 2)


def _block_bounds(position_ids: NDArray[np.int64]) -> list[int]:
    """Return block starts and the row's end: split at branches if blocks are long enough, else at the maximum."""
    tokens = len(position_ids)
    branches = np.flatnonzero(np.diff(position_ids) != 1) + 1
    bounds = [0]
    for branch in (*branches.tolist(), tokens):
        while branch - bounds[-1] > _MAX_BLOCK_TOKENS:
            bounds.append(bounds[-1] + _MAX_BLOCK_TOKENS)
        if branch - bounds[-1] >= _MIN_BLOCK_TOKENS or branch == tokens:
            bounds.append(branch)
    return bounds


def _block(subtree_end: NDArray[np.int64], start: int, end: int) -> Block:
    ancestors = np.flatnonzero(subtree_end[:start] > start)
    keys = np.concatenate([ancestors, np.arange(start, end)])
    # Deeper ancestors end earlier: ancestors whose subtree contains the whole block come first and need no mask.
    checked = keys[np.count_nonzero(subtree_end[ancestors] >= end) :]
    queries = np.arange(start, end)[:, None]
    visible = (checked[None, :] <= queries) & (queries < subtree_end[checked][None, :])
    return Block(start, end, torch.from_numpy(keys), torch.from_numpy(~visible))


AttentionInterface.register(NAME, tree_attention)
