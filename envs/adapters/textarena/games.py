"""TextArena-v0: any single-player game of the package textarena.

The package plays and scores the game. It is optional: `pip install textarena` (some of its word games also need nltk's
data). Two-player games are in `TextArenaDuel-v0`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import gymnasium

from roll_flash.chat.model_text import without_thinking
from roll_flash.envs.adapters.textarena.game import Game, GameRaisedError
from roll_flash.envs.base import TextSpace

logger = logging.getLogger("roll_flash.envs")

WRONG_GAMES = {
    "Bandit": "the best button earns 0 and the worst the most",
    "Cryptarithm": "letters with any digits earn their share when the moves are used up, if one letter has none",
    "FifteenPuzzle": "the last move of the solution raises, and earns 0",
    "Set": "the same card three times, [1, 1, 1], is a set on every turn",
}
"""Games of textarena 0.7.4, by the name before the version, with a wrong reward; docs/adapters.md has the reasons."""


class TextArena(gymnasium.Env[str, str]):
    """Arguments: `game` (an id of the package), `game_kwargs`, `max_turns`.

    The reward is the package's, given at the end; many games give partial rewards for partial progress. A reward of 1
    is a success. A game that is not over after `max_turns` earns nothing.
    """

    observation_space = TextSpace()
    action_space = TextSpace()

    def __init__(
        self, game: str = "GuessTheNumber-v0", game_kwargs: Mapping[str, Any] | None = None, max_turns: int = 20
    ) -> None:
        self._game = Game("TextArena-v0", game, game_kwargs or {}, players=1)
        _warn_of(game.split("-v")[0])
        self._max_turns = max_turns
        self._turns = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._turns = 0
        self._game.reset(int(self.np_random.integers(1 << 31)) if seed is None else seed)
        return self._game.new_messages(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        try:
            is_over = self._game.move(without_thinking(action))
        except GameRaisedError as error:
            return "", 0.0, True, False, {"success": False, "reason": str(error)}
        if not is_over:
            truncated = self._turns >= self._max_turns
            return self._game.new_messages(), 0.0, False, truncated, {"success": False} if truncated else {}
        earned, reason = self._game.outcome()
        reward = earned.get(0, 0.0)
        return "", reward, True, False, {"success": reward >= 1.0, "reason": reason}

    def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return the result of a game that the run ended before it was over."""
        return 0.0, {"success": False}


@cache
def _warn_of(game: str) -> None:
    """Warn of a game with a wrong reward, once per process."""
    if game in WRONG_GAMES:
        logger.warning(
            "TextArena-v0: the reward of the game %s is wrong: %s; a policy learns nothing from it",
            game,
            WRONG_GAMES[game],
        )
