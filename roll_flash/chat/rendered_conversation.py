"""A conversation that the chat template renders anew for each turn, so that earlier thinking is left out.

Servers of chat APIs do this: the client sends the messages, and the template drops what the model thought before. Here
each turn keeps exactly the tokens that the model was given and those that it sampled. A turn whose prompt goes on where
the turn before ended extends its sample; any other begins a sample of its own. So what is trained is what was served,
and tokens that a template leaves out of a later prompt are context of no later turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from roll_flash.chat.model_text import split_thinking
from roll_flash.chat.templates import Arrays, Conversation, Tools, arrays_of
from roll_flash.errors import ModelError
from roll_flash.types import Message

Thinking = Literal["keep", "strip"]
"""Whether later turns of a conversation see earlier thinking (`model.thinking`)."""


class RenderedConversation(Conversation):
    """`token_ids` are the prompt of the next turn, or what the last turn was given and wrote. A sample of nothing but
    `add_context` is left out when the next prompt does not go on where it ended."""

    def _begin(self) -> list[int]:
        if not self.messages:
            raise ValueError("a conversation needs at least one message")
        self._shown: list[Message] = list(self.messages)
        """All messages so far as the template gets them: thinking is in `reasoning_content`."""
        self._ended: list[Arrays] = []
        return self._template.prompt(self._shown, self._tools)

    @property
    def sample(self) -> int:
        """Index of the sample that the latest turn belongs to."""
        return len(self._ended)

    def _add_turn(self, text: str, token_ids: Sequence[int]) -> None:
        if not self._is_models_turn:
            raise ValueError("two turns of the model in a row: an observation must come between them")
        self._is_models_turn = False
        self.token_ids = [*self.token_ids, *token_ids]
        thinking, said = split_thinking(text)
        self.messages.append({"role": "assistant", "content": text})
        self._shown.append(
            {"role": "assistant", "content": said.strip() if thinking else said}
            | ({"reasoning_content": thinking} if thinking else {})
        )

    def add_observation(self, messages: Sequence[Message], room: int | None = None) -> None:
        """Append the environment's messages and render the prompt of the next turn. `room` as in `Conversation`. If the
        template refuses an earlier turn of the model (gpt-oss: one that spells out a channel), all stays as it was.
        Raises ModelError if the template refuses the environment's messages."""
        if self._is_models_turn:
            raise ValueError("an observation must follow a turn of the model")
        self._is_models_turn = True
        self.messages.extend(messages)
        self._shown.extend(messages)
        most = None if room is None else len(self.token_ids) + room
        try:
            prompt = self._template.prompt(self._shown, self._tools, most)
        except ModelError:  # perhaps it refuses what the model wrote, which must not cost the sample
            delta = self._template.delta(messages, after=self.token_ids[-1], tools=self._tools, room=room)
            prompt = [*self.token_ids, *delta]
        if self._generations and prompt[: len(self.token_ids)] != self.token_ids:
            self._ended.append(arrays_of(self.token_ids, self._generations))
            self._generations = []
        self.token_ids = prompt

    def samples(self) -> list[Arrays]:
        """As in `Conversation`; the last is left out if it has no turn."""
        last = [arrays_of(self.token_ids, self._generations)] if self._generations else []
        return [*self._ended, *last]


def open_conversation(
    thinking: Thinking, tokenizer: Any, messages: Sequence[Message], tools: Tools = None
) -> Conversation:
    """Begin a conversation in which later turns see earlier thinking, or do not."""
    kind = Conversation if thinking == "keep" else RenderedConversation
    return kind(tokenizer, messages, tools)
