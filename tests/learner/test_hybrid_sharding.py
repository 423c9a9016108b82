"""Ranks in groups that each share one copy of the model take the same steps as ranks that all share one; and so do
ranks whose rows need other weights."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.model_check.architectures import ALONE, write_model
from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.config.tree import Config
from roll_flash.learner.losses.objective import SINGLE_TOKEN
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.model.exact_settings import ExactSettings, LogitTransform
from roll_flash.learner.model.policy_model import load_policy_model
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.ranks.rank import LearnerRank
from roll_flash.learner.weights.staged import whole_tensors
from roll_flash.models.shape import read_shape
from roll_flash.planner.machines.memory import rank_memory
from tests.learner.in_process import in_process
from tests.learner.rank_processes import run_ranks
from tests.learner.samples import make_group, prepare_group, sequences_of

FORM = ExactSettings(shares_prefixes=True, logit_transform=LogitTransform(), vocabulary=128)
ONE_BY_ONE = replace(FORM, shares_prefixes=False)


@pytest.mark.parametrize(("ranks", "shard_size"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly)])
def test_several_copies_take_the_same_step_as_one(tiny_model: Path, ranks: int, shard_size: int) -> None:
    addresses = [get_context("forkserver").SimpleQueue() for _ in range(ranks)]
    run_ranks(compare_on_rank, (tiny_model, shard_size, addresses), ranks=ranks)


def compare_on_rank(number: int, model: Path, shard_size: int, addresses: list[Any]) -> None:
    (expected, norm), (found, found_norm) = (
        step_on_rank(number, model, addresses, shard_size=size) for size in (None, shard_size)
    )
    assert found_norm == pytest.approx(norm, rel=1e-5)
    for name, tensor in expected.items():
        # Adam divides by the size of the gradient: where that is nothing, sums in another order decide the step.
        assert float((found[name] - tensor).square().mean().sqrt()) <= 5e-6, name


def step_on_rank(
    number: int, model: Path, addresses: list[Any], **settings: Any
) -> tuple[dict[str, torch.Tensor], float]:
    config = LearnerConfig(ranks=len(addresses), learning_rate=1e-3, device="cpu", step_timeout_s=120, **settings)
    rank = LearnerRank(model, config, rank=number, seed=0, temperature=1.0, run="test")
    if number == 0:
        opened = rank.open_store(None)
        for queue in addresses:
            queue.put(opened)
    rank.start(addresses[number].get(), {model: FORM})
    weight = next(parameter for parameter in rank._policy.parameters() if parameter.ndim > 1)
    assert isinstance(weight, DTensor)
    hybrid = config.shard_size is not None
    assert weight.placements == ((Replicate(), Shard(0)) if hybrid else (Shard(0),))
    assert len(weight.to_local()) == len(weight) // (config.shard_size or config.ranks)
    prepared = prepare_group(make_group(number, prompt=20, turn=(3, 12)), 0, AdvantageConfig())
    rank.accumulate_sequences(sequences_of(prepared))
    record = rank.update(100.0, 1e-3, skip=False)
    weights = {name: tensor.clone() for name, tensor in whole_tensors(rank._policy.model)}
    dist.barrier()
    rank.close()
    return weights, record.grad_norm


@pytest.mark.parametrize("gradient_sync", ["row", "step"])
def test_a_rank_whose_row_leaves_weights_unused_takes_part_in_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradient_sync: str
) -> None:
    """Here a rank without a row: nothing decays over its single token. Others are experts that no token of a row
    chooses, and compressed keys of rows that are too short for one."""
    monkeypatch.setitem(ALONE, "rwkv", {"attention_hidden_size": 128})
    folder = write_model("rwkv", tmp_path)
    alone = load_policy_model(folder, form=ONE_BY_ONE)
    (alone(SINGLE_TOKEN)[0].sum() * 0.0).backward()
    unused = [name for name, parameter in alone.named_parameters() if parameter.grad is None]
    assert [name.rpartition(".")[2] for name in unused] == ["time_decay"] * 2

    async def use(learner: FsdpLearner) -> float:
        await learner.accumulate([make_group(0)])
        return (await learner.finish_step()).metrics["grad_norm"]

    addresses = [get_context("forkserver").SimpleQueue() for _ in range(2)]
    run_ranks(idle_second_rank, (folder, in_process(folder, use), gradient_sync, addresses), ranks=2)


def idle_second_rank(number: int, model: Path, expected: float, gradient_sync: Any, addresses: list[Any]) -> None:
    config = LearnerConfig(ranks=2, device="cpu", step_timeout_s=120, gradient_sync=gradient_sync)
    rank = LearnerRank(model, config, rank=number, seed=0, temperature=1.0, run="test")
    if number == 0:
        opened = rank.open_store(None)
        for queue in addresses:
            queue.put(opened)
    rank.start(addresses[number].get(), {model: ONE_BY_ONE})
    prepared = prepare_group(make_group(0), 0, AdvantageConfig())
    rank.accumulate_sequences(sequences_of(prepared) if number == 0 else [])
    assert rank.update(prepared.policy_tokens, 1e-3, skip=False).grad_norm == pytest.approx(expected, rel=1e-4)
    dist.barrier()
    rank.close()


def test_the_memory_check_knows_how_many_ranks_share_a_copy() -> None:
    shape = read_shape("tiny")

    def use(**settings: Any) -> object:
        config = {"model": {"path": "tiny"}, "envs": [{"id": "Countdown-v0"}], "learner": settings}
        return rank_memory(Config.model_validate(config), shape)

    assert use(ranks=4, shard_size=2) == use(ranks=2) != use(ranks=4)


def test_copies_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValidationError, match="shard_size=3 does not divide ranks=4"):
        LearnerConfig(ranks=4, shard_size=3)
