"""Speeds measured from a run folder: those with which a simulation has made the folder come out again."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from simulated_run import write_run

from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError, RunError
from roll_flash.monitor.episodes import DROPPED_FILE
from roll_flash.planner.measured.calibration import Calibration, Speeds, calibrate
from roll_flash.planner.measured.episodes import MeasuredLoad, duration_s, with_stopped
from roll_flash.planner.measured.group_effects import GroupEffects, variances
from roll_flash.planner.measured.recording import (
    StoppedEpisode,
    merged,
    overlap_share,
    read_recording,
    require_same_work,
)
from roll_flash.planner.measured.replay import calibrated
from roll_flash.planner.measured.turn_times import fit_line
from roll_flash.planner.prediction import predict, simulate
from roll_flash.planner.simulation.load import EpisodePlan

SPEEDS = Speeds(
    request_s=0.03,
    token_s=0.004,
    sequence_s=0.0005,
    prompt_token_s=0.0002,
    call_s=0.05,
    train_token_s=0.0002,
    proximal_token_s=0.00007,
    update_s=0.2,
    stage_s=0.3,
    report_s=0.1,
    pause_s=0.1,
    publish_delay_s=0.2,
)


def load(correlation: float = 0.4) -> MeasuredLoad:
    chance = random.Random(0)
    plans = []
    for _ in range(400):
        turns, prompts, context = [], [], 40
        for _ in range(3):
            tokens = chance.randint(8, 40)
            turns.append((tokens, chance.lognormvariate(-1.0, 0.6)))
            prompts.append(context)
            context += tokens + 20
        plans.append(EpisodePlan(tuple(turns), 0.0, False, tuple(prompts), 0.05, prompts[-1] + turns[-1][0]))
    plans.sort(key=lambda plan: sum(step_s + 0.01 * tokens for tokens, step_s in plan.turns))
    return MeasuredLoad(tuple(plans), GroupEffects.normal(correlation))


def config_of(**sections: Any) -> Config:
    return load_config(
        {
            "model": {"path": "tiny"},
            "envs": [{"id": "A-v0"}],
            "rollout": {"max_concurrent": 48, "max_new_tokens": 40},
            "scheduler": {"groups_per_step": 8, "group_size": 6, "async_ratio": 1},
            **sections,
        }
    )


def run_of(folder: Path, truth: Calibration, config: Config | None = None, **options: Any) -> Path:
    write_run(folder / "run", config or config_of(), truth, **{"steps": 20, **options})
    return folder / "run"


def test_the_speeds_that_made_a_run_are_found_in_it(tmp_path: Path) -> None:
    found = calibrate(read_recording(run_of(tmp_path, Calibration("made", SPEEDS, load()))))
    for name in ("request_s", "sequence_s", "train_token_s", "update_s", "stage_s"):
        assert getattr(found.speeds, name) == pytest.approx(getattr(SPEEDS, name), rel=0.3), name
    for batch in (4, 10, 30):
        token_s = found.speeds.token_s + batch * found.speeds.sequence_s
        assert token_s == pytest.approx(SPEEDS.token_s + batch * SPEEDS.sequence_s, rel=0.2), batch
    assert found.speeds.pause_s == pytest.approx(0.1)
    assert found.speeds.publish_delay_s == pytest.approx(0.2)
    assert math.isinf(found.speeds.cores)
    assert found.load.effects.correlation == pytest.approx(0.4, abs=0.15)
    assert found.load.signal_rate == 1.0
    assert found.notes == ()


def test_other_settings_than_the_measured_one_are_predicted_within_ten_per_cent(tmp_path: Path) -> None:
    """The world is the simulation itself here: what is tested is the way from a folder to speeds and back."""
    truth = Calibration("made", SPEEDS, load())
    found, measured, simulated = calibrated(run_of(tmp_path, truth))
    assert simulated.step_s == pytest.approx(measured.step_s, rel=0.1)
    for sections in (
        {"scheduler": {"groups_per_step": 8, "group_size": 6, "async_ratio": 0}},
        {"scheduler": {"groups_per_step": 8, "group_size": 6, "async_ratio": 2}},
        {"rollout": {"max_concurrent": 16, "max_new_tokens": 40}},
        {"inference": {"servers": 2}},
        {"scheduler": {"groups_per_step": 8, "group_size": 6, "async_ratio": 0, "extra_groups": 2}},
    ):
        config = config_of(**sections, steps=20)
        real = [simulate(config, truth, steps=20, seed=seed).step_s for seed in range(100, 104)]
        predicted = predict(config, found, repeats=4)["step_s"]
        assert predicted.value == pytest.approx(sum(real) / len(real), rel=0.1), sections
        assert predicted.low < predicted.value < predicted.high


def test_episodes_that_were_stopped_count_as_slow_ones(tmp_path: Path) -> None:
    """3 % of the episodes take eight times as long. With `async_ratio` 1 nearly all of them are stopped before their
    end, so that what has ended tells nothing of them; a run that waits for each of them has to."""
    plans = list(load().episodes)
    slow = [replace(plan, turns=tuple((n, 8 * s) for n, s in plan.turns)) for plan in plans[100:112]]
    truth = Calibration("made", SPEEDS, MeasuredLoad((*plans, *slow), GroupEffects.normal(0.0)))
    run = run_of(tmp_path, truth, steps=30)
    waits = config_of(scheduler={"groups_per_step": 8, "group_size": 6, "async_ratio": 0}, steps=20)
    real = [simulate(waits, truth, steps=20, seed=seed).step_s for seed in range(100, 108)]
    predicted = predict(waits, calibrated(run)[0])["step_s"].value
    (run / "episodes" / DROPPED_FILE).unlink()
    blind = predict(waits, calibrated(run)[0])["step_s"].value
    assert blind < 0.8 * fmean(real)
    assert abs(predicted - fmean(real)) < 0.5 * abs(blind - fmean(real))


def test_a_stopped_episode_is_spread_over_the_longer_ones() -> None:
    assert with_stopped([3.0, 1.0, 2.0], []) == pytest.approx([1 / 3] * 3)
    assert with_stopped([4.0, 1.0, 3.0], [2.0]) == pytest.approx([3 / 8, 1 / 4, 3 / 8])
    assert with_stopped([2.0, 1.0], [5.0, 6.0]) == pytest.approx([3 / 4, 1 / 4]), "nothing longer is known"
    assert with_stopped([], [1.0]) == []


def test_cores_that_servers_and_learner_share_are_found_with_what_else_uses_them(tmp_path: Path) -> None:
    truth = Calibration("made", replace(SPEEDS, cores=2.0, train_token_s=0.0006), load())
    found = calibrate(read_recording(run_of(tmp_path, truth, background_cores=0.6)))
    assert found.speeds.cores == 2
    assert found.speeds.train_token_s == pytest.approx(0.0006, rel=0.15)
    assert found.speeds.token_s + 10 * found.speeds.sequence_s == pytest.approx(0.009, rel=0.15)
    recording = read_recording(tmp_path / "run")
    lasted_s = max(e.finished_s for e in recording.episodes) - min(e.started_s for e in recording.episodes)
    turns_per_s = sum(len(e.turns) for e in recording.episodes) / lasted_s
    assert found.speeds.background_s * turns_per_s == pytest.approx(0.6, abs=0.25)


def test_the_cache_of_the_servers_is_the_one_that_they_report(tmp_path: Path) -> None:
    truth = Calibration("made", replace(SPEEDS, cache_tokens=6000.0), load())
    assert calibrate(read_recording(run_of(tmp_path, truth, steps=2))).speeds.cache_tokens == 6000


def test_a_run_in_which_servers_and_learner_take_turns_says_that_their_contention_is_unknown(tmp_path: Path) -> None:
    truth = Calibration("made", replace(SPEEDS, cores=2.0), load())
    synchronous = config_of(scheduler={"groups_per_step": 8, "group_size": 6, "async_ratio": 0})
    found = calibrate(read_recording(run_of(tmp_path, truth, synchronous, steps=2)))
    assert any("measure with scheduler.async_ratio=1" in note for note in found.notes)
    assert found.error > 0.1


def test_a_run_that_stopped_many_episodes_says_that_a_synchronous_plan_is_too_fast(tmp_path: Path) -> None:
    recording = read_recording(run_of(tmp_path, Calibration("made", SPEEDS, load()), steps=3))
    stopped = StoppedEpisode("g", 1.0, 0)
    few, many = (replace(recording, stopped=(stopped,) * count) for count in (1, len(recording.episodes)))
    assert not any("stopped as stale" in note for note in calibrate(few).notes)
    assert any(note.startswith("50% of the run's episodes were stopped as stale") for note in calibrate(many).notes)


def slow_tail() -> MeasuredLoad:
    """2 % of the episodes have an environment four times as slow."""
    chance, plans = random.Random(0), []
    for _ in range(4000):
        slowness = chance.lognormvariate(-0.08, 0.4) * (4 if chance.random() < 0.02 else 1)
        turns = tuple((16, 0.5 * slowness * chance.lognormvariate(-0.125, 0.5)) for _ in range(4))
        prompts = (40, 76, 112, 148)
        plans.append(EpisodePlan(turns, 0.0, False, prompts, 0.05, 164))
    return MeasuredLoad(
        tuple(sorted(plans, key=lambda plan: sum(step_s for _, step_s in plan.turns))), GroupEffects.normal(0.4)
    )


def test_episodes_that_were_stopped_as_stale_count_with_the_time_that_they_would_have_taken(tmp_path: Path) -> None:
    synchronous, asynchronous = (
        config_of(scheduler={"groups_per_step": 8, "group_size": 6, "async_ratio": ratio}, steps=40) for ratio in (0, 1)
    )
    truth = Calibration("made", SPEEDS, slow_tail().with_seed(1))
    recording = read_recording(run_of(tmp_path, truth, asynchronous, steps=40))
    unknown = replace(recording, stopped=tuple(replace(each, turns=0) for each in recording.stopped))
    longest_s = max(episode.finished_s - episode.started_s for episode in recording.episodes)
    assert max(duration_s(plan, 0.0) for plan in calibrate(recording).load.episodes) > 1.3 * longest_s
    real, found, without = (
        predict(synchronous, each)["step_s"].value for each in (truth, calibrate(recording), calibrate(unknown))
    )
    assert found == pytest.approx(real, rel=0.1)
    assert without < 0.95 * real


def test_a_run_that_says_too_little_is_refused(tmp_path: Path) -> None:
    folder = run_of(tmp_path, Calibration("made", SPEEDS, load()), steps=1)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"0 finished steps and .* episodes are too few"):
        calibrated(folder)


def test_damaged_lines_are_left_out_with_a_note_and_a_clock_that_went_back_is_refused(tmp_path: Path) -> None:
    recording = read_recording(run_of(tmp_path, Calibration("made", SPEEDS, load()), steps=3))
    log = sorted((recording.folder / "episodes").glob("step_*.jsonl"))[0]
    log.write_bytes(b"\0\n[1]\n" + log.read_bytes())
    again = read_recording(recording.folder)
    assert again.episodes == recording.episodes
    assert "2 damaged lines of episodes/ were left out" in calibrate(again).notes
    timeline = recording.folder / "logs/timeline.jsonl"
    *before, last = map(json.loads, timeline.read_text().splitlines())
    last["started_s"] -= 3600
    timeline.write_text("".join(json.dumps(each) + "\n" for each in (*before, last)))
    with pytest.raises(RunError, match=r"the clock went back by \d+ s or more before step 3, so its times measure"):
        read_recording(recording.folder)


def test_differences_that_change_what_was_measured_are_named_and_another_model_is_refused(tmp_path: Path) -> None:
    recording = read_recording(run_of(tmp_path, Calibration("made", SPEEDS, load()), steps=2))
    assert require_same_work(recording, config_of()) == []
    longer = config_of(rollout={"max_concurrent": 48, "max_new_tokens": 200})
    assert require_same_work(recording, longer) == [
        "rollout.max_new_tokens differs from that of the run: its episodes may be others than those measured"
    ]
    for changes in ({"kl": {"coefficient": 0.1}}, {"advantage": "gae"}, {"gradient_checkpointing": True}):
        (line,) = require_same_work(recording, config_of(learner=changes))
        assert line.endswith("of the run: a token may take the learner another time than was measured")
    with pytest.raises(ConfigError, match=r"model\.path: .* measured tiny, not smollm2-135m"):
        require_same_work(recording, config_of(model={"path": "smollm2-135m"}))


def test_correlation_within_groups_is_that_of_the_numbers() -> None:
    chance = random.Random(0)
    for correlation in (0.0, 0.5, 0.9):
        groups = []
        for _ in range(400):
            shared = chance.gauss(0, correlation**0.5)
            groups.append([shared + chance.gauss(0, (1 - correlation) ** 0.5) for _ in range(6)])
        assert GroupEffects.measured(groups).correlation == pytest.approx(correlation, abs=0.06)
        assert GroupEffects.normal(correlation).correlation == pytest.approx(correlation, abs=0.01)
    assert GroupEffects.measured([[1.0, 2.0]]).correlation == 0.0
    assert variances([[1.0, 2.0], [5.0]]) == (0.0, 0.25)


def test_few_episodes_are_drawn_as_often_as_they_were_measured() -> None:
    effects, chance = GroupEffects.measured([[1.0, 2.0, 4.0]]), random.Random(0)
    places = [int(3 * effects.rank(chance, chance)) for _ in range(3000)]
    assert [places.count(place) for place in range(3)] == pytest.approx([1000] * 3, rel=0.1)


def test_rare_slow_episodes_are_as_rare_in_slow_groups_as_in_fast_ones() -> None:
    """As benchmarks/latency_env.py: tasks differ, and each episode may be four times slower. A step that waits for all
    of 8 x 6 waits for such an episode more often than if they were together in slow groups; a step that needs 6 of 7
    in 8 of 10 groups hardly ever does."""
    chance = random.Random(0)

    def group(size: int) -> list[float]:
        usual = chance.lognormvariate(0, 0.4)
        return [usual * chance.lognormvariate(0, 0.25) * (4 if chance.random() < 0.02 else 1) for _ in range(size)]

    groups = [group(6) for _ in range(2000)]
    effects = GroupEffects.measured([[math.log(s) for s in each] for each in groups])
    durations = sorted(itertools.chain.from_iterable(groups))

    def drawn(size: int) -> list[float]:
        of_task = random.Random(chance.random())
        state = of_task.getstate()
        found = []
        for _ in range(size):
            of_task.setstate(state)
            found.append(durations[min(len(durations) - 1, int(effects.rank(of_task, chance) * len(durations)))])
        return found

    def step_s(make: Callable[[int], list[float]], groups: int, replicas: int) -> float:
        steps = [sorted(sorted(make(replicas))[5] for _ in range(groups))[7] for _ in range(2000)]
        return sum(steps) / len(steps)

    assert step_s(drawn, 8, 6) == pytest.approx(step_s(group, 8, 6), rel=0.04)
    assert step_s(drawn, 10, 7) == pytest.approx(step_s(group, 10, 7), rel=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_drawn_episodes_have_the_measured_correlation_and_the_measured_durations(correlation: float) -> None:
    drawn = load(correlation)
    seconds = [
        [sum(step_s for _, step_s in drawn.plan(seed, replica, 0).turns) for replica in range(6)] for seed in range(500)
    ]
    of_groups, of_episodes = variances(seconds)
    assert of_groups / (of_groups + of_episodes) == pytest.approx(correlation, abs=0.12)
    mean = sum(map(sum, seconds)) / 3000
    usual = sum(step_s for plan in drawn.episodes for _, step_s in plan.turns) / len(drawn.episodes)
    assert mean == pytest.approx(usual, rel=0.08)
    assert drawn.plan(3, 1, 0) == drawn.plan(3, 1, 0)


def test_overlaps_are_shares_of_the_union() -> None:
    assert merged([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert overlap_share([(0, 2), (2, 4), (5, 6)], [(1, 3), (1, 2)]) == pytest.approx([0.5, 0.5, 0.0])


def test_a_line_has_no_negative_part() -> None:
    assert fit_line([10, 20, 30], [1.1, 2.1, 3.1]) == pytest.approx((0.1, 0.1))
    constant, slope = fit_line([10, 20, 30], [0.5, 1.5, 2.5])
    assert constant == 0
    assert slope == pytest.approx(0.08, rel=0.1)
