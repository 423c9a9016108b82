"""Rollout worker: runs hundreds of episodes, one asyncio task each, in one process.

`Worker` needs no Ray; `WorkerActor` is a Ray actor. The fleet fetches outcomes in batches with one long poll at a time,
so there is no Ray call per token or per turn.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll_flash.chat.rendered_conversation import Thinking
from roll_flash.config.sections.policies import TRAINED
from roll_flash.config.tree import SandboxConfig
from roll_flash.config.user_code import follow_search_path
from roll_flash.engines.inference import ChatEndpoint, ClientSpec, InferenceClient
from roll_flash.envs.hosting.environment_threads import EnvironmentThreads
from roll_flash.envs.hosting.environments import AsyncEnvironment, EnvironmentMaker
from roll_flash.envs.hosting.sandbox_lease import LazySandbox, default_spec, open_pool
from roll_flash.errors import first_line
from roll_flash.monitor.json_lines import plain
from roll_flash.processes.background import first_failure
from roll_flash.processes.garbage import long_lived_process
from roll_flash.processes.terminal_logs import make_logs_printable
from roll_flash.rollout.episodes.conversation import ChatPolicy, Policy, TokenPolicy
from roll_flash.rollout.episodes.episode import Deadlines, Progress, run_episode, with_success
from roll_flash.rollout.turns import DivergedError, EpisodeTurns, SentTurn
from roll_flash.sandboxes import Sandbox, SandboxPool
from roll_flash.sandboxes.pool.stats import PoolStats
from roll_flash.stream.blocks import TokenBlock, hand_in
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, Trajectory
from roll_flash.watchdog.loop_watch import LoopWatch
from roll_flash.watchdog.stacks import register_stacks

if TYPE_CHECKING:
    from roll_flash.gateway.policies import FixedPolicy
    from roll_flash.rollout.episodes.agent_episode import AgentEpisodes

logger = logging.getLogger(__name__)

Outcome = Trajectory | EpisodeFailure

BATCH_WAIT_S = 0.01
"""Seconds that `poll` waits after the first outcome, to return several in one call."""
TURNS_WAIT_S = 0.2
"""Seconds after which `poll` returns a finished turn even if no episode ends."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Picklable settings of a worker. `model`: our own servers or a third-party endpoint; None: servers of ours that
    are still starting, of which `use` tells later."""

    model: ClientSpec | ChatEndpoint | None
    tokenizer_folder: Path | None
    max_length: int
    deadlines: Deadlines
    sandbox: SandboxConfig | None
    """None for environments that need no sandbox."""
    run: str
    success_above: Mapping[str, float] = field(default_factory=dict)
    """Environment id -> reward above which an episode is a success, where the environment does not say."""
    policies: Mapping[str, FixedPolicy] = field(default_factory=dict)
    """Fixed policies that environments ask through the gateway."""
    threads: int = 32
    """Maximum number of blocking environments that step at the same time."""
    thinking: Thinking = "keep"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Working directory, which relative paths of environments refer to; ignored by an actor on a node without it."""
    search_path: tuple[str, ...] = ()  # folders in which the driver looks for modules; ignored as `folder` is

    @property
    def pins_groups(self) -> bool:
        """True if all requests of a group go to one server (`scheduler.replicate: false`)."""
        return isinstance(self.model, ClientSpec) and self.model.pin_sessions


@dataclass(frozen=True, slots=True)
class EpisodeStatus:
    """Current wait of a running episode and its length in seconds."""

    episode_id: str
    turn: int
    waits_for: str
    waited_s: float


@dataclass(slots=True, eq=False)
class _RunningEpisode:
    """An episode and its task."""

    spec: EpisodeSpec
    progress: Progress
    task: asyncio.Task[None] | None = None
    sandbox: LazySandbox | None = None
    is_over: bool = False
    """True if the episode has its outcome, or was cancelled and needs none."""

    @property
    def state(self) -> str:
        """`model` (it waits for it), `sandbox` (a command runs, or waits for a sandbox), `scoring`, `agent` (a loop of
        its own) or `environment`."""
        if self.sandbox is not None and self.sandbox.commands:
            return "sandbox"
        return _STATES.get(self.progress.waits_for, "environment")


