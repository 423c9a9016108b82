"""One self-contained HTML page: style and script are inline, nothing is ever fetched.

Text of a model or an environment enters the page in two ways only: escaped by `html.escape`, or inside the JSON of
`<script type="application/json">`, where every `<` is `\\u003c`. As a second defence, the content security policy
allows only this script and this style, by their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from roll_flash.evaluation.statistics import Estimate

SCALE_WIDTH = 160


def document(title: str, body: str, data: Any) -> str:
    """Return the whole page; `body` is markup, `data` is read by `page.js`."""
    style, program = _resource("page.css"), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(program)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{json_inside_html(data)}</script>\n'
        f"<script>{program}</script>\n</body>\n</html>\n"
    )


def json_inside_html(data: Any) -> str:
    """Return JSON in which no character can end its element or a line of JavaScript."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, sortable: bool = False) -> str:
    """Return a table. Cells are already escaped markup; a head that ends with `#` is a column of numbers."""
    names = [name.rstrip("#") for name in head]
    kinds = [' class="number"' if name.endswith("#") else "" for name in head]
    shown = [f'<button type="button">{escape(name)}</button>' if sortable and name else escape(name) for name in names]
    lines = [f'<div class="wide"><table{" class=" + chr(34) + "sortable" + chr(34) if sortable else ""}><thead><tr>']
    lines += [f'<th scope="col"{kind}>{name}</th>' for kind, name in zip(kinds, shown, strict=True)]
    lines.append("</tr></thead><tbody>")
    for row in rows:
        cells = (
            cell if cell.startswith("<td") else f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def card(name: str, value: str, detail: str = "") -> str:
    return f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(detail)}</span></div>'


def interval_picture(estimate: Estimate, low: float = 0.0, high: float = 1.0) -> str:
    """Draw the interval as a band and the value as a mark, on a scale from `low` to `high`."""
    width = (high - low) or 1.0

    def place(value: float) -> float:
        return 2 + (SCALE_WIDTH - 4) * min(1.0, max(0.0, (value - low) / width))

    left, right, point = place(estimate.low), place(estimate.high), place(estimate.value)
    return (
        f'<svg width="{SCALE_WIDTH}" height="16" role="img" aria-label="{escape(str(estimate))}">'
        f'<rect class="scale" x="0.5" y="4.5" width="{SCALE_WIDTH - 1}" height="7" rx="3"/>'
        f'<rect class="band" x="{left:.1f}" y="5" width="{max(1.0, right - left):.1f}" height="6"/>'
        f'<rect class="point" x="{point - 1.5:.1f}" y="1" width="3" height="14"/></svg>'
    )


@cache
def _resource(name: str) -> str:
    return (files("roll_flash.evaluation.pages") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
