"""A training run in one process, without Ray: seconds instead of a minute, for runs by the dozen.

All that decides or computes is real: the steps of `Trainer`, rollout and scheduler, stream, worker with its sandboxes,
learner and rank, publication with its parity probe, the engine `transformers` behind HTTP, and the files. Only the
processes between them are missing: actor handles are calls, and the fleet is one worker.
"""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from roll_flash.config.tree import Config
from roll_flash.engines.inference import ClientSpec, ServerUpdate, StagedWeights
from roll_flash.envs.task_sources import open_tasks
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.monitor.progress import Progress
from roll_flash.processes.background import background_task, first_failure
from roll_flash.processes.keys import bearer, new_key
from roll_flash.rollout.rollout import Rollout
from roll_flash.rollout.turns import TurnBook
from roll_flash.rollout.worker import Worker
from roll_flash.run.checkpoints.writer import CheckpointWriter
from roll_flash.run.episode_space import EpisodeSpace
from roll_flash.run.run_dir import RunDir
from roll_flash.run.trained_tasks import TrainedTasks
from roll_flash.stages.running import open_stages, stage_consumers
from roll_flash.stream import TrajectoryStream
from roll_flash.stream.episodes import finished_episode
from roll_flash.system.system import System, worker_settings
from roll_flash.trainer import Trainer
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode
from roll_flash.weight_sync.parity import load_probe, parity_threshold
from roll_flash.weight_sync.publication import Publisher
from tests.learner.in_process import in_process

Receive = Callable[[FinishedEpisode | EpisodeFailure], None]


class OneServer:
    """The server of the engine `transformers`, with its real routes, on the event loop of this process."""

    dtype = "float32"

    def __init__(self, folder: Path, max_model_len: int) -> None:
        from roll_flash.inference.transformers import server

        self._key = new_key()
        self._server = server.Server(server.TransformersModel(str(folder)), max_model_len, self._key)
        self._max_model_len = max_model_len
        self._url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        runner = web.AppRunner(self._server.application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(self._url, headers=bearer(self._key)) as self._http:
            yield
        await runner.cleanup()

    def client_spec(self) -> ClientSpec:
        return ClientSpec("transformers", (self._url,), "tiny", self._max_model_len, key=self._key)

    async def publish(self, weights: StagedWeights, *, in_flight: str = "keep") -> list[ServerUpdate]:
        started = time.monotonic()
        await self._post("/pause", {"mode": "keep"})
        await self._post("/update_weights", {}, {"update_info": {"path": weights.path, "tag": weights.tag}})
        await self._post("/finish_weight_update", {}, {"weight_version": weights.version})
        await self._post("/reset_prefix_cache")
        await self._post("/resume")
        seconds = time.monotonic() - started
        return [ServerUpdate(self._url, weights.version, seconds, seconds)]

    async def score(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        positions = (await self._post("/inference/v1/generate", {}, body))["prompt_logprobs"][1:]
        scores = [each[str(token)]["logprob"] for each, token in zip(positions, token_ids[1:], strict=True)]
        return [np.asarray(scores, np.float32)]

    async def metrics(self) -> dict[str, float]:
        return {}

    async def _post(self, path: str, params: dict[str, str] | None = None, body: Any = None) -> Any:
        async with self._http.post(path, params=params, json=body) as answer:
            answer.raise_for_status()
            return await answer.json()


class OneWorker:
    """A fleet of one worker, on the event loop of this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._receive: dict[str, Receive] = {}
        self.turns = TurnBook()

    async def submit(self, episodes: Sequence[EpisodeSpec], receive: Receive) -> None:
        self._receive |= {episode.episode_id: receive for episode in episodes}
        self._worker.submit(list(episodes))

    async def cancel(self, episode_ids: Iterable[str]) -> None:
        names = list(episode_ids)
        for name in names:
            self._receive.pop(name, None)
        self._worker.cancel(names)

    async def deliver(self) -> None:
        while True:
            for outcome in await self._worker.poll(1.0):
                if (receive := self._receive.pop(outcome.episode_id, None)) is not None:
                    receive(outcome if isinstance(outcome, EpisodeFailure) else finished_episode(outcome))
            self._worker.take_turns()

    async def client_metrics(self) -> dict[str, float]:
        return self._worker.client_metrics()

    async def sandbox_metrics(self) -> dict[str, float]:
        stats = self._worker.pool_stats()
        return stats.as_metrics() if stats is not None else {}


async def _no_warm_start() -> None:
    """None of the planted runs has one."""


def train_in_one_process(
    config: Config, *, uses_sandboxes: bool, learner_temperature: float | None = None, stops_after: int | None = None
) -> str:
    """Train the tiny model in a new run folder; return what the terminal would show. `learner_temperature`: another one
    than servers sample at. `stops_after`: the steps that are made, if not all."""
    temperature = config.rollout.temperature if learner_temperature is None else learner_temperature
    folder, shown = resolve_model(config.model.path), io.StringIO()

    async def use(learner: FsdpLearner) -> None:
        with first_failure():
            async with AsyncExitStack() as stack:
                progress = Progress(config.steps, stream=shown)
                await _train(stack, config, folder, learner, progress, uses_sandboxes, stops_after or config.steps)

    settings = {name: getattr(config.learner, name) for name in type(config.learner).model_fields}
    in_process(folder, use, async_ratio=config.scheduler.highest_async_ratio, temperature=temperature, **settings)
    return shown.getvalue()


async def _train(
    stack: AsyncExitStack,
    config: Config,
    folder: Path,
    learner: FsdpLearner,
    progress: Progress,
    uses_sandboxes: bool,
    steps: int,
) -> None:
    run_dir = RunDir.create(config, resume=False)
    stack.callback(run_dir.close)
    server = OneServer(folder, config.model.max_length)
    await stack.enter_async_context(server.serving())
    worker = Worker(worker_settings(config, server.client_spec(), folder, uses_sandboxes))
    stack.push_async_callback(worker.close)
    await worker.start()
    fleet: Any = OneWorker(worker)
    await stack.enter_async_context(background_task(fleet.deliver(), "the worker"))
    metrics = MetricsLog(run_dir.folder, tensorboard=False)
    stack.callback(metrics.close)
    episodes = stack.enter_context(EpisodesWriter(run_dir.episodes))
    stream = TrajectoryStream(stage_consumers(config.stages))
    rollout = Rollout(config, fleet, open_tasks(config), episodes, stream)
    stages = await stack.enter_async_context(open_stages(config.stages, stream, run_dir.logs / "stages.jsonl"))
    engine: Any = server
    publisher = Publisher(
        learner,
        engine,
        config.weights,
        probe=load_probe(folder, config.weights.parity_text, config.model.max_length),
        threshold=parity_threshold(config.weights, server.dtype),
        on_published=rollout.published,
    )
    stack.push_async_callback(publisher.close)
    checkpoints = CheckpointWriter(
        run_dir,
        learner,
        rollout_state=rollout.state,
        episodes_written=rollout.written,
        config=config.checkpoint,
        checkpoint_bytes=0,
        timeout_s=60,
    )
    await publisher.check()
    trained = TrainedTasks(run_dir.logs)
    stack.callback(trained.close)
    system = System(
        config,
        run_dir,
        engine,
        learner,
        fleet,
        publisher,
        rollout,
        stream,
        metrics,
        checkpoints,
        EpisodeSpace(config, run_dir, rollout.written, progress.note),
        stages,
        trained,
        before_first_step=_no_warm_start,
    )
    trainer = Trainer(system, progress)
    async with rollout:
        while learner.version < steps and await trainer._step():
            pass
        await trainer._settle()
