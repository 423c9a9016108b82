"""What an environment that plays itself is given: one session of a gateway, as an address and a key.

An environment with `plays_itself = True` takes no steps from a worker. The worker makes it and calls `reset(seed=...)`
as of any other (which sets the task up; only its info is kept), opens a session, and awaits `play(access)`, in which
the agent calls the model over HTTP as often as it likes; afterwards `score()` says what the episode is worth, and
`close()` ends it. The gateway has seen every call by then, and recorded the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from roll_flash.types import Message


@dataclass(frozen=True, slots=True)
class AgentGateway:
    """One session of the gateway on this host. It answers on loopback only, and to this key only."""

    port: int
    """TCP port on 127.0.0.1."""
    api_key: str = field(repr=False)
    """Of the session: what is called with it belongs to this episode. Send it as `Authorization: Bearer KEY` or
    `x-api-key: KEY`."""
    model: str
    """The name to ask for."""
    aside_key: str = field(default="", repr=False)
    """A key whose calls the same model answers without being recorded or trained on: for an opponent or a user that
    it plays itself. Empty unless the environment has `asks_aside = True`."""
    answers: Callable[[], list[Message]] = field(default=list, repr=False)
    """What the model has answered in this episode so far, as the gateway recorded it: assistant's messages of the chat
    API. No agent can change them."""

    @property
    def base_url(self) -> str:
        """For OpenAI clients; Anthropic clients take it without `/v1` (`host_url`)."""
        return f"{self.host_url}/v1"

    @property
    def host_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@runtime_checkable
class PlaysItself(Protocol):
    """An environment (the unwrapped one) whose agent brings its own loop."""

    plays_itself: bool

    async def play(self, gateway: AgentGateway) -> None:
        """Run the agent to its end. Raising ends the episode as a failure of the environment; nothing is scored."""
        ...

    async def score(self) -> tuple[float, dict[str, Any] | Mapping[str, Any]]:
        """The reward, a finite number, and info with `success` where that is known. Called once, after `play`."""
        ...
