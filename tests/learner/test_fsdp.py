"""The learner through real Ray actors, real FSDP and real files."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.model_check.architectures import write_model
from roll_flash.config.sections.distill import DistillConfig
from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.engines.learner import StepResult
from roll_flash.errors import CheckpointError, LearnerError, ModelError
from roll_flash.learner.model.policy_model import load_policy_model
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.types import FinishedGroup, Group
from tests.learner.conftest import make_tiny_model
from tests.learner.in_process import assert_same_weights, in_process, weights_of
from tests.learner.plain_loop import plain_loop
from tests.learner.samples import make_group, make_trajectory, replace_trajectory
from tests.learner.test_teacher_advantages import distill, scored

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]
Result = TypeVar("Result")
GROUPS = [make_group(seed, prompt=20, turn=(3, 12)) for seed in range(4)]


def with_learner(
    model: Path,
    use: Callable[[FsdpLearner], Awaitable[Result]],
    *,
    async_ratio: float = 10,
    distill: DistillConfig | None = None,
    **settings: Any,
) -> Result:
    async def run() -> Result:
        config = LearnerConfig(**{"learning_rate": 1e-3, "start_timeout_s": 300, "step_timeout_s": 120} | settings)
        learner = FsdpLearner(model, config, async_ratio=async_ratio, distill=distill)
        try:
            await learner.start()
            return await use(learner)
        finally:
            await learner.close()

    return asyncio.run(run())


async def step(learner: FsdpLearner, *batches: Sequence[Group | FinishedGroup]) -> StepResult:
    for batch in batches:
        await learner.accumulate(batch)
    return await learner.finish_step()


def test_the_driver_says_what_a_rank_has_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody reads the log of an actor: that a model is computed one sequence at a time was said there only."""

    async def use(learner: FsdpLearner) -> None:
        said = [line for line in caplog.messages if "prefixes are not shared" in line]
        assert len(said) == 1
        assert said[0].startswith("learner: ")

    with_learner(write_model("xglm", tmp_path), use)


@pytest.mark.parametrize(
    ("ranks", "gradient_sync"), [(1, "step"), (2, "row"), pytest.param(4, "step", marks=pytest.mark.nightly)]
)
def test_ranks_rows_and_accumulation_do_not_change_the_step(tiny_model: Path, ranks: int, gradient_sync: str) -> None:
    """Minibatches, a reference and an entropy bonus included; ranks that have no row for a pass, and a step that is
    abandoned, too."""
    settings: dict[str, Any] = {
        "minibatches": 2,
        "kl": {"coefficient": 0.1},
        "entropy_bonus": 0.01,
        "loss_normalization": "sequences",
    }

    async def use(learner: FsdpLearner) -> tuple[dict[str, torch.Tensor], StepResult]:
        await learner.accumulate(GROUPS[3:])
        await learner.abandon_step()
        await step(learner, *([group] for group in GROUPS[:3]))
        result = await step(learner, GROUPS[3:])
        return await weights_of(learner), result

    split: dict[str, Any] = {"ranks": ranks, "gradient_sync": gradient_sync, "micro_batch_tokens": 90}
    weights, result = with_learner(tiny_model, use, **split, **settings)

    async def whole(learner: FsdpLearner) -> dict[str, torch.Tensor]:
        await step(learner, GROUPS[:3])
        await step(learner, GROUPS[3:])
        return await weights_of(learner)

    assert_same_weights(weights, in_process(tiny_model, whole, **settings))
    assert result.version == 2
    assert result.metrics["staleness_max"] == 1
    assert result.metrics["shared_tokens_saved"] > 0


SHAPED: dict[str, Any] = {
    "loss": {"second_moment": 0.5, "correction_level": "turn_mean"},
    "loss_normalization": "constant",
    "loss_length": 20,
    "kl": {"coefficient": 0.01, "in_reward": True},
    "overlong": {"max_tokens": 16, "buffer_tokens": 8},
    "adaptive_entropy": {"target": 100.0, "step": 0.01},
}


TAUGHT: dict[str, Any] = {"distill": distill(weight=0.5, reward_weight=1.0, discount=0.5), "minibatches": 2}


