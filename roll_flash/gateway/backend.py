"""Interface of the backend behind the gateway: our own servers (tokens), or an endpoint (messages)."""

from __future__ import annotations

from typing import Protocol

from roll_flash.gateway.model_call import ModelCall, Reply
from roll_flash.gateway.sessions.history import CallRecord
from roll_flash.gateway.sessions.session import Session


class Backend(Protocol):
    @property
    def model(self) -> str:
        """Model name that agents must send."""
        ...

    @property
    def max_length(self) -> int | None:
        """Maximum tokens of the context; None if unknown."""
        ...

    async def complete(self, call: ModelCall, session: Session, number: int) -> tuple[Reply, list[CallRecord]]:
        """Answer call `number` of a session and record it.

        Raises ApiError for a request that cannot be answered, TimeoutError, and InferenceError for infrastructure
        failures.
        """
        ...

    async def count_tokens(self, call: ModelCall, session: Session) -> int:
        """Count the prompt's tokens. Raises ApiError if tokens are not known."""
        ...
