"""MiniWoB-v0 with the real pages, in a real Chromium in real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from roll_flash.envs.adapters.miniwob.elements import Action, Element, read_action
from roll_flash.envs.adapters.miniwob.env import TASKS
from roll_flash.envs.check.checks import check_environment
from roll_flash.envs.check.play import Player
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.envs.registration import make_env
from roll_flash.errors import ConfigError, EnvError
from roll_flash.sandboxes import SandboxImageMissing, SandboxSpec, list_sandboxes, open_sandbox

ROOT = Path(__file__).parents[2]
ID = "MiniWoB-v0"
ELEMENTS = (
    Element(0, "text", "Name", "", ()),
    Element(2, "field", "Name", "Ada", ("focused",)),
    Element(3, "radio", "yes", "", ("chosen",)),
)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("click 3", Action(3, None)),
        ("Click #3.", Action(3, None)),
        ("click [3]", Action(3, None)),
        ("type [2] Grace", Action(2, "Grace")),
        ("<think>type 2 x</think>\n- type 2 Grace Hopper\nclick 3", Action(2, "Grace Hopper")),
        ('I write. <action>type 2 "Grace"</action>', Action(2, "Grace")),
        ("press 3", "This is no action; write `click N` or `type N TEXT`."),
        ('click 3 radio "yes"', Action(3, None)),
        ("click 1", "There is no element 1."),
        ("click 99999", "This is no action; write `click N` or `type N TEXT`."),
        ("type 3 no", "Element 3 is no field to type into."),
        ("type 2", "Write what to type: `type 2 TEXT`."),
        ("", "This is no action; write `click N` or `type N TEXT`."),
    ],
)
def test_an_action_is_found_in_a_reply_or_the_model_is_told_what_is_wrong(reply: str, action: Action | str) -> None:
    assert read_action(reply, ELEMENTS) == action


def test_an_element_is_one_short_line() -> None:
    assert list(map(str, ELEMENTS)) == ["- Name", 'field "Name" [2] = "Ada" (focused)', 'radio "yes" [3] (chosen)']


def test_a_task_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no task 'clickbutton'; did you mean click-button\?"):
        make_env(ID, task="clickbutton")
    with pytest.raises(ConfigError, match=r"there is no task 'fly'; there are .*click-button"):
        make_env(ID, task=["click-button", "fly"])
    with pytest.raises(ConfigError, match="there is no task ''"):
        make_env(ID, task=[])


@pytest.mark.docker
def test_without_its_image_the_error_names_the_command_that_builds_it() -> None:
    async def lease() -> None:
        async with open_sandbox(SandboxSpec(image="roll-flash-browser:never-built"), provider="docker"):
            pass

    with pytest.raises(SandboxImageMissing, match="run `make browser-image`"):
        asyncio.run(lease())


def play(use: Callable[[Callable[[], Awaitable[Any]], Player], Awaitable[None]], task: Any = TASKS) -> None:
    """Call a function with one that opens environments, as a worker does: all have one pool of sandboxes."""

    async def run() -> None:
        async with Player(ID, {"task": task}, provider="docker", timeout_s=120, run="miniwob-test") as player:
            opened: list[tuple[Any, Any]] = []

            async def open_env() -> Any:
                opened.append(await player.open())
                return opened[-1][0].unwrapped

            try:
                await use(open_env, player)
            finally:
                for env, lease in opened:
                    await env.unwrapped.close()
                    await lease.close()

    asyncio.run(run())


@pytest.mark.adapters
@pytest.mark.docker
@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_solved_by_the_known_way_on_training_and_held_out_seeds(task: str) -> None:
    async def solve(open_env: Any, player: Player) -> None:
        env = await open_env()
        for seed in [*range(3), *range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + 3)]:
            await env.reset(seed=seed)
            is_over, reward, info, turns = False, 0.0, {}, 0
            while not is_over and turns < 16:
                assert env.valid_actions
                _, reward, is_over, _, info = await env.step(env.oracle())
                turns += 1
            assert (reward, info) == (1.0, {"valid": True, "success": True}), (task, seed)

    play(solve, task)


@pytest.mark.adapters
@pytest.mark.docker
def test_the_same_seed_is_the_same_page_and_held_out_ones_are_others() -> None:
    async def compare(open_env: Any, player: Player) -> None:
        env, other = await open_env(), await open_env()
        training = [(await env.reset(seed=seed))[0] for seed in range(40)]
        held_out = [(await env.reset(seed=HELD_OUT_SEEDS + seed))[0] for seed in range(100)]
        assert [(await other.reset(seed=seed))[0] for seed in (7, 3)] == [training[7], training[3]]
        assert [(await other.reset(seed=HELD_OUT_SEEDS + seed))[0] for seed in (60, 2)] == [held_out[60], held_out[2]]
        assert len(set(training)) > 35
        assert len(set(held_out)) == 100
        assert not set(training) & set(held_out)

    play(compare, ["click-checkboxes", "enter-password"])


@pytest.mark.adapters
@pytest.mark.docker
def test_a_wrong_answer_ends_it_and_what_is_no_action_costs_a_turn() -> None:
    async def err(open_env: Any, player: Player) -> None:
        env = await open_env()
        first, info = await env.reset(seed=1)
        assert info == {"page": "click-test-2"}  # "task" would name one problem, not a page of many
        elements = first.partition("\n\n")[2]
        assert await env.step("jump") == (
            f"This is no action; write `click N` or `type N TEXT`.\n{elements}",
            0.0,
            False,
            False,
            {"valid": False},
        )
        assert env.valid_actions == ("click 1", "click 2")
        assert env.oracle() == "click 1"
        _, reward, is_over, _, info = await env.step("click 2")
        assert (reward, is_over, info) == (0.0, True, {"valid": True, "success": False})

    play(err, "click-test-2")


@pytest.mark.adapters
@pytest.mark.docker
def test_a_model_that_is_slow_does_not_fail_by_the_clock_of_the_page() -> None:
    async def dawdle(open_env: Any, player: Player) -> None:
        env = await open_env()
        await env.reset(seed=0)
        await asyncio.sleep(11)
        assert (await env.step(env.oracle()))[1] == 1.0

    play(dawdle, "click-test-2")


@pytest.mark.adapters
@pytest.mark.docker
def test_a_browser_serves_the_next_episode_and_ends_with_the_pool() -> None:
    async def begin_twice(open_env: Any, player: Player) -> None:
        used = []
        for _ in range(2):
            env = await open_env()
            await env.reset(seed=0)
            used.append(env._browser)
            await env.close()
        assert used[0] is used[1]
        assert player._pool.stats().leases == 1
        assert any(entry.run == "miniwob-test" for entry in await asyncio.to_thread(list_sandboxes))

    play(begin_twice)
    assert not any(entry.run == "miniwob-test" for entry in list_sandboxes())


@pytest.mark.adapters
@pytest.mark.docker
def test_a_browser_does_not_grow_with_its_episodes() -> None:
    """Each page stayed in memory, 2 MB each, and the sandbox was full after 200 episodes."""

    async def reset_often(open_env: Any, player: Player) -> None:
        env, used_mb = await open_env(), []
        for seed in range(80):
            await env.reset(seed=seed)
            if seed in (20, 79):
                (sandbox,) = player._pool._leased
                used_mb.append((await sandbox.stats()).memory_bytes / 1e6)
        assert used_mb[1] < used_mb[0] + 40

    play(reset_often, ["click-button", "click-dialog-2"])


@pytest.mark.adapters
@pytest.mark.docker
@pytest.mark.parametrize("when", ["in an episode", "between two"])
def test_a_browser_that_is_killed_costs_its_episode_and_the_next_one_starts_another(when: str) -> None:
    async def kill(open_env: Any, player: Player) -> None:
        env = await open_env()
        await env.reset(seed=0)
        browser = env._browser
        if when == "between two":
            await env.close()
        await next(iter(player._pool._leased)).exec("kill -9 -1")
        if when == "in an episode":
            with pytest.raises(EnvError, match="the browser has ended"):
                await env.step(env.oracle())
            await env.close()
        again = await open_env()
        await again.reset(seed=0)
        assert again._browser is not browser
        assert (await again.step(again.oracle()))[1] == 1.0

    play(kill, "click-test-2")


@pytest.mark.adapters
@pytest.mark.docker
def test_it_is_fit_to_train_on() -> None:
    report = check_environment(ID, {}, seeds=3, timeout_s=120, provider="docker")
    assert report.ok, report.as_table()
