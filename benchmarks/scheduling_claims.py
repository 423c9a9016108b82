"""What is claimed about scheduling, each measured in virtual time by the scheduler that trains.

A claim is a function of a seed and of whether to be quick. It returns a `Measured`: the figure, and rows of which each
is a setting; those where the claim does not hold are rows like the others. `scheduling_seeds.py` repeats it over seeds.
The servers are alike everywhere unless a claim is about them: 8 of them, 60 tokens/s for a sequence that is alone, half
of that in a batch of 65. Where a paper does not say what its machines were, the setting here is ours, and said.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from latencies import ClampedNormal, Mixture, Truncated, fail_slow
from synthetic_load import Constant, Distribution, Normal, SyntheticLoad

from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.planner.simulation.load import Load, LogNormal
from roll_flash.planner.simulation.result import SimulationResult
from roll_flash.planner.simulation.servers import ServerSpec
from roll_flash.planner.simulation.settings import LearnerSpec, SimulationSettings
from roll_flash.planner.simulation.simulate import Simulation

Row = dict[str, Any]
ACTION = Normal(50, 10)
"""Tokens of one action of an agent."""
ALPHAS = [0, 1, 2, 3, 4, 6, 8]


@dataclass
class Measured:
    """One seed of a claim."""

    figure: float
    rows: list[Row]


@dataclass(frozen=True)
class Claim:
    """`note` is made from the rows' means over all seeds."""

    name: str
    setting: str
    unit: str
    target: float
    measure: Callable[[int, bool], Measured]
    note: Callable[[list[Row]], str]
    comparable: bool = True
    """Whether reaching the target says anything: not where the setting that decides is ours."""


def servers(count: int = 8, sequences: int = 128, half_rate_batch: float = 64.0) -> ServerSpec:
    return ServerSpec(count, sequences, 60.0, half_rate_batch)


def simulate(
    load: Load,
    *,
    groups: int,
    size: int,
    slots: int,
    on: ServerSpec | None = None,
    alpha: float = 0,
    extra: int = 0,
    steps: int = 10,
    learner: LearnerSpec | None = None,
    lockstep: bool = False,
    record: bool = False,
    **policy: Any,
) -> SimulationResult:
    chosen = SimulationSettings(
        SchedulerConfig(async_ratio=alpha, groups_per_step=groups, extra_groups=extra, group_size=size, **policy),
        slots,
        on or servers(),
        learner or LearnerSpec(),
        lockstep,
        record,
    )
    return Simulation(chosen, load).run(steps)


def queue_against_batch(seed: int, quick: bool) -> Measured:
    rows = []
    for sigma, signal, steps in ((1.0, 0.5, 48), (1.0, 0.5, 30), (1.0, 1.0, 48), (0.8, 0.5, 48), (0.8, 1.0, 48)):
        load = SyntheticLoad(LogNormal(1000, sigma), signal_rate=signal, seed=seed)
        common: dict[str, Any] = {"groups": 8, "size": 8, "slots": 192, "extra": 16, "drop_groups_without_signal": True}
        common["steps"] = steps // 6 if quick else steps
        plain = simulate(load, mode="batch", **{**common, "extra": 0}).step_s
        batch = simulate(load, mode="batch", **common).step_s
        queue = simulate(load, surplus="cancel", **common).step_s
        rows.append(
            {
                "length": f"lognormal sigma {sigma}",
                "prompts with signal": str(signal),
                "steps": common["steps"],
                "batch without extra (s)": plain,
                "batch (s)": batch,
                "queue (s)": queue,
                "speed-up": batch / queue,
                "speed-up over batch without extra": plain / queue,
                "speed-up over the better batch": min(plain, batch) / queue,
            }
        )
    return Measured(rows[0]["speed-up over the better batch"], rows)


def queue_note(rows: list[Row]) -> str:
    least = min(row["speed-up over the better batch"] for row in rows)
    return (
        "The paper reports 125 -> 37 s (3.4x). The figure is that of the first row, over the faster of two batch "
        "rollouts: with the same 16 extra prompts, and without any. Where all prompts have signal, batch rollout is "
        f"faster without the extra ones. The smallest mean of the rows is {least:.2f}x. The gain comes from "
        "the tail that no step waits for, so it depends on the weight of the tail."
    )