@pytest.mark.parametrize(
    "settings", [SHAPED, {"proximal_decay": 0.5, "minibatches": 2}, TAUGHT], ids=["shaped", "average", "taught"]
)
def test_what_ranks_must_agree_on_is_the_same_on_two(tiny_model: Path, settings: dict[str, Any]) -> None:
    """The second moment is that of all ranks' tokens; rewards have the divergence that either found; the bonus of the
    second step comes from the entropy of the first; each rank averages its shards; each row gets what the teacher said
    of it."""
    groups = [scored(group) for group in GROUPS]

    async def use(learner: FsdpLearner) -> tuple[dict[str, torch.Tensor], StepResult]:
        await step(learner, *([group] for group in groups[:3]))
        result = await step(learner, groups[3:])
        return await weights_of(learner), result

    weights, result = with_learner(tiny_model, use, ranks=2, micro_batch_tokens=90, **settings)
    expected, plain = in_process(tiny_model, use, **settings)
    assert_same_weights(weights, expected)
    for name in {"second_moment_kept", "left_out_fraction", "shaped_reward", "kl_reference"} & plain.metrics.keys():
        assert result.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-3)
    if settings is SHAPED:
        assert 0 < plain.metrics["left_out_fraction"] < 1
        assert result.metrics["entropy_bonus"] == plain.metrics["entropy_bonus"] == 0.01


def test_a_step_reports_what_it_did_and_leaves_out_what_is_broken(tiny_model: Path) -> None:
    nan = dataclasses.replace(GROUPS[0].trajectories[1], reward=float("nan"))
    batch = [replace_trajectory(GROUPS[0], 1, nan), make_group(9, rewards=[1.0] * 4)]
    result = in_process(tiny_model, lambda learner: step(learner, batch))
    metrics = result.metrics
    assert result.policy_tokens == sum(g.policy_tokens for g in batch) - nan.policy_tokens
    assert metrics["dropped_reward_not_finite"] == 1
    assert metrics["groups_without_signal"] == 1
    assert metrics["trajectories"] == 8
    assert 0 < metrics["effective_sample_size"] <= 1
    assert all(np.isfinite(value) for value in metrics.values())
    for name in ("loss", "grad_norm", "kl_k1", "kl_k3", "rho_mean", "rho_max", "entropy", "clip_fraction"):
        assert name in metrics
    for name in ("correction_fraction", "computed_tokens", "forward_backward_s", "optimizer_s", "staging_s"):
        assert name in metrics


