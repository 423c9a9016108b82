"""`report.html`: an evaluation on one self-contained page: scores, tools, every task, every conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from roll_flash.evaluation.journal import REPORT_FILE, TRANSCRIPTS
from roll_flash.evaluation.pages.page import card, document, interval_picture, table
from roll_flash.evaluation.pages.transcript import PageTranscripts, attempts_of, ending
from roll_flash.evaluation.result import EvalResult, counts_text
from roll_flash.monitor.status_view import duration

Records = Sequence[Mapping[str, Any]]


def write_report(folder: Path, result: EvalResult, records: Records, about: Mapping[str, Any]) -> Path:
    """Replace `report.html` of the folder atomically."""
    path = folder / REPORT_FILE
    partial = path.with_name(f"{path.name}.new")
    partial.write_text(render_report(result, records, about), encoding="utf-8", errors="replace")
    partial.replace(path)
    return path


def render_report(result: EvalResult, records: Records, about: Mapping[str, Any]) -> str:
    transcripts = PageTranscripts()
    tasks = _tasks(records, transcripts)
    facts = ", ".join(f"{name} {value}" for name, value in about.items())
    parts = [
        f"<h1>{escape(result.label)}</h1>",
        f'<p class="quiet">{escape(facts)}</p>' if facts else "",
        *(f'<p class="notice">{escape(text)}</p>' for text in _notices(result, transcripts)),
        f'<div class="cards">{"".join(_cards(result))}</div>',
        *_scores(result),
        *_tools(result),
        "<h2>Tasks</h2>",
        '<p class="quiet">✓ success, ✗ none, • not reported, ! failed and not scored. Each opens its conversation.</p>',
        tasks,
        '<h2 id="transcripts">Conversation</h2>',
        f'<div id="reader" class="reader"><p class="quiet">Choose an attempt above. '
        f"All of them are in the folder {TRANSCRIPTS}/ too.</p></div>",
    ]
    return document(result.label, "\n".join(part for part in parts if part), {"episodes": transcripts.episodes})


def _notices(result: EvalResult, transcripts: PageTranscripts) -> list[str]:
    notices = list(result.notes)
    if result.stopped:
        notices.insert(0, f"Stopped early: {result.stopped}")
    if transcripts.left_out:
        notices.append(
            f"{transcripts.left_out} conversations are left out of this page, which would be too large; they are in "
            f"the folder {TRANSCRIPTS}/"
        )
    return notices


def _cards(result: EvalResult) -> list[str]:
    usage = result.usage
    cards = [
        card("success", f"{result.success.value:.3f}", _interval(result)) if result.success else card("success", "—"),
        card("reward", f"{result.reward.value:.3f}", "mean per attempt") if result.reward else card("reward", "—"),
        card("scored", f"{result.scored:,}", f"of {result.tasks:,} tasks x {result.attempts}"),
        card("not scored", f"{result.missing:,}", counts_text(result.failures)),
        card("tokens", f"{usage.prompt_tokens + usage.completion_tokens:,}", f"{usage.completion_tokens:,} written"),
        card("time-outs", f"{sum(result.timeouts.values()):,}", counts_text(result.timeouts)),
        card("turns", f"{result.turns:,}"),
        card("time", _time(result.seconds), "of the last call"),
    ]
    if usage.cost is not None:
        cards.append(card("cost", f"{usage.cost:.4g}"))
    if result.versions:
        cards.append(card("weight versions", ", ".join(result.versions)))
    return cards


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _interval(result: EvalResult) -> str:
    return f"95 % in [{result.success.low:.3f}, {result.success.high:.3f}]" if result.success else ""


def _scores(result: EvalResult) -> list[str]:
    if not result.success and not result.reward:
        return []
    named = [("success", result.success)] if result.success else []
    named += [(f"pass@{k}", estimate) for k, estimate in result.pass_at_k.items()]
    rows = [
        [escape(name), _score(estimate), interval_picture(estimate), str(estimate.count)]
        for name, estimate in named
        if estimate
    ]
    if result.reward:
        low, high = min(0.0, result.reward.low), max(1.0, result.reward.high)
        picture = interval_picture(result.reward, low, high)
        rows.append(["reward", _score(result.reward), picture, str(result.reward.count)])
    return ["<h2>Scores</h2>", table(("", "value [95 % interval]", "", "tasks#"), rows)]


def _score(estimate: Any) -> str:
    return escape(str(estimate))


def _tools(result: EvalResult) -> list[str]:
    if not result.tools:
        return []
    rows = [
        [
            escape(name),
            f"{use.calls:,}",
            f"{use.errors:,}",
            f"{use.timeouts:,}",
            f"{use.seconds:.2f}",
            f"{use.seconds_per_call:.4f}",
            f"{use.attempts:,}",
        ]
        for name, use in result.tools.items()
    ]
    head = ("tool", "calls#", "errors#", "time-outs#", "seconds#", "seconds per call#", "attempts#")
    return ["<h2>Tools</h2>", table(head, rows, sortable=True)]


def _tasks(records: Records, transcripts: PageTranscripts) -> str:
    rows = []
    for task_id, attempts in attempts_of(records).items():
        ended = [record for record in attempts if record["kind"] == "trajectory"]
        judged = [record for record in ended if record["success"] is not None]
        rows.append(
            [
                escape(task_id),
                "".join(attempt_button(record, transcripts.add(record)) for record in attempts),
                _rate(judged),
                _mean([record["reward"] for record in ended]),
                _mean([len(record["turns"]) for record in ended]),
                _mean([record["completion_tokens"] for record in ended if record.get("completion_tokens") is not None]),
                _mean([record["finished_s"] - record["started_s"] for record in ended]),
            ]
        )
    head = ("task", "attempts", "success#", "reward#", "turns#", "tokens#", "seconds#")
    return table(head, rows, sortable=True)


def _rate(judged: Records) -> str:
    if not judged:
        return '<td class="number" data-value="-1">—</td>'
    rate = sum(record["success"] for record in judged) / len(judged)
    return f'<td class="number" data-value="{rate}">{sum(r["success"] for r in judged)}/{len(judged)}</td>'


def _mean(values: Sequence[float]) -> str:
    if not values:
        return '<td class="number" data-value="">—</td>'
    return f"{sum(values) / len(values):.3g}"


def attempt_button(record: Mapping[str, Any], number: int | None) -> str:
    """Button that opens the conversation `number`; disabled if that is None."""
    kind, mark = outcome_mark(record)
    target = " disabled" if number is None else f' data-episodes="{number}"'
    return (
        f'<button type="button" class="attempt {kind}" aria-pressed="false" title="{escape(ending(record)[:300])}"'
        f"{target}>{mark}</button>"
    )


def outcome_mark(record: Mapping[str, Any]) -> tuple[str, str]:
    """CSS class and character for the outcome of an attempt."""
    if record["kind"] == "failure":
        return "warn", "!"
    return {True: ("good", "✓"), False: ("bad", "✗"), None: ("", "•")}[record["success"]]
