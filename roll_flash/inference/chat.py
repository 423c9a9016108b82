"""A conversation as token ids: token in, token out.

Invariants: token ids are only ever appended; what the model sampled is kept exactly as sampled and is never tokenised
again; all else (the prompt, the end of a turn that the model did not write, observations, the header of the next turn)
comes from the chat template and is not the policy's. Of the template only the delta is rendered and tokenised at each
turn, so that a turn costs the same however long the conversation is.

A template that drops an earlier turn's thinking when it renders again (Qwen3) keeps it here, because the model's
context is what it was sampled with. A template that renders *given* messages differently when others follow cannot be
extended this way, and is refused with a ModelError when the conversation begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from roll_flash.envs.model_text import encodable
from roll_flash.errors import ModelError
from roll_flash.inference.engine import Generation
from roll_flash.types import Message

Tools = list[dict[str, Any]] | None
"""Declared tools in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
Arrays = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32]]

UNFIT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises for arguments of a call, or schemas of a tool, that are not of the kind it was written for."""

CHARACTERS_AT_FIRST = 16
"""Tokenised for each token of which there is room, before it is known whether the rest could fit: megabytes that do not
take many seconds and gigabytes."""

_SOME_ANSWER = "[[an answer of the model]]"
"""Stands for a sampled turn while the template is rendered; what follows it is the delta."""

_SOME_NAME, _SOME_RESULT = "some_tool_of_ours", "[[a result of a tool]]"
_SOME_TOOL = {
    "type": "function",
    "function": {"name": _SOME_NAME, "description": ".", "parameters": {"type": "object", "properties": {}}},
}


class Conversation:
    """Begins with `messages` (at least one) and the template's header of the model's turn.

    Then `add_generation` and `add_observation` alternate. `tools` are shown by a template that `shows_tools`, and by
    others not at all. Raises ModelError for a template that cannot be used.
    """

    def __init__(self, tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> None:
        self._template = chat_template_of(tokenizer)
        self._tools = tools
        self._tokenizer = tokenizer
        self.messages: list[Message] = list(messages)
        """All messages so far; the model's as text, for people to read."""
        self.token_ids: list[int] = self._template.begin(self.messages, tools)
        """All tokens so far. Read only: it grows with the conversation."""
        self.prompt_length = len(self.token_ids)
        """Tokens before the first policy token."""
        self._generations: list[tuple[int, Generation]] = []
        self._is_models_turn = True

    def add_generation(self, generation: Generation) -> str:
        """Append a sampled turn. Returns its text, without the end-of-turn token and other special tokens."""
        if not self._is_models_turn:
            raise ValueError("two turns of the model in a row: an observation must come between them")
        self._is_models_turn = False
        sampled: list[int] = generation.token_ids.tolist()
        self._generations.append((len(self.token_ids), generation))
        self.token_ids.extend(sampled)
        text = str(self._tokenizer.decode(sampled, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        self.messages.append({"role": "assistant", "content": text})
        return text

    def add_observation(self, messages: Sequence[Message], room: int | None = None) -> None:
        """Append what the environment answered and the header of the model's next turn; none of it is the policy's.
        Of what cannot fit into `room` tokens some are left out.

        Closes the model's turn first if the model did not (it was cut off, or stopped at a stop string).
        """
        if self._is_models_turn:
            raise ValueError("an observation must follow a turn of the model")
        self._is_models_turn = True
        self.token_ids.extend(self._template.delta(messages, after=self.token_ids[-1], tools=self._tools, room=room))
        self.messages.extend(messages)

    def arrays(self) -> Arrays:
        """`token_ids`, `policy_mask`, `logprobs`, `versions` of a `Trajectory`, each of shape [T]."""
        length = len(self.token_ids)
        mask = np.zeros(length, np.bool_)
        logprobs = np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        for start, generation in self._generations:
            span = slice(start, start + len(generation.token_ids))
            mask[span] = True
            logprobs[span] = generation.logprobs
            versions[span] = generation.versions
        return np.asarray(self.token_ids, np.int32), mask, logprobs, versions


class ChatTemplate:
    """The chat template of one tokenizer, rendered in pieces."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; use an instruct model, or set "
                "`chat_template` in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._checked: set[tuple[object, ...]] = set()
        self._special_ids = frozenset(tokenizer.all_special_ids)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether declared tools are rendered, and stay as they are when messages follow."""
        messages: list[Message] = [{"role": "user", "content": "."}]
        try:
            self._check(messages, [_SOME_TOOL])
            return _SOME_NAME in self._render(messages, with_header=True, tools=[_SOME_TOOL])
        except ModelError:
            return False

    @cached_property
    def shows_tool_results(self) -> bool:
        """Whether messages of the role `tool` are rendered as what they are; only where the template knows tools."""
        if not self.shows_tools:
            return False
        result: Message = {"role": "tool", "tool_call_id": "call00000", "name": _SOME_NAME, "content": _SOME_RESULT}
        before: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SOME_ANSWER}]
        try:
            return _SOME_RESULT in self._render([*before, result], with_header=True, tools=[_SOME_TOOL])
        except ModelError:
            return False

    def begin(self, messages: list[Message], tools: Tools = None) -> list[int]:
        """All of `messages` and the header of the model's turn. Raises ModelError for a template that would render
        them differently when others follow."""
        if not messages:
            raise ValueError("a conversation needs at least one message")
        self._check(messages, tools)
        return self.prompt(messages, tools)

    def prompt(self, messages: list[Message], tools: Tools = None, room: int | None = None) -> list[int]:
        """As `begin`, for a prompt that is never rendered again, so that nothing has to be checked.

        With `room` only the beginning of what has far more tokens than that."""
        return self._tokenize(self._render(messages, with_header=True, tools=tools), room)

    def delta(
        self, messages: Sequence[Message], *, after: int, tools: Tools = None, room: int | None = None
    ) -> list[int]:
        """What follows the model's text: end of turn (unless `after`, its last token, is that), `messages`, header of
        the next turn. `room` as for `prompt`."""
        before: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SOME_ANSWER}]
        text = self._render([*before, *messages], with_header=True, tools=tools)
        _, found, rest = text.partition(_SOME_ANSWER)
        if not found or not rest:
            raise ModelError(
                f"{self._name}: the chat template does not show the model's own earlier turns as they were"
            )
        delta = self._tokenize(rest, room)
        is_closed = delta[0] == after and delta[0] in self._special_ids
        return delta[1:] if is_closed else delta

    def _check(self, messages: list[Message], tools: Tools = None) -> None:
        """Given messages must look the same when others follow. Once for each sequence of roles."""
        key = (tools is not None, *(str(message["role"]) for message in messages))
        if key in self._checked:
            return
        alone = self._render(messages, with_header=False, tools=tools)
        answer: Message = {"role": "assistant", "content": _SOME_ANSWER}
        followed = self._render([*messages, answer, {"role": "user", "content": "."}], with_header=True, tools=tools)
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
                messages, tools=tools, tokenize=False, add_generation_prompt=with_header
            )
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ModelError(f"{self._name}: the chat template refuses the roles {roles}: {error}") from None
        except UNFIT as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise ModelError(f"{self._name}: the chat template cannot show these messages and tools: {what}") from None
        return encodable(str(text))

    def _tokenize(self, text: str, room: int | None = None) -> list[int]:
        """Where a beginning of the text has twice as many tokens as there is `room` for, those: all of it has more."""
        most = len(text) if room is None else 2 * max(0, room) + 64
        length = CHARACTERS_AT_FIRST * most
        while length < len(text):
            token_ids: list[int] = self._tokenizer.encode(text[:length], add_special_tokens=False)
            if len(token_ids) > most:
                return token_ids
            length *= 4
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @property
    def _name(self) -> str:
        return str(self._tokenizer.name_or_path) or "tokenizer"


_templates: WeakKeyDictionary[Any, tuple[str, ChatTemplate]] = WeakKeyDictionary()


def chat_template_of(tokenizer: Any) -> ChatTemplate:
    """One `ChatTemplate` for each tokenizer, made again if its template was replaced."""
    source = str(tokenizer.chat_template)
    known = _templates.get(tokenizer)
    if known is None or known[0] != source:
        known = (source, ChatTemplate(tokenizer))
        _templates[tokenizer] = known
    return known[1]
