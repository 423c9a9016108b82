"""Start the components of a run concurrently; stop them in order in any case."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.checked_files import CONTENT_ERRORS
from roll_flash.cluster.nodes import living_nodes, with_gpu_memory
from roll_flash.cluster.plan import Plan, make_plan
from roll_flash.cluster.plan_checks import check_weight_transfer, sandbox_load
from roll_flash.cluster.preparation import NodePreparation
from roll_flash.cluster.reservation import Reservation
from roll_flash.config.tree import Config
from roll_flash.config.user_code import search_path
from roll_flash.engines.inference import ChatEndpoint, ClientSpec, InferenceEngine
from roll_flash.engines.learner import LearnerEngine
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import CheckpointError
from roll_flash.evaluation.in_training import EvaluationsBesideTraining, evaluate_version, recorded_evaluation
from roll_flash.evaluation.result import EvalResult
from roll_flash.gateway.policies import check_policies, fixed_policies
from roll_flash.inference.open import open_engine, why_no_replay
from roll_flash.learner.warm_start import warm_start
from roll_flash.models.context_length import within_context
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.monitor.exporters.export import Exports
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.monitor.progress import Progress
from roll_flash.planner.machines.fit import Fit, fit_here, parts_on
from roll_flash.processes.background import (
    FirstFailure,
    background_task,
    call_in_thread,
    cancel_and_wait,
    cancel_on_failure,
    gather_or_cancel,
    start_background,
)
from roll_flash.processes.ray.local_ray import local_ray, own_gpus, unused_gpus
from roll_flash.processes.ray.watch import ANSWER_TIMEOUT_S, watching_ray
from roll_flash.processes.supervise import sweep_semaphores
from roll_flash.rollout.episodes.episode import Deadlines
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.rollout import Rollout
from roll_flash.rollout.turn_file import TurnFile, read_turns
from roll_flash.rollout.worker import WorkerSettings
from roll_flash.run.checkpoints.disk_use import check_disk, checkpoint_bytes
from roll_flash.run.checkpoints.store import CheckpointCopies, store_of
from roll_flash.run.checkpoints.writer import CheckpointWriter
from roll_flash.run.episode_space import EpisodeSpace
from roll_flash.run.journal import Journal, state_event
from roll_flash.run.run_dir import Checkpoint, RunDir, link_folder
from roll_flash.run.trained_tasks import TrainedTasks
from roll_flash.sandboxes import SandboxSpec
from roll_flash.sandboxes.scratch import sweep_folders
from roll_flash.stages.reward_stage import check_judges
from roll_flash.stages.running import RunningStages, open_stages, recorded_scores, stage_consumers
from roll_flash.stages.teacher import Teacher
from roll_flash.stream import TrajectoryStream
from roll_flash.system.elastic import ElasticParts
from roll_flash.system.live_figures import LiveFigures
from roll_flash.system.resume import Resumed, read_state, resume
from roll_flash.system.start_checks import Checked
from roll_flash.terminal import say
from roll_flash.watchdog.activity import Activities, doing
from roll_flash.watchdog.stacks_elsewhere import stacks_elsewhere
from roll_flash.watchdog.watchdog import Watchdog
from roll_flash.weight_sync.parity import load_probe, parity_threshold
from roll_flash.weight_sync.publication import Publisher

RAY_START_S, AGREE_S = 30.0, 40.0
"""Usual durations in seconds of parts of the start, as they are announced."""
STATUS_WITHIN_S, STATED_EPISODES = 3.0, 20
SHOWN_AFTER_S = 3.0
"""Seconds after which an activity is shown: servers and workers are asked more often."""


@dataclass(frozen=True, slots=True)
class System:
    """All started components of a training run."""

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
    episode_space: EpisodeSpace
    stages: RunningStages
    trained_tasks: TrainedTasks
    before_first_step: Callable[[], Awaitable[None]]
    """What a learner does before the first step of the run: the warm start, if the config has one."""

    async def evaluate(self) -> EvalResult:
        """Evaluate the held-out tasks of each environment with the newest weights, which the servers must already have.

        Returns the result of the first environment; those of the others are in the metrics and in folders next to it.
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

    async def evaluation_before_training(self) -> EvalResult | None:
        """Return the evaluation of step 0 by an earlier start of the run, if there is one with the same settings."""
        return await recorded_evaluation(self.config, self.run_dir.eval)

    def evaluations(self, note: Callable[[str], None]) -> EvaluationsBesideTraining:
        """Evaluations of `eval.every`, which run during training."""
        return EvaluationsBesideTraining(
            self.fleet,
            self.config,
            self.run_dir.eval,
            log=self.metrics.log,
            note=note,
            trained=self.trained_tasks.hashes,
        )

    async def usage_metrics(self) -> dict[str, float]:
        """Metrics of requests (`inference/*`) and sandboxes (`sandbox/*`) from the workers, of the servers
        (`inference/server_*`) and of the stages (`stages/*`)."""
        clients, servers, sandboxes = await asyncio.gather(
            self.fleet.client_metrics(), self.engine.metrics(), self.fleet.sandbox_metrics()
        )
        return {
            **{f"inference/{name}": value for name, value in clients.items()},
            **{f"inference/server_{name}": value for name, value in servers.items()},
            **{f"sandbox/{name}": value for name, value in sandboxes.items()},
            **self.stages.metrics(),
        }

    async def state(self) -> dict[str, Any]:
        """What scheduler, stream and episodes wait for, for the watchdog's report."""
        scheduler = self.rollout.scheduler
        episodes = sorted(await self.fleet.status(STATUS_WITHIN_S), key=lambda each: -each.waited_s)
        return {
            "versions": {"learner": scheduler.learner_version, "servers": scheduler.server_version},
            "scheduler": {
                "running": len(scheduler.running),
                "queued": scheduler.queued,
                "ready": scheduler.ready,
                "groups_wanted": scheduler.groups_wanted(),
            },
            "books": self.rollout.books(),
            "stream": self.stream.metrics(),
            "behind": self.stream.behind(),
            "episodes_that_wait_longest": [asdict(each) for each in episodes[:STATED_EPISODES]],
        }

    async def export_model(self) -> None:
        """Export the last checkpoint's model folder (hard links), replacing that of an earlier end. Raises
        CheckpointError if the last step has no checkpoint."""
        checkpoint = self.run_dir.latest_checkpoint()
        if checkpoint is None or checkpoint.step != self.learner.version:
            raise CheckpointError(f"{self.run_dir.folder}: there is no checkpoint of the last step to export")
        await asyncio.to_thread(link_folder, checkpoint.hf, self.run_dir.model)