def test_a_step_without_any_signal_is_taken_also_after_the_parity_probe(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> list[StepResult]:
        await learner.logprobs_of([[1, 2, 3]])
        first = await step(learner, [make_group(9, rewards=[1.0] * 4)])
        await learner.logprobs_of([[1, 2, 3]])
        return [first, await step(learner, [make_group(9, rewards=[1.0] * 4, version=1)])]

    results = in_process(tiny_model, use)
    assert [(result.version, result.metrics["grad_norm"], result.skipped) for result in results] == [
        (1, 0.0, False),
        (2, 0.0, False),
    ]


def test_an_abandoned_step_leaves_no_trace(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> dict[str, torch.Tensor]:
        await learner.accumulate(GROUPS[3:])
        await learner.abandon_step()
        await step(learner, GROUPS[:3])
        return await weights_of(learner)

    expected = plain_loop(tiny_model, [[GROUPS[:3]]])
    assert_same_weights(in_process(tiny_model, use), expected)


def test_errors_that_leave_the_learner_usable(tiny_model: Path, tmp_path: Path) -> None:
    async def use(learner: FsdpLearner) -> None:
        with pytest.raises(LearnerError, match="nothing to step on: no groups"):
            await learner.finish_step()
        await step(learner, GROUPS[:1])
        with pytest.raises(LearnerError, match="older than"):
            await learner.accumulate(GROUPS[:1])
        with pytest.raises(LearnerError, match="at least two"):
            await learner.logprobs_of([[1]])
        fresh = make_group(5, version=1)
        await learner.accumulate([fresh])
        with pytest.raises(LearnerError, match="between steps"):
            await (await learner.begin_save(tmp_path / "state"))
        with pytest.raises(LearnerError, match="supervised step"):
            await learner.sft_step(fresh.trajectories)
        assert (await learner.finish_step()).version == 2
        weights = await learner.stage_weights()
        await learner.release_weights(weights)
        with pytest.raises(LearnerError, match="not staged"):
            await learner.release_weights(weights)
        assert os.listdir(tmp_path) == []

    in_process(tiny_model, use, async_ratio=0)


def test_steps_with_a_gradient_that_is_not_finite_are_skipped_and_end_the_run_when_they_go_on(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_flash.stream.episodes.MAX_REWARD", math.inf)  # which keeps such rewards out
    group = GROUPS[0]
    huge = dataclasses.replace(group.trajectories[0], reward=1e19)  # its advantage is finite, its gradient's norm not
    poisoned = replace_trajectory(group, 0, huge)

    async def use(learner: FsdpLearner) -> None:
        before = await weights_of(learner)
        for _ in range(2):
            result = await step(learner, [poisoned])
            assert result.skipped
            assert result.version == 0
        assert_same_weights(before, await weights_of(learner))
        assert not (await step(learner, [group])).skipped
        for _ in range(2):
            await step(learner, [poisoned])
        with pytest.raises(LearnerError, match="3 steps in a row"):
            await step(learner, [poisoned])

    in_process(tiny_model, use, max_skipped_steps=2, normalize_advantage="none")


def test_staged_weights_are_a_copy_in_checkpoint_format_that_dies_with_the_learner(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> str:
        first = await learner.stage_weights()
        stored = load_file(tiny_model / "model.safetensors")
        assert set(load_file(first.path)) == set(stored)
        torch.testing.assert_close(load_file(first.path), stored, rtol=0, atol=0)
        await step(learner, GROUPS[:1])
        second = await learner.stage_weights()
        assert (first.version, second.version) == (0, 1)
        assert first.num_bytes == second.num_bytes == os.stat(first.path).st_size
        torch.testing.assert_close(load_file(first.path), stored, rtol=0, atol=0)
        assert any(not torch.equal(value, stored[name]) for name, value in load_file(second.path).items())
        await learner.release_weights(first)
        os.kill(int(second.path.split("/")[2]), signal.SIGKILL)
        return second.path

    path = with_learner(tiny_model, use)
    deadline = time.monotonic() + 10
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(path)


def test_a_rank_at_work_for_nobody_does_not_hold_up_the_end(tiny_model: Path) -> None:
    """As when Ctrl-C comes while the learner computes: the answer to its orderly close would come after that."""

    async def use(learner: FsdpLearner) -> None:
        weights = await learner.stage_weights()
        process = int(weights.path.split("/")[2])
        os.kill(process, signal.SIGSTOP)
        work = asyncio.create_task(learner.accumulate(GROUPS[:1]))
        await asyncio.sleep(0.2)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        started = time.monotonic()
        try:
            await learner.close()
            assert time.monotonic() - started < 10
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    with_learner(tiny_model, use)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_is_a_clear_error_at_once(tiny_model: Path, ranks: int) -> None:
    async def use(learner: FsdpLearner) -> None:
        weights = await learner.stage_weights()
        os.kill(int(weights.path.split("/")[2]), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(LearnerError, match=r"learner rank \d? ?died|failed on a rank"):
            await step(learner, GROUPS[:2])
        assert time.monotonic() - started < 20
        with pytest.raises(LearnerError, match="cannot be used"):
            await learner.finish_step()

    with_learner(tiny_model, use, ranks=ranks)


def test_a_rank_that_hangs_is_an_error_after_the_deadline(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> None:
        weights = await learner.stage_weights()
        process = int(weights.path.split("/")[2])
        os.kill(process, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(LearnerError, match="longer than 5 s"):
                await learner.accumulate(GROUPS[:1])
            assert time.monotonic() - started < 10
        finally:
            os.kill(process, signal.SIGCONT)

    with_learner(tiny_model, use, step_timeout_s=5)


@pytest.mark.parametrize(("written_by", "read_by", "lora"), [(1, 2, 0), (2, 1, 0), (2, 1, 2)])
def test_a_resumed_learner_takes_the_same_next_step(
    tiny_model: Path, tmp_path: Path, written_by: int, read_by: int, lora: int
) -> None:
    folder = tmp_path / "run" / "state"

    async def write(learner: FsdpLearner) -> dict[str, torch.Tensor]:
        await step(learner, GROUPS[:2])
        saving = await learner.begin_save(folder)
        await step(learner, GROUPS[2:])
        await saving
        assert os.listdir(folder.parent) == ["state"]
        return await weights_of(learner)

    async def read(learner: FsdpLearner) -> dict[str, torch.Tensor]:
        await learner.load(folder)
        assert learner.version == 1
        assert (await step(learner, GROUPS[2:])).version == 2
        return await weights_of(learner)

    started = {1: in_process, 2: with_learner}
    expected = started[written_by](tiny_model, write, ranks=written_by, lora={"rank": lora})
    assert_same_weights(started[read_by](tiny_model, read, ranks=read_by, lora={"rank": lora}), expected)


def test_checkpoints_that_cannot_be_read_are_refused_before_anything_changes(tiny_model: Path, tmp_path: Path) -> None:
    other_model = make_tiny_model(tmp_path / "other", hidden_size=32)

    async def write(learner: FsdpLearner) -> None:
        await (await learner.begin_save(tmp_path / "good"))
        with pytest.raises(CheckpointError, match="exists already"):
            await (await learner.begin_save(tmp_path / "good"))
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(CheckpointError, match="cannot be written"):
            await (await learner.begin_save(tmp_path / "file" / "state"))
        truncated = tmp_path / "truncated"
        shutil.copytree(tmp_path / "good", truncated)
        shard = next(truncated.glob("*.distcp"))
        os.truncate(shard, shard.stat().st_size // 2)
        with pytest.raises(CheckpointError, match="truncated or missing"):
            await learner.load(truncated)
        shard.unlink()
        with pytest.raises(CheckpointError, match="truncated or missing"):
            await learner.load(truncated)
        with pytest.raises(CheckpointError, match="not a complete checkpoint"):
            await learner.load(tmp_path / "nowhere")
        await step(learner, GROUPS[:1])

    async def read_other(learner: FsdpLearner) -> None:
        with pytest.raises(CheckpointError, match="another model"):
            await learner.load(tmp_path / "good")

    in_process(tiny_model, write)
    in_process(other_model, read_other)


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_is_a_model_folder_that_transformers_loads(tmp_path: Path, tied: bool) -> None:
    model_folder = make_tiny_model(tmp_path / "model", tied=tied)
    text = [5, 9, 17, 4, 90, 33]

    async def use(learner: FsdpLearner) -> np.ndarray:
        await step(learner, GROUPS[:1])
        await (await learner.begin_export(tmp_path / "hf"))
        await (await learner.begin_export(tmp_path / "hf"))
        with pytest.raises(CheckpointError, match="exists already"):
            await (await learner.begin_export(tmp_path))
        return (await learner.logprobs_of([text]))[0]

    logprobs = in_process(model_folder, use)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.tensor(text)
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([97, 98]).replace(" ", "") == "ab"


def test_supervised_steps_learn_the_demonstrations_and_count_as_versions(tiny_model: Path) -> None:
    demonstrations = [
        make_trajectory([10, 11, 12, 20 + i, 50, 51, 52, 53], [False] * 4 + [True] * 4, reward=1.0) for i in range(4)
    ]

    async def use(learner: FsdpLearner) -> list[StepResult]:
        return [await learner.sft_step(demonstrations, learning_rate=1e-2) for _ in range(12)]

    results = in_process(tiny_model, use, warmup_steps=2)
    losses = [result.metrics["loss"] for result in results]
    assert losses[-1] < 0.1 * losses[0]
    assert results[-1].version == 12
    assert results[0].metrics["learning_rate"] == pytest.approx(0.5e-2)
    assert results[-1].metrics["learning_rate"] == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("none", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2]),
        ("cosine", [0.5, 1, *(0.2 + 0.4 * (1 + math.cos(math.pi * place / 8)) for place in range(9)), 0.2]),
        ("wsd", [0.5, 1, *[1] * 7, 0.2 + 0.8 * 0.125 / 0.2, 0.2, 0.2]),
    ],
)
def test_the_learning_rate_rises_and_falls_over_the_steps_of_the_run(decay: Any, expected: list[float]) -> None:
    config = LearnerConfig(
        learning_rate=1.0, warmup_steps=2, decay=decay, final_learning_rate=0.0 if decay == "none" else 0.2
    )
    learner = FsdpLearner(Path(), config, async_ratio=1, steps=10)
    found = []
    for learner._version in range(len(expected)):
        found.append(learner._scheduled(1.0))
    assert found == pytest.approx(expected)


def test_a_model_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    async def never(learner: FsdpLearner) -> None:
        raise AssertionError("started without a model")

    with pytest.raises(ModelError, match="not a Hugging Face model folder"):
        load_policy_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="cannot load"):
        with_learner(tmp_path / "empty", never)
