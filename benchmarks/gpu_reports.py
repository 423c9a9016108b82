"""Write results/gpu.md from the reports of `roll-flash gpu-check` on real GPUs, `results/gpu-*.json`.

python benchmarks/gpu_reports.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
HEAD = """# GPUs

Made by `python benchmarks/gpu_reports.py` from the reports of `roll-flash gpu-check` on real GPUs, `gpu-*.json` in this
folder. [docs/gpu.md](../../docs/gpu.md) says what each check proves, and which have not run on a GPU yet. The model has
random weights in the shape that is named.
"""
NOTES = """
## What the first contact found

- The key and value gradients of FlexAttention were wrong by a factor of 460 to 3,900 where a row has more than one
  block of 128 tokens; outputs and query gradients were right. Its kernels step through lists of blocks without asking
  for their strides, and two of four lists were transposed in memory. The learner's own trial at the start noticed it
  and took a dense mask, so that no run would have learned from wrong gradients; a pass took 2.7 s, of which 1.2 s was
  the dense attention (Qwen3-0.6B, 25,600 tokens in rows of up to 16,384, gradient checkpointing). The report `first` is
  of the lists as they were (its machine had no vLLM yet), `kernels` of the mended ones.
- What a rank warns of, such as that dense mask, stayed in the log of its actor. The run says it now.
- The reports were made in few minutes. Other processes ran beside the checks of `kernels`, and servers started from
  packages that Python compiled for the first time: their times of start say nothing.
- A pause of 0.084 s for 1.11 GiB by `shm` is 0.7 copies from pageable and 3.9 from page-locked memory (9.4 and 55 GB/s,
  measured on the same machine).
"""
LEFT_OUT = ("plan", "memory", "python", "packages", "disk", "/dev/shm", "compiler", "cuda", "ray gpus", "gpu memory")


def page() -> str:
    reports = [(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("gpu-*.json"))]
    return HEAD + "".join(_section(name, report) for name, report in reports) + NOTES


def _section(name: str, report: dict[str, Any]) -> str:
    rows = [
        f"| {each['name']} | {each['status']} | {_figures(each['figures'])} |"
        for each in report["results"]
        if each["group"] != "machine" and each["status"] != "not run"
    ]
    table = "\n".join(["| check | result | figures |", "|---|---|---|", *rows])
    return f"\n## {name}\n\n{report['created'][:10]}: `{report['line']}`\n\n{table}\n"


def _figures(figures: dict[str, Any]) -> str:
    shown = {name: value for name, value in figures.items() if name not in LEFT_OUT}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )


if __name__ == "__main__":
    (RESULTS / "gpu.md").write_text(page())
