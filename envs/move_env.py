"""Games that are played in words: the model names one move or several, the game answers with the new position."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gymnasium
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.envs.model_text import tagged
from roll_flash.envs.text_space import TextSpace
from roll_flash.envs.tool_calls import without_thinking

_BETWEEN = re.compile(r"[\s,;|]+|->|\.(?=\s|$)")


def parse_moves(text: str, words: Sequence[str]) -> list[int] | None:
    """Moves as indices of `words`: those in `<move>...</move>`, else the whole text if it is nothing but moves.

    None for anything else: a word of the reasoning is not taken for a move.
    """
    text = without_thinking(text)
    moves = tagged(text, "move", "answer", ignore_case=True)
    said = [word.lower() for word in _BETWEEN.split(moves[-1] if moves else text) if word]
    known = {word.lower(): index for index, word in enumerate(words)}
    if not said or any(word not in known for word in said):
        return None
    return [known[word] for word in said]


class MoveEnv(gymnasium.Env[str, str]):
    """A subclass defines `begin`, `move` and `show`, and `plan` where it knows the best moves.

    A turn is up to `moves_per_turn` moves; text without moves costs a turn. After `max_turns` turns it is truncated.
    """

    observation_space = TextSpace()
    action_space = TextSpace()
    words: Sequence[str] = ()
    move_cost: float = 0.0
    """Below 0 where each move costs: a game that is cut off earns it for each move that was allowed and not made. Else
    to make none would be worth more than to win."""

    def __init__(self, *, max_turns: int, moves_per_turn: int) -> None:
        if max_turns < 1 or moves_per_turn < 1:
            raise ValueError(f"{type(self).__name__}: max_turns and moves_per_turn must be at least 1")
        self._max_turns = max_turns
        self._moves_per_turn = moves_per_turn
        self._turns, self._moves = 0, 0

    def begin(self, seed: int) -> str:
        """Set up the game of this seed; returns what it is about, without the position."""
        raise NotImplementedError

    def move(self, index: int) -> tuple[float, bool, bool | None]:
        """Make a move; returns reward, whether the game is over, and whether it is won (None: cannot be said)."""
        raise NotImplementedError

    def show(self) -> str:
        """The position."""
        raise NotImplementedError

    def plan(self) -> Sequence[int]:
        """The best moves from here; at least the first of them, if the game is not over."""
        raise NotImplementedError

    def oracle(self) -> str:
        """The right action now, for checks and demonstrations."""
        return f"<move>{' '.join(self.words[index] for index in self.plan()[: self._moves_per_turn])}</move>"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._turns, self._moves = 0, 0
        about = self.begin(int(self.np_random.integers(HELD_OUT_SEEDS)) if seed is None else seed)
        several = f" You may give up to {self._moves_per_turn} at once." if self._moves_per_turn > 1 else ""
        moves = ", ".join(self.words)
        reply = f"Moves: {moves}.{several} Reply like this: <move>{self.words[0]}</move>"
        return f"{about}\n{reply}\n\n{self.show()}", {}

    def conclude(self) -> tuple[float, dict[str, Any]]:
        """The run ends the game before it is over."""
        return self._of_moves_left(), {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        moves = parse_moves(action, self.words)
        total, is_over, won = 0.0, False, None
        said = "" if moves else f"No moves found. Reply like this: <move>{self.words[0]}</move>\n"
        for index in (moves or [])[: self._moves_per_turn]:
            reward, is_over, won = self.move(index)
            total += reward
            self._moves += 1
            if is_over:
                break
        truncated = not is_over and self._turns >= self._max_turns
        total += self._of_moves_left() if truncated else 0.0
        info: dict[str, Any] = {"valid": moves is not None}
        if is_over or truncated:
            success = False if truncated and won is None else won
            info |= {} if success is None else {"success": success}
        return said + self.show(), total, is_over, truncated, info

    def _of_moves_left(self) -> float:
        return self.move_cost * (self._max_turns * self._moves_per_turn - self._moves) if self.move_cost else 0.0
