"""A game of the package textarena: each player's new messages and reward.

The package draws from Python's shared generator, which other episodes' threads also use. Here each game has its own
generator, so that the same seed and moves give the same game. Its methods block and must run in one thread at a time.
"""

from __future__ import annotations

import ctypes
import math
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from roll_flash.chat.model_text import without_special_tokens
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.errors import ConfigError

_shared_random = threading.Lock()
MAX_SHOWN_CHARACTERS = 200
MAX_CHARACTERS = 2000
"""Maximum characters of a move, from its end: the games' regular expressions take quadratic time."""
MOVE_S = 5.0
"""Maximum processor time of a move in seconds. In games where players are eliminated, textarena 0.7.4 looks for the
next player for ever once nobody is left; all other games of the process would wait for it."""
LOOK_S = 0.5
"""Seconds between two looks at that time."""
_MANY_BLANKS = re.compile(r"\s{9,}+")
"""Runs of blanks take cubic time, during which no other thread of the worker runs."""


class GameRaisedError(Exception):
    """The game raised for a player's text: this counts as a wrong move and ends the game."""


class Game:
    """One game. Raises ConfigError for an unknown game, or one with another number of players."""

    def __init__(self, needed_by: str, game: str, game_kwargs: Mapping[str, Any], players: int) -> None:
        self._package = import_optional("textarena", package="textarena", needed_by=needed_by)
        self._players = players
        self.last_said = ""
        """What the game itself said in the last `new_messages`, without the players' words."""
        self._random_state: Any = random.Random(0).getstate()
        try:
            # The raw form returns only messages since the last turn; the other forms repeat the whole game each time.
            self._game = self._package.make(game if game.endswith("-raw") else f"{game}-raw", **game_kwargs)
            self.reset(0)
        except (ValueError, AssertionError, TypeError, LookupError, ImportError, SyntaxError) as error:
            raise ConfigError(f"{needed_by}: game {game!r}: {' '.join(str(error).split())[:200]}") from None

    def reset(self, seed: int) -> None:
        with self._own_random():
            self._game.reset(num_players=self._players, seed=seed)
        if hasattr(self._game.state, "elimination_order"):
            self._game.state.elimination_order = _Once(self._game.state.elimination_order)

    @property
    def player(self) -> int:
        """Player whose turn it is."""
        return int(self._game.state.current_player_id)

    def new_messages(self) -> str:
        """Return all text that is new to the current player, without the player's own words. Other players' lines are
        indented: they could pass for the game's or another player's, and special tokens for a message of the system."""
        own = self._package.core.ObservationType.PLAYER_ACTION
        player, said = self._game.get_observation()
        self.last_said = "\n".join(str(text) for _, text, kind in said if kind is not own)
        told = [
            "\n  ".join(f"Player {speaker}: {text}".splitlines()) if kind is own else str(text)
            for speaker, text, kind in said
            if not (kind is own and speaker == player)
        ]
        return without_special_tokens("\n".join(told)) or "(nothing new)"

    def move(self, text: str) -> bool:
        """Make a move; return True if the game is over. Raises GameRaisedError, and the game's own error for a missing
        package or file."""
        text = _MANY_BLANKS.sub(" ", text)[-MAX_CHARACTERS:]
        try:
            with self._own_random(), _limited():
                is_over, _ = self._game.step(text)
        except Exception as error:  # third-party code may raise anything
            if isinstance(error, ImportError | OSError) or type(error) is LookupError:  # nltk without its data
                raise
            raise GameRaisedError(f"{type(error).__name__}: {error}"[:MAX_SHOWN_CHARACTERS]) from error
        return bool(is_over)

    def outcome(self) -> tuple[Mapping[int, float], str]:
        """Return the reward of each player, and the reason."""
        rewards, details = self._game.close()
        earned = {int(player): _number(reward) for player, reward in (rewards or {}).items()}
        return earned, str((details or {}).get(0, {}).get("reason"))

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _shared_random:
            others = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(others)


class _Once(list[int]):
    """Players in the order in which they were eliminated. textarena 0.7.4 adds one again for each further wrong move,
    and Poker and LiarsDice pay by the place of the last entry: the loser who made most of them earned most."""

    def append(self, player: int) -> None:
        if player not in self:
            super().append(player)


class _Endless(BaseException):
    """Raised in the thread of a game that does not end; no Exception, which games catch."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise RuntimeError in the block when it has taken more than MOVE_S of its thread's processor time."""
    thread, done, deciding = threading.get_ident(), threading.Event(), threading.Lock()
    clock = time.pthread_getcpuclockid(thread)
    ends_at = time.clock_gettime(clock) + MOVE_S

    def watch() -> None:
        while not done.wait(LOOK_S):
            with deciding:
                if not done.is_set() and time.clock_gettime(clock) > ends_at:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Endless))

    threading.Thread(target=watch, name="textarena", daemon=True).start()
    try:
        try:
            yield
        finally:
            with deciding:
                done.set()
    except _Endless:
        done.set()
        raise RuntimeError(f"it took more than {MOVE_S:g} s") from None


def _number(reward: Any) -> float:
    """Return 0 for what is no finite number: after a wrong move, some games give its reason as the reward (Countdown,
    Slitherlink and Cryptarithm of textarena 0.7.4)."""
    return float(reward) if isinstance(reward, Real) and math.isfinite(reward) else 0.0
