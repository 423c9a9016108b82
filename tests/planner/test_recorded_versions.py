"""The weights with which each turn of a recorded episode was sampled, also if later turns saw no earlier thinking."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from roll_flash.chat.rendered_conversation import RenderedConversation
from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.engines.inference import Generation
from roll_flash.models.prepare import resolve_model
from roll_flash.planner.measured.recording import _episode

TIMES = {"generate_s": 1.0, "step_s": 0.0}


def record(samples: list[Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of an episode whose turns are all in its log, whatever sample they are in."""
    made = [{"token_ids": each.token_ids.tolist(), "versions": each.versions.tolist(), "turns": ()} for each in samples]
    about = {"group_id": "g", "started_s": 0.0, "finished_s": 9.0, "reward": 1.0, "branches": made[1:]}
    return {**made[0], "turns": [{**turn, **TIMES} for turn in turns], **about}


def test_turns_without_earlier_thinking_have_the_versions_of_their_own_tokens() -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    talk = RenderedConversation(tokenizer, [{"role": "user", "content": "2 + 2?"}])
    turns = []
    for version, said in (
        (4, "<think>hm</think>4"),
        (5, "4, yes"),
        (7, "again 4"),
        (8, "<think>hm</think>4"),
        (9, "4"),
    ):
        sampled = np.array(tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False), np.int32)
        start, count, own = len(talk.token_ids), len(sampled), talk.sample == 0
        versions = np.full(count, version, np.int32)
        versions[-1] += 1
        talk.add_generation(Generation(sampled, np.zeros(count, np.float32), versions, "stop", "", 0.0))
        span = {"start": start, "end": start + count} if own else {"start": 0, "end": 0}
        turns.append({**span, "prompt_tokens": start, "completion_tokens": count})
        talk.add_observation([{"role": "user", "content": "Sure?"}])
    assert len(talk.samples()) == 3
    found = _episode(json.loads(json.dumps(record(talk.samples(), turns)))).turns
    assert [(turn.first_version, turn.last_version) for turn in found] == [(4, 5), (5, 6), (7, 8), (8, 9), (9, 10)]


def test_a_shorter_later_prompt_is_not_taken_for_an_earlier_turn() -> None:
    class Sample:
        def __init__(self, versions: list[int]) -> None:
            self.versions = self.token_ids = np.array(versions)

    samples = [Sample([-1, 1]), Sample([-1, -1, 2, 2]), Sample([-1, -1, 3])]
    later = {"start": 0, "end": 0}
    turns = [
        {"start": 1, "end": 2, "prompt_tokens": 1, "completion_tokens": 1},
        {**later, "prompt_tokens": 2, "completion_tokens": 2},
        {**later, "prompt_tokens": 2, "completion_tokens": 1},
        {**later, "prompt_tokens": None, "completion_tokens": None},
    ]
    found = _episode(json.loads(json.dumps(record(samples, turns)))).turns
    assert [turn.first_version for turn in found] == [1, 2, 3, 0]
