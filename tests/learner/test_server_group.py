"""A server that dies, hangs or comes late while it takes weights: the rank gives it up, and goes on with the others.

gloo stands in for NCCL, between real processes, or a group in this process that waits as NCCL does. The senders and
receivers around it are those of vLLM and the project.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError, LearnerError
from roll_flash.learner.weights import device as device_weights
from roll_flash.learner.weights import server_group
from roll_flash.learner.weights.device import DeviceWeightStage
from roll_flash.learner.weights.server_group import NcclGroup, ServerGroup
from tests.learner.gloo_group import GlooGroup, without_streams


class WaitingGroup:
    """A broadcast waits until the group ends, and then returns as if it had worked, as after NCCL's abort."""

    def __init__(self) -> None:
        self.sending, self.ended = threading.Event(), threading.Event()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self.sending.set()
        assert self.ended.wait(60)

    def destroy(self) -> None:
        self.ended.set()


def produce(tensors: Any, group: Any) -> None:
    for _, tensor in tensors:
        group.broadcast(tensor, src=0)


TENSORS = [("w", torch.zeros(1))]


def test_a_server_that_is_silent_is_given_up_at_the_deadline() -> None:
    waiting = WaitingGroup()
    group = ServerGroup("http://a", lambda: waiting)
    group.join(5)
    started = time.monotonic()
    with pytest.raises(InferenceError, match=r"http://a did not take the weights within 0.2 s"):
        group.send(TENSORS, produce, 0.2)
    assert time.monotonic() - started < 5
    assert waiting.ended.is_set(), "NCCL still waits"
    with pytest.raises(InferenceError):
        group.send(TENSORS, produce, 0.2)


def test_another_thread_ends_what_waits_for_a_server_that_is_gone() -> None:
    waiting = WaitingGroup()
    group = ServerGroup("http://a", lambda: waiting)
    group.join(5)
    threading.Thread(target=lambda: waiting.sending.wait(60) and group.end()).start()
    with pytest.raises(InferenceError, match="http://a was given up"):
        group.send(TENSORS, produce, 60)


def test_a_server_that_does_not_join_is_given_up_and_the_group_is_ended_if_it_comes_later() -> None:
    waiting, comes = WaitingGroup(), threading.Event()

    def open_group() -> WaitingGroup:
        assert comes.wait(60)
        return waiting

    group = ServerGroup("http://a", open_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_group, "GIVES_UP_WITHIN_S", 0.1)
        with pytest.raises(InferenceError, match=r"did not join the learner's group within 0.1 s"):
            group.join(0.1)
    assert not waiting.ended.is_set()
    comes.set()
    assert waiting.ended.wait(10)


def test_two_processes_on_one_gpu_are_told_what_to_set() -> None:
    def refused() -> Any:
        raise RuntimeError(
            "NCCL error: invalid usage\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 0"
        )

    with pytest.raises(InferenceError, match=r"http://a could not join .* set inference.weight_transfer=ipc"):
        ServerGroup("http://a", refused).join(5)


def test_a_group_that_has_ended_sends_nothing_and_says_so() -> None:
    """vLLM's communicator returns from a broadcast after its end as if it had sent."""

    class Communicator:
        sent, destroyed = 0, 0

        def broadcast(self, tensor: Tensor, src: int) -> None:
            self.sent += 1

        def destroy(self) -> None:
            self.destroyed += 1

    communicator = Communicator()
    group = NcclGroup(communicator)
    group.broadcast(torch.zeros(1), 0)
    group.destroy()
    with pytest.raises(InferenceError, match="ended"):
        group.broadcast(torch.zeros(1), 0)
    assert (communicator.sent, communicator.destroyed) == (1, 1)


