"""The parts of a run, started side by side and stopped in order, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_flash.background import all_or_first_error
from roll_flash.checkpoint_writer import CheckpointWriter
from roll_flash.config import Config
from roll_flash.errors import CheckpointError
from roll_flash.evaluate.in_training import EvaluationsBesideTraining, evaluate_version
from roll_flash.evaluate.result import EvalResult
from roll_flash.evaluate.same_tasks import TrainedTasks
from roll_flash.inference.engine import ClientSpec, InferenceEngine
from roll_flash.inference.open import open_engine
from roll_flash.learner.engine import LearnerEngine
from roll_flash.learner.open import open_learner
from roll_flash.local_ray import local_ray
from roll_flash.models import resolve_model
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.monitor.progress import Progress
from roll_flash.parity import load_probe, parity_threshold
from roll_flash.publication import Publisher
from roll_flash.ray_watch import watching_ray
from roll_flash.rollout.environments import check_environments
from roll_flash.rollout.episode import Deadlines
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.mixed_tasks import open_tasks
from roll_flash.rollout.rollout import EpisodeLog, Rollout
from roll_flash.rollout.worker import ChatEndpoint, WorkerSettings
from roll_flash.run_dir import Checkpoint, RunDir, link_folder
from roll_flash.stages.running import RunningStages, open_stages, stage_consumers
from roll_flash.stream import MemoryStore, TrajectoryStream, learner_consumer, load_stream
from roll_flash.stream.ray_store import RayStore
from roll_flash.warm_start import warm_start


@dataclass(frozen=True, slots=True)
class System:
    """Everything a training run is made of, started."""

    config: Config
    run_dir: RunDir
    engine: InferenceEngine
    learner: LearnerEngine
    fleet: WorkerFleet
    publisher: Publisher
    rollout: Rollout
    stream: TrajectoryStream
    metrics: MetricsLog
    checkpoints: CheckpointWriter
    stages: RunningStages
    trained_tasks: TrainedTasks

    async def evaluate(self) -> EvalResult:
        """The held-out tasks of each environment with the weights of the newest version, which the servers must have.

        Returns the result of `env`; those of `extra_envs` are in the metrics and in folders beside its own.
        """
        concurrent = self.config.eval.max_concurrent or self.config.rollout.max_concurrent
        version = self.learner.version
        result, metrics = await evaluate_version(
            self.fleet,
            self.config,
            self.run_dir.eval,
            version,
            max_concurrent=concurrent,
            trained=self.trained_tasks.hashes,
        )
        self.metrics.log(version, metrics)
        return result

    def evaluations(self, note: Callable[[str], None]) -> EvaluationsBesideTraining:
        """Those of `eval.every`."""
        return EvaluationsBesideTraining(
            self.fleet,
            self.config,
            self.run_dir.eval,
            log=self.metrics.log,
            note=note,
            trained=self.trained_tasks.hashes,
        )

    async def usage_metrics(self) -> dict[str, float]:
        """What the workers counted of requests (`inference/*`) and sandboxes (`sandbox/*`), and what the servers say of
        themselves (`inference/server_*`), and what the stages did (`stages/*`)."""
        clients, servers, sandboxes = await asyncio.gather(
            self.fleet.client_metrics(), self.engine.metrics(), self.fleet.sandbox_metrics()
        )
        return {
            **{f"inference/{name}": value for name, value in clients.items()},
            **{f"inference/server_{name}": value for name, value in servers.items()},
            **{f"sandbox/{name}": value for name, value in sandboxes.items()},
            **self.stages.metrics(),
        }

    async def export_model(self) -> None:
        """The model folder of the finished run: that of its last checkpoint, whose files it shares. Replaces that of an
        earlier end."""
        checkpoint = self.run_dir.latest_checkpoint()
        if checkpoint is None or checkpoint.step != self.learner.version:
            raise CheckpointError(f"{self.run_dir.folder}: there is no checkpoint of the last step to export")
        await asyncio.to_thread(link_folder, checkpoint.hf, self.run_dir.model)


@asynccontextmanager
async def open_system(config: Config, run_dir: RunDir, *, resume: bool, progress: Progress) -> AsyncIterator[System]:
    """Start learner, servers and workers; with `resume` continue from the newest checkpoint, or begin again."""
    checkpoint = run_dir.latest_checkpoint() if resume else None
    resume_at = (checkpoint.step if checkpoint else -1) if resume else None
    if resume_at is not None:
        run_dir.rewind(resume_at)
    model_folder = resolve_model(config.model.path)
    async with AsyncExitStack() as stack:
        progress.note(
            f"run folder {run_dir.folder}; starting the learner, {config.inference.servers} inference server(s) "
            f"and {config.rollout.workers} rollout worker(s) ({config.usual_start}; logs in {run_dir.logs})"
        )
        if resume and checkpoint is None:
            progress.note("there is no complete checkpoint to resume from yet: the run begins again from its start")
        if warning := config.learner.loss.off_policy_warning(config.highest_async_ratio):
            progress.note(f"warning: {warning}")
        needs_sandbox = await asyncio.to_thread(check_environments, config.envs, config.rollout)
        await stack.enter_async_context(local_ray(config.ray))
        await stack.enter_async_context(watching_ray())
        engine = open_engine(
            config.inference, model_folder=model_folder, max_model_len=config.model.max_length, logs=run_dir.logs
        )
        stack.push_async_callback(engine.close)
        learner = open_learner(config, model_folder=model_folder)
        stack.push_async_callback(learner.close)
        await all_or_first_error(engine.start(), learner.start())
        fleet = open_fleet(config, worker_settings(config, engine.client_spec(), model_folder, needs_sandbox))
        stack.push_async_callback(fleet.close)
        await fleet.start()
        if checkpoint:
            await learner.load(checkpoint.state)
        metrics = MetricsLog(run_dir.folder, config.monitor.tensorboard, resume_at=resume_at)
        stack.callback(metrics.close)
        episodes = stack.enter_context(run_dir.episodes_writer())
        rollout = _open_rollout(config, fleet, episodes, learner.version, checkpoint)
        stream = await stack.enter_async_context(await open_stream(config))
        if checkpoint:
            await load_stream(stream, checkpoint.folder)
        stages = await stack.enter_async_context(open_stages(config.stages, stream, run_dir.logs / "stages.jsonl"))
        publisher = Publisher(
            learner,
            engine,
            config.weights,
            probe=await asyncio.to_thread(
                load_probe, model_folder, config.weights.parity_text, config.model.max_length
            ),
            threshold=parity_threshold(config.weights, engine.dtype),
            on_published=rollout.published,
        )
        stack.push_async_callback(publisher.close)
        checkpoints = _open_checkpoints(config, run_dir, learner, stream, rollout, model_folder)
        stack.push_async_callback(checkpoints.close)
        if checkpoint:
            await publisher.begin()
            await publisher.settled()
        else:
            await publisher.check()
            await _warm_start(config, learner, publisher, metrics, progress, model_folder)
        trained = stack.enter_context(closing(TrainedTasks(run_dir.logs)))
        yield System(
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
            stages,
            trained,
        )


@asynccontextmanager
async def open_rollout(
    config: Config, model_folder: Path | None, *, endpoint: ChatEndpoint | None = None, logs: Path
) -> AsyncIterator[WorkerFleet]:
    """Servers and workers without a learner, for evaluation; with `endpoint` workers alone."""
    async with AsyncExitStack() as stack:
        needs_sandbox = await asyncio.to_thread(check_environments, config.envs, config.rollout)
        await stack.enter_async_context(local_ray(config.ray))
        model: Any = endpoint
        if model is None:
            assert model_folder is not None, "either a model folder or an endpoint"
            engine = open_engine(
                config.inference, model_folder=model_folder, max_model_len=config.model.max_length, logs=logs
            )
            stack.push_async_callback(engine.close)
            await engine.start()
            model = engine.client_spec()
        fleet = open_fleet(config, worker_settings(config, model, model_folder, needs_sandbox))
        stack.push_async_callback(fleet.close)
        await fleet.start()
        yield fleet


async def open_stream(config: Config) -> TrajectoryStream:
    """Between rollout and learner. Its micro-batches hold one row of the learner's for each rank."""
    settings, tokens = config.stream, config.learner.micro_batch_tokens * config.learner.ranks
    return TrajectoryStream(
        [learner_consumer(tokens, fair=config.rollout.fair), *stage_consumers(config.stages)],
        await RayStore.start(settings.shards) if settings.shards else MemoryStore(),
        capacity_rows=settings.capacity_rows,
        capacity_bytes=settings.capacity_mb << 20,
        smallest_group=2,
    )


