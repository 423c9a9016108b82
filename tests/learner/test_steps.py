"""What a step does to the weights, whatever the options, against a loop that has none of the machinery."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from roll_flash.engines.learner import StepResult
from roll_flash.errors import CheckpointError, LearnerError, ModelError, StreamError
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.sequences import split_minibatches
from roll_flash.learner.ranks import rank
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.types import Group
from tests.learner.conftest import make_tiny_model
from tests.learner.in_process import assert_equal_weights, assert_same_weights, in_process, weights_of
from tests.learner.plain_loop import plain_loop
from tests.learner.samples import make_group, make_trajectory, prepare_group, replace_trajectory, sequences_of
from tests.learner.synchronous_loop import synchronous_loop

GROUPS = [make_group(seed, prompt=20, turn=(3, 12)) for seed in range(4)]
SILENT = make_group(9, rewards=[1.0] * 4)
Weights = dict[str, torch.Tensor]


async def step(learner: FsdpLearner, *batches: Sequence[Group]) -> StepResult:
    for batch in batches:
        await learner.accumulate(batch)
    return await learner.finish_step()


def trained(model: Path, *steps: Sequence[Sequence[Group]], **settings: Any) -> tuple[Weights, StepResult]:
    async def use(learner: FsdpLearner) -> tuple[Weights, StepResult]:
        results = [await step(learner, *batches) for batches in steps]
        return await weights_of(learner), results[-1]

    return in_process(model, use, **settings)


def minibatches_of(groups: Sequence[Group], count: int, version: int) -> list[list[Group]]:
    """Which groups the learner puts into which optimizer step."""
    by_id = {group.group_id: group for group in groups}
    parts = split_minibatches({name: _tokens(group) for name, group in by_id.items()}, count, (0, version))
    return [[by_id[name] for name in part] for part in parts]


def _tokens(group: Group) -> int:
    prepared = prepare_group(group, 9, AdvantageConfig(keep_without_signal=True))
    return sum(int(sequence.policy_mask.sum()) for sequence in sequences_of(prepared))


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"loss_normalization": "sequences"}, {"by_sequence": True}),
    ({"kl": {"coefficient": 0.3}}, {"kl": 0.3}),
    ({"entropy_bonus": 0.05}, {"entropy": 0.05}),
    ({"gradient_checkpointing": True}, {}),
]


@pytest.mark.parametrize(("settings", "plain"), OPTIONS)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_is_what_a_plain_loop_does_with_every_option(
    tiny_model: Path, settings: dict[str, Any], plain: dict[str, Any], minibatches: int
) -> None:
    batches = [[*GROUPS[:3], SILENT], [GROUPS[3], SILENT]]
    found, result = trained(tiny_model, *([batch] for batch in batches), minibatches=minibatches, **settings)
    parts = [minibatches_of(batch, minibatches, version) for version, batch in enumerate(batches)]
    assert_same_weights(found, plain_loop(tiny_model, parts, **plain))
    assert result.version == 2
    assert result.metrics["optimizer_steps"] == minibatches


@pytest.mark.parametrize("normalization", ["tokens", "sequences"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_order_and_the_split_of_what_comes_in_change_nothing(
    tiny_model: Path, normalization: str, minibatches: int
) -> None:
    settings: dict[str, Any] = {"loss_normalization": normalization, "minibatches": minibatches}
    settings["kl"] = {"coefficient": 0.1, "estimator": "k3"}
    expected, _ = trained(tiny_model, [GROUPS], **settings)
    shuffled = [
        dataclasses.replace(group, trajectories=group.trajectories[::-1]) for group in (GROUPS[2], GROUPS[0], GROUPS[3])
    ]
    found, _ = trained(tiny_model, [[shuffled[0]], shuffled[1:], [GROUPS[1]]], micro_batch_tokens=70, **settings)
    assert_same_weights(found, expected)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "gigpo"])
@pytest.mark.parametrize("normalization", ["tokens", "sequences"])
def test_garbage_that_is_not_the_policys_changes_nothing(tiny_model: Path, advantage: str, normalization: str) -> None:
    settings = {"advantage": advantage, "loss_normalization": normalization, "entropy_bonus": 0.01}
    group = GROUPS[0]
    first = group.trajectories[0]
    dirty = dataclasses.replace(first, logprobs=np.where(first.policy_mask, first.logprobs, np.nan))
    nan = make_trajectory([5, 6, 7, 8], [False, False, True, True], reward=float("nan"), name="bad")
    bad = dataclasses.replace(group, trajectories=(dirty, *group.trajectories[1:], nan))
    clean, _ = trained(tiny_model, [[group, GROUPS[1]]], **settings)
    found, result = trained(tiny_model, [[bad, GROUPS[1]]], **settings)
    assert_equal_weights(found, clean)
    assert result.metrics["dropped_reward_not_finite"] == 1


@pytest.mark.parametrize("settings", [{}, {"advantage": "reinforce++"}, {"minibatches": 2}])
def test_a_resumed_run_takes_the_very_same_next_step(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    async def write(learner: FsdpLearner) -> Weights:
        await step(learner, GROUPS[:2])
        await (await learner.begin_save(tmp_path / "state"))
        await step(learner, GROUPS[2:])
        return await weights_of(learner)

    async def read(learner: FsdpLearner) -> Weights:
        await learner.load(tmp_path / "state")
        await step(learner, GROUPS[2:])
        return await weights_of(learner)

    settings = settings | {"kl": {"coefficient": 0.1}}
    expected = in_process(tiny_model, write, **settings)
    assert_equal_weights(in_process(tiny_model, read, **settings), expected)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.5), (0.5, 0.0), (0.5, 0.1)])
def test_a_resumed_run_has_the_weight_decay_and_betas_of_its_config(
    tiny_model: Path, tmp_path: Path, before: float, after: float
) -> None:
    """Those of the checkpoint would be kept in silence, and decay norms where the groups of parameters differ."""

    async def save(learner: FsdpLearner) -> None:
        await step(learner, [SILENT])
        await (await learner.begin_save(tmp_path / "state"))

    async def resume(learner: FsdpLearner) -> tuple[Weights, Weights, tuple[float, float]]:
        await learner.load(tmp_path / "state")
        loaded = await weights_of(learner)
        await step(learner, [SILENT])
        rank: Any = learner._ranks[0]
        return loaded, await weights_of(learner), rank._rank._optimizer.param_groups[0]["betas"]

    in_process(tiny_model, save, weight_decay=before)
    loaded, after_step, betas = in_process(tiny_model, resume, weight_decay=after, betas=(0.5, 0.6), learning_rate=0.1)
    assert betas == (0.5, 0.6)
    for name, tensor in loaded.items():
        expected = tensor * (1 - 0.1 * after) if "norm" not in name else tensor
        torch.testing.assert_close(after_step[name], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("row_tokens", [1, 4096])
def test_alpha_zero_is_the_plain_synchronous_loop_bit_by_bit(tiny_model: Path, row_tokens: int) -> None:
    """With `row_tokens=1` nothing is packed. Streaming in, staging and probing in between must not show in any bit."""
    steps = [[make_group(seed, prompt=20, version=version) for seed in range(3)] for version in range(3)]

    async def streamed(learner: FsdpLearner) -> Weights:
        for groups in steps:
            for group in groups:
                await learner.accumulate([group])
                await weights_of(learner)
                await learner.logprobs_of([[3, 4, 5]])
            await learner.finish_step()
        return await weights_of(learner)

    found = in_process(tiny_model, streamed, async_ratio=0, micro_batch_tokens=row_tokens)
    assert_equal_weights(found, synchronous_loop(tiny_model, steps, row_tokens=row_tokens))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_tells_the_log_probability_of_each_token_that_it_computed_if_it_is_asked_to(
    tiny_model: Path, minibatches: int
) -> None:
    played = [each for group in GROUPS for each in group.trajectories]

    async def use(learner: FsdpLearner) -> tuple[list[np.ndarray[Any, Any]], StepResult]:
        expected = await learner.logprobs_of([each.token_ids.tolist() for each in played])
        return expected, await step(learner, GROUPS[:1], [*GROUPS[1:], SILENT])

    settings = {"minibatches": minibatches, "micro_batch_tokens": 100}
    expected, result = in_process(tiny_model, use, log_logprobs=True, **settings)
    assert set(result.logprobs) == {(each.episode_id, 0) for each in played}
    for each, logprobs in zip(played, expected, strict=True):
        np.testing.assert_allclose(result.logprobs[each.episode_id, 0], logprobs[each.policy_mask[1:]], atol=1e-5)
    assert not in_process(tiny_model, use, **settings)[1].logprobs


def test_a_huge_coefficient_holds_the_policy_at_its_reference(tiny_model: Path) -> None:
    start, _ = trained(tiny_model, [[SILENT]])

    def moved(**kl: Any) -> float:
        async def use(learner: FsdpLearner) -> float:
            for version in range(8):
                result = await step(learner, [make_group(0, version=version), make_group(1, version=version)])
            return result.metrics["kl_reference"]

        return in_process(tiny_model, use, kl=kl, learning_rate=3e-3)

    assert start
    free, held = moved(coefficient=1e-9), moved(coefficient=30.0)
    assert held < 0.2 * free


def test_another_folder_can_be_the_reference_and_must_speak_the_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    _, result = trained(tiny_model, [GROUPS[:1]], kl={"coefficient": 0.1, "reference": str(other)})
    assert result.metrics["kl_reference"] > 0
    with pytest.raises(ModelError, match="not a Hugging Face model folder"):
        trained(tiny_model, [GROUPS[:1]], kl={"coefficient": 0.1, "reference": str(tmp_path / "nowhere")})


def test_one_giant_sequence_over_the_token_budget_is_trained_alone(tiny_model: Path) -> None:
    giant = make_group(3, prompt=300, replicas=2, turn=(100, 120))
    found, result = trained(tiny_model, [[giant, GROUPS[0]]], micro_batch_tokens=50)
    assert_same_weights(found, plain_loop(tiny_model, [[[giant, GROUPS[0]]]]))
    assert result.metrics["rows"] >= 3


def test_a_poisoned_minibatch_is_skipped_and_the_others_train(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_flash.stream.episodes.MAX_REWARD", math.inf)  # which keeps such rewards out
    huge = dataclasses.replace(GROUPS[0].trajectories[0], reward=1e19)
    poisoned = replace_trajectory(GROUPS[0], 0, huge)
    found, result = trained(
        tiny_model, [[poisoned, *GROUPS[1:]]], minibatches=4, normalize_advantage="none", max_skipped_steps=1
    )
    assert (result.metrics["skipped"], result.metrics["optimizer_steps"], result.skipped) == (1, 3, False)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


def test_a_step_of_nothing_but_broken_data_is_an_error_that_can_be_survived(tiny_model: Path) -> None:
    nan = dataclasses.replace(GROUPS[0].trajectories[0], reward=float("nan"))
    broken = dataclasses.replace(GROUPS[0], trajectories=(nan,))

    async def use(learner: FsdpLearner) -> int:
        await learner.accumulate([broken])
        with pytest.raises(LearnerError, match="nothing to step on: dropped_reward_not_finite 1, groups 1"):
            await learner.finish_step()
        return (await step(learner, GROUPS[:1])).version

    assert in_process(tiny_model, use) == 1
    assert in_process(tiny_model, use, advantage="reinforce++") == 1


def test_diagnostics_tell_mismatch_from_policy_lag(tiny_model: Path) -> None:
    """What the learner itself sampled has no mismatch; older tokens show how far the policy went since."""

    async def use(learner: FsdpLearner) -> dict[str, float]:
        async def resampled(seed: int, version: int) -> Group:
            group = make_group(seed, version=version)
            members = []
            for trajectory in group.trajectories:
                own = np.zeros(len(trajectory.token_ids), np.float32)
                own[1:] = (await learner.logprobs_of([trajectory.token_ids.tolist()]))[0]
                members.append(dataclasses.replace(trajectory, logprobs=np.where(trajectory.policy_mask, own, 0)))
            return dataclasses.replace(group, trajectories=tuple(members))

        old = await resampled(0, 0)
        await step(learner, [await resampled(1, 0)])
        return (await step(learner, [old, await resampled(2, 1)])).metrics

    metrics = in_process(tiny_model, use, learning_rate=1e-2)
    assert metrics["mismatch_gap_max"] < 1e-4
    assert metrics["mismatch_kl_k3"] == metrics["kl_k3/age_0"] < 1e-6
    assert metrics["lag_kl_k3"] == pytest.approx(metrics["kl_k3/age_1"], rel=1e-3)
    assert metrics["lag_kl_k3"] > 1e-4
    for name in ("clip_fraction/age_0", "correction_fraction/age_1", "rho_p10", "rho_p50", "rho_p90"):
        assert name in metrics


def test_an_exported_model_names_the_token_that_ends_its_turns(tiny_model: Path, tmp_path: Path) -> None:
    """The files of a base model name the end of a document: whoever serves the export would go on after its turns. The
    folder of the model may be gone by then: somebody has cleaned a cache."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [chr(2)]})
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + '" + chr(2) + "' }}{% endfor %}"
    tokenizer.save_pretrained(base)

    async def use(learner: FsdpLearner) -> None:
        shutil.rmtree(base)
        await (await learner.begin_export(tmp_path / "hf"))

    in_process(base, use)
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [1, 2]