_STATES = {"the model": "model", "the environment's score": "scoring", "the agent": "agent"}


class Worker:
    """Runs episodes on one event loop. `close` cancels running episodes and frees every sandbox."""

    def __init__(self, settings: WorkerSettings) -> None:
        make_logs_printable()
        self._settings = settings
        self._episodes: dict[str, _RunningEpisode] = {}
        self._outcomes: list[Outcome] = []
        self._turns: list[SentTurn] = []
        self._has_outcomes = asyncio.Event()
        self._threads = EnvironmentThreads(settings.threads)
        self._environments = EnvironmentMaker(self._threads)
        self._pool: SandboxPool | None = None
        self._client: InferenceClient | None = None
        self._chat_client: Any = None
        self._tokenizer: Any = None
        self._agents: AgentEpisodes | None = None

    async def start(self) -> None:
        """Open the sandbox pool and the model client. Raises SandboxError if no sandbox can be started."""
        if self._settings.sandbox is not None:
            self._spec = default_spec(self._settings.sandbox)
            self._pool = open_pool(self._settings.sandbox, self._settings.run)
            await self._pool.start(self._spec)
        model = self._settings.model
        if isinstance(model, ChatEndpoint):
            from roll_flash.chat.openai_client import OpenAIChatClient

            self._chat_client = OpenAIChatClient.at(model)
            return
        from roll_flash.chat.rendered_conversation import open_conversation
        from roll_flash.chat.tokenizer import load_tokenizer
        from roll_flash.inference.client.token_client import open_client

        settings, folder = self._settings, self._settings.tokenizer_folder
        assert folder is not None, "a model of ours comes with its tokenizer"
        self._tokenizer = await asyncio.to_thread(load_tokenizer, folder, settings.chat_template_kwargs)
        open_conversation(settings.thinking, self._tokenizer, [{"role": "user", "content": "."}])  # raises if unusable
        if model is not None:
            self._client = open_client(model, self._tokenizer)

    async def use(self, model: ClientSpec) -> None:
        """Use these servers from now on; after others, servers of the same model."""
        from roll_flash.inference.client.token_client import open_client

        self._settings = replace(self._settings, model=model)
        if self._client is None:
            self._client = open_client(model, self._tokenizer)
        else:
            await self._client.use(model)

    def submit(self, episodes: list[EpisodeSpec]) -> None:
        """Start episodes now; the scheduler limits the number of running episodes."""
        for spec in episodes:
            running = _RunningEpisode(spec, Progress(since=time.monotonic()))
            running.task = asyncio.create_task(self._run(running), name=spec.episode_id)
            self._episodes[spec.episode_id] = running
            running.task.add_done_callback(partial(self._forget, running))  # also runs if cancelled before its start

    def cancel(self, episode_ids: list[str]) -> None:
        """Cancel episodes with their request, environment and sandbox. They return no outcome."""
        for episode_id in episode_ids:
            if (running := self._episodes.get(episode_id)) is not None:
                _cancel(running)

    async def poll(self, timeout_s: float) -> list[Outcome]:
        """Return the outcomes since the last call; wait up to `timeout_s` for the first, else return []. Returns early
        for `take_turns`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_outcomes.wait()
        except TimeoutError:
            return []
        await asyncio.sleep(BATCH_WAIT_S)
        outcomes, self._outcomes = self._outcomes, []
        self._has_outcomes.clear()
        return outcomes

    def take_turns(self) -> list[SentTurn]:
        """Return the turns that were finished since the last call, of episodes that went on after them."""
        turns, self._turns = self._turns, []
        return turns

    def _send_turn(self, turn: SentTurn) -> None:
        if not self._turns:
            asyncio.get_running_loop().call_later(TURNS_WAIT_S, self._has_outcomes.set)
        self._turns.append(turn)

    def status(self) -> list[EpisodeStatus]:
        now = time.monotonic()
        return [
            EpisodeStatus(episode_id, each.progress.turn, each.progress.waits_for, now - each.progress.since)
            for episode_id, each in self._episodes.items()
        ]

    def states(self) -> Counter[str]:
        """Count the running episodes by state."""
        return Counter(each.state for each in self._episodes.values())

    def client_metrics(self) -> dict[str, float]:
        """Return the metrics of the model-server client and the agent gateway; none for a third-party endpoint."""
        of_agents = self._agents.metrics() if self._agents is not None else {}
        return {**(self._client.metrics() if self._client is not None else {}), **of_agents}

    def pool_stats(self) -> PoolStats | None:
        """Return the statistics of the sandbox pool; None without a pool."""
        return self._pool.stats() if self._pool is not None else None

    async def close(self) -> None:
        tasks = [_cancel(running) for running in self._episodes.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        for part in (self._agents, self._client, self._chat_client, self._pool):
            if part is not None:
                await part.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, running: _RunningEpisode) -> None:
        try:
            await self._play(running, running.spec)
        except DivergedError as error:
            logger.warning("episode %s begins again: %s", running.spec.episode_id, error)
            await self._play(running, replace(running.spec, played=()))

    async def _play(self, running: _RunningEpisode, spec: EpisodeSpec) -> None:
        async def open_env() -> AsyncEnvironment:
            env = await self._environments.open(spec.task)
            if (sandboxed := env.sandbox_env) is not None:
                assert self._pool is not None, "the environment needs a sandbox and settings.sandbox is None"
                running.sandbox = LazySandbox(self._pool, lambda: sandboxed.sandbox_spec or self._spec)
                sandboxed.sandbox = cast(Sandbox, running.sandbox)
            return env

        try:
            turns = EpisodeTurns(spec, self._send_turn)
            policy, deadlines = self._policy(spec, turns), self._settings.deadlines
            outcome = await run_episode(spec, open_env, policy, deadlines, running.progress, self._play_agent, turns)
            if (sandbox := running.sandbox) is not None and sandbox.recorded and isinstance(outcome, Trajectory):
                outcome = replace(outcome, info={**outcome.info, "sandbox_commands": sandbox.recorded})
            outcome = picklable_outcome(outcome, spec)
            self._end(running, with_success(outcome, self._settings.success_above.get(spec.task.env_id)))
        finally:
            if running.sandbox is not None:
                await running.sandbox.close()
                running.sandbox = None

    def _end(self, running: _RunningEpisode, outcome: Outcome) -> None:
        running.is_over = True
        self._outcomes.append(outcome)
        self._has_outcomes.set()

    async def _play_agent(
        self, spec: EpisodeSpec, env: AsyncEnvironment, deadlines: Deadlines, progress: Progress
    ) -> Trajectory:
        if self._agents is None:
            self._agents = self._open_agents()
        return await self._agents.play(spec, env, deadlines, progress)

    def _open_agents(self) -> AgentEpisodes:
        """Create the gateway at the first environment that plays itself: most runs need no HTTP server."""
        from roll_flash.gateway.endpoint_backend import EndpointBackend
        from roll_flash.gateway.policies import PolicySessions
        from roll_flash.gateway.token_backend import TokenBackend
        from roll_flash.rollout.episodes.agent_episode import AgentEpisodes

        settings, policies = self._settings, PolicySessions(self._settings.policies)
        if self._chat_client is not None:
            return AgentEpisodes(EndpointBackend(self._chat_client), policies)
        assert self._client is not None, "start() was not awaited"
        length, thinking = settings.max_length, settings.thinking
        backend = TokenBackend(self._client, self._tokenizer, model=TRAINED, max_length=length, thinking=thinking)
        return AgentEpisodes(backend, policies, pins_groups=settings.pins_groups)

    def _forget(self, running: _RunningEpisode, task: asyncio.Task[None]) -> None:
        """Remove an ended episode, and report a failure if it has no outcome: its group must not wait forever."""
        spec = running.spec
        if self._episodes.get(spec.episode_id) is running:  # else a retry already runs under the same id
            del self._episodes[spec.episode_id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("after episode %s: %s", spec.episode_id, error, exc_info=error)
        if not running.is_over:
            waits_for, turn = running.progress.waits_for, running.progress.turn
            what = f"{type(error).__name__}: {error}" if error else f"cancelled from within, waiting for {waits_for}"
            self._end(running, spec.failed("internal_error", what, turn))

    def _policy(self, spec: EpisodeSpec, turns: EpisodeTurns) -> Policy:
        if self._chat_client is not None:
            return ChatPolicy(self._chat_client, spec.sampling)
        assert self._client is not None, "start() was not awaited"
        return TokenPolicy(
            self._client,
            self._tokenizer,
            spec.sampling,
            episode_id=spec.episode_id,
            max_length=self._settings.max_length,
            session=spec.group_id if self._settings.pins_groups else None,
            thinking=self._settings.thinking,
            turns=turns,
        )


def _cancel(running: _RunningEpisode) -> asyncio.Task[None]:
    assert running.task is not None
    running.is_over = running.progress.is_cancelled = True
    running.task.cancel()
    return running.task


def picklable_outcome(outcome: Outcome, spec: EpisodeSpec) -> Outcome:
    """Make `outcome` picklable: convert `info` and `messages` to JSON values, as in the log. If the outcome still
    cannot be pickled, return a failure of the environment."""
    if isinstance(outcome, EpisodeFailure):
        return outcome
    try:
        outcome = replace(outcome, info=_info(outcome.info), messages=tuple(plain(outcome.messages)))
        pickle.dumps(outcome)
        return outcome
    except BaseException as error:  # __str__ of users' objects may raise anything, also SystemExit
        message = f"the episode's info or messages cannot be sent: {type(error).__name__}: {error}"
        return spec.failed("env_error", message, len(outcome.turns))


def _info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `info` to JSON values. A value that cannot be converted (nested too deep, without a text) is replaced by
    its error in `info_left_out`; the episode, the run and the other values survive, such as the right answer that a
    judge needs."""
    kept: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in info.items():
        try:
            kept |= plain({name: value})
        except Exception as error:  # what a user's type raises when it is made text
            left_out[_name(name)] = first_line(error)
    return {**kept, "info_left_out": left_out} if left_out else kept


