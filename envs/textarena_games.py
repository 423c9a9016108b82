"""TextArena-v0: any single-player game of the package textarena.

The package plays and scores the game. It is optional: `pip install textarena` (some of its word games also want nltk's
data). Two-player games are not played here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium
from roll_flash.envs.optional_package import import_optional
from roll_flash.envs.text_space import TextSpace
from roll_flash.envs.tool_calls import without_thinking

from roll_flash.errors import ConfigError

_shared_random = threading.Lock()
"""The package draws from Python's shared generator, which other episodes' threads use too."""


class TextArena(gymnasium.Env[str, str]):
    """Arguments: `game` (an id of the package), `game_kwargs`, `max_turns`.

    Reward is the package's, given at the end; many games give a part of it for a part of the way. A reward of 1 is a
    success. A game that is not over after `max_turns` earns nothing.
    """

    observation_space = TextSpace()
    action_space = TextSpace()

    def __init__(
        self, game: str = "GuessTheNumber-v0", game_kwargs: Mapping[str, Any] | None = None, max_turns: int = 20
    ) -> None:
        self._package = import_optional("textarena", package="textarena", needed_by="TextArena-v0")
        self._game_id = game
        self._max_turns = max_turns
        self._random_state: Any = random.Random(0).getstate()
        self._turns = 0
        try:
            # The raw form tells what is new since the last turn; the others repeat the whole game every time.
            self._game = self._package.make(game if game.endswith("-raw") else f"{game}-raw", **(game_kwargs or {}))
            with self._own_random():
                self._game.reset(num_players=1, seed=0)
        except (ValueError, AssertionError, TypeError, LookupError) as error:
            raise ConfigError(f"TextArena-v0: game {game!r}: {' '.join(str(error).split())[:200]}") from None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._turns = 0
        with self._own_random():
            self._game.reset(num_players=1, seed=int(self.np_random.integers(1 << 31)) if seed is None else seed)
            return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        with self._own_random():
            is_over, _ = self._game.step(without_thinking(action))
            if not is_over:
                truncated = self._turns >= self._max_turns
                return self._news(), 0.0, False, truncated, {"success": False} if truncated else {}
            rewards, details = self._game.close()
        reward = float((rewards or {}).get(0, 0.0))
        return (
            "",
            reward,
            True,
            False,
            {"success": reward >= 1.0, "reason": str((details or {}).get(0, {}).get("reason"))},
        )

    def conclude(self) -> tuple[float, dict[str, Any]]:
        """The run ends the game before it is over."""
        return 0.0, {"success": False}

    def _news(self) -> str:
        _, said = self._game.get_observation()
        own = self._package.core.ObservationType.PLAYER_ACTION
        return "\n".join(str(text) for _, text, kind in said if kind is not own) or "(nothing new)"

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Inside, Python's shared generator is this episode's: the same seed and moves give the same game."""
        with _shared_random:
            others = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(others)
