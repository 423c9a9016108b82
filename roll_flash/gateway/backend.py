"""Interface of the backend behind the gateway: our own servers (tokens), or an endpoint (messages)."""

from __future__ import annotations

from typing import Protocol

from roll_flash.gateway.apis.api_error import bad_request
from roll_flash.gateway.model_call import ModelCall, Reply
from roll_flash.gateway.sessions.history import CallRecord, TreePosition
from roll_flash.gateway.sessions.session import Session

MAX_CHARACTERS_PER_TOKEN, MAX_OMITTED_CHARACTERS = 32, 1 << 16
"""Characters. Text that the template shows costs tokens, which the context limits. Text that the template omits (ids
of calls, blanks in arguments, earlier thinking) costs no tokens but is kept and written with each later sample."""


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
        """Count the prompt's tokens. Raises ApiError if tokens are not known.

        Of a prompt that is far longer than the context only a beginning is counted, which is longer, too.
        """
        ...


def require_mostly_shown(place: TreePosition, tokens: int) -> None:
    """Raise ApiError if the new messages have far more text than `tokens`, the prompt that the model saw, can hold."""
    if place.sent > MAX_OMITTED_CHARACTERS + MAX_CHARACTERS_PER_TOKEN * tokens:
        message = f"the model sees hardly any of {place.sent} characters: leave out what its template leaves out"
        raise bad_request(message, "messages")
