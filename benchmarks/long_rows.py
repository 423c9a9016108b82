"""Masks of long rows for FlexAttention: lists of blocks made from the tree, against all pairs of tokens evaluated.

    python benchmarks/long_rows.py [--quick] [--output FOLDER]

`pairs` is torch's `create_block_mask` on rows padded to powers of two, as the learner made masks before; `tree` is
`tree_mask`. A row is a prompt of a quarter of the tokens with eight answers. Each mask is made in a process of its own,
with one thread: memory is what its peak adds to the process, time the median of three masks after a small one. `pairs`
is left out where it does not fit into the free memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from machine import machine
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from roll_flash.learner.packing.flex_tree import tree_mask

RESULTS = Path(__file__).parent / "results"
ANSWERS = 8
TOKENS = (4096, 16384, 32768, 33000, 65536, 131072)
BYTES_PER_PAIR = 10.4
REPEATS = 3
LISTS = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")


def row(tokens: int) -> np.ndarray:
    """subtree_end of a prompt with ANSWERS answers."""
    ends = np.full(tokens, tokens)
    bounds = np.linspace(tokens // 4, tokens, ANSWERS + 1).astype(int)
    for start, end in itertools.pairwise(bounds.tolist()):
        ends[start:end] = end
    return ends


def pairs_mask(subtree_end: torch.Tensor) -> BlockMask:
    length = padded(len(subtree_end))
    ends = torch.arange(1, length + 1)
    ends[: len(subtree_end)] = subtree_end
    return create_block_mask(lambda b, h, q, k: (k <= q) & (q < ends[k]), None, None, length, length, device="cpu")


def padded(tokens: int) -> int:
    """The next power of two."""
    return max(128, 1 << (tokens - 1).bit_length())


def measure(side: str, tokens: int, repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    make = tree_mask if side == "tree" else pairs_mask
    make(torch.tensor(row(500)))
    ends = torch.tensor(row(tokens))
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is used now
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        mask = make(ends)
        times.append(time.perf_counter() - began_s)
        if len(times) == 1:
            peak = _memory("VmHWM")
            kept = sum(getattr(mask, full + name).nbytes for full in ("", "full_") for name in LISTS)
        del mask
    return {"seconds": statistics.median(times), "peak_mib": (peak - before) / 2**20, "kept_mib": kept / 2**20}


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def fits(side: str, tokens: int) -> bool:
    return side == "tree" or 1.2 * BYTES_PER_PAIR * padded(tokens) ** 2 < _free_bytes()


def compare(lengths: tuple[int, ...], repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for tokens in lengths:
        found[str(tokens)] = {}
        for side in ("pairs", "tree"):
            if not fits(side, tokens):
                continue
            command = [sys.executable, __file__, "--side", side, "--tokens", str(tokens), "--repeats", str(repeats)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
            found[str(tokens)][side] = json.loads(done.stdout)
            print(f"{tokens} tokens, {side}: {found[str(tokens)][side]}", file=sys.stderr, flush=True)
    return found


def page(measured: dict[str, dict[str, dict[str, float]]], where: str) -> str:
    lines = [
        "# Masks of long rows",
        "",
        f"{where}. `python benchmarks/long_rows.py` makes this page.",
        "",
        "A row is a prompt of a quarter of the tokens with eight answers. `pairs` evaluates all pairs of tokens (with",
        "`create_block_mask` of torch, on rows padded to powers of two), `tree` makes the lists of blocks from the",
        "tree; each with one thread of a CPU.",
        "",
        "| tokens | pairs: memory | time | tree: memory while it is made | kept | time | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for tokens, sides in measured.items():
        pairs, tree = sides.get("pairs"), sides["tree"]
        estimate = BYTES_PER_PAIR * padded(int(tokens)) ** 2 / 2**30
        before = (
            f"{pairs['peak_mib'] / 1024:.2f} GiB | {pairs['seconds']:.2f} s" if pairs else f"({estimate:.0f} GiB) |"
        )
        target = "<= 100 MB, <= 0.5 s" if int(tokens) == max(TOKENS) else ""
        lines.append(
            f"| {int(tokens):,} | {before} | {tree['peak_mib']:.1f} MiB | {tree['kept_mib']:.2f} MiB "
            f"| {tree['seconds'] * 1e3:.1f} ms | {target} |"
        )
    note = f"In brackets: {BYTES_PER_PAIR} bytes for each pair of tokens, where it does not fit into the free memory."
    return "\n".join([*lines, "", note, "Masks of both sides have the same lists of blocks (`tests/learner`).", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4,096 tokens once; writes nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--side", choices=["pairs", "tree"], help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.side:
        print(json.dumps(measure(options.side, options.tokens, options.repeats)))
        return
    where = f"{machine()}, load {os.getloadavg()[0]:.1f} at the start"
    measured = compare(TOKENS[:1] if options.quick else TOKENS, 1 if options.quick else REPEATS)
    text = page(measured, where)
    print(text)
    if not options.quick:
        result = {"machine": where, "tokens": measured}
        (options.output / "long_rows.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "long_rows.md").write_text(text)


if __name__ == "__main__":
    main()
