"""Weights for servers on GPUs: what is staged, who is told what, and in which order. The bytes themselves need GPUs."""

from __future__ import annotations

import asyncio
import base64
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.model_check.architectures import write_model
from roll_flash.config.sections.learner import LoraConfig
from roll_flash.config.tree import load_config
from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import ConfigError, InferenceError, LearnerError
from roll_flash.inference.servers.control import ServerControl
from roll_flash.inference.servers.update import update_server
from roll_flash.learner.model import lora
from roll_flash.learner.open import open_learner
from roll_flash.learner.ranks.rank_actor import rank_actor
from roll_flash.learner.weights import device as device_weights
from roll_flash.learner.weights.channel import NcclChannel
from roll_flash.learner.weights.device import DeviceWeightStage, merge_handles
from roll_flash.learner.weights.server_group import NcclGroup
from roll_flash.learner.weights.staged import WeightStage
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.background import gather_or_cancel
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights, is_adapter


@pytest.fixture(scope="module")
def model() -> Any:
    found = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    lora.adapt(found, LoraConfig(rank=2))
    return found


def staged(model: Any, transfer: Any) -> tuple[DeviceWeightStage, StagedWeights]:
    stage = DeviceWeightStage(model, ["lm_head.weight"], torch.bfloat16, transfer)
    return stage, stage.stage(3)


@pytest.mark.vllm
def test_what_vllm_is_told_describes_every_tensor_of_the_merged_model(model: Any) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    stage, weights = staged(model, "nccl")
    info = NCCLWeightTransferUpdateInfo(**dict(weights.update_info or {}))
    with_adapters = set(dict(model.named_parameters())) - {"lm_head.weight"}
    assert set(info.names) == {name for name in with_adapters if not is_adapter(name)}
    assert set(info.dtype_names) == {"bfloat16"}
    for name, shape in zip(info.names, info.shapes, strict=True):
        assert list(model.state_dict()[name].shape) == shape
    assert weights.num_bytes == 2 * sum(torch.Size(shape).numel() for shape in info.shapes)
    stage.release(weights)
    with pytest.raises(LearnerError, match="released before"):
        stage.release(weights)


@pytest.mark.vllm
def test_a_staged_version_is_sent_in_the_order_that_was_told_and_later_steps_do_not_touch_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    sent: list[tuple[str, torch.Tensor]] = []

    def producer(iterator: Any, group: Any, src: int, post_iter_func: Any, **sizes: int) -> None:
        assert (group, src) == (opened, 0)
        assert sizes == {
            "buffer_size_bytes": info["packed_buffer_size_bytes"],
            "num_buffers": info["packed_num_buffers"],
        }
        sent.extend((item[0], post_iter_func(item)) for item in iterator)

    opened = NcclGroup(None)
    devices: list[Any] = []
    monkeypatch.setattr(packed_tensor, "packed_nccl_broadcast_producer", producer)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(device_weights, "new_unique_id", lambda: bytes(128))
    monkeypatch.setattr(device_weights, "open_nccl_group", lambda *_: opened)
    stage, weights = staged(model, "nccl")
    info = stage.offer("a", 1)
    stage.join("a", 5)
    before = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    stage.send("a", weights, 5)
    assert devices == [model.device], "each thread has a device of its own"
    assert [name for name, _ in sent] == (weights.update_info or {})["names"]
    assert torch.equal(dict(sent)["model.norm.weight"], before.bfloat16())


@pytest.mark.vllm
def test_handles_of_all_ranks_go_to_the_servers_as_vllm_reads_them(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    ranks = []
    for rank in range(2):
        monkeypatch.setattr(device_weights, "_handle", lambda tensor, uuid=f"gpu-{rank}": {uuid: (uuid, tensor.shape)})
        ranks.append(staged(model, "ipc")[1])
    info = dict(merge_handles(ranks).update_info or {})
    handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
    assert len(handles) == len(info["names"])
    assert all(set(handle) == {"gpu-0", "gpu-1"} for handle in handles)
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        IPCWeightTransferUpdateInfo(**info)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert IPCWeightTransferUpdateInfo(**info).ipc_handles == handles


def test_a_handle_names_the_gpu_whose_memory_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="GPU-1000"))
    monkeypatch.setattr(device_weights, "reduce_tensor", lambda tensor: (torch.empty, (tensor.shape,)))
    assert device_weights._handle(torch.zeros(2, 3)) == {"GPU-1000": (torch.Size([2, 3]),)}


