"""GymText-v0: any gymnasium environment with discrete actions, rendered as text.

The text is the environment's own picture if it has one (`render_mode="ansi"`), else its observation in words. Reward
and end are the environment's. Success is known only if the environment ends only with success, or has registered a
`reward_threshold`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from roll_flash.envs.shipped.text_game import TextGame, best_actions, likely_path, transitions_of
from roll_flash.errors import ConfigError

_WORDS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "wait", "right"),
    "Acrobot": ("back", "none", "forward"),
}
_ABOUT = {
    "FrozenLake": "Cross the frozen lake to the goal G. You are @; F is frozen, H a hole.",
    "CliffWalking": "Walk from x to the goal T without stepping on the cliff C.",
    "Taxi": "Drive the taxi @ to the passenger, pick them up, drive to the destination and drop them off there. "
    "A | is a wall, a : is none.",
    "Blackjack": "Blackjack. You see your sum, the dealer's card, and whether you have a usable ace.",
}
_COLOURED = re.compile(r"((?:\x1b\[[\d;]+m)+)(.)(?:\x1b\[0m)+")
_LEGEND = {"34": "passenger at", "35": "destination", "42": "passenger in the taxi"}
_BACKGROUNDS = ("41", "42", "43")
"""Background colours that mark the player in gymnasium's pictures."""
_EACH_MOVE_COSTS = ("CliffWalking", "Taxi", "MountainCar", "Acrobot")
_ENDS_WITH_SUCCESS = ("CliffWalking", "Taxi")
_CUT_OFF = {"Blackjack": -1.0}
"""Reward of a game that was not played to its end: 0 would be more than the best player earns on average."""
MAX_PLAN_MOVES = 1000


