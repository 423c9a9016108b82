"""Rewards tried on one row when a run starts, because a mistake in them would fail every episode, or each wrong one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from roll_flash.envs.datasets.env import DatasetEnv
from roll_flash.envs.datasets.rewards import IN_SANDBOX, check_code_of_tests
from roll_flash.envs.hosting.waiting import call_in_time
from roll_flash.envs.rewards.functions import REWARD_TIMEOUT_S, TOLERANCE
from roll_flash.errors import ConfigError, EnvError, first_line
from roll_flash.terminal import say

WRONG_ANSWER = "I do not know."
"""A model may say anything, and a reward that returns None or raises then would leave the wrong answers out."""
NEEDS_AN_ANSWER = ("exact", "number", "math")
"""Rewards that give 1 to the row's own answer, if `answer_in` finds it."""
START_S = 5.0
"""Seconds beyond those of the rewards' own deadline."""
_trying = threading.Lock()


def try_rewards(kwargs: Mapping[str, Any], place: str) -> None:
    """Compute each reward as if the model had written the answer of this row, then a wrong one. Tests of programs are
    not run, but read.

    `kwargs`: of the row's environment. Raises ConfigError if one raises, returns no finite number, or takes too long.
    """
    with _trying:
        try:
            for reward in kwargs["rewards"]:
                _try(reward, kwargs, place)
        except BaseException:
            _loop.cache_clear()  # what took too long may still run there
            raise


def _try(reward: Mapping[str, Any], kwargs: Mapping[str, Any], place: str) -> None:
    name = reward["function"]
    if name == IN_SANDBOX:
        check_code_of_tests(kwargs["answer"], place)
        return
    played = DatasetEnv(**{**kwargs, "rewards": [reward], "tools": (), "mcp_servers": {}})
    for answer, where in ((None, f"the right answer of {place}"), (WRONG_ANSWER, f"{WRONG_ANSWER!r} at {place}")):
        try:
            work = partial(_score_one, played, answer)
            value = call_in_time(work, f"reward {name}", REWARD_TIMEOUT_S + START_S)
        except (ConfigError, EnvError) as error:
            raise ConfigError(f"{error} (tried with {where})") from None
        except (Exception, SystemExit) as error:  # user code may raise anything
            said = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"reward {name} raised {said} (tried with {where})") from error
        if answer is None and name in NEEDS_AN_ANSWER and value < 1 - TOLERANCE:
            say(
                f"reward {name} gives {value:g} to {where}, {kwargs['answer']!r:.60}, with answer_in: "
                f"{kwargs.get('answer_in', 'tag')}; `roll-flash envs check` says for how many rows",
                error=True,
            )


@cache
def _loop() -> asyncio.Runner:
    """One event loop for all trials of this process, as a worker has one for its episodes: a client that a function
    keeps, of an endpoint that judges for example, belongs to the loop in which it was first used."""
    return asyncio.Runner()


def _score_one(env: DatasetEnv, answer: str | None) -> float:
    return _loop().run(_score(env, answer))


async def _score(env: DatasetEnv, answer: str | None) -> float:
    """Score `answer`, with the only reward of `env`; None: that of the row."""
    await env.begin(0)
    try:
        right = await env.oracle()
    except EnvError:  # the row has a schema or tests
        right = "{}"
    (value,) = (await env.score_answer(right if answer is None else answer)).values()
    return value
