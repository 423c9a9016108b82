"""FlexAttention's view of a prefix tree: the lists of blocks, and what kernels make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.model_check.architectures import SHARED, write_model
from roll_flash.learner.model.policy_model import load_policy_model
from roll_flash.learner.packing import flex_tree, tree_attention
from roll_flash.learner.packing.head_shape import HeadShape, head_shape
from roll_flash.learner.packing.rows import attention_mask, pack
from roll_flash.learner.packing.sequences import text_sequence

LISTS = [f"{full}{side}_{kind}" for full in ("", "full_") for side in ("kv", "q") for kind in ("num_blocks", "indices")]
LENGTHS = (700, 1, 127, 128, 129, 255, 256, 1500, 2048)
CPU = torch.device("cpu")
OTHER_KEYS = {"biogpt", "gpt_neox", "persimmon", "gpt2", "opt", "jetmoe"}
"""All but jetmoe do not read the number of key heads that all tiny configs give; jetmoe repeats its keys."""


def forest(seed: int, tokens: int, branches: float) -> np.ndarray:
    """subtree_end of random trees in depth-first order; `branches` is the chance that a token starts a new branch."""
    random = np.random.default_rng(seed)
    ends = np.full(tokens, tokens)
    path: list[int] = []
    for token in range(tokens):
        depth = int(random.integers(0, len(path) + 1)) if random.random() < branches else len(path)
        ends[path[depth:]] = token
        path = [*path[:depth], token]
    return ends


def random_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """In the memory layout of projections in a model: heads of a token side by side."""
    random = torch.Generator()
    random.manual_seed(tokens)
    query, key, value = (torch.randn(1, tokens, heads, 16, generator=random).transpose(1, 2) for heads in (4, 2, 2))
    return query, key, value


def attend(ends: np.ndarray, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flex_tree.attend(query, key, value, flex_tree.tree_mask(torch.tensor(ends)), 0.3)


def dense_attention(ends: np.ndarray, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.tensor(attention_mask(ends))
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 1200), st.sampled_from([0.0, 0.002, 0.01, 0.1, 0.6]))
def test_block_lists_are_those_of_all_pairs_of_tokens(seed: int, tokens: int, branches: float) -> None:
    ends = forest(seed, tokens, branches)
    mask = flex_tree.tree_mask(torch.tensor(ends))
    length = mask.shape[-1]
    assert length % 128 == 0
    assert length - tokens < 128 or length == 256
    expected = create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
    for name in LISTS:
        torch.testing.assert_close(getattr(mask, name), getattr(expected, name), rtol=0, atol=0, msg=name)
        assert getattr(mask, name).is_contiguous(), f"{name}: kernels of GPUs step through it without strides"
    index = torch.arange(tokens)
    pairs = mask.mask_mod(index[:1], index[:1], index[:, None], index[None])
    assert torch.equal(pairs, torch.tensor(attention_mask(ends)))


def test_the_mask_of_a_long_row_is_small() -> None:
    """Evaluated on all pairs of 131,072 tokens, it would take 179 GB while it is made."""
    ends = forest(0, 131_072, 0.001)
    mask = flex_tree.tree_mask(torch.tensor(ends))
    assert sum(getattr(mask, name).nbytes for name in LISTS) < 17 * 2**20


def test_one_kernel_for_rows_of_all_lengths_gives_the_outputs_of_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel on the CPU: it skips blocks that are in no list, and masks no block that is listed as full."""
    counter = CompileCounterWithBackend("inductor")
    monkeypatch.setattr(flex_tree, "flex_attention", flex_tree.compiled(counter))
    for tokens in LENGTHS:
        ends, inputs = forest(tokens, tokens, 0.01), random_inputs(tokens)
        with torch.no_grad():
            found = attend(ends, *inputs)
        torch.testing.assert_close(found, dense_attention(ends, *inputs), rtol=0, atol=1e-5)
    assert counter.frame_count == 1


def test_gradients_are_those_of_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for CPUs have no backward pass; torch's plain implementation has one, but is refused on a CPU."""
    counter = CompileCounterWithBackend("aot_eager")
    on_cpu(monkeypatch)
    monkeypatch.setattr(flex_tree, "flex_attention", flex_tree.compiled(counter))
    for tokens in LENGTHS:
        ends = forest(tokens, tokens, 0.01)
        query, key, value = (tensor.double().requires_grad_() for tensor in random_inputs(tokens))
        inputs = query, key, value
        found = attend(ends, *inputs)
        upstream = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
        expected = dense_attention(ends, *inputs)
        torch.testing.assert_close(found, expected)
        ours, plain = (torch.autograd.grad(output, inputs, upstream) for output in (found, expected))
        torch.testing.assert_close(ours, plain)
    assert counter.frame_count == 1


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_tree, "flex_attention", flex_tree.compiled("aot_eager"))


SHAPES = [HeadShape(16, 8, 128, 128, 128**-0.5), HeadShape(9, 3, 64, 64, 0.125), HeadShape(4, 4, 24, 12, 0.1)]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_the_test_at_the_start_passes_with_heads_of_any_shape(
    heads: HeadShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch)
    assert 0 < flex_tree.largest_difference(CPU, heads) < 0.02


@pytest.mark.parametrize("wrong", ["a branch sees its neighbour", "no scale", "no number"])
def test_the_test_at_the_start_finds_a_wrong_kernel(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    right = flex_tree.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
        if wrong == "a branch sees its neighbour":
            mask = flex_tree.tree_mask(torch.full((1300,), 1300))
        factor = {"no scale": 1 / scale, "no number": torch.nan}.get(wrong, 1.0)
        return right(query * factor, key, value, mask, scale)

    monkeypatch.setattr(flex_tree, "attend", attend)
    assert flex_tree.largest_difference(CPU, SHAPES[1]) > 0.05


def test_without_a_gpu_it_is_not_used() -> None:
    assert flex_tree.unsupported_reason(CPU, SHAPES[0]) == "there is no GPU"


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        (0.001, None),
        (0.5, "it differs by 0.5 from plain attention"),
        (RuntimeError("no compiler\nsecond line"), "RuntimeError: no compiler"),
    ],
)
def test_on_a_gpu_it_is_used_only_if_it_computes_what_plain_attention_does(
    difference: float | Exception, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is a stand-in; `gpu-check` makes the real one."""

    def compare(*_: object) -> float:
        if isinstance(difference, Exception):
            raise difference
        return difference

    monkeypatch.setattr(flex_tree, "largest_difference", compare)
    assert flex_tree.unsupported_reason(torch.device("cuda"), SHAPES[0]) == reason


@pytest.mark.parametrize("name", sorted(SHARED.keys() - OTHER_KEYS))
def test_the_shape_of_heads_is_that_of_the_attention_of_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy_model(write_model(name, tmp_path))
    (row,) = pack([text_sequence([1, 5, 6, 7])], 10)
    seen = []

    def recording(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        seen.append(HeadShape(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], scale))
        return tree_attention.tree_attention(module, query, key, value, *rest, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, tree_attention.NAME, recording)
    policy(row)
    assert set(seen) == {head_shape(policy.model.config, policy.model)}
