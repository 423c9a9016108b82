"""The trajectory stream: rows into two ranks beside TransferQueue, the driver's work, a slow judge, overlap.

    python benchmarks/stream.py [--quick] [--json] [--peer-venv FOLDER]

Rows: trajectories of 1,500 tokens in four arrays, 19.5 KB. One process hands them in, in batches; the driver puts them
into the stream, takes micro-batches and plans; two processes fetch their rows and make training sequences, as learner
ranks do before they pack. Beside TransferQueue both do the same work, in turns: one process hands in batches of the
same rows, two processes fetch the four arrays of the rows, and nobody makes sequences. TransferQueue runs as it comes
(two storage units), in a virtual environment of its own that shares this one's torch and Ray and is kept in FOLDER if
that is given. The driver's work is the CPU time of its event loop for each row, with and without Ray's calls.

Judge: real rollout, stage and loader, with episodes and a learner that only sleep. Hidden is the share of the judge's
time by which steps do not become longer.

Overlap: the same groups arrive with the same long-tailed delays at the same FSDP learner (tiny model, one CPU thread).
Once all are handed over when the last has come, once they stream. The delays are scaled so that the last group comes
when the learner alone would have needed all that time: waiting and computing cost the same, as in a balanced run.

Everything is repeated. Prints a table (to standard error with --json) and, unless --quick, writes
results/stream.json, .md and .png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from machine import machine
from stream_plots import draw

from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.config.sections.stages import StageConfig
from roll_flash.config.tree import RayConfig, load_config
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.sequences import PlannedTrajectory, prepare_groups, row_parts, share_out
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.garbage import long_lived_process
from roll_flash.processes.ray.local_ray import local_ray
from roll_flash.rollout.rollout import Rollout
from roll_flash.rollout.turns import TurnBook
from roll_flash.scheduling.tasks import SeedTasks
from roll_flash.stages.running import open_stages, stage_consumers
from roll_flash.stream import LearnerLoader, TrajectoryStream, finished_episode, finished_group
from roll_flash.stream.blocks import HandedIn, fetch_tokens, hand_in, located
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, FinishedGroup, Group, Task, Trajectory

PEER, PEER_VERSION = "TransferQueue", "0.1.11"
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
TOKENS, REPLICAS, BATCH = 1500, 8, 32
PEER_ROWS, PEER_TIMEOUT_S = 2048, 1800.0
UNDER_WAY = 4
"""Calls of the worker, and of the ranks, at the same time."""
REPEATS = 5
MICRO_BATCH_TOKENS = 4096
JUDGE_S, LEARNER_STEP_S, STEPS = 10.0, 20.0, 4


@dataclass(frozen=True)
class Figure:
    """One row of the table. `low` and `high`: extremes of the repetitions, of the ratio if there is a `peer`."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    peer: float | None = None
    target: str = ""
    reached: bool | None = None


# Rows into two ranks