@dataclass(frozen=True, slots=True)
class Start:
    """Start state of a run, new or resumed."""

    config: Config
    run_dir: RunDir
    model_folder: Path
    sandboxes: tuple[SandboxSpec, ...]
    """Sandboxes that environments will request; empty if none needs one."""
    fit: Fit | None
    """What the run needs of this machine; None if that is known only when Ray runs."""
    resumes: bool
    checkpoint: Checkpoint | None
    """Checkpoint of a resumed run; None if it has none yet and begins again."""
    disk: str
    """Line about the disk that checkpoints will take."""

    @classmethod
    def of(cls, config: Config, run_dir: RunDir, checked: Checked, *, resume: bool) -> Start:
        """Read the start state. Raises CheckpointError if the checkpoint cannot be read, RunError if the disk has no
        room for checkpoints."""
        assert checked.model_folder is not None, "training has a model of its own"
        checkpoint = run_dir.latest_checkpoint() if resume else None
        if checkpoint is not None:
            read_state(checkpoint)
        disk = check_disk(config, checked.model_folder, existing=int(checkpoint is not None))
        return cls(config, run_dir, checked.model_folder, checked.sandboxes, checked.fit, resume, checkpoint, disk)

    def announce(self, progress: Progress) -> None:
        config = self.config
        progress.show(step=0 if self.checkpoint is None else self.checkpoint.step)
        for change in self.run_dir.config_changes:
            progress.note(f"changed by this resume: {change}")
        progress.note(self.disk)
        progress.note(
            f"run folder {self.run_dir.folder}; starting the learner, {config.inference.servers} inference server(s) "
            f"and {config.rollout.workers} rollout worker(s) ({config.usual_start}; logs in {self.run_dir.logs})"
        )
        for line in self.fit.notes() if self.fit else ():
            progress.note(line)
        if self.resumes and self.checkpoint is None:
            progress.note("there is no complete checkpoint to resume from yet: the run begins again from its start")
        if self.checkpoint is not None and self.checkpoint.step >= config.steps:
            done = self.checkpoint.step
            progress.note(
                f"nothing is left to train: the run has {done} steps, and steps={config.steps}; a larger one trains on"
            )
        if warning := config.learner.loss.off_policy_warning(config.scheduler.highest_async_ratio):
            progress.note(f"warning: {warning}")


