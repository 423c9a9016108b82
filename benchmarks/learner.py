"""How fast the learner computes a step: packed with shared prefixes against padded, FSDP, optimizer, weight staging.

    python benchmarks/learner.py [--quick] [--json] [--model NAME|FOLDER|random-qwen3] [--threads N] [--trl]
    python benchmarks/learner.py --device cuda [--json]

Both sides run forward and backward of the same groups with the same loss and the output head on policy tokens only.
Padded: one transformers batch per group, right-padded. Packed: what the learner does. All in one process, in turns;
of several turns the fastest counts. On a CPU the time of the processor is compared beside that of the clock: other work
on the machine disturbs it less. On a GPU the model is Qwen3-0.6B's shape in bfloat16 with random weights, sequences are
four times as long, and packed rows use FlexAttention where it works, and a dense mask beside it.
`--trl` adds the training part of TRL's GRPO trainer on the same groups, in a process that waits for its turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from learner_models import RANDOM_QWEN3, load_both, model_folder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from trl_peer import Peer, open_peer

from roll_flash.learner.losses.policy import policy_loss
from roll_flash.learner.model.policy_model import PolicyModel
from roll_flash.learner.model.token_logprobs import token_logprobs
from roll_flash.learner.packing.flex_tree import unsupported_reason
from roll_flash.learner.packing.head_shape import head_shape
from roll_flash.learner.packing.rows import PackedRow, TrainSequence, pack
from roll_flash.learner.weights.staged import WeightStage

PROMPT_TOKENS = (90, 150)
SUFFIX_TOKENS = (30, 60)
OBSERVATION_TOKENS = 12


def make_groups(groups: int, replicas: int, vocabulary: int, scale: int = 1) -> list[list[TrainSequence]]:
    """Two-turn episodes: 90-150 tokens of prompt that replicas share, 30-60 of their own, 12 of them observation; all
    of it `scale` times as long."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(groups):
        prompt = random.integers(0, vocabulary, scale * random.integers(*PROMPT_TOKENS))
        made.append([_replica(random, prompt, vocabulary, scale) for _ in range(replicas)])
    return made


