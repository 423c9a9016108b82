"""One episode for a page: its messages with their turns, and each sampled token with its log-probability and version.

A record may have megabytes of text: long messages are cut here, and a request of their own gets the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from roll_flash.monitor.episodes import own_answers
from roll_flash.stream.episodes import NO_LOGPROB

MAX_CHARACTERS = 20_000
"""Maximum characters of a message in the first answer."""
MAX_TOKENS = 20_000
"""Maximum tokens of a turn that are shown one by one."""
MAX_PENDING = 8
"""Tokens without text after which they are no beginning of a character, which has at most 4 bytes: decoding looks at
all of them again for each further one."""


def episode_page(
    record: Mapping[str, Any], tokenizer: Tokenizer | None, learner: Mapping[int, Sequence[float]]
) -> dict[str, Any]:
    """Return what the page of an episode shows, without what its row in the table has. `learner`: log-probabilities of
    the learner by sample, where they are known."""
    samples = [record, *(record.get("branches") or [])]
    info = dict(record.get("info") or {})
    commands = info.pop("sandbox_commands", None)
    return {
        "message": record.get("message"),
        "failed_turn": record.get("failed_turn"),
        "attempt": record.get("attempt"),
        "seed": record.get("seed"),
        "env_kwargs": record.get("env_kwargs"),
        "prompt_tokens": record.get("prompt_tokens"),
        "completion_tokens": record.get("completion_tokens"),
        "samples": [_sample(_compared(sample, learner.get(n)), tokenizer) for n, sample in enumerate(samples)],
        "info": _cut(_as_text(info)),
        "rewards": info.get("rewards"),
        "tools": info.get("tools"),
        "commands": commands,
    }


def message_text(record: Mapping[str, Any], sample: int, message: int) -> str:
    """Return the whole text of a message. Raises IndexError."""
    samples = [record, *(record.get("branches") or [])]
    return _as_text(samples[sample]["messages"][message].get("content"))


@lru_cache(maxsize=4)
def load_tokenizer(path: Path, modified_ns: int) -> Tokenizer:
    """Load a tokenizer; `modified_ns` tells files of one name apart."""
    return Tokenizer.from_file(str(path))


def _compared(sample: Mapping[str, Any], learner: Sequence[float] | None) -> Mapping[str, Any]:
    """Add `differences` to a sample: for each token the learner's log-probability minus the sampler's, or None."""
    logprobs = sample.get("logprobs") or []
    found: list[float | None] = [None] * len(logprobs)
    trained = [
        place
        for place, (is_policy, said) in enumerate(zip(sample.get("policy_mask") or [], logprobs, strict=False))
        if is_policy and said is not None and said > NO_LOGPROB
    ]
    if learner is None or len(learner) != len(trained):
        return sample
    for place, said in zip(trained, learner, strict=True):
        found[place] = said - logprobs[place]
    return {**sample, "differences": found}


def _sample(sample: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    turns = [dict(turn) for turn in sample.get("turns") or []]
    spans = list(_spans(sample.get("policy_mask") or []))
    tokens = [_tokens(sample, *span, tokenizer) for span in spans]
    by_start = {start: found for (start, _), found in zip(spans, tokens, strict=True)}
    ends = dict(spans)
    for turn in turns:
        # Two turns without an observation between them are one span of the mask.
        alone = ends.get(turn["start"]) == turn["end"]
        turn["tokens"] = by_start.get(turn["start"]) if alone else _turn_tokens(sample, turn, tokenizer)
        turn.pop("observation", None)
    return {
        "messages": _messages(sample, len(turns)),
        "turns": turns,
        "tokens": [] if turns else tokens,
        "role": sample.get("role") or "",
        "length": len(sample.get("token_ids") or []),
        "last_observation": _last_observation(sample),
    }


def _messages(sample: Mapping[str, Any], turns: int) -> list[dict[str, Any]]:
    messages = sample.get("messages") or []
    own = {place: turn for turn, place in enumerate(own_answers(messages, turns))}
    return [
        {"role": str(message.get("role", "?")), "turn": own.get(place), **_cut(_as_text(message.get("content")))}
        for place, message in enumerate(messages)
    ]


def _last_observation(sample: Mapping[str, Any]) -> dict[str, Any] | None:
    """The observation after the last action is no message, because no turn follows it."""
    turns, messages = sample.get("turns") or [], sample.get("messages") or []
    text = turns[-1].get("observation") if turns else ""
    return _cut(text) if text and (not messages or messages[-1].get("role") == "assistant") else None


def _spans(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.array([0, *mask, 0], np.int8)))
    yield from ((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def _turn_tokens(
    sample: Mapping[str, Any], turn: Mapping[str, Any], tokenizer: Tokenizer | None
) -> dict[str, Any] | None:
    start, end = turn["start"], turn["end"]
    return _tokens(sample, start, end, tokenizer) if end > start else None


def _tokens(sample: Mapping[str, Any], start: int, end: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    shown = slice(start, min(end, start + MAX_TOKENS))
    ids = sample["token_ids"][shown]
    return {
        "ids": ids,
        "texts": None if tokenizer is None else list(_texts(ids, tokenizer)),
        "logprobs": sample["logprobs"][shown],
        "versions": sample["versions"][shown],
        "differences": sample["differences"][shown] if "differences" in sample else None,
        "left_out": end - shown.stop,
    }


def _texts(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text that each token adds; of a character of several tokens the last one has it."""
    stream, pending = DecodeStream(skip_special_tokens=False), 0
    for token in ids:
        try:
            text = stream.step(tokenizer, token) or ""
        except Exception:  # a Rust error of any kind, for bytes that are no text: the next tokens are decoded anew
            text, pending = "", MAX_PENDING
        pending = 0 if text else pending + 1
        if pending > MAX_PENDING:
            stream, pending = DecodeStream(skip_special_tokens=False), 0
            text = tokenizer.id_to_token(token) or ""
        yield text


def _cut(text: str) -> dict[str, Any]:
    return {"text": text[:MAX_CHARACTERS], "characters": len(text)}


def _as_text(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else msgspec.json.format(msgspec.json.encode(content), indent=1).decode()