@asynccontextmanager
async def open_system(
    start: Start, learner: LearnerEngine, progress: Progress, failure: FirstFailure, watchdog: Watchdog
) -> AsyncIterator[System]:
    """Start learner, servers, workers and the stream between them. A `failure` in the background ends the start.

    What does not need each other starts side by side. Everything is stopped in reverse order.
    """
    async with AsyncExitStack() as stack:
        try:
            async with cancel_on_failure(failure):
                progress.watch(partial(watchdog.activities.lines, SHOWN_AFTER_S))
                system = await _start_system(stack, start, learner, progress)
            await _show_live_figures(stack, system, watchdog.activities, progress)
            watchdog.state, watchdog.elsewhere = system.state, partial(stacks_elsewhere, start.config.name)
            yield system
        finally:
            watchdog.close_begins()


def _scored_before(run_dir: RunDir, resumed: Resumed | None) -> Collection[str]:
    """Return the episodes whose recorded scores hold: those that a resumed run has kept, unless its stages changed."""
    changed = any(line.startswith("stages") for line in run_dir.config_changes)
    return resumed.trajectories.keys() if resumed is not None and not changed else ()


async def _show_live_figures(stack: AsyncExitStack, system: System, activities: Activities, progress: Progress) -> None:
    figures = LiveFigures(system.rollout, system.fleet, system.engine, system.stream, activities, progress.show)
    await stack.enter_async_context(background_task(figures.run(), "the live figures"))


async def _start_system(stack: AsyncExitStack, start: Start, learner: LearnerEngine, progress: Progress) -> System:
    config, run_dir = start.config, start.run_dir
    await check_policies(fixed_policies(config.policies), progress.note)
    await check_judges(config, progress.note)
    teacher = await _open_teacher(stack, start)
    preparation = NodePreparation(config, start.model_folder, start.sandboxes, progress.note)
    with doing("the start", "Ray and the nodes are not ready", announced_s=RAY_START_S):
        places = await _start_ray(stack, config, preparation, progress.note, start.fit)
    _note_plan(places.plan, progress)
    with doing("the start", "learner, servers and rollout workers are not ready", announced_s=config.usual_start_s):
        stack.push_async_callback(learner.close)
        engine = await _open_servers(stack, config, start.model_folder, run_dir.logs, places, progress.note)
        fleet = _open_workers(stack, config, None, start.model_folder, start.sandboxes, places)
        restore = _restore(stack, start, learner, progress.note)
        await gather_or_cancel(_start_models(learner, engine, places, config, progress.note, restore), fleet.start())
        spec = shared_spec(config, engine.client_spec())
        await fleet.serve(spec)
    if teacher is not None:
        await _start_teacher(stack, start, teacher, engine, progress.note)
    elastic = ElasticParts(engine, fleet, spec, run_dir.folder, progress.note)
    await stack.enter_async_context(background_task(elastic.run(), "the scaling of the run"))
    resumed = None if restore is None else await restore()
    if start.resumes and resumed is None:
        run_dir.begin_again()
    exports = Exports.of(config.model_dump(mode="json"), run_dir.folder, progress.note)
    stack.push_async_callback(call_in_thread, exports.close)
    metrics = MetricsLog(
        run_dir.folder,
        config.monitor.tensorboard,
        resume_at=learner.version if resumed else -1 if start.resumes else None,
        exports=exports,
    )
    stack.callback(metrics.close)
    episodes = stack.enter_context(EpisodesWriter(run_dir.episodes))
    stream = TrajectoryStream(stage_consumers(config.stages, has_teacher=teacher is not None))
    rollout = _open_rollout(stack, start, resumed, fleet, episodes, stream, learner.version, progress.note)
    with doing("the start", "stages are not ready"):
        log = run_dir.logs / "stages.jsonl"
        known = await call_in_thread(lambda: recorded_scores(log, _scored_before(run_dir, resumed)))
        stages = await stack.enter_async_context(open_stages(config.stages, stream, log, known, teacher))
    publisher = await _open_publisher(stack, start, learner, engine, rollout)
    copies = await _open_copies(stack, start, progress.note)
    checkpoints = _open_checkpoints(start, learner, rollout, copies)
    stack.push_async_callback(checkpoints.close)
    episode_space = EpisodeSpace(config, run_dir, rollout.written, progress.note)
    await stack.enter_async_context(background_task(episode_space.run(), "the compression of episodes"))
    progress.note("comparing what servers and learner say about the same weights (usually 5-40 s)")
    before_first_step = partial(_warm_start, start, learner, metrics, progress)
    await _agree_on_weights(start, publisher, before_first_step)
    trained = stack.enter_context(closing(TrainedTasks(run_dir.logs)))
    return System(
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
        episode_space,
        stages,
        trained,
        before_first_step,
    )


