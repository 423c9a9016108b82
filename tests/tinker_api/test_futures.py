"""Work that clients fetch later: bounded, done once, and what is given up unread is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from roll_flash.errors import LearnerError
from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.tinker import futures as futures_module
from roll_flash.tinker.futures import Futures, Result


def run(scenario: Callable[[Futures], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20):
            await scenario(Futures())

    asyncio.run(whole())


async def answer(result: Result) -> Result:
    await asyncio.sleep(0)
    return result


def test_a_result_can_be_fetched_again_as_an_answer_may_be_lost() -> None:
    async def scenario(futures: Futures) -> None:
        futures.start("a", lambda: answer(b"1"))
        assert futures.knows("a")
        assert [await futures.wait("a", 5) for _ in range(2)] == [b"1", b"1"]
        with pytest.raises(ApiError, match="no request 'b' is known"):
            await futures.wait("b", 5)

    run(scenario)


def test_a_wait_has_a_deadline_and_leaves_the_work_alone() -> None:
    async def scenario(futures: Futures) -> None:
        go = asyncio.Event()

        async def late() -> Result:
            await go.wait()
            return b"late"

        futures.start("a", late)
        assert await futures.wait("a", 0.01) is None
        go.set()
        assert await futures.wait("a", 5) == b"late"

    run(scenario)


def test_more_work_than_is_allowed_is_refused_until_some_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "MAX_OPEN", 2)

    async def scenario(futures: Futures) -> None:
        for name in ("a", "b"):
            futures.require_room()
            futures.start(name, lambda: answer(b""))
        with pytest.raises(ApiError) as refused:
            futures.require_room()
        assert refused.value.status == 429
        await futures.wait("a", 5)
        futures.require_room()
        await futures.wait("b", 5)

    run(scenario)


def test_results_beyond_the_bytes_that_are_kept_are_given_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_module, "MAX_KEPT_BYTES", 2 * futures_module.OVERHEAD_BYTES + 10)

    async def scenario(futures: Futures) -> None:
        for name, fetch in (("read", True), ("unread", False), ("new", False), ("newest", False)):
            futures.start(name, lambda: answer(b"12345"))
            if fetch:
                await futures.wait(name, 5)
            await asyncio.sleep(0.01)
        assert [name for name in ("read", "unread", "new", "newest") if futures.knows(name)] == ["new", "newest"]
        assert futures.dropped_unread == 1

    run(scenario)


def test_a_failure_is_an_answer_with_its_line() -> None:
    async def scenario(futures: Futures) -> None:
        async def fails(error: Exception) -> Result:
            raise error

        cases = {
            "ours": (LearnerError("a rank died"), "a rank died", "server"),
            "theirs": (ApiError(400, "x", "no such token"), "no such token", "user"),
            "late": (TimeoutError(), "generate_timeout_s", "server"),
            "bug": (KeyError("x"), "KeyError", "server"),
        }
        for name, (error, words, category) in cases.items():
            futures.start(name, partial(fails, error))
            found = await futures.wait(name, 5)
            assert isinstance(found, dict)
            assert words in found["error"]
            assert found["category"] == category
        assert futures.failed == len(cases)

    run(scenario)


def test_the_work_of_a_session_ends_with_it_and_no_other() -> None:
    async def scenario(futures: Futures) -> None:
        async def forever() -> Result:
            await asyncio.Event().wait()
            return b""

        for name in ("one:1", "other:1"):
            futures.start(name, forever)
        await asyncio.sleep(0)
        futures.start("one:2", forever)  # cancelled before it begins
        await futures.cancel("one:")
        assert [await futures.wait(name, 0.01) is None for name in ("one:1", "one:2", "other:1")] == [
            False,
            False,
            True,
        ]
        await futures.cancel("other:")
        assert futures.failed == 3

        async def cancelled() -> Result:
            raise asyncio.CancelledError

        futures.start("inside", cancelled)  # by what it waited for
        assert isinstance(await futures.wait("inside", 5), dict)

    run(scenario)
