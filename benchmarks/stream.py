"""The trajectory stream: put and get beside TransferQueue, a starved consumer, and overlap with a real learner.

    python benchmarks/stream.py [--quick] [--json] [--peer-venv FOLDER]

Both systems move the same rows: 1,500 tokens in four ragged fields, 19.5 KB. Like is compared with like: our two Ray
shards with TransferQueue as it comes (two storage units in Ray actors), which runs in a virtual environment of its own
that shares this one's torch and Ray and is kept in FOLDER if that is given. The store in this process, which a run on
one node uses, stands beside them and is compared with nothing: it moves no byte. Everything is repeated; a gain is that
of the medians, its interval from our slowest against their fastest to our fastest against their slowest.

Overlap: the same groups arrive with the same long-tailed delays at the same FSDP learner (tiny model, one CPU thread).
Once all are handed over when the last has come, once they stream. The delays are scaled so that the last group comes
when the learner alone would have needed all that time: waiting and computing cost the same, as in a balanced run.

Prints a table (to standard error with --json) and, unless --quick, writes results/stream.json, .md and .png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from machine import machine
from stream_plots import draw

from roll_flash.config.learner import LearnerConfig
from roll_flash.config.tree import RayConfig
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.local_ray import local_ray
from roll_flash.stream import (
    Consumer,
    LearnerLoader,
    MemoryStore,
    Row,
    Sequential,
    Store,
    TrajectoryStream,
    learner_consumer,
)
from roll_flash.stream.ray_store import RayStore
from roll_flash.types import Group, Task, Trajectory

PEER, PEER_VERSION = "TransferQueue", "0.1.11"
HERE = Path(__file__).parent
RESULTS = HERE / "results"
TOKENS, BATCH = 1500, 8
REPEATS = 5
MICRO_BATCH_TOKENS = 4096


Repeated = dict[str, list[float]]
"""A figure's name to what each repetition gave."""