@asynccontextmanager
async def open_rollout(
    config: Config,
    checked: Checked,
    failure: FirstFailure,
    *,
    endpoint: ChatEndpoint | None = None,
    logs: Path,
) -> AsyncIterator[WorkerFleet]:
    """Start servers and workers without a learner, for evaluation; with `endpoint` only workers. A background
    `failure` ends the start."""
    async with AsyncExitStack() as stack:
        async with cancel_on_failure(failure):
            model_folder, serves = checked.model_folder, endpoint is None
            note = partial(say, error=True)
            await check_policies(fixed_policies(config.policies), note)
            preparation = NodePreparation(config, model_folder, checked.sandboxes, note)
            places = await _start_ray(stack, config, preparation, note, checked.fit, trains=False, serves=serves)
            engine = None
            if endpoint is None:
                assert model_folder is not None, "either a model folder or an endpoint"
                engine = _open_engine(stack, config, model_folder, logs, places)
            fleet = _open_workers(stack, config, endpoint, model_folder, checked.sandboxes, places)
            await gather_or_cancel(fleet.start(), *([engine.start()] if engine is not None else []))
            if engine is not None:
                await fleet.serve(shared_spec(config, engine.client_spec()))
        yield fleet


@asynccontextmanager
async def open_models(
    config: Config,
    model_folder: Path,
    learner: LearnerEngine,
    *,
    serves: bool = True,
    logs: Path,
    note: Callable[[str], None],
) -> AsyncIterator[tuple[InferenceEngine | None, Plan]]:
    """Start learner and servers (None unless it `serves`) at the places of their plan as training does, without
    workers: for checks of a machine."""
    async with AsyncExitStack() as stack:
        preparation = NodePreparation(config, model_folder, (), note)
        fit = await call_in_thread(lambda: fit_here(config, serves=serves))
        for line in fit.notes() if fit else ():
            note(line)
        places = await _start_ray(stack, config, preparation, note, fit, serves=serves)
        stack.push_async_callback(learner.close)
        engine = await _open_servers(stack, config, model_folder, logs, places, note) if serves else None
        await _start_models(learner, engine, places, config, note)
        yield engine, places.plan


