"""Steps of a mixture of experts with replayed routing and a load-balancing loss, through FSDP and the optimizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.model_check.architectures import write_model
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.types import Group
from tests.learner.in_process import assert_same_weights, in_process, weights_of
from tests.learner.samples import make_group


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_moe", tmp_path_factory.mktemp("moe"))


def with_experts(group: Group) -> Group:
    """Experts that replicas share in their prompt, and that the model would hardly choose."""
    random = np.random.default_rng(0)
    experts = np.array([[random.permutation(4)[:2] for _ in range(2)] for _ in range(100)], np.int16)
    made = (dataclasses.replace(each, routed_experts=experts[: len(each.token_ids)]) for each in group.trajectories)
    return dataclasses.replace(group, trajectories=tuple(made))


def weights_after(folder: Path, batches: list[list[Group]], **settings: Any) -> dict[str, torch.Tensor]:
    async def use(learner: FsdpLearner) -> dict[str, torch.Tensor]:
        for batch in batches:
            await learner.accumulate(batch)
        result = await learner.finish_step()
        assert ("router_aux_loss" in result.metrics) == bool(settings.get("router_aux_loss"))
        return await weights_of(learner)

    return in_process(folder, use, **settings)


def test_rows_and_checkpointing_do_not_change_a_step_and_experts_and_balance_do(folder: Path) -> None:
    free = [make_group(seed, prompt=20) for seed in range(3)]
    groups = [with_experts(group) for group in free]
    whole = weights_after(folder, [groups], router_aux_loss=0.1)
    split = [[group] for group in groups]
    settings: dict[str, Any] = {"micro_batch_tokens": 45, "gradient_checkpointing": True, "router_aux_loss": 0.1}
    assert_same_weights(weights_after(folder, split, **settings), whole)
    for other in (weights_after(folder, [free], router_aux_loss=0.1), weights_after(folder, [groups])):
        with pytest.raises(AssertionError):
            assert_same_weights(other, whole)


def test_experts_are_balanced_over_groups_without_a_signal_too(folder: Path) -> None:
    """Their tokens count in the mean: without them the loss would weigh less, the more groups are solved or failed."""
    groups = [make_group(0), make_group(1, rewards=[1.0] * 4)]

    async def use(learner: FsdpLearner) -> dict[str, float]:
        await learner.accumulate(groups)
        return (await learner.finish_step()).metrics

    metrics = in_process(folder, use, router_aux_loss=0.1)
    assert metrics["groups_without_signal"] == 1
    assert metrics["computed_policy_tokens"] == metrics["policy_tokens"]
