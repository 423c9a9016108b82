"""TextFrozenLake-v0: cross a frozen lake without falling into a hole; gymnasium's FrozenLake on a map of its own.

Reward 1 for reaching the goal. Every map can be crossed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from roll_flash.envs.held_out import draw_problem
from roll_flash.envs.shipped.move_env import MoveEnv
from roll_flash.envs.shipped.toy_text_plan import Transitions, best_actions, likely_path


class TextFrozenLake(MoveEnv):
    """Arguments: `size` of the map, `frozen` (share of safe cells), `slippery`, `max_turns`, `moves_per_turn`."""

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
