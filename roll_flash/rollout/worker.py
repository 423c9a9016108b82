"""A worker hosts hundreds of episodes, one asyncio task each, in one process.

`Worker` is the whole behaviour and runs anywhere; `WorkerActor` puts it into a Ray actor. Outcomes are fetched in
batches by one long poll at a time, so no call is made per token or per turn.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll_flash.background import first_failure
from roll_flash.config import SandboxConfig
from roll_flash.inference.engine import ClientSpec, InferenceClient
from roll_flash.monitor.json_lines import plain
from roll_flash.rollout.environment_threads import EnvironmentThreads
from roll_flash.rollout.environments import AsyncEnvironment, EnvironmentMaker
from roll_flash.rollout.episode import Deadlines, Progress, run_episode
from roll_flash.rollout.loop_watch import LoopWatch
from roll_flash.rollout.policy import ChatPolicy, Policy, TokenPolicy
from roll_flash.rollout.sandbox_lease import LazySandbox, default_spec, open_pool
from roll_flash.sandboxes import Sandbox, SandboxPool
from roll_flash.sandboxes.pool_stats import PoolStats
from roll_flash.terminal_logs import make_logs_printable
from roll_flash.types import EpisodeFailure, EpisodeSpec, FailureCause, Trajectory

if TYPE_CHECKING:
    from roll_flash.rollout.agent_episode import AgentEpisodes

logger = logging.getLogger(__name__)

Outcome = Trajectory | EpisodeFailure

GATHER_S = 0.01
"""Outcomes that come so soon after one another travel in one call."""
GC_THRESHOLD = 10_000
"""Python's 700 makes the collector look at all running episodes many times a second."""


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """A compatible endpoint that is not ours. `api_key_env` names the environment variable that holds the key."""

    base_url: str
    model: str
    api_key_env: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All that a worker needs, picklable. `model` is a server of ours or an endpoint that is not."""

    model: ClientSpec | ChatEndpoint
    tokenizer_folder: Path | None
    max_length: int
    deadlines: Deadlines
    sandbox: SandboxConfig | None
    """None for environments that need no sandbox."""
    run: str
    threads: int = 32
    """Blocking environments that may step at the same time."""

    @property
    def pins_groups(self) -> bool:
        """All requests of a group go to one server (`rollout.replicate: false`)."""
        return isinstance(self.model, ClientSpec) and self.model.pin_sessions


@dataclass(frozen=True, slots=True)
class EpisodeStatus:
    """Where a running episode is and for how long it has waited there."""

    episode_id: str
    turn: int
    waits_for: str
    waited_s: float


@dataclass(slots=True, eq=False)
class _Running:
    """An episode and its task."""

    spec: EpisodeSpec
    progress: Progress
    task: asyncio.Task[None] | None = None
    is_over: bool = False
    """It has its outcome, or was cancelled and nobody waits for one."""


class Worker:
    """Must be used from one event loop. `close` cancels what runs and frees every sandbox."""

    def __init__(self, settings: WorkerSettings) -> None:
        make_logs_printable()
        self._settings = settings
        self._episodes: dict[str, _Running] = {}
        self._outcomes: list[Outcome] = []
        self._has_outcomes = asyncio.Event()
        self._threads = EnvironmentThreads(settings.threads)
        self._environments = EnvironmentMaker(self._threads)
        self._pool: SandboxPool | None = None
        self._client: InferenceClient | None = None
        self._chat_client: Any = None
        self._tokenizer: Any = None
        self._agents: AgentEpisodes | None = None

    async def start(self) -> None:
        """Raises SandboxError if sandboxes are needed and cannot be had."""
        if self._settings.sandbox is not None:
            self._spec = default_spec(self._settings.sandbox)
            self._pool = open_pool(self._settings.sandbox, self._settings.run)
            await self._pool.start(self._spec)
        model = self._settings.model
        if isinstance(model, ChatEndpoint):
            from roll_flash.inference.openai_client import OpenAIChatClient, api_key_from

            self._chat_client = OpenAIChatClient(model.base_url, model.model, api_key_from(model.api_key_env))
            return
        from roll_flash.inference.chat import Conversation
        from roll_flash.inference.client import open_client
        from roll_flash.inference.tokenizer import load_tokenizer

        assert self._settings.tokenizer_folder is not None, "a model of ours comes with its tokenizer"
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._settings.tokenizer_folder)
        Conversation(self._tokenizer, [{"role": "user", "content": "."}])  # refuses a chat template that cannot work
        self._client = open_client(model, self._tokenizer)

    def submit(self, episodes: list[EpisodeSpec]) -> None:
        """Start episodes now; how many may run at once is the scheduler's business."""
        for spec in episodes:
            running = _Running(spec, Progress(since=time.monotonic()))
            running.task = asyncio.create_task(self._run(running), name=spec.episode_id)
            self._episodes[spec.episode_id] = running
            running.task.add_done_callback(partial(self._forget, running))  # also when it never began

    def cancel(self, episode_ids: list[str]) -> None:
        """Stop episodes: their request, environment and sandbox go with them. Gives no outcome."""
        for episode_id in episode_ids:
            if (running := self._episodes.get(episode_id)) is not None:
                _cancel(running)

    async def poll(self, timeout_s: float) -> list[Outcome]:
        """What ended since the last call; waits up to `timeout_s` for the first, and returns an empty list after."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_outcomes.wait()
        except TimeoutError:
            return []
        await asyncio.sleep(GATHER_S)
        outcomes, self._outcomes = self._outcomes, []
        self._has_outcomes.clear()
        return outcomes

    def status(self) -> list[EpisodeStatus]:
        now = time.monotonic()
        return [
            EpisodeStatus(episode_id, each.progress.turn, each.progress.waits_for, now - each.progress.since)
            for episode_id, each in self._episodes.items()
        ]

    def client_metrics(self) -> dict[str, float]:
        """What this worker's client of the model servers has counted; nothing where the endpoint is not ours."""
        of_agents = self._agents.metrics() if self._agents is not None else {}
        return {**(self._client.metrics() if self._client is not None else {}), **of_agents}

    def pool_stats(self) -> PoolStats | None:
        """What this worker's sandbox pool has counted; None without one."""
        return self._pool.stats() if self._pool is not None else None

    async def close(self) -> None:
        tasks = [_cancel(running) for running in self._episodes.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        for part in (self._agents, self._client, self._chat_client, self._pool):
            if part is not None:
                await part.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, running: _Running) -> None:
        spec = running.spec
        lease: LazySandbox | None = None

        async def open_env() -> AsyncEnvironment:
            nonlocal lease
            env = await self._environments.open(spec.task)
            if (sandboxed := env.sandbox_env) is not None:
                assert self._pool is not None, "the environment needs a sandbox and settings.sandbox is None"
                lease = LazySandbox(self._pool, lambda: sandboxed.sandbox_spec or self._spec)
                sandboxed.sandbox = cast(Sandbox, lease)
            return env

        try:
            policy, deadlines = self._policy(spec), self._settings.deadlines
            outcome = await run_episode(spec, open_env, policy, deadlines, running.progress, self._play_agent)
            self._end(running, sendable(outcome, spec))
        finally:
            if lease is not None:
                await lease.close()

    def _end(self, running: _Running, outcome: Outcome) -> None:
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
        """At the first environment that plays itself: most runs need no HTTP server."""
        from roll_flash.gateway.endpoint_backend import EndpointBackend
        from roll_flash.gateway.token_backend import TokenBackend
        from roll_flash.rollout.agent_episode import MODEL_NAME, AgentEpisodes

        if self._chat_client is not None:
            return AgentEpisodes(EndpointBackend(self._chat_client))
        assert self._client is not None, "start() was not awaited"
        length = self._settings.max_length
        backend = TokenBackend(self._client, self._tokenizer, model=MODEL_NAME, max_length=length)
        return AgentEpisodes(backend, pins_groups=self._settings.pins_groups)

    def _forget(self, running: _Running, task: asyncio.Task[None]) -> None:
        """However a task ended, its group must not wait for it for ever."""
        spec = running.spec
        if self._episodes.get(spec.episode_id) is running:  # one that failed may have been started again meanwhile
            del self._episodes[spec.episode_id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("after episode %s: %s", spec.episode_id, error, exc_info=error)
        if not running.is_over:
            waits_for, turn = running.progress.waits_for, running.progress.turn
            what = f"{type(error).__name__}: {error}" if error else f"cancelled from within, waiting for {waits_for}"
            self._end(running, _failure(spec, "internal_error", what, turn))

    def _policy(self, spec: EpisodeSpec) -> Policy:
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
        )


