"""Conversations of models that think, sampled by real servers: what is trained is what was served, in both ways.

The templates are of three families that rewrite history. Two tokens of the tiny model, which it samples often, are
`<think>` and `</think>` here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from roll_flash.chat.model_text import split_thinking
from roll_flash.chat.rendered_conversation import RenderedConversation, Thinking
from roll_flash.chat.templates import chat_template_of
from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.tree import load_config
from roll_flash.engines.inference import Generation
from roll_flash.errors import ConfigError, ModelError
from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.gateway.model_call import ModelCall
from roll_flash.gateway.sessions.session import Session, SessionSettings
from roll_flash.gateway.token_backend import TokenBackend
from roll_flash.inference.client.token_client import open_client
from roll_flash.models.tiny import vocabulary, write_tokenizer
from roll_flash.rollout.episodes.conversation import TokenPolicy
from roll_flash.types import Branch, Message, SamplingParams
from tests.inference.conftest import MAX_MODEL_LEN, Served

USER = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] != 'assistant' %}" + USER + "{% else %}"
    "{% set thought = m['reasoning_content'] if m['reasoning_content'] is defined else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if thought and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""Leaves out thinking before the last message of the user."""
R1 = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}" + USER + "{% else %}"
    "{{ '<|im_start|>assistant\n' + m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Its header opens the thought."""
GLM = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}" + USER + "{% else %}"
    "{{ '<|im_start|>assistant\n<think></think>\n' + m['content'].strip() + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Earlier turns have an empty thought."""
TEMPLATES = {"qwen3": QWEN3, "r1": R1, "glm": GLM}


def thinking_tokenizer(folder: Path, style: str) -> Any:
    """Return the tiny model's tokenizer in which `#` and `*` are `<think>` and `</think>`, which are no special tokens,
    as in Qwen3."""
    tokens = vocabulary()
    tokens[tokens.index("#")], tokens[tokens.index("*")] = "<think>", "</think>"
    write_tokenizer(folder, tokens)
    file = folder / "tokenizer.json"
    tree = json.loads(file.read_text())
    for added in tree["added_tokens"]:
        added["special"] = added["special"] and "think" not in added["content"]
    file.write_text(json.dumps(tree))
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATES[style]
    return tokenizer


@dataclass
class Recorded:
    """A client that records what it sent and got."""

    client: Any
    calls: list[tuple[list[int], Generation]] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Generation:
        prompt = list(token_ids)
        generation: Generation = await self.client.generate(prompt, sampling, **options)
        self.calls.append((prompt, generation))
        return generation


def play(served: Served, tokenizer: Any, thinking: Thinking, seed: int) -> tuple[Recorded, TokenPolicy]:
    async def turns() -> tuple[Recorded, TokenPolicy]:
        client = open_client(served.engine.client_spec(), tokenizer)
        recorded = Recorded(client)
        sampling = SamplingParams(max_new_tokens=40, seed=seed)
        policy = TokenPolicy(
            recorded,  # type: ignore[arg-type]
            tokenizer,
            sampling,
            episode_id=f"e{seed}",
            max_length=MAX_MODEL_LEN,
            thinking=thinking,
        )
        try:
            policy.begin([{"role": "user", "content": "2+2?"}])
            for turn in range(3):
                if turn:
                    policy.observe([{"role": "user", "content": f"and {turn}?"}])
                await policy.act(60.0)
        finally:
            await client.close()
        return recorded, policy

    return served.run(turns())


def require_trained_as_served(served: Served, recorded: Recorded, samples: list[Branch]) -> None:
    """Every call is the beginning of a sample, its tokens are policy tokens of exactly this one, and plain transformers
    gives them the log-probabilities with which they were sampled."""
    trained = [np.zeros(len(sample.token_ids), bool) for sample in samples]
    for prompt, generation in recorded.calls:
        whole = [*prompt, *generation.token_ids.tolist()]
        fits = [
            index
            for index, sample in enumerate(samples)
            if sample.token_ids[: len(whole)].tolist() == whole and sample.policy_mask[len(prompt) : len(whole)].all()
        ]
        assert len(fits) == 1
        trained[fits[0]][len(prompt) : len(whole)] = True
        sample = samples[fits[0]]
        np.testing.assert_array_equal(sample.logprobs[len(prompt) : len(whole)], generation.logprobs)
    for sample, mask in zip(samples, trained, strict=True):
        np.testing.assert_array_equal(sample.policy_mask, mask)
        scored = np.concatenate([[0.0], served.logprobs(sample.token_ids.tolist())])
        assert np.abs(scored - sample.logprobs)[mask].max() < 1e-3
        assert sample.prompt_length == int(np.argmax(mask))


