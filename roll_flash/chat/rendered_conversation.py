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
from roll_flash.chat.templates import Arrays, Conversation, Tools, arrays_of, chat_template_of
from roll_flash.engines.inference import Generation, count_experts
from roll_flash.types import Message

Thinking = Literal["keep", "strip"]
"""Whether later turns of a conversation see earlier thinking (`model.thinking`)."""


class RenderedConversation:
    """Same methods as `Conversation`. Raises ModelError if the template cannot be used."""

    def __init__(self, tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> None:
        if not messages:
            raise ValueError("a conversation needs at least one message")
        self._template = chat_template_of(tokenizer)
        self._tools = tools
        self.messages: list[Message] = list(messages)
        """All messages so far; the model's as it wrote them, for logs."""
        self._shown: list[Message] = list(messages)
        """All messages so far as the template gets them: thinking is in `reasoning_content`."""
        self.token_ids: list[int] = self._template.prompt(self._shown, tools)
        """The prompt of the next turn, or what the last turn was given and wrote. Read-only for callers."""
        self.prompt_length = len(self.token_ids)
        """Number of tokens before the first policy token."""
        self._ended: list[Arrays] = []
        self._generations: list[tuple[int, Generation]] = []
        self._is_models_turn = True

    @property
    def sample(self) -> int:
        """Index of the sample that the latest turn belongs to."""
        return len(self._ended)

    def add_generation(self, generation: Generation) -> str:
        """Append a sampled turn. Returns its text, as `ChatTemplate.text_of_turn`."""
        sampled: list[int] = generation.token_ids.tolist()
        text = self._template.text_of_turn(sampled)
        start = len(self.token_ids)
        self._add_turn(text, sampled)
        self._generations.append((start, generation))
        return text

    def add_context(self, text: str, token_ids: Sequence[int] | None) -> None:
        """As in `Conversation`. A sample of nothing but such turns is left out when the next prompt does not go on
        where it ended."""
        self._add_turn(text, self._template.tokens_of_turn(text) if token_ids is None else token_ids)

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
        """Append the environment's messages and render the prompt of the next turn. `room` as in `Conversation`."""
        if self._is_models_turn:
            raise ValueError("an observation must follow a turn of the model")
        self._is_models_turn = True
        self.messages.extend(messages)
        self._shown.extend(messages)
        most = None if room is None else len(self.token_ids) + room
        prompt = self._template.prompt(self._shown, self._tools, most)
        if self._generations and prompt[: len(self.token_ids)] != self.token_ids:
            self._ended.append(arrays_of(self.token_ids, self._generations))
            self._generations = []
        self.token_ids = prompt

    @property
    def known_experts(self) -> int:
        """Number of tokens of the current sample whose experts the servers have returned."""
        return count_experts([generation for _, generation in self._generations])

    def samples(self) -> list[Arrays]:
        """Return the arrays of each sample, in the order of their turns. The last is left out if it has no turn."""
        last = [arrays_of(self.token_ids, self._generations)] if self._generations else []
        return [*self._ended, *last]


def open_conversation(
    thinking: Thinking, tokenizer: Any, messages: Sequence[Message], tools: Tools = None
) -> Conversation | RenderedConversation:
    """Begin a conversation in which later turns see earlier thinking, or do not."""
    kind = Conversation if thinking == "keep" else RenderedConversation
    return kind(tokenizer, messages, tools)
