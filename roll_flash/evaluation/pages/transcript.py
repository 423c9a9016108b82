"""Conversations for a page: the model's text is shown; thinking, calls and observations are folded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll_flash.chat.model_text import cut_middle
from roll_flash.monitor.episodes import own_answers

MAX_MESSAGE_CHARACTERS = 20_000
"""Maximum characters per message: longer ones show beginning and end; the files in `transcripts/` have all of it."""
MAX_OPEN_CHARACTERS = 2_000
"""Maximum characters of unfolded text."""
MAX_PAGE_CHARACTERS = 16_000_000
"""Maximum characters per page; further conversations are counted, and are only in `transcripts/`."""
PREVIEW_CHARACTERS = 90
SHOWN_TAGS = frozenset({"answer"})
_OPENING = re.compile(r"<([A-Za-z_][\w.-]{0,40})(?:[ =][^<>]{0,200})?>")
_CLOSING = re.compile(r"</([A-Za-z_][\w.-]{0,40})>")


class PageTranscripts:
    """Conversations of one page, numbered in the order of `add`."""

    def __init__(self) -> None:
        self.episodes: list[dict[str, Any]] = []
        self.left_out = 0
        self._characters = 0

    def add(self, record: Mapping[str, Any], whose: str = "") -> int | None:
        """Add a conversation and return its number; None if the page is full."""
        episode = episode_for_page(record)
        episode["title"] = whose + episode["title"]
        size = sum(len(part["text"]) for message in episode["messages"] for part in message["parts"])
        if self._characters + size > MAX_PAGE_CHARACTERS:
            self.left_out += 1
            return None
        self._characters += size
        self.episodes.append(episode)
        return len(self.episodes) - 1


def episode_for_page(record: Mapping[str, Any]) -> dict[str, Any]:
    turns = dict(zip(own_answers(record["messages"], len(record["turns"])), record["turns"], strict=False))
    messages, answered = [], False
    for place, message in enumerate(record["messages"]):
        role, turn = str(message.get("role", "?")), turns.get(place)
        answered = answered or turn is not None
        messages.append({"role": role, "about": _about(turn), "parts": _parts(message, role, answered)})
    # The observation after the last action is not a message, because no turn follows it.
    last = record["turns"][-1]["observation"] if record["turns"] else ""
    if last and (not messages or messages[-1]["role"] == "assistant"):
        piece = {"role": "user", "content": last}
        messages.append({"role": "environment", "about": "after the last turn", "parts": _parts(piece, "user", True)})
    if record.get("info"):
        text = _shortened(json.dumps(record["info"], indent=1, ensure_ascii=False, default=str))
        messages.append({"role": "environment", "about": "", "parts": [_folded("info", text)]})
    attempt = str(record["episode_id"]).rsplit(":", 1)[-1]
    return {"title": f"{record['task_id']}, attempt {attempt}", "ending": ending(record), "messages": messages}


def ending(record: Mapping[str, Any]) -> str:
    """Outcome of an attempt in one line: end and reward, or cause of the failure."""
    if record["kind"] == "failure":
        return f"failed ({record['cause']}, turn {record['failed_turn']}): {record['message']}"
    success = {True: "success", False: "no success", None: "success not reported"}[record["success"]]
    parts = [f"{record['end']}, {success}, reward {record['reward']:g}", f"{len(record['turns'])} turns"]
    rewards = record.get("info", {}).get("rewards")
    if isinstance(rewards, Mapping) and rewards:
        parts.append("rewards " + ", ".join(f"{name} {value}" for name, value in rewards.items()))
    return "; ".join(parts)


def _about(turn: Mapping[str, Any] | None) -> str:
    if turn is None:
        return ""
    parts = [f"{turn['generate_s']:.2f} s"]
    if turn.get("completion_tokens") is not None:
        parts.append(f"{turn['completion_tokens']} tokens")
    if turn["finish_reason"] == "length":
        parts.append("cut off at its longest")
    parts.append(f"step {turn['step_s']:.2f} s")
    if turn["reward"]:
        parts.append(f"reward {turn['reward']:g}")
    return ", ".join(parts)


def _parts(message: Mapping[str, Any], role: str, answered: bool) -> list[dict[str, str]]:
    text = _shortened(_text_of(message.get("content")))
    if role == "assistant":
        parts = list(_assistant_parts(text))
        calls = message.get("tool_calls")
        return [*parts, *(_folded("call", _shortened(_text_of(call))) for call in calls or ())]
    if role == "system":
        return [_folded("system", text)]
    if answered or len(text) > MAX_OPEN_CHARACTERS:
        return [_folded("observation" if answered else "text", text)]
    return [{"kind": "text", "text": text}]


def _assistant_parts(text: str) -> Iterator[dict[str, str]]:
    """Fold `<tag>...</tag>`, except for an answer; the time is linear in the text for any input."""
    last_close = {closing[1]: closing.start() for closing in _CLOSING.finditer(text)}
    position = 0
    for opening in _OPENING.finditer(text):
        tag = opening[1]
        if opening.start() < position or tag in SHOWN_TAGS or last_close.get(tag, -1) < opening.end():
            continue
        end = text.index(f"</{tag}>", opening.end())
        yield from _text_parts(text[position : opening.start()])
        yield _folded("thinking" if tag.startswith("think") else tag, text[opening.end() : end].strip())
        position = end + len(tag) + 3
    yield from _text_parts(text[position:])


def _text_parts(text: str) -> Iterator[dict[str, str]]:
    if text.strip():
        yield _folded("text", text) if len(text) > MAX_OPEN_CHARACTERS else {"kind": "text", "text": text.strip()}


def _folded(title: str, text: str) -> dict[str, str]:
    line = " ".join(text[: 4 * PREVIEW_CHARACTERS].split())
    preview = line if len(line) <= PREVIEW_CHARACTERS else line[:PREVIEW_CHARACTERS] + "…"
    return {"kind": "folded", "title": title, "preview": preview, "text": text}


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def _shortened(text: str) -> str:
    return cut_middle(text, MAX_MESSAGE_CHARACTERS)


def attempts_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Records by task, in the order of tasks and then attempts."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(str(record["task_id"]), []).append(record)
    for attempts in found.values():
        attempts.sort(key=lambda record: int(str(record["episode_id"]).rsplit(":", 1)[-1]))
    return found
