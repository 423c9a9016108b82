"""The parity probe: what it looks at, and what it lets pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roll_flash.config.tree import WeightsConfig
from roll_flash.errors import ParityError, RunError
from roll_flash.models.prepare import resolve_model
from roll_flash.weight_sync.parity import BFLOAT16_THRESHOLD, FLOAT32_THRESHOLD, check, compare, load_probe

TEXT = WeightsConfig().parity_text


def _compare(*servers: Any) -> Any:
    expected = [np.zeros(500, np.float32), np.zeros(524, np.float32)]
    found = [[np.asarray(server[:500]) for server in servers], [np.asarray(server[500:]) for server in servers]]
    return compare(expected, found)


@pytest.mark.parametrize("max_length", [64, 256, 4096])
def test_a_thousand_tokens_of_texts_that_branch_are_compared(max_length: int) -> None:
    probe = load_probe(resolve_model("tiny"), TEXT, max_length)
    texts = [tuple(text) for text in probe.texts]
    assert all(len(text) < max_length for text in texts)
    prefixes = {text[: end + 1] for text in texts for end in range(len(text))}
    assert len(prefixes) >= 1000
    assert len({text[: len(text) // 4] for text in texts}) == 1
    assert len(set(texts)) == len(texts)
    few = [probe.after_update(number).texts for number in range(len(texts))]
    assert all(100 <= sum(map(len, part)) <= 256 for part in few)
    assert {tuple(text) for part in few for text in part} == set(texts)


def test_one_unlucky_token_of_a_thousand_does_not_stop_a_run() -> None:
    noise = np.abs(np.random.default_rng(0).normal(0, 0.03, 1024))
    noise[7] = 3 * BFLOAT16_THRESHOLD
    parity = _compare(noise)
    check(parity, BFLOAT16_THRESHOLD)
    assert (parity.tokens, parity.largest) == (1024, 3 * BFLOAT16_THRESHOLD)


def test_a_small_error_of_every_token_stops_a_run() -> None:
    """Of which no token is above the threshold."""
    with pytest.raises(ParityError, match=r"differ by 0\.1 on average"):
        check(_compare(np.full(1024, 0.1)), BFLOAT16_THRESHOLD)


def test_a_twentieth_of_the_tokens_being_wrong_stops_a_run() -> None:
    wrong = np.zeros(1024)
    wrong[::20] = 2 * FLOAT32_THRESHOLD
    with pytest.raises(ParityError):
        check(_compare(np.zeros(1024), wrong), FLOAT32_THRESHOLD)


@pytest.mark.parametrize("second", [False, True])
def test_a_server_that_says_nan_stops_a_run(second: bool) -> None:
    broken = np.full(1024, np.nan)
    with pytest.raises(ParityError):
        check(_compare(*([np.zeros(1024), broken] if second else [broken, np.zeros(1024)])), BFLOAT16_THRESHOLD)


def test_a_probe_needs_something_to_predict() -> None:
    with pytest.raises(RunError, match="two tokens"):
        load_probe(resolve_model("tiny"), "a", 256)
