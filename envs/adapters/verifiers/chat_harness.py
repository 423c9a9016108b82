"""A harness for verifiers 0.4: the chat loop in this process. Every model call goes through the package's interception,
which records it and passes it on to the gateway of the episode.

The package's own harnesses are programs that `uv` installs from an index for each machine; a run may have no network.
"""

from __future__ import annotations

from typing import Any

import openai
from verifiers.v1 import Harness, HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

LIMITS = ("max_turns_reached", "context_length", "request_too_large")
"""Errors of the gateway at which the episode ends and is scored: the model has used up its turns or its context, or has
written more characters than a request may have."""


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """One answer for each turn of the user; no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages: Any = [*([{"role": "system", "content": system}] if system else []), *said]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except openai.APIStatusError as error:
                if not any(limit in str(error) for limit in LIMITS):
                    raise
        return ProgramResult(exit_code=0, stdout="", stderr="")
