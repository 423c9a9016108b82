"""What a rank does at its start on a GPU, forced on the CPU: counters of GPU memory and NCCL have stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import Backend, BackendConfig

from roll_flash.errors import ConfigError
from roll_flash.learner.model import weight_files
from roll_flash.learner.model.policy_model import PolicyModel
from roll_flash.learner.ranks import rank as rank_module
from roll_flash.learner.ranks import row_memory
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.ranks.optimizer import allocate_states, trained_parts
from roll_flash.learner.ranks.rank import LearnerRank
from roll_flash.learner.ranks.row_memory import check_longest_row, longest_row
from tests.learner.in_process import assert_equal_weights, in_process, weights_of
from tests.learner.samples import make_group

GIB = 1 << 30


class MemoryStandIn:
    """A GPU on which a row needs `base` bytes and `per_token` for each of its tokens."""

    def __init__(self, base: int, per_token: int, size: int) -> None:
        self._base, self._per_token, self._size = base, per_token, size
        self.rows: list[int] = []

    def room(self) -> int:
        return self._size

    def begin(self) -> None:
        pass

    def run_row(self, tokens: int) -> None:
        self.rows.append(tokens)
        if self._base + self._per_token * tokens > self._size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def peak(self) -> int:
        return self._base + self._per_token * self.rows[-1]


def check(memory: MemoryStandIn, tokens: int, later_bytes: int = 0) -> str:
    key = "learner.micro_batch_tokens"
    return check_longest_row(
        memory.run_row, tokens, memory, later_bytes=later_bytes, largest=lambda number: number, key=key
    )


def test_a_row_that_does_not_fit_is_one_line_with_the_length_that_would() -> None:
    memory = MemoryStandIn(base=10 * GIB, per_token=GIB // 100, size=20 * GIB)
    with pytest.raises(ConfigError) as caught:
        check(memory, 2000)
    said = str(caught.value)
    assert "a row of 2000 tokens (learner.micro_batch_tokens) needs about 30.0 GiB on the GPU, of which 20.0" in said
    assert "lower learner.micro_batch_tokens to about 1000" in said
    assert "\n" not in said
    assert 2000 not in memory.rows, "known before it is tried"
    with pytest.raises(ConfigError, match="more learner"):
        check(MemoryStandIn(base=19 * GIB, per_token=0, size=20 * GIB), 2000, later_bytes=2 * GIB)


def test_a_row_that_fits_is_tried_and_says_what_else_would() -> None:
    memory = MemoryStandIn(base=10 * GIB, per_token=GIB // 1000, size=20 * GIB)
    assert "needs 12.0 of 20.0 GiB" in (said := check(memory, 2000))
    assert "rows of about 10000 tokens would fit" in said
    assert memory.rows[-1] == 2000
    with pytest.raises(ConfigError, match="of which 11"):
        check(memory, 2000, later_bytes=9 * GIB)


def test_the_rank_with_the_least_memory_decides() -> None:
    memory = MemoryStandIn(base=10 * GIB, per_token=GIB // 1000, size=20 * GIB)
    with pytest.raises(ConfigError, match="to about 500"):
        check_longest_row(
            memory.run_row, 2000, memory, later_bytes=0, largest=lambda number: max(number, -500), key="a.key"
        )


def test_memory_that_does_not_grow_as_measured_is_one_line_too() -> None:
    class Quadratic(MemoryStandIn):
        def run_row(self, tokens: int) -> None:
            super().run_row(tokens if tokens < 2000 else 10 * tokens)

    with pytest.raises(ConfigError, match="to about 1500, or"):
        check(Quadratic(base=10 * GIB, per_token=GIB // 1000, size=20 * GIB), 2000)


def test_the_longest_row_has_sequences_of_the_longest_length() -> None:
    row = longest_row(1000, 300, 128)
    assert row.num_tokens == row.padded_tokens == 1000
    assert int(row.position_ids.max()) == 299
    assert len(row.target) == 996
    assert len(longest_row(1000, None, 128).target) == 999


async def one_step(learner: FsdpLearner) -> dict[str, torch.Tensor]:
    await learner.accumulate([make_group(1)])
    await learner.finish_step()
    return await weights_of(learner)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> MemoryStandIn:
    """Let a rank take all branches of a GPU but those of CUDA itself."""
    memory = MemoryStandIn(base=GIB, per_token=1, size=2 * GIB)
    real = PolicyModel.forward

    def forward(self: PolicyModel, row: Any, temperature: float | None = None) -> Any:
        memory.rows.append(row.num_tokens)
        return real(self, row, temperature)

    monkeypatch.setattr(PolicyModel, "forward", forward)
    monkeypatch.setattr(LearnerRank, "_on_gpu", True)
    monkeypatch.setattr(rank_module, "GPU_BACKEND", "cpu:gloo,cuda:gloo")
    monkeypatch.setattr(rank_module, "GpuMemory", lambda device: memory)
    monkeypatch.setattr(rank_module, "_flex_attention_works", lambda device, model: False)
    return memory


def with_rank(model: Path, look: Callable[[LearnerRank], None], **settings: Any) -> None:
    async def use(learner: FsdpLearner) -> None:
        look(learner._ranks[0]._rank)

    in_process(model, use, **settings)


def test_ranks_on_gpus_reach_each_other_by_gloo_and_nccl() -> None:
    assert BackendConfig(Backend(rank_module.GPU_BACKEND)).get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}


def test_the_start_on_a_gpu_tries_the_longest_row_and_leaves_no_trace(tiny_model: Path, on_gpu: MemoryStandIn) -> None:
    def look(rank: LearnerRank) -> None:
        assert on_gpu.rows[-4:] == [2, 50, 100, 200]
        assert all(parameter.grad is None for parameter in rank._policy.parameters())
        state = torch.get_rng_state()
        rank._check_longest_row(on_gpu)
        assert torch.equal(torch.get_rng_state(), state)

    with_rank(tiny_model, look, micro_batch_tokens=200)


def test_the_try_does_not_change_what_is_learned(
    tiny_model: Path, on_gpu: MemoryStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = in_process(tiny_model, one_step)
    monkeypatch.setattr(LearnerRank, "_check_longest_row", lambda rank, counters: "")
    assert_equal_weights(in_process(tiny_model, one_step), tried)


def test_a_gpu_computes_in_bfloat16_and_servers_get_bfloat16(tiny_model: Path, on_gpu: MemoryStandIn) -> None:
    dtypes: list[torch.dtype] = []

    async def use(learner: FsdpLearner) -> dict[str, torch.Tensor]:
        rank: LearnerRank = learner._ranks[0]._rank  # type: ignore[attr-defined]
        rank._policy.layers[0].register_forward_pre_hook(lambda layer, args: dtypes.append(args[0].dtype))
        assert {parameter.dtype for parameter in rank._policy.parameters()} == {torch.float32}
        return await one_step(learner)

    weights = in_process(tiny_model, use)
    assert set(dtypes) == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_under_adapters_a_gpu_keeps_the_base_in_bfloat16(tiny_model: Path, on_gpu: MemoryStandIn) -> None:
    def look(rank: LearnerRank) -> None:
        for name, parameter in rank._policy.named_parameters():
            assert parameter.dtype == (torch.float32 if "lora" in name else torch.bfloat16), name

    with_rank(tiny_model, look, lora={"rank": 4})


def test_a_model_that_is_loaded_whole_goes_to_the_gpu_only_while_it_is_sharded(
    tiny_model: Path, on_gpu: MemoryStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(*_: Any) -> None:
        raise AssertionError("the whole model was moved")

    monkeypatch.setattr(weight_files.WeightFiles, "why_not_by_shards", lambda files, model: "this is a test")
    monkeypatch.setattr(PolicyModel, "to", moved)
    monkeypatch.setattr(PolicyModel, "_apply", moved)
    with_rank(tiny_model, lambda rank: None)


def test_flex_attention_is_used_on_a_gpu_where_it_works(
    tiny_model: Path, on_gpu: MemoryStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_module, "_flex_attention_works", lambda device, model: True)
    monkeypatch.setattr(LearnerRank, "_check_longest_row", lambda rank, counters: "")
    flags: list[bool] = []
    with_rank(tiny_model, lambda rank: flags.append(rank._policy.flex_attention))
    with_rank(tiny_model, lambda rank: flags.append(rank._policy.flex_attention), kl={"coefficient": 0.1})
    assert flags == [True, True]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_optimizer_states_are_there_at_the_start_and_the_first_step_is_as_without(weight_decay: float) -> None:
    def steps(early: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(4, 4))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True, weight_decay=weight_decay)
        before = parameter.detach().clone()
        if early:
            allocate_states(optimizer)
            assert torch.equal(parameter, before)
            assert parameter.grad is None
            assert all(not value.any() for value in optimizer.state[parameter].values())
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]

    assert_equal_weights(steps(True)[1], steps(False)[1])
    assert torch.equal(steps(True)[0], steps(False)[0])


def test_a_rank_has_its_optimizer_states_before_the_first_row(tiny_model: Path) -> None:
    def look(rank: LearnerRank) -> None:
        states = rank._optimizer.state
        assert states.keys() == {each for part in trained_parts(rank._policy, rank._critic) for each in part}
        for parameter, state in states.items():
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape

    with_rank(tiny_model, look)


def test_optimizer_states_without_room_are_one_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(rank_module, "open_optimizer", full)
    with pytest.raises(
        ConfigError, match=r"optimizer states do not fit on the GPU \(CUDA out of memory.*learner.ranks"
    ):
        with_rank(tiny_model, lambda rank: None)


def test_memory_of_a_gpu_is_what_torch_and_the_driver_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: (5, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda of: 3)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda of: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda of: 7)
    counters = row_memory.GpuMemory(device)
    counters.begin()
    assert (counters.room(), counters.peak()) == (8, 7)