def trajectory(name: str, group: str, tokens: int = TOKENS) -> Trajectory:
    mask = np.arange(tokens) >= 100
    return Trajectory(
        episode_id=name,
        group_id=group,
        task=Task(group, "Made-v0", 0),
        token_ids=np.arange(tokens, dtype=np.int32),
        policy_mask=mask,
        logprobs=np.where(mask, -np.random.default_rng(0).random(tokens), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(),
        messages=({"role": "user", "content": "go on"},),
        reward=float(len(name) % 2),
        success=None,
        end="terminated",
        prompt_length=100,
        started_s=0.0,
        finished_s=1.0,
    )


class Worker:
    """Hands in batches of prepared rows. What an episode costs its worker is measured apart (`hand_in_us`)."""

    def __init__(self) -> None:
        self._made = hand_in([trajectory(str(number), "g") for number in range(BATCH)])
        self._number = 0

    async def poll(self) -> HandedIn:
        ended, tokens, _, _ = self._made
        first, self._number = self._number, self._number + BATCH
        renamed: Any = [_renamed(each, number) for number, each in enumerate(ended, first)]
        return renamed, tokens, [], []  # text and log lines are not part of what is compared


def _renamed(episode: FinishedEpisode | EpisodeFailure, number: int) -> FinishedEpisode:
    assert isinstance(episode, FinishedEpisode)
    reward = float(number % 2)
    return replace(episode, episode_id=f"e{number}", group_id=f"g{number // REPLICAS}", reward=reward)


class Rank:
    def fetch(self, planned: Sequence[PlannedTrajectory]) -> int:
        """Return the number of fetched rows."""
        return len(fetch_tokens([each.data for each in planned]))

    def train(self, planned: Sequence[PlannedTrajectory]) -> int:
        """Return the number of policy tokens of all sequences."""
        arrays = fetch_tokens([each.data for each in planned])
        made = [one for each, tokens in zip(planned, arrays, strict=True) for one in each.sequences(tokens)]
        return sum(int(sequence.policy_mask.sum()) for sequence in made)


def receive(stream: TrajectoryStream, outcomes: Iterable[FinishedEpisode | EpisodeFailure]) -> list[FinishedGroup]:
    """Put rows, as the rollout does; return the groups that they complete."""
    rows = [each for each in outcomes if isinstance(each, FinishedEpisode)]
    for row in rows:
        stream.put(row.episode_id, row.group_id, row, {"reward": row.reward})
    groups = [tuple(rows[start : start + REPLICAS]) for start in range(0, len(rows), REPLICAS)]
    for members in groups:
        stream.complete(members[0].group_id)
    return [FinishedGroup(members[0].group_id, members[0].task, members) for members in groups]


def plan(groups: Sequence[FinishedGroup]) -> list[list[PlannedTrajectory]]:
    prepared = prepare_groups(groups, 0, AdvantageConfig())
    return share_out(row_parts((one for each in prepared for one in each.planned), 8192), 2)


async def into_two_ranks(worker: Any, calls: Sequence[Any], rows: int) -> tuple[float, float]:
    """Rows per second, and microseconds of CPU of this event loop for each row. `calls`: a method of each rank."""
    stream = TrajectoryStream()
    loader = LearnerLoader(stream, micro_batch_tokens=2 * BATCH * TOKENS)

    async def groups() -> AsyncIterator[list[FinishedGroup]]:
        polls = [worker.poll.options(num_returns=4).remote() for _ in range(UNDER_WAY)]
        for number in range(rows // BATCH):
            outcomes, *stored = polls.pop(0)
            if number + UNDER_WAY < rows // BATCH:
                polls.append(worker.poll.options(num_returns=4).remote())
            yield receive(stream, located(await outcomes, *stored))

    under_way: list[asyncio.Future[list[int]]] = []
    began, cpu = time.perf_counter(), time.thread_time()
    async with aclosing(loader.stream_step(groups())) as micro_batches:
        async for micro_batch in micro_batches:
            shares = plan(micro_batch)
            under_way.append(asyncio.gather(*(call.remote(share) for call, share in zip(calls, shares, strict=True))))
            if len(under_way) > UNDER_WAY:
                await under_way.pop(0)
    await asyncio.gather(*under_way)
    wall, used = time.perf_counter() - began, time.thread_time() - cpu
    assert stream.counts() == {"produced": rows, "consumed": rows, "waiting": 0}
    return rows / wall, 1e6 * used / rows


async def control_plane_us(rows: int) -> float:
    """Microseconds of CPU for each row: metadata read, put, taken in micro-batches, planned, the plan pickled."""
    ended, *_ = hand_in([trajectory(str(number), "g") for number in range(BATCH)])
    sent = [
        pickle.dumps([_renamed(each, number) for number, each in enumerate(ended, first)])
        for first in range(0, rows, BATCH)
    ]
    stream = TrajectoryStream()
    loader = LearnerLoader(stream, micro_batch_tokens=2 * BATCH * TOKENS)

    async def groups() -> AsyncIterator[list[FinishedGroup]]:
        for number, batch in enumerate(sent):
            yield receive(stream, located(pickle.loads(batch), f"tokens {number}", None, None))

    cpu = time.thread_time()
    async with aclosing(loader.stream_step(groups())) as micro_batches:
        async for micro_batch in micro_batches:
            for share in plan(micro_batch):
                pickle.dumps(share)
    return 1e6 * (time.thread_time() - cpu) / rows


def hand_in_us(rows: int) -> float:
    """Microseconds of CPU of a worker for each episode that it hands in, the line of the log included."""
    made = [trajectory(str(number), "g") for number in range(rows)]
    cpu = time.thread_time()
    hand_in(made)
    return 1e6 * (time.thread_time() - cpu) / rows


async def measure_rows(rows: int, repeats: int, peer: Callable[[], float] | None) -> dict[str, list[float]]:
    names = ("rows_per_s", "loop_us", "control_us", "hand_in_us", "fetched_per_s", "peer_per_s")
    figures: dict[str, list[float]] = {name: [] for name in names}
    async with local_ray(RayConfig(num_cpus=4)):
        actor: Any = ray.remote(num_cpus=0)
        worker, ranks = actor(Worker).remote(), [actor(Rank).remote() for _ in range(2)]
        train, fetch = [rank.train for rank in ranks], [rank.fetch for rank in ranks]
        await into_two_ranks(worker, train, 4 * BATCH)  # warms up
        await into_two_ranks(worker, fetch, 4 * BATCH)
        for _ in range(repeats):
            rate, loop_us = await into_two_ranks(worker, train, rows)
            figures["rows_per_s"].append(rate)
            figures["loop_us"].append(loop_us)
            if peer is not None:
                figures["fetched_per_s"].append((await into_two_ranks(worker, fetch, PEER_ROWS))[0])
                figures["peer_per_s"].append(await asyncio.to_thread(peer))
    for _ in range(repeats):
        figures["control_us"].append(await control_plane_us(rows))
        figures["hand_in_us"].append(hand_in_us(4 * BATCH))
    return figures


@contextmanager
def transfer_queue(folder: Path) -> Iterator[Callable[[], float] | None]:
    """Yield what measures the peer's rows per second once; None, with a line that says why, if it cannot run."""
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
        Path(paths["purelib"], "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*install, f"transferqueue=={PEER_VERSION}"], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        print(f"{PEER} could not be installed: {done.stderr.strip()[-400:]}", file=sys.stderr)
        yield None
        return
    run = [str(python), str(HERE / "stream_peer.py"), str(PEER_ROWS), str(TOKENS), str(BATCH)]
    with (
        tempfile.TemporaryDirectory() as empty,  # so that it imports nothing of this folder
        subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=empty) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(PEER_TIMEOUT_S, process.kill)
        limit.daemon = True
        limit.start()
        answers, questions = process.stdout, process.stdin

        def measure() -> float:
            questions.write("\n")
            questions.flush()
            return float(answers.readline())

        if any(line == "ready\n" for line in answers):
            yield measure
        else:
            print(f"{PEER} could not be measured: it ended with status {process.wait()}", file=sys.stderr)
            yield None


# A slow judge


class SlowJudge:
    """Gives 1 to every trajectory after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        await asyncio.sleep(self._seconds)
        return [1.0] * len(trajectories)


class SleepingFleet:
    """Episodes that only take time: 3 to 9 s at `scale` 1."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._random = random.Random(0)
        self.version = 0
        self.turns = TurnBook()

    async def submit(
        self, episodes: Sequence[EpisodeSpec], receive: Callable[[FinishedEpisode | EpisodeFailure], None]
    ) -> None:
        for spec in episodes:
            made = replace(trajectory(spec.episode_id, spec.group_id, 120), task=spec.task)
            made.versions[made.policy_mask] = self.version
            delay_s = self._scale * self._random.uniform(3, 9)
            asyncio.get_running_loop().call_later(delay_s, receive, finished_episode(made))

    async def cancel(self, episode_ids: Iterable[str]) -> None:
        pass


class NoFiles:
    def write(self, step: int, outcome: Any) -> None:
        pass

    def write_line(self, step: int, line: bytes) -> None:
        pass

    def write_dropped(self, step: int, group: Any) -> None:
        pass

    def sync(self) -> None:
        pass


async def steps_s(scale: float, judge_s: float, logs: Path) -> float:
    """Seconds of STEPS steps at `async_ratio` 1, after two that fill the pipeline."""
    stages = []
    if judge_s:
        entry = f"{HERE / 'stream.py'}:SlowJudge"
        stages = [StageConfig(name="slow", entry_point=entry, kwargs={"seconds": judge_s}, workers=64)]
    scheduler = {"async_ratio": 1.0, "groups_per_step": 4, "group_size": 4}
    config = load_config(
        {"model": {"path": "tiny"}, "envs": [{"id": "Made-v0"}], "scheduler": scheduler, "stages": stages},
    )
    stream, fleet = TrajectoryStream(stage_consumers(stages)), SleepingFleet(scale)
    tasks = SeedTasks("Made-v0", {}, (0, 99), seed=0)
    rollout = Rollout(config, fleet, tasks, NoFiles(), stream)  # type: ignore[arg-type]
    loader = LearnerLoader(stream, micro_batch_tokens=10_000)
    began = 0.0
    async with open_stages(stages, stream, logs / "stages.jsonl"), rollout:
        for step in range(2 + STEPS):
            if step == 2:
                began = time.perf_counter()
            async with aclosing(loader.stream_step(rollout.groups_for_step())) as micro_batches:
                async for micro_batch in micro_batches:
                    await asyncio.sleep(scale * LEARNER_STEP_S / 4 * len(micro_batch))
            await rollout.version_advanced(step + 1)
            fleet.version = step + 1
            rollout.published(step + 1)
        return time.perf_counter() - began


async def judge_hidden(scale: float) -> float:
    """Share of the judge's time that is hidden behind other work."""
    with tempfile.TemporaryDirectory() as logs:
        without = await steps_s(scale, 0.0, Path(logs))
        slow = await steps_s(scale, scale * JUDGE_S, Path(logs))
    return 1 - (slow - without) / (STEPS * scale * JUDGE_S)


# Overlap with a real learner


@dataclass
class Timeline:
    """When groups came and when the learner worked, in seconds from the beginning of the step."""

    arrivals_s: list[float] = field(default_factory=list)
    work: list[tuple[float, float, int]] = field(default_factory=list)
    """(begin, end, groups) of each `accumulate`."""
    step_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @contextmanager
    def working(self, groups: int) -> Iterator[None]:
        begin = time.perf_counter() - self.began
        yield
        self.work.append((begin, time.perf_counter() - self.began, groups))


def make_group(number: int, replicas: int = 8) -> Group:
    """A prompt of 60 tokens that replicas share and 60 to 180 of their own."""
    random = np.random.default_rng(number)
    task, prompt = Task(f"t{number}", "Made-v0", number), random.integers(3, 90, 60)
    members = []
    for replica in range(replicas):
        tokens = np.concatenate([prompt, random.integers(3, 90, random.integers(60, 180))]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        members.append(
            Trajectory(
                episode_id=f"g{number}-r{replica}",
                group_id=f"g{number}",
                task=task,
                token_ids=tokens,
                policy_mask=mask,
                logprobs=np.where(mask, -3.0, 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turns=(),
                messages=(),
                reward=float(random.random()),
                success=None,
                end="terminated",
                prompt_length=len(prompt),
                started_s=0.0,
                finished_s=1.0,
            )
        )
    return Group(f"g{number}", task, tuple(members))


async def arriving(
    groups: list[FinishedGroup], delays_s: list[float], timeline: Timeline
) -> AsyncIterator[list[FinishedGroup]]:
    for group, delay_s in sorted(zip(groups, delays_s, strict=True), key=lambda pair: pair[1]):
        await asyncio.sleep(max(0.0, timeline.began + delay_s - time.perf_counter()))
        timeline.arrivals_s.append(delay_s)
        yield [group]


async def whole_batch_step(learner: FsdpLearner, groups: list[FinishedGroup], delays_s: list[float]) -> Timeline:
    """Everything is handed over when the last group has come."""
    timeline = Timeline()
    batch = [group async for several in arriving(groups, delays_s, timeline) for group in several]
    with timeline.working(len(batch)):
        await learner.accumulate(batch)
    await learner.finish_step()
    timeline.step_s = time.perf_counter() - timeline.began
    return timeline


async def streamed_step(learner: FsdpLearner, groups: list[FinishedGroup], delays_s: list[float]) -> Timeline:
    """What a run does: the learner takes micro-batches while other groups are still on their way."""
    timeline = Timeline()
    stream = TrajectoryStream()
    loader = LearnerLoader(stream, micro_batch_tokens=MICRO_BATCH_TOKENS)

    async def put() -> AsyncIterator[list[FinishedGroup]]:
        async for several in arriving(groups, delays_s, timeline):
            for group in several:
                for member in group.trajectories:
                    stream.put(member.episode_id, group.group_id, member, {"reward": member.reward})
            yield several

    async with aclosing(loader.stream_step(put())) as micro_batches:
        async for micro_batch in micro_batches:
            with timeline.working(len(micro_batch)):
                await learner.accumulate(micro_batch)
    await learner.finish_step()
    timeline.step_s = time.perf_counter() - timeline.began
    return timeline


async def overlap(num_groups: int, repeats: int) -> tuple[list[Timeline], list[Timeline]]:
    """Steps in turns, whole batch and streamed, each pair with the same groups and delays."""
    groups = [finished_group(make_group(number)) for number in range(num_groups)]
    config = LearnerConfig(device="cpu", threads=1, micro_batch_tokens=MICRO_BATCH_TOKENS, learning_rate=1e-6)
    learner = FsdpLearner(resolve_model("tiny"), config, async_ratio=10_000)
    try:
        await learner.start()
        compute_s = min([(await whole_batch_step(learner, groups, [0.0] * num_groups)).step_s for _ in range(2)])
        whole, streamed = [], []
        for repeat in range(repeats):
            tail = np.random.default_rng(repeat).lognormal(0.0, 1.0, num_groups)
            delays_s = (tail / tail.max() * compute_s).tolist()
            whole.append(await whole_batch_step(learner, groups, delays_s))
            streamed.append(await streamed_step(learner, groups, delays_s))
        return whole, streamed
    finally:
        await learner.close()


def median_pair(whole: list[Timeline], streamed: list[Timeline]) -> tuple[Timeline, Timeline]:
    """Of steps with the same groups and arrivals, the pair whose gain is the median."""
    pairs = sorted(zip(whole, streamed, strict=True), key=lambda pair: pair[0].step_s / pair[1].step_s)
    return pairs[len(pairs) // 2]


def spread(name: str, unit: str, values: Sequence[float], target: str, reached: Callable[[float], bool]) -> Figure:
    """The median, with its target."""
    middle = statistics.median(values)
    return Figure(name, unit, middle, min(values), max(values), None, target, reached(middle) if target else None)


def against_peer(ours: Sequence[float], peer: Sequence[float]) -> Figure:
    """The medians; `low` and `high` are those of the pairs that were measured one after the other."""
    ratios = [one / other for one, other in zip(ours, peer, strict=True)]
    name = f"rows fetched by 2 processes, against {PEER} (median of pairs {statistics.median(ratios):.1f})"
    medians = statistics.median(ours), statistics.median(peer)
    return Figure(name, "rows/s", medians[0], min(ratios), max(ratios), medians[1], "≥ 5 ×", min(ratios) >= 5)


def streamed_step_figure(whole: list[Timeline], streamed: list[Timeline]) -> Figure:
    gains = [one.step_s / other.step_s for one, other in zip(whole, streamed, strict=True)]
    one, other = median_pair(whole, streamed)
    name = "step time, streamed against whole batch"
    return Figure(name, "s", other.step_s, min(gains), max(gains), one.step_s, "≥ 1.3 ×", min(gains) >= 1.3)


def markdown(figures: list[Figure], load: float, repeats: int) -> str:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    lines = [
        f"Rows of {TOKENS} tokens in 4 arrays (19.5 KB), handed in {BATCH} at a time. {machine()},",
        f"load {load:.1f} at the start, {repeats} repetitions.",
        "",
        "| figure | unit | ours | compared with | from - to | target | reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures:
        ratio = " ×" if row.peer is not None else ""
        reached = {True: "yes", False: "no", None: ""}[row.reached]
        cells = [row.name, row.unit, cell(row.value), cell(row.peer)]
        cells += [f"{cell(row.low)} - {cell(row.high)}{ratio}", row.target, reached]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Ranks also make training sequences of their rows. Beside {PEER} {PEER_VERSION} both do the same, in turns:",
        "one process hands in the rows, in batches of the same size, and two fetch their arrays.",
        "From - to are the extremes of all repetitions, of a comparison those of its pairs; a target of a comparison",
        "is reached if the smallest pair reaches it. Step times: of all pairs with the same groups and arrivals the",
        "one of median gain, with an FSDP learner (tiny model, one thread); the last group arrives when the learner",
        "alone could have ended.",
    ]
    return "\n".join(lines) + "\n"


async def measure(
    quick: bool, peer: Callable[[], float] | None
) -> tuple[list[Figure], int, list[Timeline], list[Timeline]]:
    rows, repeats = (1024, 2) if quick else (8192, REPEATS)
    with long_lived_process():  # as in the driver and the workers of a run
        ours = await measure_rows(rows, repeats, peer)
    hidden = await judge_hidden(0.05 if quick else 1.0)
    async with local_ray(RayConfig(num_cpus=4)):
        whole, streamed = await overlap(8 if quick else 16, 1 if quick else REPEATS)
    figures = [
        spread("rows into 2 ranks", "rows/s", ours["rows_per_s"], "≥ 5,000", lambda value: value >= 5000),
        *([against_peer(ours["fetched_per_s"], ours["peer_per_s"])] if peer is not None else []),
        spread("driver, table and plan", "µs/row", ours["control_us"], "≤ 20", lambda value: value <= 20),
        spread("driver, event loop with Ray's calls", "µs/row", ours["loop_us"], "", bool),
        spread("worker, an episode handed in", "µs/row", ours["hand_in_us"], "", bool),
        spread(f"judge of {JUDGE_S:g} s hidden at async_ratio 1", "", [hidden], "≥ 0.95", lambda value: value >= 0.95),
        streamed_step_figure(whole, streamed),
    ]
    return figures, repeats, whole, streamed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, without the peer; under a minute")
    parser.add_argument("--json", action="store_true", help="one object of figures on standard output")
    parser.add_argument("--peer-venv", type=Path, help=f"keep {PEER}'s virtual environment here")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        peer = None
        if not options.quick:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-flash-peer-"))
            peer = stack.enter_context(transfer_queue(options.peer_venv or Path(folder)))
        figures, repeats, whole, streamed = asyncio.run(measure(options.quick, peer))
    text = markdown(figures, load, repeats)
    print(text, file=sys.stderr if options.json else sys.stdout)
    summary = {row.name: {name: value for name, value in asdict(row).items() if name != "name"} for row in figures}
    if options.json:
        print(json.dumps(summary))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "stream.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        (RESULTS / "stream.md").write_text(f"# The trajectory stream\n\n{text}")
        one, other = median_pair(whole, streamed)
        draw(one.arrivals_s, one.work, one.step_s, other.work, other.step_s, RESULTS / "stream.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
