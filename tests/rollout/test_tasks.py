"""Task sources: every seed once, the same order after a resume."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roll_flash.scheduling.tasks import SeedTasks


@given(st.integers(0, 1000), st.integers(1, 200), st.integers(0, 10**9))
def test_every_seed_comes_once_before_any_comes_again(first: int, count: int, seed: int) -> None:
    tasks = SeedTasks("Env-v0", {}, (first, first + count), seed)
    drawn = [tasks.next().seed for _ in range(count)]
    assert sorted(drawn) == list(range(first, first + count))


@given(st.integers(0, 10**6), st.integers(0, 50))
def test_a_source_goes_on_where_its_cursor_stands(seed: int, cursor: int) -> None:
    first = SeedTasks("Env-v0", {"a": 1}, (0, 97), seed)
    drawn = [first.next() for _ in range(cursor + 5)]
    resumed = SeedTasks("Env-v0", {"a": 1}, (0, 97), seed)
    resumed.cursor = cursor
    assert [resumed.next() for _ in range(5)] == drawn[cursor:]
