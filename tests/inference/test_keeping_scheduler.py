"""vLLM's own schedulers, requests and block pools, with the project's prefix cache. Only the model is a stand-in: it
samples token 7."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from roll_flash.config.tree import InferenceConfig
from roll_flash.inference.vllm import server
from roll_flash.models.prepare import resolve_model

pytestmark = pytest.mark.vllm

BLOCK = 16
PREFIX = list(range(100, 100 + 4 * BLOCK))


class Machine:
    """A scheduler with its model. Asynchronous scheduling plans a step before it has the tokens of the one before."""

    def __init__(self, *, runs_ahead: bool, scheduler: str = "", blocks: int = 100) -> None:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from roll_flash.inference.vllm.scheduler import KeepingAsyncScheduler, gpu_scheduler

        config = VllmConfig(
            model_config=ModelConfig(model=str(resolve_model("tiny")), dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig.default_factory(
                max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512
            ),
        )
        config.scheduler_config.async_scheduling = runs_ahead  # which the CPU platform has switched off
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler: Any = gpu_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        assert isinstance(self.scheduler, KeepingAsyncScheduler) == runs_ahead
        self._ahead = int(runs_ahead)
        self._under_way: deque[Any] = deque()

    def ask(self, name: str, prompt: list[int], max_tokens: int = 64, salt: str | None = None) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, prompt, sampling, None, cache_salt=salt, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        self._under_way.append(self.scheduler.schedule())
        if len(self._under_way) > self._ahead:
            self._finish()

    def drain(self) -> None:
        """As a pause does: no step is under way."""
        while self._under_way:
            self._finish()

    def _finish(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self._under_way.popleft()
        names = list(output.num_scheduled_tokens)
        sampled = [[7] if self._samples(name) else [] for name in names]
        index = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, index, sampled))

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and request.num_computed_tokens >= request.num_tokens

    def cached(self, request: Any) -> int:
        """How many tokens of a new request would come from the cache."""
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def blocks_of(self, name: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])


@pytest.fixture(params=[False, True], ids=["scheduler", "async"])
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(runs_ahead=request.param)


def test_later_requests_find_nothing_of_before_and_running_ones_keep_their_blocks(machine: Machine) -> None:
    running = machine.ask("running", [*PREFIX, 1, 2, 3])
    for _ in range(5):
        machine.step()
    machine.drain()
    assert machine.cached(machine.ask("same weights", [*PREFIX, 9])) == len(PREFIX)
    machine.scheduler.finish_requests("same weights", _aborted())
    blocks, computed = machine.blocks_of("running"), running.num_computed_tokens

    assert machine.scheduler.reset_prefix_cache()

    assert machine.cached(machine.ask("new weights", [*PREFIX, 9])) == 0
    for _ in range(3):
        machine.step()
    assert machine.blocks_of("running")[: len(blocks)] == blocks
    assert running.num_computed_tokens > computed
    assert running.num_preemptions == 0


def test_what_a_running_request_goes_on_to_compute_is_found_by_no_new_one(machine: Machine) -> None:
    """Its later blocks attend to old keys. A new request that has computed the same beginning would find them if only
    the old blocks were forgotten."""
    running = machine.ask("running", [*PREFIX, 1, 2, 3], max_tokens=6 * BLOCK)
    machine.step()
    machine.drain()
    machine.scheduler.reset_prefix_cache()
    for _ in range(3 * BLOCK):
        machine.step()
    machine.drain()
    tokens = list(running.all_token_ids)
    assert len(tokens) > 6 * BLOCK
    machine.ask("beginning", tokens[: 5 * BLOCK], max_tokens=1)
    for _ in range(2):
        machine.step()
    machine.drain()
    assert machine.cached(machine.ask("all of it", [*tokens, 5])) == 5 * BLOCK


def test_requests_of_the_same_weights_share_their_prefix_after_an_update_too(machine: Machine) -> None:
    for _ in range(3):
        machine.scheduler.reset_prefix_cache()
    first = machine.ask("first", [*PREFIX, 1, 2, 3], max_tokens=2 * BLOCK)
    for _ in range(2 * BLOCK + 2):
        machine.step()
    machine.drain()
    next_turn = machine.ask("next turn", [*first.all_token_ids, 8, 8])
    assert machine.cached(next_turn) >= len(PREFIX) + BLOCK


def test_a_request_that_waits_during_an_update_is_computed_with_the_new_weights(machine: Machine) -> None:
    machine.ask("before", [*PREFIX, 1], max_tokens=1)
    machine.step()
    machine.step()
    machine.drain()
    waiting = machine.ask("waiting", [*PREFIX, 9])
    assert machine.cached(waiting) == len(PREFIX)
    machine.scheduler.reset_prefix_cache()
    assert machine.cached(waiting) == 0


def test_a_salt_of_the_caller_keeps_its_meaning(machine: Machine) -> None:
    for _ in range(2):
        machine.ask(f"a {machine.scheduler._resets}", [*PREFIX, 1], max_tokens=1, salt="tenant a")
        machine.step()
        machine.step()
        machine.drain()
        assert machine.cached(machine.ask("b", [*PREFIX, 2], salt="tenant b")) == 0
        again = machine.ask("a again", [*PREFIX, 2], salt="tenant a")
        assert machine.cached(again) == len(PREFIX)
        machine.scheduler.reset_prefix_cache()
        machine.scheduler.reset_prefix_cache()
        assert machine.cached(again) == 0
        machine.scheduler.finish_requests(["b", "a again"], _aborted())


def test_old_blocks_are_reused_when_memory_is_short(machine: Machine) -> None:
    """Each version leaves blocks that nobody can find any more; they never keep a request out."""
    small = Machine(runs_ahead=bool(machine._ahead), blocks=8)
    for version in range(6):
        small.ask(f"request {version}", [*PREFIX, version], max_tokens=2)
        for _ in range(4):
            small.step()
        small.drain()
        assert not small.scheduler.requests, "it did not end"
        small.scheduler.reset_prefix_cache()


def test_a_reset_that_is_to_preempt_running_requests_is_vllms_own(machine: Machine) -> None:
    machine.ask("running", [*PREFIX, 1])
    machine.step()
    machine.drain()
    assert machine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert machine.scheduler.requests["running"].num_preemptions == 1


@pytest.mark.parametrize(("device", "name"), [("cpu", "CpuScheduler"), ("cuda", "gpu_scheduler")])
def test_servers_are_started_with_it_on_each_device(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed vLLM is one for CPUs; `vllm_device` says what another one would."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from roll_flash.inference.vllm import scheduler

    monkeypatch.setattr(server, "vllm_device", lambda: device)
    launcher = server.vllm_launcher(
        InferenceConfig(), model_folder=resolve_model("tiny"), max_model_len=64, shares_gpu=False, returns_experts=False
    )
    command = launcher.command(0, "127.0.0.1", 1)
    chosen = command[command.index("--scheduler-cls") + 1]
    assert resolve_obj_by_qualname(chosen) is getattr(scheduler, name)


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