@pytest.mark.vllm
def test_a_version_is_staged_only_when_the_gpu_has_copied_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes read the copy, and do not wait for the stream of this one, which is a stand-in."""
    waited: list[torch.Tensor] = []
    weights = torch.nn.Linear(4, 4)
    monkeypatch.setattr(device_weights, "_handle", lambda tensor: {"gpu": (tensor.shape,)})
    stage = DeviceWeightStage(weights, [], torch.bfloat16, "ipc")
    stream = types.SimpleNamespace(synchronize=lambda: waited.append(stage._copy["weight"].clone()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    stage.stage(1)
    assert len(waited) == 1
    assert torch.equal(waited[0], weights.weight.detach().bfloat16())


@pytest.mark.vllm
def test_memory_is_exported_once_and_holds_one_version_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps memory that was exported and read by nobody, or by two; so a copy per version would never be freed."""
    exported: list[int] = []

    def handle(tensor: torch.Tensor) -> dict[str, Any]:
        exported.append(tensor.data_ptr())
        return {"gpu": (tensor.data_ptr(),)}

    monkeypatch.setattr(device_weights, "_handle", handle)
    model = torch.nn.Linear(4, 4)
    stage = DeviceWeightStage(model, [], torch.bfloat16, "ipc")
    first = stage.stage(1)
    stage.release(first)
    with torch.no_grad():
        model.weight.add_(1)
    second = stage.stage(2)
    assert dict(first.update_info or {}) == dict(second.update_info or {})
    assert sorted(exported) == sorted(tensor.data_ptr() for tensor in stage._copy.values())
    assert torch.equal(stage._copy["weight"], model.weight.detach().bfloat16())