async def _start_ray(
    stack: AsyncExitStack,
    config: Config,
    preparation: NodePreparation,
    note: Callable[[str], None],
    fit: Fit | None,
    *,
    trains: bool = True,
    serves: bool = True,
) -> Reservation:
    """Start or join Ray, reserve a place for each part and prepare other nodes; remove temporary files that
    killed processes left behind. Without `fit`, the result of `fit_here`, memory is checked when nodes are known."""
    await asyncio.to_thread(sweep_folders)
    stack.callback(sweep_semaphores)  # when all servers have ended, also those whose guard and host were killed
    await stack.enter_async_context(local_ray(config.ray))
    then = f"the run ends after {ANSWER_TIMEOUT_S:g} s"
    waiting = partial(doing, what="no answer", then=then)
    ray_is_alive = await stack.enter_async_context(watching_ray(waiting))
    gpus = await asyncio.to_thread(own_gpus, config.ray)
    if unused := await asyncio.to_thread(unused_gpus, config.ray):
        note(unused)
    nodes = await asyncio.to_thread(living_nodes, gpus)
    if config.ray.address is not None:
        nodes = await call_in_thread(partial(with_gpu_memory, nodes))
    wanted = parts_on(config, nodes, trains=trains, serves=serves)
    check_weight_transfer(make_plan(wanted, nodes), config.inference.weight_transfer)
    places = Reservation(wanted, own_ray=config.ray.address is None, own_gpus=gpus, prepare=preparation.prepare)
    stack.push_async_callback(_free, places, ray_is_alive)
    await places.reserve(nodes)
    if fit is None:
        for line in (await call_in_thread(lambda: Fit.of(config, places.plan))).notes():
            note(line)
    if config.ray.address is not None:
        for line in sandbox_load(config, places.plan, preparation.sandboxes):
            note(line)
    return places


async def _free(places: Reservation, ray_is_alive: Callable[[], Awaitable[bool]]) -> None:
    """Free the places, unless Ray is dead: calls of a dead control store wait until Ray ends this process."""
    if await ray_is_alive():
        await places.close()


async def _open_servers(
    stack: AsyncExitStack,
    config: Config,
    model_folder: Path,
    logs: Path,
    places: Reservation,
    note: Callable[[str], None],
) -> InferenceEngine:
    """Return the engine of servers that training uses, not started."""
    no_replay = await call_in_thread(lambda: why_no_replay(config, model_folder))
    if no_replay:
        note(f"learner.routing_replay is off: {no_replay}; learner and servers may choose different experts")
    return _open_engine(stack, config, model_folder, logs, places, returns_experts=no_replay is None)


def _restore(
    stack: AsyncExitStack, start: Start, learner: LearnerEngine, note: Callable[[str], None]
) -> Callable[[], asyncio.Task[Resumed]] | None:
    """Return what brings a learner that has started to the newest step of a run that goes on: it begins at the first
    call, and each returns the same task. None if the run begins."""
    if (checkpoint := start.checkpoint) is None:
        return None

    @cache
    def begin() -> asyncio.Task[Resumed]:
        work = resume(start.config, start.run_dir, checkpoint, learner, note)
        task = start_background(work, "the return to the newest step")
        stack.push_async_callback(cancel_and_wait, [task])
        return task

    return begin


async def _start_models(
    learner: LearnerEngine,
    engine: InferenceEngine | None,
    places: Reservation,
    config: Config,
    note: Callable[[str], None],
    restore: Callable[[], object] | None = None,
) -> None:
    """Start learner and servers. The learner tries the model before servers start: an unsupported model then costs only
    one process. If it is supported, that process is used further.

    A model with which the run has learned, since there is something to `restore`, is tried while servers start; then
    the learner is restored, which may go on after the servers have started.
    """
    if restore is not None and engine is not None and not places.shares_gpus:
        note(f"starting servers and the learner ({config.usual_start_of_servers})")

        async def start_learner() -> None:
            await learner.check_model(places)
            await learner.start()
            restore()

        await gather_or_cancel(engine.start(), start_learner())
        return
    note(
        f"trying in the learner's first process whether {Path(config.model.path).name} is computed exactly; servers "
        "start after that (usually 5-40 s)"
    )
    await learner.check_model(places)
    if engine is None:
        await learner.start()
        return
    note(f"the model is; starting servers and the rest of the learner ({config.usual_start_of_servers})")
    if places.shares_gpus:
        # vLLM measures the free memory of its GPU while it starts.
        await engine.start()
        await learner.start()
    else:
        await gather_or_cancel(engine.start(), learner.start())


def _open_engine(
    stack: AsyncExitStack,
    config: Config,
    model_folder: Path,
    logs: Path,
    places: Reservation,
    *,
    returns_experts: bool = False,
) -> InferenceEngine:
    engine = open_engine(
        config.inference,
        model_folder=model_folder,
        max_model_len=within_context(model_folder, config.served_length),
        logs=logs,
        places=places,
        returns_experts=returns_experts,
    )
    stack.push_async_callback(engine.close)
    return engine


