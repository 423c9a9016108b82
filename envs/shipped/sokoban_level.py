"""Sokoban: generation of solvable levels, and their solution by breadth-first search."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from roll_flash.envs.held_out import draw_problem
from roll_flash.envs.shipped.text_game import TextGame
from roll_flash.errors import EnvError

Cell = tuple[int, int]
State = tuple[Cell, frozenset[Cell]]
"""Cells of the player and of the boxes."""

STEPS: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Up, down, left, right, as (row, column)."""

WALL_SHARE = 0.12
MAX_FLOORS = 1000
"""Floors that were drawn without a level of the moves asked for, after which there is none."""


@dataclass(frozen=True, slots=True)
class Level:
    size: int
    floor: frozenset[Cell]
    goals: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]

    @property
    def state(self) -> State:
        return self.player, self.boxes

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.goals

    def after(self, move: int) -> Level | None:
        """Return the level after a move (index of STEPS); None for a move into a wall or a blocked box."""
        state = _forward(self.floor, self.state, STEPS[move])
        return None if state is None else replace(self, player=state[0], boxes=state[1])

    def __str__(self) -> str:
        return "\n".join("".join(self._sign((row, column)) for column in range(self.size)) for row in range(self.size))

    def _sign(self, cell: Cell) -> str:
        if cell not in self.floor:
            return "#"
        on_goal = cell in self.goals
        if cell == self.player:
            return "+" if on_goal else "@"
        if cell in self.boxes:
            return "*" if on_goal else "$"
        return "." if on_goal else "_"


def draw_level(generator: random.Random, size: int, boxes: int, moves: tuple[int, int]) -> Level:
    """Draw a level whose shortest solution has between `moves[0]` and `moves[1]` moves.

    It is found by playing backwards from the solved positions, so every level can be solved. Raises EnvError if none is
    found: the floor may be too small for that many moves.
    """
    inner = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    for _ in range(MAX_FLOORS):
        floor = frozenset(cell for cell in inner if generator.random() >= WALL_SHARE)
        if len(floor) < 2 * boxes + 1:
            continue
        goals = frozenset(generator.sample(sorted(floor), boxes))
        far = [state for state, distance in _backward(floor, goals, moves[1]) if distance >= moves[0]]
        if far:
            player, placed = generator.choice(sorted(far, key=lambda state: (state[0], sorted(state[1]))))
            return Level(size, floor, goals, player, placed)
    raise EnvError(
        f"TextSokoban: {MAX_FLOORS} floors of size {size} have no level of {moves[0]} to {moves[1]} moves with {boxes} "
        "boxes; ask for fewer moves, or a larger size"
    )


def solve(level: Level) -> list[int] | None:
    """Return a shortest list of moves that solves the level; None if there is none."""
    came_from: dict[State, tuple[State, int] | None] = {level.state: None}
    queue = deque([level.state])
    while queue:
        state = queue.popleft()
        if state[1] == level.goals:
            return _moves_to(state, came_from)
        for move, step in enumerate(STEPS):
            following = _forward(level.floor, state, step)
            if following is not None and following not in came_from:
                came_from[following] = (state, move)
                queue.append(following)
    return None


def _moves_to(state: State, came_from: dict[State, tuple[State, int] | None]) -> list[int]:
    moves: list[int] = []
    while (before := came_from[state]) is not None:
        state, move = before
        moves.append(move)
    return moves[::-1]


def _forward(floor: frozenset[Cell], state: State, step: Cell) -> State | None:
    player, boxes = state
    ahead = (player[0] + step[0], player[1] + step[1])
    if ahead not in floor:
        return None
    if ahead not in boxes:
        return ahead, boxes
    beyond = (ahead[0] + step[0], ahead[1] + step[1])
    if beyond not in floor or beyond in boxes:
        return None
    return ahead, boxes - {ahead} | {beyond}


def _backward(floor: frozenset[Cell], goals: frozenset[Cell], most: int) -> Iterator[tuple[State, int]]:
    """Yield every state that can be solved in at most `most` moves, with its minimum number of moves."""
    start: list[State] = [(player, goals) for player in sorted(floor - goals)]
    seen = set(start)
    queue: deque[tuple[State, int]] = deque((state, 0) for state in start)
    while queue:
        state, distance = queue.popleft()
        yield state, distance
        if distance < most:
            for before in _before(floor, state):
                if before not in seen:
                    seen.add(before)
                    queue.append((before, distance + 1))


def _before(floor: frozenset[Cell], state: State) -> Iterator[State]:
    """Yield states from which one move leads to `state`: the player steps back, with or without pulling a box."""
    player, boxes = state
    for step in STEPS:
        back = (player[0] - step[0], player[1] - step[1])
        if back not in floor or back in boxes:
            continue
        yield back, boxes
        ahead = (player[0] + step[0], player[1] + step[1])
        if ahead in boxes:
            yield back, boxes - {ahead} | {player}


class TextSokoban(TextGame):
    """Push every box onto a goal, in levels that can be solved.

    Arguments: `size` (walls included), `boxes`, `least_moves` and `most_moves` of the shortest solution, `max_turns`,
    `moves_per_turn`. The reward is 1 for the solved level.
    """

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
        return moves or [0]  # in a dead end any move is as good as another

    @property
    def level(self) -> Level:
        assert self._level is not None, "reset() comes first"
        return self._level