def open_fleet(config: Config, settings: WorkerSettings) -> WorkerFleet:
    """The workers of a run, not yet started."""
    rollout = config.rollout
    return WorkerFleet(
        settings,
        rollout.workers,
        placement=rollout.placement,
        resources=rollout.worker_resources,
        heartbeat_timeout_s=rollout.heartbeat_timeout_s,
    )


def worker_settings(config: Config, model: Any, model_folder: Path | None, needs_sandbox: bool) -> WorkerSettings:
    rollout = config.rollout
    if isinstance(model, ClientSpec):
        model = replace(model, clients=rollout.workers, pin_sessions=not rollout.replicate)
    return WorkerSettings(
        model=model,
        tokenizer_folder=model_folder,
        max_length=config.model.max_length,
        deadlines=Deadlines(rollout.generate_timeout_s, rollout.step_timeout_s, rollout.episode_timeout_s),
        sandbox=config.sandbox if needs_sandbox else None,
        run=f"{config.name}-{os.getpid()}",
        threads=rollout.worker_threads,
    )


def _open_checkpoints(
    config: Config,
    run_dir: RunDir,
    learner: LearnerEngine,
    stream: TrajectoryStream,
    rollout: Rollout,
    model_folder: Path,
) -> CheckpointWriter:
    return CheckpointWriter(
        run_dir,
        learner,
        stream,
        rollout_state=rollout.state,
        keep=config.checkpoint.keep,
        model_bytes=sum(path.stat().st_size for path in model_folder.glob("*.safetensors")),
        timeout_s=config.learner.step_timeout_s,
    )


async def _warm_start(
    config: Config,
    learner: LearnerEngine,
    publisher: Publisher,
    metrics: MetricsLog,
    progress: Progress,
    model_folder: Path,
) -> None:
    if config.warm_start is None:
        return
    figures = await warm_start(
        learner,
        config.warm_start,
        model_folder=model_folder,
        max_length=config.model.max_length,
        seed=config.seed,
        report=progress.status,
    )
    metrics.log(learner.version, figures)
    await publisher.begin()
    await publisher.settled()


def _open_rollout(
    config: Config, fleet: WorkerFleet, episodes: EpisodeLog, version: int, checkpoint: Checkpoint | None
) -> Rollout:
    tasks = open_tasks(config)
    if checkpoint is None:
        return Rollout(config, fleet, tasks, episodes, version=version)
    try:
        restored = json.loads(checkpoint.trainer.read_text())
        return Rollout(config, fleet, tasks, episodes, version=version, restored=restored)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.trainer}: not readable as a trainer state: {error}") from None