def test_a_group_can_be_ended_while_its_first_broadcast_waits_for_the_peer_inside_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections are made in the first call, which then does not return."""
    monkeypatch.setattr(server_group, "ENQUEUE_S", 0.1)
    waiting = WaitingGroup()
    group = ServerGroup("http://a", lambda: NcclGroup(waiting))
    group.join(5)
    with pytest.raises(InferenceError, match="did not take"):
        group.send(TENSORS, produce, 0.1)
    assert waiting.ended.is_set()


class Servers:
    """Servers in processes of their own, which meet this one over gloo."""

    def __init__(self, forker: subprocess.Popen[str], stage: DeviceWeightStage, folder: Path) -> None:
        self.stage = stage
        self._forker = forker
        self._folder = folder
        self._running: dict[str, tuple[int, Path]] = {}

    def join(self, endpoint: str) -> None:
        folder = self._folder / str(time.monotonic())
        folder.mkdir()
        asked = {"init_info": self.stage.offer(endpoint, 1), "folder": str(folder)}
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(json.dumps(asked) + "\n")
        self._forker.stdin.flush()
        self._running[endpoint] = int(self._forker.stdout.readline()), folder
        self.stage.join(endpoint, 120)

    def send(self, endpoint: str, weights: StagedWeights, timeout_s: float = 60) -> dict[str, Tensor]:
        """What the server has then."""
        folder = self._running[endpoint][1]
        number = len(list(folder.glob("*.safetensors")))
        (folder / "next").write_text(json.dumps(weights.update_info))
        (folder / "next").rename(folder / f"{number}.json")
        self.stage.send(endpoint, weights, timeout_s)
        deadline = time.monotonic() + 60
        while not (taken := folder / f"{number}.safetensors").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return load_file(taken)

    def signal(self, endpoint: str, number: int) -> None:
        os.kill(self._running[endpoint][0], number)

    def kill_all(self) -> None:
        for endpoint in self._running:
            self.signal(endpoint, signal.SIGKILL)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(300, 100))
        self.second = nn.Parameter(torch.randn(7))
        self.register_buffer("bias", torch.arange(5, dtype=torch.float32))
        self.third = nn.Parameter(torch.randn(50, 50))

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn(parameter.shape))

    def served(self) -> dict[str, Tensor]:
        return {name: tensor.detach().bfloat16() for name, tensor in self.named_parameters()} | {
            "bias": self.bias.clone()
        }


@pytest.fixture
def model() -> Weights:
    return Weights()


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.learner.gloo_group"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.fixture
def servers(
    forker: subprocess.Popen[str], model: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Servers]:
    without_streams(monkeypatch)
    monkeypatch.setattr(device_weights, "BUFFER_BYTES", 10_000)  # so that there are several chunks
    numbers = iter(range(100))
    found: list[Servers] = []

    def unique_id() -> bytes:
        return str(tmp_path / f"meeting-{next(numbers)}").encode().ljust(128, b"\0")

    def open_group(unique_id: bytes, world_size: int, device: Any) -> NcclGroup:
        return NcclGroup(GlooGroup(unique_id, 0, world_size, end_peer=found[0].kill_all))

    monkeypatch.setattr(device_weights, "new_unique_id", unique_id)
    monkeypatch.setattr(device_weights, "open_nccl_group", open_group)
    found.append(Servers(forker, DeviceWeightStage(model, [], torch.bfloat16, "nccl"), tmp_path))
    try:
        yield found[0]
    finally:
        found[0].kill_all()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.vllm
def test_a_server_that_is_killed_in_a_transfer_comes_back_in_a_new_group(servers: Servers, model: Weights) -> None:
    servers.join("http://a")
    weights = servers.stage.stage(1)
    assert_same(servers.send("http://a", weights), model.served())
    servers.stage.release(weights)

    model.change()
    weights = servers.stage.stage(2)
    servers.signal("http://a", signal.SIGSTOP)
    threading.Timer(0.5, lambda: servers.signal("http://a", signal.SIGKILL)).start()
    with pytest.raises(InferenceError, match="http://a could not take the weights"):
        servers.send("http://a", weights)

    expected = model.served()
    model.change()  # as the next step does meanwhile
    servers.join("http://a")
    assert_same(servers.send("http://a", weights), expected)


@pytest.mark.vllm
def test_a_server_that_hangs_in_a_transfer_is_given_up_and_another_one_takes_the_weights(
    servers: Servers, model: Weights
) -> None:
    weights = servers.stage.stage(1)
    servers.join("http://a")
    servers.signal("http://a", signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(InferenceError, match="http://a did not take the weights within 1 s"):
        servers.send("http://a", weights, timeout_s=1)
    assert time.monotonic() - started < 1 + server_group.GIVES_UP_WITHIN_S
    servers.join("http://b")
    assert_same(servers.send("http://b", weights), model.served())


def test_weights_that_were_released_are_sent_to_nobody(model: Weights) -> None:
    stage = DeviceWeightStage(model, [], torch.bfloat16, "nccl")
    weights = stage.stage(1)
    with pytest.raises(LearnerError, match="must be released before version 2"):
        stage.stage(2)
    stage.release(weights)
    with pytest.raises(LearnerError, match="released before"):
        stage.send("http://a", weights, 1)
    with pytest.raises(InferenceError, match="http://a has no group"):
        stage.send("http://a", stage.stage(2), 1)
