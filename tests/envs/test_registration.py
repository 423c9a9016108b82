"""An environment is found by id, module, file and plug-in; what cannot be loaded says file, line and reason."""

from __future__ import annotations

import asyncio
import re
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from roll_flash.cli.environments import list_environments
from roll_flash.config.user_code import follow_search_path, search_path
from roll_flash.envs import Env, registration
from roll_flash.envs.registration import load_plugins, make_env, register_env
from roll_flash.errors import ConfigError

SOURCE = """
import gymnasium, roll_flash

class Maze(roll_flash.Env):
    def __init__(self, size=3):
        self.size = size
    async def reset(self, *, seed=None, options=None):
        return "go", {}
    async def step(self, action):
        return "", 1.0, True, False, {}

gymnasium.register("Registered-v0", Maze)
roll_flash.register_env("Wrapped-v0", Maze, max_episode_steps=3)
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers and imports is gone after it."""
    ids, modules, path = set(gymnasium.registry), set(sys.modules), list(sys.path)
    yield
    for id in set(gymnasium.registry) - ids:
        del gymnasium.registry[id]
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def maze(tmp_path: Path) -> Path:
    (tmp_path / "maze.py").write_text(SOURCE)
    return tmp_path / "maze.py"


def test_a_file_is_named_with_the_id_that_it_registers(maze: Path) -> None:
    env: Any = make_env(f"{maze}:Registered-v0", size=5)
    assert env.size == 5
    assert isinstance(env, Env)
    assert asyncio.run(env.reset(seed=1))[0] == "go"


def test_a_file_is_named_with_a_class_that_it_need_not_register(maze: Path) -> None:
    assert make_env(f"{maze}:Maze").unwrapped.size == 3  # type: ignore[attr-defined]


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_maze.py").write_text(SOURCE)
    (tmp_path / "main.py").write_text("from neighbour_of_maze import Maze\n")
    assert make_env(f"{tmp_path}/main.py:Maze").unwrapped.size == 3  # type: ignore[attr-defined]


def test_a_module_is_named_with_an_id_or_a_class(maze: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(maze.parent)
    assert type(make_env("maze:Registered-v0")) is type(make_env("maze:Maze"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\ndef broken(:\n", "env.py:2: SyntaxError: invalid syntax in 'def broken(:'"),
        ("x = 1\n  y = 2\n", "env.py:2: IndentationError: unexpected indent"),
        ("import roll_flash\n\nroll_flash.no_such_name\n", "env.py:3: AttributeError"),
        ("def f():\n    raise ValueError('two\\nlines')\nf()\n", "env.py:2: ValueError: two lines"),
        ("raise SystemExit(1)", "env.py:1: SystemExit: 1"),
        ("import no_such_module_anywhere", "env.py:1: ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("x = 1", "has no environment 'Maze-v0'; it has none"),
        (SOURCE, "has no environment 'Maze-v0'; it has Registered-v0, Wrapped-v0, Maze"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_with_file_line_and_reason(
    tmp_path: Path, source: str, says: str
) -> None:
    (tmp_path / "env.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        make_env(f"{tmp_path}/env.py:Maze-v0")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_was_mended_loads(tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    file.write_text("def broken(:")
    with pytest.raises(ConfigError):
        make_env(f"{file}:Maze")
    file.write_text(SOURCE)
    assert make_env(f"{file}:Maze")


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("no/such/file.py:Maze-v0", "no/such/file.py: no such file"),
        ("no_such_module_anywhere:Maze-v0", "No module named 'no_such_module_anywhere'; install"),
        ("ShelMath-v0", "did you mean ShellMath-v0?"),
        ("", "is not registered"),
        ("a b", "is not registered"),
    ],
)
def test_a_name_of_nothing_says_what_to_do(env_id: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env(env_id)
    assert says in str(caught.value)


def test_steps_that_cannot_be_counted_are_refused(maze: Path) -> None:
    with pytest.raises(ConfigError, match="max_episode_steps"):
        make_env(f"{maze}:Wrapped-v0")


def test_plug_ins_are_found_and_a_broken_one_harms_no_other(maze: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = maze.parent / "mazes-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mazes\nVersion: 1.0\n")
    points = ("broken = no_such_module_anywhere", "maze = maze", "called = plug:register")
    (installed / "entry_points.txt").write_text("\n".join(["[roll_flash.envs]", *points, ""]))
    (maze.parent / "plug.py").write_text(
        "import roll_flash\ndef register():\n    roll_flash.register_env('Called-v0', 'maze:Maze')\n"
    )
    monkeypatch.syspath_prepend(maze.parent)
    monkeypatch.setattr(registration, "_plugins", {})
    assert make_env("Registered-v0")
    assert make_env("Called-v0")
    assert "Called-v0" in [entry.id for entry in list_environments(everything=False)]
    (trouble,) = load_plugins()
    assert "plug-in broken" in trouble


def test_a_file_that_many_threads_want_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(0.2)\n{SOURCE}")
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: make_env(f"{tmp_path}/slow.py:Registered-v0"), range(8)))
    assert len({type(env) for env in made}) == 1


def test_a_plain_gymnasium_environment_keeps_its_wrappers() -> None:
    register_env("Counted-v0", "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv", max_episode_steps=7)
    assert make_env("Counted-v0").spec.max_episode_steps == 7  # type: ignore[union-attr]


@pytest.mark.parametrize(("old", "new"), registration.RENAMED.items())
def test_an_old_name_of_an_attribute_is_refused_with_the_new_one(maze: Path, old: str, new: str) -> None:
    with maze.open("a") as source:
        source.write(f"\nMaze.{old} = True\nclass Small(Maze):\n    pass\n")
    message = f"{maze}:Small: '{old}' of Small is now '{new}'; rename it there"
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_env(f"{maze}:Small")
    with pytest.raises(ConfigError, match=f"'{old}' of Maze is now '{new}'"):
        make_env(f"{maze}:Registered-v0")


def test_an_old_name_that_a_constructor_sets_is_refused_too(maze: Path) -> None:
    maze.write_text(SOURCE.replace("self.size = size", "self.plays_itself = True"))
    with pytest.raises(ConfigError, match="runs_own_loop"):
        make_env(f"{maze}:Registered-v0")


def test_a_worker_looks_for_modules_where_its_driver_does(tmp_path: Path) -> None:
    """A script or notebook that had added a folder found its package, and each episode failed in a worker."""
    stdlib = sysconfig.get_path("stdlib")
    assert stdlib in search_path()
    assert all(Path(folder).is_absolute() for folder in search_path())
    first, last = str(tmp_path / "first"), str(tmp_path / "last")
    before = list(sys.path)
    follow_search_path((first, stdlib, last))
    assert sys.path == [first, *before, last]
    follow_search_path((first, stdlib, last))
    assert sys.path == [first, *before, last]
