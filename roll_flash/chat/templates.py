"""A conversation as token ids, extended by chat template and sampled tokens.

Invariants: token ids are only appended; sampled tokens are kept exactly as sampled and never tokenised again; all other
tokens (the prompt, an end of turn that the model did not write, observations, the header of the next turn) come from
the chat template and are not policy tokens. Each turn renders and tokenises only the delta of the template, so the cost
of a turn does not depend on the length of the conversation.

Some templates (Qwen3) drop the thinking of earlier turns when they render again; here it stays, because the model
sampled with it in its context (`rendered_conversation.py` is the other way). A template that renders *given* messages
differently when others follow cannot be extended this way; it raises ModelError at the start of the conversation.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError
from numpy.typing import NDArray

from roll_flash.chat.model_text import THINK_CLOSE, THINK_OPEN, encodable
from roll_flash.engines.inference import Generation, count_experts, join_experts, policy_arrays
from roll_flash.errors import ModelError
from roll_flash.types import Message, SamplingParams

Tools = list[dict[str, Any]] | None
"""Declared tools in OpenAI's format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that a template raises for call arguments or tool schemas of a kind that it does not support."""

CHARACTERS_AT_FIRST = 16
"""Number of characters per token of room that are tokenised first, to find out if the rest could fit: megabytes of text
that cannot fit would take many seconds and gigabytes."""

_SOME_ANSWER = f"[[an answer of the model, {secrets.token_hex(8)}]]"
"""Placeholder of a sampled turn when the template is rendered; the text after it is the delta. No tool that a server or
an agent declares, which is shown before it, can contain it."""

_EXCHANGE: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SOME_ANSWER}]
"""A conversation to try a template with."""
TEMPLATE_KWARGS = "roll_flash_chat_template_kwargs"
"""Attribute of a tokenizer: arguments for its chat template, such as `{"enable_thinking": False}`."""
UNKNOWN_IDS = "roll_flash_unknown_ids"
"""Attribute of a tokenizer: ids of added tokens that the model does not have. gemma3's has one for images, which a text
may spell out; servers end when they look it up."""
_SOME_NAME, _SOME_RESULT = "some_tool_of_ours", "[[a result of a tool]]"
_SOME_TOOL = {
    "type": "function",
    "function": {"name": _SOME_NAME, "description": ".", "parameters": {"type": "object", "properties": {}}},
}


class Arrays(NamedTuple):
    """Arrays of a sample, as in `Trajectory`."""

    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    routed_experts: NDArray[np.int16] | None = None