def test_adapters_learn_and_leave_everything_else_alone(tiny_model: Path, tmp_path: Path) -> None:
    text = [5, 9, 17, 4, 90, 33]

    async def use(learner: FsdpLearner) -> tuple[Weights, Weights, np.ndarray]:
        before = await weights_of(learner)
        result = await step(learner, GROUPS)
        assert result.metrics["grad_norm"] > 0
        await (await learner.begin_save(tmp_path / "state"))
        await (await learner.begin_export(tmp_path / "hf"))
        return before, await weights_of(learner), (await learner.logprobs_of([text]))[0]

    settings: dict[str, Any] = {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}, "learning_rate": 1e-2}
    settings["kl"] = {"coefficient": 0.1}
    before, after, logprobs = in_process(tiny_model, use, **settings)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "down_proj" in name}
    assert all(torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 2 for name in changed)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.tensor(text)
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)

    async def resumed(learner: FsdpLearner) -> Weights:
        await learner.load(tmp_path / "state")
        return await weights_of(learner)

    assert_equal_weights(in_process(tiny_model, resumed, **settings), after)
    with pytest.raises(CheckpointError, match="another model"):
        in_process(tiny_model, resumed)


def test_an_adapter_for_a_layer_that_is_not_there_is_one_clear_line(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"no linear layer named query"):
        trained(tiny_model, [GROUPS[:1]], lora={"rank": 2, "targets": ["query"]})


