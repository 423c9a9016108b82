"""The policy of one episode: takes messages, returns the model's text, and records the sampled tokens.

`TokenPolicy` sends token ids to our own server and keeps logprobs and weight versions: its episodes can be trained.
`ChatPolicy` sends chat messages to any OpenAI-compatible endpoint: its episodes can only be evaluated.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_flash.chat.model_text import MAX_DEPTH, is_deeper
from roll_flash.chat.rendered_conversation import Thinking, open_conversation
from roll_flash.chat.templates import Arrays, Tools, chat_template_of
from roll_flash.engines.inference import InferenceClient
from roll_flash.envs.tools.tool_chat import ToolChat, ToolsShown, calls_as_text, results_of_calls
from roll_flash.errors import RollFlashError
from roll_flash.rollout.episodes.prefix import PrefixTurn
from roll_flash.rollout.turns import EpisodeTurns, checksum_of_prompt
from roll_flash.types import Branch, FinishReason, Message, SamplingParams

if TYPE_CHECKING:
    from roll_flash.chat.openai_client import ChatReply, OpenAIChatClient

logger = logging.getLogger(__name__)

MAY_MEAN_TOOLS = frozenset({400, 404, 422, 501})
"""HTTP statuses that may mean that the endpoint does not accept `tools`; the request is retried without them."""


@dataclass(frozen=True, slots=True)
class Action:
    """One answer of the model. `start:end`: its policy tokens in the episode's first sample (0:0 if they are in another
    sample, or unknown)."""

    text: str
    start: int
    end: int
    finish_reason: FinishReason
    elapsed_s: float
    prompt_tokens: int | None = None
    """None (as `completion_tokens`) if the endpoint does not report it."""
    completion_tokens: int | None = None
    server: str = ""


class ContextFullError(RollFlashError):
    """The conversation leaves no room for another token."""


@dataclass(eq=False, repr=False)
class TokenPolicy:
    """Sends and receives token ids. `ChatPolicy` has the same methods."""

    client: InferenceClient
    tokenizer: Any
    sampling: SamplingParams
    _: KW_ONLY
    episode_id: str
    max_length: int
    session: str | None = None
    """Requests with the same session share a server's prefix cache; None: the episode is one."""
    thinking: Thinking = "keep"
    turns: EpisodeTurns | None = None
    """Has turns that the model is not asked for again, and records the others."""
    _turn: int = field(default=0, init=False)

    def begin(self, messages: Sequence[Message], tools: Tools = None) -> None:
        """Start the conversation. `tools`: tools of the environment, in OpenAI's format."""
        self._tools = ToolChat(tools, chat_template_of(self.tokenizer) if tools else None)
        opening = self._tools.opening(messages)
        self._conversation = open_conversation(self.thinking, self.tokenizer, opening, self._tools.native)

    @property
    def tools_shown(self) -> ToolsShown | None:
        """The way the tools were shown to the model, known after `begin`; None without tools."""
        return self._tools.shown

    async def act(self, timeout_s: float) -> Action:
        """Return the model's next answer. Raises TimeoutError, InferenceError, or ContextFullError."""
        start = len(self._conversation.token_ids)
        room = self.max_length - start
        if room < 1:
            raise ContextFullError(f"{start} tokens fill the context of {self.max_length} (model.max_length)")
        prompt = self._conversation.token_ids
        generation = self.turns.recorded(prompt) if self.turns is not None else None
        if generation is None:
            wanted = chat_template_of(self.tokenizer).ends_turns(self.sampling.with_own_seed(self._turn))
            generation = await self.client.generate(
                prompt,
                replace(wanted, max_new_tokens=min(room, wanted.max_new_tokens)),
                request_id=f"{self.episode_id}-{self._turn}",
                session=self.session or self.episode_id,
                timeout_s=timeout_s,
                known_experts=self._conversation.known_experts,
            )
        if self.turns is not None:
            self.turns.sampled(prompt, generation)
        self._turn += 1
        text = self._conversation.add_generation(generation)
        end = start + len(generation.token_ids)
        span = (start, end) if self._conversation.sample == 0 else (0, 0)
        usage = start, end - start
        return Action(text, *span, generation.finish_reason, generation.elapsed_s, *usage, generation.server)

    def repeat(self, turn: PrefixTurn) -> Action:
        """Take a recorded turn as the next answer, as context: the model is not asked."""
        prompt = self._conversation.token_ids
        start = len(prompt)
        is_same = bool(turn.token_ids) and turn.prompt == checksum_of_prompt(prompt)
        self._conversation.add_context(turn.action, turn.token_ids if is_same else None)
        span = (start, len(self._conversation.token_ids)) if self.thinking == "keep" else (0, 0)
        return _repeated(turn, *span)

    def observe(self, messages: Sequence[Message]) -> None:
        room = self.max_length - len(self._conversation.token_ids)
        self._conversation.add_observation(self._tools.results(messages), room)

    def messages(self) -> tuple[Message, ...]:
        return tuple(self._conversation.messages)

    def samples(self) -> list[Branch]:
        """Return the samples of the episode, at least one, without turns and messages."""
        return [_up_to_last_word(arrays) for arrays in self._conversation.samples()]


