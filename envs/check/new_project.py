"""`roll-flash envs new NAME`: writes a small working project for the user to change."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from roll_flash.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Project:
    folder: Path
    source: str
    """File of the environment, relative to the folder."""
    env_id: str
    files: tuple[str, ...]


def write_project(name: str, parent: Path | None = None) -> Project:
    """Write the project into a new folder `name`. Raises ConfigError for an invalid name or an existing folder."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: a name is letters, digits and hyphens, such as word-count")
    module = name.replace("-", "_").lower()
    if keyword.iskeyword(module):
        raise ConfigError(f"{name!r} is a word of Python; choose another name")
    folder = (parent or Path.cwd()) / name
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name or remove it")
    class_name = "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name))
    words = {"project": module.replace("_", "-"), "module": module, "cls": class_name, "id": f"{class_name}-v0"}
    files = {
        "pyproject.toml": _PYPROJECT,
        f"{module}.py": _ENVIRONMENT,
        f"test_{module}.py": _TEST,
        "train.yaml": _CONFIG,
        "README.md": _README,
    }
    folder.mkdir(parents=True)
    for file, template in files.items():
        (folder / file).write_text(Template(template).substitute(words))
    return Project(folder, f"{module}.py", words["id"], tuple(files))


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

_ENVIRONMENT = '''\
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
        return f"<count>{self.word}</count>" if self.turn == 0 else f"<answer>{len(self.word)}</answer>"


roll_flash.register_env("$id", $cls)
'''

_TEST = '''\
"""$id is fit to train on."""

from $module import $cls
from roll_flash.envs.check.checks import check_environment


def test_it_is_fit_to_train_on() -> None:
    report = check_environment("$module:$id")
    assert report.ok, report.as_table()


def test_its_arguments_are_taken() -> None:
    assert $cls(longest=5).longest == 5
'''

_CONFIG = """\
# roll-flash train train.yaml
name: $project
steps: 20

model:
  path: smollm2-135m
  max_length: 512

envs:
  - id: $module.py:$id
    max_turns: 3

scheduler:
  groups_per_step: 8
  group_size: 8

rollout:
  max_new_tokens: 32

learner:
  learning_rate: 1.0e-5

eval:
  tasks: 32
"""

_README = """\
# $id

```sh
roll-flash envs check $module.py:$id   # is it fit to train on?
python -m pytest                             # the same as a test
roll-flash train train.yaml --dry-run        # is everything there?
roll-flash train train.yaml
```

The environment is [$module.py]($module.py). `pip install -e .` makes `$id` known everywhere.
"""
