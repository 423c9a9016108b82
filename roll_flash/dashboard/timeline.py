"""Where the time of a run went: episodes, their turns on servers, the learner's work, publications, stages.

A part of the time is answered with as much detail as fits a screen: numbers of running episodes per slice of time, or
each episode, or each turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from roll_flash.checked_files import CONTENT_ERRORS, decode, read_checked
from roll_flash.dashboard.episode_index import EpisodeIndex
from roll_flash.dashboard.episode_search import finite
from roll_flash.run.run_dir import TIMELINE

SLICES = 600
MAX_EPISODES = 1500
"""Maximum episodes that are shown one by one."""
MAX_WITH_TURNS = 120
"""Maximum episodes whose turns are shown: their whole lines are read."""
MAX_WORK = 3000
"""Maximum pieces of the learner's and the stages' work that are shown one by one."""


def timeline(index: EpisodeIndex, folder: Path, begin_s: float | None, end_s: float | None) -> dict[str, Any]:
    """Return what happened between two Unix times; None: from the beginning, to the end. Raises OSError."""
    columns = index.columns()
    steps = list(_steps(folder / "logs" / TIMELINE))
    starts, ends = columns["started_s"], columns["finished_s"]
    known = np.isfinite(starts) & np.isfinite(ends)
    times = [*starts[known][:1], *ends[known][-1:], *(step[key] for step in steps for key in ("started_s", "ended_s"))]
    if known.any():
        times += [starts[known].min(), ends[known].max()]
    if not times:
        return {"whole": None}
    whole = float(min(times)), float(max(times))
    begin, end = whole[0] if begin_s is None else begin_s, whole[1] if end_s is None else end_s
    rows = np.flatnonzero(known & (ends >= begin) & (starts <= end))
    shown = [step for step in steps if step["ended_s"] >= begin and step["started_s"] <= end]
    later = [step for step in steps if step["started_s"] > end][:1]  # has the stages' work since the last one shown
    work = [
        span for step in (*shown, *later) for span in _work(step) if span["end_s"] >= begin and span["begin_s"] <= end
    ]
    return {
        "whole": whole,
        "begin_s": begin,
        "end_s": end,
        "steps": [[step["step"], step["started_s"], step["ended_s"]] for step in shown[:MAX_WORK]],
        "work": work if len(work) <= MAX_WORK else None,
        "busy": _busy(work, begin, end),
        "running": _running(starts[rows], ends[rows], begin, end),
        "episodes": [_episode(index, row, len(rows)) for row in rows.tolist()] if len(rows) <= MAX_EPISODES else None,
        "count": len(rows),
    }


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in read_checked(path).splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                step = decode(line)
                yield {key: step[key] for key in ("step", "started_s", "ended_s", "learner")} | {
                    "publication": step.get("publication"),
                    "stages": step.get("stages") or [],
                }
            except CONTENT_ERRORS:
                continue


def _work(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind, begin_s, end_s, tokens in step["learner"]:
        yield {"kind": kind, "begin_s": begin_s, "end_s": end_s, "tokens": tokens, "step": step["step"]}
    if publication := step["publication"]:
        yield {"kind": "publication", "step": step["step"], **publication}
    for stage, begin_s, end_s, rows in step["stages"]:
        yield {"kind": f"stage {stage}", "begin_s": begin_s, "end_s": end_s, "rows": rows, "step": step["step"]}


def _busy(work: list[dict[str, Any]], begin: float, end: float) -> dict[str, list[float]]:
    """Return, per kind of work, the fraction of each slice of time that it took."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for span in work:
        spans.setdefault(span["kind"], []).append((span["begin_s"], span["end_s"]))
    times = {kind: np.array(those) for kind, those in spans.items()}
    return {kind: _running(those[:, 0], those[:, 1], begin, end) for kind, those in times.items()}


def _running(starts: NDArray[np.float64], ends: NDArray[np.float64], begin: float, end: float) -> list[float]:
    """Return how many spans go on in each slice of time, on average over it."""
    edges = np.linspace(begin, max(end, begin + 1e-6), SLICES + 1)

    def before(times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Integral over time of the number of `times` that have passed, at each edge."""
        ordered = np.sort(times)
        sums = np.append(0.0, np.cumsum(ordered))
        places = np.searchsorted(ordered, edges)
        integral: NDArray[np.float64] = places * edges - sums[places]
        return integral

    offset = begin  # smaller numbers lose fewer digits in sums
    starts, ends, edges = starts - offset, ends - offset, edges - offset
    means = np.diff(before(starts) - before(ends)) / np.diff(edges)
    return np.round(means, 3).tolist()  # type: ignore[no-any-return]


def _episode(index: EpisodeIndex, row: int, count: int) -> dict[str, Any]:
    columns = index.columns()
    found = {
        "id": index.ids[row],
        "begin_s": columns["started_s"][row].item(),
        "end_s": columns["finished_s"][row].item(),
        "worker": index.names["worker"].texts[columns["worker"][row]],
        "env": index.names["env"].texts[columns["env"][row]],
        "outcome": index.names["outcome"].texts[columns["outcome"][row]],
        "failed": bool(columns["failed"][row]),
        "reward": finite(columns["reward"][row].item()),
    }
    return found | ({"turns": list(_turns(index, row))} if count <= MAX_WITH_TURNS else {})


class _Turn(msgspec.Struct):
    generate_s: float
    step_s: float
    started_s: float | None = None
    server: str = ""


class _Turns(msgspec.Struct):
    turns: list[_Turn] = []


_decoder = msgspec.json.Decoder(_Turns)


def _turns(index: EpisodeIndex, row: int) -> Iterator[list[Any]]:
    """Yield [begin, end of the model's answer, end of the environment's step, server] where the begin is known."""
    for turn in _decoder.decode(index.line(row) or b"{}").turns:
        if turn.started_s is not None:
            answered_s = turn.started_s + turn.generate_s
            yield [turn.started_s, answered_s, answered_s + turn.step_s, turn.server]
