"""Opponents for two-player games: random moves, a function, a fixed model, or the policy itself."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from roll_flash.chat.model_text import without_thinking
from roll_flash.errors import ConfigError, EnvError, InferenceError
from roll_flash.processes.background import call_in_thread
from roll_flash.types import Message, SamplingParams
from roll_flash.user_code import load_object

SELF = "self"
_LISTED = re.compile(r"(?:available|valid|legal|possible)\s+(?:moves|actions)[^\n]*", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")


class Opponent(Protocol):
    async def move(self, messages: Sequence[Message]) -> str:
        """Answer the last of these messages, which are the opponent's own conversation."""
        ...

    async def close(self) -> None: ...


def listed_moves(text: str) -> list[str]:
    """Return the last list of allowed moves in the text, which may also contain players' words."""
    listed = _LISTED.findall(text)
    return _MOVE.findall(listed[-1]) if listed else []


class RandomOpponent:
    """Plays a random move from the game's list of allowed moves."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    async def move(self, messages: Sequence[Message]) -> str:
        moves = listed_moves(str(messages[-1]["content"]))
        if not moves:
            raise EnvError("TextArenaDuel-v0: the game lists no allowed moves, so opponent=random cannot choose one")
        return self._chance.choice(moves)

    async def close(self) -> None:
        """Does nothing: there are no resources."""


class ScriptedOpponent:
    """A function of the messages, sync or async, that returns the move."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def move(self, messages: Sequence[Message]) -> str:
        if inspect.iscoroutinefunction(self._function):
            return str(await self._function(list(messages)))
        return str(await call_in_thread(lambda: self._function(list(messages))))

    async def close(self) -> None:
        """Does nothing: there are no resources."""


class ModelOpponent:
    """A model behind an OpenAI-compatible endpoint. Raises EnvError if it does not answer."""

    def __init__(
        self, url: str, model: str, api_key: str | None = None, *, timeout_s: float = 120.0, max_new_tokens: int = 512
    ) -> None:
        from roll_flash.chat.openai_client import OpenAIChatClient

        self._client = OpenAIChatClient(url, model, api_key)
        self._timeout_s = timeout_s
        self._sampling = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens)

    async def move(self, messages: Sequence[Message]) -> str:
        try:
            reply = await self._client.chat(messages, self._sampling, timeout_s=self._timeout_s)
        except TimeoutError:
            raise EnvError(f"opponent at {self._client.url}: no answer after {self._timeout_s:g} s") from None
        except InferenceError as error:
            raise EnvError(f"opponent: {error}") from None
        return without_thinking(reply.text)

    async def close(self) -> None:
        await self._client.close()


def make_opponent(named: str | Mapping[str, Any] | Callable[..., Any], seed: int) -> Opponent:
    """Make the opponent from the argument `opponent`. Raises ConfigError."""
    if callable(named):
        return ScriptedOpponent(named)
    if isinstance(named, Mapping):
        return _model_opponent(dict(named))
    if named == "random":
        return RandomOpponent(seed)
    if ":" not in named:
        raise ConfigError(
            f"TextArenaDuel-v0: opponent {named!r} must be self, random, module:function, path/to/file.py:function, or "
            "{url: ..., model: ...}"
        )
    try:
        function = load_object(named)
    except ConfigError as error:
        raise ConfigError(f"TextArenaDuel-v0: opponent: {error}") from None
    if not callable(function):
        raise ConfigError(f"TextArenaDuel-v0: opponent {named!r} is no function")
    return ScriptedOpponent(function)


def _model_opponent(named: dict[str, Any]) -> ModelOpponent:
    from roll_flash.chat.openai_client import api_key_from

    key = api_key_from(named.pop("api_key_env", None))
    try:
        return ModelOpponent(api_key=key, **named)
    except (TypeError, InferenceError) as error:
        raise ConfigError(f"TextArenaDuel-v0: opponent: {error}; it takes url, model, api_key_env, timeout_s") from None
