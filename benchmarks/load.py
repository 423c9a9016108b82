"""Peak memory of a rank while it loads a model: only its shards, against the whole model first.

    python benchmarks/load.py [--model NAME_OR_FOLDER] [--ranks N] [--json]

All ranks load together with gloo on the CPU, from a copy of the model in bfloat16 to float32, each in a process of its
own. The peak is that of the memory which the process itself allocates (RssAnon, read every 2 ms), less that before the
load; pages of the mapped files are shared by all processes and can be dropped at any time. `peak_per_shard` is the peak
over the bytes of the rank's shard. The last figures are arithmetic: what a rank needs for Qwen3-8B on 8 GPUs with the
measured `shards_peak_per_shard`, and with the whole model in float32 on each GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from roll_flash.learner.model.exact_settings import ExactSettings
from roll_flash.learner.model.policy_model import load_policy_model, open_policy_model
from roll_flash.models.prepare import resolve_model
from roll_flash.models.shape import read_shape

MIB = 1 << 20
_FORM = ExactSettings(shares_prefixes=False, logit_transform=None, vocabulary=0)


class PeakMemory:
    """The largest anonymous memory of this process since the object was made, less that at its start, in bytes."""

    def __init__(self) -> None:
        self._before = self._largest = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self._largest, _anonymous_bytes()) - self._before

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._largest = max(self._largest, _anonymous_bytes())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def load(rank: int, ranks: int, side: str, folder: Path, store: str, results: Any) -> None:
    """Put what `load_as_rank` measures in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    dist.barrier()
    results.put(load_as_rank(side, folder, mesh))
    dist.destroy_process_group()


def load_as_rank(side: str, folder: Path, mesh: Any) -> tuple[int, int, float]:
    """Load as a rank of the learner does; return (peak bytes, bytes of the shard, seconds)."""
    peak, began_s = PeakMemory(), time.perf_counter()
    if side == "shards":
        with open_policy_model(folder, _FORM) as (policy, files):
            assert files is not None, "this model cannot be read by shards"
            _shard(policy, mesh)
            files.fill(policy, "model.", torch.device("cpu"))
    else:
        policy = load_policy_model(folder, form=_FORM)
        _shard(policy, mesh)
    seconds, used = time.perf_counter() - began_s, peak.end()
    shard = sum(parameter.to_local().nbytes for parameter in policy.parameters())  # type: ignore[attr-defined]
    return used, shard, seconds


def _shard(policy: Any, mesh: Any) -> None:
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def compare(folder: Path, ranks: int) -> dict[str, float]:
    """Load from a copy in bfloat16, as models are usually stored."""
    with tempfile.TemporaryDirectory() as name:
        stored = Path(name) / "model"
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(stored)
        return _compare(stored, ranks)


def _compare(folder: Path, ranks: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    figures: dict[str, float] = {"ranks": float(ranks)}
    for side in ("shards", "whole"):
        results = context.Queue()
        with tempfile.TemporaryDirectory() as name:
            common = (ranks, side, folder, f"{name}/store", results)
            processes = [context.Process(target=load, args=(rank, *common)) for rank in range(ranks)]
            for process in processes:
                process.start()
            found = [results.get(timeout=600) for _ in processes]
            for process in processes:
                process.join(60)
        used, shard, seconds = (max(each) for each in zip(*found, strict=True))
        figures |= {
            f"{side}_peak_mib": used / MIB,
            f"{side}_peak_per_shard": used / shard,
            f"{side}_s": seconds,
            "shard_mib": shard / MIB,
        }
    return figures | arithmetic(figures["shards_peak_per_shard"])


def arithmetic(peak_per_shard: float, model: str = "Qwen3-8B", ranks: int = 8) -> dict[str, float]:
    """Return GiB in float32, not measured."""
    whole = read_shape(model).parameters * 4 / (1 << 30)
    return {
        "8b_whole_gib": whole,
        "8b_on_8_shard_gib": whole / ranks,
        "8b_on_8_peak_gib": whole / ranks * peak_per_shard,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one object of named figures on standard output")
    parser.add_argument("--quick", action="store_true", help="the same: it takes half a minute")
    options = parser.parse_args()
    figures = compare(resolve_model(options.model), options.ranks)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:22} {value:,.2f}")


if __name__ == "__main__":
    main()
