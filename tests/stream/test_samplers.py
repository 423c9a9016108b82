"""Samplers: no micro-batch over its budget, equal ones, nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.errors import StreamError
from roll_flash.stream.rows import Key, Situation, Unit
from roll_flash.stream.samplers import Groups, Sampler, Sequential, TokenBalanced

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def units_of(tokens: list[int]) -> list[Unit]:
    return [Unit(key, size) for key, size in enumerate(tokens)]


def drain(sampler: Sampler, units: list[Unit], is_final: bool = True, in_order: bool = False) -> list[list[Key]]:
    """What the sampler hands out until nothing is left."""
    choices = []
    while units:
        chosen = sampler.choose(units, Situation(is_final, in_order))
        assert units[0].key in chosen, "the oldest unit never waits for younger ones"
        assert len(chosen) == len(set(chosen))
        assert not in_order or chosen == [unit.key for unit in units[: len(chosen)]], "nobody is overtaken"
        units = [unit for unit in units if unit.key not in set(chosen)]
        choices.append(chosen)
    return choices


@given(sizes, st.integers(1, 150), st.booleans(), st.booleans())
def test_no_micro_batch_is_over_its_budget_unless_one_unit_is(
    tokens: list[int], budget: int, final: bool, in_order: bool
) -> None:
    for part in drain(TokenBalanced(budget), units_of(tokens), final, in_order):
        assert len(part) == 1 or sum(tokens[key] for key in part) <= budget


@given(st.lists(st.integers(1, 20), min_size=40, max_size=80))
def test_the_micro_batches_of_a_known_rest_are_equal(tokens: list[int]) -> None:
    budget = 200
    loads = [sum(tokens[key] for key in part) for part in drain(TokenBalanced(budget), units_of(tokens))]
    assert len(loads) <= -(-sum(tokens) // budget) + 1
    assert max(loads) - min(loads) <= max(tokens)


def test_sequential_takes_the_oldest_and_groups_are_units_too() -> None:
    assert Sequential(2).choose(units_of([5, 1, 1]), Situation()) == [0, 1]
    assert Groups(1).whole_groups
    assert not Sequential(1).whole_groups


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(StreamError, match="max_tokens of a sampler must be at least 1, not 0"):
        TokenBalanced(0)
