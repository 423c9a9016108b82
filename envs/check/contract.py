"""Check that an environment keeps gymnasium's contract. Its return values are tested before anything adapts them."""

from __future__ import annotations

import asyncio
import math
import warnings
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env

from roll_flash.envs.base import Env
from roll_flash.envs.check.play import Player
from roll_flash.processes.background import call_sync_or_async
from roll_flash.sandboxes import SandboxError


async def contract_broken(player: Player, seed: int, timeout_s: float) -> str:
    """Return the first fault found, or an empty string."""
    env, lease = await player.open()
    try:
        async with asyncio.timeout(timeout_s):
            return await _first_fault(env, seed)
    except TimeoutError:
        return f"it took longer than {timeout_s:g} s"
    except SandboxError:
        raise
    except Exception as error:  # user code may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        if lease is not None:
            await lease.close()


async def _first_fault(env: Any, seed: int) -> str:
    if not isinstance(env, gymnasium.Env):
        return f"{type(env).__name__} is no gymnasium.Env"
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), gymnasium.Space):
            return f"{name} is missing (for text: roll_flash.TextSpace())"
    if not isinstance(env.unwrapped, Env) and (fault := await call_sync_or_async(_gymnasiums_own_check, env)):
        return fault
    for _ in range(2):  # twice, because an environment must be reusable
        if fault := _fault_of_reset(await call_sync_or_async(env.reset, seed=seed)):
            return fault
        if fault := _fault_of_step(await call_sync_or_async(env.step, "hello")):
            return fault
    if fault := _fault_of_reset(await call_sync_or_async(env.reset, seed=seed, options={})):
        return f"with options={{}}: {fault}"
    await call_sync_or_async(env.close)
    await call_sync_or_async(env.close)
    return ""


def _gymnasiums_own_check(env: Any) -> str:
    """Run gymnasium's checker, which needs a synchronous environment. Its warnings are ignored as matters of taste."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_env(env, skip_render_check=True, skip_close_check=True)
    except (AssertionError, gymnasium.error.Error) as error:
        hint = "; roll_flash.TextSpace() holds every text" if "space" in str(error) else ""
        return f"gymnasium's checker: {' '.join(str(error).split())[:200]}{hint}"
    return ""


def _fault_of_reset(returned: Any) -> str:
    if not isinstance(returned, tuple) or len(returned) != 2:
        return f"reset returned {_shape(returned)}, not (observation, info)"
    observation, info = returned
    if fault := _fault_of_observation(observation):
        return f"reset: {fault}"
    if not observation:
        return "reset: an empty observation, so that the model is told nothing"
    return "" if isinstance(info, dict) else f"reset: info is {type(info).__name__}, not dict"


def _fault_of_step(returned: Any) -> str:
    if not isinstance(returned, tuple) or len(returned) != 5:
        return f"step returned {_shape(returned)}, not (observation, reward, terminated, truncated, info)"
    observation, reward, terminated, truncated, info = returned
    if fault := _fault_of_observation(observation):
        return f"step: {fault}"
    try:
        finite = math.isfinite(float(reward))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        return f"step: the reward is {reward!r}, not a finite number"
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if type(value).__name__ not in ("bool", "bool_"):
            return f"step: {name} is {value!r}, not a bool"
    return "" if isinstance(info, dict) else f"step: info is {type(info).__name__}, not dict"


def _fault_of_observation(observation: Any) -> str:
    if isinstance(observation, str):
        return ""
    if isinstance(observation, list):
        for message in observation:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                return "a message must be a dict with role and content"
        return ""
    return f"the observation is {type(observation).__name__}, not text or messages (GymText-v0 renders others as text)"


def _shape(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
