"""The memory that learner ranks and servers need on their GPUs, by arithmetic from the shape of the model.

Bytes per parameter: a trained weight has a float32 master, gradient and two moments of AdamW (16 together), divided
over the ranks; a frozen one, and one in a server, has 2 (bfloat16). While a layer is computed, its weights exist as a
whole in bfloat16 on each rank, and its gradients too. Activations are those that eager PyTorch saves in a decoder layer
with RMSNorm and a gated feed-forward layer. What no formula gives (CUDA's context, NCCL, fragments) is OVERHEAD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roll_flash.cluster.parts import part_name
from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.config.tree import Config
from roll_flash.models.shape import ModelShape

GIB = 2**30
OVERHEAD = {"rank": 2 * GIB, "server": GIB * 3 // 2}
"""CUDA's context, libraries, communication buffers, CUDA graphs (server) and fragments. Not measured yet."""
LOGIT_CHUNK_BYTES = 512 * 2**20
"""As in `learner/model/token_logprobs.py` on a GPU: a chunk of logits. At most as much of probabilities is kept."""
PREFILL_TOKENS = 8192
"""Tokens that vLLM computes at once on large GPUs (`max_num_batched_tokens`)."""
TRANSFER_BYTES = 2 * 256 * 2**20
"""As in `learner/weights/device.py`: the buffers in which `nccl` sends."""
FIRST_RANK = part_name("rank", 0)
MASTER, GRADIENT, MOMENTS = 4, 4, 8
HALF, FULL = 2, 4
"""Bytes of a number in bfloat16, in which GPUs compute, and in float32, in which CPUs do."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one GPU by what they are for, largest parts first where they are named."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def text(self) -> str:
        """Return such as `61.2 GiB (states 59.9, overhead 1.3)`; a small sum has no parts."""
        named = self.named()
        return f"{self.total / GIB:.1f} GiB" + (f" ({named})" if named else "")

    def named(self) -> str:
        ordered = sorted(self.parts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in ordered if size >= GIB / 20)


def trained_parameters(learner: LearnerConfig, shape: ModelShape) -> int:
    """All parameters of a model, or those of its adapters."""
    if not learner.lora.rank:
        return shape.parameters
    return shape.adapter_parameters(learner.lora.rank, learner.lora.targets)


def master_bytes(learner: LearnerConfig) -> int:
    """Bytes of a trained parameter in float32, and in the average that is the proximal policy."""
    return MASTER if learner.proximal_decay is None else 2 * MASTER


def trained_models(learner: LearnerConfig) -> int:
    """The policy, and a critic with weights of its own."""
    return 2 if learner.has_critic and learner.critic.kind == "model" else 1


def publishes_adapters(config: Config) -> bool:
    """True if servers get the factors of adapters, not whole weights."""
    lora = config.learner.lora
    return bool(lora.rank) and lora.publish == "adapters"


def row_tokens(config: Config) -> int:
    """Tokens of the longest row that a rank computes at once."""
    return max(config.learner.micro_batch_tokens, config.model.max_length)


def rank_memory(config: Config, shape: ModelShape, width: int = HALF, *, is_first: bool = False) -> MemoryUse:
    """Return what one learner rank needs at the peak of a step, on a GPU; with `width` FULL, on a CPU.

    `is_first`: rank 0, which keeps the weights that `nccl` sends.
    """
    learner = config.learner
    models, is_full = trained_models(learner), not learner.lora.rank
    trained = trained_parameters(learner, shape) * models
    frozen = 0 if is_full else shape.parameters * models
    learner = learner.model_copy(update={"ranks": learner.shard_size or learner.ranks})  # that share one copy
    states = (master_bytes(learner) + MOMENTS) * trained // learner.ranks
    # With one synchronization per step, each rank keeps the gradient of all weights.
    gradients = GRADIENT * trained // (learner.ranks if learner.gradient_sync == "row" else 1)
    tokens, transfer = row_tokens(config), config.inference.weight_transfer
    stages = transfer == "ipc" or (transfer == "nccl" and is_first)
    parts = {
        "states": states + gradients,
        "frozen weights": width * frozen // learner.ranks,
        "gathered layers": _gathered_bytes(shape, width, is_full=is_full),
        "activations": _activation_bytes(learner, shape, tokens, width),
        "logits": _logit_bytes(shape, tokens, width, is_full=is_full),
        "reference": _reference_bytes(learner, shape, width),
        "staged weights": width * shape.parameters if stages else 0,
        "transfer buffers": TRANSFER_BYTES if stages and transfer == "nccl" else 0,
        "overhead": OVERHEAD["rank"],
    }
    return MemoryUse({name: size for name, size in parts.items() if size})


def _gathered_bytes(shape: ModelShape, width: int, *, is_full: bool) -> int:
    """The layer that is computed and the next one, embedding and head; for trained ones the gradient as computed, and
    in float32 while it is divided over the ranks."""
    weights = width * (shape.outside_layers + 2 * shape.largest_layer)
    return weights + ((width + GRADIENT) * (shape.outside_layers + shape.largest_layer) if is_full else 0)


def layer_activation_bytes(shape: ModelShape, width: int = HALF) -> int:
    """Bytes per token that one decoder layer saves for its backward pass."""
    norms = 2 * (FULL + 2 * width) * shape.hidden + (FULL + width) * (shape.query + shape.key)
    attention = width * (shape.query + shape.key + shape.key + 2 * shape.query) + FULL * shape.heads
    feed_forward = 4 * width * shape.feed_forward + 2 * width * shape.experts_per_token * shape.hidden
    return norms + attention + feed_forward


def _activation_bytes(learner: LearnerConfig, shape: ModelShape, tokens: int, width: int) -> int:
    """Saved activations of a row, and the gradients of the layer that is computed backward."""
    one_layer = layer_activation_bytes(shape, width)
    at_work = width * (2 * shape.feed_forward + 4 * shape.hidden)
    if not learner.gradient_checkpointing:
        return tokens * (shape.layers * one_layer + at_work)
    inputs = 0 if learner.activation_offload else shape.layers * width * shape.hidden
    return tokens * (inputs + one_layer + at_work)


def _logit_bytes(shape: ModelShape, tokens: int, width: int, *, is_full: bool) -> int:
    """A chunk of logits and of their exponentials, the kept probabilities, and the head's gradient over all chunks."""
    chunk = min(tokens * shape.vocabulary * FULL, LOGIT_CHUNK_BYTES)
    head = shape.head or shape.embedding
    return 3 * chunk + ((GRADIENT + width) * head if is_full else 0)


