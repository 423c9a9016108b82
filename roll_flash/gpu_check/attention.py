"""Checks that the attention of packed rows, on this device, is that of a dense mask, and that no token leaks.

The heads are those of the model. On a GPU the learner's attention is FlexAttention in bfloat16; on a CPU it works in
blocks, in float32.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from roll_flash.gpu_check.check import Bench, CheckFailedError, require
from roll_flash.gpu_check.machine import GIB, fastest_s, synchronize
from roll_flash.learner.packing.flex_tree import attend, tree_mask
from roll_flash.learner.packing.head_shape import head_shape
from roll_flash.learner.packing.rows import PackedRow, attention_mask, pack
from roll_flash.learner.packing.sequences import text_sequence
from roll_flash.learner.packing.tree_attention import TreeLayout, tree_attention, tree_layout

TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
"""Maximum error of outputs and gradients, relative to the largest value."""
POISON = 1e4
"""Value of a token that some queries must not see: one of them that does changes its output beyond any rounding."""
CUTS = 8
BRANCHES = 3
SLOW_FROM_TOKENS = 4096
"""Length from which skipping masked blocks must be faster than a dense mask."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D]."""
MakeAttention = Callable[[PackedRow, torch.device], Attention]
"""Function that prepares the attention of one row."""


def of_the_learner(row: PackedRow, device: torch.device) -> Attention:
    """Return the attention that the learner uses for this row on this device."""
    return _with_layout(tree_layout(row.position_ids, row.subtree_end, device, flex=device.type == "cuda"))


def flexible(row: PackedRow, device: torch.device) -> Attention:
    """Return FlexAttention, on a CPU too (without gradients)."""
    mask = tree_mask(torch.tensor(row.subtree_end, device=device))
    return lambda query, key, value: attend(query, key, value, mask, query.shape[-1] ** -0.5).transpose(1, 2)


def dense(row: PackedRow, device: torch.device) -> Attention:
    return _with_layout(TreeLayout((), torch.tensor(attention_mask(row.subtree_end), device=device)))


def _with_layout(layout: TreeLayout) -> Attention:
    module = nn.Module()
    return lambda query, key, value: tree_attention(module, query, key, value, None, tree=layout)[0]


def attention(bench: Bench, tokens: int, make: MakeAttention = of_the_learner) -> None:
    """Compare forward and backward with a dense mask on a tree of `tokens` tokens; look for leaks; measure both."""
    device = torch.device("cpu" if bench.settings.rehearsal else "cuda")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    row = tree_of(tokens)
    if device.type == "cuda":
        bench.note(f"FlexAttention of {tokens} tokens, forward and backward (compiling it takes 10-40 s, once)")
    began = time.perf_counter()
    ours, plain = make(row, device), dense(row, device)
    inputs = random_inputs(bench, tokens, device, dtype)
    found = _with_gradients(ours, inputs)
    synchronize(device)
    bench.measured(first_pass_s=time.perf_counter() - began, heads=str(tuple(tensor.shape[1] for tensor in inputs)))
    bench.note("comparing with a dense mask")
    expected = _with_gradients(plain, inputs)
    _compare(bench, found, expected)
    check_leaks(row, ours, inputs, device)
    if device.type == "cuda":
        _measure(bench, tokens, ours, plain, inputs)


def flex_on_cpu(bench: Bench, tokens: int, make: MakeAttention = flexible) -> None:
    """Rehearse FlexAttention: its mask and its outputs are the same on a CPU, only slow and without gradients."""
    device, row = torch.device("cpu"), tree_of(tokens)
    ours = make(row, device)
    with torch.no_grad():
        inputs = random_inputs(bench, tokens, device, torch.float32)
        _compare(bench, {"output": ours(*inputs)}, {"output": dense(row, device)(*inputs)})
    check_leaks(row, ours, inputs, device)