def _replica(random: np.random.Generator, prompt: np.ndarray, vocabulary: int, scale: int) -> TrainSequence:
    own = scale * int(random.integers(*SUFFIX_TOKENS))
    tokens = np.concatenate([prompt, random.integers(0, vocabulary, own)]).astype(np.int32)
    mask = np.zeros(len(tokens), np.bool_)
    mask[len(prompt) :] = True
    mask[len(prompt) + own // 2 : len(prompt) + own // 2 + scale * OBSERVATION_TOKENS] = False
    return TrainSequence(
        token_ids=tokens,
        policy_mask=mask,
        behavior_logprobs=np.full(len(tokens), -9.0, np.float32),
        versions=np.zeros(len(tokens), np.int32),
        advantages=np.full(len(tokens), random.normal(), np.float32),
    )


def packed_pass(policy: PolicyModel, rows: list[PackedRow]) -> None:
    for row in rows:
        logprobs, _ = policy(row)
        _backward(logprobs, row.behavior_logprobs, row.advantages)


def padded_pass(model: Any, groups: list[list[TrainSequence]]) -> None:
    head = model.get_output_embeddings().weight
    for group in groups:
        longest = max(len(sequence.token_ids) for sequence in group)
        tokens = torch.zeros(len(group), longest, dtype=torch.int64)
        mask = torch.zeros(len(group), longest, dtype=torch.bool)
        for index, sequence in enumerate(group):
            tokens[index, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
            mask[index, : len(sequence.token_ids)] = torch.tensor(sequence.policy_mask)
        hidden = model.base_model(tokens.to(head.device), use_cache=False).last_hidden_state
        chosen = hidden[:, :-1][mask[:, 1:].to(head.device)]
        target = tokens[mask].to(head.device)
        logprobs, _ = token_logprobs(chosen, head, torch.arange(len(target), device=head.device), target)
        behavior = np.concatenate([sequence.behavior_logprobs[sequence.policy_mask] for sequence in group])
        advantages = np.concatenate([sequence.advantages[sequence.policy_mask] for sequence in group])
        _backward(logprobs, behavior, advantages)


def _backward(logprobs: torch.Tensor, behavior: np.ndarray, advantages: np.ndarray) -> None:
    policy_loss(
        "decoupled_ppo",
        logprobs=logprobs,
        prox_logprobs=logprobs.detach(),
        behavior_logprobs=torch.tensor(behavior, device=logprobs.device),
        advantages=torch.tensor(advantages, device=logprobs.device),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        normalizer=1.0,
    ).loss.backward()


class Turns:
    """The fastest of several turns: seconds of the clock, and of the processor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.wall_s = float("inf")
        self.cpu_s = float("inf")

    def take(self, work: Callable[[], object]) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.wall_s = min(self.wall_s, time.perf_counter() - wall)
        self.cpu_s = min(self.cpu_s, time.process_time() - cpu)


def timed(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    turns = Turns(device)
    for _ in range(repeats):
        turns.take(work)
    return turns.wall_s


class Matmul:
    """A large matrix product in the model's dtype: what the hardware gives."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._size = 8192 if device.type == "cuda" else 2048
        self._factors = [torch.randn(self._size, self._size, device=device).to(dtype) for _ in range(2)]
        self.turns = Turns(device)
        torch.mm(*self._factors)

    def take_turn(self) -> None:
        for _ in range(3):
            self.turns.take(lambda: torch.mm(*self._factors))

    def gflops(self, seconds: float) -> float:
        return 2.0 * self._size**3 / seconds / 1e9


def flops(model: Any, tokens: int, pairs: int, heads_applied: int) -> float:
    """Forward and backward: 6 per weight and token, 12 per layer, width and (query, key) pair."""
    head = model.get_output_embeddings().weight.numel()
    embedding = model.get_input_embeddings().weight.numel()
    total: int = sum(parameter.numel() for parameter in model.parameters())
    body = total - embedding - (0 if model.config.tie_word_embeddings else head)
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * size
    return float(6.0 * body * tokens + 12.0 * config.num_hidden_layers * width * pairs + 6.0 * head * heads_applied)


def compare(
    policy: PolicyModel,
    plain: PreTrainedModel,
    groups: list[list[TrainSequence]],
    repeats: int,
    max_tokens: int,
    peer: Peer | None = None,
) -> dict[str, float]:
    """Speeds of both sides, and what they should be by the count of floating-point operations."""
    rows = pack([sequence for group in groups for sequence in group], max_tokens)
    device = policy.head.device
    matmul, packed, dense, padded = Matmul(device, policy.head.dtype), Turns(device), Turns(device), Turns(device)
    trl: list[dict[str, float]] = []
    flex = policy.flex_attention
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        matmul.take_turn()
        packed.take(lambda: packed_pass(policy, rows))
        if peer is not None:
            trl.append(peer.run())
        padded.take(lambda: padded_pass(plain, groups))
        if flex:
            policy.flex_attention = False
            dense.take(lambda: packed_pass(policy, rows))
            policy.flex_attention = True
        policy.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
    packed_flops, padded_flops = operations(plain, rows, groups)
    gigaflops, ratio = packed_flops / 1e9, padded_flops / packed_flops
    speedup, cpu_speedup = padded.wall_s / packed.wall_s, padded.cpu_s / packed.cpu_s
    figures = {
        "packed_s": packed.wall_s,
        "padded_s": padded.wall_s,
        "speedup": speedup,
        "flop_ratio": ratio,
        "share_of_flop_ratio": speedup / ratio,
        "packed_tokens": float(sum(row.num_tokens for row in rows)),
        "padded_tokens": float(sum(max(len(s.token_ids) for s in group) * len(group) for group in groups)),
        "rows": float(len(rows)),
        "matmul_gflops": matmul.gflops(matmul.turns.wall_s),
        "model_flop_utilisation": gigaflops / packed.wall_s / matmul.gflops(matmul.turns.wall_s),
        "padded_model_flop_utilisation": ratio * gigaflops / padded.wall_s / matmul.gflops(matmul.turns.wall_s),
    }
    if device.type == "cpu":
        figures |= {
            "packed_cpu_s": packed.cpu_s,
            "padded_cpu_s": padded.cpu_s,
            "cpu_speedup": cpu_speedup,
            "cpu_share_of_flop_ratio": cpu_speedup / ratio,
            "cpu_model_flop_utilisation": gigaflops / packed.cpu_s / matmul.gflops(matmul.turns.cpu_s),
        }
    else:
        figures |= {"flex_attention": float(flex), "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    if flex:
        figures["packed_with_dense_mask_s"] = dense.wall_s
    if trl:
        trl_s, trl_cpu_s = (min(run[name] for run in trl) for name in ("wall_s", "cpu_s"))
        figures |= {
            "trl_s": trl_s,
            "trl_cpu_s": trl_cpu_s,
            "speedup_against_trl": trl_s / packed.wall_s,
            "cpu_speedup_against_trl": trl_cpu_s / packed.cpu_s,
        }
    return figures


def operations(model: Any, rows: list[PackedRow], groups: list[list[TrainSequence]]) -> tuple[float, float]:
    """Floating-point operations of the packed and of the padded side."""
    packed_pairs = sum(int((np.asarray(row.position_ids) + 1).sum()) for row in rows)
    sources = sum(len(np.unique(row.source)) for row in rows)
    packed = flops(model, sum(row.num_tokens for row in rows), packed_pairs, sources)
    longest = [max(len(sequence.token_ids) for sequence in group) for group in groups]
    padded_tokens = sum(length * len(group) for length, group in zip(longest, groups, strict=True))
    padded_pairs = sum(n * (n + 1) // 2 * len(group) for n, group in zip(longest, groups, strict=True))
    return packed, flops(model, padded_tokens, padded_pairs, sum(len(row.target) for row in rows))


def surroundings(policy: PolicyModel, rows: list[PackedRow]) -> dict[str, float]:
    """What a step costs beside its passes: FSDP on one rank, the optimizer, a copy of the weights."""
    device = policy.head.device
    plain_s = timed(lambda: packed_pass(policy, rows), device, 2)
    tied = policy.tied_names()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")  # one process: it needs no network, and there may be none
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    mesh = init_device_mesh(device.type, (1,))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    fsdp_s = timed(lambda: packed_pass(policy, rows), device, 2)
    optimizer.step()
    optimizer_s = timed(optimizer.step, device)
    stage = WeightStage(policy.model, tied, policy.head.dtype, "benchmark")
    first = timed(lambda: stage.release(stage.stage(0)), device)
    again = timed(lambda: stage.release(stage.stage(1)), device, 3)
    weights = stage.stage(2)
    source = torch.ones(weights.num_bytes // 4)
    target = torch.ones_like(source)
    copy = timed(lambda: target.copy_(source), device, 3)
    stage.close()
    dist.destroy_process_group()
    return {
        "pass_s": plain_s,
        "pass_fsdp_s": fsdp_s,
        "optimizer_s": optimizer_s,
        "stage_first_s": first,
        "stage_again_s": again,
        "plain_copy_s": copy,
        "staged_mb": weights.num_bytes / 1e6,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small comparison, within a minute")
    parser.add_argument("--json", action="store_true", help="one object of named figures on standard output")
    parser.add_argument(
        "--model", help="a name of roll_flash.models.prepare, a model folder, or random-qwen3 (default: by device)"
    )
    parser.add_argument("--layers", type=int, default=28, help="of random-qwen3")
    parser.add_argument("--vocabulary", type=int, default=151936, help="of random-qwen3")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a packed row (default: 4096, on a GPU 16384)")
    parser.add_argument("--scale", type=int, help="how many times as long sequences are (default: 1, on a GPU 4)")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side; the fastest counts")
    parser.add_argument("--replicas", type=int, nargs="+", help="replicas of each comparison (default: 4 8 16)")
    parser.add_argument("--trl", action="store_true", help="TRL's GRPO trainer beside it, in an environment of its own")
    parser.add_argument("--trl-environment", type=Path, help="a virtual environment that has TRL already")
    options = parser.parse_args()
    if options.trl and options.device != "cpu":
        parser.error("--trl compares on the CPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here (torch.cuda.is_available() is false)")
    on_gpu = options.device == "cuda"
    options.model = options.model or ("tiny" if options.quick else RANDOM_QWEN3 if on_gpu else "smollm2-135m")
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    options.max_tokens = options.max_tokens or (16384 if on_gpu else 4096)
    options.scale = options.scale or (4 if on_gpu else 1)
    options.replicas = options.replicas or ((8,) if options.quick else (4, 8, 16))
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    device = torch.device(options.device)
    policy, plain = load_both(folder, device, options.dtype)
    results: dict[str, dict[str, Any]] = {"on": {"device": _name(device), "dtype": str(options.dtype)}}
    if device.type == "cuda":
        reason = unsupported_reason(device, head_shape(policy.model.config, policy.model))
        policy.flex_attention = reason is None
        results["on"]["flex_attention"] = reason or "works"
    vocabulary = policy.head.shape[0]
    for replicas in options.replicas:
        groups = make_groups(options.groups, replicas, vocabulary, options.scale)
        # Once without counting: kernels are chosen and compiled for the shapes that are timed.
        compare(policy, plain, groups if device.type == "cuda" else [groups[0][:2]], 1, options.max_tokens)
        with contextlib.ExitStack() as stack:
            peer = None
            if options.trl:
                peer = stack.enter_context(open_peer(folder, groups, options.threads, options.trl_environment))
            name = f"replicas_{replicas}"
            results[name] = dict(compare(policy, plain, groups, options.repeats, options.max_tokens, peer))
    groups = make_groups(options.groups, 4, vocabulary, options.scale)
    del plain
    rows = pack([sequence for group in groups for sequence in group], options.max_tokens)
    results["surroundings"] = dict(surroundings(policy, rows))
    return results


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} of {os.cpu_count()} threads"


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with model_folder(options.model, options.layers, options.vocabulary) as folder:
        results = measure(options, folder)
    if options.json:
        print(json.dumps(results))
        return
    from rich.console import Console
    from rich.table import Table

    for name, figures in results.items():
        table = Table("figure", "value", title=name)
        for key, value in figures.items():
            table.add_row(key, value if isinstance(value, str) else f"{value:.4g}")
        Console().print(table)


if __name__ == "__main__":
    main()
