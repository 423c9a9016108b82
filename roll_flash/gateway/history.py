"""What one session recorded: a tree of model calls, in which every request finds the longest prefix of itself.

A call hangs under the recorded call whose messages (with its answer) are the longest beginning of the request's; its
prompt is that call's tokens and the template's delta. An agent that only appends makes a single path. One that goes
back, asks twice or rewrites makes further paths: each leaf of the tree ends a sample. Every sampled token is the
policy's in exactly one of them, whatever they share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from roll_flash.gateway.model_call import Answer, Key, ModelCall, next_key
from roll_flash.inference.engine import Generation
from roll_flash.types import Branch, Message, Turn


@dataclass(eq=False, slots=True)
class CallRecord:
    """One answered call. `given` are the messages since `parent`, `given_ids` their tokens."""

    parent: CallRecord | None
    asked: Key
    """Of the conversation up to the answer."""
    key: Key
    """The same with the answer."""
    given: tuple[Message, ...]
    given_ids: list[int]
    generation: Generation | None
    """None behind an endpoint that tells no tokens."""
    answer: Answer
    prompt_tokens: int
    completion_tokens: int
    started_s: float
    """Unix time of the request."""
    finished_s: float
    children: int = field(default=0)

    def path(self) -> list[CallRecord]:
        """From the first call to this one."""
        found: list[CallRecord] = []
        record: CallRecord | None = self
        while record is not None:
            found.append(record)
            record = record.parent
        return found[::-1]

    def conversation(self) -> list[Message]:
        """All messages up to the answer, as they were recorded."""
        return [message for record in self.path() for message in (*record.given, record.answer.message)]

    def token_ids(self) -> list[int]:
        """Everything up to the end of the answer."""
        found: list[int] = []
        for record in self.path():
            found += record.given_ids
            if record.generation is not None:
                found += record.generation.token_ids.tolist()
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs: under `parent`, with the messages that are new. `key` is that of the whole request."""

    parent: CallRecord | None
    given: tuple[Message, ...]
    key: Key
    characters: int
    """Of what is new and of the tools, about: what there is to render."""
    sent: int
    """Characters of what is new, as it came; that much is kept."""


class History:
    """The records of one session, in the order in which they were answered."""

    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self._by_key: dict[Key, list[CallRecord]] = {}
        self._begun: Counter[Key] = Counter()
        """What calls without a parent asked, by key: an agent may send the same thousands of messages each time."""
        self.rewrites = 0
        """Conversations that began anew although there was one: the agent rewrote its history, or has a second one."""
        self.forks = 0
        """Answers to a prompt, or after a recorded prefix, that has another answer or continuation already."""

    def find(self, call: ModelCall) -> Place:
        """The longest recorded prefix of a call's messages; its tools are part of it."""
        found = call.keys
        for known in range(len(found.keys) - 1, 0, -1):
            if records := self._by_key.get(found.keys[known - 1]):
                # Of equal ones the one that nobody has continued yet: the sample goes on instead of a new one.
                parent = next((record for record in reversed(records) if not record.children), records[-1])
                return Place(
                    parent, call.messages[known:], found.keys[-1], found.characters(known), sum(found.sizes[known:])
                )
        return Place(None, call.messages, found.keys[-1], found.characters(0), sum(found.sizes))

    def add(self, record: CallRecord) -> None:
        if record.parent is None:
            asked_before = record.asked in self._begun
            self._begun[record.asked] += 1
            self.forks += asked_before
            self.rewrites += bool(self.records) and not asked_before
        else:
            self.forks += record.parent.children > 0
            record.parent.children += 1
        self.records.append(record)
        self._by_key.setdefault(record.key, []).append(record)

    def discard(self, record: CallRecord) -> None:
        """Forget an answer that the agent never got. One that was continued was got."""
        if record.children or record not in self.records:
            return
        self.records.remove(record)
        self._by_key[record.key].remove(record)
        if record.parent is not None:
            record.parent.children -= 1
        elif self._begun[record.asked] > 1:
            self._begun[record.asked] -= 1
        else:
            del self._begun[record.asked]

    def answers(self) -> list[Message]:
        """In the order in which they were given."""
        return [record.answer.message for record in self.records]

    def samples(self) -> list[Branch]:
        """The sample of each leaf, the one with the most policy tokens first."""
        leaves = [record for record in self.records if not record.children]
        leaves.sort(key=lambda leaf: sum(record.completion_tokens for record in leaf.path()), reverse=True)
        owned: set[int] = set()
        return [_sample(leaf.path(), owned) for leaf in leaves]


def answer_key(place: Place, answer: Answer) -> Key:
    return next_key(place.key, answer.message)


def _sample(path: Sequence[CallRecord], owned: set[int]) -> Branch:
    """The tokens of a path; policy tokens are those of the calls that no earlier sample owns."""
    token_ids: list[int] = []
    messages: list[Message] = []
    spans: list[tuple[int, Generation]] = []
    turns: list[Turn] = []
    for place, record in enumerate(path):
        token_ids += record.given_ids
        messages += [*record.given, record.answer.message]
        start = len(token_ids)
        if record.generation is not None:
            token_ids += record.generation.token_ids.tolist()
        if id(record) in owned:
            continue
        owned.add(id(record))
        if record.generation is not None:
            spans.append((start, record.generation))
        turns.append(_turn(record, start, len(token_ids), path[place + 1] if place + 1 < len(path) else None))
    mask, logprobs, versions = _policy_arrays(len(token_ids), spans)
    prompt_length = spans[0][0] if spans else 0
    return Branch(
        np.asarray(token_ids, np.int32), mask, logprobs, versions, tuple(turns), tuple(messages), prompt_length
    )


def _policy_arrays(
    length: int, spans: Sequence[tuple[int, Generation]]
) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32]]:
    mask = np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    for start, generation in spans:
        span = slice(start, start + len(generation.token_ids))
        mask[span] = True
        logprobs[span] = generation.logprobs
        versions[span] = generation.versions
    return mask, logprobs, versions


def _turn(record: CallRecord, start: int, end: int, following: CallRecord | None) -> Turn:
    said = [str(message.get("content") or "") for message in following.given] if following else []
    return Turn(
        start=start,
        end=end,
        action=record.answer.raw,
        observation="\n".join(said),
        reward=0.0,
        finish_reason=record.answer.finish_reason,
        generate_s=record.finished_s - record.started_s,
        step_s=max(0.0, following.started_s - record.finished_s) if following else 0.0,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
    )
