"""History of one session: a tree of model calls, in which each request finds its longest recorded prefix.

The parent of a call is the recorded call whose messages (with its answer) are the longest prefix of the request; the
prompt is the parent's tokens plus the template's delta. An agent that only appends makes a single path. One that goes
back, asks twice or rewrites its history adds paths: each leaf of the tree ends a sample. Every sampled token is a
policy token in exactly one sample, also if samples share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll_flash.engines.inference import Generation, count_experts, join_experts, policy_arrays
from roll_flash.gateway.model_call import Answer, Key, ModelCall, next_key
from roll_flash.processes.deadlines import SteadyClock
from roll_flash.types import Branch, Message, Turn


@dataclass(eq=False, slots=True)
class CallRecord:
    """One answered call. `given` are the messages since `parent`, `given_ids` their tokens."""

    parent: CallRecord | None
    request_key: Key
    """Key of the conversation before the answer."""
    key: Key
    """Key of the conversation with the answer."""
    given: tuple[Message, ...]
    given_ids: list[int]
    generation: Generation | None
    """None if an endpoint reports no tokens."""
    answer: Answer
    prompt_tokens: int
    completion_tokens: int
    started_s: float
    """Unix time of the request in seconds."""
    finished_s: float
    children: int = 0
    characters: int = 0
    """Approximate characters of the conversation with the answer, to render or read again."""

    def path(self) -> list[CallRecord]:
        """Calls from the first to this one."""
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
        """All tokens up to the end of the answer."""
        found: list[int] = []
        for record in self.path():
            found += record.given_ids
            if record.generation is not None:
                found += record.generation.token_ids.tolist()
        return found

    def known_experts(self) -> int:
        """Number of these tokens whose experts the servers have returned."""
        return count_experts(_generations(self.path()))


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Position of a request in the tree: its `parent`, its new messages, and the `key` of the whole request."""

    parent: CallRecord | None
    given: tuple[Message, ...]
    key: Key
    characters: int
    """Approximate characters to render: new messages and tools."""
    sent: int
    """Characters of the new messages as received; all of them are kept."""


class History:
    """Records of one session, in the order of their answers."""

    def __init__(self) -> None:
        self.clock = SteadyClock()
        """Times of the session."""
        self.records: list[CallRecord] = []
        self._by_key: dict[Key, list[CallRecord]] = {}
        self._begun: Counter[Key] = Counter()
        """Number of root calls by request key (small, while an agent may resend thousands of messages each time)."""
        self.rewrites = 0
        """Conversations that started again although one existed: the agent rewrote its history, or has a second one."""
        self.forks = 0
        """Further answers to a prompt that has one, and further continuations of a recorded prefix that has one."""

    def find(self, call: ModelCall) -> TreePosition:
        """Find the longest recorded prefix of a call's messages; the tools are part of it."""
        found = call.keys
        for known in range(len(found.keys) - 1, 0, -1):
            if records := self._by_key.get(found.keys[known - 1]):
                # Among equal records, prefer one without a continuation: this extends a sample instead of adding one.
                parent = next((record for record in reversed(records) if not record.children), records[-1])
                return TreePosition(
                    parent, call.messages[known:], found.keys[-1], found.characters(known), sum(found.sizes[known:])
                )
        return TreePosition(None, call.messages, found.keys[-1], found.characters(0), sum(found.sizes))

    def add_answer(
        self,
        place: TreePosition,
        answer: Answer,
        *,
        given_ids: list[int],
        generation: Generation | None,
        prompt_tokens: int,
        completion_tokens: int,
        started_s: float,
    ) -> CallRecord:
        """Record an answer to the request at `place`, which has just come."""
        record = CallRecord(
            parent=place.parent,
            request_key=place.key,
            key=next_key(place.key, answer.message),
            given=place.given,
            given_ids=given_ids,
            generation=generation,
            answer=answer,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            started_s=started_s,
            finished_s=self.clock.now_s(),
            characters=(place.parent.characters if place.parent else 0) + place.characters + len(answer.raw),
        )
        self.add(record)
        return record

    def add(self, record: CallRecord) -> None:
        if record.parent is None:
            known_before = record.request_key in self._begun
            self._begun[record.request_key] += 1
            self.forks += known_before
            self.rewrites += bool(self.records) and not known_before
        else:
            self.forks += record.parent.children > 0
            record.parent.children += 1
        self.records.append(record)
        self._by_key.setdefault(record.key, []).append(record)

    def discard(self, record: CallRecord) -> None:
        """Remove an answer that the agent never received. If it has a continuation, the agent received it."""
        if record.children or record not in self.records:
            return
        self.records.remove(record)
        self._by_key[record.key].remove(record)
        if record.parent is not None:
            record.parent.children -= 1
        elif self._begun[record.request_key] > 1:
            self._begun[record.request_key] -= 1
        else:
            del self._begun[record.request_key]

    def answers(self) -> list[Message]:
        """Messages of all answers, in order."""
        return [record.answer.message for record in self.records]

    def samples(self) -> list[Branch]:
        """Samples of all leaves, the one with the most policy tokens first."""
        leaves = [record for record in self.records if not record.children]
        leaves.sort(key=lambda leaf: sum(record.completion_tokens for record in leaf.path()), reverse=True)
        owned: set[int] = set()
        return [_sample(leaf.path(), owned) for leaf in leaves]


def _sample(path: Sequence[CallRecord], owned: set[int]) -> Branch:
    """Sample of a path; its policy tokens are those of calls that no earlier sample owns."""
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
    prompt_length = spans[0][0] if spans else 0
    return Branch(
        np.asarray(token_ids, np.int32),
        *policy_arrays(len(token_ids), spans),
        tuple(turns),
        tuple(messages),
        prompt_length,
        join_experts(_generations(path), len(token_ids)),
    )


def _generations(path: Sequence[CallRecord]) -> list[Generation]:
    return [record.generation for record in path if record.generation is not None]


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
        started_s=record.started_s,
        server=record.generation.server if record.generation else "",
    )