def test_steps_go_on_while_a_checkpoint_and_a_model_are_written(tiny_model: Path, tmp_path: Path) -> None:
    """What is written is what was there when it began, to the bit."""

    async def write(learner: FsdpLearner) -> tuple[Weights, Weights]:
        await step(learner, GROUPS[:2])
        before = await weights_of(learner)
        saving = await learner.begin_save(tmp_path / "state")
        exporting = await learner.begin_export(tmp_path / "hf")
        await step(learner, GROUPS[2:])
        await saving
        await exporting
        return before, await weights_of(learner)

    async def read(learner: FsdpLearner) -> tuple[Weights, Weights]:
        await learner.load(tmp_path / "state")
        loaded = await weights_of(learner)
        await step(learner, GROUPS[2:])
        return loaded, await weights_of(learner)

    before, after = in_process(tiny_model, write)
    loaded, again = in_process(tiny_model, read)
    assert_equal_weights(loaded, before)
    assert_equal_weights(again, after)
    assert_equal_weights(load_file(tmp_path / "hf" / "model.safetensors"), before)


@pytest.mark.parametrize("what", ["begin_save", "begin_export"])
def test_a_full_disk_loses_nothing_but_the_checkpoint(tiny_model: Path, tmp_path: Path, what: str) -> None:
    async def use(learner: FsdpLearner) -> None:
        folder = tmp_path / "state"
        before = await weights_of(learner)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(CheckpointError, match="cannot be written"):
                await (await getattr(learner, what)(folder))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(tmp_path) == []
        assert_equal_weights(await weights_of(learner), before)
        await (await getattr(learner, what)(folder))
        assert (await step(learner, GROUPS[:1])).version == 1

    in_process(tiny_model, use)


