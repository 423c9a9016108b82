"""PPO-EWMA: the proximal policy is that of an average of weights, whatever ranks, minibatches and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.ranks.optimizer import WeightAverage
from roll_flash.types import Group
from tests.learner.in_process import assert_equal_weights, assert_same_weights, in_process, weights_of
from tests.learner.plain_loop import token_logprobs, with_advantages
from tests.learner.samples import make_group
from tests.learner.test_steps import GROUPS, Weights, minibatches_of, step, trained

DECAY = 0.75
EWMA: dict[str, Any] = {"proximal_decay": DECAY, "learning_rate": 1e-2}
STEPS = [GROUPS[:2], GROUPS[2:], [make_group(7, prompt=20, turn=(3, 12)), GROUPS[0]]]


def test_the_average_weighs_each_optimizer_step_by_its_age() -> None:
    parameter = nn.Parameter(torch.tensor([8.0, -3.0]))
    average = WeightAverage({"weight": parameter}, DECAY)
    seen = [parameter.detach().clone().double()]
    for value in ([1.0, 2.0], [4.0, 4.0], [-1.0, 0.5]):
        parameter.data = torch.tensor(value)
        average.update()
        seen.append(torch.tensor(value).double())
        weights = DECAY ** torch.arange(len(seen) - 1, -1, -1, dtype=torch.float64)
        expected = (torch.stack(seen) * weights[:, None]).sum(0) / weights.sum()
        with average.in_place():
            torch.testing.assert_close(parameter.detach().double(), expected, atol=1e-6, rtol=1e-6)
        assert parameter.tolist() == value


def plain_ewma(folder: Path, steps: Sequence[Sequence[Sequence[Group]]]) -> Weights:
    """Decoupled PPO (Hilton et al., equation 4) whose proximal policy is averaged anew from all weights so far."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    seen = [deepcopy(model.state_dict())]
    for minibatches in steps:
        weights = np.array([DECAY**age for age in reversed(range(len(seen)))])
        weights /= weights.sum()
        proximal = deepcopy(model)
        mean = {
            name: sum(weight * state[name].double() for weight, state in zip(weights, seen, strict=True)).float()
            for name in seen[0]
        }
        proximal.load_state_dict(mean)
        samples = [[sample for group in part for sample in with_advantages(group)] for part in minibatches]
        total = sum(trajectory.policy_tokens for part in samples for trajectory, _ in part)
        for part in samples:
            for trajectory, advantage in part:
                logprobs, _ = token_logprobs(model, trajectory)
                with torch.no_grad():
                    prox, _ = token_logprobs(proximal, trajectory)
                ratio = (logprobs - prox).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                rho = (prox - torch.tensor(trajectory.logprobs[trajectory.policy_mask])).exp().clamp(max=2.0)
                (-(rho * surrogate).sum() / (total / len(minibatches))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(deepcopy(model.state_dict()))
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


@pytest.mark.parametrize("minibatches", [1, 2])
def test_steps_are_those_of_a_loop_that_keeps_all_weights(tiny_model: Path, minibatches: int) -> None:
    found, result = trained(
        tiny_model, *([[group] for group in groups] for groups in STEPS), **EWMA | {"minibatches": minibatches}
    )
    parts = [minibatches_of(groups, minibatches, version) for version, groups in enumerate(STEPS)]
    expected = plain_ewma(tiny_model, parts)
    for name, tensor in expected.items():  # steps of 1e-2, see `assert_same_weights`
        assert float((found[name] - tensor).double().square().mean().sqrt()) <= 5e-5, name
    other, _ = trained(tiny_model, *([groups] for groups in STEPS), learning_rate=1e-2, minibatches=minibatches)
    moved = max(float((found[name] - other[name]).abs().max()) for name in found)
    assert moved > 1e-3, "the average makes a difference here"
    assert result.metrics["clip_fraction"] > 0, "the ratio to an average is not 1 at the start of a step"


@pytest.mark.parametrize("has_average", [True, False])
def test_a_resumed_run_goes_on_with_its_average(tiny_model: Path, tmp_path: Path, has_average: bool) -> None:
    """A checkpoint of a run without one begins the average with its weights."""
    settings = {**EWMA, "proximal_decay": DECAY if has_average else None}

    async def write(learner: FsdpLearner) -> Weights:
        for groups in STEPS[:2]:
            await step(learner, groups)
        await (await learner.begin_save(tmp_path / "state"))
        await step(learner, STEPS[2])
        return await weights_of(learner)

    async def read(learner: FsdpLearner) -> Weights:
        await learner.load(tmp_path / "state")
        await step(learner, STEPS[2])
        return await weights_of(learner)

    expected = in_process(tiny_model, write, **settings)
    found = in_process(tiny_model, read, **EWMA)
    if has_average:
        return assert_equal_weights(found, expected)
    assert_same_weights(found, expected)


def test_adapters_have_an_average_of_their_own_size(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> int:
        await step(learner, STEPS[0])
        rank: Any = learner._ranks[0]
        return sum(tensor.numel() for tensor in rank._rank._average.state()["weights"].values())

    lora = {"rank": 2, "targets": ["q_proj"]}
    assert in_process(tiny_model, use, lora=lora, **EWMA) == 2 * 2 * (48 + 64)  # two layers, A and B


def test_the_model_is_as_it_was_after_the_average_was_used(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> tuple[Weights, Weights]:
        await step(learner, STEPS[0])
        before = await weights_of(learner)
        await learner.accumulate(STEPS[1])
        await learner.abandon_step()
        return before, await weights_of(learner)

    assert_equal_weights(*in_process(tiny_model, use, **EWMA))


def test_the_average_begins_where_a_warm_start_ends(tiny_model: Path) -> None:
    """No episode was sampled by the policies before: the first step has ratios of 1."""

    async def use(learner: FsdpLearner) -> float:
        for _ in range(3):
            await learner.sft_step(STEPS[0][0].trajectories, counts=False)
        return (await step(learner, STEPS[1])).metrics["clip_fraction"]

    assert in_process(tiny_model, use, **EWMA) == 0