@dataclass(frozen=True)
class Gain:
    """Of the medians, and between which figures it is by the extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, better: Sequence[float], worse: Sequence[float]) -> Gain:
        """Of figures that are good when they are large."""
        middle = statistics.median(better) / statistics.median(worse)
        return cls(middle, min(better) / max(worse), max(better) / min(worse))


@dataclass(frozen=True)
class Figure:
    """One row of the table. `gain` is that of the Ray shards over the peer, or of streaming over the whole batch."""

    name: str
    unit: str
    in_process: float
    ray_shards: float | None = None
    peer: float | None = None
    target: str = ""
    gain: Gain | None = None
    reached: bool | None = None


def trajectory_row() -> Row:
    columns = {
        "token_ids": np.arange(TOKENS, dtype=np.int32),
        "logprobs": np.random.default_rng(0).random(TOKENS, np.float32),
        "versions": np.zeros(TOKENS, np.int32),
        "policy_mask": np.ones(TOKENS, np.bool_),
    }
    return Row(columns, tokens=TOKENS)


async def put_and_get(store: Store, rows: int, repeats: int) -> Repeated:
    await _put_and_get(store, 50)  # warm up
    several = [await _put_and_get(store, rows) for _ in range(repeats)]
    return {name: [figures[name] for figures in several] for name in several[0]}


async def _put_and_get(store: Store, rows: int) -> dict[str, float]:
    """The same calls as in `stream_peer.py`, one after the other and 16 side by side."""
    row = trajectory_row()
    names = tuple(row.columns)
    consumers = [Consumer("one", names, Sequential(1)), Consumer("batch", names, Sequential(BATCH))]
    stream = TrajectoryStream(consumers, store)
    figures = {}
    began = time.perf_counter()
    for _ in range(rows):
        await stream.put([row])
    figures["put_per_s"] = rows / (time.perf_counter() - began)
    for consumer, name in (("one", "get_one_per_s"), ("batch", "get_batch_per_s")):
        began = time.perf_counter()
        left = rows
        while left > 0:
            batch = await stream.next_batch(consumer)
            assert batch is not None
            left -= len(batch)
            await stream.release(batch)
        figures[name] = rows / (time.perf_counter() - began)
    figures["put_side_by_side_per_s"] = await put_side_by_side(stream, row, rows)
    await stream.drop_partition(0, "measured")
    return figures


async def put_side_by_side(stream: TrajectoryStream, row: Row, rows: int) -> float:
    limit = asyncio.Semaphore(16)

    async def put() -> None:
        async with limit:
            await stream.put([row])

    began = time.perf_counter()
    await asyncio.gather(*(put() for _ in range(rows)))
    return rows / (time.perf_counter() - began)


async def starved_put_s(store: Store, puts: int = 50) -> list[float]:
    """Seconds of each put while consumers wait for a group that never becomes complete."""
    row = trajectory_row()
    starving = Consumer("starved", (*row.columns, "reward"), Sequential(1))
    stream = TrajectoryStream([starving], store)
    waiting = [asyncio.create_task(stream.next_batch("starved")) for _ in range(4)]
    await asyncio.sleep(0.05)
    took = []
    for _ in range(puts):
        began = time.perf_counter()
        await stream.put([row])
        took.append(time.perf_counter() - began)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return took


def transfer_queue(rows: int, repeats: int, folder: Path) -> Repeated:
    """The peer's figures; empty, with a line that says why, if it cannot be installed or run."""
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
        Path(paths["purelib"], "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*install, f"transferqueue=={PEER_VERSION}"], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode == 0:
        run = [str(python), str(HERE / "stream_peer.py"), str(rows), str(TOKENS), str(BATCH), str(repeats)]
        with tempfile.TemporaryDirectory() as empty:  # so that it imports nothing of this folder
            done = subprocess.run(run, capture_output=True, text=True, timeout=1800, check=False, cwd=empty)
    if done.returncode:
        print(f"{PEER} could not be measured: {done.stderr.strip()[-400:]}", file=sys.stderr)
        return {}
    figures: Repeated = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


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


async def arriving(groups: list[Group], delays_s: list[float], timeline: Timeline) -> AsyncIterator[list[Group]]:
    for group, delay_s in sorted(zip(groups, delays_s, strict=True), key=lambda pair: pair[1]):
        await asyncio.sleep(max(0.0, timeline.began + delay_s - time.perf_counter()))
        timeline.arrivals_s.append(delay_s)
        yield [group]


async def whole_batch_step(learner: FsdpLearner, groups: list[Group], delays_s: list[float]) -> Timeline:
    """Everything is handed over when the last group has come."""
    timeline = Timeline()
    batch = [group async for several in arriving(groups, delays_s, timeline) for group in several]
    with timeline.working(len(batch)):
        await learner.accumulate(batch)
    await learner.finish_step()
    timeline.step_s = time.perf_counter() - timeline.began
    return timeline


async def streamed_step(learner: FsdpLearner, groups: list[Group], delays_s: list[float]) -> Timeline:
    """What a run does: the learner takes micro-batches while other groups are still on their way."""
    timeline = Timeline()
    loader = LearnerLoader(TrajectoryStream([learner_consumer(MICRO_BATCH_TOKENS)]))
    async with aclosing(loader.stream_step(arriving(groups, delays_s, timeline))) as micro_batches:
        async for micro_batch in micro_batches:
            with timeline.working(len(micro_batch.groups)):
                await learner.accumulate(micro_batch.groups)
    await learner.finish_step()
    timeline.step_s = time.perf_counter() - timeline.began
    return timeline


async def overlap(num_groups: int, repeats: int) -> tuple[list[Timeline], list[Timeline]]:
    """Steps in turns, whole batch and streamed, each pair with the same groups and delays."""
    groups = [make_group(number) for number in range(num_groups)]
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


async def measure_ours(quick: bool) -> tuple[dict[str, Repeated], list[Timeline], list[Timeline]]:
    rows, repeats = (200, 1) if quick else (400, REPEATS)
    ours: dict[str, Repeated] = {}
    async with local_ray(RayConfig(num_cpus=4)):
        shards = await RayStore.start(2)
        try:
            for name, store in (("in_process", MemoryStore()), ("ray_shards", shards)):
                ours[name] = await put_and_get(store, rows, repeats)
                ours[name]["starved_put_s"] = await starved_put_s(store)
        finally:
            await shards.close()
        whole, streamed = await overlap(8 if quick else 16, repeats)
    return ours, whole, streamed


LABELS = {
    "put_per_s": ("put, one writer", 5),
    "put_side_by_side_per_s": ("put, 16 writers", 5),
    "get_one_per_s": ("get, one row at a time", 2),
    "get_batch_per_s": (f"get, {BATCH} rows at a time", 2),
}


def throughput(name: str, ours: dict[str, Repeated], peer: Repeated) -> Figure:
    here, shards, other = ours["in_process"][name], ours["ray_shards"][name], peer.get(name)
    label, at_least = LABELS[name]
    gain = Gain.of(shards, other) if other else None
    return Figure(
        label,
        "rows/s",
        statistics.median(here),
        statistics.median(shards),
        statistics.median(other) if other else None,
        f"≥ {at_least} × {PEER}",
        gain,
        gain.low >= at_least if gain else None,
    )


def starved_put(ours: dict[str, Repeated], peer: Repeated) -> Figure:
    """Ours is the slowest put of all, the peer's the median."""
    here, shards = (max(ours[name]["starved_put_s"]) * 1e3 for name in ("in_process", "ray_shards"))
    other = statistics.median(peer["starved_put_s"]) * 1e3 if peer else None
    return Figure("slowest put beside starved consumers", "ms", here, shards, other, "≤ 20 ms", None, shards <= 20)


def median_pair(whole: list[Timeline], streamed: list[Timeline]) -> tuple[Timeline, Timeline]:
    """Of steps with the same groups and arrivals, the pair whose gain is the median."""
    pairs = sorted(zip(whole, streamed, strict=True), key=lambda pair: pair[0].step_s / pair[1].step_s)
    return pairs[len(pairs) // 2]


def streamed_step_figure(whole: list[Timeline], streamed: list[Timeline]) -> Figure:
    gains = [one.step_s / other.step_s for one, other in zip(whole, streamed, strict=True)]
    one, other = median_pair(whole, streamed)
    gain = Gain(statistics.median(gains), min(gains), max(gains))
    name = "step time, streamed (in process) against whole batch (last column)"
    return Figure(name, "s", other.step_s, None, one.step_s, "≥ 1.3 × whole batch", gain, gain.low >= 1.3)


def markdown(figures: list[Figure], load: float, repeats: int) -> str:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    lines = [
        f"Rows of {TOKENS} tokens in 4 ragged fields (19.5 KB). {machine()}, load {load:.1f} at the start,",
        f"{repeats} repetitions.",
        "",
        f"| figure | unit | in process | Ray, 2 shards | {PEER} {PEER_VERSION} | target | gain, Ray | reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in figures:
        gain = f"{row.gain.median:.1f} × ({row.gain.low:.1f}–{row.gain.high:.1f})" if row.gain else ""
        reached = {True: "yes", False: "no", None: ""}[row.reached]
        cells = [row.name, row.unit, *map(cell, (row.in_process, row.ray_shards, row.peer)), row.target, gain, reached]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Gains compare actors with actors: our two Ray shards with {PEER}'s two storage units. The store in this",
        "process, which a run on one node uses, moves no byte and is compared with nothing. A put has returned when",
        f"the row can be taken. Get includes releasing the rows; {PEER}'s get leaves them. Its starved put is the",
        "median, ours the slowest of 50. A gain is that of the medians; in brackets are our slowest against their",
        "fastest and the reverse, and a target is reached if the smaller of these reaches it. Step times: of all",
        "pairs with the same groups and arrivals the one of median gain, at an FSDP learner (tiny model, one thread);",
        "the last group comes when the learner alone could have ended.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, without the peer; under a minute")
    parser.add_argument("--json", action="store_true", help="one object of figures on standard output")
    parser.add_argument("--peer-venv", type=Path, help=f"keep {PEER}'s virtual environment here")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    ours, whole, streamed = asyncio.run(measure_ours(options.quick))
    peer: Repeated = {}
    if not options.quick:
        with tempfile.TemporaryDirectory(prefix="roll-flash-peer-") as folder:
            peer = transfer_queue(400, REPEATS, options.peer_venv or Path(folder))
    figures = [throughput(name, ours, peer) for name in LABELS]
    figures += [starved_put(ours, peer), streamed_step_figure(whole, streamed)]
    text = markdown(figures, load, len(whole))
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
