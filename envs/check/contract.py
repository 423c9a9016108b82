"""Check that an environment keeps gymnasium's contract."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable
from typing import Any, TypeVar

import gymnasium
from gymnasium.utils.env_checker import check_env

from roll_flash.config.user_code import described
from roll_flash.envs.base import Env
from roll_flash.envs.check.play import Player
from roll_flash.envs.hosting.environments import AsyncEnvironment
from roll_flash.errors import EnvError
from roll_flash.processes.background import DaemonThreads, call_sync_or_async
from roll_flash.sandboxes import SandboxError

T = TypeVar("T")
NO_TEXTS = (
    gymnasium.spaces.Box,
    gymnasium.spaces.Dict,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)
"""Spaces that hold no text."""


async def contract_broken(player: Player, seed: int, timeout_s: float) -> str:
    """Return the first fault found, or an empty string."""
    env, lease = await player.open()
    try:
        return await _first_fault(env, seed, timeout_s)
    except TimeoutError as error:
        return str(error)
    except SandboxError:
        raise
    except EnvError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # user code may raise anything
        return " ".join(described(error).split())[:300]
    finally:
        if lease is not None:
            await lease.close()


async def _first_fault(env: Any, seed: int, timeout_s: float) -> str:
    """Each call may take `timeout_s`, as in training."""

    async def call(what: str, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            raise TimeoutError(f"{what} took longer than {timeout_s:g} s") from None

    hosted = AsyncEnvironment(env, DaemonThreads())
    if not isinstance(env.unwrapped, Env):
        if fault := _no_space_of_texts(env):
            return fault
        await call("reset", hosted.reset(seed))  # raises for an observation that is no text
        fault = await call("gymnasium's checker", call_sync_or_async(_gymnasiums_own_check, env))
        if fault:
            return fault
    for _ in range(2):  # twice, because an environment must be reusable
        messages, _ = await call("reset", hosted.reset(seed))
        if not messages:
            return "reset: an empty observation, so that the model is told nothing"
        await call("step", hosted.step("hello"))
    await call("reset", call_sync_or_async(env.reset, seed=seed, options={}))
    await call("close", call_sync_or_async(env.close))
    await call("close", call_sync_or_async(env.close))
    return ""


def _no_space_of_texts(env: Any) -> str:
    """Gymnasium's own `Text` holds letters and digits unless it is told otherwise, and no sentence."""
    if isinstance(actions := getattr(env, "action_space", None), NO_TEXTS):
        return (
            f"action_space is a {type(actions).__name__} space, but a model's actions are texts; read them in "
            "the environment or in a wrapper (GymText-v0 does it for discrete actions), with roll_flash.TextSpace()"
        )
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if isinstance(space, gymnasium.spaces.Text) and " " not in space.character_set:
            return f"{name} is a Text space without a blank in its charset; roll_flash.TextSpace() holds every text"
    return ""


def _gymnasiums_own_check(env: Any) -> str:
    """Run gymnasium's checker, which needs a synchronous environment. Its warnings are ignored as matters of taste."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_env(env, skip_render_check=True, skip_close_check=True)
    except (AssertionError, AttributeError, gymnasium.error.Error) as error:
        hint = "; roll_flash.TextSpace() holds every text" if "space" in str(error) else ""
        return f"gymnasium's checker: {' '.join(str(error).split())[:200]}{hint}"
    return ""