def test_trajectories_that_are_lost_are_an_error_that_leaves_the_learner_usable(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(learner: FsdpLearner) -> Weights:
        with monkeypatch.context() as patched:
            patched.setattr(rank, "fetch_tokens", lost)
            with pytest.raises(StreamError, match="are lost"):
                await learner.accumulate(GROUPS[:1])
            await learner.abandon_step()
        await step(learner, GROUPS)
        return await weights_of(learner)

    def lost(_: object) -> None:
        raise StreamError("trajectories in Ray's object store are lost")

    assert_equal_weights(in_process(tiny_model, use), trained(tiny_model, [GROUPS])[0])


@pytest.mark.parametrize(
    "settings", [{}, {"minibatches": 2}, {"normalize_advantage": "batch"}, {"kl": {"coefficient": 0.1}}]
)
def test_each_trajectory_is_fetched_once_for_a_step(
    tiny_model: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = Counter[str]()
    real = rank.fetch_tokens

    def counted(data: Sequence[Any]) -> Any:
        fetched.update(each.episode_id for each in data)
        return real(data)

    monkeypatch.setattr(rank, "fetch_tokens", counted)
    trained(tiny_model, [GROUPS[:2], GROUPS[2:]], **settings)
    assert fetched == Counter(each.episode_id for group in GROUPS for each in group.trajectories)
