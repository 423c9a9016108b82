"""`eval-diff.html`: two evaluations on one self-contained page, with conversations side by side."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from roll_flash.checked_files import make_way
from roll_flash.errors import ConfigError
from roll_flash.evaluation.comparison import Comparison, TaskPair
from roll_flash.evaluation.pages.page import card, document, interval_picture, table
from roll_flash.evaluation.pages.report import outcome_mark
from roll_flash.evaluation.pages.transcript import PageTranscripts, ending

PAGE_FILE = "eval-diff.html"


def write_comparison(found: Comparison, path: str | Path | None = None) -> Path:
    """Write the page to `path`, or to the folder of B. Raises ConfigError if that is not writable."""
    target = Path(path).expanduser() if path is not None else found.b.folder / PAGE_FILE
    try:
        if path is None:
            make_way(target)
        target.write_text(render_comparison(found), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}; give another file with --html") from None
    return target


def render_comparison(found: Comparison) -> str:
    transcripts = PageTranscripts()
    # Largest differences first: these keep their conversations if the page becomes too large.
    pairs = sorted(found.pairs, key=lambda pair: (-abs(pair.difference), pair.task_id))
    tasks = table(("task", "A | B", "A#", "B#", "B - A#"), [_row(pair, transcripts) for pair in pairs], sortable=True)
    notices = list(found.notes)
    if transcripts.left_out:
        notices.append(f"{transcripts.left_out} conversations are left out of this page, which would be too large")
    title = f"{found.a.name} and {found.b.name}"
    parts = [
        f"<h1>{escape(found.verdict)}</h1>",
        f'<p class="quiet">A: {escape(found.a.name)} ({escape(str(found.a.folder))})</p>',
        f'<p class="quiet">B: {escape(found.b.name)} ({escape(str(found.b.folder))})</p>',
        *(f'<p class="notice">{escape(notice)}</p>' for notice in notices),
        f'<div class="cards">{"".join(_cards(found))}</div>',
        "<h2>Tasks</h2>",
        '<p class="quiet">Each pair opens two conversations side by side. ✓ success, ✗ none, • not reported.</p>',
        tasks,
        '<h2 id="transcripts">Conversations</h2>',
        '<div id="reader" class="reader"><p class="quiet">Choose a pair of attempts above.</p></div>',
    ]
    return document(title, "\n".join(parts), {"episodes": transcripts.episodes})


def _cards(found: Comparison) -> list[str]:
    difference = found.difference
    interval = f"95 % in [{difference.low:+.3f}, {difference.high:+.3f}]"
    return [
        card(f"{found.measure} of A", f"{found.value_a:.3f}"),
        card(f"{found.measure} of B", f"{found.value_b:.3f}"),
        card("B - A", f"{difference.value:+.3f}", interval),
        card("solved by B only", f"{len(found.gained)}", "tasks"),
        card("solved by A only", f"{len(found.lost)}", "tasks"),
        card("tasks", f"{len(found.pairs)}", "in common"),
        f'<div class="card"><span>B - A on a scale from -1 to 1</span><br>{interval_picture(difference, -1, 1)}</div>',
    ]


def _row(pair: TaskPair, transcripts: PageTranscripts) -> list[str]:
    buttons = [
        _pair_button(a, b, transcripts) for a, b in zip_longest(pair.attempts_a, pair.attempts_b, fillvalue=None)
    ]
    kind = "good" if pair.difference > 0 else "bad" if pair.difference < 0 else ""
    difference = f'<td class="number {kind}" data-value="{pair.difference}">{pair.difference:+.3g}</td>'
    return [escape(pair.task_id), "".join(buttons), f"{pair.a:.3g}", f"{pair.b:.3g}", difference]


def _pair_button(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, transcripts: PageTranscripts) -> str:
    present = [(whose, record) for whose, record in (("A: ", a), ("B: ", b)) if record is not None]
    numbers = [number for whose, record in present if (number := transcripts.add(record, whose)) is not None]
    marks = "|".join("–" if record is None else outcome_mark(record)[1] for record in (a, b))
    title = " | ".join("none" if record is None else ending(record)[:150] for record in (a, b))
    target = f' data-episodes="{" ".join(map(str, numbers))}"' if numbers else " disabled"
    return (
        f'<button type="button" class="attempt" aria-pressed="false" title="{escape(title)}"{target}>{marks}</button>'
    )
