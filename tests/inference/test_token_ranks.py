"""vLLM's ranks of tokens on a CPU, counted without a compiler."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm


def test_ranks_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than as of_vllm

    from roll_flash.inference.vllm.patches import patch_token_ranks

    if not current_platform.is_cpu():
        pytest.skip("the installed vLLM is not built for CPUs")
    monkeypatch.setattr(sampler, "batched_count_greater_than", of_vllm)
    patch_token_ranks()
    torch.manual_seed(0)
    logprobs = torch.randn(5, 1000).log_softmax(-1)
    logprobs[0, :10] = logprobs[0, 10]
    logprobs[1, 20:] = float("-inf")
    logprobs[2, 7] = float("nan")
    tokens = torch.tensor([[10], [30], [7], [0], [999]])
    of_token = logprobs.gather(-1, tokens)
    ranks = sampler.batched_count_greater_than(logprobs, of_token)
    torch.testing.assert_close(ranks, of_vllm._torchdynamo_orig_callable(logprobs, of_token))
    assert ranks[1] == 1000
    assert ranks[2] == 0