def replication(seed: int, quick: bool) -> Measured:
    rows = []
    load = SyntheticLoad(LogNormal(1000, 0.5), task_sigma=1.0, seed=seed)
    for count, half in ((32, 16.0), (16, 16.0), (8, 16.0), (32, 64.0)):
        on = servers(count, 64, half)
        apart, together = (
            simulate(load, groups=16, size=64, slots=1024, on=on, steps=1 if quick else 4, replicate=replicate).step_s
            for replicate in (True, False)
        )
        rows.append(
            {
                "servers": count,
                "half rate at batch": str(half + 1),
                "one request per prompt (s)": together,
                "replicated (s)": apart,
                "speed-up": together / apart,
            }
        )
    return Measured(statistics.geometric_mean(row["speed-up"] for row in rows), rows)


def replication_note(rows: list[Row]) -> str:
    gains = [row["speed-up"] for row in rows]
    return (
        "The paper reports 162 -> 83 s (1.95x) but not its servers. These four settings are ours, and the figure is "
        f"their geometric mean: {min(gains):.2f}x in the worst of them, {max(gains):.2f}x in the best. "
        "Without replication at most 16 servers can work, and the one with the longest prompt holds 64 of the longest "
        "sequences; where a batch hardly slows a server down, the gain is small."
    )


def environment_asynchrony(seed: int, quick: bool) -> Measured:
    rows = []
    for turns, tokens, latency in (
        (30, 10, ClampedNormal(10, 10)),
        (30, 50, ClampedNormal(10, 10)),
        (10, 50, ClampedNormal(10, 10)),
        (30, 10, Normal(10, 10)),
        (10, 50, Normal(10, 10)),
    ):
        load = SyntheticLoad(Normal(tokens, tokens / 5), latency, turns=turns, seed=seed)
        common: dict[str, Any] = {"groups": 32, "size": 8, "slots": 256, "steps": 1 if quick else 2}
        together, apart = (simulate(load, lockstep=lockstep, **common).step_s for lockstep in (True, False))
        rows.append(
            {
                "negative latencies": "are 0" if isinstance(latency, ClampedNormal) else "drawn again",
                "turns": turns,
                "tokens a turn": tokens,
                "lockstep (s)": together,
                "asynchronous (s)": apart,
                "speed-up": together / apart,
            }
        )
    return Measured(rows[0]["speed-up"], rows)


def environment_note(rows: list[Row]) -> str:
    below = ", ".join(
        f"{row['speed-up']:.2f}x with {row['turns']} turns of {row['tokens a turn']} tokens, negative ones "
        f"{row['negative latencies']}"
        for row in rows
        if row["speed-up"] < 2.46
    )
    return (
        "The paper reports 892 -> 362 s (2.46x). Lockstep waits for the largest of 256 latencies, about 38 s, in each "
        "turn; the mean is 10.8 s if negative ones count as 0 and 12.9 s if drawn again. With asynchrony a synchronous "
        "step still waits for the slowest of 256 sums over all turns; more turns even it out. "
        f"Not reached: {below or 'nowhere'}."
    )


def redundant_environments(seed: int, quick: bool) -> Measured:
    rows = []
    for slow in (0.02, 0.0):
        load = SyntheticLoad(ACTION, Normal(10, 5), turns=5, slow_share=slow, seed=seed)
        for groups, size in ((32, 8), (36, 8), (32, 9), (36, 9), (40, 8), (32, 10)):
            policy = {"extra": groups - 32, "extra_replicas": size - 8, "surplus": "cancel"}
            steps = 6 if quick else 12
            result = simulate(load, groups=32, size=8, slots=groups * size, steps=steps, **policy)
            rows.append(
                {
                    "fail-slow": f"{slow:.0%}",
                    "environments": f"{groups} x {size}",
                    "step (s)": result.step_s,
                    "discarded": result.discarded,
                    "latency of trained/submitted": result.true_latency_ratio,
                }
            )
    for row in rows:
        plain = next(r for r in rows if (r["fail-slow"], r["environments"]) == (row["fail-slow"], "32 x 8"))
        row["speed-up"] = plain["step (s)"] / row["step (s)"]
    return Measured(rows[3]["speed-up"], rows)


def redundancy_note(rows: list[Row]) -> str:
    row_of = {(row["fail-slow"], row["environments"]): row for row in rows}
    return (
        "The paper's 243 -> 45 s (5.4x) is reached only with environments that fail slow: without them redundancy "
        f"gains {row_of['0%', '36 x 9']['speed-up']:.2f}x, because the slowest of 256 normal latencies is close to the "
        "mean. In the paper more groups help more than larger groups; here it is the opposite "
        f"({row_of['2%', '36 x 8']['step (s)']:.0f} s against {row_of['2%', '32 x 9']['step (s)']:.0f} s). At 2 % slow "
        "episodes, more than 4 of 36 groups of 8 contain one in 64 % of the steps, but some group of 9 contains two in "
        "only 34 %: a spare replica helps its group whatever happens in the others. The cost is in the column before "
        "the last: slow episodes are hardly trained."
    )