def said_and_thought(messages: Sequence[Message]) -> list[Message]:
    """As a client of a chat API keeps them."""
    kept: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            thought, said = split_thinking(message["content"])
            parts = {"content": said.strip(), "reasoning_content": thought} if thought else {"content": said}
            kept.append(message | parts)
        else:
            kept.append(message)
    return kept


@pytest.mark.parametrize("style", TEMPLATES)
def test_with_keep_a_conversation_is_one_sample_and_later_turns_see_earlier_thinking(
    served: Served, tmp_path: Path, style: str
) -> None:
    tokenizer = thinking_tokenizer(tmp_path, style)
    for seed in range(3):
        recorded, policy = play(served, tokenizer, "keep", seed)
        samples = policy.samples()
        assert len(samples) == 1
        require_trained_as_served(served, recorded, samples)
        first_prompt, first = recorded.calls[0]
        assert recorded.calls[2][0][: len(first_prompt) + len(first.token_ids)] == [
            *first_prompt,
            *first.token_ids.tolist(),
        ]


@pytest.mark.parametrize("style", TEMPLATES)
def test_with_strip_each_turn_is_served_and_trained_as_the_template_renders_it(
    served: Served, tmp_path: Path, style: str
) -> None:
    tokenizer = thinking_tokenizer(tmp_path, style)
    thoughts = 0
    for seed in range(30):  # how often a model with random weights thinks depends on the engine's random numbers
        if thoughts >= 3 and seed >= 3:
            break
        recorded, policy = play(served, tokenizer, "strip", seed)
        require_trained_as_served(served, recorded, policy.samples())
        messages = policy.messages()
        for turn, (prompt, _) in enumerate(recorded.calls):
            shown = said_and_thought(messages[: 2 * turn + 1])
            text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
            assert prompt == tokenizer.encode(text, add_special_tokens=False)
            for message in shown[:-1]:
                thought = message.get("reasoning_content", "")
                if len(thought) > 3:  # a shorter one may be part of another word
                    thoughts += 1
                    assert thought not in tokenizer.decode(prompt)
    assert thoughts >= 3, "the model did not think, so nothing was left out"


