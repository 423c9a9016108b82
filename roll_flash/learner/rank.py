"""What one rank of the learner does: FSDP, forward and backward on packed rows, the optimizer.

Every method marked as a collective must be called on all ranks in the same order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from roll_flash.config import LearnerConfig
from roll_flash.inference.engine import StagedWeights
from roll_flash.learner import checkpoint
from roll_flash.learner.losses import policy_loss
from roll_flash.learner.packing import PackedRow
from roll_flash.learner.policy_model import load_policy_model
from roll_flash.learner.weights import WeightStage

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, eq=False)
class RowRecord:
    """What the forward pass of a row showed: arrays [policy tokens], sums and means over them."""

    loss: float
    """Sum over the policy tokens."""
    means: dict[str, float]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    behavior_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """What the optimizer did. `grad_norm` is that of the normalised gradient, before clipping."""

    grad_norm: float
    skipped: bool
    seconds: float


class LearnerRank:
    def __init__(
        self, model_folder: Path, config: LearnerConfig, *, rank: int, seed: int, temperature: float, run: str
    ) -> None:
        self._folder = model_folder
        self._config = config
        self._rank = rank
        self._seed = seed
        self._temperature = temperature
        self._run = run
        self._store: dist.Store | None = None
        self._device = _device(config.device, rank)
        if self._device.type == "cpu":
            torch.set_num_threads(config.threads)

    def node_address(self) -> str:
        """The address under which other ranks reach this one's machine."""
        address: str = ray.util.get_node_ip_address()
        return address

    def open_store(self, host: str) -> int:
        """First rank only: opens the meeting point of all ranks at `host`, returns its port; 0 where one is alone."""
        if self._config.ranks == 1:
            self._store = dist.HashStore()
            return 0
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._store = store
        return store.port

    def start(self, host: str, port: int) -> str:
        """Join the other ranks, load the model, shard it; returns the model's fingerprint. A collective."""
        if host == _LOOPBACK:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = self._store if self._rank == 0 else dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        ranks = self._config.ranks
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=ranks, timeout=self._timeout)
        torch.manual_seed(self._seed + self._rank)
        policy = load_policy_model(self._folder, self._temperature)
        fingerprint = checkpoint.fingerprint(policy.model)
        tied = policy.tied_names()
        self._policy = policy.to(self._device)
        self._shard()
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=self._config.learning_rate,
            betas=self._config.betas,
            weight_decay=self._config.weight_decay,
            fused=True,
        )
        staged_dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._stage = WeightStage(self._policy.model, tied, staged_dtype, self._run)
        if self._rank == 0:
            self._stage.reserve()
        return fingerprint

    def accumulate(self, rows: Sequence[PackedRow | None], loss: str) -> list[RowRecord]:
        """Forward and backward of each row, adding to the gradients. A collective.

        None stands for a pass in which this rank has nothing to do but to take part: its loss is multiplied by zero.
        """
        self._policy.train()
        records = []
        for row in rows:
            if row is None:
                self._idle_pass()
            else:
                records.append(self._pass(row, loss))
        return records

    def update(self, policy_tokens: int, learning_rate: float, *, skip: bool) -> UpdateRecord:
        """Divide the gradients by the step's policy tokens, clip, step. A collective.

        Nothing changes when the gradient is not finite, or `skip`. A step in which no group had a signal has the
        gradient zero and is taken as such: momentum goes on, as in a loop that computes it.
        """
        started = time.perf_counter()
        for parameter in self._policy.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [_local(p.grad) for p in self._policy.parameters() if p.grad is not None]
        # FSDP averages over the ranks; the loss is a sum over them.
        scale = dist.get_world_size() / policy_tokens
        norm = self._total_norm() * scale
        skipped = skip or not np.isfinite(norm)
        if not skipped:
            torch._foreach_mul_(gradients, scale * min(1.0, self._config.max_grad_norm / (norm + 1e-6)))
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad()
        return UpdateRecord(grad_norm=norm, skipped=skipped, seconds=time.perf_counter() - started)

    def abandon(self) -> None:
        """Forget the gradient of the step under way."""
        self._optimizer.zero_grad()

    def logprobs(self, row: PackedRow) -> NDArray[np.float32]:
        """Log-probabilities at temperature 1 of the row's policy tokens, in its order. A collective."""
        self._policy.eval()
        with torch.no_grad():
            logprobs, _ = self._policy(row, 1.0)
        # FSDP gathers the root's parameters for a backward pass, and none comes to shard them again.
        cast(FSDPModule, self._policy).reshard()
        result: NDArray[np.float32] = logprobs.cpu().numpy()
        return result

    def stage(self, version: int) -> StagedWeights | None:
        """The first rank returns the staged weights. A collective."""
        if self._rank == 0:
            return self._stage.stage(version)
        self._stage.gather()
        return None

    def release(self, weights: StagedWeights) -> None:
        """First rank only."""
        self._stage.release(weights)

    def save(self, folder: Path) -> None:
        """This rank's part of a checkpoint. A collective."""
        checkpoint.write_state(folder, self._policy, self._optimizer, self._rank)

    def load(self, folder: Path) -> None:
        """Read a checkpoint; a step under way is forgotten. A collective."""
        self._optimizer.zero_grad()
        checkpoint.read_state(folder, self._policy, self._optimizer, self._rank)

    def export(self, folder: Path) -> None:
        """A Hugging Face folder, written by the first rank. A collective."""
        model = self._policy.model
        tensors = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }
        if self._rank == 0:
            model.save_pretrained(folder, state_dict={name: tensor.cpu() for name, tensor in tensors.items()})
            AutoTokenizer.from_pretrained(self._folder).save_pretrained(folder)

    def close(self) -> None:
        self._stage.close()
        dist.destroy_process_group()

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._config.step_timeout_s)

    def _shard(self) -> None:
        mesh = init_device_mesh(self._device.type, (self._config.ranks,))
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        precision = half if self._device.type == "cuda" else MixedPrecisionPolicy()
        for layer in self._policy.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(self._policy, mesh=mesh, mp_policy=precision)

    def _pass(self, row: PackedRow, loss: str) -> RowRecord:
        logprobs, entropies = self._policy(row)
        output = policy_loss(
            loss,
            logprobs=logprobs,
            prox_logprobs=logprobs.detach(),
            behavior_logprobs=self._tensor(row.behavior_logprobs),
            advantages=self._tensor(row.advantages),
            mask=torch.ones_like(logprobs, dtype=torch.bool),
            sequence_ids=self._tensor(row.sequence_ids),
            normalizer=1.0,
            **(_loss_params(self._config) if loss == self._config.loss.name else {}),
        )
        output.loss.backward()
        return RowRecord(
            loss=output.loss.item(),
            means={name: value.item() for name, value in output.metrics.items()},
            logprobs=logprobs.detach().cpu().numpy(),
            entropies=entropies.cpu().numpy(),
            behavior_logprobs=row.behavior_logprobs,
        )

    def _idle_pass(self) -> None:
        logprobs, _ = self._policy(_SINGLE_TOKEN)
        (logprobs.sum() * 0.0).backward()

    def _total_norm(self) -> float:
        gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.tensor(array, device=self._device)  # a copy: arrays that came through Ray are read-only


_SINGLE_TOKEN = PackedRow(
    token_ids=np.zeros(1, np.int64),
    position_ids=np.zeros(1, np.int64),
    subtree_end=np.ones(1, np.int64),
    source=np.zeros(1, np.int64),
    target=np.zeros(1, np.int64),
    sequence_ids=np.zeros(1, np.int64),
    behavior_logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    advantages=np.zeros(1, np.float32),
    padded_tokens=1,
)


def _loss_params(config: LearnerConfig) -> dict[str, object]:
    loss = config.loss
    match loss.name:
        case "reinforce":
            return {}
        case "ppo":
            return {"clip_low": loss.clip_low, "clip_high": loss.clip_high, "dual_clip": loss.dual_clip}
        case "decoupled_ppo":
            return loss.model_dump(exclude={"name"})


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # Ray shows each actor only its own device, as number 0.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
