"""What of a conversation becomes a trajectory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from roll_flash.engines.inference import Generation
from roll_flash.envs.hosting.environments import EnvironmentMaker
from roll_flash.inference.transformers.model import Request, TransformersModel
from roll_flash.learner.packing.sequences import PlannedTrajectory
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.background import DaemonThreads
from roll_flash.rollout.episodes.conversation import ContextFullError, TokenPolicy
from roll_flash.rollout.episodes.episode import LARGE_CHARACTERS, Deadlines, Progress, run_episode
from roll_flash.stream.blocks import TokenArrays as StoredArrays
from roll_flash.stream.episodes import finished_episode
from roll_flash.types import EpisodeFailure, EpisodeSpec, Message, SamplingParams, Task, Trajectory


class EchoClient:
    """A stand-in for a server: always writes the same two tokens."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        self.asked = sampling
        tokens, logprobs = np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
        return Generation(tokens, logprobs, np.array([3, 3], np.int32), "stop", "nowhere", 0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(resolve_model("tiny")))


def policy_for(tokenizer: Any, max_length: int) -> TokenPolicy:
    policy = TokenPolicy(EchoClient(), tokenizer, SamplingParams(), episode_id="e", max_length=max_length)  # type: ignore[arg-type]
    policy.begin([{"role": "user", "content": "hello"}])
    return policy


def test_a_turn_ends_at_the_end_of_turn_of_the_template(tokenizer: Any) -> None:
    policy = policy_for(tokenizer, 256)
    asyncio.run(policy.act(1.0))
    assert policy.client.asked.end_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)  # type: ignore[attr-defined]


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


class SampledClient:
    """Samples as a server of `inference.engine=transformers`."""

    def __init__(self) -> None:
        self._model = TransformersModel(str(resolve_model("tiny")))

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        request = Request(list(token_ids), {"seed": sampling.seed, "max_tokens": 1}, self._model)
        request.step("0")
        token = np.array(request.choice()["token_ids"], np.int32)
        return Generation(token, np.zeros(1, np.float32), np.zeros(1, np.int32), "length", "", 0.0)


def test_turns_of_an_evaluation_draw_random_numbers_of_their_own(tokenizer: Any) -> None:
    """A model of 128 tokens that are all nearly as likely wrote the same first token in 59 % of its later turns: a
    player who guesses would have one guess, whatever its turns."""
    client: Any = SampledClient()

    async def first_tokens(seed: int) -> list[int]:
        policy = TokenPolicy(client, tokenizer, SamplingParams(seed=seed), episode_id="e", max_length=256)
        policy.begin([{"role": "user", "content": "guess"}])
        for _ in range(3):
            await policy.act(10.0)
            policy.observe([{"role": "user", "content": "wrong"}])
        (arrays,) = policy.samples()
        return [int(token) for token in arrays.token_ids[arrays.policy_mask]]

    found = [asyncio.run(first_tokens(seed)) for seed in range(20)]
    assert sum(later == first for first, *others in found for later in others) < 6  # of 40, with 0.3 expected
    assert asyncio.run(first_tokens(3)) == found[3], "an evaluation repeats exactly"


class ThinkingClient:
    """A stand-in for a server: thinks, answers, and ends its turn."""

    def __init__(self, tokenizer: Any) -> None:
        self._sampled = tokenizer.encode("<think>hm</think>4<|im_end|>", add_special_tokens=False)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        count = len(self._sampled)
        versions = np.full(count, 3, np.int32)
        return Generation(np.array(self._sampled, np.int32), np.full(count, -1, np.float32), versions, "stop", "", 0.0)


def test_an_episode_without_earlier_thinking_is_trained_turn_by_turn(tokenizer: Any) -> None:
    """All turns are in its log; each turn is a sample, and all have the episode's advantage."""
    client: Any = ThinkingClient(tokenizer)
    policy = TokenPolicy(client, tokenizer, SamplingParams(), episode_id="e", max_length=999, thinking="strip")
    spec = EpisodeSpec("e", "g", 0, Task("t", "counting:Counting-v0", 0, {"turns": 3}), SamplingParams(), 8)

    async def play() -> Trajectory | EpisodeFailure:
        maker = EnvironmentMaker(DaemonThreads())
        return await run_episode(spec, lambda: maker.open(spec.task), policy, Deadlines(60, 60, 60), Progress())

    played = asyncio.run(play())
    assert isinstance(played, Trajectory)
    length = len(client._sampled)
    assert [turn.end - turn.start for turn in played.turns] == [length, 0, 0]
    assert [turn.completion_tokens for turn in played.turns] == [length] * 3
    assert [message["role"] for message in played.messages] == ["user", "assistant"] * 3
    assert [int(sample.policy_mask.sum()) for sample in played.samples] == [length] * 3
    found = finished_episode(played)
    assert (found.fault, found.turns, found.samples) == (None, 3, 3)
    assert (found.policy_tokens, found.versions) == (3 * length, ((3, 3 * length),))
    planned = PlannedTrajectory("g", played, (0.5,), 1.0, 3 * length, found.packed_tokens, found.prompt_length)
    sequences = planned.sequences(StoredArrays.of(played))
    assert [set(each.advantages[each.policy_mask].tolist()) for each in sequences] == [{0.5}] * 3
    texts = [tokenizer.decode(sample.token_ids) for sample in played.samples]
    assert all(text.count("hm") == 1 and text.endswith("<think>hm</think>4<|im_end|>") for text in texts)


def test_a_long_turn_that_is_rendered_anew_with_each_short_answer_holds_up_no_other_episode(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30,000 tokens of 81 blanks each took a worker's event loop 2 s, in each later turn of the episode."""
    client: Any = ThinkingClient(tokenizer)
    client._sampled = tokenizer.encode("x" * LARGE_CHARACTERS + "<|im_end|>", add_special_tokens=False)
    length = 4 * LARGE_CHARACTERS
    policy = TokenPolicy(client, tokenizer, SamplingParams(), episode_id="e", max_length=length, thinking="strip")
    threads, observe = [], policy.observe

    def watched(given: Sequence[Message]) -> None:
        threads.append(threading.current_thread())
        observe(given)

    monkeypatch.setattr(policy, "observe", watched)
    spec = EpisodeSpec("e", "g", 0, Task("t", "counting:Counting-v0", 0, {"turns": 3}), SamplingParams(), 8)

    async def play() -> Trajectory | EpisodeFailure:
        maker = EnvironmentMaker(DaemonThreads())
        return await run_episode(spec, lambda: maker.open(spec.task), policy, Deadlines(60, 60, 60), Progress())

    assert isinstance(asyncio.run(play()), Trajectory)
    assert len(threads) == 2
    assert threading.main_thread() not in threads