def _name(key: Any) -> str:
    return key if isinstance(key, str) else f"a {type(key).__name__}"


class WorkerActor(Worker):
    """`Worker` as a Ray actor: `ray.remote(WorkerActor)`. Ray runs all methods of an actor with coroutines on one event
    loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._until_closed = ExitStack()

    async def open(self, name: str = "rollout worker") -> None:
        """Start. `name`: of the worker in messages and in the files of stacks."""
        self._name = name
        register_stacks(self._settings.run.rpartition("-")[0], name)
        if self._settings.folder is not None and self._settings.folder.is_dir():
            os.chdir(self._settings.folder)
            follow_search_path(self._settings.search_path)
        importlib.invalidate_caches()  # modules may have been sent here after this process began
        self._watch = LoopWatch()
        self._failure = self._until_closed.enter_context(first_failure())
        await self.start()
        self._until_closed.enter_context(long_lived_process())

    async def unreachable_servers(self) -> list[str]:
        """Return the servers that cannot be reached from this node."""
        from roll_flash.inference.client.token_client import unreachable

        model = self._settings.model
        return await unreachable(model) if isinstance(model, ClientSpec) else []

    def update(self, submit: list[EpisodeSpec], cancel: list[str]) -> None:
        self.submit(submit)
        self.cancel(cancel)

    async def collect(
        self, timeout_s: float
    ) -> tuple[tuple[list[FinishedEpisode | EpisodeFailure], list[SentTurn]], TokenBlock, list[bytes], list[bytes]]:
        """Return the outcomes of `poll` as the four objects of `hand_in`; with the first come finished turns.
        Raises the first error of this process's background tasks."""
        self._failure.raise_error()
        outcomes = await self.poll(timeout_s)
        turns = self.take_turns()
        ended, tokens, texts, lines = await asyncio.to_thread(hand_in, outcomes, self._name)
        return (ended, turns), tokens, texts, lines

    async def stuck_at(self) -> str:
        """Return the code that blocks the event loop. Call it in another concurrency group: that has its own loop."""
        return self._watch.place()

    async def close(self) -> None:
        await super().close()
        self._until_closed.close()
