"""Weights on their way from the learner to a server: how long generation stops, and how long the learner waits.

    python benchmarks/weights.py [--quick] [--json]

A real vLLM server on CPU that generates for 16 clients all the time, a real FSDP learner that steps all the time, and
the run's own publisher between them. Three ways are measured, one after another:

- whole model: every tensor travels, and is made ready beside the old ones while the server generates;
- whole model, made ready in the pause: the same without that (what a plain reload does);
- adapters only: LoRA of rank 16, of which the factors alone travel.

The plain copy is a memcpy of as many bytes as the whole model has, between memory that was touched before.
Prints a table (to standard error with --json) and, unless --quick (tiny model), writes results/weights.json and .md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine

from roll_flash.config.sections.learner import LearnerConfig, LoraConfig
from roll_flash.config.tree import InferenceConfig, RayConfig, WeightsConfig
from roll_flash.inference.client.token_client import open_client
from roll_flash.inference.open import open_engine
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.ray.local_ray import local_ray
from roll_flash.types import Group, SamplingParams, Task, Trajectory
from roll_flash.weight_sync.parity import FLOAT32_THRESHOLD, load_probe
from roll_flash.weight_sync.publication import Publisher

RESULTS = Path(__file__).parent / "results"
MAX_MODEL_LEN = 1024
CLIENTS, NEW_TOKENS = 16, 128
PROMPT_TOKENS, ANSWER_TOKENS, REPLICAS = 90, 37, 8
COPIES = 7


@dataclass
class Way:
    """One way to publish, and what was seen, a value for each update."""

    name: str
    lora: LoraConfig = field(default_factory=LoraConfig)
    prepares: bool = True
    paused_s: list[float] = field(default_factory=list)
    live_s: list[float] = field(default_factory=list)
    learner_waits_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    logprob_difference: list[float] = field(default_factory=list)
    mib: float = 0.0
    requests_across_updates: int = 0
    tokens_lost: int = 0


@dataclass(frozen=True)
class Row:
    """A line of the table. `copies`: the pause in plain copies of the model's bytes."""

    way: str
    mib: float
    paused_ms: float
    copies: float
    live_s: float
    learner_waits_ms: float
    learner_waits_share: float
    step_s: float
    requests_across_updates: int
    tokens_lost: int
    logprob_difference: float

    @classmethod
    def of(cls, way: Way, copy_s: float) -> Row:
        paused, waits, step = map(statistics.median, (way.paused_s, way.learner_waits_s, way.step_s))
        return cls(
            way.name,
            way.mib,
            paused * 1e3,
            paused / copy_s,
            statistics.median(way.live_s),
            waits * 1e3,
            waits / (step + waits),
            step,
            way.requests_across_updates,
            way.tokens_lost,
            max(way.logprob_difference),
        )


def plain_copy_s(num_bytes: int) -> float:
    """Median time of copying so many bytes with one thread, into pages that are there already."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    for _ in range(COPIES):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return statistics.median(times)


def step_groups(count: int, version: int) -> list[Group]:
    """As many groups as a step takes, of the size of the quickstart's episodes."""
    random = np.random.default_rng(version)
    groups = []
    for number in range(count):
        prompt = random.integers(5, 100, PROMPT_TOKENS)
        name = f"v{version}-g{number}"
        members = tuple(_trajectory(name, replica, prompt, version, random) for replica in range(REPLICAS))
        groups.append(Group(name, members[0].task, members))
    return groups


def _trajectory(group: str, replica: int, prompt: Any, version: int, random: np.random.Generator) -> Trajectory:
    tokens = np.concatenate([prompt, random.integers(5, 100, ANSWER_TOKENS)]).astype(np.int32)
    mask = np.arange(len(tokens)) >= PROMPT_TOKENS
    return Trajectory(
        episode_id=f"{group}-r{replica}",
        group_id=group,
        task=Task(group, "Made-v0", 0),
        token_ids=tokens,
        policy_mask=mask,
        logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=(),
        messages=(),
        reward=float(replica % 2),
        success=None,
        end="terminated",
        prompt_length=PROMPT_TOKENS,
        started_s=0.0,
        finished_s=1.0,
    )


async def generate_for_ever(engine: ServerEngine, prompt: list[int], way: Way, number: int) -> None:
    """One client: a turn after the other. Checks that each has all its tokens and versions that only grow."""
    client = open_client(replace(engine.client_spec(), stream_every=None))
    try:
        turn = 0
        while True:
            turn += 1
            sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
            made = await client.generate(prompt, sampling, request_id=f"c{number}-{turn}", timeout_s=300)
            complete = made.finish_reason == "stop" or len(made.token_ids) == NEW_TOKENS
            assert (np.diff(made.versions) >= 0).all(), "a token came from older weights than the one before"
            assert not client.metrics()["asked_again"], "a request was begun anew"
            way.tokens_lost += 0 if complete else NEW_TOKENS - len(made.token_ids)
            way.requests_across_updates += len(set(made.versions.tolist())) > 1
    finally:
        await client.close()


