"""Episodes that begin with recorded turns: the same tokens as context, nothing of them trained, answers compared."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_run import VERSION, play, play_with, record_of, spec_of
from replay_envs import Echo

from roll_flash.chat.openai_client import ChatReply
from roll_flash.envs import register_env
from roll_flash.planner.measured.recording import _episode
from roll_flash.rollout.episodes.conversation import ChatPolicy
from roll_flash.rollout.episodes.prefix import Prefix
from roll_flash.stream import finished_episode
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams, Task, Trajectory
from tests.inference.test_chat_thinking import thinking_tokenizer

TEXTS = ("one", "two!", "three")


def task_of(**kwargs: Any) -> Task:
    return Task("Echo-v0:7", "Echo-v0", 7, kwargs)


def recorded(task: Task | None = None, texts: tuple[str, ...] = TEXTS, **options: Any) -> Trajectory:
    outcome, _, _ = play(spec_of(task or task_of()), texts, **options)
    assert isinstance(outcome, Trajectory), outcome
    return outcome


def forked(count: int, *, of: Trajectory | None = None, **changes: Any) -> EpisodeSpec:
    """An episode that begins with `count` turns of a recorded one, in an environment with `changes`."""
    prefix = Prefix.of_record(record_of(of or recorded()), count)
    return spec_of(replace(task_of(**changes), prefix=prefix.encode()), "g00000002-r1")


@pytest.mark.parametrize("turns", [1, 2])
def test_recorded_turns_are_the_same_tokens_but_context_and_the_model_is_asked_only_for_the_rest(turns: int) -> None:
    first = recorded()
    fork, client, _ = play(forked(turns, of=first), ["another", "end"][: 3 - turns])
    assert isinstance(fork, Trajectory)
    start = first.turns[turns].start
    np.testing.assert_array_equal(fork.token_ids[:start], first.token_ids[:start])
    assert client.prompts[0] == first.token_ids[:start].tolist()
    assert len(client.prompts) == 3 - turns
    own = np.zeros(len(fork.token_ids), np.bool_)
    for turn in fork.turns[turns:]:
        own[turn.start : turn.end] = True
    np.testing.assert_array_equal(fork.policy_mask, own)
    assert set(fork.versions[~own]) == {-1}
    assert set(fork.versions[own]) == {VERSION}
    assert not fork.logprobs[~own].any()
    assert fork.prompt_length == start
    assert [turn.in_prefix for turn in fork.turns] == [number < turns for number in range(3)]
    assert [turn.action for turn in fork.turns[:turns]] == list(TEXTS[:turns])
    assert fork.reward == sum(len(turn.action) for turn in fork.turns)
    assert fork.messages[: 1 + 2 * turns] == first.messages[: 1 + 2 * turns]


def test_the_books_of_the_learner_have_only_what_was_sampled_after_the_recorded_turns() -> None:
    fork, _, _ = play(forked(2), ["end"])
    assert isinstance(fork, Trajectory)
    ended = finished_episode(fork)
    assert ended.policy_tokens == ended.trained_tokens == len("end") + 1
    assert ended.versions == ((VERSION, len("end") + 1),)
    assert [tokens for tokens, _, _ in ended.own_turns] == [0, 0, len("end") + 1]
    assert ended.fault is None
    record = record_of(fork)
    assert (record["completion_tokens"], record["policy_tokens"]) == (len("end") + 1, len("end") + 1)


def test_a_plan_measures_only_turns_that_the_model_was_asked_for() -> None:
    fork, _, _ = play(forked(2), ["end"])
    assert isinstance(fork, Trajectory)
    [turn] = _episode(record_of(fork)).turns
    assert (turn.tokens, turn.prompt, turn.first_version) == (len("end") + 1, fork.turns[2].start, VERSION)


def test_a_fork_can_be_forked_with_the_turns_that_it_was_given() -> None:
    fork, _, _ = play(forked(1), ["another", "end"])
    assert isinstance(fork, Trajectory)
    again, client, _ = play(forked(2, of=fork), ["last"])
    assert isinstance(again, Trajectory)
    assert client.prompts == [fork.token_ids[: fork.turns[2].start].tolist()]


def test_a_fork_that_was_interrupted_goes_on_after_its_own_finished_turns() -> None:
    first, _, sent = play(forked(1), ["another", "end"])
    assert [turn.index for turn in sent] == [0], "of its own turns"
    again, client, _ = play(replace(forked(1), played=tuple(turn.record for turn in sent)), ["other"])
    assert isinstance(first, Trajectory)
    assert isinstance(again, Trajectory)
    assert len(client.prompts) == 1
    assert again.info["continued_turns"] == 1
    assert [turn.action for turn in again.turns] == ["one", "another", "other"]
    end = first.turns[2].start
    np.testing.assert_array_equal(again.policy_mask[:end], first.policy_mask[:end])


def test_another_tokenizer_gets_the_recorded_turns_as_text(tmp_path: Path) -> None:
    """Its chat template is another one too, so that the recorded tokens would be wrong."""
    tokenizer = thinking_tokenizer(tmp_path, "qwen3")
    fork, client, _ = play(forked(2), ["end"], tokenizer=tokenizer)
    assert isinstance(fork, Trajectory)
    text = tokenizer.decode(client.prompts[0])
    shown = tokenizer.apply_chat_template(list(fork.messages[:-1]), tokenize=False, add_generation_prompt=True)
    assert text == shown


def test_earlier_thinking_is_stripped_from_recorded_turns_and_no_sample_is_without_a_sampled_token(
    tmp_path: Path,
) -> None:
    """`#` and `*` are `<think>` and `</think>` here."""
    tokenizer = thinking_tokenizer(tmp_path, "qwen3")
    texts = ("<think>\nhm\n</think>\n\none", "<think>\nso\n</think>\n\ntwo!", "three")
    first = recorded(texts=texts, tokenizer=tokenizer, thinking="strip")
    assert len(first.samples) == 3
    fork, client, _ = play(forked(2, of=first), ["end"], tokenizer=tokenizer, thinking="strip")
    assert isinstance(fork, Trajectory)
    assert tokenizer.decode(client.prompts[0]).count("hm") == 1, "in the environment's answer"
    assert len(fork.samples) == 1
    assert finished_episode(fork).policy_tokens == len("end") + 1
    assert [(turn.start, turn.end) for turn in fork.turns[:2]] == [(0, 0), (0, 0)]


class Endpoint:
    """A stand-in for the client of an endpoint: it always says `end`."""

    takes_tools = True

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    async def chat(self, messages: Any, sampling: SamplingParams, **_: Any) -> ChatReply:
        self.asked.append([dict(message) for message in messages])
        return ChatReply("end", "stop", 10, 3, 0.1)


def test_an_endpoint_gets_the_recorded_turns_as_messages() -> None:
    endpoint: Any = Endpoint()
    fork = asyncio.run(play_with(ChatPolicy(endpoint, SamplingParams()), forked(2)))
    assert isinstance(fork, Trajectory)
    said = [(message["role"], message["content"]) for message in endpoint.asked[0]]
    assert said == [
        ("user", "say something"),
        ("assistant", "one"),
        ("user", "one with seed 7"),
        ("assistant", "two!"),
        ("user", "two! with seed 7"),
    ]
    assert record_of(fork)["prompt_tokens"] == 10


def failed(spec: EpisodeSpec) -> str:
    """The message of an episode that fails before the model is asked."""
    outcome, client, _ = play(spec, [])
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == "env_error"
    assert client.prompts == []
    return outcome.message


def test_an_answer_that_differs_is_named_at_its_turn(tmp_path: Path) -> None:
    changes = tmp_path / "changes"
    changes.write_text("something else")
    message = failed(forked(2, changes=str(changes)))
    assert message == "in turn 1 the environment answers 'something else', which is not as recorded"


def test_a_reward_an_end_and_an_opening_that_differ_are_named_too() -> None:
    first = recorded()
    others = replace(first, turns=(replace(first.turns[0], reward=9.5), *first.turns[1:]))
    assert "in turn 0 the environment gives the reward 3 and not 9.5" in failed(forked(1, of=others))
    assert "in turn 1 the environment ends the episode" in failed(forked(2, turns=2))
    assert "before turn 0 the environment shows 'hello'" in failed(forked(1, opening="hello"))


def test_turns_of_a_nondeterministic_environment_or_of_an_agent_with_its_own_loop_are_not_repeated() -> None:
    spec = forked(1)
    chance = replace(spec, task=replace(spec.task, env_id="ChanceEcho-v0"))
    assert "registered as nondeterministic" in failed(chance)
    own = replace(spec, task=replace(spec.task, env_id="LoopingEcho-v0"))
    assert "a loop of its own" in failed(own)


class LoopingEcho(Echo):
    runs_own_loop = True


register_env("LoopingEcho-v0", LoopingEcho)


def test_recorded_turns_that_leave_no_turn_or_no_room_fail_the_episode() -> None:
    assert "all of the 2 that max_turns allows" in failed(replace(forked(2), max_turns=2))
    outcome, client, _ = play(forked(2), [], max_length=60)
    assert isinstance(outcome, EpisodeFailure)
    assert (outcome.cause, client.prompts) == ("prompt_too_long", [])


def test_the_score_at_the_end_of_a_run_is_no_reward_of_a_turn() -> None:
    """`conclude` adds it to the last turn, and only the step itself can be compared."""
    outcome, _, _ = play(replace(spec_of(task_of()), max_turns=2), TEXTS)
    record = record_of(outcome)
    assert record["end"] == "max_turns"
    record["turns"][1]["reward"] += 5.0
    prefix = Prefix.of_record(record, 2)
    assert [turn.reward for turn in prefix.turns] == [3.0, None]


def test_a_task_with_recorded_turns_is_the_same_after_a_checkpoint() -> None:
    task = forked(2).task
    assert Task(**json.loads(json.dumps(task.to_dict()))) == task
