"""Text games: the model names one or several moves, and the game answers with the new position."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from roll_flash.chat.model_text import tagged, without_thinking
from roll_flash.envs.base import TextSpace
from roll_flash.envs.held_out import HELD_OUT_SEEDS, draw_problem

_BETWEEN = re.compile(r"[\s,;|]+|->|\.(?=\s|$)")


def parse_moves(text: str, words: Sequence[str]) -> list[int] | None:
    """Return moves as indices of `words`: those in `<move>...</move>`, else the whole text if it has only moves.

    Returns None for other text, so that a word of the reasoning is not taken for a move.
    """
    text = without_thinking(text)
    moves = tagged(text, "move", "answer", ignore_case=True)
    said = [word.lower() for word in _BETWEEN.split(moves[-1] if moves else text) if word]
    known = {word.lower(): index for index, word in enumerate(words)}
    if not said or any(word not in known for word in said):
        return None
    return [known[word] for word in said]


class TextGame(gymnasium.Env[str, str]):
    """A game. A subclass defines `begin`, `move` and `show`, and `plan` if it knows the best moves.

    A turn is up to `moves_per_turn` moves; text without moves costs a turn. After `max_turns` turns it is truncated.
    """

    observation_space = TextSpace()
    action_space = TextSpace()
    words: Sequence[str] = ()
    move_cost: float = 0.0
    """Below 0 if each move costs: a game that is cut off gets it for each move that was allowed and not made.
    Otherwise making no move would earn more than winning."""

    def __init__(self, *, max_turns: int, moves_per_turn: int) -> None:
        if max_turns < 1 or moves_per_turn < 1:
            raise ValueError(f"{type(self).__name__}: max_turns and moves_per_turn must be at least 1")
        self._max_turns = max_turns
        self._moves_per_turn = moves_per_turn
        self._turns, self._moves = 0, 0

    def begin(self, seed: int) -> str:
        """Set up the game of this seed; return its description without the position."""
        raise NotImplementedError

    def move(self, index: int) -> tuple[float, bool, bool | None]:
        """Make a move; return the reward, True if the game is over, and True if it is won (None if unknown)."""
        raise NotImplementedError

    def show(self) -> str:
        """Return the position."""
        raise NotImplementedError

    def plan(self) -> Sequence[int]:
        """Return the best moves from here; at least the first one, if the game is not over."""
        raise NotImplementedError

    def oracle(self) -> str:
        """Return the right next action, for checks and demonstrations."""
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
        """Return the result of a game that the run ended before it was over."""
        return self.reward_when_cut_off(), self._result(self.won_so_far())

    def won_so_far(self) -> bool | None:
        """Return if a game that is stopped before its end is won: no, but None if its end would not tell either."""
        return False

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
        total += self.reward_when_cut_off() if truncated else 0.0
        info: dict[str, Any] = {"valid": moves is not None}
        if is_over or truncated:
            info |= self._result(self.won_so_far() if truncated else won)
        return said + self.show(), total, is_over, truncated, info

    def _result(self, won: bool | None) -> dict[str, Any]:
        return {} if won is None else {"success": won}

    def reward_when_cut_off(self) -> float:
        """Return the reward of the end of a game that is not played to its end: that of its unused moves."""
        return self.move_cost * (self._max_turns * self._moves_per_turn - self._moves) if self.move_cost else 0.0


class TextFrozenLake(TextGame):
    """Cross a frozen lake without falling into a hole: gymnasium's FrozenLake, on maps that can be crossed.

    Arguments: `size` of the map, `frozen` (share of safe cells), `slippery`, `max_turns`, `moves_per_turn`. The reward
    is 1 for reaching the goal.
    """

    words = ("left", "down", "right", "up")  # the order of gymnasium's actions

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        slippery: bool = False,
        max_turns: int = 8,
        moves_per_turn: int = 5,
    ) -> None:
        super().__init__(max_turns=max_turns, moves_per_turn=moves_per_turn)
        if size < 2 or not 0.1 <= frozen < 1:
            raise ValueError("TextFrozenLake: size >= 2 and 0.1 <= frozen < 1")
        self._size = size
        self._frozen = frozen
        self._slippery = slippery
        self._game: FrozenLakeEnv | None = None
        self._policy: dict[int, int] = {}

    def begin(self, seed: int) -> str:
        rows = draw_problem(seed, self._draw, "".join)
        self._game = FrozenLakeEnv(desc=rows, is_slippery=self._slippery)
        self._game.reset(seed=seed % (1 << 31))
        self._policy = {}
        ice = "The ice is slippery: you may slide to the side. " if self._slippery else ""
        return f"Walk from P to the goal G over frozen cells _ and keep out of the holes O. {ice}".strip()

    def move(self, index: int) -> tuple[float, bool, bool | None]:
        _, reward, is_over, _, _ = self._lake.step(index)
        return float(reward), bool(is_over), bool(reward > 0) if is_over else None

    def show(self) -> str:
        cells = [[{"S": "_", "F": "_", "H": "O", "G": "G"}[cell.decode()] for cell in row] for row in self._lake.desc]
        row, column = divmod(self._state, self._size)
        cells[row][column] = {"_": "P", "O": "X", "G": "W"}[cells[row][column]]
        return "\n".join(" ".join(row) for row in cells)

    def plan(self) -> Sequence[int]:
        transitions: Transitions = self._lake.P
        self._policy = self._policy or best_actions(transitions)
        path, _ = likely_path(transitions, self._state, self._policy, 4 * self._size * self._size)
        return path[:1] if self._slippery else path

    @property
    def _lake(self) -> Any:
        assert self._game is not None, "reset() comes first"
        return self._game

    @property
    def _state(self) -> int:
        return int(self._lake.s)

    def _draw(self, generator: random.Random) -> list[str]:
        return list(generate_random_map(self._size, self._frozen, seed=generator.randrange(1 << 31)))


Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""`P[state][action]` is a list of (probability, next state, reward, is over)."""

DISCOUNT = 0.99
"""Below 1, so that the shorter of two ways to the same reward is better."""


def transitions_of(env: Any) -> Transitions | None:
    """Return None for an environment that does not expose its transitions."""
    found = getattr(env.unwrapped, "P", None)
    return found if isinstance(found, Mapping) and found else None


def best_actions(transitions: Transitions, *, tolerance: float = 1e-9) -> dict[int, int]:
    """Return the best action of each state, by value iteration."""
    values = dict.fromkeys(transitions, 0.0)
    while True:
        change = 0.0
        for state, actions in transitions.items():
            best = max(_value(outcomes, values) for outcomes in actions.values())
            change = max(change, abs(best - values[state]))
            values[state] = best
        if change < tolerance:
            break
    return {
        state: max(actions, key=lambda action: _value(actions[action], values))
        for state, actions in transitions.items()
    }


def _value(outcomes: Sequence[tuple[float, int, float, bool]], values: Mapping[int, float]) -> float:
    return sum(
        float(probability) * (float(reward) + (0.0 if is_over else DISCOUNT * values[int(state)]))
        for probability, state, reward, is_over in outcomes
    )


def likely_path(
    transitions: Transitions, state: int, policy: Mapping[int, int], longest: int
) -> tuple[list[int], float]:
    """Follow the policy from `state` along the most likely outcomes; return its actions and their total reward."""
    path: list[int] = []
    total = 0.0
    while len(path) < longest:
        action = policy[state]
        _, state, reward, is_over = max(transitions[state][action], key=lambda outcome: outcome[0])
        state = int(state)
        path.append(action)
        total += float(reward)
        if is_over:
            break
    return path, total
