"""Rewards as decorated functions: `@reward(weight=0.5)` on a method of the environment, or on a function of it.

They may be coroutines, use the environment's sandbox or ask a judge. An exception in a reward function fails the
episode, which is then not trained on; it never counts as reward 0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np

from roll_flash.errors import EnvError
from roll_flash.processes.background import call_sync_or_async

When = Literal["turn", "final"]
REWARD_TIMEOUT_S = 60.0
TOLERANCE = 1e-9
"""By which a full reward may be less than 1, because of rounding."""
_MARK = "__roll_flash_reward__"

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RewardOptions:
    weight: float = 1.0
    when: When = "final"
    timeout_s: float = REWARD_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Score:
    """The weighted sum of the rewards, and the unweighted value of each function."""

    total: float
    values: Mapping[str, float]
    is_full: bool = True
    """False if a reward with a positive weight gave less than 1, whatever the others gave."""


@overload
def reward(function: Function, /) -> Function: ...


@overload
def reward(*, weight: float = ..., when: When = ..., timeout_s: float = ...) -> Callable[[Function], Function]: ...


def reward(
    function: Any = None, /, *, weight: float = 1.0, when: When = "final", timeout_s: float = REWARD_TIMEOUT_S
) -> Any:
    """Make a function a reward, `@reward()` or `@reward`: it returns a finite number or a bool, which is multiplied by
    `weight`.

    `when="turn"` runs after every turn, `"final"` once at the end. With weight 0 the value is only logged.
    """
    if not math.isfinite(weight):
        raise ValueError(f"weight={weight}: must be a finite number")
    if when not in get_args(When):  # else it would never be called
        raise ValueError(f"when={when!r}: must be one of {', '.join(get_args(When))}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: must be more than 0")

    def mark(function: Any) -> Any:
        method = getattr(function, "__func__", function)  # of a staticmethod or classmethod
        setattr(method, _MARK, RewardOptions(weight, when, timeout_s))
        return function

    return mark if function is None else mark(function)


class Rubric:
    """A set of reward functions that take the environment. Undecorated ones are final, with weight 1."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        """Raises EnvError for two of one name, of which a record would have one value, and for one without a name."""
        self._rewards = [(function, options_of(function) or RewardOptions()) for function in functions]
        names = [getattr(function, "__name__", "") for function, _ in self._rewards]
        for name, (function, _) in zip(names, self._rewards, strict=True):
            if not name:
                raise EnvError(f"the reward {function!r:.80} has no name; write a function with `def`")
            if names.count(name) > 1:
                raise EnvError(
                    f"two rewards are called {name!r}, so that records could not tell them apart; rename one"
                )

    @classmethod
    def of(cls, env_type: type[Any]) -> Rubric:
        """Collect the decorated methods of a class, base classes first, and the functions in its `rewards`."""
        return cls([*reward_methods(env_type).values(), *getattr(env_type, "rewards", ())])

    @property
    def full_reward(self) -> float:
        """Sum of the final rewards if each function returns 1."""
        return sum(options.weight for _, options in self._rewards if options.when == "final" and options.weight > 0)

    @property
    def defines_success(self) -> bool:
        """True if a final reward counts; rewards of single turns do not show that the task was solved."""
        return any(options.when == "final" and options.weight for _, options in self._rewards)

    async def score(self, env: Any, when: When) -> Score:
        """Call the functions of this moment one by one. Raises EnvError for a value that is not a finite number."""
        values: dict[str, float] = {}
        total, is_full = 0.0, True
        for function, options in self._rewards:
            if options.when == when:
                value = await _ask(function, env, options.timeout_s)
                values[function.__name__] = value
                total += options.weight * value
                is_full &= options.weight <= 0 or value >= 1 - TOLERANCE
        return Score(total, values, is_full)


def reward_methods(env_type: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return the decorated methods of a class by their names, those of base classes first."""
    return {
        name: getattr(env_type, name)
        for base in reversed(env_type.__mro__)
        for name in vars(base)
        if options_of(getattr(env_type, name, None)) is not None
    }


def options_of(function: Any) -> RewardOptions | None:
    """Return the arguments of `@reward`; None for a function that it does not decorate."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, RewardOptions) else None


async def _ask(function: Callable[..., Any], env: Any, timeout_s: float) -> float:
    name = function.__name__
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            value = await call_sync_or_async(function, env)
    except TimeoutError as error:
        if not scope.expired():
            raise EnvError(f"reward {name} raised TimeoutError: {error}") from error
        raise EnvError(f"reward {name} took longer than {timeout_s:g} s") from None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise EnvError(f"reward {name} returned {value!r}; it must return a finite number or a bool")
