"""Rewards tried on one row when a run starts, because a mistake in them would fail every episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from roll_flash.envs.datasets.env import DatasetEnv
from roll_flash.envs.datasets.rewards import IN_SANDBOX
from roll_flash.envs.hosting.waiting import call_in_time
from roll_flash.envs.rewards.functions import REWARD_TIMEOUT_S
from roll_flash.errors import ConfigError, EnvError, first_line

START_S = 5.0
"""Seconds beyond those of the rewards' own deadline."""


def try_rewards(kwargs: Mapping[str, Any], place: str) -> None:
    """Compute each reward as if the model had written the answer of this row. Tests of programs are not run.

    `kwargs`: of the row's environment. Raises ConfigError if one raises, returns no finite number, or takes too long.
    """
    for reward in kwargs["rewards"]:
        name = reward["function"]
        if name == IN_SANDBOX:
            continue
        played = DatasetEnv(**{**kwargs, "rewards": [reward], "tools": ()})
        where = f"for the right answer of {place}"
        try:
            call_in_time(partial(_score_one, played), f"reward {name}", REWARD_TIMEOUT_S + START_S)
        except (ConfigError, EnvError) as error:
            raise ConfigError(f"{error}, {where}") from None
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise ConfigError(f"reward {name} raised {type(error).__name__}: {first_line(error)}, {where}") from error


def _score_one(env: DatasetEnv) -> None:
    asyncio.run(_score(env))


async def _score(env: DatasetEnv) -> None:
    await env.begin(0)
    try:
        answer = await env.oracle()
    except EnvError:  # the row has a schema or tests
        answer = "{}"
    await env.score_answer(answer)