def _reference_bytes(learner: LearnerConfig, shape: ModelShape, width: int) -> int:
    """A second, frozen model. Without adapters, the model is its own reference; one in another folder counts alike."""
    kl = learner.kl
    has_one = kl.coefficient and not (learner.lora.rank and kl.reference is None)
    return width * shape.parameters // learner.ranks if has_one else 0


def server_memory(config: Config, shape: ModelShape, width: int = HALF) -> MemoryUse:
    """Return what one server needs on each of its GPUs beside its key-value cache; with `width` FULL, on a CPU, where
    it loads new weights beside those in use."""
    split = config.inference.tensor_parallel_size
    tokens = max(PREFILL_TOKENS, config.inference.max_num_seqs)
    work = tokens * width * (2 * shape.feed_forward + 4 * shape.hidden + shape.query + 2 * shape.key) // split
    sampling = 3 * FULL * config.inference.max_num_seqs * shape.vocabulary
    copies = 2 if width == FULL else 1
    weights = copies * width * shape.parameters // split
    return MemoryUse({"weights": weights, "activations": work + sampling, "overhead": OVERHEAD["server"]})


def needs(config: Config, shape: ModelShape, *, on_gpus: bool) -> list[str]:
    """Return a line for a rank and one for a server, where the memory of the machines is not known."""
    width = HALF if on_gpus else FULL
    server = dict(server_memory(config, shape, width).parts)
    if not on_gpus:
        server["key-value cache"] = int(config.inference.kv_cache_gib * GIB)
    of_each = " on each GPU" if on_gpus else ""
    return [
        f"each rank about {rank_memory(config, shape, width, is_first=True).text()}{of_each}, by arithmetic",
        f"each server about {MemoryUse(server).text()}{of_each}, by arithmetic"
        + (", and its key-value cache" if on_gpus else ""),
    ]


def cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """Bytes of keys and values of one token on each GPU of a server."""
    key_heads = max(1, shape.key * shape.heads // shape.query)
    return shape.cache_bytes_per_token // min(config.inference.tensor_parallel_size, key_heads)


def cache_bytes(config: Config, shape: ModelShape, gpu_bytes: int, *, shares_gpu: bool) -> int:
    """Return the size of a server's key-value cache on each of its GPUs; negative if there is no room for any."""
    if shares_gpu:
        return int(config.inference.kv_cache_gib * GIB)
    return int(config.inference.gpu_memory_utilization * gpu_bytes) - server_memory(config, shape).total
