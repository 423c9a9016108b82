"""Checks of training: a step at the recipe's length, save and load, and a whole run that is resumed."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from roll_flash.config.tree import Config
from roll_flash.engines.learner import LearnerEngine, StepResult
from roll_flash.gpu_check.check import Bench, require
from roll_flash.models.shape import ModelShape, read_shape
from roll_flash.monitor.metrics import LEARNER_IDLE, STALENESS_MAX, STEP_S, TOKENS_PER_S, read_metrics
from roll_flash.processes.nvml import read_driver
from roll_flash.trainer import train
from roll_flash.types import Group, Task, Trajectory
from roll_flash.weight_sync.parity import Parity, compare

if TYPE_CHECKING:
    from roll_flash.gpu_check.servers import Models

GIB = 2**30
PROMPT_SHARE = 0.25
ROWS_PER_RANK = 8
"""Packed rows of a measured step: enough to measure, where a step of the recipe would take minutes."""
GOOD_MFU = 0.5
LOOK_EVERY_S = 0.25
SAME_LOGPROB = 1e-3
"""Largest difference of log-probabilities before a save and after the load: some kernels of GPUs add in any order."""
SAME_STEP = 0.05
"""Mean difference after the same step, relative to how far it moves log-probabilities."""
SAME_NORM = 0.02
"""Relative difference of the gradient norms of the same step before and after."""
RUN_STEPS = 2
SMALL_RUN = (
    "scheduler.groups_per_step=2",
    "scheduler.group_size=4",
    "rollout.max_concurrent=8",
    "rollout.max_new_tokens=16",
    "checkpoint.every=1",
)
"""A run that tests the path, not the speed."""


async def learn(learner: LearnerEngine, groups: Sequence[Group]) -> StepResult:
    """Take one step. Raises CheckFailedError if it changed nothing."""
    for group in groups:
        await learner.accumulate([_finished(group)])
    result = await learner.finish_step()
    require(not result.skipped, "the learner skipped a step: its loss or gradient was not finite")
    return result


def _finished(group: Group) -> Any:
    from roll_flash.stream import finished_group

    return finished_group(group)


def made_groups(config: Config, folder: Path, version: int, count: int, *, length: int) -> list[Group]:
    """Return groups of random trajectories of `length` tokens, of which a quarter is the prompt that replicas share."""
    random = np.random.default_rng(version)
    vocabulary = read_shape(str(folder)).vocabulary
    size = max(2, config.scheduler.group_size)
    groups = []
    for number in range(count):
        prompt = random.integers(3, vocabulary, max(2, int(length * PROMPT_SHARE)))
        answers = random.integers(3, vocabulary, (size, length - len(prompt)))
        name = f"v{version}-g{number}"
        members = tuple(_trajectory(name, index, prompt, answer, version) for index, answer in enumerate(answers))
        groups.append(Group(name, members[0].task, members))
    return groups


def _trajectory(group: str, index: int, prompt: Any, answer: Any, version: int) -> Trajectory:
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(
        episode_id=f"{group}-{index}",
        group_id=group,
        task=Task(group, "Dataset-v0", 0),
        token_ids=tokens,
        policy_mask=mask,
        logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=(),
        messages=(),
        reward=float(index % 2),
        success=None,
        end="terminated",
        prompt_length=len(prompt),
        started_s=0.0,
        finished_s=1.0,
    )


async def step(bench: Bench, models: Models) -> None:
    """Take a step at the recipe's length; measure speed and memory."""
    config, learner = models.config, models.learner
    shape, length, ranks = read_shape(str(models.folder)), config.model.max_length, config.learner.ranks
    (first,) = made_groups(config, models.folder, learner.version, 1, length=length)
    wanted = ROWS_PER_RANK * ranks * config.learner.micro_batch_tokens
    count = max(ranks, min(config.scheduler.groups_per_step, math.ceil(wanted / _packed_tokens(first))))
    async with memory_watch() as memory:
        bench.note(f"a first pass of {len(first.trajectories)} sequences of {length} tokens, which compiles kernels")
        began = time.monotonic()
        await learner.accumulate([_finished(first)])
        await learner.abandon_step()
        bench.measured(first_pass_s=time.monotonic() - began)
        bench.note(f"a step of {count} groups of {len(first.trajectories)} sequences of {length} tokens")
        groups = made_groups(config, models.folder, learner.version, count, length=length)
        began = time.monotonic()
        result = await learn(learner, groups)
        seconds = time.monotonic() - began
    operations = _operations(config, shape, groups)
    tokens = sum(_packed_tokens(group) for group in groups)
    bench.measured(
        sequence_tokens=length,
        computed_tokens=tokens,
        step_s=seconds,
        tokens_per_s=tokens / seconds,
        tflops=operations / seconds / ranks / 1e12,
        **{name: result.metrics[name] for name in ("forward_backward_s", "optimizer_s", "rows")},
        **memory.figures(),
    )
    bench.fits(f"a step of {count} groups of {len(first.trajectories)} x {length} tokens: {memory.text()}")
    whole_s = seconds * config.scheduler.groups_per_step / count
    bench.measured(whole_step_of_the_recipe_s=whole_s)
    if not bench.settings.rehearsal:
        _judge_speed(bench, result, operations / seconds / ranks / 1e12)


