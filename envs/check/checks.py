"""`roll-flash envs check ID`: tests if an environment is fit to train on.

Agents that do nothing, act at random, send malformed text or solve the task play it in real sandboxes. Each check tests
one property of a good environment; a failed check says how to fix it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll_flash.config.user_code import described
from roll_flash.envs.base import Env
from roll_flash.envs.check import agents
from roll_flash.envs.check.contract import contract_broken
from roll_flash.envs.check.leftovers import Snapshot, adopting_orphans, own_temporary_folder, wait_until_nothing_new
from roll_flash.envs.check.play import Agent, PlayedEpisode, Player
from roll_flash.envs.hosting.environments import is_deterministic
from roll_flash.errors import ConfigError
from roll_flash.sandboxes import SandboxSpec, list_sandboxes
from roll_flash.terminal import say

Status = Literal["pass", "fail", "skip"]
TOLERANCE = 1e-6
DEFAULT_SEEDS = 4
MAX_HELD_UP_MS = 100.0
"""Milliseconds that a step may hold up the event loop of a worker."""
SAID_EVERY_S = 5.0
"""Seconds between lines while a slow environment is played."""
DEFAULT_TIMEOUT_S = 60.0
"""As `rollout.step_timeout_s`."""


@dataclass(frozen=True, slots=True)
class EnvCheck:
    """Result of one check. `advice` says what to do if it failed or was skipped."""

    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class EnvReport:
    env_id: str
    checks: tuple[EnvCheck, ...]
    earned_nothing: bool = False
    """True if no agent earned more than 0."""

    @property
    def ok(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def as_table(self) -> str:
        """Return one line per check."""
        width = max(len(check.name) for check in self.checks)
        marks = {"pass": "ok  ", "fail": "FAIL", "skip": "-   "}
        lines = [
            f"{marks[check.status]}  {check.name:<{width}}  {check.detail}"
            + (f" -> {check.advice}" if check.advice else "")
            for check in self.checks
        ]
        verdict = "fit" if self.ok else "not fit"
        if all(check.status == "skip" for check in self.checks):
            verdict = "not known whether it is fit"
        elif self.ok and self.earned_nothing:
            verdict = (
                "nothing speaks against it, but no agent earned a reward: with an oracle() one can tell if it is fit"
            )
        return "\n".join([*lines, f"{self.env_id}: {verdict} to train on"])


def check_environment(
    env_id: str,
    kwargs: Mapping[str, Any] | None = None,
    *,
    provider: str = "auto",
    seeds: int = DEFAULT_SEEDS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    spec: SandboxSpec | None = None,
) -> EnvReport:
    """Play the environment with every agent on `seeds` tasks each, in sandboxes of `spec` if it has none of its own.

    Raises ConfigError if it cannot be made, SandboxError if it needs a sandbox and none can be started.
    """
    if seeds < 2:
        raise ConfigError("envs check: --seeds must be at least 2")
    return asyncio.run(_check(env_id, dict(kwargs or {}), provider, range(seeds), timeout_s, spec))


@dataclass(slots=True)
class _Episodes:
    """All played episodes, by agent."""

    idle: list[PlayedEpisode] = field(default_factory=list)
    random: list[PlayedEpisode] = field(default_factory=list)
    again: list[PlayedEpisode] = field(default_factory=list)
    """The random agent again, on the same seeds."""
    talkative: list[PlayedEpisode] = field(default_factory=list)
    malformed: list[PlayedEpisode] = field(default_factory=list)
    oracle: list[PlayedEpisode] | None = None

    @property
    def all(self) -> list[PlayedEpisode]:
        return [*self.idle, *self.random, *self.again, *self.talkative, *self.malformed, *(self.oracle or ())]


async def _check(
    env_id: str, kwargs: dict[str, Any], provider: str, seeds: Sequence[int], timeout_s: float, spec: SandboxSpec | None
) -> EnvReport:
    run = f"env-check-{os.getpid()}-{time.time_ns()}"
    new_player = partial(Player, env_id, kwargs, provider=provider, timeout_s=timeout_s, run=run, spec=spec)
    with own_temporary_folder() as temporary, adopting_orphans():
        at_first = Snapshot.take(temporary)
        async with new_player() as player:
            env, _ = await _open(player, env_id)
            if getattr(env.unwrapped, "runs_own_loop", False):
                return EnvReport(env_id, (_plays_itself(env_id, kwargs),))
            has_oracle = callable(getattr(env.unwrapped, "oracle", None))
            declared, holds_up_others = is_deterministic(env.unwrapped), _holds_up_others(env.unwrapped)
            await player.play(agents.constant_text(""), seeds[0])
        # Threads and processes that a library starts at its first use do not count as leftovers; files do.
        before = replace(Snapshot.take(temporary), files=at_first.files)
        async with new_player() as player:
            broken = await contract_broken(player, seeds[0], timeout_s)
            episodes = None if broken else await _play_all(player, seeds, has_oracle)
        left = await asyncio.to_thread(_leftovers, before, temporary, run)
    ask: tuple[Callable[[_Episodes], EnvCheck], ...] = (
        partial(_reproduces, declared=declared),
        _differs,
        _nothing_earns_nothing,
        _survives("a random agent", lambda episodes: episodes.random),
        _survives("a talkative agent", lambda episodes: episodes.talkative),
        _survives("malformed text", lambda episodes: episodes.malformed),
        _oracle_earns_all,
        _rewards_in_range,
        _is_quick(timeout_s, holds_up_others=holds_up_others),
    )
    contract = _answer("keeps gymnasium's contract", not broken, broken or "reset, step and close", _CONTRACT_ADVICE)
    answers = () if episodes is None else (check(episodes) for check in ask)  # otherwise the other checks are noise
    earned = any(played.reward > TOLERANCE for played in episodes.all) if episodes is not None else False
    return EnvReport(env_id, (contract, *answers, _leaves_nothing(left)), earned_nothing=not earned)


_CONTRACT_ADVICE = "see https://gymnasium.farama.org/api/env and docs/environments.md"


async def _open(player: Player, env_id: str) -> tuple[Any, Any]:
    try:
        return await player.open()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"{env_id}: making it raised {described(error)}") from error


async def _play_all(player: Player, seeds: Sequence[int], has_oracle: bool) -> _Episodes:
    count, said_s = 0, time.monotonic()

    async def play(agent: Callable[[int], Agent], chosen: Sequence[int], full: bool = False) -> list[PlayedEpisode]:
        nonlocal count, said_s
        played = []
        for seed in chosen:
            played.append(await player.play(agent(seed), seed, with_full_reward=full))
            count += 1
            if time.monotonic() - said_s > SAID_EVERY_S:
                said_s = time.monotonic()
                say(
                    f"{count} episodes played, a step takes up to {max(played[-1].step_s, default=0.0):.1f} s",
                    error=True,
                )
        return played

    return _Episodes(
        idle=[
            *await play(lambda _: agents.constant_text(""), seeds[:2], True),
            *await play(lambda _: _IDLE, seeds[:2]),
        ],
        random=await play(agents.random_fragments, seeds),
        again=await play(agents.random_fragments, seeds),
        talkative=await play(lambda _: agents.talkative, seeds[:1]),
        malformed=await play(lambda _: agents.malformed, seeds[:1])
        + [await player.play(agents.constant_text(text), seeds[0]) for text in agents.MALFORMED],
        oracle=await play(lambda _: agents.oracle, seeds, True) if has_oracle else None,
    )


def _plays_itself(env_id: str, kwargs: Mapping[str, Any]) -> EnvCheck:
    given = "".join(f" envs.0.kwargs.{name}={shlex.quote(str(value))}" for name, value in kwargs.items())
    trial = f"roll-flash eval --env {env_id} --model tiny -n 2 inference.engine=transformers{given}"
    what = "its agent has a loop of its own (runs_own_loop) and needs a model"
    return EnvCheck("is played", "skip", what, f"try it with an untrained one: {trial}")


_IDLE = agents.constant_text("<answer>done</answer>")
"""Claims that the task is done."""


def _answer(name: str, holds: bool, detail: str, advice: str) -> EnvCheck:
    return EnvCheck(name, "pass" if holds else "fail", detail, "" if holds else advice)


def _reproduces(episodes: _Episodes, *, declared: bool) -> EnvCheck:
    """`declared`: whether the environment says that it is deterministic."""
    different = [
        first.seed
        for first, second in zip(episodes.random, episodes.again, strict=True)
        if (first.prompt, first.steps) != (second.prompt, second.steps)
    ]
    name, detail = "same seed and actions, same episode", f"{len(episodes.random)} seeds"
    if not declared:
        return EnvCheck(name, "skip", "registered as nondeterministic", "an interrupted episode begins again")
    return _answer(
        name,
        not different,
        f"seed {different[0]} differs" if different else detail,
        "draw everything from random.Random(seed) in reset, and show no times, paths or addresses; or register it with "
        "nondeterministic=True",
    )


def _differs(episodes: _Episodes) -> EnvCheck:
    tasks = len({repr(played.prompt) for played in episodes.random})
    detail = f"{tasks} different tasks from {len(episodes.random)} seeds"
    if tasks > 1:
        return EnvCheck("different seeds, different tasks", "pass", detail)
    return EnvCheck("different seeds, different tasks", "skip", detail, "fine if rows make the tasks; else use seed")


def _nothing_earns_nothing(episodes: _Episodes) -> EnvCheck:
    paid = [played for played in episodes.idle if played.reward > TOLERANCE]
    praised = [played for played in episodes.idle if played.success]
    best = max((played.reward for played in episodes.idle), default=0.0)
    errors = [played.error for played in episodes.idle if played.error]
    advice = "answer empty text, do not raise"
    if paid:
        advice = "this can be hacked: reward only what the model has brought about"
    elif praised:
        advice = 'info["success"] is true although nothing was done: take it from the state of the task'
    return _answer(
        "doing nothing earns nothing",
        not paid and not praised and not errors,
        errors[0] if errors else f"an agent that does nothing earns {best:g}{' and succeeds' if praised else ''}",
        advice,
    )


def _survives(who: str, chosen: Callable[[_Episodes], list[PlayedEpisode]]) -> Callable[[_Episodes], EnvCheck]:
    def check(episodes: _Episodes) -> EnvCheck:
        played = chosen(episodes)
        errors = [one.error for one in played if one.error]
        turns = sum(len(one.steps) for one in played)
        best = max((one.reward for one in played), default=0.0)
        return _answer(
            f"bears {who}",
            not errors,
            errors[0] if errors else f"{turns} turns, at most {best:g} earned",
            "what the model says must never raise: answer it, or end the episode without reward",
        )

    return check


def _oracle_earns_all(episodes: _Episodes) -> EnvCheck:
    name = "the oracle earns the full reward"
    if episodes.oracle is None:
        return EnvCheck(name, "skip", "it has no oracle", "define oracle(), which returns the right action now")
    for played in episodes.oracle:
        told = "an end" if played.ended else f"no end after {len(played.steps)} turns"
        full = played.full_reward if played.full_reward is not None else 1.0
        short = played.reward < full - TOLERANCE
        if played.error or short or not played.ended or played.success is False:
            detail = played.error or f"seed {played.seed}: {played.reward:g} of {full:g}, {told}"
            advice = (
                "either the task cannot be solved as it is, or the oracle or the reward is wrong; success must be True"
            )
            return EnvCheck(name, "fail", detail, advice)
    turns = sum(len(played.steps) for played in episodes.oracle) / len(episodes.oracle)
    return EnvCheck(name, "pass", f"{len(episodes.oracle)} seeds, {turns:.1f} turns each")


def _rewards_in_range(episodes: _Episodes) -> EnvCheck:
    earned = [played.reward for played in episodes.all]
    full = max((played.full_reward for played in episodes.all if played.full_reward is not None), default=math.inf)
    too_much = [reward for reward in earned if reward > full + TOLERANCE]
    return _answer(
        "no episode earns more than the full reward",
        not too_much,
        f"{min(earned):g} to {max(earned):g}, full is {full:g}",
        "set full_reward on the environment to what a perfect episode earns (1.0 where it is not set)",
    )


def _holds_up_others(env: Any) -> bool:
    """True if the event loop waits for each step, as for one of `roll_flash.Env` that is no coroutine."""
    return isinstance(env, Env) and not inspect.iscoroutinefunction(inspect.unwrap(env.step))


def _is_quick(timeout_s: float, *, holds_up_others: bool) -> Callable[[_Episodes], EnvCheck]:
    def check(episodes: _Episodes) -> EnvCheck:
        steps = [1000 * took_s for played in episodes.all for took_s in played.step_s] or [0.0]
        resets = [1000 * played.reset_s for played in episodes.all]
        p50_ms, p95_ms = np.percentile(steps, (50, 95))
        detail = f"step p50 {p50_ms:.1f} ms, p95 {p95_ms:.1f} ms; reset p50 {np.median(resets):.1f} ms"
        if holds_up_others and p95_ms > MAX_HELD_UP_MS:
            what = f"{detail}; `step` is no `async def`, so that all episodes of a worker wait for each step"
            advice = "make it `async def` and await what takes long, or derive from gymnasium.Env, which may block"
            return EnvCheck("steps in time", "fail", what, advice)
        holds = bool(p95_ms < 1000 * timeout_s / 2)
        return _answer("steps in time", holds, detail, "near the deadline of a step: do less in it, or raise it")

    return check


def _leftovers(before: Snapshot, temporary: Path, run: str) -> list[str]:
    sandboxes = [f"sandbox {entry.name}" for entry in list_sandboxes() if entry.run == run]
    return [*sandboxes, *wait_until_nothing_new(before, temporary)]


def _leaves_nothing(left: Sequence[str]) -> EnvCheck:
    return _answer(
        "leaves nothing behind",
        not left,
        "; ".join(left[:3]) if left else "no sandbox, process, thread or file",
        "give back in close() what reset and step have taken; a thread that hangs in a step stays for ever",
    )