async def _open_teacher(stack: AsyncExitStack, start: Start) -> Teacher | None:
    """Return the teacher of `distill`, whose tokenizer is that of the policy; None without `distill`."""
    if (distill := start.config.distill) is None:
        return None
    kwargs = start.config.model.chat_template_kwargs
    teacher = Teacher(distill, await call_in_thread(lambda: load_tokenizer(start.model_folder, kwargs)))
    stack.push_async_callback(teacher.close)
    with doing("the start", "the teacher's tokenizer is not compared", announced_s=RAY_START_S):
        await teacher.check()
    return teacher


async def _start_teacher(
    stack: AsyncExitStack, start: Start, teacher: Teacher, engine: InferenceEngine, note: Callable[[str], None]
) -> None:
    """Start the servers of a teacher that has a model of its own, on this node; `engine` serves the policy."""
    config, wanted = start.config, teacher.config
    if (name := wanted.teacher.model) is None:
        teacher.servers = engine.client_spec if wanted.teacher.own_servers else None
        return
    note(f"starting {wanted.teacher.servers} server(s) of the teacher {name} ({config.usual_start_of_servers})")
    folder = await call_in_thread(lambda: resolve_model(name))
    inference = config.inference.model_copy(update={"servers": wanted.teacher.servers, "port": 0})
    length = within_context(folder, config.model.max_length + wanted.room)
    its = open_engine(inference, model_folder=folder, max_model_len=length, logs=start.run_dir.logs / "teacher")
    stack.push_async_callback(its.close)
    with doing("the start", "the teacher's servers are not ready", announced_s=config.usual_start_s):
        await its.start()
    teacher.servers = its.client_spec


def _open_workers(
    stack: AsyncExitStack,
    config: Config,
    model: ChatEndpoint | None,
    model_folder: Path | None,
    sandboxes: Collection[SandboxSpec],
    places: Reservation,
) -> WorkerFleet:
    """Return the workers, not started. `model` None: they are told of the servers later."""
    fleet = open_fleet(config, worker_settings(config, model, model_folder, bool(sandboxes)), places)
    stack.push_async_callback(fleet.close)
    return fleet


async def _open_publisher(
    stack: AsyncExitStack, start: Start, learner: LearnerEngine, engine: InferenceEngine, rollout: Rollout
) -> Publisher:
    config, folder = start.config, start.model_folder
    text, length = config.weights.parity_text, config.model.max_length
    publisher = Publisher(
        learner,
        engine,
        config.weights,
        probe=await call_in_thread(lambda: load_probe(folder, text, length)),
        threshold=parity_threshold(config.weights, engine.dtype),
        on_published=rollout.published,
    )
    stack.push_async_callback(publisher.close)
    return publisher


async def _agree_on_weights(
    start: Start, publisher: Publisher, before_first_step: Callable[[], Awaitable[None]]
) -> None:
    """Ensure that learner and servers have the same weights and compute the same log-probabilities."""
    compared = partial(doing, "the start", "servers and learner have not been compared", announced_s=AGREE_S)
    if start.checkpoint is None:
        with compared():
            await publisher.check()
        if start.config.warm_start is None:
            return
        await before_first_step()
    with compared():
        await publisher.begin()
        await publisher.wait_published()


def open_fleet(config: Config, settings: WorkerSettings, places: Reservation | None = None) -> WorkerFleet:
    """Create the workers of a run without starting them."""
    rollout = config.rollout
    return WorkerFleet(settings, rollout.workers, places=places, heartbeat_timeout_s=rollout.heartbeat_timeout_s)


def _note_plan(plan: Plan, progress: Progress) -> None:
    """Say where each part runs; on one machine without GPUs there is nothing to say."""
    if plan.uses_gpus or len({row.node.node_id for row in plan.rows}) > 1:
        for line in plan.lines():
            progress.note(f"placement: {line}")


def shared_spec(config: Config, servers: ClientSpec) -> ClientSpec:
    """Return the servers as each worker uses them."""
    return replace(servers, clients=config.rollout.workers, pin_sessions=not config.scheduler.replicate)