def agent_load(seed: int = 0) -> SyntheticLoad:
    """4 turns, unequal answers, unequal steps, some environments that fail slow: what the alpha table is about."""
    return SyntheticLoad(LogNormal(100, 0.8), LogNormal(5, 0.8), turns=4, slow_share=0.02, seed=seed)


def asynchronous_ratio(seed: int, quick: bool, on_stale: str = "evict") -> Measured:
    learner = LearnerSpec(group_s=0.5, step_s=2.0, publish_s=1.0)
    rows = []
    for alpha in ALPHAS:
        common: dict[str, Any] = {"groups": 32, "size": 8, "slots": 1024, "learner": learner}
        common["steps"] = 8 if quick else 16
        result = simulate(agent_load(seed), alpha=alpha, on_stale=on_stale, **common)
        rows.append(
            {
                "alpha": str(alpha),
                "step (s)": result.step_s,
                "samples/s": 256 / result.step_s,
                "speed-up": rows[0]["step (s)"] / result.step_s if rows else 1.0,
                "staleness mean": result.staleness_mean,
                "staleness max": result.staleness_max,
                "discarded": result.discarded,
                "learner idle": result.learner_idle,
                "slots idle": result.slots_idle,
                "length of trained/submitted": result.true_length_ratio,
                "latency of trained/submitted": result.true_latency_ratio,
            }
        )
    return Measured(max(row["speed-up"] for row in rows), rows)


def waiting_ratio(seed: int, quick: bool) -> Measured:
    return asynchronous_ratio(seed, quick, "wait")


def knee(rows: list[Row]) -> Row:
    """The smallest alpha with 90 % of the largest throughput."""
    best: float = max(row["samples/s"] for row in rows)
    return next(row for row in rows if row["samples/s"] >= 0.9 * best)


def ratio_note(rows: list[Row]) -> str:
    return (
        "The knee, the smallest alpha with 90 % of the largest throughput, is alpha = "
        f"{knee(rows)['alpha']}. The table has no fractions: versions are whole numbers, so 1.5 allows the same "
        "staleness as 1."
    )


def reasoning(seed: int, quick: bool) -> Measured:
    """Single answers with verifiable rewards: no environment, a tail of long answers cut at the longest allowed.

    Synchronous training gives all servers to generation and then all machines to training; asynchronous training splits
    the same machines. A machine that trains takes `train_s` for each group, so that generation is 70 % of a synchronous
    step, as the paper says of such runs.
    """
    rows = []
    for name, sigma, mean in (("thinking", 1.0, 8000), ("short answers", 0.5, 2000)):
        load = SyntheticLoad(Truncated(LogNormal(mean, sigma), 32_000), seed=seed)
        for machines in (16, 64):
            common: dict[str, Any] = {"groups": 32, "size": 8, "steps": 2 if quick else 6}
            common["slots"] = 4 * common["groups"] * 8
            generate_s = simulate(load, on=servers(machines, 256), **common).step_s
            train_s = generate_s * 3 / 7
            best, share, alpha = 0.0, 0.0, 0.0
            for for_training in (0.5, 0.625, 0.75):
                on = servers(round(machines * (1 - for_training)), 256)
                learner = LearnerSpec(group_s=train_s / for_training / common["groups"])
                for candidate in (1.0, 2.0, 4.0):
                    result = simulate(load, on=on, learner=learner, alpha=candidate, on_stale="wait", **common)
                    if (generate_s + train_s) / result.step_s > best:
                        best, share, alpha = (generate_s + train_s) / result.step_s, for_training, candidate
            rows.append(
                {
                    "load": name,
                    "machines": machines,
                    "synchronous (s)": generate_s + train_s,
                    "asynchronous (s)": (generate_s + train_s) / best,
                    "alpha of the best": alpha,
                    "share that trains, of the best": share,
                    "speed-up": best,
                }
            )
    return Measured(max(row["speed-up"] for row in rows), rows)


