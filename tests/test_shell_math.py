"""ShellMath in a real sandbox: rewards, seeds, and that held-out tasks are not training tasks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import gymnasium
import pytest

from roll_flash.envs.shipped.shell_math import HELD_OUT_SEEDS, ShellMath
from roll_flash.sandboxes import SandboxDied, SandboxSpec, open_sandbox


def make_env(**kwargs: Any) -> ShellMath:
    env = gymnasium.make("ShellMath-v0", **kwargs).unwrapped
    assert isinstance(env, ShellMath)
    return env


def play(env: ShellMath, seed: int, *actions: str | None) -> list[tuple[str, float, bool, dict[str, Any]]]:
    """Take the actions in a real sandbox; None is the oracle's action."""

    async def run() -> list[tuple[str, float, bool, dict[str, Any]]]:
        steps = []
        async with open_sandbox(SandboxSpec(), provider="local") as env.sandbox:
            await env.reset(seed=seed)
            for action in actions:
                text = await env.oracle() if action is None else action
                observation, reward, terminated, _, info = await env.step(text)
                steps.append((str(observation), reward, terminated, info))
        return steps

    return asyncio.run(run())


@pytest.mark.parametrize("kwargs", [{}, {"operands": 4, "largest": 12}, {"operators": "*"}])
def test_the_oracle_earns_the_full_reward(kwargs: dict[str, Any]) -> None:
    for seed in (0, 7, HELD_OUT_SEEDS + 3):
        steps = play(make_env(**kwargs), seed, None, None)
        assert sum(reward for _, reward, _, _ in steps) == pytest.approx(1.0)
        assert steps[-1][2]
        assert steps[-1][3]["success"] is True


def test_the_output_is_the_real_output_of_the_command() -> None:
    ((observation, reward, terminated, _),) = play(make_env(), 1, "<sh>echo made up; exit 3</sh>")
    assert observation == "Output: made up"
    assert reward == pytest.approx(0.1)
    assert not terminated


@pytest.mark.parametrize("reason", ["oom", "killed"])
def test_a_command_that_takes_all_memory_of_its_sandbox_earns_nothing_and_is_a_sample(reason: str) -> None:
    class Dies:
        async def exec(self, *_: Any, **__: Any) -> Any:
            raise SandboxDied("it is gone", reason)

    async def run() -> Any:
        env = make_env()
        env.sandbox = cast(Any, Dies())
        await env.reset(seed=1)
        return await env.step("<sh>fill</sh>")

    if reason == "oom":
        _, reward, terminated, _, info = asyncio.run(run())
        assert (reward, terminated, info["success"]) == (0.0, True, False)
    else:
        with pytest.raises(SandboxDied):
            asyncio.run(run())


def test_a_right_answer_that_no_tool_output_supports_is_no_success() -> None:
    env = make_env()
    steps = play(env, 1, "<sh>echo 123456789</sh>", None)
    assert steps[-1][1] == 0.0
    assert steps[-1][3]["success"] is False


@pytest.mark.parametrize(
    "action", ["", "42", "<sh></sh>", "<sh>a</sh> and more", "<sh>a</sh><sh>b</sh>", "<answer>4</answer>"]
)
def test_anything_but_one_command_ends_the_episode_without_reward(action: str) -> None:
    ((_, reward, terminated, info),) = play(make_env(), 1, action)
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_the_same_seed_gives_the_same_task() -> None:
    async def expressions() -> list[str]:
        return [(await make_env().reset(seed=seed))[1]["expression"] for seed in (5, 5, 6)]

    first, second, other = asyncio.run(expressions())
    assert first == second != other


def test_no_held_out_problem_is_a_training_problem() -> None:
    async def problems(first: int) -> set[str]:
        env = make_env()
        return {(await env.reset(seed=first + index))[1]["expression"] for index in range(2000)}

    training, held_out = asyncio.run(problems(0)), asyncio.run(problems(HELD_OUT_SEEDS))
    assert training.isdisjoint(held_out)
    assert len(held_out) > 500
