"""A budget is kept whatever comes back, every attempt is accounted for, and only infrastructure is tried again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from scripted_runner import ScriptedRunner, trajectory_of

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import EnvConfig
from roll_flash.evaluation.attempts import RETRIED_CAUSES, Attempts
from roll_flash.evaluation.budget import Budget
from roll_flash.evaluation.evaluation import evaluate
from roll_flash.evaluation.result import EvalResult
from roll_flash.evaluation.tasks import build_episodes, held_out_tasks
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams

ENV = EnvConfig(id="Maze-v0", max_turns=2)


def run(runner: ScriptedRunner, folder: Path | None = None, *, at_once: int = 4, **eval: Any) -> EvalResult:
    plan = EvalConfig(**{"tasks": 20, "seeds_from": 1000, **eval})
    sampling = SamplingParams(max_new_tokens=10)
    with TemporaryDirectory() as scratch:
        target = folder or Path(scratch)
        return asyncio.run(
            evaluate(runner, env=ENV, eval=plan, sampling=sampling, max_concurrent=at_once, folder=target, label="test")
        )


def solved(spec: EpisodeSpec) -> Any:
    return True


def test_a_budget_of_tokens_stops_before_it_is_spent_and_says_what_is_missing(tmp_path: Path) -> None:
    runner = ScriptedRunner(solved, tokens=(10, 3))
    result = run(runner, tmp_path, max_tokens_total=100)
    assert (result.scored, len(runner.ran)) == (7, 7)  # 13 tokens each
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (70, 21)
    assert result.stopped is not None
    assert "91 of 100 tokens are used" in result.stopped
    assert "raise --max-tokens-total" in result.stopped
    assert "13 of 20 are missing" in result.table()


def test_a_larger_budget_goes_on_where_the_smaller_one_stopped(tmp_path: Path) -> None:
    run(ScriptedRunner(solved), tmp_path, max_tokens_total=100)
    more = ScriptedRunner(solved)
    result = run(more, tmp_path, max_tokens_total=1000)
    assert (len(more.ran), result.scored, result.stopped) == (13, 20, None)


def test_the_same_budget_again_starts_nothing(tmp_path: Path) -> None:
    run(ScriptedRunner(solved), tmp_path, max_tokens_total=100)
    again = ScriptedRunner(solved)
    result = run(again, tmp_path, max_tokens_total=100)
    assert again.ran == []
    assert result.stopped is not None


def test_cost_is_counted_by_the_prices_and_bounded() -> None:
    result = run(ScriptedRunner(solved, tokens=(1000, 100)), price_prompt=2.0, price_completion=10.0, max_cost=0.0151)
    assert result.usage.cost == pytest.approx(0.015)
    assert (result.scored, result.usage.prompt_tokens) == (5, 5000)
    assert "raise --max-cost" in str(result.stopped)


def test_failed_attempts_cost_too() -> None:
    result = run(ScriptedRunner(lambda spec: "env_error", tokens=(10, 3)), tasks=3)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (30, 9)


def test_tokens_that_are_not_known_are_said_to_be_unknown() -> None:
    result = run(ScriptedRunner(solved, tokens=None), tasks=3)
    assert result.usage.unknown == 3
    assert "the tokens of 3 attempts are not known" in result.table()


def test_minutes_end_what_is_in_flight_and_keep_what_has_ended(tmp_path: Path) -> None:
    class Stuck(ScriptedRunner):
        async def run(self, episodes: Any, *, max_concurrent: int) -> Any:
            async for outcome in super().run(episodes, max_concurrent=max_concurrent):
                yield outcome
                if len(self.ran) == 2:
                    await asyncio.sleep(60)

    runner = Stuck(solved)
    result = run(runner, tmp_path, max_minutes=0.02)
    assert result.scored == 2
    assert runner.closed
    assert "minutes are over" in str(result.stopped)
    assert run(ScriptedRunner(solved), tmp_path).scored == 20


@pytest.mark.parametrize("cause", sorted(RETRIED_CAUSES))
def test_what_infrastructure_did_is_tried_again_at_once(cause: Any) -> None:
    result = run(ScriptedRunner(lambda spec: cause if spec.attempt == 0 else True), tasks=6)
    assert (result.scored, result.failures, result.tried_again) == (6, {}, 6)
    assert "tried again" in result.table()


@pytest.mark.parametrize("cause", ["env_error", "env_timeout", "bad_reward", "prompt_too_long"])
def test_what_would_fail_again_is_not_tried_again(cause: Any) -> None:
    runner = ScriptedRunner(lambda spec: cause)
    assert run(runner, tasks=6).failures == {cause: 6}
    assert len(runner.ran) == 6


def test_when_everything_fails_it_stops_and_says_why() -> None:
    runner = ScriptedRunner(lambda spec: "generate_error")
    result = run(runner, max_failures_in_a_row=8, tasks=200)
    assert len(runner.ran) < 16
    assert "8 attempts failed one after another" in str(result.stopped)
    assert "generate_error: broke" in str(result.stopped)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_comes_back_every_attempt_is_accounted_for_and_the_budget_holds(data: st.DataObject) -> None:
    tasks, largest, slots = (data.draw(st.integers(1, top)) for top in (12, 40, 8))
    limit = data.draw(st.none() | st.integers(1, 400))
    config = EvalConfig(tasks=tasks, seeds_from=0, retries=data.draw(st.integers(0, 2)), max_tokens_total=limit)
    budget = Budget(config, max_turns=2, max_new_tokens=largest)
    specs = build_episodes(held_out_tasks(ENV, config), ENV, config, SamplingParams(), "x")
    attempts = Attempts(specs, config, budget)
    ended: list[str] = []
    while attempts.may_start():
        source, running = attempts.take(), []
        while True:
            running += [spec for _ in range(slots - len(running)) if (spec := next(source, None)) is not None]
            if not running:
                break
            spec = running.pop(data.draw(st.integers(0, len(running) - 1)))
            tokens = data.draw(st.integers(1, largest))
            budget.add(tokens, 0)
            if data.draw(st.booleans()):
                attempts.ended(trajectory_of(spec, True))
                ended.append(spec.episode_id)
            else:
                attempts.ended(
                    EpisodeFailure(spec.episode_id, spec.group_id, spec.task, "worker_died", "", 0, spec.attempt)
                )
                if spec.attempt == config.retries:
                    ended.append(spec.episode_id)
    assert len(ended) == len(set(ended))
    if limit is None:
        assert sorted(ended) == sorted(spec.episode_id for spec in specs)
        assert attempts.stop_reason is None
    else:
        assert budget.prompt_tokens <= limit + slots * largest
        assert attempts.stop_reason is not None or len(ended) == len(specs)
