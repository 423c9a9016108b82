"""Runs the stages on the trajectory stream: each stage writes its scores; a last one computes the rewards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from roll_flash.checked_files import decode, lines_of, open_checked
from roll_flash.config.sections.distill import TEACHER
from roll_flash.config.sections.stages import StageConfig
from roll_flash.config.user_code import described
from roll_flash.errors import RollFlashError, RunError
from roll_flash.monitor.json_lines import JsonLinesFile
from roll_flash.processes.background import (
    call_in_thread,
    call_sync_or_async,
    cancel_and_wait,
    error_of,
    start_background,
)
from roll_flash.stages.reward_stage import RewardStage, make_stage
from roll_flash.stages.teacher import Teacher
from roll_flash.stream import REWARD, Consumer, Row, Stage, TrajectoryStream
from roll_flash.stream.blocks import fetch_trajectories
from roll_flash.stream.stage import Compute
from roll_flash.types import Trajectory, as_reward, bounded

REWARD_BATCH = 64
START_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 10.0
Log = Callable[[dict[str, Any]], Any]
Span = tuple[float, float, int]
"""Begin and end in Unix time, number of trajectories."""
Scores = Mapping[tuple[str, str], float]
"""By stage and episode id."""

_log = logging.getLogger(__name__)


def stage_consumers(stages: Sequence[StageConfig], *, has_teacher: bool = False) -> list[Consumer]:
    """Return the stream consumers of the stages; empty without stages and teacher."""
    teacher = (TEACHER,) if has_teacher else ()
    columns = (*map(score_column, stages), *teacher)
    consumers = [*map(_consumer, stages), *map(Consumer, teacher)]
    return [*consumers, Consumer(REWARD, columns, REWARD_BATCH)] if columns else []


def score_column(stage: StageConfig) -> str:
    return f"score_{stage.name}"


def final_reward(reward: float, scores: Sequence[float], stages: Sequence[StageConfig]) -> float:
    """Apply all stages, in order, to the environment's reward. The result is at most MAX_REWARD: an environment gives
    that for what is beyond, such as work that is wrong by far. Raises RunError if a stage's own part is larger."""
    for score, stage in zip(scores, stages, strict=True):
        part = _checked(stage.weight * score, f"the reward after stage {stage.name}")
        match stage.reward:
            case "add":
                reward += part
            case "multiply":
                reward *= part
            case "replace":
                reward = part
    return bounded(reward)


class _Score(msgspec.Struct):
    """A line of `logs/stages.jsonl` that has a score."""

    stage: str
    episode_id: str
    score: float


def recorded_scores(log_file: Path, episode_ids: Collection[str]) -> Scores:
    """Return the scores of these episodes in the log of a run that goes on. What cannot be read is left out, and scored
    again."""
    found: dict[tuple[str, str], float] = {}
    if not episode_ids or not log_file.exists():
        return found
    with open_checked(log_file) as file:
        for line in lines_of(file):
            try:
                score = decode(line, _Score)
            except ValueError:
                continue
            if score.episode_id in episode_ids:
                found[score.stage, score.episode_id] = score.score
    return found


class RunningStages:
    """The stages of a run, as driver tasks that run as long as the run. Open with `open_stages`."""

    def __init__(self, stages: Sequence[StageConfig], known: Scores) -> None:
        self._configs = list(stages)
        self._known = known
        self._stages: dict[str, Stage] = {}
        self._scores: dict[str, list[float]] = {}
        self._spans: dict[str, list[Span]] = {}

    def metrics(self) -> dict[str, float]:
        """Per stage: `rows`, `retries`, `failed_rows`, `seconds` so far and the mean score since the last call."""
        figures: dict[str, float] = {}
        for name, stage in self._stages.items():
            figures |= {f"stages/{name}/{key}": value for key, value in stage.metrics().items()}
            if scores := self._scores.pop(name, []):
                figures[f"stages/{name}/score_mean"] = sum(scores) / len(scores)
        return figures

    def take_timeline(self) -> list[tuple[str, float, float, int]]:
        """Return when each stage worked since the last call, as (stage, begin, end, trajectories) in Unix time. Calls
        that overlap are one."""
        spans, self._spans = self._spans, {}
        return [(name, *span) for name, found in spans.items() for span in found]

    def attach(
        self, stream: TrajectoryStream, scorers: Sequence[RewardStage], log: Log, teacher: Teacher | None = None
    ) -> list[Stage]:
        """Create one `Stage` per configured stage and teacher, and the one that computes rewards, without starting
        them. `log` gets every score and every failed attempt."""
        for config, scorer in zip(self._configs, scorers, strict=True):
            self._stages[config.name] = Stage(
                stream,
                _consumer(config),
                self._scoring(config, scorer, log),
                concurrency=config.workers,
                timeout_s=config.timeout_s,
                retries=config.retries,
                max_failures_in_a_row=1 if config.on_failure == "stop" else config.max_failures_in_a_row,
                on_error=partial(_log_error, log, config.name),
            )
        if teacher is not None:
            self._stages[TEACHER] = teacher.stage(stream, log)
        *_, consumer = stage_consumers(self._configs, has_teacher=teacher is not None)
        return [*self._stages.values(), Stage(stream, consumer, self._combine, retries=0, max_failures_in_a_row=1)]

    def _scoring(self, config: StageConfig, scorer: RewardStage, log: Log) -> Compute:
        async def compute(rows: Sequence[Row]) -> list[dict[str, float]]:
            known = [self._known.get((config.name, row.row_id)) for row in rows]
            if None not in known:  # else the whole batch: a stage may compare the rows of a group
                return [{score_column(config): score} for score in known if score is not None]
            with self._working(config.name, len(rows)):
                trajectories = await call_in_thread(lambda: fetch_trajectories([row.data.data for row in rows]))
                scores = await _score(scorer, trajectories)
            self._scores.setdefault(config.name, []).extend(scores)
            for row, score in zip(rows, scores, strict=True):
                log({"stage": config.name, "episode_id": row.row_id, "score": score})
            return [{score_column(config): score} for score in scores]

        return compute

    @contextmanager
    def _working(self, stage: str, rows: int) -> Iterator[None]:
        begin_s = time.time()
        try:
            yield
        finally:
            end_s, spans = time.time(), self._spans.setdefault(stage, [])
            while spans and begin_s <= spans[-1][1]:
                earlier_s, _, more = spans.pop()
                begin_s, rows = min(begin_s, earlier_s), rows + more
            spans.append((begin_s, end_s, rows))

    async def _combine(self, rows: Sequence[Row]) -> list[dict[str, float]]:
        names = [score_column(stage) for stage in self._configs]
        return [
            {REWARD: final_reward(row.data.reward, [row.columns[name] for name in names], self._configs)}
            for row in rows
        ]


