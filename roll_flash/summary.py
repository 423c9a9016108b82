"""Summary of a run: a dict for scripts, and a text for users made only from that dict."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_flash.config.tree import load_config
from roll_flash.diagnosis import diagnose
from roll_flash.evaluation.result import EvalResult
from roll_flash.monitor.metrics import NOT_FINITE, STEP_S, TOKENS_PER_S, read_metrics
from roll_flash.monitor.plot import plot_run
from roll_flash.monitor.status_view import duration
from roll_flash.run.run_dir import SUMMARY


def summarize(
    run_folder: Path,
    *,
    before: EvalResult | None,
    after: EvalResult | None,
    books: Mapping[str, int],
) -> dict[str, Any]:
    """Summarize a finished run from its folder; draw its plot, and write `summary.json`.

    `books` counts trajectories (`produced`, `trained`, `dropped_REASON`, `waiting`) and episodes without a trajectory
    (`failed_CAUSE`).
    """
    config = load_config(run_folder / "config.yaml")
    rows = read_metrics(run_folder)
    steps = [row for row in rows if row.get(STEP_S) is not None]
    seconds = sum(row[STEP_S] for row in steps)
    tokens = sum((row.get(TOKENS_PER_S) or 0.0) * row[STEP_S] for row in steps)
    model = run_folder / "model"
    summary = {
        "name": config.name,
        "env_id": config.envs[0].id,
        "steps": max((row["step"] for row in rows), default=0),
        "total_steps": config.steps,
        "seconds": seconds,
        "before": before.to_dict() if before else None,
        "after": after.to_dict() if after else None,
        "books": check_counts(books),
        "tokens": round(tokens),
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "run_folder": str(run_folder),
        "disk": disk_use(run_folder),
        "plot": str(plot_run(run_folder)) if rows else None,
        "model_folder": str(model) if (model / "config.json").is_file() else None,
        "notes": [*_of_evaluations(after), *_not_finite(rows)],
        "findings": [finding.as_dict() for finding in diagnose(run_folder)],
    }
    (run_folder / SUMMARY).write_text(json.dumps(summary, indent=2, default=str))
    return summary


def disk_use(run_folder: Path) -> dict[str, int]:
    """Bytes of each part of the run folder, largest first. A file shared by two parts (hard link) counts in the
    first."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for path in sorted(run_folder.rglob("*")):
        try:
            found = path.lstat()
        except FileNotFoundError:  # the status was being replaced
            continue
        if stat.S_ISREG(found.st_mode) and found.st_ino not in seen:
            seen.add(found.st_ino)
            part = path.relative_to(run_folder).parts[0]
            sizes[part] = sizes.get(part, 0) + found.st_size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _disk(sizes: Mapping[str, int]) -> str:
    largest = ", ".join(f"{part} {_megabytes(size)}" for part, size in list(sizes.items())[:3])
    return f"{_megabytes(sum(sizes.values()))} ({largest}; the model shares its files with the last checkpoint)"


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def check_counts(books: Mapping[str, int]) -> dict[str, Any]:
    """Group the counts by reason and cause, and check that produced = trained + dropped + waiting."""
    dropped, failed = _prefixed(books, "dropped_"), _prefixed(books, "failed_")
    produced, trained, waiting = (books.get(name, 0) for name in ("produced", "trained", "waiting"))
    return {
        "produced": produced,
        "trained": trained,
        "waiting": waiting,
        "dropped": dropped,
        "failed": failed,
        "balance": produced == trained + waiting + sum(dropped.values()),
    }


