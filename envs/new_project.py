"""`roll-flash init`: writes a small working project for the user to change, with a config and a test."""

from __future__ import annotations

import json
import keyword
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

from roll_flash.errors import ConfigError
from roll_flash.models.prepare import RECIPES
from roll_flash.run.run_dir import require_new

ABOUT = {
    "data": "questions with answers in a file, and a reward function",
    "environment": "a game or a dialogue with rules of your own",
    "tools": "functions that the model calls, and a reward for the result",
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_LENGTHS = {"tiny": 1024}
"""Largest number of tokens of an episode, by model; those of `tiny` are characters."""
_LENGTH = 512
_ROWS = 400


@dataclass(frozen=True, slots=True)
class Project:
    folder: Path
    files: tuple[str, ...]


def write_project(folder: str, kind: str, model: str) -> Project:
    """Write a project of one of the kinds in ABOUT into a new or empty folder, whose name is the project's.

    Raises ConfigError for another kind, an invalid name, or a folder that is not empty or cannot be written.
    """
    require_kind(kind)
    path, module = require_place(folder)
    class_name = _class_name(path.name)
    words = {"project": module.replace("_", "-"), "module": module, "cls": class_name, "id": f"{class_name}-v0"}
    words |= {"model": json.dumps(_place_of(model)), "length": str(_LENGTHS.get(model, _LENGTH))}
    words["engine"] = _ENGINE if model == "tiny" else ""
    files = {file: Template(text).substitute(words) for file, text in _FILES[kind](module).items()}
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (path / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; choose another folder") from None
    return Project(path, tuple(files))


def _place_of(model: str) -> str:
    """Return a model as a config in another folder names it: a file or folder here with its whole path."""
    path = Path(model).expanduser()
    return str(path.resolve()) if model not in RECIPES and path.exists() else model


def require_kind(kind: str) -> None:
    """Raises ConfigError for a kind that is not in ABOUT."""
    if kind not in ABOUT:
        raise ConfigError(f"--kind {kind}: choose one of {', '.join(ABOUT)}")


def require_place(folder: str) -> tuple[Path, str]:
    """Return where a project is written, and its module's name. Raises ConfigError if it cannot be one's."""
    path = require_new(folder).resolve()
    name = path.name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r}: a name is letters, digits and hyphens, and begins with a letter, such as word-count"
        )
    module = name.replace("-", "_").lower()
    if keyword.iskeyword(module) or keyword.iskeyword(_class_name(name)):
        raise ConfigError(f"{name!r} is a word of Python; choose another name")
    if _is_module_elsewhere(module):
        raise ConfigError(f"{name!r} is the name of a module of Python or of a package; choose another name")
    return path, module


def _class_name(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name))


