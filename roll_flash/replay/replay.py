"""`roll-flash replay`: bring a fresh environment to a turn of a recorded episode, and go on from there.

The recorded actions are played again in this process, without a model, and each answer is compared with the recorded
one. From there models go on as in an evaluation, in forks that play the same turns first (`Task.prefix`), or the user
does by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from roll_flash.checked_files import as_a_run_writes, decode
from roll_flash.config.tree import Config, EnvConfig, load_config
from roll_flash.envs.hosting.environments import AsyncEnvironment, EnvironmentMaker, Step
from roll_flash.envs.hosting.sandbox_lease import LazySandbox, default_spec, open_pool
from roll_flash.errors import ConfigError, RunError
from roll_flash.evaluation.evaluation import EpisodeRunner
from roll_flash.evaluator import EvalPlan, EvalRequest, plan_evaluation, run_with_model
from roll_flash.monitor.episode_files.steps import step_file
from roll_flash.monitor.episodes import EpisodesWriter, episode_record, read_episodes
from roll_flash.processes.background import DaemonThreads
from roll_flash.replay.by_hand import Lines, play_turns, use_shell
from roll_flash.replay.recorded import REPLAYS, find_episode
from roll_flash.replay.transcript import ending, show_action, show_answer, show_opening, show_turns
from roll_flash.rollout.episodes.episode import EpisodeFailed, environment_errors
from roll_flash.rollout.episodes.prefix import Prefix, PrefixError, excerpt
from roll_flash.rollout.rollout import training_sampling
from roll_flash.run.origin import require_own
from roll_flash.run.run_dir import find_run, require_no_links, require_owned_by_user
from roll_flash.sandboxes import Sandbox, SandboxError
from roll_flash.system.start_checks import check_sandboxes, require_isolation
from roll_flash.terminal import say
from roll_flash.types import EpisodeSpec, Task, Trajectory


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Arguments of `roll-flash replay`; None if the user did not set one."""

    run: str
    episode: str
    at_turn: int | None = None
    fork: int | None = None
    model: str | None = None
    endpoint: str | None = None
    api_key_env: str | None = None
    interactive: bool = False
    out: str | None = None
    allow_weak: bool = False
    trust: bool = False


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a request means for a recorded episode."""

    record: Mapping[str, Any]
    turn: int
    """Number of turns that are played again, and index of the first new one."""
    config: Config
    env: EnvConfig
    interactive: bool
    forks: int
    model: EvalPlan | None
    """The model of the forks; None without forks. Its folder is that of the forks."""

    @property
    def episode_id(self) -> str:
        return str(self.record["episode_id"])

    @property
    def task(self) -> Task:
        record = self.record
        return Task(record["task_id"], record["env_id"], record["seed"], record["env_kwargs"], self.max_turns)

    @property
    def max_turns(self) -> int:
        """Maximum turns of the config; a task may have had a limit of its own, which the log does not tell."""
        return max(self.env.max_turns, len(self.record["turns"]))

    def require_columns(self) -> None:
        """Raises one of CONTENT_ERRORS for a record that lacks what is shown and played of it, or has other types."""
        ending(self.record)
        decode(self.prefix.encode().encode(), Prefix)  # compares types
        if not isinstance(self.task.kwargs, dict) or not isinstance(self.task.seed, int):
            raise TypeError("its task is none")

    @property
    def prefix(self) -> Prefix:
        return Prefix.of_record(self.record, self.turn) if self.turn else Prefix()


async def run_replay(request: ReplayRequest) -> bool:
    """Do what the request says; return True unless each fork failed. Raises RollFlashError; RunError if the environment
    does not show what was recorded."""
    plan = plan_replay(request)
    say(ending(plan.record))
    try:
        await _play_here(plan)
    except (EpisodeFailed, PrefixError, SandboxError) as error:
        raise RunError(f"{plan.episode_id}: {error}") from error
    if plan.model is None:
        return True
    work = partial(_play_forks, plan)
    return await run_with_model(plan.model, work, api_key_env=request.api_key_env)


def plan_replay(request: ReplayRequest) -> ReplayPlan:
    """Resolve what the request leaves open. Raises ConfigError; starts and writes nothing."""
    run = find_run(request.run)
    require_own(run, trusted=request.trust)
    record = find_episode(run, request.episode)
    config = load_config(run / "config.yaml", ["sandbox.allow_weak=true"] if request.allow_weak else [])
    with as_a_run_writes(run):
        env = _env_of(config, record)
        turn, forks = _turn(request, record), _forks(request)
        known = ReplayPlan(record, turn, config, env, request.interactive, forks, None)
        known.require_columns()
    if forks and turn >= max(1, len(record["turns"])):
        raise ConfigError(f"{request.episode}: has no turn {turn} to go on from; {_turns_to_choose(record)}")
    return replace(known, model=_model(request, run, env, turn)) if forks else known


def _turn(request: ReplayRequest, record: Mapping[str, Any]) -> int:
    turns = len(record["turns"])
    if request.at_turn is None and record["kind"] == "failure":
        raise ConfigError(f"{ending(record)}; a failure has no turns in the log: --at-turn 0 begins its task again")
    if request.at_turn is None:
        return turns
    if not 0 <= request.at_turn <= turns:
        raise ConfigError(f"--at-turn {request.at_turn}: {_turns_to_choose(record)}")
    return request.at_turn


def _turns_to_choose(record: Mapping[str, Any]) -> str:
    turns = len(record["turns"])
    return f"{record['episode_id']} has {turns} turns: --at-turn 0 to {turns - 1} goes on, {turns} plays all again"


def _forks(request: ReplayRequest) -> int:
    goes_on = [
        name
        for name, value in (("--fork", request.fork), ("--model", request.model), ("--endpoint", request.endpoint))
        if value is not None
    ]
    if request.interactive and goes_on:
        raise ConfigError(f"--interactive goes on by hand; leave out {goes_on[0]}")
    if goes_on and request.at_turn is None:
        raise ConfigError(f"{goes_on[0]} needs --at-turn N: the first turn that is played anew")
    if request.fork is not None and request.fork < 0:
        raise ConfigError(f"--fork {request.fork}: a number from 0 on")
    if request.interactive or request.at_turn is None:
        return 0
    return 1 if request.fork is None else request.fork


def _env_of(config: Config, record: Mapping[str, Any]) -> EnvConfig:
    """Return the entry of the config that an episode belongs to: of those with its id, the first with its kwargs."""
    same_id = [env for env in config.envs if env.id == record["env_id"]]
    fits = [env for env in same_id if env.kwargs.items() <= record["env_kwargs"].items()]
    return (fits or same_id or list(config.envs))[0]


def _model(request: ReplayRequest, run: Path, env: EnvConfig, turn: int) -> EvalPlan:
    plan = plan_evaluation(
        EvalRequest(
            config=str(run / "config.yaml"),
            env=env.id,
            model=request.model or (None if request.endpoint else str(run)),
            endpoint=request.endpoint,
            api_key_env=request.api_key_env,
            allow_weak=request.allow_weak,
        )
    )
    name = re.sub(r"[^\w.@-]", "_", f"{request.episode}-t{turn}")
    folder = Path(request.out).expanduser() if request.out else run / REPLAYS / name
    require_owned_by_user(folder)
    require_no_links(folder)
    return replace(plan, folder=folder)


async def _play_here(plan: ReplayPlan) -> None:
    """Play the recorded turns, then go on by hand if the user wants to."""
    step_s = plan.config.rollout.step_timeout_s
    async with _open_environment(plan.task, plan.config) as (env, sandbox):
        if env.runs_own_loop and not plan.turn and not plan.interactive:
            return  # its prompt is its agent's
        last = await _bring(env, plan)
        is_over = last is not None and (last.terminated or last.truncated)
        say(f"{plan.turn} of {len(plan.record['turns'])} turns played again, as recorded")
        if not plan.interactive:
            return
        lines = Lines()
        if sandbox is not None:
            await use_shell(sandbox, lines, step_s)
        elif is_over:
            raise ConfigError(f"the episode has ended here; {_turns_to_choose(plan.record)}")
        else:
            is_over = await play_turns(env, lines, plan.turn, plan.max_turns, step_s)
        if not is_over:
            async with environment_errors(step_s, "conclude"):
                reward, info = await env.conclude()
            success = info.get("success")
            said = "" if success is None else ", success" if success else ", no success"
            say(f"final score of what is there now: {reward:g}{said}")


async def _bring(env: AsyncEnvironment, plan: ReplayPlan) -> Step | None:
    """Show and compare each recorded turn; return the last answer. Raises PrefixError, EpisodeFailed."""
    rollout, prefix = plan.config.rollout, plan.prefix
    env.allow(rollout.step_timeout_s, rollout.episode_timeout_s)
    prefix.require_repeatable(env)
    async with environment_errors(rollout.step_timeout_s, "reset"):
        messages, _ = await env.reset(plan.task.seed)
    prefix.check_opening(messages)
    show_opening(messages)
    step = None
    for number, turn in enumerate(prefix.turns):
        show_action(number, turn.action)
        async with environment_errors(rollout.step_timeout_s, f"turn {number}"):
            step = await env.step(turn.action)
        show_answer(number, step.text, step.reward)
        try:
            prefix.check_answer(number, step)
        except PrefixError as error:
            recorded = plan.record["turns"][number]["observation"]
            note = "" if step.text == recorded else f" (recorded: {excerpt(recorded)})"
            raise PrefixError(f"{error}{note}") from None
    return step


@asynccontextmanager
async def _open_environment(task: Task, config: Config) -> AsyncIterator[tuple[AsyncEnvironment, Sandbox | None]]:
    """Make the environment of a task, and its sandbox if it has one. Both are closed in the end."""
    step_s = config.rollout.step_timeout_s
    async with AsyncExitStack() as stack:
        async with environment_errors(step_s, "make"):
            env = await EnvironmentMaker(DaemonThreads()).open(task)
        lease: LazySandbox | None = None
        if (sandboxed := env.sandbox_env) is not None:
            default = default_spec(config.sandbox)
            require_isolation(config, await check_sandboxes(config, [sandboxed.sandbox_spec or default]))
            settings = config.sandbox.model_copy(update={"pool_size": 0})
            pool = await stack.enter_async_context(open_pool(settings, f"{config.name}-{os.getpid()}"))
            lease = LazySandbox(pool, lambda: sandboxed.sandbox_spec or default)
            stack.push_async_callback(lease.close)
            sandboxed.sandbox = cast(Sandbox, lease)
        try:
            yield env, lease
        finally:
            async with environment_errors(step_s, "close"):
                await env.close()


async def _play_forks(plan: ReplayPlan, runner: EpisodeRunner) -> bool:
    assert plan.model is not None, "forks have a model"
    config, folder, step = plan.model.config, plan.model.folder, int(plan.record.get("step") or 0)
    task = replace(plan.task, prefix=plan.prefix.encode() if plan.turn else "")
    group = f"{plan.episode_id}-t{plan.turn}"
    first = _next_fork(step_file(folder, step))
    specs = [
        EpisodeSpec(f"{group}-f{number}", group, number, task, training_sampling(config), plan.max_turns)
        for number in range(first, first + plan.forks)
    ]
    succeeded = False
    with EpisodesWriter(folder) as writer:
        async with aclosing(runner.run(specs, max_concurrent=config.rollout.max_concurrent)) as outcomes:
            async for outcome in outcomes:
                writer.write(step, outcome)
                record = episode_record(outcome)
                say(ending(record))
                show_turns(record, plan.turn)
                succeeded = succeeded or isinstance(outcome, Trajectory)
    say(f"{plan.forks} forks are in {step_file(folder, step)}")
    return succeeded


def _next_fork(file: Path) -> int:
    """Number after those of the forks in a log: an id never comes twice."""
    records = read_episodes(file) if file.exists() else []
    return 1 + max((int(record["episode_id"].rpartition("-f")[2]) for record in records), default=-1)