def _cancel(running: _Running) -> asyncio.Task[None]:
    assert running.task is not None
    running.is_over = running.progress.is_cancelled = True
    running.task.cancel()
    return running.task


def sendable(outcome: Outcome, spec: EpisodeSpec) -> Outcome:
    """The outcome as the driver can receive it, whatever the environment put into `info`: its values become those of
    JSON, which is how they are written down. One that cannot be sent even so is a failure of its environment."""
    if isinstance(outcome, EpisodeFailure):
        return outcome
    try:
        outcome = replace(outcome, info=_info(outcome.info), messages=tuple(plain(outcome.messages)))
        pickle.dumps(outcome)
        return outcome
    except BaseException as error:  # users' objects may raise anything from their __str__, as SystemExit
        message = f"the episode's info or messages cannot be sent: {type(error).__name__}: {error}"
        return _failure(spec, "env_error", message, len(outcome.turns))


def _failure(spec: EpisodeSpec, cause: FailureCause, message: str, turn: int) -> EpisodeFailure:
    return EpisodeFailure(spec.episode_id, spec.group_id, spec.task, cause, message, turn, spec.attempt)


def _info(info: Mapping[str, Any]) -> dict[str, Any]:
    """A model that nests what an environment repeats there loses that record, and neither the sample nor the run; nor
    what else stands there, such as the right answer, without which a judge gives no score."""
    kept: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in info.items():
        try:
            kept |= plain({name: value})
        except RecursionError as error:
            left_out[str(name)] = str(error)
    return {**kept, "info_left_out": left_out} if left_out else kept


