"""What answers the gateway's calls: servers of ours that speak tokens, or an endpoint that speaks messages."""

from __future__ import annotations

from typing import Protocol

from roll_flash.gateway.api_error import bad_request
from roll_flash.gateway.history import CallRecord, Place
from roll_flash.gateway.model_call import ModelCall, Reply
from roll_flash.gateway.session import Session

MOST_SHOWN_PER_TOKEN, MOST_UNSHOWN = 32, 1 << 16
"""Characters. What a template shows costs tokens, of which the context has so many. What it leaves out (ids of calls,
blanks in arguments, earlier thinking) costs nothing, but is kept, and written down with each sample that goes on."""


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


def require_mostly_shown(place: Place, tokens: int) -> None:
    """Raises ApiError for new messages of more text than `tokens`, all that the model saw of them, can be."""
    if place.sent > MOST_UNSHOWN + MOST_SHOWN_PER_TOKEN * tokens:
        message = f"the model sees hardly any of {place.sent} characters: leave out what its template leaves out"
        raise bad_request(message, "messages")
