"""Samplers: no micro-batch over its budget, equal ones, equal ranks, nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.errors import StreamError
from roll_flash.stream.rows import Situation, Unit
from roll_flash.stream.samplers import Groups, Parts, RankAware, Sampler, Sequential, TokenBalanced

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=60)
ranks = st.integers(1, 5)


def units_of(tokens: list[int]) -> list[Unit]:
    return [Unit(key, size) for key, size in enumerate(tokens)]


def drain(sampler: Sampler, units: list[Unit], is_final: bool = True, in_order: bool = False) -> list[Parts]:
    """What the sampler hands out until nothing is left; `given` is kept as the ledger does."""
    size = {unit.key: unit.tokens for unit in units}
    given, choices = [0] * sampler.ranks, []
    while units:
        parts = sampler.choose(units, Situation(is_final, not is_final, in_order, given))
        assert parts is not None
        assert len(parts) == sampler.ranks
        chosen = [key for part in parts for key in part]
        assert units[0].key in chosen, "the oldest unit never waits for younger ones"
        assert len(chosen) == len(set(chosen))
        assert not in_order or sorted(chosen) == [unit.key for unit in units[: len(chosen)]], "nobody is overtaken"
        given = [total + sum(size[key] for key in part) for total, part in zip(given, parts, strict=True)]
        units = [unit for unit in units if unit.key not in set(chosen)]
        choices.append(parts)
    return choices


@given(sizes, st.integers(1, 150), st.booleans(), st.booleans())
def test_no_micro_batch_is_over_its_budget_unless_one_unit_is(
    tokens: list[int], budget: int, final: bool, in_order: bool
) -> None:
    for sampler in (TokenBalanced(budget), RankAware(3, budget)):
        for parts in drain(sampler, units_of(tokens), final, in_order):
            for part in parts:
                assert len(part) == 1 or sum(tokens[key] for key in part) <= budget


@given(st.lists(st.integers(1, 20), min_size=40, max_size=80))
def test_the_micro_batches_of_a_known_rest_are_equal(tokens: list[int]) -> None:
    budget = 200
    loads = [sum(tokens[key] for key in parts[0]) for parts in drain(TokenBalanced(budget), units_of(tokens))]
    assert len(loads) <= -(-sum(tokens) // budget) + 1
    assert max(loads) - min(loads) <= max(tokens)


@given(st.lists(st.integers(1, 20), min_size=20, max_size=80), ranks, st.booleans())
def test_ranks_get_equal_tokens_and_the_same_number_of_micro_batches(tokens: list[int], ranks: int, end: bool) -> None:
    totals = [0] * ranks
    for parts in drain(RankAware(ranks, 100), units_of(tokens), end):
        assert len(parts) == ranks
        for rank, part in enumerate(parts):
            totals[rank] += sum(tokens[key] for key in part)
    assert max(totals) - min(totals) <= 2 * max(tokens)


@given(st.lists(st.integers(1, 300), min_size=2, max_size=30), st.integers(2, 5))
def test_every_rank_works_while_there_is_a_unit_for_each(tokens: list[int], ranks: int) -> None:
    parts = RankAware(ranks, 100).choose(units_of(tokens), Situation())
    assert (parts is None) == (len(tokens) < ranks)
    assert parts is None or all(parts)


def test_a_sampler_that_waits_for_more_stops_waiting_at_the_end_and_when_writers_wait() -> None:
    sampler, units = TokenBalanced(100, min_tokens=50), units_of([10, 10])
    assert sampler.choose(units, Situation()) is None
    assert sampler.choose(units, Situation(is_pressed=True)) == [[0, 1]]
    assert sampler.choose(units, Situation(is_final=True)) is not None
    assert RankAware(4, 100).choose(units, Situation()) is None
    assert RankAware(4, 100).choose(units, Situation(is_final=True)) == [[0], [1], [], []]


def test_sequential_takes_the_oldest_and_groups_are_units_too() -> None:
    assert Sequential(2).choose(units_of([5, 1, 1]), Situation()) == [[0, 1]]
    assert Groups(1).whole_groups
    assert not Sequential(1).whole_groups


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(StreamError, match="max_tokens of a sampler must be at least 1, not 0"):
        TokenBalanced(0)
    with pytest.raises(StreamError, match="ranks"):
        RankAware(0, 10)
