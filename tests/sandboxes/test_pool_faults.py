"""Whatever fails or is cancelled, and wherever: a closed pool has closed every sandbox that it was given."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_flash.sandboxes import SandboxDied, SandboxError, SandboxFileError, SandboxPool, SandboxSpec
from roll_flash.sandboxes.result import Histogram, SandboxStats

SPECS = (SandboxSpec(), SandboxSpec(memory_mb=128))
ERRORS = (SandboxError("failed"), SandboxFileError("denied", 13), OSError(5, "input"), ValueError("what"), KeyError(1))


class Chance:
    """Every wait of the fakes goes through here: some turns of the loop, then perhaps an error."""

    def __init__(self, seed: int, share_failing: float) -> None:
        self.random = random.Random(seed)
        self._share_failing = share_failing

    async def happens(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)
        if self.random.random() < self._share_failing:
            raise self.random.choice(ERRORS)


class FakeSandbox:
    isolation = "strong"
    provider = "fake"

    def __init__(self, name: str, spec: SandboxSpec, chance: Chance) -> None:
        self.name, self.spec, self._chance = name, spec, chance
        self.runs = True

    @property
    def alive(self) -> bool:
        return self.runs

    async def stats(self) -> SandboxStats:
        await self._chance.happens()
        return SandboxStats(None, None, None, None, None, 1, 0, 0, Histogram())

    async def reset(self) -> bool:
        await self._chance.happens()
        return self._chance.random.random() < 0.7

    async def close(self, *, reason: str = "closed") -> None:
        self.runs = False  # from here on it ends by itself, whoever waits for it
        await self._chance.happens()


class FakeProvider:
    name = "fake"
    isolation = "strong"

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.opened: list[FakeSandbox] = []

    async def connect(self) -> None: ...

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> FakeSandbox:
        await self._chance.happens()
        self.opened.append(FakeSandbox(str(len(self.opened)), spec, self._chance))
        return self.opened[-1]

    async def sweep(self) -> int:
        await self._chance.happens()
        return 0

    async def close(self) -> None: ...


async def play(seed: int, share_failing: float, reuse: bool) -> FakeProvider:
    chance = Chance(seed, share_failing)
    provider = FakeProvider(chance)
    pool = SandboxPool(provider=provider, size=2, reuse=reuse)  # type: ignore[arg-type]

    async def lease() -> None:
        with contextlib.suppress(*map(type, ERRORS), SandboxDied):
            if chance.random.random() < 0.2:
                await pool.start(chance.random.choice(SPECS))
            async with pool.lease(chance.random.choice(SPECS), timeout=chance.random.choice((0.001, 60))):
                await chance.happens()

    leases = []
    for _ in range(12):
        leases.append(asyncio.ensure_future(lease()))
        for _ in range(chance.random.randrange(6)):
            await asyncio.sleep(0)
        if chance.random.random() < 0.3:
            chance.random.choice(leases).cancel()
    closing = asyncio.ensure_future(pool.close())
    await asyncio.sleep(0)
    if chance.random.random() < 0.3:
        closing.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(*leases, closing, return_exceptions=True)
        await pool.close()
    assert pool.stats().leased == 0
    return provider


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((0.0, 0.1, 0.4)), st.booleans())
def test_a_closed_pool_has_closed_every_sandbox_that_it_was_given(seed: int, share_failing: float, reuse: bool) -> None:
    provider = asyncio.run(play(seed, share_failing, reuse))
    assert [sandbox.name for sandbox in provider.opened if sandbox.runs] == []


@pytest.mark.parametrize("turns", range(16))
def test_a_pool_closes_whichever_turn_of_the_loop_a_lease_ends_in(turns: int) -> None:
    """An ending that begins and ends in one turn of the loop must not keep `close` from giving the loop its next."""

    class Instant(Chance):
        async def happens(self) -> None: ...

    async def close_beside_a_lease() -> None:
        pool = SandboxPool(provider=FakeProvider(Instant(0, 0.0)), size=0)  # type: ignore[arg-type]
        started = asyncio.Event()

        async def lease() -> None:
            async with pool.lease(SPECS[0]):
                started.set()
                for _ in range(turns):
                    await asyncio.sleep(0)

        leasing = asyncio.create_task(lease())
        await started.wait()
        await pool.close()
        await leasing

    asyncio.run(close_beside_a_lease())


def test_a_pool_starts_again_after_all_that_were_ready_have_died() -> None:
    """As after a restart of their engine: what had died counted as ready, and the wait for another never ended."""

    async def start_twice() -> None:
        provider = FakeProvider(Chance(0, 0.0))
        async with SandboxPool(provider=provider, size=0) as pool:  # type: ignore[arg-type]
            await pool.start()
            provider.opened[0].runs = False
            async with asyncio.timeout(5):
                await pool.start()
            assert [sandbox.alive for sandbox in provider.opened] == [False, True]
            assert (pool.stats().ready, pool.stats().died_while_ready) == (1, 1)

    asyncio.run(start_twice())


def test_with_reuse_a_sandbox_comes_back_to_a_spec_that_upkeep_forgot_just_as_it_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start may take longer than requests are remembered. It was ready where no lease looks, as long as its pool."""

    async def is_new(_: object) -> bool:
        return True

    monkeypatch.setattr(FakeSandbox, "reset", is_new)

    async def lease_twice() -> None:
        provider = FakeProvider(Chance(0, 0.0))
        pool = SandboxPool(provider=provider, size=0, reuse=True)  # type: ignore[arg-type]
        opens = provider.open

        async def open_and_forget(spec: SandboxSpec, *, run: str, timeout_s: float) -> FakeSandbox:
            sandbox = await opens(spec, run=run, timeout_s=timeout_s)
            asyncio.get_running_loop().call_soon(pool._warm.clear)
            return sandbox

        monkeypatch.setattr(provider, "open", open_and_forget)
        async with pool, asyncio.timeout(5):
            async with pool.lease(SPECS[0]):
                pass
            await asyncio.gather(*pool._ends)
            assert pool.stats().ready == 1
            async with pool.lease(SPECS[0]):
                assert len(provider.opened) == 1

    asyncio.run(lease_twice())


