"""What answers the gateway's calls: servers of ours that speak tokens, or an endpoint that speaks messages."""

from __future__ import annotations

from typing import Protocol

from roll_flash.gateway.model_call import ModelCall, Reply
from roll_flash.gateway.sessions.history import CallRecord
from roll_flash.gateway.sessions.session import Session


class Backend(Protocol):
    @property
    def model(self) -> str:
        """The name that agents ask for."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens of the context; None where it is not known."""
        ...

    async def complete(self, call: ModelCall, session: Session, number: int) -> tuple[Reply, list[CallRecord]]:
        """Answer call `number` of a session and record it.

        Raises ApiError for a request that cannot be answered, TimeoutError, and InferenceError for what is nobody's
        fault here.
        """
        ...

    async def count_tokens(self, call: ModelCall, session: Session) -> int:
        """Of the prompt. Raises ApiError where tokens are not known."""
        ...
