"""BFCL v4's multi-turn categories: the score is the one that bfcl-eval's own checker gives, and nobody's call escapes.

A fixed sample; benchmarks/bfcl.py replays all 800 items.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from bfcl_replay import Outcome, corrupted_case, official, oracle, replay, scripted

from roll_flash.envs.adapters.bfcl.backend import backend_spec
from roll_flash.envs.adapters.bfcl.calls import FunctionCall, parse_calls
from roll_flash.envs.adapters.bfcl.env import BFCL
from roll_flash.envs.adapters.bfcl.items import CATEGORIES, describe_function, import_bfcl, load_items
from roll_flash.envs.hosting.sandbox_lease import LazySandbox
from roll_flash.envs.tools.calls import parse_tool_calls
from roll_flash.envs.tools.prompt import TOOL_SCHEMAS
from roll_flash.errors import ConfigError
from roll_flash.sandboxes import SandboxPool

SAMPLE = (0, 63, 112, 171)
"""One item of each of the worlds: files, vehicles, trading, travel."""
CORRUPTED = (29, 90, 121, 163)
WITH_MATHS = 28


def in_sandboxes(*plays: Callable[[SandboxPool], Awaitable[Any]]) -> list[Any]:
    """Run each with one pool, two at a time."""

    async def run() -> list[Any]:
        pool = SandboxPool(provider="docker", size=0, run="test-bfcl")
        gate = asyncio.Semaphore(2)

        async def one(play: Callable[[SandboxPool], Awaitable[Any]]) -> Any:
            async with gate:
                return await play(pool)

        try:
            return list(await asyncio.gather(*map(one, plays)))
        finally:
            await pool.close()

    return asyncio.run(run())


async def play(pool: SandboxPool, *actions: str, **arguments: Any) -> list[Any]:
    env = BFCL(**{"index": 0, **arguments})
    lease = LazySandbox(pool, backend_spec())
    env.sandbox = lease
    try:
        first = await env.reset(seed=0)
        return [first, *[await env.step(action) for action in actions]]
    finally:
        await env.close()
        await lease.close()


@pytest.mark.docker
@pytest.mark.parametrize("category", CATEGORIES)
def test_replaying_the_ground_truth_scores_full(category: str) -> None:
    outcomes = in_sandboxes(
        *(lambda pool, i=i: replay(pool, category, i, oracle) for i in SAMPLE),
        lambda pool: replay(pool, category, SAMPLE[1], oracle, "native"),
    )
    assert outcomes == [Outcome(True, "")] * 5


@pytest.mark.docker
def test_corrupted_calls_score_what_bfcl_evals_own_checker_says() -> None:
    cases = [corrupted_case(category, index, 0) for category in CATEGORIES for index in CORRUPTED]
    assert len({kind for _, kind, _ in cases}) >= 6
    here = in_sandboxes(
        *(
            lambda pool, item=item, calls=calls: replay(
                pool, item.item_id.rpartition("_")[0], int(item.item_id.rpartition("_")[2]), scripted(calls)
            )
            for item, _, calls in cases
        )
    )
    there = [official(item, calls) for item, _, calls in cases]
    assert here == there
    assert {True, False} == {outcome.valid for outcome in here}


@pytest.mark.docker
def test_errors_are_shown_and_counted_and_a_call_that_hangs_loses_no_state() -> None:
    hanging = f"logarithm(value=2.0, base=3.0, precision={10**7})"
    (first, *steps) = in_sandboxes(
        lambda pool: play(
            pool,
            "[cd(folder='document'), lss(a=True), cd()]",
            '<tool_call>{"name": "pwd", "arguments": {}}</tool_call><tool_call>{"name": "pwd",</tool_call>',
            index=0,
        )
    )[0]
    assert first[1]["item"] == "multi_turn_base_0"
    assert "Error during execution: name 'lss' is not defined. Did you mean ls?" in steps[0][0][0]["content"]
    assert "missing 1 required positional argument: 'folder'" in steps[0][0][0]["content"]
    assert "/document" in steps[1][0][0]["content"]
    assert "not valid JSON" in steps[1][0][0]["content"]
    assert {name: (use["calls"], use["errors"]) for name, use in steps[1][4]["tools"].items()} == {
        "cd": (2, 1),
        "(unknown)": (2, 2),
        "pwd": (1, 0),
    }
    classes = load_items("multi_turn_base")[WITH_MATHS].involved_classes
    assert "MathAPI" in classes
    (_, *steps) = in_sandboxes(
        lambda pool: play(
            pool, "[mean(numbers=[1, 2])]", f"[{hanging}, mean(numbers=[3])]", index=WITH_MATHS, call_timeout_s=2.0
        )
    )[0]
    assert "1.5" in steps[0][0][0]["content"]
    assert "took longer than 2 s and was given up" in steps[1][0][0]["content"]
    assert "3.0" in steps[1][0][0]["content"] or '\'{"result": 3' in steps[1][0][0]["content"]
    assert steps[1][4]["tools"]["logarithm"]["timeouts"] == 1


def test_held_out_functions_are_offered_when_their_turn_comes() -> None:
    async def run() -> list[Any]:
        env = BFCL("multi_turn_miss_func", index=0, call_format="native")
        return [await env.reset(seed=0), *[await env.step("ok") for _ in range(3)]]

    first, *steps = asyncio.run(run())
    offered = {schema["function"]["name"] for schema in first[1][TOOL_SCHEMAS]}
    assert "sort" not in offered
    assert "'name': 'sort'" in steps[2][0][0]["content"]
    assert "I have updated some more functions" in steps[2][0][0]["content"]


def test_a_model_that_never_stops_calling_has_failed_and_one_that_is_stopped_too() -> None:
    env = BFCL(index=0, max_steps_per_turn=2)

    async def run() -> Sequence[Any]:
        await env.reset(seed=0)
        steps = [await env.step("[no_such()]") for _ in range(3)]
        await env.reset(seed=0)
        return [*steps, await env.conclude()]

    *steps, stopped = asyncio.run(run())
    assert [(step[1], step[2]) for step in steps] == [(0.0, False), (0.0, False), (0.0, True)]
    assert steps[-1][4]["bfcl_error"] == "multi_turn:force_terminated"
    assert steps[-1][4]["success"] is False
    assert (stopped[0], stopped[1]["success"]) == (0.0, False)


def test_every_seed_is_an_item_and_a_wrong_argument_says_what_there_is() -> None:
    items = [asyncio.run(BFCL().reset(seed=seed))[1]["item"] for seed in (0, 1, 200, 1_000_000_003)]
    assert items == [f"multi_turn_base_{number}" for number in (0, 1, 0, 3)]
    with pytest.raises(ConfigError, match="multi_turn_base, multi_turn_miss_func"):
        BFCL(category="multi_turn")
    with pytest.raises(ConfigError, match="items 0 to 199"):
        BFCL(index=200)


FUNCTIONS = {
    str(function["name"]): describe_function(function) for function in load_items("multi_turn_base")[0].functions
}


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("[cd(folder='document'), ls(a=True)]", ["cd(folder='document')", "ls(a=True)"]),
        ("```ls()```", ["ls()"]),
        ("sort('a.txt')", ["sort('a.txt')"]),
        ("[cd(folder=document)]", ["cd(folder='document')"]),
        ("[cd(folder='a' + 'b')]", ["cd(folder='a' + 'b')"]),
        ("[echo(content=cat(file_name='x'))]", ["echo(content=cat(file_name='x'))"]),
        ("<think>[ls()]</think>[pwd()]", ["pwd()"]),
        ('<tool_call>{"name": "cd", "arguments": {"folder": "it\'s"}}</tool_call>', ['cd(folder="it\'s")']),
        ('{"name": "ls", "parameters": {"a": true}}', ["ls(a=True)"]),
        ('[TOOL_CALLS][{"name": "pwd", "arguments": {}}]', ["pwd()"]),
        ("Done.", []),
        ("[]", []),
        ("I moved the file (as you asked).", []),
        ("", []),
    ],
)
def test_calls_are_read_as_bfcl_eval_reads_them_and_in_native_formats(text: str, sources: list[str]) -> None:
    found = parse_calls(text, FUNCTIONS)
    assert [call.source for call in found if isinstance(call, FunctionCall)] == sources


@pytest.mark.parametrize(
    "text",
    [
        f"[ls(a=0x{'f' * 10_000})]",
        f"[ls(a={'1+' * 5000}1)]",
        f"[{'a.' * 5000}b(a=1)]",
        f"[ls(a={'[' * 5000}{']' * 5000})]",
        f'{{"name": "ls", "arguments": {{"a": {"9" * 5000}}}}}',
        f'{{"name": "ls", "arguments": {{"a": {"[" * 500}{"]" * 500}}}}}',
        '{"name": "ls", "arguments": {"a": NaN, "b": "\\ud800"}}',
        "[ls(a=b'\\xff', b=1j, c=...)]",
        "[" + "ls()," * 4000 + "]",
    ],
)
@pytest.mark.parametrize("parse", [parse_calls, parse_tool_calls])
def test_nothing_a_model_writes_breaks_the_readers(text: str, parse: Callable[..., list[Any]]) -> None:
    for call in parse(text, FUNCTIONS):
        assert call.name in (*FUNCTIONS, "(unknown)") or call.source == "no_such_function()"


@pytest.mark.parametrize(
    "text",
    [
        "[__import__('os').system('id')]",
        "[exec('import os')]",
        "[ls(a=__import__('os').system('id'))]",
        "[ls(a=[x for x in ().__class__.__bases__])]",
        "[ls(**{'a': 1})]",
        "[ls(a=(lambda: 1))]",
        "[ls.__func__(a=1)]",
        '<tool_call>{"name": "ls", "arguments": {"a=1) or exec(": 1}}</tool_call>',
        '<tool_call>{"name": "exec(1);ls", "arguments": {}}</tool_call>',
        "[ls(a=f'{exec(1)}')]",
    ],
)
def test_only_known_functions_and_literals_are_ever_run(text: str) -> None:
    for call in parse_calls(text, FUNCTIONS):
        assert isinstance(call, FunctionCall)
        assert call.source in ("no_such_function()", "ls(a=no_such_function())")


def test_without_its_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(ConfigError, match="bfcl-eval is not installed; pip install --no-deps bfcl-eval"):
        import_bfcl("bfcl_eval")


@pytest.mark.docker
def test_calls_on_which_the_checker_comes_to_no_verdict_are_wrong_and_no_failure() -> None:
    """They fit into the sandbox once, and not twice; the right calls are checked as ever."""
    item = load_items("multi_turn_base")[0]
    fill = "[touch(file_name='x'), echo(content='a' * 16 * 10**7, file_name='x')]"
    (_, *steps) = in_sandboxes(lambda pool: play(pool, fill, *["ok"] * len(item.question), call_timeout_s=60.0))[0]
    _, reward, terminated, _, info = steps[-1]
    said = str(steps[0][0])
    assert "Error" not in said
    assert "given up" not in said
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert info["bfcl_error"] == "multi_turn:checker_ended"


@pytest.mark.docker
def test_calls_that_a_new_server_cannot_repeat_end_the_calls_and_are_no_failure() -> None:
    """All results together took more memory than one after the other: the model's own calls made it no sample."""
    item = load_items("multi_turn_base")[0]

    async def run(pool: SandboxPool) -> tuple[str, list[Any]]:
        env = BFCL(index=0)
        lease = LazySandbox(pool, backend_spec())
        env.sandbox = lease
        try:
            await env.reset(seed=0)
            await env.step("[pwd()]")
            assert env._backend is not None
            await env._backend.close()  # as after a call that hangs
            env._backend._done = ["touch(file_name='x')", "echo(content='a' * 4 * 10**8, file_name='x')"]
            said = await env.step("[ls(), ls()]")
            return str(said[0]), [await env.step("ok") for _ in item.question][-1][1:]
        finally:
            await env.close()
            await lease.close()

    said, (earned, terminated, _, info) = in_sandboxes(run)[0]
    assert "ls was not run: when the calls before it were repeated, the server ended" in said
    assert (earned, terminated, info["success"]) == (0.0, True, False)