class Conversation:
    """A conversation that starts with `messages` (at least one) and the template's header of the model's turn.

    Then `add_generation` and `add_observation` alternate. `tools` appear only if the template `shows_tools`. Raises
    ModelError if the template cannot be used.
    """

    def __init__(self, tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> None:
        self._template = chat_template_of(tokenizer)
        self._tools = tools
        self._tokenizer = tokenizer
        self.messages: list[Message] = list(messages)
        """All messages so far; the model's messages as text, for logs."""
        self.token_ids: list[int] = self._begin()
        """All tokens so far; the list grows with the conversation. Read-only for callers."""
        self.prompt_length = len(self.token_ids)
        """Number of tokens before the first policy token."""
        self._generations: list[tuple[int, Generation]] = []
        self._is_models_turn = True

    def _begin(self) -> list[int]:
        return self._template.begin(self.messages, self._tools)

    def add_generation(self, generation: Generation) -> str:
        """Append a sampled turn. Returns its text, as `text_of_turn`."""
        sampled: list[int] = generation.token_ids.tolist()
        text = self._template.text_of_turn(sampled)
        start = len(self.token_ids)
        self._add_turn(text, sampled)
        self._generations.append((start, generation))
        return text

    def add_context(self, text: str, token_ids: Sequence[int] | None) -> None:
        """Append a turn that the model did not sample here: context, no policy tokens. `token_ids`: those that were
        sampled, with this tokenizer; None: those of the text."""
        self._add_turn(text, self._template.tokens_of_turn(text) if token_ids is None else token_ids)

    def _add_turn(self, text: str, token_ids: Sequence[int]) -> None:
        if not self._is_models_turn:
            raise ValueError("two turns of the model in a row: an observation must come between them")
        self._is_models_turn = False
        self.token_ids.extend(token_ids)
        self.messages.append({"role": "assistant", "content": text})

    def add_observation(self, messages: Sequence[Message], room: int | None = None) -> None:
        """Append the environment's messages and the header of the model's next turn; these are not policy tokens.
        Of messages with far more than `room` tokens only the beginning is appended.

        Closes the model's turn first if the model did not (it was cut off, or stopped at a stop string).
        """
        if self._is_models_turn:
            raise ValueError("an observation must follow a turn of the model")
        self._is_models_turn = True
        self.token_ids.extend(self._template.delta(messages, after=self.token_ids[-1], tools=self._tools, room=room))
        self.messages.extend(messages)

    @property
    def sample(self) -> int:
        """Index of the sample that the latest turn belongs to: there is only one."""
        return 0

    @property
    def known_experts(self) -> int:
        """Number of tokens of the current sample whose experts the servers have returned."""
        return count_experts([generation for _, generation in self._generations])

    def samples(self) -> list[Arrays]:
        """Return the arrays of each sample, in the order of their turns."""
        return [arrays_of(self.token_ids, self._generations)]


def arrays_of(token_ids: Sequence[int], generations: Sequence[tuple[int, Generation]]) -> Arrays:
    """Return the arrays of a sample, whose generations begin at the given places."""
    length = len(token_ids)
    experts = join_experts([generation for _, generation in generations], length)
    return Arrays(np.asarray(token_ids, np.int32), *policy_arrays(length, generations), experts)


class ChatTemplate:
    """The chat template of one tokenizer, rendered in pieces, with the tokenizer's `chat_template_kwargs`."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; use an instruct model, or set "
                "`chat_template` in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._kwargs: dict[str, Any] = getattr(tokenizer, TEMPLATE_KWARGS, {})
        self._checked: set[tuple[object, ...]] = set()
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._unknown_ids: frozenset[int] = frozenset(getattr(tokenizer, UNKNOWN_IDS, ()))
        if self._unknown_ids:
            self._require_known_tokens()

    def _require_known_tokens(self) -> None:
        shown = self._render(_EXCHANGE[:1], with_header=True)
        if not self._unknown_ids.isdisjoint(self._tokenizer.encode(shown, add_special_tokens=False)):
            raise ModelError(
                f"{self._name}: the chat template shows tokens that the model does not have; copy the tokenizer of "
                "this model into its folder"
            )

    @cached_property
    def opened_thinking(self) -> str:
        """Beginning of a thought that the header of the model's turn ends with, such as `<think>\\n`; else empty."""
        header = self._render(_EXCHANGE[:1], with_header=True)
        _, opened, rest = header.rpartition(THINK_OPEN)
        return opened + rest if opened and not rest.strip() else ""

    @cached_property
    def expects_thinking(self) -> bool:
        """True if the template is one of a model that thinks before it answers, and does not tell it not to."""
        header = self._render(_EXCHANGE[:1], with_header=True)
        is_closed = header.rstrip().endswith(THINK_CLOSE)
        return not is_closed and any(mark in str(self._tokenizer.chat_template) for mark in _THINKING_MARKS)

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token with which the model ends its turn; None if the template shows none.

        Servers must end a turn at it, too: the files of a base model name only the end of a document.
        """
        try:
            return self._end_after(_EXCHANGE)
        except ModelError:
            return None  # a template for one turn

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """Special tokens that end a turn of the model. The last turn may end in another way than earlier ones (gpt-oss
        samples `<|return|>`, which is `<|end|>` in its history)."""
        return frozenset({self.end_of_turn, self._end_after([*_EXCHANGE, *_EXCHANGE])} - {None})  # type: ignore[arg-type]

    def _end_after(self, messages: list[Message]) -> int | None:
        """Return the special token after the first answer in `messages`."""
        end = self._render(messages, with_header=False).partition(_SOME_ANSWER)[2]
        first = self._tokenize(end)[0] if end else None
        return first if first in self._special_ids else None

    def ends_turns(self, sampling: SamplingParams) -> SamplingParams:
        """Return `sampling` for a turn of this template."""
        return sampling if self.end_of_turn is None else replace(sampling, end_ids=(self.end_of_turn,))

    def text_of_turn(self, sampled: Sequence[int]) -> str:
        """Return the text of a sampled turn without special tokens. It begins with `<think>` also if the header of the
        turn has opened it: nobody else could tell an unfinished thought from an answer."""
        said = self._tokenizer.decode(sampled, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self.opened_thinking + str(said)

    def tokens_of_turn(self, text: str) -> list[int]:
        """Return the tokens of a turn's text, without an end of turn."""
        return self._tokenize(text.removeprefix(self.opened_thinking))

    def text_of_calls(self, calls: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        """Return tool calls in OpenAI's format as the model writes them after its text. Raises ModelError for a
        template that does not show them."""
        turn: Message = {
            "role": "assistant",
            "content": _SOME_ANSWER,
            "tool_calls": [_with_values(one) for one in calls],
        }
        whole = self._render([_EXCHANGE[0], turn], with_header=False, tools=tools)
        end = self._render(_EXCHANGE, with_header=False, tools=tools).partition(_SOME_ANSWER)[2]
        header = self._render(_EXCHANGE[:1], with_header=True, tools=tools).removesuffix(self.opened_thinking)
        before, found, text = whole.partition(_SOME_ANSWER)
        if not found:  # Llama 3 shows calls instead of the text
            text = before.removeprefix(header)
        if text in (whole, end) or not text.endswith(end):
            raise ModelError(f"{self._name}: the chat template does not show tool calls")
        return text.removesuffix(end)

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template renders declared tools, and does not change them when messages follow."""
        try:
            self._check(_EXCHANGE[:1], [_SOME_TOOL])
            return _SOME_NAME in self._render(_EXCHANGE[:1], with_header=True, tools=[_SOME_TOOL])
        except ModelError:
            return False

    @cached_property
    def shows_tool_results(self) -> bool:
        """True if the template renders messages with the role `tool`; False if it does not show tools."""
        if not self.shows_tools:
            return False
        result: Message = {"role": "tool", "tool_call_id": "call00000", "name": _SOME_NAME, "content": _SOME_RESULT}
        try:
            return _SOME_RESULT in self._render([*_EXCHANGE, result], with_header=True, tools=[_SOME_TOOL])
        except ModelError:
            return False

    def left_out(self, messages: list[Message]) -> list[str]:
        """Return the roles of messages of system and user whose text the template does not show. Raises ModelError."""
        shown = self._render(messages, with_header=True)
        asked = [message for message in messages if message["role"] in ("system", "user")]
        return [
            message["role"] for message in asked if encodable(str(message.get("content") or "").strip()) not in shown
        ]

    def begin(self, messages: list[Message], tools: Tools = None) -> list[int]:
        """Return the tokens of `messages` and the header of the model's turn. Raises ModelError if the template
        renders them differently when others follow."""
        if not messages:
            raise ValueError("a conversation needs at least one message")
        self._check(messages, tools)
        return self.prompt(messages, tools)

    def prompt(self, messages: list[Message], tools: Tools = None, room: int | None = None) -> list[int]:
        """Same as `begin`, without the check, for a prompt that is never extended. With `room`, a prompt with far more
        tokens than `room` is cut to its beginning, which is still longer than `room`."""
        return self._tokenize(self._render(messages, with_header=True, tools=tools), room)

    def delta(
        self, messages: Sequence[Message], *, after: int, tools: Tools = None, room: int | None = None
    ) -> list[int]:
        """Return the tokens after the model's text: end of turn (unless it is already `after`, the last token),
        `messages`, header of the next turn. `room` as in `prompt`."""
        text = self._render([*_EXCHANGE, *messages], with_header=True, tools=tools)
        _, found, rest = text.partition(_SOME_ANSWER)
        if not found or not rest:
            raise ModelError(
                f"{self._name}: the chat template does not show the model's own earlier turns as they were"
            )
        delta = self._tokenize(rest, room)
        is_closed = after in self._end_ids and delta[0] in self._end_ids
        return delta[1:] if is_closed else delta

    def _check(self, messages: list[Message], tools: Tools = None) -> None:
        """Check that `messages` render the same when others follow, once per sequence of roles. Raises ModelError."""
        key = (tools is not None, *(str(message["role"]) for message in messages))
        if key in self._checked:
            return
        alone = self._render(messages, with_header=False, tools=tools)
        followed = self._render([*messages, _EXCHANGE[1], _EXCHANGE[0]], with_header=True, tools=tools)
        if not followed.startswith(alone):
            place = next(i for i, (a, b) in enumerate(zip(alone, followed + "\0", strict=False)) if a != b)
            raise ModelError(
                f"{self._name}: the chat template renders earlier messages differently when later ones follow "
                f"(from {alone[max(0, place - 20) : place + 20]!r} on), so that a conversation cannot be extended "
                "token by token; use a template without that"
            )
        self._checked.add(key)

    def _render(self, messages: list[Message], *, with_header: bool, tools: Tools = None) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=with_header, **self._kwargs
            )
        except TemplateSyntaxError as error:
            raise ModelError(f"{self._name}: the chat template is no Jinja: {error}") from None
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ModelError(f"{self._name}: the chat template refuses the roles {roles}: {error}") from None
        except TEMPLATE_ERRORS as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise ModelError(f"{self._name}: the chat template cannot show these messages and tools: {what}") from None
        return encodable(str(text))

    def _tokenize(self, text: str, room: int | None = None) -> list[int]:
        """Tokenise `text`, or only a beginning of it if that already has more than twice `room` tokens."""
        most = len(text) if room is None else 2 * max(0, room) + 64
        length = CHARACTERS_AT_FIRST * most
        while length < len(text):
            token_ids = self._encode(text[:length])
            if len(token_ids) > most:
                return token_ids
            length *= 4
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [each for each in token_ids if each not in self._unknown_ids] if self._unknown_ids else token_ids

    @property
    def _name(self) -> str:
        return str(self._tokenizer.name_or_path) or "tokenizer"


def _with_values(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call, which OpenAI's format has as text: templates expect objects."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


_templates: WeakKeyDictionary[Any, tuple[str, ChatTemplate]] = WeakKeyDictionary()
_THINKING_MARKS = (THINK_OPEN, "enable_thinking", "reasoning_content", "<|channel|>analysis")
"""What is in the chat templates of models that think."""


def chat_template_of(tokenizer: Any) -> ChatTemplate:
    """Return the cached `ChatTemplate` of a tokenizer; create a new one if its template was replaced."""
    source = f"{json.dumps(getattr(tokenizer, TEMPLATE_KWARGS, {}))}{tokenizer.chat_template}"
    known = _templates.get(tokenizer)
    if known is None or known[0] != source:
        known = (source, ChatTemplate(tokenizer))
        _templates[tokenizer] = known
    return known[1]
