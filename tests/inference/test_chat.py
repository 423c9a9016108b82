"""Conversations are extended by token deltas, for the three families of chat templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.chat.templates import Conversation, chat_template_of
from roll_flash.engines.inference import Generation
from roll_flash.errors import ModelError
from roll_flash.models.prepare import resolve_model
from roll_flash.types import FinishReason, Message, SamplingParams

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|header|>' + message['role'] + '<|end_header|>\n\n' + (message['content'] | trim) + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% set content = message['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = '<think>\n\n</think>\n\n' if loop.last else '' %}"
    "{{ '<|im_start|>assistant\n' + thought + content + '<|im_end|>\n' }}"
    "{% elif message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot|>", "qwen3": "<|im_end|>"}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}


def tokenizer_with(template: str | None) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"]}
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=list(TEMPLATES))
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sampled(tokenizer: Any, text: str, finish_reason: FinishReason = "stop", version: int = 3) -> Generation:
    token_ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    logprobs = -np.arange(1, len(token_ids) + 1, dtype=np.float32)
    return Generation(token_ids, logprobs, np.full(len(token_ids), version, np.int32), finish_reason, "server", 0.1)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def rendered(tokenizer: Any, messages: list[Message]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_a_conversation_that_goes_well_is_what_the_template_renders(style: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[style])
    conversation = Conversation(tokenizer, [user("2+2?")])
    for answer, reply in [("<sh>echo 4</sh>", "4"), ("<answer>4</answer>", "thanks")]:
        conversation.add_generation(sampled(tokenizer, answer + ENDS[style]))
        conversation.add_observation([user(reply)])
    assert conversation.token_ids == rendered(tokenizer, conversation.messages)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("unit", ["ls -la\n", "<|eot|>"])
def test_of_megabytes_that_cannot_fit_only_the_beginning_is_tokenised(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five megabytes took half a minute and 1.4 GB with the tokenizer of a real model."""
    tokenizer, lengths = tokenizer_with(CHATML), []
    encode = tokenizer.encode

    def counted(text: str, **settings: Any) -> Any:
        lengths.append(len(text))
        return encode(text, **settings)

    monkeypatch.setattr(tokenizer, "encode", counted)
    for room, characters in ((100, 1_000_000), (100, 500), (-5, 3_000)):
        conversation = Conversation(tokenizer, [user("2+2?")])
        conversation.add_generation(sampled(tokenizer, "4" + ENDS["chatml"]))
        known = len(conversation.token_ids)
        lengths.clear()
        conversation.add_observation([user(unit * (characters // len(unit)))], room)
        assert sum(lengths) < 50_000
        everything = rendered(tokenizer, conversation.messages)
        found = conversation.token_ids
        assert found[: known + room + 1] == everything[: known + room + 1]
        assert found == everything or len(found) > known + room, "what is left out did not fit anyway"


def test_a_turn_that_was_cut_off_is_closed_with_tokens_that_are_not_the_policys(style: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[style])
    conversation = Conversation(tokenizer, [user("2+2?")])
    text = conversation.add_generation(sampled(tokenizer, "let me think", "length"))
    end_of_policy = len(conversation.token_ids)
    conversation.add_observation([user("go on")])
    assert text == "let me think"
    assert conversation.token_ids == rendered(tokenizer, conversation.messages)
    token_ids, mask, logprobs, versions, _ = conversation.samples()[0]
    assert tokenizer.convert_ids_to_tokens(int(token_ids[end_of_policy])) == ENDS[style]
    assert mask.sum() == len("let me think")
    assert not mask[end_of_policy:].any()
    assert (logprobs[~mask] == 0).all()
    assert (versions[~mask] == -1).all()
    assert (versions[mask] == 3).all()
    assert logprobs[mask].tolist() == [-float(i) for i in range(1, 13)]
    assert conversation.prompt_length == int(np.argmax(mask))


def test_the_default_system_prompt_appears_once() -> None:
    tokenizer = tokenizer_with(CHATML)
    conversation = Conversation(tokenizer, [user("hi")])
    conversation.add_generation(sampled(tokenizer, "hello<|im_end|>"))
    conversation.add_observation([user("bye")])
    assert tokenizer.decode(conversation.token_ids).count("Be kind.") == 1


def test_thinking_stays_in_the_context_it_was_sampled_in() -> None:
    tokenizer = tokenizer_with(QWEN3)
    conversation = Conversation(tokenizer, [user("2+2?")])
    text = conversation.add_generation(sampled(tokenizer, "<think>easy</think>\n\n4<|im_end|>"))
    conversation.add_observation([{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}])
    decoded = tokenizer.decode(conversation.token_ids)
    assert text == "<think>easy</think>\n\n4"
    assert decoded.endswith(
        "<think>easy</think>\n\n4<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>"
        "\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


turns = st.lists(
    st.tuples(
        st.text(alphabet="ab <>/\n", min_size=1, max_size=12), st.booleans(), st.text(alphabet="xyz\n ", max_size=12)
    ),
    max_size=5,
)


@given(turns=turns)
def test_tokens_are_only_appended_and_samples_are_kept_as_sampled(turns: list[tuple[str, bool, str]]) -> None:
    for style, template in TEMPLATES.items():
        tokenizer = _cached(style, template)
        conversation = Conversation(tokenizer, [user("go")])
        all_sampled: list[int] = []
        for answer, is_ended, reply in turns:
            before = list(conversation.token_ids)
            generation = sampled(tokenizer, answer + (ENDS[style] if is_ended else ""))
            conversation.add_generation(generation)
            conversation.add_observation([user(reply)])
            all_sampled += generation.token_ids.tolist()
            assert (
                conversation.token_ids[: len(before) + len(generation.token_ids)]
                == before + generation.token_ids.tolist()
            )
        token_ids, mask, *_ = conversation.samples()[0]
        assert token_ids[mask].tolist() == all_sampled


_tokenizers: dict[str, Any] = {}


def _cached(style: str, template: str) -> Any:
    if style not in _tokenizers:
        _tokenizers[style] = tokenizer_with(template)
    return _tokenizers[style]


def test_a_template_that_rewrites_earlier_messages_is_refused_with_the_place() -> None:
    counting = "{{ messages | length }} messages\n" + CHATML
    with pytest.raises(ModelError, match=r"renders earlier messages differently.*1 messages"):
        Conversation(tokenizer_with(counting), [user("hi")])


def test_a_template_that_hides_the_models_turns_is_refused() -> None:
    hiding = CHATML.replace("message['content'] +", "(message['content'] if message['role'] != 'assistant' else '') +")
    tokenizer = tokenizer_with(hiding)
    conversation = Conversation(tokenizer, [user("hi")])
    conversation.add_generation(sampled(tokenizer, "hello<|im_end|>"))
    with pytest.raises(ModelError, match="does not show the model's own earlier turns"):
        conversation.add_observation([user("bye")])


def test_roles_that_the_template_refuses_are_named() -> None:
    refusing = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
    tokenizer = tokenizer_with(refusing)
    conversation = Conversation(tokenizer, [user("hi")])
    conversation.add_generation(sampled(tokenizer, "hello<|im_end|>"))
    with pytest.raises(ModelError, match=r"refuses the roles user, assistant, tool: no tools here"):
        conversation.add_observation([{"role": "tool", "content": "4"}])


def test_a_tokenizer_without_a_template_says_what_to_do() -> None:
    with pytest.raises(ModelError, match="no chat template; use an instruct model"):
        Conversation(tokenizer_with(None), [user("hi")])


def test_the_end_that_was_sampled_is_not_followed_by_the_end_of_earlier_turns() -> None:
    """gpt-oss samples `<|return|>`, and its template ends earlier turns with `<|end|>`."""
    template = CHATML.replace(
        "message['content'] + '<|im_end|>\n'",
        "message['content'] + ('<|eot|>' if loop.last and message['role'] == 'assistant' else '<|im_end|>\n')",
    )
    tokenizer = tokenizer_with(template)
    for end, kept in (("<|eot|>", "<|eot|>"), ("<|im_end|>", "<|im_end|>"), ("", "<|im_end|>")):
        conversation = Conversation(tokenizer, [user("hi")])
        known = len(conversation.token_ids)
        conversation.add_generation(sampled(tokenizer, "hello" + end))
        conversation.add_observation([user("bye")])
        text = tokenizer.decode(conversation.token_ids[known:])
        assert text == f"hello{kept}\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"


def test_servers_are_told_the_end_of_a_turn(style: str) -> None:
    """A base model with such a template names only the end of a document in its files: turns would go on."""
    tokenizer = tokenizer_with(TEMPLATES[style])
    tokenizer.add_special_tokens({"eos_token": "<|begin|>", "additional_special_tokens": list(ENDS.values())})
    wanted = chat_template_of(tokenizer).ends_turns(SamplingParams(stop=("x",)))
    assert wanted == SamplingParams(stop=("x",), end_ids=(tokenizer.convert_tokens_to_ids(ENDS[style]),))


def test_what_ends_only_earlier_turns_does_not_end_a_turn() -> None:
    """After `<|end|>` gpt-oss goes on with the next channel of its turn."""
    template = CHATML.replace(
        "message['content'] + '<|im_end|>\n'",
        "message['content'] + ('<|eot|>' if loop.last and message['role'] == 'assistant' else '<|im_end|>\n')",
    )
    tokenizer = tokenizer_with(template)
    assert chat_template_of(tokenizer).end_of_turn == tokenizer.convert_tokens_to_ids("<|eot|>")


def test_a_template_without_an_end_of_turn_tells_servers_nothing() -> None:
    tokenizer = tokenizer_with("{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}")
    assert chat_template_of(tokenizer).ends_turns(SamplingParams()) == SamplingParams()


def test_turns_must_alternate() -> None:
    tokenizer = tokenizer_with(CHATML)
    conversation = Conversation(tokenizer, [user("hi")])
    with pytest.raises(ValueError, match="must follow a turn of the model"):
        conversation.add_observation([user("bye")])
    conversation.add_generation(sampled(tokenizer, "a"))
    with pytest.raises(ValueError, match="two turns of the model"):
        conversation.add_generation(sampled(tokenizer, "b"))