class WorkerActor:
    """`Worker` behind Ray: `ray.remote(WorkerActor)`. Ray runs the coroutines of an actor on one event loop."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._until_closed = ExitStack()

    async def start(self) -> None:
        self._watch = LoopWatch()
        self._failure = self._until_closed.enter_context(first_failure())
        self._worker = Worker(self._settings)
        await self._worker.start()
        # The libraries' half a million objects stay for as long as the process: the collector need not look at them.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)

    async def update(self, submit: list[EpisodeSpec], cancel: list[str]) -> None:
        self._worker.submit(submit)
        self._worker.cancel(cancel)

    async def poll(self, timeout_s: float) -> list[Outcome]:
        """As `Worker.poll`. Raises what went wrong in the background of this process."""
        self._failure.raise_error()
        return await self._worker.poll(timeout_s)

    async def status(self) -> list[EpisodeStatus]:
        return self._worker.status()

    async def client_metrics(self) -> dict[str, float]:
        return self._worker.client_metrics()

    async def pool_stats(self) -> PoolStats | None:
        return self._worker.pool_stats()

    async def stuck_at(self) -> str:
        """What holds the event loop up. Must be called in another concurrency group, which has a loop of its own."""
        return self._watch.place()

    async def close(self) -> None:
        await self._worker.close()
        self._until_closed.close()
        gc.unfreeze()
