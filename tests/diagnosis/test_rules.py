"""Rules on figures that are written by hand here: where each begins and what it must not say; and on any figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_flash.diagnosis import find
from roll_flash.diagnosis.learning import MIN_STEPS, SPIKES
from roll_flash.diagnosis.run_view import Episode, RunView, Settings, Steps, Texts
from roll_flash.diagnosis.throughput import FORECAST_STEPS

SOUND = {
    **{
        "step_s": 60.0,
        "reward": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "success": 0.5,
        "reward_std_in_group": 0.4,
        "computed_policy_tokens": 3000.0,
    },
    **{"episodes": 32.0, "policy_tokens": 3200.0, "entropy": 1.0, "behavior_entropy": 1.0, "grad_norm": 0.5},
    **{"staleness_mean": 0.9, "staleness_max": 1.0, "effective_sample_size": 0.98, "kl_k3": 1e-3, "lag_kl_k3": 1e-3},
    **{"mismatch_kl_k3": 1e-3, "mismatch_gap_mean": 0.02, "weights/parity_mean": 0.02, "bias/length_ratio_high": 1.0},
    **{"books/dropped_stale": 0.0, "sandbox/lease_s.mean": 10.0, "sandbox/wait_s.mean": 0.1, "sandbox/leases": 0.0},
    **{"idle/learner": 0.2, "idle/servers": 0.0, "machine/disk_free_gib": 100.0, "machine/memory_available_gib": 50.0},
}


def run(number: int = 30, *, steps: int = 1000, **ends: tuple[float, float]) -> RunView:
    """A sound run of so many steps; `ends`: metrics that go from one value to another in a straight line."""
    ends = {"books__produced": (32.0, 32.0 * number), **ends}
    rows = []
    for step in range(1, number + 1):
        moved = {
            name.replace("__", "/"): first + (last - first) * (step - 1) / (number - 1)
            for name, (first, last) in ends.items()
        }
        rows.append({**SOUND, "step": step, **moved})
    return RunView(Settings(steps=steps), Steps(rows[:10]), Steps(rows[-64:]))


def names(view: RunView) -> list[str]:
    return [finding.name for finding in find(view)]


@pytest.mark.parametrize(
    ("ends", "name"),
    [
        ({"policy_tokens": (3200.0, 300.0)}, "length-collapse"),
        ({"policy_tokens": (3200.0, 16000.0)}, "length-explosion"),
        ({"effective_sample_size": (0.6, 0.3)}, "low-effective-sample-size"),
        ({"machine__disk_free_gib": (100.0, 60.0)}, "disk-runs-out"),
        ({"machine__memory_available_gib": (50.0, 20.0)}, "memory-runs-out"),
        ({"idle__servers": (0.6, 0.7)}, "servers-idle"),
        ({"books__dropped_stale": (0.0, 300.0)}, "staleness-at-bound"),
        ({"books__dropped_stale": (0.0, 300.0), "staleness_max": (0.0, 1.0)}, "staleness-at-bound"),
        ({"bias__length_ratio_high": (0.9, 0.6)}, "eviction-bias"),
        ({"sandbox__wait_s.mean": (4.0, 5.0)}, "sandbox-queue"),
        ({"books__failed_env_timeout": (0.0, 300.0)}, "environment-hangs"),
        ({"books__failed_sandbox_error": (0.0, 300.0), "sandbox__leases": (0.0, 900.0)}, "sandbox-hangs"),
    ],
)
def test_a_figure_that_goes_wrong_has_its_name(ends: dict[str, tuple[float, float]], name: str) -> None:
    assert names(run()) == []
    assert names(run(**ends)) == [name]


@pytest.mark.parametrize(("spikes", "expected"), [(SPIKES, ["gradient-spikes"]), (SPIKES - 1, [])])
def test_gradients_that_spike_again_and_again_are_named_and_a_rare_one_is_not(spikes: int, expected: list[str]) -> None:
    view = run()
    for row in view.recent.rows[-2 * spikes :: 2]:
        row["grad_norm"] = 20 * SOUND["grad_norm"]
    assert names(view) == expected


def test_gradients_that_spike_are_named_before_what_they_do_to_the_answers() -> None:
    view = run(policy_tokens=(3200.0, 300.0))
    for row in view.recent.rows[-2 * SPIKES :: 2]:
        row["grad_norm"] = 20 * SOUND["grad_norm"]
    assert names(view) == ["gradient-spikes", "length-collapse"]


def test_entropy_collapses_only_where_there_is_no_signal_and_no_success() -> None:
    falling = {"entropy": (1.0, 0.01), "computed_policy_tokens": (3000.0, 300.0)}
    assert names(run(**falling)) == ["entropy-collapse"]
    assert names(run(**falling, success=(0.5, 1.0))) == []
    assert names(run(entropy=(1.0, 0.01))) == []


def test_a_run_whose_last_answers_are_all_empty_can_be_judged() -> None:
    assert names(run(entropy=(1.0, 0.01), policy_tokens=(0.0, 0.0), computed_policy_tokens=(0.0, 0.0))) == []


def test_where_no_success_is_reported_tasks_are_solved_whose_reward_is_earned() -> None:
    falling = {"entropy": (1.0, 0.01), "computed_policy_tokens": (3000.0, 300.0), "success": (math.nan, math.nan)}
    assert names(run(**falling)) == ["entropy-collapse"]
    assert names(run(**falling, reward=(0.2, 1.0))) == []


def test_an_entropy_that_collapsed_until_no_step_has_any_is_the_cause_of_equal_rewards() -> None:
    view = run(reward_std_in_group=(0.0, 0.0), computed_policy_tokens=(0.0, 0.0))
    for row in view.recent.rows[-10:]:
        row["entropy"] = None
    view.recent.rows[-11]["entropy"] = 0.05
    assert names(view) == ["entropy-collapse", "no-reward-variance"]


@pytest.mark.parametrize(("answers", "found"), [(("a", "a"), ["entropy-collapse"]), (("a", "b"), [])])
def test_entropy_has_collapsed_where_replicas_answer_alike_though_it_was_last_known_before(
    answers: tuple[str, str], found: list[str]
) -> None:
    view = run(computed_policy_tokens=(3000.0, 300.0), entropy=(1.0, 0.3))
    texts = [Texts(is_cut=False, generate_s=1.0, answer=answer, repeated=0.0, answers=()) for answer in answers]
    played = [Episode(30, "level", f"task-{n}", 0.5, None, None, 1.0, each) for n in range(20) for each in texts]
    assert names(replace(view, episodes=played)) == found


def test_answers_that_have_shrunk_until_replicas_earn_the_same_are_named_before_their_entropy() -> None:
    falling = {"policy_tokens": (3200.0, 300.0), "computed_policy_tokens": (3000.0, 30.0), "entropy": (1.0, 0.01)}
    assert [(each.name, each.severity) for each in find(run(**falling))] == [
        ("length-collapse", "error"),
        ("entropy-collapse", "error"),
    ]


def test_shorter_answers_that_earn_more_are_no_collapse() -> None:
    assert names(run(policy_tokens=(3200.0, 300.0), reward=(0.2, 0.8), success=(0.2, 0.8))) == []


def test_shorter_answers_to_tasks_that_are_solved_are_no_collapse() -> None:
    assert names(run(policy_tokens=(3200.0, 300.0), success=(0.95, 0.95))) == []


def test_a_trend_needs_both_ends_and_steps_between_them() -> None:
    assert names(run(MIN_STEPS - 1, policy_tokens=(3200.0, 300.0))) == []
    assert names(run(MIN_STEPS, policy_tokens=(3200.0, 300.0))) == ["length-collapse"]


def test_a_disk_that_is_enough_for_the_steps_left_is_no_finding() -> None:
    falling = {"machine__disk_free_gib": (100.0, 60.0)}
    assert names(run(steps=60, **falling)) == []
    [finding] = find(run(steps=100, **falling))
    assert (finding.name, finding.severity) == ("disk-runs-out", "warning")
    assert "enough for 43 more steps (about 0.7 h), but 70 are left" in finding.summary
    [finding] = find(run(steps=100, machine__disk_free_gib=(100.0, 2.0)))
    assert finding.severity == "error"
    assert names(run(FORECAST_STEPS - 1, machine__disk_free_gib=(100.0, 2.0))) == []


def test_where_a_whole_step_is_compared_tasks_that_differ_are_a_signal() -> None:
    view = run(reward_std_in_group=(0.0, 0.0))
    assert names(view) == ["no-reward-variance"]
    settings = Settings(steps=1000, compares_replicas=False)
    assert [Settings.of({"learner": {"advantage": each}}).compares_replicas for each in ("gae", "grpo")] == [
        False,
        True,
    ]
    assert names(RunView(settings, view.start, view.recent)) == []
    equal = run(reward_min=(1.0, 1.0))
    assert names(RunView(settings, equal.start, equal.recent)) == ["no-reward-variance"]


def test_equal_rewards_are_no_fault_where_a_teacher_scores_the_tokens() -> None:
    view = run(reward_std_in_group=(0.0, 0.0), distill__reverse_kl=(0.8, 0.2))
    assert names(view) == []


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ((0.0, 0.0), "every episode earned 0"),
        ((1.0, 1.0), "every episode earned 1"),
        ((0.0, 1.0), "all replicas of a task earn the same, though tasks differ"),
    ],
)
def test_the_rewards_decide_what_is_said_about_a_run_that_learns_nothing(
    rewards: tuple[float, float], why: str
) -> None:
    low, high = rewards
    [finding] = find(run(reward_std_in_group=(0.0, 0.0), reward_min=(low, low), reward_max=(high, high)))
    assert finding.summary == f"nothing is learnt since step 1: {why}"


@pytest.mark.parametrize(
    ("probe", "first", "sampler", "name"),
    [
        (0.1, 0.05, 1.0, "mismatch-dtype"),
        (0.1, 0.0, 1.0, "mismatch-weights"),
        (0.0, 0.0, 1.0, "mismatch-stale-cache"),
        (0.0, 0.05, 0.7, "mismatch-temperature"),
        (0.0, 0.05, 1.0, "mismatch-template"),
        (0.0, 0.012, 0.7, "mismatch-temperature"),
    ],
)
def test_two_questions_tell_the_causes_of_a_mismatch_apart(
    probe: float, first: float, sampler: float, name: str
) -> None:
    view = run(
        mismatch_kl_k3=(first, 0.05),
        mismatch_gap_mean=(0.2, 0.2),
        weights__parity_mean=(probe, probe),
        behavior_entropy=(sampler, sampler),
    )
    assert names(view) == [name]


def episodes(
    number: int, level: str = "easy", *, seconds: float = 1.0, answer: str = "a", is_cut: bool = False, **about: Any
) -> list[Episode]:
    """Episodes of different tasks; `about`: what differs from a sound one."""
    texts = Texts(is_cut, about.pop("generate_s", 0.9 * seconds), answer, about.pop("repeated", 0.0), ())
    sound = {"reward": 0.5, "success": True, "cause": None, "texts": texts} | about
    return [Episode(20, level, f"{level}:{place}", seconds=seconds, **sound) for place in range(number)]


def names_of(*played: list[Episode], first: Sequence[Episode] = (), **ends: tuple[float, float]) -> list[str]:
    view = run(**ends)
    return names(RunView(view.settings, view.start, view.recent, first, list(chain(*played))))


def test_a_level_whose_episodes_are_far_longer_is_hot_if_it_takes_most_of_the_time() -> None:
    assert names_of(episodes(40), episodes(40, "slow", seconds=5.0)) == ["level-hot"]
    assert names_of(episodes(40), episodes(40, "slow", seconds=3.0)) == []
    assert names_of(episodes(400), episodes(20, "slow", seconds=5.0)) == []


def test_a_level_always_fails_if_another_does_not() -> None:
    failed = episodes(60, "hard", success=False)
    assert names_of(episodes(60), failed) == ["level-always-fails"]
    assert names_of(failed) == []
    assert names_of(episodes(60), failed[:40]) == []
    assert names_of(episodes(60), failed, [replace(failed[0], reward=0.7)]) == [], "hard, but not without signal"
    assert names_of(episodes(60), episodes(60, "broken", reward=None, cause="env_error")) == ["level-always-fails"]


def test_the_learner_is_starved_by_environments_and_on_gpus_by_servers_too() -> None:
    idle = {"idle__learner": (0.7, 0.7)}
    assert names_of(episodes(60, generate_s=0.2), **idle) == ["learner-starved"]
    assert names_of(episodes(60), **idle) == []
    view = run(**idle)
    on_gpus = RunView(Settings(steps=1000, is_on_gpus=True), view.start, view.recent, (), episodes(60))
    assert names(on_gpus) == ["learner-starved"]


def test_episodes_that_fail_are_counted_by_cause() -> None:
    failing = {"books__failed_env_error": (0.0, 400.0), "books__failed_bad_reward": (0.0, 40.0)}
    [finding] = find(run(**failing))
    assert (finding.name, finding.severity) == ("episodes-fail", "warning")
    assert finding.summary == "288 of 896 episodes failed: env_error 262, bad_reward 26"
    assert names(run(books__failed_env_error=(0.0, 20.0))) == []
    assert names(run(books__failed_cancelled=(0.0, 400.0))) == []


def test_cut_answers_are_a_problem_where_they_earn_less() -> None:
    cut = episodes(40, is_cut=True, reward=0.0)
    assert names_of(episodes(40), cut) == ["clipped-answers"]
    settings = Settings.of({"stages": [{"name": "judge", "reward": "replace"}]})
    assert names(replace(run(), settings=settings, episodes=[*episodes(40), *cut])) == [], "a judge pays"
    assert names_of(episodes(40), episodes(40, is_cut=True)) == []
    assert names_of(episodes(400), cut) == []
    assert names_of(episodes(7), cut) == [], "too few to compare with"
    assert names_of(cut, episodes(40)) == [], "the reward rises: the model learns to be brief"


def test_text_that_repeats_itself_must_be_in_many_episodes() -> None:
    assert names_of(episodes(80), episodes(40, repeated=0.9)) == ["repeated-text"]
    assert names_of(episodes(380), episodes(40, repeated=0.9)) == []


def test_one_answer_that_wins_everywhere_is_a_trick_unless_it_was_there_from_the_start() -> None:
    trick, others = episodes(40, answer="exit(0)", reward=1.0), episodes(60)
    before = [replace(each, step=0) for each in episodes(20)]
    assert names_of(trick, others, first=before) == ["same-answer-wins"]
    known = [replace(each, step=0) for each in episodes(20, answer="exit(0)")]
    assert names_of(trick, others, first=known) == []
    later = [replace(each, step=5) for each in episodes(40, answer="exit(0)", reward=1.0)]
    assert names_of(trick, others, first=[*before, *later]) == ["same-answer-wins"], "found within the first third"
    guessed = episodes(40, answer="exit(0)", reward=0.5)
    assert names_of(trick, guessed, first=before) == []


def answered(number: int, answers: list[int]) -> list[Episode]:
    """Replicas of one task that did the same and were answered so."""
    texts = [Texts(False, 1.0, "a", 0.0, ((number, answer),)) for answer in answers]
    return [Episode(0, "Maze-v0", f"Maze-v0:{number}", 0.5, None, None, 1.0, each) for each in texts]


def test_answers_that_are_always_new_are_no_lies() -> None:
    base = run()

    def with_answers(answers: list[int]) -> list[str]:
        episodes = [each for number in range(20) for each in answered(number, answers)]
        return names(RunView(base.settings, base.start, base.recent, (), episodes))

    assert with_answers([1, 1, 1, 1]) == []
    assert with_answers([1, 2, 3, 4]) == []
    assert with_answers([1, 1, 1, 2]) == ["inconsistent-answers"]


METRICS = [*SOUND, "books/produced", "books/dropped_stale", "books/failed_env_timeout", "sandbox/wait_s.mean"]
VALUES = st.none() | st.floats() | st.just(0.0)
ROWS = st.lists(st.dictionaries(st.sampled_from(METRICS), VALUES), max_size=40)
TEXTS = st.builds(Texts, st.booleans(), st.floats(0, 1e6), st.text(max_size=2), st.floats(0, 1), st.just(()))
EPISODES = st.lists(
    st.builds(
        Episode,
        step=st.integers(0, 99),
        level=st.sampled_from(["a", "b"]),
        task_id=st.text(max_size=2),
        reward=st.none() | st.floats(-1e6, 1e6),
        success=st.none() | st.booleans(),
        cause=st.sampled_from([None, "env_timeout"]),
        seconds=st.floats(0, 1e6),
        texts=st.none() | TEXTS,
    ),
    max_size=120,
)


@settings(max_examples=40)
@given(rows=ROWS, episodes=EPISODES)
def test_no_figures_at_all_break_a_rule(rows: list[dict[str, Any]], episodes: list[Episode]) -> None:
    numbered = [{**row, "step": step} for step, row in enumerate(rows, start=1)]
    view = RunView(Settings(steps=50), Steps(numbered[:10]), Steps(numbered), episodes, episodes)
    for finding in find(view):
        assert finding.line.isprintable()