def reasoning_note(rows: list[Row]) -> str:
    gains = [row["speed-up"] for row in rows]
    share = max(row["share that trains, of the best"] for row in rows)
    return (
        "The paper reports up to 2.24x on RLVR (single answers with verifiable rewards) with the same GPUs. This "
        "benchmark cannot reproduce it: the paper does not publish its answers' lengths, its servers' rates or its "
        "training time, and these decide. With generation 70 % of a synchronous step, as the paper says of "
        f"such runs, the gain cannot exceed the share of machines that trains over 0.3: {share:.2f} / 0.3 = "
        f"{share / 0.3:.2f}x for the largest share tried. All settings reach that ({min(gains):.2f}x to "
        f"{max(gains):.2f}x): asynchrony hides the tail completely, and on the paper's machines other costs would "
        "decide."
    )


@dataclass
class BoundRow:
    alpha: int
    policy: str
    of_bound: float
    """Time per sample over mu/K + L/Q; at most 1 is claimed."""
    of_achievable: float
    """The least possible time over the time taken."""


LATENCIES: list[Distribution] = [
    Normal(1000, 1000),
    Normal(1000, 500),
    LogNormal(1000, 0.5),
    LogNormal(1000, 1.0),
    fail_slow(Normal(1000, 300), 0.02, 10),
    Mixture(Normal(500, 100), Normal(3000, 300), 0.2),
    Constant(1000),
]


def papers_bound(seed: int, quick: bool) -> Measured:
    count = 12 if quick else 60
    measured = [_against_bound(seed * 1000 + index) for index in range(count)]
    rows: list[Row] = []
    for policy in ("wait", "in_order", "evict"):
        here = [row for row in measured if row.policy == policy]
        reached = [row.of_achievable for row in here] or [1.0]
        rows.append(
            {
                "policy": policy,
                "time / bound, largest": max((row.of_bound for row in here), default=0.0),
                "achievable reached, mean": statistics.fmean(reached),
                "least": min(reached),
                "share of settings >= 0.9": statistics.fmean(value >= 0.9 for value in reached),
                "settings above the bound": float(sum(row.of_bound > 1 for row in here)),
            }
        )
    return Measured(statistics.fmean(row.of_achievable for row in measured), rows)


def bound_note(rows: list[Row]) -> str:
    return (
        "Settings above mu/K + L/((1+alpha)N), a seed: "
        f"{sum(row['settings above the bound'] for row in rows):.2g} of 60. The "
        "achievable bound is what no schedule can beat: all work on "
        "K workers without a pause, and every alpha + 1 steps at least as long as the longest sample trained at their "
        "end. The losses: workers without work at the end of a step (alpha 0), steps that wait for a group in its "
        "last step, and evicted work."
    )


def _against_bound(index: int) -> BoundRow:
    generator = random.Random(index)
    size, groups = generator.choice([2, 4, 8]), generator.choice([2, 4, 8, 16])
    samples = size * groups
    workers = max(2, round(samples * generator.choice([0.25, 0.5, 1, 2])))
    alpha, latency = generator.choice([0, 1, 2, 4]), generator.choice(LATENCIES)
    policy = generator.choice(["wait", "in_order", "evict"])
    steps = 8 * (alpha + 1)
    how: dict[str, Any] = {"in_order": True} if policy == "in_order" else {"on_stale": policy}
    load = SyntheticLoad(latency, seed=index)
    on = ServerSpec(workers, 1, 1000.0)
    result = simulate(
        load, groups=groups, size=size, slots=workers, on=on, alpha=alpha, steps=steps, record=True, **how
    )
    assert result.timeline is not None
    trained = [span for span in result.timeline.episodes.values() if span.step is not None and span.step < steps]
    lasted = [span.ended_s - span.started_s for span in trained]
    submitted = {span.episode_id for span in result.timeline.episodes.values()}
    longest = max(load.plan(int(name[1:9]), int(name[11:]), 0).tokens / 1000 for name in submitted)
    bound = statistics.fmean(lasted) / workers + longest / ((1 + alpha) * samples)
    of_step = [0.0] * steps
    for span, seconds in zip(trained, lasted, strict=True):
        step = span.step or 0
        of_step[step] = max(of_step[step], seconds)
    windows = max(sum(of_step[offset :: alpha + 1]) for offset in range(alpha + 1))
    least_s = max(sum(lasted) / workers, windows)
    taken_s = result.step_ends_s[-1]
    return BoundRow(alpha, policy, taken_s / len(trained) / bound, least_s / taken_s)


