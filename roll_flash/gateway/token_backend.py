"""Token in, token out: gateway backend over our own servers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

from roll_flash.chat.model_text import split_thinking
from roll_flash.chat.rendered_conversation import Thinking
from roll_flash.chat.templates import chat_template_of
from roll_flash.engines.inference import Generation, InferenceClient
from roll_flash.errors import ModelError
from roll_flash.gateway.apis.answer_text import split_tool_calls
from roll_flash.gateway.apis.api_error import ApiError, bad_request
from roll_flash.gateway.apis.prompt_text import PromptText
from roll_flash.gateway.backend import require_mostly_shown
from roll_flash.gateway.model_call import Answer, ModelCall, Reply, SampledToken, Usage
from roll_flash.gateway.sessions.history import CallRecord, TreePosition
from roll_flash.gateway.sessions.session import Session
from roll_flash.processes.background import gather_or_cancel
from roll_flash.types import Message, SamplingParams

logger = logging.getLogger(__name__)
CHARACTERS_PER_TOKEN = 4
"""Approximate, for an answer."""


@dataclass(eq=False, repr=False)
class TokenBackend:
    """`Backend` over an `InferenceClient`, which the caller closes."""

    client: InferenceClient
    tokenizer: Any
    _: KW_ONLY
    model: str
    max_length: int
    thinking: Thinking = "keep"
    """Whether a request that continues a recorded one gets its tokens as they were (`keep`), or is always rendered by
    the chat template (`strip`)."""

    def __post_init__(self) -> None:
        """Raises ModelError for a tokenizer without a chat template."""
        self._prompts = PromptText(self.tokenizer)
        self._has_told = False

    async def complete(self, call: ModelCall, session: Session, number: int) -> tuple[Reply, list[CallRecord]]:
        started_s = session.history.clock.now_s()
        found = session.history.find(call)
        characters = found.characters if self.thinking == "keep" else call.keys.characters(0)
        place, before, given_ids = await session.work.do(partial(self._prompt_of, call, found), characters)
        prompt = [*before, *given_ids]
        room = self.max_length - len(prompt)
        if room < 1:
            session.context_was_full = True
            raise context_length_exceeded(self.max_length, len(prompt))
        sampling = chat_template_of(self.tokenizer).ends_turns(session.sampling(call, room, number))
        if sampling.top_p <= 0:  # servers reject it, which would look like a server failure
            raise bad_request("top_p must be more than 0; for the likeliest token ask for temperature 0", "top_p")
        known = place.parent.known_experts() if place.parent is not None else 0
        generations = await self._generate(prompt, sampling, call.n, session, number, known)
        sampled = sum(len(generation.token_ids) for generation in generations)
        answers = await session.work.do(
            lambda: [self._answer(generation, call) for generation in generations], CHARACTERS_PER_TOKEN * sampled
        )
        session.require_open()
        records = [
            session.history.add_answer(
                place,
                answer,
                given_ids=given_ids,
                generation=generation,
                prompt_tokens=len(prompt),
                completion_tokens=len(generation.token_ids),
                started_s=started_s,
            )
            for answer, generation in zip(answers, generations, strict=True)
        ]
        return Reply(tuple(answers), Usage(len(prompt), sampled)), records

    async def count_tokens(self, call: ModelCall, session: Session) -> int:
        return len(await session.work.do(partial(self._whole, call, self.max_length), call.keys.characters(0)))

    def _prompt_of(self, call: ModelCall, place: TreePosition) -> tuple[TreePosition, list[int], list[int]]:
        """Return the place, its tokens, and those of the new part. If the template leaves out what was recorded, such
        as earlier thinking, the request is the beginning of another sample. If it cannot show that again (gpt-oss: a
        turn that spells out a channel), the tokens stay as they were."""
        before = place.parent.token_ids() if place.parent is not None else []
        if self.thinking == "keep" or place.parent is None:
            return place, before, self._tokens_of(call, place, self.max_length - len(before))
        anew = replace(place, parent=None, given=call.messages, sent=sum(call.keys.sizes))
        try:
            whole = self._tokens_of(call, anew, self.max_length)
        except ApiError as error:  # perhaps it refuses what the model wrote, which must not cost the sample
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "a turn with its earlier thinking, despite thinking=strip (said once): %r", str(error)[:200]
                )
            return place, before, self._tokens_of(call, place, self.max_length - len(before))
        if whole[: len(before)] == before:
            return place, before, whole[len(before) :]
        return anew, [], whole

    def _tokens_of(self, call: ModelCall, place: TreePosition, room: int) -> list[int]:
        """Tokenize the new part of the request; only its beginning if it has far more tokens than `room`."""
        if place.parent is None:
            found = self._whole(call, room)
        else:
            found = self._continued(call, place.parent, place.given, room)
        if len(found) < room:
            require_mostly_shown(place, len(found))
        return found

    def _continued(self, call: ModelCall, parent: CallRecord, given: Sequence[Message], room: int) -> list[int]:
        assert parent.generation is not None
        after = int(parent.generation.token_ids[-1])
        try:
            return self._prompts.continued(given, call, after, room)
        except ModelError as error:
            raise bad_request(str(error), "messages") from None

    def _whole(self, call: ModelCall, room: int) -> list[int]:
        try:
            return self._prompts.whole(call, room)
        except ModelError as error:
            raise bad_request(str(error), "messages") from None

    async def _generate(
        self, prompt: list[int], sampling: SamplingParams, n: int, session: Session, number: int, known_experts: int
    ) -> list[Generation]:
        async def one(index: int) -> Generation:
            own = sampling.with_own_seed(index) if index else sampling
            name = f"{session.session_id}-{number}" + (f"-{index}" if index else "")
            async with session.generating:
                return await self.client.generate(
                    prompt,
                    own,
                    request_id=name,
                    session=session.routed_as,
                    timeout_s=session.timeout_s,
                    known_experts=known_experts,
                )

        if n == 1:
            return [await one(0)]
        return await gather_or_cancel(*(one(index) for index in range(n)))

    def _answer(self, generation: Generation, call: ModelCall) -> Answer:
        text = self._decode(generation.token_ids.tolist())
        thinking, said = split_thinking(self._prompts.before_answer(call) + text)
        said, stop_string = cut_at_stop(said.strip(), call.requested.stop)
        names = [tool["function"]["name"] for tool in call.tools] if call.tool_choice != "none" else []
        content, calls = split_tool_calls(said, names)
        return Answer(
            raw=text,
            content=content,
            thinking=thinking,
            tool_calls=calls,
            finish_reason=generation.finish_reason,
            stop_string=stop_string,
            tokens=tuple(self._sampled(generation)) if call.wants_logprobs else (),
        )

    def _sampled(self, generation: Generation) -> list[SampledToken]:
        pairs = zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True)
        return [SampledToken(str(self.tokenizer.decode([token])), logprob) for token, logprob in pairs]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def context_length_exceeded(max_length: int, prompt_tokens: int) -> ApiError:
    """Error with OpenAI's wording: agents detect it to shorten their history."""
    message = (
        f"This model's maximum context length is {max_length} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens or more. Please reduce the length of the messages."
    )
    return ApiError(400, "context_length_exceeded", message, "messages")


def cut_at_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text before the first stop string, as OpenAI's endpoint does, and that string."""
    found = [(place, string) for string in stop if (place := text.find(string)) >= 0]
    if not found:
        return text, None
    place, string = min(found)
    return text[:place].rstrip(), string