@asynccontextmanager
async def busy(engine: ServerEngine, prompt: list[int], way: Way) -> AsyncIterator[None]:
    clients = [asyncio.create_task(generate_for_ever(engine, prompt, way, number)) for number in range(CLIENTS)]
    try:
        yield
        for client in clients:
            if client.done():
                client.result()
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def measure(ways: list[Way], engine: ServerEngine, folder: Path, groups: int, updates: int, first: int) -> int:
    """Several ways with one learner, whose versions begin after `first`. Returns its last version."""
    probe = load_probe(folder, WeightsConfig().parity_text, 128)
    config = LearnerConfig(lora=ways[0].lora, step_timeout_s=600)
    learner = FsdpLearner(folder, config, async_ratio=10, run="benchmark")
    live: dict[int, float] = {}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(learner.close)
        await learner.start()
        learner._version = first  # the server goes on from the learner before
        publisher = Publisher(
            learner,
            engine,
            WeightsConfig(),
            probe=probe,
            threshold=FLOAT32_THRESHOLD,
            on_published=lambda version: live.update({version: time.monotonic()}),
        )
        stack.push_async_callback(publisher.close)
        await learner.accumulate(step_groups(1, first))  # the first pass pays for memory and is not counted
        await learner.abandon_step()
        if first == 0:
            await publisher.check()  # as a run does before its first step: all of the probe, later a few of its texts
        for way in ways:
            print(f"measuring: {way.name}", file=sys.stderr)
            for server in engine._servers:
                server._launcher = replace(server._launcher, prepares_weights=way.prepares)
            async with busy(engine, [int(token) for token in probe.texts[0]], way):
                for _ in range(updates):
                    await one_update(way, learner, publisher, groups, live)
        return learner.version


async def one_update(way: Way, learner: FsdpLearner, publisher: Publisher, groups: int, live: dict[int, float]) -> None:
    started = time.monotonic()
    for group in step_groups(groups, learner.version):
        await learner.accumulate([group])
    result = await learner.finish_step()
    ended = time.monotonic()
    await publisher.begin()
    way.step_s.append(ended - started)
    way.learner_waits_s.append(time.monotonic() - ended)
    # The learner is free from here on; the next step would begin, and so it does.
    await learner.accumulate(step_groups(1, learner.version))
    publication = await publisher.wait_published()
    await learner.abandon_step()
    assert publication is not None
    assert not result.skipped
    way.paused_s.append(publication.paused_s)
    way.live_s.append(live[publication.version] - ended)
    way.logprob_difference.append(publication.parity.largest)
    way.mib = publication.num_bytes / 2**20


async def measure_all(model: str, groups: int, updates: int) -> tuple[list[Row], float, float]:
    folder = resolve_model(model)
    ways = [
        Way("whole model"),
        Way("whole model, made ready in the pause", prepares=False),
        Way("adapters only", lora=LoraConfig(rank=16)),
    ]
    config = InferenceConfig(kv_cache_gib=1.0, threads=1)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-flash-weights-")))
        await stack.enter_async_context(local_ray(RayConfig()))
        engine = open_engine(config, model_folder=folder, max_model_len=MAX_MODEL_LEN, logs=logs)
        stack.push_async_callback(engine.close)
        await engine.start()
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        copy_s = plain_copy_s(num_bytes)
        last = await measure(ways[:2], engine, folder, groups, updates, 0)
        await measure(ways[2:], engine, folder, groups, updates, last)
    return [Row.of(way, copy_s) for way in ways], copy_s, num_bytes / 2**20


def markdown(rows: list[Row], model: str, copy_s: float, mib: float, load: float) -> str:
    header = ["", *(row.way for row in rows), "target"]
    lines = [
        f"{model}, {mib:,.3g} MiB in float32; vLLM on CPU with one thread, {CLIENTS} requests in flight; one learner "
        f"rank with one thread. {machine()}, load {load:.1f} at the start. "
        f"A plain copy of the model: {copy_s * 1e3:.3g} ms.",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
    ]
    figures: list[tuple[str, str, str]] = [
        ("published, MiB", "{0.mib:.3g}", ""),
        ("generation paused, ms", "{0.paused_ms:.3g}", ""),
        ("the same in plain copies", "{0.copies:.2f}", "≤ 3"),
        ("learner waits, ms", "{0.learner_waits_ms:.3g}", ""),
        ("share of the step", "{0.learner_waits_share:.1%}", "≤ 5 %"),
        ("learner step, s", "{0.step_s:.3g}", ""),
        ("end of step to weights live, s", "{0.live_s:.3g}", ""),
        ("requests that lived through an update", "{0.requests_across_updates}", "> 0"),
        ("tokens lost", "{0.tokens_lost}", "0"),
        ("largest difference of log-probabilities", "{0.logprob_difference:.2g}", "≤ 0.001"),
    ]
    for name, shape, target in figures:
        lines.append(f"| {name} | {' | '.join(shape.format(row) for row in rows)} | {target} |")
    lines += [
        "",
        f"The learner's share of waiting is high because a step is small here: {rows[0].step_s:.3g} s.",
        "Figures are medians over the updates; the difference is the largest. Paused: from the request to pause to the",
        "answer to resume. Live: when the server has the weights and the parity probe has agreed. While weights are",
        "loaded beside those in use, server and learner share the cores with that work, as in a run.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny model, two updates each; under a minute")
    parser.add_argument("--json", action="store_true", help="one object of figures on standard output")
    parser.add_argument("--groups", type=int, default=2, help=f"groups of {REPLICAS} in a learner step (default 2)")
    parser.add_argument("--updates", type=int, default=3, help="updates of each way (default 3)")
    options = parser.parse_args()
    model = "tiny" if options.quick else "smollm2-135m"
    load = os.getloadavg()[0]
    rows, copy_s, mib = asyncio.run(measure_all(model, options.groups, options.updates))
    text = markdown(rows, model, copy_s, mib, load)
    print(text, file=sys.stderr if options.json else sys.stdout)
    summary = {"model": model, "machine": machine(), "model_mib": mib, "plain_copy_ms": copy_s * 1e3}
    figures: dict[str, Any] = summary | {row.way: asdict(row) for row in rows}
    if options.json:
        print(json.dumps(figures))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "weights.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        (RESULTS / "weights.md").write_text(f"# Weight publication\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