def _judge_speed(bench: Bench, result: StepResult, tflops: float) -> None:
    speed = bench.settings.earlier.get("speed", {})
    published, matmul = speed.get("published_tflops"), speed.get("matmul_tflops")
    if matmul:
        bench.measured(share_of_matmul=tflops / matmul)
    if not published:
        return
    bench.measured(mfu=tflops / published)
    if tflops / published < GOOD_MFU:
        metrics = result.metrics
        bench.slow(
            f"a step reaches {tflops:.0f} of the published {published:.0f} TFLOP/s ({tflops / published:.0%}, one "
            f"large matrix product {(matmul or 0) / published:.0%}); {metrics['forward_backward_s']:.2f} s are forward "
            f"and backward, {metrics['optimizer_s']:.2f} s the optimizer. If memory is left: larger "
            "learner.micro_batch_tokens, gradient_checkpointing=false; or learner.compile=true"
        )


def _packed_tokens(group: Group) -> int:
    prompt = group.trajectories[0].prompt_length
    return prompt + sum(len(each.token_ids) - each.prompt_length for each in group.trajectories)


def _operations(config: Config, shape: ModelShape, groups: Sequence[Group]) -> float:
    """Return the floating-point operations that a step needs: without what checkpointing computes again.

    2 for each parameter and token forward, 4 backward (2 if the weights are frozen); attention 4 and 8 for each pair of
    tokens and unit of its width.
    """
    head = shape.head or shape.embedding
    factor = 4.0 if config.learner.lora.rank else 6.0
    total = 0.0
    for group in groups:
        prompt = group.trajectories[0].prompt_length
        answers = [len(each.token_ids) - prompt for each in group.trajectories]
        pairs = prompt**2 / 2 + sum(answer * prompt + answer**2 / 2 for answer in answers)
        total += factor * ((shape.computed - head) * _packed_tokens(group) + head * sum(answers))
        total += 12 * shape.layers * shape.query * pairs
    return total


@dataclass(slots=True)
class MemoryPeaks:
    """Largest bytes in use on each GPU, by all processes; without a GPU, by our processes on this machine."""

    used: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        driver = read_driver()
        for number, gpu in enumerate(driver.gpus):
            self._add(f"GPU {number}", gpu.used_bytes, gpu.memory_bytes)
        if not driver.gpus:
            self._add("host", _resident_bytes(), psutil.virtual_memory().total)

    def _add(self, place: str, used: int, total: int) -> None:
        self.used[place] = max(self.used.get(place, 0), used)
        self.total[place] = total

    def figures(self) -> dict[str, Any]:
        largest = max(self.used, key=lambda place: self.used[place])
        return {"peak_gib": self.used[largest] / GIB, "of_gib": self.total[largest] / GIB, "peaks": self.text()}

    def text(self) -> str:
        return ", ".join(
            f"{place} {used / GIB:.1f} of {self.total[place] / GIB:.1f} GiB" for place, used in self.used.items()
        )


def _resident_bytes() -> int:
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


