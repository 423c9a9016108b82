"""Select and sort episodes: by columns at once, by text in slices of time, so that no request takes long."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from roll_flash.dashboard.episode_index import EpisodeIndex
from roll_flash.monitor.episode_files.steps import open_step

SLICE_S = 0.05
"""Seconds of searching in texts per request."""
MAX_ROWS = 500
"""Maximum rows in an answer."""
MAX_MESSAGES, MAX_FAILURES = 50, 20_000
"""Messages that are told, and newest failures that are looked at for them."""
_NUMBERS = re.compile(r"\d+")
Sort = Literal["order", "step", "reward", "tokens", "seconds", "task", "env", "outcome"]


class Selection(BaseModel):
    """Filters of a table of episodes, as they are in its address; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    env: str = ""
    outcome: str = ""
    """End of a trajectory or cause of a failure; `failed` is any cause."""
    success: Literal["", "yes", "no", "unknown"] = ""
    worker: str = ""
    group: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_step: int | None = None
    max_step: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    text: str = Field(default="", max_length=1000)
    """Occurs somewhere in the record: a conversation, an id, an error. Upper and lower case differ."""
    sort: Sort = "order"
    descending: bool = True

    def mask(self, index: EpisodeIndex) -> NDArray[np.bool_]:
        """Return which episodes the filters select, apart from `text`."""
        columns = index.columns()
        mask = np.ones(len(columns["step"]), np.bool_)
        for name in ("env", "worker", "group"):
            if wanted := getattr(self, name):
                mask &= columns[name] == index.names[name].find(wanted)
        if self.outcome == "failed":
            mask &= columns["failed"] == 1
        elif self.outcome:
            mask &= columns["outcome"] == index.names["outcome"].find(self.outcome)
        if self.success:
            mask &= (columns["success"] == {"yes": 1, "no": 0, "unknown": -1}[self.success]) & (columns["failed"] == 0)
        for name in ("reward", "step", "tokens"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None:
                mask &= columns[name] >= low
            if high is not None:
                mask &= columns[name] <= high
        return mask

    def in_order(self, index: EpisodeIndex, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort rows; unknown numbers come last."""
        if self.sort == "order":
            return rows[::-1] if self.descending else rows
        columns = index.columns()
        if self.sort == "seconds":
            keys = (columns["finished_s"] - columns["started_s"])[rows]
        elif self.sort in index.names:
            texts = index.names[self.sort].texts
            rank = np.empty(len(texts), np.int64)
            rank[np.argsort(np.array(texts, dtype=object))] = np.arange(len(texts))
            keys = rank[columns[self.sort][rows]]
        else:
            keys = columns[self.sort][rows]
        return rows[np.argsort(-keys if self.descending else keys, kind="stable")]


class Search:
    """One selection, searched as far as requests have asked so far."""

    def __init__(self, index: EpisodeIndex, selection: Selection) -> None:
        self._index = index
        self._selection = selection
        self.generation = index.generation
        self._needle = msgspec.json.encode(selection.text)[1:-1] if selection.text else b""
        self.searched = 0
        """Number of episodes of the index that were compared with the selection."""
        self._found = np.empty(0, np.int64)
        self._ordered: NDArray[np.int64] | None = None

    def go_on(self) -> None:
        """Compare further episodes, those that came since too."""
        total = len(self._index.columns()["step"])
        if self.searched == total:
            return
        mask = self._selection.mask(self._index)
        if not self._needle:
            self._found, self.searched, self._ordered = np.flatnonzero(mask), total, None
            return
        until = time.monotonic() + SLICE_S
        while self.searched < total and time.monotonic() < until:
            self._search_file(mask)

    def _search_file(self, mask: NDArray[np.bool_]) -> None:
        """Search the next rows that lie in one file."""
        columns = self._index.columns()
        first = self.searched
        files = columns["file"][first : min(first + MAX_ROWS, len(mask))]
        file, end = files[0], first + int(np.argmax(np.append(files != files[0], True)))
        wanted = first + np.flatnonzero(mask[first:end])
        self.searched = end
        if not len(wanted):
            return
        begin, length = columns["offset"][wanted], columns["length"][wanted]
        with open_step(self._index.file(int(file))) as lines:
            lines.seek(int(begin[0]))
            data = lines.read(int(begin[-1] + length[-1] - begin[0]))
        starts = begin - begin[0]
        hits = [
            row
            for row, start, size in zip(wanted.tolist(), starts.tolist(), length.tolist(), strict=True)
            if data.find(self._needle, start, start + size) >= 0
        ]
        self._found = np.append(self._found, np.array(hits, np.int64))
        self._ordered = None

    @property
    def total(self) -> int:
        """Number of selected episodes found so far."""
        return len(self._found)

    def rows(self, offset: int, limit: int) -> list[int]:
        """Return a part of the selected rows, in the order that was asked for."""
        if self._ordered is None:
            self._ordered = self._selection.in_order(self._index, self._found)
        found: list[int] = self._ordered[offset : offset + min(limit, MAX_ROWS)].tolist()
        return found


def row_for_table(index: EpisodeIndex, row: int) -> dict[str, Any]:
    """Return the columns of one episode for a table."""
    columns = {name: column[row].item() for name, column in index.columns().items()}
    named = {name: index.names[name].texts[columns[name]] for name in ("task", "env", "group", "outcome", "worker")}
    started, finished, reward = (finite(columns[name]) for name in ("started_s", "finished_s", "reward"))
    return {
        "id": index.ids[row],
        **named,
        "step": columns["step"],
        "failed": bool(columns["failed"]),
        "reward": reward,
        "success": None if columns["success"] < 0 else bool(columns["success"]),
        "tokens": columns["tokens"],
        "started_s": started,
        "finished_s": finished,
    }


def finite(number: float) -> float | None:
    return number if np.isfinite(number) else None


def counts(index: EpisodeIndex) -> dict[str, Any]:
    """Return the values to filter by, with their numbers of episodes, and failures by cause and environment."""
    is_complete = index.is_complete  # before the columns: what is indexed after them is not in the numbers
    columns = index.columns()
    failed = columns["failed"] == 1

    def of(name: str, mask: NDArray[np.bool_]) -> dict[str, int]:
        numbers = np.bincount(columns[name][mask], minlength=len(index.names[name].texts))
        found = {text: int(count) for text, count in zip(index.names[name].texts, numbers, strict=False) if count}
        return dict(sorted(found.items(), key=lambda item: -item[1])[:200])

    steps = columns["step"]
    return {
        "episodes": len(steps),
        "failed": int(failed.sum()),
        "envs": of("env", np.ones(len(steps), np.bool_)),
        "ends": of("outcome", ~failed),
        "causes": of("outcome", failed),
        "workers": of("worker", np.ones(len(steps), np.bool_)),
        "failures_by_env": of("env", failed),
        "messages": _messages(index),
        "steps": [int(steps.min()), int(steps.max())] if len(steps) else None,
        "damaged": index.damaged,
        "is_complete": is_complete,
        "read": index.read_bytes / index.total_bytes if index.total_bytes else 1.0,
        "error": index.error,
    }


def _messages(index: EpisodeIndex) -> list[tuple[str, str, int, str]]:
    """Return the most frequent failures: cause, message, count, newest id. Numbers in messages make no difference."""
    texts, outcomes = index.names["outcome"].texts, index.columns()["outcome"]
    found: dict[tuple[str, str], list[int]] = {}
    for row, message in list(index.messages.items())[-MAX_FAILURES:]:
        if row < len(outcomes):
            found.setdefault((texts[outcomes[row]], _NUMBERS.sub("0", message)), []).append(row)
    frequent = sorted(found.items(), key=lambda item: -len(item[1]))[:MAX_MESSAGES]
    return [(cause, index.messages[rows[-1]], len(rows), index.ids[rows[-1]]) for (cause, _), rows in frequent]