@pytest.mark.docker
def test_calls_that_end_the_server_again_and_again_take_no_more_time_than_others() -> None:
    """Each repeats what was called before: one turn would take so long that the episode was no sample."""
    slow, ending = "cat(file_name=0 * 3**4000000)", f"cat(file_name=1 << {4 * 10**9})"
    slow_turn, turn = in_sandboxes(
        lambda pool: play(pool, f"[{slow}]", f"[{', '.join([ending] * 60)}]", call_timeout_s=8.0)
    )[0][1:]
    used_s = slow_turn[4]["tools"]["cat"]["seconds"]
    assert used_s > 0.2
    ended = turn[4]["tools"]["cat"]["timeouts"] - str(turn[0]).count("was not run")
    # Beside other work the first call may take several times as long as those that repeat it.
    assert 0 < ended <= min(59, 4 * 16.0 / used_s), (ended, used_s)


@pytest.mark.docker
def test_the_calls_of_an_episode_share_a_time_so_that_they_can_be_made_again() -> None:
    hanging = f"logarithm(value=2.0, base=3.0, precision={10**7})"
    (_, step) = in_sandboxes(
        lambda pool: play(pool, f"[{', '.join([hanging] * 5)}]", index=WITH_MATHS, call_timeout_s=1.0)
    )[0]
    said = step[0][0]["content"]
    assert said.count("took longer than 1 s and was given up") >= 1
    assert said.count("was not run: the calls before it took all the time of the episode") >= 2
    assert step[4]["tools"]["logarithm"]["timeouts"] == 5