@asynccontextmanager
async def memory_watch() -> AsyncIterator[MemoryPeaks]:
    peaks = MemoryPeaks()

    async def watch() -> None:
        while True:
            await asyncio.to_thread(peaks.look)
            await asyncio.sleep(LOOK_EVERY_S)

    task = asyncio.create_task(watch())
    try:
        yield peaks
        await asyncio.to_thread(peaks.look)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def save_and_load(bench: Bench, models: Models) -> None:
    """Save, take a step, load, take the same step: weights, version and what the step leads to must be the same."""
    learner, texts = models.learner, models.probe.texts
    folder = bench.settings.output / "checkpoints" / f"{os.getpid()}"
    folder.parent.mkdir(exist_ok=True)
    version = learner.version
    groups = made_groups(models.config, models.folder, version, 2, length=64)
    saved = await learner.logprobs_of(texts)
    bench.note("saving")
    began = time.monotonic()
    writing = await learner.begin_save(folder)
    bench.measured(save_blocks_s=time.monotonic() - began)
    await writing
    bench.measured(save_s=time.monotonic() - began, gib=_bytes_of(folder) / GIB)
    first = await learn(learner, groups)
    expected = await learner.logprobs_of(texts)
    bench.note("loading")
    began = time.monotonic()
    await learner.load(folder)
    bench.measured(load_s=time.monotonic() - began)
    require(learner.version == version, f"the version is {learner.version} after the load, not {version}")
    loaded = await learner.logprobs_of(texts)
    again = await learn(learner, groups)
    found = await learner.logprobs_of(texts)
    moved, off = _difference(saved, expected).mean, _difference(saved, loaded).largest
    next_off = _difference(expected, found).mean
    norms = first.metrics["grad_norm"], again.metrics["grad_norm"]
    bench.measured(
        change_of_logprobs=moved,
        difference_after_load=off,
        difference_after_the_same_step=next_off,
        grad_norms=list(norms),
    )
    require(moved > SAME_LOGPROB, f"a step changed log-probabilities by only {moved:.3g}: a load could not be seen")
    require(off <= SAME_LOGPROB, f"log-probabilities differ by {off:.3g} after the load")
    require(
        abs(norms[0] - norms[1]) <= SAME_NORM * norms[0],
        f"the same step has a gradient norm of {norms[1]:.5g} after the load, and had {norms[0]:.5g} before",
    )
    # The optimizer's moments: without them the step would be another one.
    require(
        next_off <= SAME_STEP * moved,
        f"the same step after the load leads to log-probabilities that differ by {next_off:.3g}; it moves them by "
        f"{moved:.3g}",
    )


def _difference(first: Sequence[NDArray[np.float32]], second: Sequence[NDArray[np.float32]]) -> Parity:
    return compare(first, [[values] for values in second])


def _bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run(bench: Bench) -> None:
    """Train two steps as `roll-flash train` does."""
    config = _small_run(bench, RUN_STEPS)
    summary = train(config, on_step=_noting(bench))
    _check_run(bench, config, summary, RUN_STEPS)


def resume(bench: Bench) -> None:
    """Go on with that run for one more step, as `roll-flash train --resume` does."""
    config = _small_run(bench, RUN_STEPS + 1)
    summary = train(config, resume=True, on_step=_noting(bench))
    _check_run(bench, config, summary, RUN_STEPS + 1)


def _small_run(bench: Bench, steps: int) -> Config:
    is_vllm = bench.settings.config_with().inference.engine == "vllm"
    # Without CUDA graphs it starts faster; the other checks have them.
    eager = ("inference.extra_args.enforce_eager=true",) if is_vllm and not bench.settings.rehearsal else ()
    one = ("learner.ranks=1", "inference.servers=1") if bench.settings.rehearsal else ()
    config = bench.settings.config_with(f"steps={steps}", *SMALL_RUN, *eager, *one)
    bench.note(f"starting a run ({config.usual_start})")
    return config


def _noting(bench: Bench) -> Any:
    def note(number: int, metrics: Mapping[str, float]) -> None:
        bench.note(f"step {number} is done, {metrics[STEP_S]:.1f} s")

    return note


def _check_run(bench: Bench, config: Config, summary: Mapping[str, Any], steps: int) -> None:
    rows = [row for row in read_metrics(config.run_folder) if row.get(STEP_S) is not None]
    last = rows[-1]
    bench.measured(**{name: last[name] for name in (STEP_S, TOKENS_PER_S, LEARNER_IDLE, STALENESS_MAX)})
    parity = [row["weights/parity"] for row in rows if row.get("weights/parity") is not None]
    bench.measured(largest_parity=max(parity, default=None))
    require([row["step"] for row in rows] == list(range(1, steps + 1)), f"steps: {[row['step'] for row in rows]}")
    require(summary["books"]["balance"], f"trajectories are lost: {summary['books']}")
    require(bool(summary["model_folder"]), "the run left no model folder")
