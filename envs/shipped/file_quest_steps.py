"""Steps of FileQuest tasks: instruction, a command that solves it, and its effect on the files."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

Files = dict[str, str]
"""Path, relative to the working directory, and content."""

_WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "haven",
    "inlet",
    "juniper",
    "kelp",
    "lagoon",
    "maple",
    "nectar",
    "onyx",
    "pebble",
    "quartz",
    "river",
    "sage",
    "tundra",
    "umber",
    "violet",
    "willow",
    "yarrow",
    "zephyr",
]
_FOLDERS = ("archive", "backup", "docs", "drafts", "notes", "reports", "work")
_ENDINGS = ("txt", "md", "log")


@dataclass(frozen=True, slots=True)
class Quest:
    """A task: initial files, steps in words, commands of the oracle, final files."""

    before: Files
    steps: tuple[str, ...]
    commands: tuple[str, ...]
    after: Files

    def __str__(self) -> str:
        return "\n".join(f"{number}. {step}" for number, step in enumerate(self.steps, 1))


def draw_quest(generator: random.Random, steps: int) -> Quest:
    """Draw a task with the given number of steps, each of which changes the files."""
    world = _World(generator)
    before = dict(world.files)
    done: list[tuple[str, str]] = []
    while len(done) < steps:
        untouched = dict(world.files)
        step = generator.choice(_STEPS)(world)
        if step is not None and world.files != untouched:
            done.append(step)
    if world.files == before:  # one step has undone another
        return draw_quest(generator, steps)
    return Quest(before, tuple(text for text, _ in done), tuple(command for _, command in done), world.files)


@dataclass(slots=True)
class _World:
    chance: random.Random
    files: Files = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.chance.sample(_WORDS, 3):
            path = f"{name}.{self.chance.choice(_ENDINGS)}"
            self.files[path] = "".join(f"{word}\n" for word in self.chance.choices(_WORDS, k=self.chance.randint(3, 6)))
        numbers = [self.chance.randint(1, 99) for _ in range(self.chance.randint(3, 6))]
        self.files["numbers.csv"] = "".join(f"{number}\n" for number in numbers)

    def any_file(self) -> str:
        return self.chance.choice(sorted(path for path in self.files if path != "numbers.csv") or ["numbers.csv"])

    def new_path(self, folder: str = "") -> str:
        while True:
            path = f"{folder}{self.chance.choice(_WORDS)}.{self.chance.choice(_ENDINGS)}"
            if path not in self.files:
                return path


Step = tuple[str, str] | None
"""Instruction and a command that solves it; None if the step is impossible in the current state."""


def _create(world: _World) -> Step:
    folder, word = world.chance.choice(_FOLDERS), world.chance.choice(_WORDS)
    path = world.new_path(f"{folder}/")
    world.files[path] = f"{word}\n"
    return f"Create the file {path} with the text {word} in it.", f"mkdir -p {folder} && echo {word} > {path}"


def _move(world: _World) -> Step:
    path, folder = world.any_file(), world.chance.choice(_FOLDERS)
    target = f"{folder}/{path.rpartition('/')[2]}"
    if target in world.files:
        return None
    world.files[target] = world.files.pop(path)
    return f"Move {path} into the folder {folder}.", f"mkdir -p {folder} && mv {path} {folder}/"


def _rename(world: _World) -> Step:
    path = world.any_file()
    folder, slash, _ = path.rpartition("/")
    target = world.new_path(folder + slash)
    world.files[target] = world.files.pop(path)
    return f"Rename {path} to {target}.", f"mv {path} {target}"


def _copy(world: _World) -> Step:
    path, target = world.any_file(), world.new_path()
    world.files[target] = world.files[path]
    return f"Copy {path} to {target}.", f"cp {path} {target}"


def _append(world: _World) -> Step:
    path, word = world.any_file(), world.chance.choice(_WORDS)
    world.files[path] += f"{word}\n"
    return f"Append a line with the text {word} to {path}.", f"echo {word} >> {path}"


def _delete(world: _World) -> Step:
    if len(world.files) < 3:
        return None
    path = world.any_file()
    del world.files[path]
    return f"Delete {path}.", f"rm {path}"


def _delete_by_ending(world: _World) -> Step:
    ending = world.chance.choice(_ENDINGS)
    gone = [path for path in world.files if path.endswith(f".{ending}")]
    if len(gone) < 2 or len(world.files) - len(gone) < 2:
        return None
    for path in gone:
        del world.files[path]
    return f"Delete every file whose name ends in .{ending}, in all folders.", f"find . -name '*.{ending}' -delete"


def _count_lines(world: _World) -> Step:
    path, target = world.any_file(), world.new_path()
    world.files[target] = f"{world.files[path].count(chr(10))}\n"
    return f"Write the number of lines of {path} into {target}.", f"wc -l < {path} > {target}"


def _sort(world: _World) -> Step:
    path = world.any_file()
    world.files[path] = "".join(f"{line}\n" for line in sorted(world.files[path].splitlines()))
    return f"Sort the lines of {path} in place.", f"sort -o {path} {path}"


def _replace(world: _World) -> Step:
    path = world.any_file()
    words = world.files[path].split()
    old, new = (world.chance.choice(words) if words else "", world.chance.choice(_WORDS))
    if not old or old not in _WORDS:
        return None
    world.files[path] = "".join(f"{new if line == old else line}\n" for line in world.files[path].splitlines())
    program = shlex.quote(f"s/^{old}$/{new}/")
    return f"In {path}, replace every line {old} by {new}.", f"sed -i {program} {path}"


def _sum(world: _World) -> Step:
    if "numbers.csv" not in world.files:
        return None
    target = world.new_path()
    world.files[target] = f"{sum(map(int, world.files['numbers.csv'].split()))}\n"
    command = f"total=0; while read n; do total=$((total+n)); done < numbers.csv; echo $total > {target}"
    return f"Write the sum of the numbers in numbers.csv into {target}.", command


_STEPS: tuple[Callable[[_World], Step], ...] = (
    _create,
    _move,
    _rename,
    _copy,
    _append,
    _delete,
    _delete_by_ending,
    _count_lines,
    _sort,
    _replace,
    _sum,
)
