"""What a simulation adds for the plan of a run, each part against closed forms: prompts, caches, cores, sandboxes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.planner.simulation.load import EpisodePlan
from roll_flash.planner.simulation.result import SimulationResult
from roll_flash.planner.simulation.servers import Request, ServerSpec, SimulatedServer
from roll_flash.planner.simulation.services import SandboxSpec, StageSpec
from roll_flash.planner.simulation.settings import LearnerSpec, SimulationSettings
from roll_flash.planner.simulation.simulate import Simulation


@dataclass(frozen=True)
class Same:
    """Every episode is the same; replicas have different rewards."""

    episode: EpisodePlan

    def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
        return replace(self.episode, reward=float(replica % 2))


ONE_TURN = EpisodePlan(((10, 1.0),), 0.0, False, packed_tokens=20)
ONE_GROUP = SchedulerConfig(async_ratio=0, groups_per_step=1, group_size=2)
PLAIN = SimulationSettings(
    ONE_GROUP,
    slots=8,
    servers=ServerSpec(1, 100, 10.0),
    learner=LearnerSpec(streams=True),
)


def simulate(settings: SimulationSettings, episode: EpisodePlan = ONE_TURN, steps: int = 1) -> SimulationResult:
    return Simulation(settings, Same(episode)).run(steps)


def test_the_start_of_an_episode_and_the_way_to_the_server_take_their_time() -> None:
    settings = replace(PLAIN, servers=replace(PLAIN.servers, request_s=0.5))
    turns = ((10, 1.0), (20, 2.0))
    result = simulate(settings, EpisodePlan(turns, 0.0, False, startup_s=4.0))
    assert result.elapsed_s == pytest.approx(4 + (0.5 + 1 + 1) + (0.5 + 2 + 2))
    assert result.turns == 4


def test_a_prompt_that_is_read_holds_up_all_sequences_of_its_server() -> None:
    server = SimulatedServer(0, ServerSpec(1, 8, 10.0, prompt_token_s=0.01))
    first, second = Request(None, 10, prompt=100), Request(None, 10, prompt=300)
    server.add(first)
    assert server.next_done_s(0.0) == pytest.approx(1 + 1)
    server.advance(0.5)
    server.add(second)
    assert server.next_done_s(0.5) == pytest.approx(1 + 1 + 3), "the first waits for the second's prompt too"


def test_the_prefix_cache_spares_what_was_read_until_weights_change() -> None:
    server = SimulatedServer(0, ServerSpec(1, 8, 10.0, prompt_token_s=0.01))

    def seconds(prompt: int, episode: str) -> float:
        request = Request(None, 1, prompt, episode, "g0", group_prompt=160)
        began_s = server._since_s
        server.add(request)
        done_s = server.next_done_s(began_s)
        assert done_s is not None
        server.advance(done_s)
        assert server.pop_done() == [request]
        return done_s - began_s - 0.1

    assert seconds(160, "a") == pytest.approx(1.6)
    assert seconds(160, "b") == pytest.approx(0.16), "the last block of a known prompt is read again"
    assert seconds(160 + 1 + 63, "a") == pytest.approx(0.64)
    server.load_version(1)
    assert seconds(320, "a") == pytest.approx(3.2)


def test_requests_wait_until_the_key_value_cache_has_room() -> None:
    episode = EpisodePlan(((10, 0.0),), 0.0, False, prompts=(90,))
    roomy, narrow = (
        simulate(replace(PLAIN, servers=replace(PLAIN.servers, cache_tokens=tokens)), episode) for tokens in (200, 199)
    )
    assert roomy.elapsed_s == pytest.approx(1)
    assert narrow.elapsed_s == pytest.approx(2), "one after the other"


def test_a_request_that_alone_exceeds_the_cache_still_runs() -> None:
    episode = EpisodePlan(((10, 0.0),), 0.0, False, prompts=(90,))
    assert simulate(replace(PLAIN, servers=replace(PLAIN.servers, cache_tokens=50)), episode).elapsed_s < math.inf


def test_the_client_sends_no_more_than_the_admission_ratio_allows() -> None:
    episode = EpisodePlan(((10, 0.0),), 0.0, False, prompts=(90,))
    servers = replace(PLAIN.servers, cache_tokens=1000, admission_ratio=0.1, routes=True)
    assert simulate(replace(PLAIN, servers=servers, max_new_tokens=10), episode).elapsed_s == pytest.approx(2)


def test_turns_of_an_episode_stay_at_their_server() -> None:
    """With a cache on one server, a turn elsewhere would read the whole prompt again."""
    turns, prompts = ((10, 1.0),) * 4, (1000, 2000, 3000, 4000)
    episode = EpisodePlan(turns, 0.0, False, prompts=prompts)
    servers = replace(PLAIN.servers, count=2, prompt_token_s=0.001, routes=True)
    result = simulate(replace(PLAIN, servers=servers), episode)
    assert result.elapsed_s == pytest.approx(4 * (1 + 1) + 4.0, abs=0.1)


def test_groups_stream_to_the_learner_while_it_computes_others() -> None:
    learner = LearnerSpec(streams=True, call_s=0.5, token_s=0.1, batch_tokens=40, step_s=1.0)
    settings = replace(PLAIN, scheduler=ONE_GROUP.model_copy(update={"groups_per_step": 3}), learner=learner)
    assert simulate(settings).elapsed_s == pytest.approx(2 + 3 * (0.5 + 40 * 0.1) + 1)
    late = replace(learner, token_s=0.0, late_token_s=0.1, batch_tokens=math.inf)
    assert simulate(replace(settings, learner=late)).elapsed_s == pytest.approx(2 + 2 * 0.5 + 12 + 1), (
        "the first group does not wait for the others"
    )


def test_groups_without_signal_cost_the_learner_no_tokens() -> None:
    class Equal(Same):
        def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
            return self.episode

    settings = replace(PLAIN, learner=LearnerSpec(streams=True, token_s=1.0))
    assert Simulation(settings, Equal(ONE_TURN)).run(1).elapsed_s == pytest.approx(2)
    assert simulate(settings).elapsed_s == pytest.approx(2 + 40)


def test_between_steps_the_learner_stages_weights_and_the_next_episodes_wait_for_them() -> None:
    learner = LearnerSpec(streams=True, step_s=1.0, stage_s=2.0, publish_delay_s=3.0, publish_s=4.0, report_s=5.0)
    result = simulate(replace(PLAIN, learner=learner), steps=2)
    assert result.step_ends_s == pytest.approx([3, 3 + 2 + 3 + 4 + 2 + 1])
    assert result.learner_idle == pytest.approx(1 - (1 + 2 + 1) / 15), "what follows the last step is not in it"


def test_scores_delay_the_training_of_their_group() -> None:
    stage = StageSpec(workers=1, row_s=3.0)
    assert simulate(replace(PLAIN, scoring=(stage,))).elapsed_s == pytest.approx(2 + 6), "two trajectories, one worker"
    assert simulate(replace(PLAIN, scoring=(replace(stage, workers=2),))).elapsed_s == pytest.approx(2 + 3)


def test_episodes_wait_for_sandboxes() -> None:
    pool = SandboxSpec(ready=1, parallel_starts=1, start_s=5.0)
    result = simulate(replace(PLAIN, sandboxes=pool))
    assert result.elapsed_s == pytest.approx(1 + 5 + 1), "the second takes its own after the first turn"
    early = replace(pool, is_leased_at_reset=True)
    assert simulate(replace(PLAIN, sandboxes=early)).elapsed_s == pytest.approx(5 + 1 + 1)
    reused = replace(pool, reuse=True, start_s=100.0)
    assert simulate(replace(PLAIN, sandboxes=reused)).elapsed_s == pytest.approx(1 + 1 + 1)


def test_servers_and_learner_slow_down_when_they_share_cores() -> None:
    """The learner computes step 0 while episodes of step 1 are sampled: 2 threads, then, on one core."""
    learner = LearnerSpec(streams=True, step_s=4.0)
    asynchronous = replace(PLAIN, scheduler=ONE_GROUP.model_copy(update={"async_ratio": 1}), slots=2, learner=learner)
    episode = EpisodePlan(((10, 0.0),), 0.0, False)
    alone, shared, with_others = (
        simulate(replace(asynchronous, cores=cores, background_cores=others), episode, steps=1).elapsed_s
        for cores, others in ((2, 0), (1, 0), (2, 0.5))
    )
    assert alone == pytest.approx(1 + 4)
    assert shared == pytest.approx(1 + 1 * 2 + 3), "the episodes of the next step take 1 s of work"
    assert with_others == pytest.approx(1 + 1 * 2 / 1.5 + 3)


def test_auto_raises_the_async_ratio_while_the_learner_waits() -> None:
    settings = replace(
        PLAIN,
        scheduler=ONE_GROUP.model_copy(update={"async_ratio": "auto"}),
        servers=ServerSpec(1, 100, 10.0),
        learner=LearnerSpec(streams=True, step_s=2.0),
    )
    assert simulate(settings, steps=20).staleness_max >= 1
    stale = replace(settings, sample_size=lambda staleness: 0.1 if staleness > 0.5 else 1.0)
    assert simulate(stale, steps=20).step_s > simulate(settings, steps=20).step_s, "old data is refused"