def _up_to_last_word(arrays: Arrays) -> Branch:
    """Return the arrays up to the model's last token: an observation without an answer trains nothing, and one that
    filled the context may be a million tokens long."""
    written = np.flatnonzero(arrays.policy_mask)
    end = int(written[-1]) + 1 if len(written) else len(arrays.token_ids)
    return Branch(
        arrays.token_ids[:end],
        arrays.policy_mask[:end],
        arrays.logprobs[:end],
        arrays.versions[:end],
        turns=(),
        messages=(),
        prompt_length=int(written[0]) if len(written) else end,
        routed_experts=None if arrays.routed_experts is None else arrays.routed_experts[:end],
    )


def _repeated(turn: PrefixTurn, start: int = 0, end: int = 0) -> Action:
    return Action(turn.action, start, end, turn.finish_reason, 0.0, 0, 0)


class ChatPolicy:
    """Sends and receives messages. Tools go into the request, or into the prompt if the endpoint refuses them."""

    def __init__(self, client: OpenAIChatClient, sampling: SamplingParams) -> None:
        self._client = client
        self._sampling = sampling
        self._turn = 0
        self._messages: list[Message] = []

    def begin(self, messages: Sequence[Message], tools: Tools = None) -> None:
        self._declared = tools if self._client.takes_tools else None
        self._described = ToolChat(tools, None)
        self._opening = list(messages)
        self._messages = list(messages) if self._declared else self._described.opening(messages)
        self._calls: tuple[dict[str, Any], ...] = ()

    @property
    def tools_shown(self) -> ToolsShown | None:
        return "request" if self._declared else self._described.shown

    async def act(self, timeout_s: float) -> Action:
        from roll_flash.chat.openai_client import EndpointRefusedError

        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._ask(timeout_s)
        except EndpointRefusedError as error:
            if error.is_too_long:  # caused by the model, as with our own servers: the episode is scored
                raise ContextFullError(str(error)) from None
            raise
        self._turn += 1
        self._calls = reply.tool_calls
        self._messages.append(
            {"role": "assistant", "content": reply.text} | ({"tool_calls": list(self._calls)} if self._calls else {})
        )
        text = calls_as_text(reply.text, self._calls)
        return Action(text, 0, 0, reply.finish_reason, reply.elapsed_s, reply.prompt_tokens, reply.completion_tokens)

    def repeat(self, turn: PrefixTurn) -> Action:
        if self._declared:  # recorded calls are text, and endpoints pair results with calls of their own
            self._declared, self._messages = None, self._described.opening(self._opening)
        self._messages.append({"role": "assistant", "content": turn.action})
        self._calls = ()
        return _repeated(turn)

    async def _ask(self, timeout_s: float) -> ChatReply:
        from roll_flash.chat.openai_client import EndpointRefusedError

        sampling = self._sampling.with_own_seed(self._turn)
        try:
            messages = list(map(_sendable, self._messages))
            return await self._client.chat(messages, sampling, timeout_s=timeout_s, tools=self._declared)
        except EndpointRefusedError as error:
            begun = len(self._messages) > len(self._opening)
            if not self._declared or begun or error.is_too_long or error.status not in MAY_MEAN_TOOLS:
                raise
            refused = str(error)
        self._declared, self._messages = None, self._described.opening(self._opening)
        reply = await self._client.chat(self._messages, sampling, timeout_s=timeout_s)
        if self._client.takes_tools:
            logger.warning("tools are described in the prompt, as the endpoint does not take them: %s", refused)
            self._client.takes_tools = False
        return reply

    def observe(self, messages: Sequence[Message]) -> None:
        if self._calls:
            self._messages.extend(results_of_calls(messages, self._calls))
        else:
            self._messages.extend(self._described.results(messages))

    def messages(self) -> tuple[Message, ...]:
        """Return the messages for logs and imitation: tool calls are in the text, as the environment got them."""
        return tuple(
            {"role": message["role"], "content": calls_as_text(str(message["content"]), message["tool_calls"])}
            if message.get("tool_calls")
            else message
            for message in self._messages
        )

    def samples(self) -> list[Branch]:
        versions = np.empty(0, np.int32)
        return [Branch(np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.float32), versions, (), (), 0)]


Policy = TokenPolicy | ChatPolicy


def _sendable(message: Message) -> Message:
    """Return the message with an object as the arguments of each call, whatever the model wrote: many servers refuse a
    conversation with other arguments, which would be no sample."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": list(map(_with_object, message["tool_calls"]))}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    try:
        value = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and not is_deeper(value, MAX_DEPTH):
        return call
    return {**call, "function": {**function, "arguments": json.dumps({"arguments": function["arguments"]})}}
