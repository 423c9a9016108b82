"""BFCL-v4 against bfcl-eval itself: replaying calls in the environment, corrupting them, and the package's own verdict.

For tests/envs/test_bfcl.py and benchmarks/bfcl.py.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.envs.adapters.bfcl.env import BFCL
from roll_flash.envs.adapters.bfcl.items import BfclItem, load_items
from roll_flash.envs.hosting.sandbox_lease import LazySandbox
from roll_flash.sandboxes import SandboxPool

Calls = list[list[list[str]]]
"""By user turn and by step, as Python source."""

KINDS = ("dropped", "swapped", "changed", "repeated", "moved", "unknown", "emptied")
EPISODE_TIMEOUT_S = 120.0
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Outcome:
    valid: bool
    error_type: str


async def replay(
    pool: SandboxPool, category: str, index: int, act: Callable[[BFCL], Awaitable[str]], call_format: Any = "python"
) -> Outcome:
    """Play one item; `act` is the model. Raises whatever goes wrong."""
    env = BFCL(category, index=index, call_format=call_format, call_timeout_s=30.0)
    assert env.sandbox_spec is not None
    lease = LazySandbox(pool, env.sandbox_spec)
    env.sandbox = lease
    try:
        async with asyncio.timeout(EPISODE_TIMEOUT_S):
            await env.reset(seed=0)
            while True:
                _, reward, terminated, _, info = await env.step(await act(env))
                if terminated:
                    assert reward == float(info["success"])
                    return Outcome(info["success"], info["bfcl_error"])
    finally:
        await env.close()
        await lease.close()


async def oracle(env: BFCL) -> str:
    return await env.oracle()


def scripted(calls: Calls) -> Callable[[BFCL], Awaitable[str]]:
    """A model that makes these calls."""
    actions = [
        action for turn in calls for action in (*(f"[{', '.join(step)}]" for step in turn), "There is no more to do.")
    ]
    said = iter(actions)

    async def act(env: BFCL) -> str:
        return next(said)

    return act


def in_steps(turns: Sequence[Sequence[str]], chance: random.Random) -> Calls:
    """The calls of each turn in one step, or in a step each."""
    if chance.random() < 0.5:
        return [[list(turn)] if turn else [] for turn in turns]
    return [[[call] for call in turn] for turn in turns]


def corrupt(ground_truth: Sequence[Sequence[str]], chance: random.Random) -> tuple[str, Calls]:
    """What was done to the calls, and the calls."""
    turns = [list(turn) for turn in ground_truth]
    kind = chance.choice(KINDS)
    filled = [number for number, turn in enumerate(turns) if turn]
    turn = turns[chance.choice(filled)]
    place = chance.randrange(len(turn))
    match kind:
        case "dropped":
            del turn[place]
        case "swapped":
            other = turns[chance.choice(filled)]
            other_place = chance.randrange(len(other))
            turn[place], other[other_place] = other[other_place], turn[place]
        case "changed":
            turn[place] = with_other_argument(turn[place], chance)
        case "repeated":
            turn.insert(chance.randrange(len(turn) + 1), turn[place])
        case "moved":
            call = turn.pop(place)
            chance.choice(turns).append(call)
        case "unknown":
            turn[place] = "x_" + turn[place]
        case "emptied":
            turn.clear()
    return kind, in_steps(turns, chance)


def with_other_argument(source: str, chance: random.Random) -> str:
    """The call with one of its arguments changed; without arguments, with one too many."""
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    values: list[Any] = [*range(len(call.args)), *call.keywords]
    if not values:
        return source[:-1] + "surplus=1)"
    chosen = chance.choice(values)
    if isinstance(chosen, int):
        call.args[chosen] = ast.Constant(_other(ast.literal_eval(call.args[chosen]), chance))
    else:
        chosen.value = ast.Constant(_other(ast.literal_eval(chosen.value), chance))
    return ast.unparse(call)


def _other(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + chance.choice([1, -1, 0.5])
    if isinstance(value, str):
        return chance.choice([value + "x", value.upper(), "", value[::-1]])
    return chance.choice([None, [], 3])


def official(item: BfclItem, calls: Calls) -> Outcome:
    """What bfcl-eval says in this process; only for calls that were made here.

    Its runner stops a model at the step after the 20th of a turn, and fails an item that was stopped unseen.
    """
    from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    if any(len(turn) > MAXIMUM_STEP_LIMIT for turn in calls):
        return Outcome(False, "multi_turn:force_terminated")
    entry = {
        "id": item.item_id,
        "initial_config": item.initial_config,
        "involved_classes": list(item.involved_classes),
    }
    category = item.item_id.rpartition("_")[0]
    model = f"replay{next(_numbers)}"  # the package keeps instances by this name
    verdict = multi_turn_checker(calls, [list(turn) for turn in item.ground_truth], entry, category, model)
    return Outcome(verdict["valid"], verdict.get("error_type", ""))


def corrupted_case(category: str, index: int, seed: int) -> tuple[BfclItem, str, Calls]:
    item = load_items(category)[index]
    kind, calls = corrupt(item.ground_truth, random.Random(f"{category}:{index}:{seed}"))
    return item, kind, calls