class GymText(TextGame):
    """Arguments: `env_id` and `env_kwargs` of the environment; `words` (names of its actions) and `about` (its
    description), to replace the defaults known for gymnasium's small environments; `max_turns`, `moves_per_turn`;
    `move_cost`, below 0 if each move costs (also known): reward of each unused move when the turns are used up;
    `cut_off`, the reward then, which should be that of a lost game (also known)."""

    def __init__(
        self,
        env_id: str = "Taxi",
        env_kwargs: Mapping[str, Any] | None = None,
        words: Sequence[str] | None = None,
        about: str | None = None,
        max_turns: int = 30,
        moves_per_turn: int = 5,
        move_cost: float | None = None,
        cut_off: float | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns, moves_per_turn=moves_per_turn)
        self._env = _make(env_id, dict(env_kwargs or {}))
        name = self._name = env_id.rpartition(":")[2].partition("-")[0]
        count = _action_count(self._env, env_id)
        known = _WORDS.get(name, ())
        self.words = tuple(words or (known if len(known) == count else map(str, range(count))))
        if len(self.words) != count:
            raise ConfigError(f"GymText-v0: {env_id} has {count} actions, but words has {len(self.words)}")
        self.move_cost = move_cost if move_cost is not None else -1.0 if name in _EACH_MOVE_COSTS else 0.0
        self._cut_off = cut_off if cut_off is not None else _CUT_OFF.get(name, 0.0)
        self._about = about or _ABOUT.get(name, f"You play {name}.")
        self._observation: Any = None
        self._total = 0.0
        self._policy: dict[int, int] = {}
        self._start: Any = None

    def begin(self, seed: int) -> str:
        self._observation, _ = self._env.reset(seed=seed % (1 << 31))
        self._start = self._observation
        self._total = 0.0
        return self._about

    def move(self, index: int) -> tuple[float, bool, bool | None]:
        self._observation, reward, terminated, truncated, _ = self._env.step(index + self._first_action)
        self._total += float(reward)
        is_over = bool(terminated or truncated)
        return float(reward), is_over, self._has_won(bool(terminated)) if is_over else None

    def won_so_far(self) -> bool | None:
        return None if self._has_won(terminated=True) is None else False

    def show(self) -> str:
        picture = self._env.render() if self._env.render_mode == "ansi" else None
        if isinstance(picture, str):
            return _in_plain_letters(picture)
        return in_words(self._observation, self._env.observation_space)

    def plan(self) -> Sequence[int]:
        return self._best(self._observation)[0]

    def reward_when_cut_off(self) -> float:
        return super().reward_when_cut_off() + self._cut_off

    @property
    def full_reward(self) -> float:
        """Reward of the best moves from the start of this episode; infinite if it is unknown."""
        return float("inf") if transitions_of(self._env) is None else self._best(self._start)[1]

    @property
    def oracle(self) -> Callable[[], str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Available only if the environment exposes its transitions."""
        if transitions_of(self._env) is None:
            raise AttributeError("oracle: this environment does not tell its transitions")
        return super().oracle

    def close(self) -> None:
        self._env.close()

    def _has_won(self, terminated: bool) -> bool | None:
        if self._name in _ENDS_WITH_SUCCESS:
            return terminated
        threshold = self._env.spec.reward_threshold if self._env.spec else None
        return None if threshold is None else self._total >= threshold

    def _best(self, state: Any) -> tuple[list[int], float]:
        transitions = transitions_of(self._env)
        assert transitions is not None
        self._policy = self._policy or best_actions(transitions)
        return likely_path(transitions, int(state), self._policy, MAX_PLAN_MOVES)

    @property
    def _first_action(self) -> int:
        space = self._env.action_space
        return int(space.start) if isinstance(space, gymnasium.spaces.Discrete) else 0


def in_words(observation: Any, space: gymnasium.Space[Any]) -> str:
    """Return an observation of one of gymnasium's usual spaces as text."""
    match space:
        case gymnasium.spaces.Dict():
            return "\n".join(f"{key}: {in_words(observation[key], inner)}" for key, inner in space.spaces.items())
        case gymnasium.spaces.Tuple():
            parts = zip(observation, space.spaces, strict=True)
            return ", ".join(in_words(part, inner) for part, inner in parts)
        case gymnasium.spaces.Text():
            return str(observation)
        case gymnasium.spaces.Discrete():
            return f"{int(observation)} of {int(space.start)}..{int(space.start + space.n - 1)}"
    return np.array2string(np.asarray(observation), precision=3, suppress_small=True, separator=", ", threshold=256)


def _make(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        spec = gymnasium.spec(_newest(env_id))
        env_type: Any = spec.entry_point
        if not callable(env_type):
            env_type = load_env_creator(str(env_type))
        if "ansi" in getattr(env_type, "metadata", {}).get("render_modes", ()):
            kwargs.setdefault("render_mode", "ansi")
        return gymnasium.make(spec.id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"GymText-v0: env_id {env_id!r}: {' '.join(str(error).split())}") from None


def _newest(env_id: str) -> str:
    """Return the newest version of an id without a version."""
    versions = {spec.version or 0: spec.id for spec in gymnasium.registry.values() if spec.name == env_id}
    return versions[max(versions)] if versions and env_id not in gymnasium.registry else env_id


def _action_count(env: gymnasium.Env[Any, Any], env_id: str) -> int:
    if not isinstance(env.action_space, gymnasium.spaces.Discrete):
        raise ConfigError(f"GymText-v0: {env_id} has actions {env.action_space}; only discrete actions have names")
    return int(env.action_space.n)


def _in_plain_letters(picture: str) -> str:
    """Write colours in words; the last move, which some pictures repeat, is left out."""
    legend: list[str] = []

    def plain(found: re.Match[str]) -> str:
        codes = re.findall(r"\d+", found[1])
        legend.extend(f"{_LEGEND[code]} {found[2].strip(' _')}".strip() for code in codes if code in _LEGEND)
        return "@" if any(code in _BACKGROUNDS for code in codes) else found[2]

    lines = _COLOURED.sub(plain, picture).splitlines()
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("(")]
    return "\n".join([*kept, *([", ".join(legend)] if legend else [])])
