"""How fast the learner computes a step: packed with shared prefixes against padded, FSDP, optimizer, weight staging.

    python benchmarks/learner.py [--quick] [--json] [--model NAME|FOLDER] [--threads N] [--device cpu|cuda] [--trl]

Both sides run forward and backward of the same groups with the same loss and the output head on policy tokens only.
Padded: one transformers batch per group, right-padded. Packed: what the learner does. All in one process, in turns.
`--trl` adds the training part of TRL's GRPO trainer on the same groups, in a process that waits for its turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl_peer import Peer, open_peer

from roll_flash.learner.losses import policy_loss
from roll_flash.learner.packing import PackedRow, TrainSequence, pack
from roll_flash.learner.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.token_logprobs import token_logprobs
from roll_flash.learner.weights import WeightStage
from roll_flash.models import resolve_model

PROMPT_TOKENS = (90, 150)
SUFFIX_TOKENS = (30, 60)


def make_groups(groups: int, replicas: int, vocabulary: int) -> list[list[TrainSequence]]:
    """Two-turn episodes: 90-150 tokens of prompt that replicas share, 30-60 of their own, 12 of them observation."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(groups):
        prompt = random.integers(0, vocabulary, random.integers(*PROMPT_TOKENS))
        made.append([_replica(random, prompt, vocabulary) for _ in range(replicas)])
    return made


def _replica(random: np.random.Generator, prompt: np.ndarray, vocabulary: int) -> TrainSequence:
    own = int(random.integers(*SUFFIX_TOKENS))
    tokens = np.concatenate([prompt, random.integers(0, vocabulary, own)]).astype(np.int32)
    mask = np.zeros(len(tokens), np.bool_)
    mask[len(prompt) :] = True
    mask[len(prompt) + own // 2 : len(prompt) + own // 2 + 12] = False
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


def timed(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def matmul_gflops(device: torch.device) -> float:
    """Speed of a large float32 matrix product: what the hardware gives."""
    size = 2048
    first, second = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    torch.mm(first, second)
    return 2.0 * size**3 / min(timed(lambda: torch.mm(first, second), device) for _ in range(3)) / 1e9


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
    """With `peer` TRL runs between; CPU time is compared too, which other work on the machine disturbs less."""
    rows = pack([sequence for group in groups for sequence in group], max_tokens)
    device = policy.head.device
    packed_s, padded_s, matmul, packed_cpu_s, trl = [], [], [], [], []
    for _ in range(repeats):
        matmul.append(matmul_gflops(device))
        began = time.process_time()
        packed_s.append(timed(lambda: packed_pass(policy, rows), device))
        packed_cpu_s.append(time.process_time() - began)
        if peer is not None:
            trl.append(peer.run())
        padded_s.append(timed(lambda: padded_pass(plain, groups), device))
        policy.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
    packed_tokens = sum(row.num_tokens for row in rows)
    packed_pairs = sum(int((np.asarray(row.position_ids) + 1).sum()) for row in rows)
    longest = [max(len(sequence.token_ids) for sequence in group) for group in groups]
    padded_tokens = sum(length * len(group) for length, group in zip(longest, groups, strict=True))
    padded_pairs = sum(n * (n + 1) // 2 * len(group) for n, group in zip(longest, groups, strict=True))
    policy_tokens = sum(row.policy_tokens for row in rows)
    sources = sum(len(np.unique(row.source)) for row in rows)
    packed_flops = flops(plain, packed_tokens, packed_pairs, sources)
    ratio = flops(plain, padded_tokens, padded_pairs, policy_tokens) / packed_flops
    speedup = min(padded_s) / min(packed_s)
    against_trl = {}
    if trl:
        trl_s, trl_cpu_s = (min(run[name] for run in trl) for name in ("wall_s", "cpu_s"))
        against_trl = {
            "trl_s": trl_s,
            "trl_cpu_s": trl_cpu_s,
            "packed_cpu_s": min(packed_cpu_s),
            "speedup_against_trl": trl_s / min(packed_s),
            "cpu_speedup_against_trl": trl_cpu_s / min(packed_cpu_s),
        }
    return {
        **against_trl,
        "packed_s": min(packed_s),
        "padded_s": min(padded_s),
        "speedup": speedup,
        "flop_ratio": ratio,
        "share_of_flop_ratio": speedup / ratio,
        "packed_tokens": float(packed_tokens),
        "padded_tokens": float(padded_tokens),
        "rows": float(len(rows)),
        "matmul_gflops": max(matmul),
        "model_flop_utilisation": packed_flops / min(packed_s) / 1e9 / max(matmul),
    }


def surroundings(policy: PolicyModel, rows: list[PackedRow]) -> dict[str, float]:
    """What a step costs beside its passes: FSDP on one rank, the optimizer, a copy of the weights."""
    device = policy.head.device
    plain_s = min(timed(lambda: packed_pass(policy, rows), device) for _ in range(2))
    tied = policy.tied_names()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    mesh = init_device_mesh(device.type, (1,))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    fsdp_s = min(timed(lambda: packed_pass(policy, rows), device) for _ in range(2))
    optimizer.step()
    optimizer_s = timed(optimizer.step, device)
    stage = WeightStage(policy.model, tied, torch.float32, "benchmark")
    first = timed(lambda: stage.release(stage.stage(0)), device)
    again = min(timed(lambda: stage.release(stage.stage(1)), device) for _ in range(3))
    weights = stage.stage(2)
    source = torch.ones(weights.num_bytes // 4)
    target = torch.ones_like(source)
    copy = min(timed(lambda: target.copy_(source), device) for _ in range(3))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small comparison, within a minute")
    parser.add_argument("--json", action="store_true", help="one object of named figures on standard output")
    parser.add_argument("--model", help="a name of roll_flash.models or a model folder (default: smollm2-135m)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--max-tokens", type=int, default=4096, help="most tokens of a packed row")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--replicas", type=int, nargs="+", help="replicas of each comparison (default: 4 8 16)")
    parser.add_argument("--trl", action="store_true", help="TRL's GRPO trainer beside it, in an environment of its own")
    parser.add_argument("--trl-environment", type=Path, help="a virtual environment that has TRL already")
    options = parser.parse_args()
    if options.trl and options.device != "cpu":
        parser.error("--trl compares on the CPU")
    torch.set_num_threads(options.threads)
    folder: Path = resolve_model(options.model or ("tiny" if options.quick else "smollm2-135m"))
    policy = load_policy_model(folder).to(options.device)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(options.device).train()
    results: dict[str, dict[str, float]] = {}
    for replicas in options.replicas or ((8,) if options.quick else (4, 8, 16)):
        groups = make_groups(options.groups, replicas, policy.head.shape[0])
        compare(policy, plain, [group[:2] for group in groups[:1]], 1, options.max_tokens)
        with contextlib.ExitStack() as stack:
            peer = None
            if options.trl:
                peer = stack.enter_context(open_peer(folder, groups, options.threads, options.trl_environment))
            results[f"replicas_{replicas}"] = compare(policy, plain, groups, 2, options.max_tokens, peer)
    rows = pack([sequence for group in make_groups(2, 4, policy.head.shape[0]) for sequence in group], 4096)
    del plain
    results["surroundings"] = surroundings(policy, rows)
    if options.json:
        print(json.dumps(results))
        return
    for name, figures in results.items():
        table = Table("figure", "value", title=name)
        for key, value in figures.items():
            table.add_row(key, f"{value:.4g}")
        Console().print(table)


if __name__ == "__main__":
    main()