def closing_text(summary: Mapping[str, Any]) -> str:
    """Text printed at the end of a run. Its commands work when pasted into the same shell."""
    rows = [
        (f"{'held-out ' if is_held_out(summary) else ''}{_score(summary)}", _scores(summary)),
        ("steps", f"{summary['steps']} of {summary['total_steps']} in {duration(summary['seconds'])} of training"),
        ("tokens", f"{summary['tokens']:,} trained, {summary['tokens_per_s']:,.0f} per second"),
        ("trajectories", _trajectories(summary["books"])),
        ("failed episodes", _named(summary["books"]["failed"])),
        ("run folder", summary["run_folder"]),
        ("on disk", _disk(summary["disk"])),
        ("plot", summary["plot"] or "none"),
        ("model", summary["model_folder"] or "none exported"),
        *(("note", note) for note in summary["notes"]),
        *((each["severity"], f"{each['name']}: {each['summary']}") for each in summary.get("findings", ())),
    ]
    width = max(len(name) for name, _ in rows)
    body = "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
    commands = "\n".join(f"  {command}" for command in next_commands(summary))
    return f"\nRun {summary['name']} is done\n{body}\n\nTry next:\n{commands}"


def is_held_out(summary: Mapping[str, Any]) -> bool:
    """True if no evaluated task was trained on. The tasks evaluated after the run decide also for `before`: they are
    the same tasks."""
    return not (summary["after"] or {}).get("trained_on")


def next_commands(summary: Mapping[str, Any]) -> list[str]:
    """Three useful commands after this run."""
    command, run = command_name(), shlex.quote(summary["run_folder"])
    model = shlex.quote(_unused(f"{summary['name']}-model"))
    other = shlex.quote(f"{summary['name']}-seed1")
    return [
        f"{command} eval --model {run} -n 20 -k 4 --temperature 1",
        f"{command} export {run} {model}",
        f"{command} train {run}/config.yaml name={other} seed=1",
    ]


def command_name() -> str:
    """Command that starts `roll-flash` in this shell: its name if that is on the path, else its file."""
    beside = Path(sys.prefix) / "bin" / "roll-flash"
    found = shutil.which("roll-flash")
    if found and (not beside.exists() or Path(found).samefile(beside)):
        return "roll-flash"
    if beside.exists():
        return shlex.quote(_short(beside))
    return f"{shlex.quote(_short(Path(sys.executable)))} -m roll_flash"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _unused(name: str) -> str:
    number, candidate = 1, name
    while Path(candidate).exists():
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def _of_evaluations(after: EvalResult | None) -> list[str]:
    """Notes of all evaluations: identical tasks, and tasks that were trained on."""
    results = {"": after, **(after.others if after else {})}
    named = [(name, result) for name, result in results.items() if result is not None]
    return [f"{name}: {note}" if name else note for name, result in named for note in result.notes]


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    count = sum(int(row.get(NOT_FINITE) or 0) for row in rows)
    return [f"{count} metrics were NaN or infinite and are null in metrics.jsonl"] if count else []


def _score(summary: Mapping[str, Any]) -> str:
    """Return what the evaluations scored: success, or the reward alone."""
    found = [result for result in (summary["before"], summary["after"]) if result is not None]
    only_reward = any(result["reward"] for result in found) and not any(result["success"] for result in found)
    return "reward" if only_reward else "success"


def _scores(summary: Mapping[str, Any]) -> str:
    before, after, score = summary["before"], summary["after"], _score(summary)
    if before is None and after is None:
        return "not measured (eval.before_and_after is off)"
    return f"{_one(before, score)} -> {_one(after, score)}  (95 % intervals)"


def _one(result: Mapping[str, Any] | None, score: str) -> str:
    if result is None:
        return "not measured"
    found = result[score]
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" if found else "not scored"


def _trajectories(books: Mapping[str, Any]) -> str:
    verdict = "the books balance" if books["balance"] else "THE BOOKS DO NOT BALANCE, please report this"
    return (
        f"{books['produced']} = {books['trained']} trained + {_named(books['dropped'])} dropped "
        f"+ {books['waiting']} left over; {verdict}"
    )


def _prefixed(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}


def _named(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    inside = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
    return f"{total} ({inside})" if inside else "0"