def _compare(bench: Bench, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    errors = {name: _relative(found[name], expected[name]) for name in expected}
    bench.measured(**{f"error_of_{name}": error for name, error in errors.items()})
    worst = max(errors, key=lambda name: errors[name])
    limit = TOLERANCE[expected["output"].dtype]
    require(errors[worst] <= limit, f"{worst} differs by {errors[worst]:.3g} from a dense mask, more than {limit:g}")


def tree_of(tokens: int) -> PackedRow:
    """Return a row of about `tokens` nodes: a quarter is a prompt that three sequences share."""
    random = np.random.default_rng(0)
    prompt = random.integers(3, 100, tokens // 4)
    left = tokens - len(prompt)
    lengths = [left // BRANCHES + (index < left % BRANCHES) for index in range(BRANCHES)]
    # The first tokens differ, so that exactly the prompt is shared.
    branches = [np.concatenate([[number], random.integers(3, 100, size - 1)]) for number, size in enumerate(lengths)]
    (row,) = pack([text_sequence(np.concatenate([prompt, branch]).tolist()) for branch in branches], tokens)
    return row


def random_inputs(bench: Bench, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return query, key and value with the model's heads."""
    return head_shape(AutoConfig.from_pretrained(bench.settings.model_folder)).random_inputs(tokens, device, dtype)


def check_leaks(row: PackedRow, ours: Attention, inputs: tuple[Tensor, ...], device: torch.device) -> None:
    """Change values that some queries must not see: their outputs must stay the same, bit by bit.

    Values of each branch, and of everything after some place in the row, are changed in turn. Raises CheckFailedError.
    """
    query, key, value = inputs
    mask = torch.tensor(attention_mask(row.subtree_end), device=device)
    with torch.no_grad():
        before = ours(query, key, value)
        for part in _parts(row):
            poisoned = value.clone()
            poisoned[:, :, part] = POISON
            changed = (ours(query, key, poisoned) != before).flatten(2).any(-1)[0]
            leaks = changed & ~mask[:, part].any(1)
            if leaks.any():
                first = int(leaks.nonzero()[0])
                raise CheckFailedError(
                    f"{int(leaks.sum())} token(s) see what they must not: token {first} sees one of the tokens "
                    f"{part.start} to {part.stop - 1}"
                )


def _parts(row: PackedRow) -> Iterator[slice]:
    """Yield spans of tokens: each branch, and the rest of the row from several places."""
    tokens = row.num_tokens
    starts = np.flatnonzero(np.diff(row.position_ids) != 1) + 1
    prompt = tokens // 4
    bounds = [prompt, *starts.tolist(), tokens]
    for start, end in itertools.pairwise(bounds):
        yield slice(start, end)
    for cut in np.random.default_rng(1).integers(1, tokens, CUTS):
        yield slice(int(cut), tokens)
    yield slice(tokens - 1, tokens)


def _with_gradients(attention: Attention, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = attention(*leaves)
    output.float().square().sum().backward()
    gradients = {name: leaf.grad for name, leaf in zip(("query", "key", "value"), leaves, strict=True)}
    return {"output": output.detach(), **{name: each for name, each in gradients.items() if each is not None}}


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinity if something is not finite."""
    difference = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(difference.nan_to_num(nan=torch.inf))


def _measure(bench: Bench, tokens: int, ours: Attention, plain: Attention, inputs: tuple[Tensor, ...]) -> None:
    device = inputs[0].device
    torch.cuda.reset_peak_memory_stats(device)
    flex_s = fastest_s(lambda: _with_gradients(ours, inputs), device)
    peak = torch.cuda.max_memory_allocated(device) / GIB
    dense_s = fastest_s(lambda: _with_gradients(plain, inputs), device)
    bench.measured(flex_ms=flex_s * 1e3, dense_ms=dense_s * 1e3, peak_of_attention_gib=peak)
    if tokens >= SLOW_FROM_TOKENS and flex_s > dense_s:
        bench.slow(
            f"FlexAttention takes {flex_s * 1e3:.1f} ms for {tokens} tokens, a dense mask {dense_s * 1e3:.1f} ms: it "
            "should be the other way round; look at the versions of torch and Triton"
        )