@asynccontextmanager
async def open_stages(
    stages: Sequence[StageConfig],
    stream: TrajectoryStream,
    log_file: Path,
    known: Scores | None = None,
    teacher: Teacher | None = None,
) -> AsyncIterator[RunningStages]:
    """Start the stages on a stream with the consumers `stage_consumers`; append scores to `log_file`. `known` scores
    are not asked for.

    If a stage stops, the stream fails and so does the run. Raises the error of a stage's `start`.
    """
    running = RunningStages(stages, known or {})
    if not stages and teacher is None:
        yield running
        return
    scorers = [make_stage(stage) for stage in stages]
    log = JsonLinesFile(log_file)
    tasks: list[asyncio.Task[None]] = []
    try:
        for stage_config, scorer in zip(stages, scorers, strict=True):
            await _start(stage_config.name, scorer)
        for stage in running.attach(stream, scorers, log.write, teacher):
            task = start_background(stage.run(), "a stage")
            task.add_done_callback(lambda done: _fail_with(stream, done))
            tasks.append(task)
        yield running
    finally:
        await cancel_and_wait(tasks)
        log.close()
        for stage_config, scorer in zip(stages, scorers, strict=True):
            await _close(stage_config.name, scorer)


def _consumer(stage: StageConfig) -> Consumer:
    return Consumer(stage.name, batch_size=stage.batch_size, whole_groups=stage.on_failure == "drop_group")


def _log_error(log: Log, name: str, rows: Sequence[Row], error: str) -> None:
    log({"stage": name, "rows": len(rows), "error": error})


async def _score(scorer: RewardStage, trajectories: list[Trajectory]) -> list[float]:
    """Return the scores. Raises RunError for a scorer that raises, and unless there is one finite number per
    trajectory."""
    try:
        found = await call_sync_or_async(scorer.score, trajectories)
    except RollFlashError:
        raise
    except Exception as error:  # users' code may raise anything
        raise RunError(described(error)) from error
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise RunError(f"`score` returned {found!r:.60}, not a list with one number for each trajectory")
    scores = list(found)
    if len(scores) != len(trajectories):
        raise RunError(f"{len(scores)} scores for {len(trajectories)} trajectories")
    return [
        _checked(score, f"the score of {trajectory.episode_id}")
        for trajectory, score in zip(trajectories, scores, strict=True)
    ]


def _checked(value: Any, what: str) -> float:
    try:
        return as_reward(value, what)
    except ValueError as error:
        raise RunError(str(error)) from None


async def _call_if_there(scorer: RewardStage, method: str) -> None:
    function = getattr(scorer, method, None)
    if function is not None:
        await call_sync_or_async(function)


async def _start(name: str, scorer: RewardStage) -> None:
    deadline = asyncio.timeout(START_TIMEOUT_S)
    try:
        async with deadline:
            await _call_if_there(scorer, "start")
    except TimeoutError:
        if not deadline.expired():  # raised by the stage itself
            raise
        raise RunError(f"stage {name}: `start` took longer than {START_TIMEOUT_S:g} s") from None


async def _close(name: str, scorer: RewardStage) -> None:
    """Close a stage; only log its error, so that the others close too and the run's own error stays visible."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await _call_if_there(scorer, "close")
    except Exception as error:  # users' code may raise anything
        _log.warning("stage %s could not be closed: %s %s", name, type(error).__name__, error)


def _fail_with(stream: TrajectoryStream, task: asyncio.Task[None]) -> None:
    """Pass the error of a stage to the stream, so that readers of rewards stop waiting."""
    if (error := error_of(task)) is not None:
        stream.fail(error)
