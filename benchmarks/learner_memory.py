"""Peak memory of one long sequence, forward and backward: log-probabilities in chunks against full logits.

    python benchmarks/learner_memory.py [--tokens N] [--vocabulary N] [--json]

The tiny model's layers with the vocabulary of a real model (49,152 by default), because it is the logits [tokens,
vocabulary] that a learner must not hold. Each side runs in a process of its own; the peak is its largest resident
memory less that before the pass. Both sides use the learner's attention, so that only the head differs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll_flash.learner.model.policy_model import load_policy_model
from roll_flash.learner.packing import tree_attention
from roll_flash.learner.packing.rows import PackedRow, TrainSequence, pack
from roll_flash.models.prepare import resolve_model


def peak_mib(side: str, folder: Path, tokens: int) -> float:
    """Run one side here; MiB of resident memory that its pass added at most."""
    torch.set_num_threads(1)
    policy = load_policy_model(folder)
    row = _row(tokens, policy.head.shape[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "chunked":
        logprobs, _ = policy(row)
    else:
        tree = tree_attention.tree_layout(row.position_ids, row.subtree_end, policy.head.device)
        ids = torch.tensor(row.token_ids)[None]
        logits = policy.model(ids, position_ids=torch.tensor(row.position_ids)[None], tree=tree, use_cache=False).logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    logprobs.mean().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _row(tokens: int, vocabulary: int) -> PackedRow:
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens).astype(np.int32)
    floats = np.zeros(tokens, np.float32)
    sequence = TrainSequence(ids, np.arange(tokens) > 0, floats, np.zeros(tokens, np.int32), floats)
    return pack([sequence], tokens)[0]


def with_vocabulary(vocabulary: int, folder: Path) -> Path:
    """The tiny model, random weights, with another vocabulary."""
    config = AutoConfig.from_pretrained(resolve_model("tiny"))
    config.vocab_size = vocabulary
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def compare(tokens: int, vocabulary: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = with_vocabulary(vocabulary, Path(name) / "model")
        found = {}
        for side in ("chunked", "full"):
            command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--tokens", str(tokens)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
            found[side] = float(done.stdout)
    return {
        "tokens": float(tokens),
        "vocabulary": float(vocabulary),
        "chunked_peak_mib": found["chunked"],
        "full_logits_peak_mib": found["full"],
        "share": found["chunked"] / found["full"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--json", action="store_true", help="one object of named figures on standard output")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens: within a minute")
    parser.add_argument("--side", choices=["chunked", "full"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(peak_mib(options.side, options.folder, options.tokens))
        return
    figures = compare(2048 if options.quick else options.tokens, options.vocabulary)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:22} {value:,.2f}")


if __name__ == "__main__":
    main()