def stragglers(seed: int, quick: bool) -> Measured:
    loads = {
        "2 % fail-slow x10": SyntheticLoad(ACTION, Normal(10, 5), turns=5, slow_share=0.02, seed=seed),
        "lognormal sigma 1, each episode": SyntheticLoad(ACTION, LogNormal(50, 1.0), seed=seed),
        "lognormal sigma 1, each of 5 steps": SyntheticLoad(ACTION, LogNormal(10, 1.0), turns=5, seed=seed),
    }
    rows = []
    for name, load in loads.items():
        for alpha in (1, 2):
            learner = LearnerSpec(0.05, 0.5, 0.5)
            common: dict[str, Any] = {"groups": 32, "size": 8, "slots": 512, "alpha": alpha}
            common["steps"] = 6 if quick else 12
            waiting, in_order, evicting, redundant = (
                simulate(load, learner=learner, **common, **how)
                for how in ({"on_stale": "wait"}, {"in_order": True}, {}, {"extra_replicas": 1, "surplus": "cancel"})
            )
            rows.append(
                {
                    "latency": name,
                    "alpha": alpha,
                    "wait (s)": waiting.step_s,
                    "in order (s)": in_order.step_s,
                    "evict (s)": evicting.step_s,
                    "speed-up": min(waiting.step_s, in_order.step_s) / evicting.step_s,
                    "evict, 1 spare replica (s)": redundant.step_s,
                    "discarded": evicting.discarded,
                    "latency of trained/submitted": evicting.true_latency_ratio,
                    "length of trained/submitted": evicting.true_length_ratio,
                }
            )
    return Measured(min(row["speed-up"] for row in rows[:4]), rows)


def stragglers_note(rows: list[Row]) -> str:
    others = " and ".join(f"{row['speed-up']:.2f}x" for row in rows[4:])
    return (
        "The figure is the smallest of the first four rows, over the faster of the two ways to wait. Where each of "
        f"five steps is lognormal, sums even out, there are hardly any stragglers, and the gain is small ({others}). "
        "The cost is bias: slow episodes are trained less."
    )


RATIO_SETTING = (
    "4 turns, 100 tokens and 5 s each (lognormal sigma 0.8), 2 % fail-slow, 32 x 8 a step, learner 18 s, publication "
    "1 s, 1,024 slots, on_stale "
)
CLAIMS = [
    Claim(
        "queue scheduling against batch rollout",
        "8 prompts x 8 replicas, 16 extra prompts; 1,000 tokens, lognormal sigma 1; half of the prompts give no signal "
        "and are filtered out",
        "x faster per step",
        3.4,
        queue_against_batch,
        queue_note,
    ),
    Claim(
        "prompt replication",
        "16 prompts x 64 replicas on 8 to 32 servers; long prompts are long in all replicas",
        "x faster per step, mean of four settings",
        1.95,
        replication,
        replication_note,
    ),
    Claim(
        "environment-level asynchrony",
        "step latency N(10, 10) s, 32 x 8 episodes of 30 turns, short actions; against environments in lockstep",
        "x faster per step",
        2.46,
        environment_asynchrony,
        environment_note,
    ),
    Claim(
        "redundant environments",
        "step latency N(10, 5) s, 5 turns, 2 % fail-slow x10, batch of 32 x 8: 36 x 9 against 32 x 8",
        "x faster per step",
        5.4,
        redundant_environments,
        redundancy_note,
    ),
    Claim(
        "single answers (RLVR), asynchronous against synchronous",
        "32 prompts x 8 answers, at most 32,000 tokens; the same machines, split between generation and training in "
        "the best of three ways, alpha 1, 2 or 4, on_stale wait: no answer is lost",
        "x faster per step, best of four settings",
        2.24,
        reasoning,
        reasoning_note,
        comparable=False,
    ),
    Claim(
        "alpha from 0 to 8 (evict)",
        RATIO_SETTING + "evict",
        "x best over synchronous",
        1.0,
        asynchronous_ratio,
        ratio_note,
    ),
    Claim(
        "alpha from 0 to 8 (wait)", RATIO_SETTING + "wait", "x best over synchronous", 1.0, waiting_ratio, ratio_note
    ),
    Claim(
        "the paper's bound",
        "60 random settings a seed of workers, groups, alpha, policy and latency; K workers, one sample each",
        "of the achievable bound, mean",
        0.9,
        papers_bound,
        bound_note,
    ),
    Claim(
        "stragglers",
        "32 x 8 a step, 512 slots; evict against the faster of in_order and on_stale wait, alpha 1 and 2",
        "x faster per step, at least",
        2.5,
        stragglers,
        stragglers_note,
    ),
]
