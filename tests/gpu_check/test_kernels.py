"""The checks of kernels pass on the product's, and fail on wrong ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from roll_flash.gpu_check import attention, logprobs, machine
from roll_flash.gpu_check.check import CheckFailedError
from roll_flash.learner.model.token_logprobs import token_logprobs
from roll_flash.learner.packing.rows import PackedRow, attention_mask
from roll_flash.learner.packing.tree_attention import TreeLayout, tree_attention
from tests.gpu_check.conftest import Reported

TOKENS = 192


def test_the_attention_of_the_learner_passes(reported: Reported) -> None:
    attention.attention(reported.bench, TOKENS)
    assert set(reported.figures) >= {"error_of_output", "error_of_query", "error_of_key", "error_of_value"}
    assert max(value for name, value in reported.figures.items() if name.startswith("error")) < 1e-4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mask_of_gpus_passes(reported: Reported) -> None:
    attention.flex_on_cpu(reported.bench, TOKENS)
    assert reported.figures["error_of_output"] < 1e-4


def masked(mask: np.ndarray) -> attention.Attention:
    layout = TreeLayout((), torch.tensor(mask))
    return lambda query, key, value: tree_attention(torch.nn.Module(), query, key, value, None, tree=layout)[0]


@pytest.mark.parametrize("query", [TOKENS // 4 - 1, TOKENS - 1])
@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_a_mask_that_leaks_one_token_fails(reported: Reported, query: int, scale: float) -> None:
    """Also where its effect on the output is within the tolerance, as in a long row in bfloat16."""

    def leaking(row: PackedRow, device: torch.device) -> attention.Attention:
        mask = attention_mask(row.subtree_end)
        hidden = np.flatnonzero(~mask[query])[-1 if query < TOKENS // 2 else 0]
        right, one_more = masked(mask.copy()), mask.copy()
        one_more[query, hidden] = True
        wrong = masked(one_more)

        def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return right(query, key, value) * (1 - scale) + wrong(query, key, value) * scale

        return mixed

    with pytest.raises(CheckFailedError, match="see what they must not" if scale < 1 else "must not|dense mask"):
        attention.attention(reported.bench, TOKENS, leaking)


def test_an_attention_without_a_scale_fails(reported: Reported) -> None:
    def unscaled(row: PackedRow, device: torch.device) -> attention.Attention:
        right = attention.of_the_learner(row, device)
        return lambda query, key, value: right(query * 1.01, key, value)

    with pytest.raises(CheckFailedError, match="from a dense mask"):
        attention.attention(reported.bench, TOKENS, unscaled)


def test_the_learners_log_probabilities_pass(reported: Reported) -> None:
    logprobs.head(reported.bench)
    assert reported.figures["largest_error_of_a_logprob"] < 1e-4
    assert max(reported.figures["probabilities"]) > 0.999


def _autograd(hidden: Tensor, head: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = (hidden[source] @ head.T).float()
    return logits.log_softmax(-1).gather(1, target[:, None])[:, 0], logits


def test_log_probabilities_of_rounded_logits_fail(reported: Reported) -> None:
    with pytest.raises(CheckFailedError, match="log-probability is off"):
        logprobs.head(reported.bench, function=_autograd)


def test_a_gradient_of_rounded_probabilities_fails(reported: Reported) -> None:
    """The values are exact; only 1 - p, in the gradient, is made of a p in bfloat16."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, head, source, target):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(hidden, head, target)
            return token_logprobs(hidden, head, source, target)[0]

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            hidden, head, target = ctx.saved_tensors
            p = (hidden.float() @ head.float().T).softmax(-1).bfloat16()
            one_hot = torch.nn.functional.one_hot(target, head.shape[0]).bfloat16()
            return ((one_hot - p) @ head) * gradient[:, None].bfloat16(), None, None, None

    def function(hidden: Tensor, head: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return Rounded.apply(hidden, head, source, target), target

    with pytest.raises(CheckFailedError, match=r"gradient of a log-probability is off by .* at p = 0\.99"):
        logprobs.head(reported.bench, function=function)


def test_a_model_in_bfloat16_is_near_itself_in_float32(reported: Reported) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logprobs.whole_model(reported.bench)
    assert 0 < reported.figures["difference_percentile"] < 0.25
    assert reported.figures["tokens"] > 1000


@pytest.mark.parametrize(
    ("name", "gib", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, 989),
        ("NVIDIA H100 PCIe", 79.6, 756),
        ("NVIDIA A100-SXM4-40GB", 39.4, 312),
        ("NVIDIA H200", 139.8, 989),
        ("NVIDIA GeForce RTX 4090", 23.6, 165),
        ("NVIDIA L40S", 44.4, 362),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
    ],
)
def test_a_gpu_is_found_in_the_hardware_files_by_its_drivers_name(name: str, gib: float, tflops: float | None) -> None:
    found = machine.published_tflops(name, int(gib * machine.GIB))
    assert found is None if tflops is None else found == pytest.approx(tflops, rel=0.01)
