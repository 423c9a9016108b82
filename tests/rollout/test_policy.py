"""What of a conversation becomes a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from roll_flash.engines.inference import Generation
from roll_flash.models.prepare import resolve_model
from roll_flash.rollout.conversation import ContextFullError, TokenPolicy
from roll_flash.types import SamplingParams


class EchoClient:
    """A stand-in for a server: always writes the same two tokens."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        tokens, logprobs = np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
        return Generation(tokens, logprobs, np.array([3, 3], np.int32), "stop", "nowhere", 0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(resolve_model("tiny")))


def policy_for(tokenizer: Any, max_length: int) -> TokenPolicy:
    policy = TokenPolicy(EchoClient(), tokenizer, SamplingParams(), episode_id="e", max_length=max_length)  # type: ignore[arg-type]
    policy.begin([{"role": "user", "content": "hello"}])
    return policy


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_trajectory_ends_with_the_last_token_that_the_model_wrote(tokenizer: Any, size: int) -> None:
    async def play() -> None:
        policy = policy_for(tokenizer, 256)
        await policy.act(1.0)
        policy.observe([{"role": "user", "content": "short"}])
        last = await policy.act(1.0)
        policy.observe([{"role": "user", "content": "x" * size}])
        (arrays,) = policy.samples()
        assert len(arrays.token_ids) == len(arrays.logprobs) == last.end
        assert arrays.policy_mask[-1]
        assert arrays.versions[-1] == 3
        if size > 256:
            with pytest.raises(ContextFullError, match=r"model\.max_length"):
                await policy.act(1.0)

    asyncio.run(play())