def test_of_several_that_wait_for_a_pool_to_start_none_waits_for_ever_if_it_does_not() -> None:
    async def start_together() -> list[object]:
        async with SandboxPool(provider=FakeProvider(Chance(0, 1.0)), size=0) as pool:  # type: ignore[arg-type]
            async with asyncio.timeout(5):
                return list(await asyncio.gather(*(pool.start() for _ in range(3)), return_exceptions=True))

    assert [isinstance(error, Exception) for error in asyncio.run(start_together())] == [True] * 3


@pytest.mark.parametrize(
    "spoil", ["rm -r /sandbox/*; chmod 0555 /sandbox", "rm -r /sandbox/* /tmp/*; chmod 0555 /sandbox /tmp", "chmod 0 ."]
)
def test_a_sandbox_whose_files_cannot_be_put_back_is_closed_with_the_pool(provider: str, spoil: str) -> None:
    """It is given files at its start, and its user may have closed the folder that they go into."""
    spec = SandboxSpec(files={"task/input": b"x", "/tmp/input": b"y"})

    async def lease_twice() -> None:
        pool = SandboxPool(provider=provider, size=0, reuse=True)
        seen = []
        for _ in range(2):
            async with pool.lease(spec) as sandbox:
                seen.append(sandbox)
                assert await sandbox.read("task/input") == b"x"
                assert await sandbox.read("/tmp/input") == b"y"
                await sandbox.exec(spoil)
        await pool.close()
        assert not [sandbox.name for sandbox in seen if sandbox.alive]

    asyncio.run(lease_twice())
