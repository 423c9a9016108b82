"""Implements one rank of the learner: FSDP, forward and backward on packed rows, the optimizer.

All ranks must call every method marked as a collective in the same order.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel

from roll_flash.chat.templates import chat_template_of
from roll_flash.config.sections.learner import OFFLOAD_ON_CPU, LearnerConfig
from roll_flash.engines.inference import StagedWeights, WeightTransfer
from roll_flash.engines.learner import AdamSettings, NamedLoss
from roll_flash.errors import ConfigError, LearnerError, ModelError, StreamError
from roll_flash.learner.losses.critic import whitened, with_advantages
from roll_flash.learner.losses.objective import SINGLE_TOKEN, Objective
from roll_flash.learner.losses.records import RowRecord, bounded_log_ratio
from roll_flash.learner.losses.second_moment import leave_out, outward_log_ratios
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.model import lora
from roll_flash.learner.model.compiled_layers import compile_layers
from roll_flash.learner.model.exact_settings import ExactSettings
from roll_flash.learner.model.policy_model import (
    CriticModel,
    PolicyModel,
    check_same_vocabulary,
    check_weight_files,
    load_policy_model,
    open_policy_model,
)
from roll_flash.learner.model.weight_files import WeightFiles, halve_frozen, local_part
from roll_flash.learner.packing.head_shape import head_shape
from roll_flash.learner.packing.rows import PackedRow, TrainSequence, by_sample, pack, with_predictions
from roll_flash.learner.packing.sequences import PlannedTrajectory
from roll_flash.learner.ranks import checkpoint
from roll_flash.learner.ranks.device import CPU, all_cores, rank_device, reserved_gpus
from roll_flash.learner.ranks.gradient_sync import GradientSync
from roll_flash.learner.ranks.optimizer import WeightAverage, open_optimizer, trained_parts
from roll_flash.learner.ranks.rank_actor import Forms, UpdateRecord
from roll_flash.learner.ranks.rendezvous import interface_of, is_on_one_machine, join_rendezvous, open_rendezvous
from roll_flash.learner.ranks.row_memory import (
    GpuMemory,
    check_longest_row,
    explained_states,
    longest_row,
)
from roll_flash.learner.weights.device import DeviceWeightStage
from roll_flash.learner.weights.staged import WeightStage, check_can_be_staged, whole_tensors
from roll_flash.processes.garbage import return_free_memory
from roll_flash.stream.blocks import fetch_tokens
from roll_flash.watchdog.stacks import register_stacks

_LOG = logging.getLogger(__name__)

GPU_BACKEND = "cpu:gloo,cuda:nccl"


class LearnerRank:
    def __init__(
        self,
        model_folder: Path,
        config: LearnerConfig,
        *,
        rank: int,
        seed: int,
        temperature: float,
        run: str,
        transfer: WeightTransfer = "shm",
        max_length: int | None = None,
    ) -> None:
        self._folder = model_folder
        self._config = config
        self._rank = rank
        self._seed = seed
        self._temperature = temperature
        self._run = run
        self._transfer = transfer
        self._max_length = max_length
        self._kept: dict[str, list[TrainSequence]] = {}
        """Sequences of the step by group, with proximal log-probabilities and values; see `keeps_groups`."""
        self._critic: CriticModel | None = None
        self._store: dist.Store | None = None
        self._writing: dict[Path, Future[Any]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-model")
        self._device = CPU
        register_stacks(run, f"rank {rank}")

    def node_address(self) -> str:
        """Return the address at which other ranks can reach this machine."""
        address: str = ray.util.get_node_ip_address()
        return address

    def node_id(self) -> str:
        """Return Ray's id of this node."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def process_id(self) -> int:
        return os.getpid()

    def _take_device(self) -> None:
        self._device = rank_device(self._config.device, reserved_gpus())
        if self._device == CPU:
            torch.set_num_threads(self._config.threads)

    def check_model(self) -> Forms:
        """Load the model and find how it, and a reference in another folder, are computed exactly. First rank only,
        before all other parts start. Raises ModelError if exact computation is impossible, ConfigError if there is no
        GPU that should be there."""
        self._take_device()
        if self._config.activation_offload and not self._on_gpu:
            raise ConfigError(f"learner.{OFFLOAD_ON_CPU}")
        forms: dict[Path, ExactSettings] = {}
        reference = self._reference_folder()
        if reference is not None and reference != self._folder:
            check_weight_files(reference)
            forms[reference] = load_policy_model(reference, self._temperature).form
        check_weight_files(self._folder)
        # Not kept: each rank then reads its shard only.
        policy = load_policy_model(self._folder, self._temperature)
        forms[self._folder] = policy.form
        if self._has_value_head and policy.logit_transform is None:
            raise ModelError(
                f"{self._folder}: {type(policy.model).__name__} makes logits in a way of its own, so that a value head "
                "cannot read the states behind them; set learner.critic.kind=model"
            )
        if self._config.gradient_checkpointing and not policy.model.supports_gradient_checkpointing:
            raise ModelError(
                f"{self._folder}: transformers cannot compute layers of {type(policy.model).__name__} again; set "
                "learner.gradient_checkpointing=false"
            )
        for folder, form in forms.items():
            check_same_vocabulary(form, forms[self._folder], folder)
        check_can_be_staged(policy.model, self._folder)
        return forms

    def open_store(self, host: str | None) -> str:
        """Open the rendezvous and return its address. First rank only. `host` None: all ranks are on this machine."""
        self._store, address = open_rendezvous(self._config.ranks, host, self._timeout)
        return address

    def start(self, address: str, forms: Forms) -> str:
        """Join the other ranks, load and shard the model; return the model's fingerprint. A collective."""
        self._take_device()
        if is_on_one_machine(address):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            interface = interface_of(self.node_address())
            os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        store = self._store if self._rank == 0 else join_rendezvous(address, self._config.ranks, self._timeout)
        backend = GPU_BACKEND if self._on_gpu else "gloo"
        ranks = self._config.ranks
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=ranks, timeout=self._timeout)
        # Made before any model: the ranks of a node may have to load theirs one after the other.
        size = self._config.shard_size or ranks
        shape, names = ((ranks,), ("shard",)) if size == ranks else ((ranks // size, size), ("replicate", "shard"))
        self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        # Background collectives use a separate group, so that they cannot mix with those of FSDP.
        self._background: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        torch.manual_seed(self._seed + self._rank)
        with open_policy_model(self._folder, forms[self._folder], self._temperature) as (policy, files):
            self._prepare(policy)
            if self._has_value_head:
                policy.add_value_head(detach=self._config.critic.detach)
            self._flex_attention = (
                self._on_gpu and policy.shares_prefixes and _flex_attention_works(self._device, policy.model)
            )
            fingerprint = checkpoint.fingerprint(policy.model)
            self._tied = policy.tied_names()
            self._policy = self._shard(policy, files)
        if self._config.has_critic and not self._has_value_head:
            self._critic = self._load_critic(forms)
        self._trained_models = [self._policy] if self._critic is None else [self._policy, self._critic]
        if self._config.compile:
            for model in self._trained_models:
                compile_layers(model)
        reference = self._load_reference(forms)
        self._shares = policy.shares_prefixes and (reference is None or reference.shares_prefixes)
        if self._rank == 0:  # now, since the folder may be gone when the first model is written
            tokenizer = self._writer.submit(AutoTokenizer.from_pretrained, self._folder)
        self._objective = Objective(self._config, self._policy, reference, self._critic)
        once_a_step = self._config.gradient_sync == "step"
        self._sync = GradientSync(self._trained_models, once_a_step=once_a_step, ranks=ranks)
        with explained_states():
            self._optimizer = open_optimizer(self._policy, self._config, self._critic)
            self._average = self._open_average()
        self._stage = self._open_stage()
        if self._rank == 0:
            self._tokenizer = tokenizer.result()
            self._stage.reserve()
        if self._on_gpu:
            _LOG.info("%s", self._check_longest_row(GpuMemory(self._device)))
        return fingerprint

    def shares_prefixes(self) -> bool:
        """Return true if a row may hold several sequences."""
        return self._shares

    def accumulate(self, planned: Sequence[PlannedTrajectory]) -> list[RowRecord]:
        """Fetch trajectories, run forward and backward passes on them, accumulate gradients. A collective.

        Returns one record per packed row. Raises StreamError or LearnerError on all ranks if one cannot fetch its own.
        """
        found = self._fetch(planned)
        return self.accumulate_sequences([each for sequences in found for each in sequences])

    def accumulate_sequences(
        self, sequences: Sequence[TrainSequence], *, loss: NamedLoss | None = None
    ) -> list[RowRecord]:
        """Like `accumulate`, on sequences that are here. A collective."""
        for model in self._trained_models:
            model.train()
        records = []
        for row in self._passes(sequences):
            self._sync.begin_pass()
            if row is None:
                self._objective.idle_pass(loss)
            else:
                record = self._objective.add_gradient(row, loss)
                if self._config.log_logprobs:
                    record = replace(record, by_sample=by_sample(row, sequences, record.logprobs))
                records.append(record)
        return records

    def keep(self, planned: Sequence[PlannedTrajectory]) -> None:
        """Fetch trajectories and keep their sequences for `accumulate_kept`, with proximal log-probabilities, with a
        critic also values. A collective."""
        found = self._fetch(planned)
        sequences = [each for of_one in found for each in of_one]
        owners = [each.group_id for each, of_one in zip(planned, found, strict=True) for _ in of_one]
        with nullcontext() if self._average is None else self._average.in_place():
            predicted = self._predicted(sequences, self._objective.predict)
        for group_id, sequence in zip(owners, predicted, strict=True):
            self._kept.setdefault(group_id, []).append(sequence)

    def estimate_advantages(self) -> None:
        """Give all sequences that are kept their advantages and returns; with a critic only. A collective."""
        critic, kept = self._config.critic, self._kept.values()
        found = [with_advantages(each, critic.discount, critic.gae_lambda) for of_one in kept for each in of_one]
        if AdvantageConfig.of(self._config).scale == "batch":
            found = whitened(found, self._sum)
        rest = iter(found)
        self._kept = {name: [next(rest) for _ in of_one] for name, of_one in self._kept.items()}

    def kept_log_ratios(self) -> NDArray[np.float32]:
        """Return the log-ratios of the kept tokens that `limit_second_moment` is about, in any order."""
        found = [outward_log_ratios(each) for sequences in self._kept.values() for each in sequences]
        log_ratios: NDArray[np.float32] = np.concatenate([*found, np.empty(0, np.float32)])
        return np.compress(log_ratios != 0, log_ratios)

    def limit_kept(self, bound: float) -> None:
        """Leave out of the policy loss what is beyond `SecondMoment.bound`."""
        self._kept = {name: [leave_out(each, bound) for each in found] for name, found in self._kept.items()}

    def accumulate_demonstrations(self, sequences: Sequence[TrainSequence]) -> list[RowRecord]:
        """Like `accumulate_sequences`, with their loss, while nothing else runs. A collective."""
        with all_cores(self._config.threads, self._config.ranks) if self._device == CPU else nullcontext():
            return self.accumulate_sequences(sequences, loss=NamedLoss("supervised"))

    def accumulate_kept(self, group_ids: Sequence[str]) -> list[RowRecord]:
        """Like `accumulate`, on groups that `keep` has prepared; drops them. A collective."""
        return self.accumulate_sequences([each for name in group_ids for each in self._kept.pop(name, [])])

    def text_logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities [T] of each sequence under the current weights, at temperature 1. A
        collective."""
        found = self._predicted(sequences, lambda row: {"prox_logprobs": self._objective.logprobs(row, 1.0)})
        return [each.prox_logprobs for each in found if each.prox_logprobs is not None]

    def divergences(self, planned: Sequence[PlannedTrajectory]) -> list[float]:
        """Return, for each trajectory, the sum of log mu - log pi_reference over its policy tokens, mu being the policy
        that sampled: k1, the unbiased estimate of the divergence from the reference. A collective."""
        found = self._fetch(planned)
        sequences = [each for of_one in found for each in of_one]
        by_reference = iter(
            self._predicted(sequences, lambda row: {"prox_logprobs": self._objective.reference_logprobs(row)})
        )
        return [sum(_divergence(next(by_reference)) for _ in of_one) for of_one in found]

    def _fetch(self, planned: Sequence[PlannedTrajectory]) -> list[list[TrainSequence]]:
        """Return the sequences of each trajectory, once all ranks have theirs: one that failed joins no pass."""
        failure: StreamError | None = None
        found: list[list[TrainSequence]] = []
        try:
            arrays = fetch_tokens([each.data for each in planned])
            by_turn = self._config.critic.level == "turn"
            found = [each.sequences(tokens, by_turn=by_turn) for each, tokens in zip(planned, arrays, strict=True)]
        except StreamError as error:
            failure = error
        if self._largest(int(failure is not None)):
            raise failure or LearnerError("another rank could not fetch its trajectories")
        return found

    def _passes(self, sequences: Sequence[TrainSequence]) -> list[PackedRow | None]:
        """Return packed rows, longest first, and None for each idle pass, in which this rank only takes part in
        collectives: FSDP needs every rank in every pass."""
        row_tokens = self._config.micro_batch_tokens if self._shares else 1  # 1: one row per sequence
        rows = sorted(pack(sequences, row_tokens), key=lambda row: row.num_tokens, reverse=True)
        return [*rows, *[None] * (self._largest(len(rows)) - len(rows))]

    def _predicted(
        self, sequences: Sequence[TrainSequence], predict: Callable[[PackedRow], Mapping[str, Tensor]]
    ) -> list[TrainSequence]:
        """Return the sequences with what `predict` says of the policy tokens of a row. A collective."""
        rows, found = [], defaultdict[str, list[NDArray[np.float32]]](list)
        for row in self._passes(sequences):
            for name, values in predict(SINGLE_TOKEN if row is None else row).items():
                found[name] += [] if row is None else [values.cpu().numpy()]
            rows += [] if row is None else [row]
        return with_predictions(sequences, rows, **found)

    def _largest(self, number: int) -> int:
        """Return the largest number of all ranks. A collective."""
        if self._config.ranks == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def _sum(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums of numbers over all ranks. A collective."""
        totals = torch.tensor(list(numbers), dtype=torch.float64)
        if self._config.ranks > 1:
            dist.all_reduce(totals)
        return totals.tolist()

    def update(
        self,
        normalizer: float,
        learning_rate: float,
        *,
        skip: bool,
        critic_only: bool = False,
        supervised: bool = False,
        adam: AdamSettings | None = None,
    ) -> UpdateRecord:
        """Divide the gradients by `normalizer` (policy tokens or sequences of the step), clip, update. A collective.

        Changes nothing if the gradient is not finite or `skip` is true. If no group had a signal, the gradient is zero
        and the optimizer still steps: momentum continues, as if the gradient had been computed. `critic_only`: the
        policy and its momentum stay as they are. `supervised`: those of the critic do, and an average of weights begins
        anew, because the policies before are none that sampled. The gradient of a critic is clipped by itself, because
        it may be large while that of the policy is not. `adam`: in the place of the config's settings, from now on.
        """
        started = time.perf_counter()
        self._sync.finish()
        max_norm = self._config.max_grad_norm if adam is None else adam.max_grad_norm
        # FSDP averages gradients over the ranks, but the loss is a sum over them.
        scale = dist.get_world_size() / normalizer
        parts = trained_parts(self._policy, self._critic)
        for parameter in (parameter for part in parts for parameter in part if parameter.grad is None):
            parameter.grad = torch.zeros_like(parameter)
        norms = [_total_norm(part) * scale for part in parts]
        skipped = skip or not np.isfinite(norms).all()
        if not skipped:
            for part, norm in zip(parts, norms, strict=True):
                gradients = [local_part(parameter.grad) for parameter in part if parameter.grad is not None]
                torch._foreach_mul_(gradients, scale * min(1.0, max_norm / (norm + 1e-6)))
            left_alone = parts[:1] if critic_only else parts[1:] if supervised else []
            for parameter in (parameter for part in left_alone for parameter in part):
                parameter.grad = None
            for group in self._optimizer.param_groups:
                group["lr"] = group.get("own_lr", learning_rate)
                if adam is not None:
                    group.update(betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)
            self._optimizer.step()
            if self._average is not None and supervised:
                self._average.restart()
            elif self._average is not None:
                self._average.update()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - started
        return UpdateRecord(norms[0], skipped, seconds, norms[1] if len(norms) > 1 else None)

    def set_entropy_bonus(self, bonus: float) -> None:
        self._objective.entropy_bonus = bonus

    def abandon(self) -> None:
        """Discard the gradient of the current step. A collective."""
        self._kept.clear()
        self._sync.finish()
        self._optimizer.zero_grad()

    def stage(self, version: int) -> StagedWeights | None:
        """Stage the weights; the first rank returns them, with `ipc` every rank. A collective."""
        if self._rank == 0 or self._transfer == "ipc":
            return replace(self._stage.stage(version), node_id=self.node_id() if ray.is_initialized() else "")
        self._stage.gather()
        return None

    def release(self, weights: StagedWeights) -> None:
        """Release staged weights on the ranks that hold them."""
        if self._rank == 0 or self._transfer == "ipc":
            self._stage.release(weights)

    def offer_transfer(self, endpoint: str, world_size: int) -> dict[str, Any]:
        """Offer a group to a server; return what its workers need to join. `nccl` only, first rank only, as below."""
        return self._transfers.offer(endpoint, world_size)

    def join_transfer(self, endpoint: str, timeout_s: float) -> None:
        """Wait for the server to join the group. Raises InferenceError if it does not."""
        self._transfers.join(endpoint, timeout_s)

    def send_weights(self, endpoint: str, weights: StagedWeights, timeout_s: float) -> None:
        """Send weights to a receiving server. Raises InferenceError if it does not take them."""
        self._transfers.send(endpoint, weights, timeout_s)

    def end_transfer(self, endpoint: str) -> None:
        """End the group with a server, and what waits for that server in other threads."""
        self._transfers.end(endpoint)

    def begin_save(self, folder: Path) -> None:
        """Copy this rank's part of a checkpoint and write it in the background. A collective."""
        self._writing[folder] = checkpoint.begin_write(
            folder, self._saved_model, self._optimizer, self._average, self._rank, self._background
        )

    def digest_of_frozen(self) -> str:
        """Return a digest of the weights that checkpoints leave out; empty if all are trained. A collective."""
        return checkpoint.digest_of_frozen(self._saved_model, self._mesh.get_group("shard"))

    def has_written(self, folder: Path) -> bool:
        """Return true if the write to `folder` has finished. Raises CheckpointError if it failed."""
        writing = self._writing.get(folder)
        if writing is not None and not writing.done():
            return False
        if writing is not None:
            del self._writing[folder]
            checkpoint.finish_write(folder, writing)
            return_free_memory()
        return True

    def load(self, folder: Path) -> None:
        """Load a checkpoint; discards the current step. A collective."""
        self.abandon()
        checkpoint.read_state(folder, self._saved_model, self._optimizer, self._rank, self._average)

    def forget_moments(self) -> None:
        """Let the optimizer begin again, with the weights as they are."""
        self._optimizer = open_optimizer(self._policy, self._config, self._critic)

    def begin_export(self, folder: Path) -> None:
        """Copy the weights; the first rank writes a Hugging Face folder in the background. A collective."""
        first = self._rank == 0
        tensors = {}
        for name, tensor in whole_tensors(self._policy.model, self._tied):
            if first:
                tensors[name] = tensor.to("cpu", copy=True)
        if first:
            self._writing[folder] = self._writer.submit(self._write_model, folder, tensors)

    def _write_model(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        _name_end_of_turn(self._policy.model, self._tokenizer)
        self._policy.model.save_pretrained(folder, state_dict=tensors)
        self._tokenizer.save_pretrained(folder)

    def close(self) -> None:
        self._writer.shutdown(cancel_futures=True)
        self._stage.close()
        dist.destroy_process_group()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _transfers(self) -> DeviceWeightStage:
        return cast(DeviceWeightStage, self._stage)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._config.step_timeout_s)

    @property
    def _has_value_head(self) -> bool:
        return self._config.has_critic and self._config.critic.kind == "head"

    @property
    def _saved_model(self) -> torch.nn.Module:
        """What a checkpoint holds: the policy, with its value head, or policy and critic."""
        if self._critic is None:
            return self._policy
        return torch.nn.ModuleDict({"policy": self._policy, "critic": self._critic})

    def _check_longest_row(self, counters: GpuMemory) -> str:
        """Try the longest row of the run; see `check_longest_row`. Gradients are none afterwards, random states as they
        were. A collective."""
        config, length = self._config, self._max_length
        by_length = length is not None and (length > config.micro_batch_tokens or not self._shares)
        key = "model.max_length" if by_length else "learner.micro_batch_tokens"
        tokens = length if by_length and length is not None else config.micro_batch_tokens

        def run_row(number: int) -> None:
            self._sync.begin_pass()
            self._objective.add_gradient(longest_row(number, length, self._policy.head.shape[0]))

        later = isinstance(self._stage, DeviceWeightStage) and (self._rank == 0 or self._transfer == "ipc")
        later_bytes = sum(2 * parameter.numel() for parameter in self._policy.parameters()) if later else 0
        for model in self._trained_models:
            model.train()
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            said = check_longest_row(run_row, tokens, counters, later_bytes=later_bytes, largest=self._largest, key=key)
        self.abandon()
        return said

    def _open_average(self) -> WeightAverage | None:
        if self._config.proximal_decay is None:
            return None
        trained = {name: each for name, each in self._policy.named_parameters() if each.requires_grad}
        return WeightAverage(trained, self._config.proximal_decay)

    def _open_stage(self) -> WeightStage | DeviceWeightStage:
        model, dtype = self._policy.model, torch.bfloat16 if self._on_gpu else torch.float32
        if self._transfer == "nccl" or self._transfer == "ipc":
            return DeviceWeightStage(model, self._tied, dtype, self._transfer)
        changed_only = self._config.lora.publish == "adapters"
        return WeightStage(model, self._tied, dtype, self._run, changed_only=changed_only)

    def _prepare(self, model: PolicyModel) -> None:
        """Make a model that is trained what the config wants, before it is sharded."""
        if self._config.lora.rank:
            # The same seed on every rank, because each rank keeps one shard of the same matrix.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                lora.adapt(model.model, self._config.lora)
        if self._config.gradient_checkpointing:
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.offload_activations = self._config.activation_offload

    def _load_critic(self, forms: Forms) -> CriticModel:
        """Load a critic with weights of its own, sharded like the policy."""
        with open_policy_model(self._folder, forms[self._folder], kind=CriticModel) as (critic, files):
            self._prepare(critic)
            critic.add_value_head(detach=False)
            return cast(CriticModel, self._shard(critic, files))

    def _shard(self, policy: PolicyModel, files: WeightFiles | None) -> PolicyModel:
        """Shard a model, and read this rank's shards if it has no weights yet; frozen ones in the dtype of the GPU's
        computation. A whole model in host memory goes to the GPU layer by layer, as FSDP shards it."""
        if self._on_gpu:
            halve_frozen(policy)
        policy.flex_attention = self._flex_attention
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        precision = half if self._on_gpu else MixedPrecisionPolicy()
        for module in (*policy.layers, policy):
            fully_shard(module, mesh=self._mesh, mp_policy=precision)
        # A row may leave weights unused that another rank's needs: without their zeros the sums would not fit together.
        cast(FSDPModule, policy).set_reduce_scatter_unused_params(True)
        if files is not None:
            files.fill(policy, "model.", self._device)
        return policy

    def _reference_folder(self) -> Path | None:
        """Return the reference's folder; None if there is none or the policy without adapters is the reference."""
        kl = self._config.kl
        if not kl.coefficient or (self._config.lora.rank and kl.reference is None):
            return None
        return self._folder if kl.reference is None else Path(kl.reference)

    def _load_reference(self, forms: Forms) -> PolicyModel | None:
        """Load the frozen reference, sharded like the policy."""
        folder = self._reference_folder()
        if folder is None:
            return None
        with open_policy_model(folder, forms[folder], self._temperature) as (reference, files):
            return self._shard(reference.requires_grad_(False), files)


def _flex_attention_works(device: torch.device, model: PreTrainedModel) -> bool:
    """Return true if FlexAttention works with the model's heads; if not, log that a dense mask is used instead."""
    from roll_flash.learner.packing.flex_tree import unsupported_reason

    reason = unsupported_reason(device, head_shape(model.config, model))
    if reason is not None:
        _LOG.warning("FlexAttention cannot be used here, a dense mask takes its place: %s", reason)
    return reason is None


def _name_end_of_turn(model: PreTrainedModel, tokenizer: Any) -> None:
    """Add the token with which turns end in training to those at which `generation_config.json` ends a text, which a
    base model lacks: whoever serves the model would not stop at it."""
    end = chat_template_of(tokenizer).end_of_turn if tokenizer.chat_template else None
    config: Any = model.generation_config
    named = tokenizer.eos_token_id if config.eos_token_id is None else config.eos_token_id
    ends = [named] if isinstance(named, int) else list(named or ())
    if end is not None and end not in ends:
        config.eos_token_id = [*ends, end]


def _divergence(sequence: TrainSequence) -> float:
    """Return the sum over policy tokens of a sequence whose `prox_logprobs` are those of the reference."""
    assert sequence.prox_logprobs is not None
    difference = (sequence.behavior_logprobs - sequence.prox_logprobs)[sequence.policy_mask]
    return float(bounded_log_ratio(difference).sum())


def _total_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
