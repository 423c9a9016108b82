"""Opponents for two-player games: random moves, a function, a fixed model, or the policy itself."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.chat.model_text import without_thinking
from roll_flash.chat.openai_client import EndpointRefusedError, OpenAIChatClient, api_key_from
from roll_flash.config.user_code import load_function
from roll_flash.errors import ConfigError, EnvError, InferenceError
from roll_flash.processes.background import call_sync_or_async
from roll_flash.types import Message, SamplingParams

SELF = "self"
_LISTED = re.compile(r"(\bno\s++)?(?:available|valid|legal|possible)\s++(?:moves|actions)([^\n]*)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
SKIP = "[skip]"
"""Move of a player who has none, as in Othello."""

Move = Callable[[Sequence[Message]], Awaitable[str]]
"""Answers the last of these messages, which are the opponent's own conversation."""


@dataclass(frozen=True, slots=True)
class Opponent:
    move: Move
    client: OpenAIChatClient | None = None

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()


def make_opponent(
    named: str | Mapping[str, Any] | Callable[..., Any], seed: int, game_said: Callable[[], str] = str
) -> Opponent:
    """Make the opponent from the argument `opponent`. `game_said`: returns what the game has just said, without the
    players' words. Raises ConfigError."""
    if callable(named):
        return _function_opponent(named)
    if isinstance(named, Mapping):
        return _model_opponent(dict(named))
    if named == "random":
        return _random_opponent(random.Random(seed), game_said)
    if ":" not in named:
        raise ConfigError(
            f"TextArenaDuel-v0: opponent {named!r} must be self, random, module:function, path/to/file.py:function, or "
            "{url: ..., model: ...}"
        )
    return _function_opponent(load_function(named, "TextArenaDuel-v0: opponent"))


def _random_opponent(chance: random.Random, game_said: Callable[[], str]) -> Opponent:
    """Play a random move from the game's list of allowed moves; a list of the other player's is none."""

    async def move(messages: Sequence[Message]) -> str:
        moves = listed_moves(game_said())
        if not moves:
            raise EnvError("TextArenaDuel-v0: the game lists no allowed moves, so opponent=random cannot choose one")
        return chance.choice(moves)

    return Opponent(move)


def listed_moves(text: str) -> list[str]:
    """Return the last list of allowed moves in the text: SKIP if it says that there are none."""
    none, listed = ([("", ""), *_LISTED.findall(text)])[-1]
    return _MOVE.findall(listed) or ([SKIP] if none else [])


def _function_opponent(function: Callable[..., Any]) -> Opponent:
    async def move(messages: Sequence[Message]) -> str:
        return str(await call_sync_or_async(function, list(messages)))

    return Opponent(move)


def _model_opponent(named: dict[str, Any]) -> Opponent:
    try:
        return _asked_model(api_key=api_key_from(named.pop("api_key_env", None)), **named)
    except (TypeError, InferenceError) as error:
        raise ConfigError(f"TextArenaDuel-v0: opponent: {error}; it takes url, model, api_key_env, timeout_s") from None


def _asked_model(
    url: str, model: str, api_key: str | None, *, timeout_s: float = 120.0, max_new_tokens: int = 512
) -> Opponent:
    client = OpenAIChatClient(url, model, api_key)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens)

    async def move(messages: Sequence[Message]) -> str:
        try:
            reply = await client.chat(messages, sampling, timeout_s=timeout_s)
        except TimeoutError:
            raise EnvError(f"opponent at {client.url}: no answer after {timeout_s:g} s") from None
        except InferenceError as error:
            if isinstance(error, EndpointRefusedError) and error.is_too_long:  # the caller ends the game
                raise
            raise EnvError(f"opponent: {error}") from None
        return without_thinking(reply.text)

    return Opponent(move, client)
