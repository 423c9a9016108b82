"""A turn that is cut anywhere, any number of times, is the turn that was sampled: tokens, logprobs and versions."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.inference.client import token_protocol
from roll_flash.inference.client.http_connections import BadAnswerError
from roll_flash.inference.client.partial_turn import PartialTurn
from roll_flash.inference.client.token_protocol import Piece, event_splitter
from roll_flash.types import FinishReason, SamplingParams

PROMPT = [9, 8, 7]


def sent(turn: PartialTurn) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(turn.request())
    return body


@given(cuts=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["dies", "abort", "untold"])), max_size=8))
def test_every_token_keeps_the_logprob_and_version_it_was_sampled_with(cuts: list[tuple[int, str]]) -> None:
    """Request number v samples with version v. An answer that ends before versions are told is asked for again."""
    total = 40
    turn = PartialTurn(PROMPT, SamplingParams(max_new_tokens=total, seed=5), total, "r", stream_every=4)
    expected: list[tuple[int, float, int]] = []
    for version, (count, end) in enumerate([*cuts, (total, "length")]):
        body = sent(turn)
        assert body["token_ids"] == PROMPT + [token for token, _, _ in expected]
        assert body["sampling_params"]["max_tokens"] == total - len(expected)
        assert body["sampling_params"]["seed"] == 5 + len(expected)
        count = min(count, total - len(expected))
        made = [(1000 * version + i, -0.001 * i, version) for i in range(count)]
        for start in range(0, count, 4):
            part = made[start : start + 4]
            versions = None if end == "untold" else [(version, 0, start + len(part))]
            turn.take(Piece([t for t, _, _ in part], [lp for _, lp, _ in part], versions, None))
        if end in ("dies", "untold"):
            assert turn.end_early() == (count if end == "dies" else 0)
        else:
            turn.take(Piece([], [], [(version, 0, count)] if count else [], end))  # type: ignore[arg-type]
            turn.finish()
        if end != "untold":
            expected += made
        if turn.finish_reason is not None:
            break
    generation = turn.generation("server")
    assert generation.finish_reason == "length"
    assert generation.token_ids.tolist() == [token for token, _, _ in expected]
    assert np.array_equal(generation.logprobs, np.array([lp for _, lp, _ in expected], np.float32))
    assert generation.versions.tolist() == [version for _, _, version in expected]
    assert len(expected) == total


def letters(token_ids: list[int]) -> str:
    return "".join(chr(token) for token in token_ids)


@given(before=st.text("<e>", max_size=6), after=st.text("<e>", min_size=1, max_size=6))
def test_a_turn_with_a_stop_string_ends_where_one_request_would_have_ended_it(before: str, after: str) -> None:
    """The server sees `before` and `after` apart; the turn is as if it had seen both at once."""
    stop = "<e>"
    if stop in before or stop in after[:-1]:
        return  # the server itself would have ended there
    turn = PartialTurn(PROMPT, SamplingParams(max_new_tokens=40, stop=(stop,)), 40, "r", None, letters)
    turn.request()
    turn.take(Piece([ord(c) for c in before], [-0.5] * len(before), [(3, 0, len(before))] if before else [], "abort"))
    assert turn.finish() == len(before)
    turn.request()
    turn.take(
        Piece([ord(c) for c in after], [-0.5] * len(after), [(4, 0, len(after))], "stop" if stop in after else "length")
    )
    turn.finish()
    whole = before + after
    expected = whole[: whole.index(stop) + len(stop)] if stop in whole else whole
    generation = turn.generation("server")
    assert letters(generation.token_ids.tolist()) == expected
    assert (generation.finish_reason == "stop") == (stop in whole)
    assert generation.versions.tolist() == ([3] * len(before) + [4] * len(after))[: len(expected)]


@pytest.mark.parametrize("ended", ["stop", "length"])
def test_a_long_stop_string_of_an_agent_is_looked_for_in_few_steps(ended: FinishReason) -> None:
    """Decoded tokens are counted: up to each end in turn, they were 6 million."""
    decoded = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return letters(token_ids)

    stop = "x" * 4095 + ("y" if ended == "stop" else "z")
    turn = PartialTurn(PROMPT, SamplingParams(max_new_tokens=9000, stop=(stop,)), 9000, "r", None, decode)
    turn.request()
    turn.take(Piece([ord("x")] * 4000, [-0.5] * 4000, [(3, 0, 4000)], "abort"))
    assert turn.finish() == 4000
    turn.request()
    turn.take(Piece([*[ord("x")] * 2000, ord("y"), *[ord("w")] * 2999], [-0.5] * 5000, [(4, 0, 5000)], "length"))
    turn.finish()
    generation = turn.generation("server")
    assert (generation.finish_reason, len(generation.token_ids)) == (ended, 6001 if ended == "stop" else 9000)
    assert decoded < 200_000


def test_without_a_tokenizer_a_turn_with_stop_strings_begins_again() -> None:
    turn = PartialTurn(PROMPT, SamplingParams(stop=("x",)), 20, "r", None)
    turn.request()
    turn.take(Piece([1, 2], [-0.5] * 2, [(3, 0, 2)], "abort"))
    assert turn.finish() == 0
    assert sent(turn)["token_ids"] == PROMPT


def test_short_turns_are_not_streamed() -> None:
    short = PartialTurn(PROMPT, SamplingParams(), 64, "r", stream_every=64)
    long = PartialTurn(PROMPT, SamplingParams(), 65, "r", stream_every=64)
    assert "stream" not in sent(short)
    body = sent(long)
    assert (body["stream"], body["sampling_params"]["stream_interval"]) == (True, 64)


def test_requests_of_one_turn_have_different_names() -> None:
    turn = PartialTurn(PROMPT, SamplingParams(), 8, "turn", None)
    names = set()
    for _ in range(3):
        names.add(sent(turn)["request_id"])
        turn.end_early()
    assert len(names) == 3


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([Piece([1] * 9, [-1.0] * 9, [(0, 0, 9)], "length")], "more than the 8 tokens"),
        ([Piece([1, 2], [-1.0] * 2, [(0, 0, 1)], "stop")], "for 2 tokens"),
        ([Piece([1, 2], [-1.0] * 2, [(0, 0, 1), (1, 0, 2)], "stop")], "for 2 tokens"),
        ([Piece([1, 2], [-1.0] * 2, None, "stop")], "no weight version for 2 tokens"),
        ([Piece([], [], [], "stop")], "no tokens, finished by 'stop'"),
        ([Piece([1], [-1.0], [(0, 0, 1)], None)], "without a reason"),
        ([Piece([49, 50], [-1.0] * 2, [(0, 0, 2)], "stop")], "token id 50 of a model with 50 tokens"),
        ([Piece([1], [-1.0], [(0, 0, 1)], "stop"), Piece([2], [-1.0], None, None)], "after the end"),
    ],
)
def test_what_does_not_add_up_is_refused(pieces: list[Piece], reason: str) -> None:
    turn = PartialTurn(PROMPT, SamplingParams(), 8, "r", None, vocabulary=50)
    turn.request()

    def play() -> None:
        for piece in pieces:
            turn.take(piece)
        turn.finish()

    with pytest.raises(BadAnswerError, match=reason):
        play()
    turn.discard()
    assert turn.known_tokens == 0


def test_a_long_event_is_searched_once() -> None:
    """Ten times as many pieces of one event take ten times as long, not a hundred times: its bytes are counted."""
    searched = 0

    class Counting(bytearray):
        def find(self, what: bytes, start: int = 0) -> int:  # type: ignore[override]
            nonlocal searched
            searched += len(self) - start
            return super().find(what, start)

    with patch.object(token_protocol, "bytearray", Counting, create=True):
        receive = event_splitter(lambda piece: None)
    for _ in range(1000):
        receive(b"x" * 1000)
    assert 1000 * 1000 <= searched < 3 * 1000 * 1000


@given(data=st.data())
def test_events_are_found_however_the_network_cuts_them(data: st.DataObject) -> None:
    tokens = list(range(20))
    events = [{"choices": [{"token_ids": [token], "logprobs": {"content": [{"logprob": -0.25}]}}]} for token in tokens]
    stream = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    taken: list[int] = []
    receive = event_splitter(lambda piece: taken.extend(piece.token_ids))
    for start, end in zip([0, *places], [*places, len(stream)], strict=True):
        receive(stream[start:end])
    assert taken == tokens