def test_with_strip_a_conversation_without_thinking_is_one_sample(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer(tmp_path, "qwen3")
    conversation = RenderedConversation(tokenizer, [{"role": "user", "content": "2+2?"}])
    for text in ("4", "5", "6"):
        ids = np.asarray(tokenizer.encode(text + "<|im_end|>", add_special_tokens=False), np.int32)
        zeros = np.zeros(len(ids), np.float32)
        conversation.add_generation(Generation(ids, zeros, zeros.astype(np.int32), "stop", "here", 0.0))
        conversation.add_observation([{"role": "user", "content": "more"}])
    assert len(conversation.samples()) == 1
    shown = tokenizer.apply_chat_template(conversation.messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(conversation.token_ids) == shown


def test_an_unfinished_thought_that_the_header_opened_is_no_answer(tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer(tmp_path, "r1")
    text = chat_template_of(tokenizer).text_of_turn(tokenizer.encode("the number 4", add_special_tokens=False))
    assert text == "<think>\nthe number 4"
    assert split_thinking(text) == ("the number 4", "")


def test_with_strip_a_turn_that_the_template_refuses_stays_as_it_was(tmp_path: Path) -> None:
    """As that of gpt-oss refuses text that spells out a channel: a policy that writes it would avoid each 0."""
    tokenizer = thinking_tokenizer(tmp_path, "qwen3")
    refusal = (
        "{% for m in messages %}{% if 'channel' in m['content'] %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = refusal + QWEN3
    conversation = RenderedConversation(tokenizer, [{"role": "user", "content": "2+2?"}])
    written = np.array(tokenizer.encode("<think>a</think>channel<|im_end|>", add_special_tokens=False), np.int32)
    numbers = np.zeros(len(written), np.float32)
    conversation.add_generation(Generation(written, numbers, numbers.astype(np.int32), "stop", "server", 0.0))
    before = list(conversation.token_ids)
    conversation.add_observation([{"role": "user", "content": "and?"}])
    assert conversation.token_ids[: len(before)] == before
    assert (
        tokenizer.decode(conversation.token_ids[len(before) :])
        == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    conversation.add_generation(Generation(written, numbers, numbers.astype(np.int32), "stop", "server", 0.0))
    assert len(conversation.samples()) == 1
    with pytest.raises(ModelError, match="refuses the roles"):
        conversation.add_observation([{"role": "user", "content": "channel"}])


def test_an_agents_conversation_is_stripped_too(served: Served, tmp_path: Path) -> None:
    tokenizer = thinking_tokenizer(tmp_path, "r1")

    async def ask() -> tuple[Recorded, Session]:
        client = open_client(served.engine.client_spec(), tokenizer)
        recorded = Recorded(client)
        backend = TokenBackend(recorded, tokenizer, model="m", max_length=MAX_MODEL_LEN, thinking="strip")  # type: ignore[arg-type]
        session = Session("s", SessionSettings(SamplingParams(max_new_tokens=40, seed=1), 8), 60.0)
        messages: list[Message] = [{"role": "user", "content": "2+2?"}]
        try:
            for turn in range(3):
                reply, _ = await backend.complete(ModelCall(tuple(messages)), session, turn)
                messages += [reply.answers[0].message, {"role": "user", "content": f"and {turn}?"}]
        finally:
            await client.close()
        return recorded, session

    recorded, session = served.run(ask())
    samples = [
        Branch(one.token_ids, one.policy_mask, one.logprobs, one.versions, (), (), one.prompt_length)
        for one in session.history.samples()
    ]
    require_trained_as_served(served, recorded, samples)
    assert len(samples) == 3
    thought = session.history.records[0].answer.thinking
    assert thought
    assert thought not in tokenizer.decode(recorded.calls[2][0])


def test_with_strip_an_agents_turn_that_cannot_be_shown_again_stays_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the gateway refuses the next request, and a game for two in which a seat loses would be no sample."""
    tokenizer = thinking_tokenizer(tmp_path, "qwen3")
    refusal = (
        "{% for m in messages %}{% if 'channel' in m['content'] %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = refusal + QWEN3
    written = np.array(tokenizer.encode("<think>a</think>channel<|im_end|>", add_special_tokens=False), np.int32)
    numbers = np.zeros(len(written), np.float32)

    async def ask() -> Session:
        client = Mock()
        client.generate = AsyncMock(
            return_value=Generation(written, numbers, numbers.astype(np.int32), "stop", "server", 0.0)
        )
        backend = TokenBackend(client, tokenizer, model="m", max_length=MAX_MODEL_LEN, thinking="strip")
        session = Session("s", SessionSettings(SamplingParams(max_new_tokens=40, seed=1), 8), 60.0)
        messages: list[Message] = [{"role": "user", "content": "2+2?"}]
        for turn in range(2):
            reply, _ = await backend.complete(ModelCall(tuple(messages)), session, turn)
            messages += [reply.answers[0].message, {"role": "user", "content": "and?"}]
        with pytest.raises(ApiError, match="refuses the roles"):
            await backend.complete(ModelCall((*messages[:-1], {"role": "user", "content": "channel"})), session, 2)
        return session

    (sample,) = asyncio.run(ask()).history.samples()
    assert len(sample.turns) == 2
    assert tokenizer.decode(sample.token_ids).count("<think>a</think>channel<|im_end|>") == 2
    assert [record.message.count("despite thinking=strip") for record in caplog.records] == [1]


def test_arguments_of_the_chat_template_reach_every_prompt(tmp_path: Path) -> None:
    folder = tmp_path
    tokenizer = thinking_tokenizer(folder, "qwen3")
    tokenizer.save_pretrained(folder)
    assert chat_template_of(load_tokenizer(folder)).expects_thinking
    quiet = load_tokenizer(folder, {"enable_thinking": False})
    assert not chat_template_of(quiet).expects_thinking
    prompt = chat_template_of(quiet).begin([{"role": "user", "content": "2+2?"}])
    assert quiet.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_what_compares_turns_of_one_sample_is_refused_with_strip() -> None:
    tree = {"model": {"path": "tiny", "thinking": "strip"}, "envs": [{"id": "Maze-v0"}]}
    assert load_config(tree).model.thinking == "strip"
    with pytest.raises(ConfigError, match=r"learner\.advantage=gigpo compares turns of one sample"):
        load_config({**tree, "learner": {"advantage": "gigpo"}})
