"""TextSokoban-v0: push every box onto a goal. Levels are drawn, and every one can be solved.

Reward 1 for the solved level. A move into a wall, or into a box that cannot be pushed, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from roll_flash.envs.held_out import draw_problem
from roll_flash.envs.shipped.move_env import MoveEnv
from roll_flash.envs.shipped.sokoban_level import Level, draw_level, solve


class TextSokoban(MoveEnv):
    """Arguments: `size` (walls included), `boxes`, `least_moves` and `most_moves` of the shortest solution,
    `max_turns`, `moves_per_turn`."""

    words = ("up", "down", "left", "right")

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        least_moves: int = 4,
        most_moves: int = 20,
        max_turns: int = 8,
        moves_per_turn: int = 5,
    ) -> None:
        super().__init__(max_turns=max_turns, moves_per_turn=moves_per_turn)
        if not 5 <= size <= 10 or not 1 <= boxes <= 3 or not 1 <= least_moves <= most_moves:
            raise ValueError("TextSokoban: size 5..10, boxes 1..3, 1 <= least_moves <= most_moves")
        self._size = size
        self._boxes = boxes
        self._range = (least_moves, most_moves)
        self._level: Level | None = None

    def begin(self, seed: int) -> str:
        self._level = draw_problem(seed, lambda chance: draw_level(chance, self._size, self._boxes, self._range), str)
        return (
            "Sokoban: push every box $ onto a goal. You are @ (+ on a goal), walls are #, floor is _, a goal is ., "
            "a box on a goal is *. You push a box by walking into it; boxes cannot be pulled."
        )

    def move(self, index: int) -> tuple[float, bool, bool | None]:
        self._level = self.level.after(index) or self.level
        solved = self._level.is_solved
        return float(solved), solved, True if solved else None

    def show(self) -> str:
        return str(self.level)

    def plan(self) -> Sequence[int]:
        moves = solve(self.level)
        return moves or [0]  # in a dead end any move will do

    @property
    def level(self) -> Level:
        assert self._level is not None, "reset() comes first"
        return self._level