def worker_settings(
    config: Config, model: ClientSpec | ChatEndpoint | None, model_folder: Path | None, needs_sandbox: bool
) -> WorkerSettings:
    rollout = config.rollout
    if isinstance(model, ClientSpec):
        model = shared_spec(config, model)
    above = {env.id: env.success_above for env in config.envs if env.success_above is not None}
    return WorkerSettings(
        model=model,
        tokenizer_folder=model_folder,
        max_length=config.model.max_length,
        thinking=config.model.thinking,
        chat_template_kwargs=config.model.chat_template_kwargs,
        deadlines=Deadlines(rollout.generate_timeout_s, rollout.step_timeout_s, rollout.episode_timeout_s),
        sandbox=config.sandbox if needs_sandbox else None,
        run=f"{config.name}-{os.getpid()}",
        success_above=above,
        policies=fixed_policies(config.policies),
        threads=rollout.worker_threads,
        folder=Path.cwd(),
        search_path=search_path(),
    )


async def _open_copies(stack: AsyncExitStack, start: Start, note: Callable[[str], None]) -> CheckpointCopies | None:
    """Begin to copy checkpoints, if the config says so; also the one to resume from, if it was not copied yet."""
    if (store := store_of(start.config)) is None:
        return None
    copies = CheckpointCopies(store, start.config.checkpoint, note)
    if start.checkpoint is not None:
        await copies.go_on_from(start.checkpoint)
    await stack.enter_async_context(background_task(copies.run(), "the copies of checkpoints"))
    return copies


def _open_checkpoints(
    start: Start, learner: LearnerEngine, rollout: Rollout, copies: CheckpointCopies | None
) -> CheckpointWriter:
    return CheckpointWriter(
        start.run_dir,
        learner,
        rollout_state=rollout.state,
        episodes_written=rollout.written,
        config=start.config.checkpoint,
        checkpoint_bytes=checkpoint_bytes(start.config, start.model_folder),
        timeout_s=start.config.learner.step_timeout_s,
        copies=copies,
    )


async def _warm_start(start: Start, learner: LearnerEngine, metrics: MetricsLog, progress: Progress) -> None:
    if (warm := start.config.warm_start) is None:
        return
    progress.note(f"warm start: {warm.steps} supervised steps of {warm.batch_size} samples")
    figures = await warm_start(
        learner,
        warm,
        model_folder=start.model_folder,
        model=start.config.model,
        seed=start.config.seed,
        report=progress.note,
    )
    progress.note(
        f"warm start: done, loss {figures['warm_start/first_loss']:.3f} -> {figures['warm_start/last_loss']:.3f}"
    )
    metrics.log(learner.version, figures)


def _open_rollout(
    stack: AsyncExitStack,
    start: Start,
    resumed: Resumed | None,
    fleet: WorkerFleet,
    episodes: EpisodesWriter,
    stream: TrajectoryStream,
    version: int,
    note: Callable[[str], None],
) -> Rollout:
    tasks, journal = open_tasks(start.config), Journal(start.run_dir.journal)
    stack.callback(journal.close)
    journal.begin(journal.newest(start.checkpoint.step if start.checkpoint else 0))
    if resumed is not None and not resumed.recovery.is_marked:
        journal.write(state_event(resumed.recovery.mark, resumed.recovery.ended()))
    turns = TurnFile(start.run_dir.journal)
    stack.callback(turns.close)
    if resumed is not None:
        fleet.turns, damage = read_turns(start.run_dir.journal)
        if damage:
            note(damage)
    try:
        rollout = Rollout(
            start.config,
            fleet,
            tasks,
            episodes,
            stream,
            version=version,
            recovery=resumed.recovery if resumed is not None else None,
            trajectories=resumed.trajectories if resumed is not None else None,
            journal=journal,
            turns=turns,
        )
    except CONTENT_ERRORS as error:
        if resumed is None:
            raise
        raise CheckpointError(
            f"{start.run_dir.journal}: cannot be repeated ({error}); move it away to go on from the checkpoint of step "
            f"{resumed.checkpoint.step} alone"
        ) from None
    turns.begin(fleet.turns.records())
    return rollout
