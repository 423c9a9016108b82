"""The weight of the entropy bonus follows the entropy, in a run that stops and goes on too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_flash.config.sections.learner import AdaptiveEntropyConfig
from roll_flash.engines.learner import StepResult
from roll_flash.learner.losses.entropy_control import EntropyControl
from roll_flash.learner.ranks.fsdp import FsdpLearner
from tests.learner.in_process import assert_equal_weights, assert_same_weights, in_process, weights_of
from tests.learner.plain_loop import plain_loop
from tests.learner.test_steps import GROUPS, SILENT, Weights, step


def test_the_weight_rises_and_applies_while_the_entropy_is_low() -> None:
    """Skywork-OR1: c + step if e <= target, else c - step; applied in the next step only if e <= target."""
    rules = AdaptiveEntropyConfig(target=1.0, step=0.25, highest=0.5)
    control, seen = EntropyControl(0.125), []
    for entropy in (1.5, 0.5, 1.0, 0.9, 1.1, float("nan"), 2.0):
        control = control.after(entropy, rules)
        seen.append((control.weight, control.bonus))
    assert seen == [(0.0, 0.0), (0.25, 0.25), (0.5, 0.5), (0.5, 0.5), (0.25, 0.0), (0.25, 0.0), (0.0, 0.0)]
    assert EntropyControl(0.1).after(5.0, AdaptiveEntropyConfig()) == EntropyControl(0.1)


LOW: dict[str, Any] = {"adaptive_entropy": {"target": 100.0, "step": 0.05}}
"""The entropy is always below this target."""


def test_each_step_has_the_bonus_that_the_step_before_left(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> tuple[Weights, list[StepResult]]:
        results = [await step(learner, [GROUPS[0]], [SILENT])]
        first = await weights_of(learner)
        results += [await step(learner, [SILENT]), await step(learner, GROUPS[1:])]
        return first, results

    first, results = in_process(tiny_model, use, **LOW)
    assert [result.metrics["entropy_bonus"] for result in results] == pytest.approx([0.0, 0.05, 0.1])
    assert_same_weights(first, plain_loop(tiny_model, [[[GROUPS[0], SILENT]]]))
    assert results[1].metrics["grad_norm"] > 0, "a group without signal has a gradient from its entropy"
    assert results[1].metrics["loss"] == pytest.approx(-0.05 * results[1].metrics["entropy"], rel=1e-5)


def test_the_bonus_is_as_large_after_a_resume(tiny_model: Path, tmp_path: Path) -> None:
    async def write(learner: FsdpLearner) -> tuple[Weights, float]:
        await step(learner, GROUPS[:2])
        await (await learner.begin_save(tmp_path / "state"))
        result = await step(learner, GROUPS[2:])
        return await weights_of(learner), result.metrics["entropy_bonus"]

    async def read(learner: FsdpLearner) -> tuple[Weights, float]:
        await learner.load(tmp_path / "state")
        result = await step(learner, GROUPS[2:])
        return await weights_of(learner), result.metrics["entropy_bonus"]

    (expected, bonus), (found, again) = (in_process(tiny_model, use, **LOW) for use in (write, read))
    assert bonus == again == pytest.approx(0.05)
    assert_equal_weights(found, expected)
