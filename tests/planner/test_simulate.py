"""Virtual time: the real scheduler against closed forms, the staleness rule, and repeatability."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic_load import Constant, Normal, SyntheticLoad
from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.errors import RunError
from roll_flash.planner.simulation.load import Load, LogNormal
from roll_flash.planner.simulation.result import SimulationResult
from roll_flash.planner.simulation.servers import Request, ServerSpec, SimulatedServer
from roll_flash.planner.simulation.settings import LearnerSpec, SimulationSettings
from roll_flash.planner.simulation.simulate import Simulation


def simulate(
    load: Load,
    *,
    steps: int = 3,
    alpha: float = 0.0,
    groups: int = 4,
    extra: int = 0,
    slots: int = 64,
    servers: ServerSpec | None = None,
    learner: LearnerSpec | None = None,
    lockstep: bool = False,
    record: bool = False,
    longest_episode_s: float = math.inf,
    retries: int = 0,
    **policy: Any,
) -> SimulationResult:
    chosen = SimulationSettings(
        SchedulerConfig(
            **{"group_size": 2, "async_ratio": alpha, "groups_per_step": groups, "extra_groups": extra, **policy}
        ),
        slots,
        servers or ServerSpec(1, 1000, 10.0),
        learner or LearnerSpec(),
        lockstep,
        record,
        longest_episode_s,
        retries=retries,
    )
    return Simulation(chosen, load).run(steps)


def test_an_undisturbed_synchronous_run_takes_what_arithmetic_says() -> None:
    load = SyntheticLoad(Constant(50), Constant(2.0), turns=3)
    result = simulate(load, learner=LearnerSpec(group_s=0.0, step_s=4.0, publish_s=1.0))
    step_s = 3 * (50 / 10 + 2) + 4 + 1
    assert result.step_ends_s == pytest.approx([step_s - 1, 2 * step_s - 1, 3 * step_s - 1])
    assert result.staleness == {0: 3 * 4 * 2 * 150}
    assert result.discarded_tokens == 0
    assert result.learner_idle == pytest.approx(1 - 12 / (3 * step_s - 1))


def test_a_larger_batch_slows_each_sequence_as_the_rate_model_says() -> None:
    result = simulate(SyntheticLoad(Constant(100)), steps=1, servers=ServerSpec(1, 8, 10.0, half_rate_batch=7.0))
    assert result.elapsed_s == pytest.approx(100 / (10 / 2)), "8 sequences: half the rate of one alone"


def test_slots_limit_what_runs_at_once() -> None:
    result = simulate(SyntheticLoad(Constant(10)), steps=1, slots=2)
    assert result.elapsed_s == pytest.approx(4.0), "8 episodes of 1 s on 2 slots"
    assert result.slots_idle == pytest.approx(0)


def test_asynchronous_training_hides_the_learner() -> None:
    load = SyntheticLoad(Constant(50))
    learner = LearnerSpec(step_s=5.0)
    synchronous, asynchronous = (simulate(load, alpha=a, learner=learner, steps=20) for a in (0, 1))
    assert synchronous.step_s == pytest.approx(10)
    assert asynchronous.step_s == pytest.approx(5)
    assert asynchronous.staleness_max == 1


def test_environments_in_lockstep_wait_for_the_slowest_at_every_turn() -> None:
    load = SyntheticLoad(Constant(1), Normal(10, 10), turns=5)
    together, apart = (simulate(load, lockstep=lockstep, groups=8) for lockstep in (True, False))
    assert together.elapsed_s > 1.4 * apart.elapsed_s
    assert together.trained_episodes == apart.trained_episodes


def test_tokens_carry_the_version_they_were_sampled_with_across_an_update() -> None:
    load = SyntheticLoad(Constant(100))
    result = simulate(load, alpha=4, groups=1, slots=3, steps=12, learner=LearnerSpec(publish_s=0.5))
    assert len(result.staleness) > 1
    assert result.staleness.total() == result.trained_tokens


def test_tokens_of_a_request_that_lives_through_many_updates_carry_each_version() -> None:
    server = SimulatedServer(0, ServerSpec(1, 8, 1.0))
    request = Request(None, tokens=30)
    server.add(request)
    for version in range(1, 30):
        server.advance(float(version))
        server.load_version(version)
    assert server.versions_of(request) == [(version, 1) for version in range(30)]


def test_the_books_of_a_run_with_failures_and_stragglers_balance() -> None:
    load = SyntheticLoad(LogNormal(50, 1.0), Normal(1, 1), turns=2, slow_share=0.1, failure_rate=0.2)
    result = simulate(load, alpha=1, extra=2, steps=10, retries=1, record=True)
    assert result.timeline is not None
    fates = [span.fate for span in result.timeline.episodes.values()]
    assert fates.count("trained") == result.trained_episodes
    assert fates.count("cancelled") == result.cancelled_episodes
    assert fates.count("failed") > 0
    busy: dict[int, float] = {}
    for span in result.timeline.episodes.values():
        assert span.started_s >= busy.get(span.slot, 0.0), "two episodes share a slot"
        busy[span.slot] = span.ended_s or math.inf


loads = st.builds(
    SyntheticLoad,
    tokens=st.sampled_from([Constant(20), LogNormal(30, 1.0)]),
    environment_s=st.sampled_from([Constant(1.0), Normal(3, 3)]),
    turns=st.integers(1, 3),
    slow_share=st.sampled_from([0.0, 0.1]),
    failure_rate=st.sampled_from([0.0, 0.2]),
    signal_rate=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=60, deadline=None)
@given(
    loads,
    st.sampled_from([0, 0.5, 1, 2, 3]),
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from(["evict", "requeue", "wait"]),
    st.booleans(),
    st.sampled_from([0.0, 2.0]),
)
def test_no_simulated_token_is_trained_beyond_alpha(
    load: SyntheticLoad, alpha: float, groups: int, slots: int, on_stale: str, in_order: bool, publish_s: float
) -> None:
    learner = LearnerSpec(0.5, 1.0, publish_s)
    result = simulate(
        load, alpha=alpha, groups=groups, slots=slots, on_stale=on_stale, in_order=in_order, learner=learner
    )
    assert result.staleness_max <= alpha
    if in_order:
        assert result.dropped_groups.get("stale", 0) == 0


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_the_same_load_gives_the_same_run(seed: int) -> None:
    load = SyntheticLoad(LogNormal(50, 1.0), Normal(1, 1), turns=2, slow_share=0.1, seed=seed)
    first, second = simulate(load, alpha=1, extra=1), simulate(load, alpha=1, extra=1)
    assert first == second


def test_a_run_without_redundancy_or_stragglers_wastes_nothing() -> None:
    """With equal latencies nothing that was admitted is thrown away, whatever alpha, also a fractional one."""
    for alpha in (0, 0.5, 1, 1.5, 2.25):
        learner = LearnerSpec(step_s=3.0, publish_s=2.0)
        result = simulate(SyntheticLoad(Constant(50)), alpha=alpha, learner=learner, steps=12)
        assert result.discarded_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 2]),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from(["evict", "requeue", "wait"]),
    st.sampled_from(["keep", "cancel"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.02, 0.2]),
)
def test_the_reported_bias_brackets_the_true_one(
    seed: int, alpha: int, extra: int, spare: int, on_stale: str, surplus: str, failure_rate: float, slow: float
) -> None:
    """Servers that no batch slows down: an episode would have lasted as long undisturbed, so the truth is known."""
    load = SyntheticLoad(
        LogNormal(30, 0.5),
        Normal(3, 1),
        turns=2,
        slow_share=slow,
        slow_factor=20.0,
        failure_rate=failure_rate,
        seed=seed,
    )
    policy = {"extra_replicas": spare, "on_stale": on_stale, "surplus": surplus}
    longest_s = 2 * (20 * 10 + 100)
    result = simulate(load, alpha=alpha, extra=extra, steps=8, slots=200, longest_episode_s=longest_s, **policy)
    bias = result.bias
    assert bias["latency_ratio_low"] <= result.true_latency_ratio + 1e-3
    assert result.true_latency_ratio <= bias["latency_ratio_high"] + 1e-3
    assert bias["length_ratio_low"] <= result.true_length_ratio <= bias["length_ratio_high"] + 1e-3


def test_starvation_of_the_slow_is_seen_where_nothing_of_it_is_trained() -> None:
    """With a spare replica no straggler is ever trained; what training sees is far faster than what was submitted."""
    load = SyntheticLoad(Normal(50, 10), Normal(10, 5), turns=5, slow_share=0.05)
    policy = {"group_size": 8, "extra_replicas": 1, "surplus": "cancel"}
    result = simulate(load, groups=16, alpha=1, steps=8, slots=256, longest_episode_s=1500.0, **policy)
    assert result.true_latency_ratio < 0.8
    assert result.bias["latency_ratio_low"] < result.true_latency_ratio < result.bias["latency_ratio_high"] < 0.98
    assert result.bias["unfinished"] > 0.05


def test_a_task_that_is_requeued_is_another_play_in_the_simulation_and_not_for_ever() -> None:
    load = SyntheticLoad(Constant(20), Constant(1.0), slow_share=0.3, slow_factor=1000.0)
    result = simulate(load, alpha=0, extra=4, steps=12, on_stale="requeue", max_requeues=1)
    assert result.groups["requeued"] > 0
    assert result.groups["given_up"] > 0


def test_a_simulated_run_that_only_loses_groups_ends_as_a_real_one_would() -> None:
    with pytest.raises(RunError, match="the last 64 groups could not be trained"):
        simulate(SyntheticLoad(Constant(20), failure_rate=0.9), steps=50)