@pytest.mark.vllm
def test_a_group_is_made_with_vllms_own_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself is a stand-in."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import nccl_common

    named = pynccl_wrapper.NCCLLibrary.unique_id_from_bytes(cast(Any, None), bytes(range(128)))

    class Library:
        ncclGetUniqueId = staticmethod(lambda: named)

    made: list[Any] = []
    monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", Library)
    monkeypatch.setattr(nccl_common, "uid_init_process_group", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    device = torch.device("cuda", 3)
    unique_id = device_weights.new_unique_id()
    assert unique_id == bytes(range(128))
    assert isinstance(device_weights.open_nccl_group(unique_id, 5, device), NcclGroup)
    assert made == [device, (unique_id, 0, 5, device)]


class StandInServer:
    """Notes what it is asked; fails at the path in `fails`."""

    prepares_weights = False
    endpoint = "http://a"

    def __init__(self, asked: list[str], fails: str = "") -> None:
        self.asked = asked
        self.fails = fails
        self.bodies: dict[str, Any] = {}
        self.joined = False
        self.version = 0
        self.is_running = True

    async def post(self, path: str, body: Any = None, *, timeout_s: float = 1) -> Any:
        path = path.partition("?")[0]
        self.asked.append(path)
        self.bodies[path] = body
        await asyncio.sleep(0.01)
        if path == self.fails:
            raise InferenceError(f"{path} failed")
        return {"success": True}

    async def get(self, path: str) -> Any:
        self.asked.append(path)
        return {"world_size": 2}

    async def stop(self) -> None:
        self.asked.append("stop")
        self.is_running = False


def publish(server: StandInServer, weights: StagedWeights) -> None:
    asyncio.run(update_server(cast(ServerControl, server), weights, "keep"))


class StandInRank:
    """Answers like the handle of a rank's Ray actor, in its transfer threads only."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    @property
    def call(self) -> StandInRank:
        return self

    def options(self, *, concurrency_group: str) -> StandInRank:
        assert concurrency_group == "transfer"
        return self

    def remote(self, method: str, *arguments: Any) -> tuple[str, ...]:
        self._asked.append(f"rank 0: {method}")
        return (method, *arguments)


OFFER = {
    "nccl_unique_id_b64": base64.b64encode(bytes(128)).decode(),
    "rank_offset": 1,
    "world_size": 3,
    "packed": True,
    "packed_buffer_size_bytes": 2**20,
    "packed_num_buffers": 2,
}


def nccl(asked: list[str]) -> StagedWeights:
    async def gather(calls: list[Any], method: str, timeout_s: float) -> list[Any]:
        return [OFFER if method == "offer_transfer" else None for _ in calls]

    info = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 2]]}
    channel = NcclChannel(StandInRank(asked), gather, 5.0)
    return StagedWeights(1, "nccl:1", 8, 8, update_info=info, channel=channel)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_rank_sends_in_a_thread_of_its_own_while_it_computes() -> None:
    import ray

    class Rank:  # in here, so that it travels by value
        def __init__(self) -> None:
            self._sent = threading.Event()

        def compute(self) -> bool:
            return self._sent.wait(30)

        def send(self) -> None:
            self._sent.set()

    rank = rank_actor(Rank, "nccl").remote()
    computed = rank.compute.remote()
    ray.get(rank.send.options(concurrency_group="transfer").remote())
    assert ray.get(computed)


@pytest.mark.vllm
def test_learner_and_server_meet_once_and_then_send_and_receive_in_a_pause() -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    asked: list[str] = []
    server, weights = StandInServer(asked), nccl(asked)
    publish(server, weights)
    publish(server, weights)
    met = ["/get_world_size", "rank 0: offer_transfer", "rank 0: join_transfer", "/init_weight_transfer_engine"]
    given = ["/pause", "/start_weight_update", "rank 0: send_weights", "/update_weights", "/finish_weight_update"]
    given += ["/reset_prefix_cache", "/resume"]
    assert asked == met + given + given
    info = NCCLWeightTransferInitInfo(**server.bodies["/init_weight_transfer_engine"]["init_info"])
    assert info.nccl_unique_id_bytes == bytes(128)
    assert (info.packed, info.rank_offset, info.world_size) == (True, 1, 3)
    assert server.bodies["/update_weights"] == {"update_info": weights.update_info}
    assert server.version == 1


def test_a_server_that_fails_in_the_middle_has_no_weights_any_more_and_is_ended() -> None:
    asked: list[str] = []
    server = StandInServer(asked, fails="/update_weights")
    with pytest.raises(InferenceError, match="/update_weights failed"):
        publish(server, nccl(asked))
    assert "stop" in asked
    assert "rank 0: end_transfer" in asked, "the rank would wait for it without end"
    assert server.version == 0


def test_a_server_that_cannot_join_waits_for_the_learner_and_is_ended() -> None:
    asked: list[str] = []
    with pytest.raises(InferenceError, match="/init_weight_transfer_engine failed"):
        publish(StandInServer(asked, fails="/init_weight_transfer_engine"), nccl(asked))
    assert asked[-2:] == ["rank 0: end_transfer", "stop"]
    assert "/pause" not in asked


def test_a_transfer_that_is_cancelled_is_ended_on_the_rank_first() -> None:
    """The rank may overwrite the weights afterwards."""
    asked: list[str] = []
    weights = nccl(asked)

    async def main() -> None:
        async with asyncio.timeout(0.1):
            assert weights.channel is not None
            await weights.channel.send("http://a", weights, asyncio.sleep(60))

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert asked == ["rank 0: send_weights", "rank 0: end_transfer"]


def test_the_driver_does_not_import_vllm_to_control_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes many seconds, in which the event loop would stand still."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    server = StandInServer([])
    publish(server, nccl([]))
    assert server.version == 1


def test_with_ipc_the_server_reads_by_itself() -> None:
    asked: list[str] = []
    weights = StagedWeights(1, "ipc:1", 8, 8, update_info={"names": [], "ipc_handles_pickled": "x"})
    publish(StandInServer(asked), weights)
    assert asked[:3] == ["/pause", "/start_weight_update", "/update_weights"]


def test_when_one_side_fails_the_other_is_not_waited_for() -> None:
    async def fails() -> None:
        raise LearnerError("the rank died")

    async def main() -> None:
        async with asyncio.timeout(10):
            await gather_or_cancel(fails(), asyncio.sleep(60))

    with pytest.raises(LearnerError, match="the rank died"):
        asyncio.run(main())


def test_options_that_cannot_go_together_are_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}]}
    config = load_config(tree, ["inference.weight_transfer=nccl", "learner.lora.rank=4"])
    with pytest.raises(ConfigError, match=r"learner\.lora\.publish=merged"):
        open_learner(config, model_folder=tmp_path)


def test_what_the_learner_computes_with_in_float32_is_published_in_float32(tmp_path: Path) -> None:
    """Layers round parameters to bfloat16, never buffers: a router's bias decides between experts by small amounts."""
    folder = write_model("deepseek_v3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name = next(name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias = model.get_buffer(name)
    bias.copy_(4 + torch.arange(len(bias)) / 1000)
    on_gpu = DeviceWeightStage(model, [], torch.bfloat16, "nccl")
    on_gpu.stage(1)
    in_memory = WeightStage(model, [], torch.bfloat16, "test")
    staged = in_memory.stage(1)
    with PublishedWeights(staged.path, ModelFolder(folder), tied=False) as published:
        read = published.tensor(name).clone()
        others = published.tensor("model.norm.weight").dtype
    in_memory.close()
    torch.testing.assert_close(read, bias, atol=0, rtol=0)
    torch.testing.assert_close(on_gpu._copy[name], bias, atol=0, rtol=0)
    assert others == torch.bfloat16
