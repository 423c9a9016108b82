"""The status of a run for people: a block of a few rows, for terminals of any width and for pipes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from roll_flash.monitor.metrics import REWARD, STEP_S, SUCCESS, TOKENS_PER_S, WEIGHTS_S
from roll_flash.monitor.status import RunStatus
from roll_flash.terminal import one_line

HEIGHTS, ASCII_HEIGHTS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
SHOWN_SERVERS, SHOWN_AGES, SHOWN_NEWS = 8, 6, 5
BAR, SPARK, WIDEST_BAR = 10, 40, 80
"""Characters of a bar, most characters of a line of past values, and of the bar of the whole run."""
EPISODES = {
    "queued": "queued",
    "model": "waiting for the model",
    "agent": "in an agent",
    "environment": "in the environment",
    "sandbox": "in a sandbox",
    "scoring": "being scored",
    "ended": "waiting to be trained",
}
STATES = {"running": "green", "done": "green", "failed": "red", "died": "red", "silent": "yellow", "stopped": "yellow"}


class StatusView:
    """Draws a status, with `news` also its newest lines for the user."""

    def __init__(self, status: RunStatus, *, news: bool = False, now_s: float | None = None) -> None:
        self._status = status
        self._news = news
        self._now_s = time.time() if now_s is None else now_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(overflow="fold")
        for name, value in _rows(self._status, *_blocks(options)):
            rows.add_row(name, value)
        if self._news:
            for each in reversed(self._status.news[-SHOWN_NEWS:]):  # the oldest are cut on a small terminal
                rows.add_row(time.strftime("%H:%M:%S", time.localtime(each.time_s)), Text(one_line(each.text)))
        done = self._status.step / max(1, self._status.total_steps)
        width = min(options.max_width, WIDEST_BAR)
        yield Group(_headline(self._status, self._now_s), Text(bar(done, *_blocks(options), width), "cyan"), rows)


def _headline(status: RunStatus, now_s: float) -> Text:
    line = Text(one_line(status.name), style="bold")
    state = status.state
    if state in ("died", "silent"):
        state_text = f"{state}, last sign of life {duration(max(0.0, now_s - status.written_s))} ago"
    else:
        state_text = state
    line.append(f"  {state_text}", style=f"not bold {STATES.get(state, 'cyan')}")
    line.append(f"  step {status.step}/{status.total_steps}", style="not bold")
    end_s = status.written_s if status.is_over else now_s
    line.append(f"  {duration(max(0.0, end_s - status.started_s))}", style="not bold")
    if status.left_s is not None and not status.is_over:
        line.append(f"  {duration(status.left_s)} left", style="not bold cyan")
    return line


def _blocks(options: ConsoleOptions) -> tuple[str, str]:
    return ("#", ".") if options.ascii_only else ("█", "░")


def _rows(status: RunStatus, full: str, empty: str) -> Iterator[tuple[str, RenderableType]]:
    """Yield a name and its value for each thing that is known."""
    for name in (REWARD, SUCCESS):
        if values := status.recent.get(name):
            yield name, Text(f"{_number(values[-1], '.3f')}  {sparkline(values, ascii_only=full.isascii())}", "green")
    is_done = status.state == "done"  # nothing plays, works or serves any more
    if status.episodes and not is_done:
        counts = {text: status.episodes.get(name, 0) for name, text in EPISODES.items()}
        yield "episodes", Text(_counts(counts) or "none is running")
    if status.staleness:
        yield "staleness", Text("  ".join(_ages(status.staleness, full)))
    if status.busy and not is_done:
        shares = (f"{one_line(name)} {bar(share, full, empty)} {share:4.0%}" for name, share in status.busy.items())
        yield "busy", Text("  ".join(shares))
    if not is_done:
        yield from _servers(status.servers)
    if speeds := status.recent.get(TOKENS_PER_S):
        seconds = status.recent.get(STEP_S, [None])
        yield "speed", Text(f"{_number(speeds[-1], ',.0f')} tok/s  {_number(seconds[-1], '.1f')} s a step")
    if status.versions:
        yield "weights", Text(_weights(status))
    if lost := _lost(status.books):
        yield "lost", Text(lost, "yellow")
    if status.error:
        yield "error", Text(one_line(status.error), "red")
    if not status.is_over and (lines := [*filter(None, [status.waits_for]), *status.now]):
        yield "now", Text("\n".join(one_line(line) for line in lines))


def _servers(servers: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, RenderableType]]:
    shown = sorted(enumerate(servers), key=lambda pair: pair[1].get("up", 0.0))[:SHOWN_SERVERS]
    for index, server in sorted(shown, key=lambda pair: pair[0]):
        if not server.get("up"):
            yield f"server {index}", Text("is not there: it starts again, or its node is lost", "red")
        elif "requests_running" in server:
            text = f"{server['requests_running']:.0f} running, {server.get('requests_waiting', 0):.0f} waiting"
            usage = server.get("kv_cache_usage")
            yield f"server {index}", Text(text + ("" if usage is None else f", cache {usage:.0%} full"))
    if len(servers) > SHOWN_SERVERS:
        yield "", Text(f"and {len(servers) - SHOWN_SERVERS} more servers", "dim")


def _weights(status: RunStatus) -> str:
    learner, servers = status.versions.get("learner", 0), status.versions.get("servers", 0)
    text = f"version {servers} on the servers"
    if servers != learner:
        text += f", version {learner} on its way"
    updates = [value for value in status.recent.get(WEIGHTS_S, []) if value is not None]
    return text + (f", the last update took {updates[-1]:.1f} s" if updates else "")


def _lost(books: Mapping[str, int]) -> str:
    """Trajectories that were dropped and episodes that failed, each with reasons; empty if nothing was lost."""
    parts = []
    for what, prefix in (("dropped", "dropped_"), ("failed", "failed_")):
        found = {one_line(name.removeprefix(prefix)): n for name, n in books.items() if name.startswith(prefix) and n}
        if found:
            parts.append(f"{sum(found.values()):,} {what} ({', '.join(f'{k} {n:,}' for k, n in found.items())})")
    return "  ".join(parts)


def _ages(staleness: Mapping[int, int], full: str) -> Iterator[str]:
    """Yield a bar and the share of the tokens of each staleness; older ones than SHOWN_AGES together."""
    total = max(1, sum(staleness.values()))
    ages = sorted(staleness)
    for age in ages[:SHOWN_AGES]:
        share = staleness[age] / total
        yield f"{age}: {full * max(1, round(BAR * share))} {share:.0%}"
    if older := sum(staleness[age] for age in ages[SHOWN_AGES:]):
        yield f"older: {older / total:.0%}"


def _counts(counts: Mapping[str, int]) -> str:
    return "  ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def bar(share: float, full: str, empty: str, width: int = BAR) -> str:
    """Draw a share (0 to 1) with `width` characters."""
    length = round(width * min(1.0, max(0.0, share)))
    return full * length + empty * (width - length)


def sparkline(values: Sequence[float | None], *, ascii_only: bool = False) -> str:
    """Draw the last SPARK values as one character each, from the lowest to the highest; unknown ones as blanks."""
    heights = ASCII_HEIGHTS if ascii_only else HEIGHTS
    halves = [value / 2 if value is not None and math.isfinite(value) else None for value in values[-SPARK:]]
    known = [value for value in halves if value is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low  # of halves, so that it is finite
    return "".join(
        " " if value is None else heights[round((len(heights) - 1) * ((value - low) / span)) if span else 0]
        for value in halves
    )


def duration(seconds: float) -> str:
    """Format seconds as `48 s`, `6 min 48 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