def _is_module_elsewhere(name: str) -> bool:
    """True for the name of a module that programs import: a file of this name beside them would hide it."""
    if name in sys.stdlib_module_names or name == "roll_flash":  # which may be installed from its folder
        return True
    found = PathFinder.find_spec(name, [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return found is not None and found.origin is not None


def _data(_: str) -> dict[str, str]:
    return {
        "train.yaml": _CONFIG + _DATA_PART,
        "questions.jsonl": _questions(),
        "rewards.py": _REWARDS,
        "test_rewards.py": _TEST_REWARDS,
        "README.md": _README + _README_DATA,
    }


def _environment(module: str) -> dict[str, str]:
    return _with_module(module, _ENVIRONMENT)


def _tools(module: str) -> dict[str, str]:
    return _with_module(module, _TOOLS)


def _with_module(module: str, source: str) -> dict[str, str]:
    return {
        "train.yaml": _CONFIG + _ENVIRONMENT_PART,
        f"{module}.py": source,
        f"test_{module}.py": _TEST_ENVIRONMENT,
        "pyproject.toml": _PYPROJECT,
        "README.md": _README + _README_ENVIRONMENT,
    }


_FILES: Mapping[str, Callable[[str], dict[str, str]]] = {
    "data": _data,
    "environment": _environment,
    "tools": _tools,
}


def _questions() -> str:
    """A small model can learn these in a few minutes: the answer stands in the question."""
    chance = random.Random(0)
    rows = []
    for order in chance.sample(range(1000, 10000), _ROWS):
        thing, days = chance.choice(["lamp", "chair", "kettle", "clock"]), chance.randint(2, 30)
        story = f"My {thing} of order {order} came {days} days late."
        rows.append({"prompt": f"{story} What is the order number?", "answer": order})
    return "".join(f"{json.dumps(row)}\n" for row in rows)


_CONFIG = """\
# roll-flash train train.yaml
name: $project
steps: 20

model:
  path: $model
  max_length: $length # tokens of an episode
"""

_ENGINE = """
inference:
  engine: transformers # starts in seconds; leave it out for vLLM, which is fast with real models
"""

_DATA_PART = """
envs:
  - id: Dataset-v0
    data: questions.jsonl
    reward: rewards.py:right

scheduler:
  groups_per_step: 8
  group_size: 8

rollout:
  max_new_tokens: 16

eval:
  tasks: 16
  temperature: 1.0 # as in training
$engine"""

_ENVIRONMENT_PART = """
envs:
  - id: $module.py:$id
    max_turns: 3

scheduler:
  groups_per_step: 8
  group_size: 8

rollout:
  max_new_tokens: 32

eval:
  tasks: 32
$engine"""

_REWARDS = '''\
"""Rewards of $project. A reward is a number; this one is between 0 and 1."""

import re


def right(answer: str, expected: int) -> float:
    """1 if the last number of the answer is that of the row, 0.1 for another number, 0 for none."""
    numbers = re.findall(r"\\d+", answer)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == str(expected) else 0.1
'''

_TEST_REWARDS = '''\
"""The reward is what it should be, and the data is fit to train on."""

import pytest
from rewards import right
from roll_flash.envs.check.configs import check_config


@pytest.mark.parametrize(("answer", "earns"), [("12", 1.0), ("It is 12.", 1.0), ("13", 0.1), ("twelve", 0.0)])
def test_it_rewards_the_right_number(answer: str, earns: float) -> None:
    assert right(answer, 12) == earns


def test_the_data_is_fit_to_train_on() -> None:
    for report in check_config("train.yaml", [], provider="auto", seeds=4, timeout_s=60):
        assert report.ok, report.as_table()
'''

_ENVIRONMENT = '''\
"""$id: guess a number in three turns."""

import random

import roll_flash


class $cls(roll_flash.Env):
    """Arguments: the `highest` number."""

    def __init__(self, highest: int = 9) -> None:
        self.highest = highest

    async def reset(self, *, seed=None, options=None):
        self.number, self.left = random.Random(seed).randint(1, self.highest), 3
        return f"I think of a number from 1 to {self.highest}. Reply with your guess only.", {}

    async def step(self, action):
        self.left -= 1
        if action.strip() == str(self.number):
            return "Right!", 1.0, True, False, {"success": True}
        hint = "That is no number." if not action.strip().isdecimal() else "Wrong, guess again."
        return hint, 0.0, False, self.left == 0, {"success": False}

    def oracle(self) -> str:
        """The right action now: for the check only, no model sees it."""
        return str(self.number)


roll_flash.register_env("$id", $cls)
'''

_TOOLS = '''\
"""$id: count the letters of a word with a tool, then give the answer."""

import random

import roll_flash


class $cls(roll_flash.ToolEnv):
    """Arguments: `longest` word."""

    def __init__(self, longest: int = 12) -> None:
        super().__init__(tool_format="tags", max_turns=3)
        self.longest = longest

    async def begin(self, seed: int) -> str:
        chance = random.Random(seed)
        self.word = "".join(chance.choices("abcdefgh", k=chance.randint(3, self.longest)))
        return f"How many letters has {self.word}? Count with the tool, then reply <answer>N</answer>."

    @roll_flash.tool()
    def count(self, text: str) -> int:
        """Count the characters of a text."""
        return len(text)

    @roll_flash.reward()
    def right(self) -> bool:
        return self.final_answer == str(len(self.word))

    async def oracle(self) -> str:
        """The right action now: for the check only, no model sees it."""
        return f"<count>{self.word}</count>" if self.turn == 0 else f"<answer>{len(self.word)}</answer>"


roll_flash.register_env("$id", $cls)
'''

_TEST_ENVIRONMENT = '''\
"""$id is fit to train on."""

from $module import $cls
from roll_flash.envs.check.checks import check_environment


def test_its_arguments_are_optional() -> None:
    assert $cls() is not None


def test_it_is_fit_to_train_on() -> None:
    report = check_environment("$module:$id")
    assert report.ok, report.as_table()
'''

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=78"]
build-backend = "setuptools.build_meta"

[project]
name = "$project"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["roll-flash"]

# Once installed (pip install -e .), `$id` is known to every roll-flash command.
[project.entry-points."roll_flash.envs"]
$module = "$module"

[tool.setuptools]
py-modules = ["$module"]
"""

_README = """\
# $project

```sh
roll-flash envs check train.yaml        # is it fit to train on?
python -m pytest                        # the same, and your own tests (once: pip install pytest)
roll-flash train train.yaml --dry-run   # is everything there?
roll-flash train train.yaml
roll-flash watch $project               # in another terminal
```
"""

_README_DATA = """
Put your questions into `questions.jsonl` and what an answer is worth into `rewards.py`.
"""

_README_ENVIRONMENT = """
The environment is `$module.py`. `pip install -e .` makes `$id` known everywhere.
"""
