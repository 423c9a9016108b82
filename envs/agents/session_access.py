"""Interface of environments that play themselves: one gateway session, given as an address and a key.

An environment with `runs_own_loop = True` takes no steps from a worker. The worker makes it, calls `reset(seed=...)`
(which sets up the task; only its info is kept), opens a session, and awaits `play(access)`, in which the agent calls
the model over HTTP any number of times. Then `score()` returns the reward and info, with `success` if known, and
`close()` ends the episode. An exception in any of them fails the episode. The gateway has recorded the tokens of every
call.

With `roles = (NAME, ...)` the policy plays several roles, such as both players of a game: each has a key of its own,
`score()` returns a dict with the reward of each as its first value, and each is trained with its own advantage.

With `policies = (NAME, ...)` it may ask fixed policies of the config's `policies` too, each with a key of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from roll_flash.types import Message


@dataclass(frozen=True, slots=True)
class AgentGateway:
    """One session of the gateway on this host. It answers only on loopback and only to this key."""

    port: int
    """TCP port on 127.0.0.1."""
    api_key: str = field(repr=False)
    """Key of the session: calls with it belong to this episode. Send it as `Authorization: Bearer KEY` or
    `x-api-key: KEY`."""
    model: str
    """Model name for requests."""
    unrecorded_key: str = field(default="", repr=False)
    """Key whose calls are answered by the same model but not recorded or trained on, for a simulated opponent or
    user. Empty unless the environment has `needs_unrecorded_calls = True`."""
    role_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Key of each of the environment's `roles`; `api_key` is that of the first."""
    policy_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Key of each of the environment's `policies`, whose name is the model name of its requests."""
    answers: Callable[[], list[Message]] = field(default=list, repr=False)
    """Returns the model's answers in this episode so far, as the gateway recorded them, role by role: assistant
    messages of the chat API. No agent can change them."""

    @property
    def base_url(self) -> str:
        """Address for OpenAI clients; Anthropic clients take it without `/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"
