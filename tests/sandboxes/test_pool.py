from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import pytest
from abuse import attack_program
from hypothesis import given
from hypothesis import strategies as st
from test_no_leaks import children_of, orphaned_sandboxes

from roll_flash.sandboxes import (
    Histogram,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxPool,
    SandboxSpec,
    SandboxStartError,
    SandboxUnavailable,
    SandboxUnreachable,
    list_sandboxes,
    providers,
)
from roll_flash.sandboxes.client import agent_sandbox, reset
from roll_flash.sandboxes.local.cgroup import Cgroup, can_limit, make_cgroup
from roll_flash.sandboxes.owner import Owner
from roll_flash.sandboxes.pool import sandbox_pool
from roll_flash.sandboxes.pool.warm import KEEP_S, WarmSandboxes
from roll_flash.sandboxes.protocol import Provider
from roll_flash.sandboxes.providers import connect_provider


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.02)


def test_a_lease_is_fresh_and_its_traces_are_gone(provider: str) -> None:
    async def leases() -> None:
        async with SandboxPool(provider=provider, size=2) as pool:
            await pool.start()
            async with pool.lease() as first:
                await first.write("/tmp/mine", b"x")
            async with pool.lease() as second:
                assert second.name != first.name
                assert (await second.exec("test -e /tmp/mine")).exit_code == 1
            await until(lambda: not first.alive)
            with pytest.raises(SandboxDied):
                await first.exec("true")

    asyncio.run(leases())


def test_a_lease_from_a_warm_pool_does_not_wait_for_a_start(provider: str) -> None:
    async def lease() -> None:
        async with SandboxPool(provider=provider, size=3) as pool:
            await pool.start()
            await until(lambda: pool.stats().ready == 3)
            warm = {sandbox.name for kept in pool._warm.values() for sandbox in kept.ready}
            for _ in range(3):
                async with pool.lease() as sandbox:
                    assert sandbox.name in warm
                    assert (await sandbox.exec("echo ok")).stdout == b"ok\n"
            assert pool.stats().wait_s.quantile(0.5) < 0.5

    asyncio.run(lease())


def test_more_leases_than_the_pool_holds_are_served(provider: str) -> None:
    async def one(pool: SandboxPool, index: int) -> int:
        async with pool.lease() as sandbox:
            return int((await sandbox.exec(f"echo {index}")).stdout)

    async def many() -> None:
        async with SandboxPool(provider=provider, size=2) as pool:
            assert await asyncio.gather(*(one(pool, index) for index in range(12))) == list(range(12))
            assert pool.stats().leases == 12
            assert pool.stats().leased == 0

    asyncio.run(many())


def test_a_lease_over_its_time_is_ended_and_counted(provider: str) -> None:
    async def overrun() -> None:
        async with SandboxPool(provider=provider, size=0) as pool, pool.lease(timeout=0.3) as sandbox:
            with pytest.raises(SandboxDied) as caught:
                await sandbox.exec("sleep 30")
            assert caught.value.reason == "lease"
            assert pool.stats().leases_expired == 1

    asyncio.run(overrun())


@pytest.mark.docker
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "on its way"])
def test_a_fresh_sandbox_ends_with_the_one_it_was_opened_through(provider: str, is_open: bool) -> None:
    async def close_the_pool() -> None:
        opened: list[Sandbox] = []

        async def use(pool: SandboxPool) -> None:
            async with pool.lease() as sandbox:
                began.set()
                async with sandbox.fresh() as fresh:
                    opened.append(fresh)
                    await fresh.exec("sleep 20", timeout=30)

        began = asyncio.Event()
        async with SandboxPool(provider=provider, size=0) as pool:
            using = asyncio.ensure_future(use(pool))
            await began.wait()
            await until(lambda: bool(opened) or not is_open)
            await pool.close()
            left = await asyncio.to_thread(list_sandboxes) if provider == "docker" else []
        assert [entry.name for entry in left if entry.owner == str(Owner.current())] == []
        assert not any(sandbox.alive for sandbox in opened)
        with pytest.raises(SandboxDied):
            await using

    asyncio.run(close_the_pool())


def test_what_an_environment_keeps_in_a_lease_is_closed_before_the_sandboxes(provider: str) -> None:
    class Service:
        was_alive = False

        def __init__(self, sandbox: Sandbox) -> None:
            self._sandbox = sandbox

        async def close(self) -> None:
            self.was_alive = self._sandbox.alive

    async def keep() -> Service:
        async with SandboxPool(provider=provider, size=0) as pool, pool.lease() as sandbox:
            pool.kept["service"].append(service := Service(sandbox))
            await pool.close()
        return service

    assert asyncio.run(keep()).was_alive


def test_a_spec_that_cannot_start_fails_its_lease_and_not_the_pool(docker: str) -> None:
    async def broken() -> None:
        async with SandboxPool(provider=docker, size=1) as pool:
            with pytest.raises(SandboxError, match="no-such-image"):
                async with pool.lease(SandboxSpec(image="no-such-image:none")):
                    pass
            async with pool.lease() as sandbox:
                assert (await sandbox.exec("true")).ok

    asyncio.run(broken())


def test_a_sandbox_that_dies_while_ready_is_never_handed_out(provider: str) -> None:
    async def die() -> None:
        async with SandboxPool(provider=provider, size=1) as pool:
            await pool.start()
            warm = next(iter(pool._warm.values()))
            dead = warm.ready[0]
            await dead.close()
            async with pool.lease() as sandbox:
                assert sandbox is not dead
                assert (await sandbox.exec("true")).ok
            assert pool.stats().died_while_ready == 1

    asyncio.run(die())


def test_a_cancelled_wait_gives_its_sandbox_to_the_next(provider: str) -> None:
    async def cancel() -> None:
        async with SandboxPool(provider=provider, size=0) as pool:
            await pool._connect(SandboxSpec())
            waiting = asyncio.ensure_future(pool._acquire(pool._warm_for(SandboxSpec())))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            async with pool.lease() as sandbox:
                assert (await sandbox.exec("true")).ok

    asyncio.run(cancel())


class FailingProvider:
    """Starts nothing."""

    name = "failing"
    isolation = "weak"

    def __init__(self) -> None:
        self.starts = 0

    async def connect(self) -> None:
        pass

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        self.starts += 1
        raise SandboxStartError("this provider starts nothing")

    async def sweep(self) -> int:
        return 0

    async def close(self) -> None:
        pass


def test_a_pool_whose_starts_fail_does_not_start_for_ever() -> None:
    async def fail() -> int:
        provider = FailingProvider()
        pool = SandboxPool(provider=provider, size=4)  # type: ignore[arg-type]
        with pytest.raises(SandboxStartError):
            await pool.start()
        await asyncio.sleep(0.2)
        await pool.close()
        return provider.starts

    assert asyncio.run(fail()) < 20


class AwayEngine:
    """An engine that cannot be reached for its first `starts` starts."""

    def __init__(self, engine: Provider, starts: float) -> None:
        self._engine = engine
        self._left = starts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def open(self, spec: SandboxSpec, **how: Any) -> Sandbox:
        self._left -= 1
        if self._left >= 0:
            raise SandboxUnreachable("no engine answers")
        return await self._engine.open(spec, **how)


def test_a_lease_waits_for_an_engine_that_is_restarted_and_not_for_ever(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_pool, "RETRY_S", 0.01)

    async def wait() -> None:
        engine = await connect_provider(provider)
        async with SandboxPool(provider=AwayEngine(engine, 5), size=0) as pool:  # type: ignore[arg-type]
            async with pool.lease() as sandbox:
                assert (await sandbox.exec("true")).ok
            assert pool.stats().start_failures == 0
        monkeypatch.setattr(sandbox_pool, "AWAY_S", 0.1)
        async with SandboxPool(provider=AwayEngine(engine, math.inf), size=0) as pool:  # type: ignore[arg-type]
            with pytest.raises(SandboxUnreachable, match="no engine answers"):
                async with pool.lease():
                    pass
        await engine.close()

    asyncio.run(wait())


def test_a_plug_in_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("cloud", "test_pool:FailingProvider", "roll_flash.sandboxes")
    monkeypatch.setattr(providers, "entry_points", lambda group, name=None: [point] if name in (None, "cloud") else [])
    assert providers.provider_names() == ["docker", "local", "cloud"]
    assert asyncio.run(connect_provider("cloud")).name == "failing"
    with pytest.raises(SandboxUnavailable, match="auto, docker, local, cloud"):
        asyncio.run(connect_provider("clod"))


def test_a_provider_of_the_callers_own_is_left_open(provider: str) -> None:
    async def shared() -> None:
        own: Provider = await connect_provider(provider)
        for _ in range(2):
            async with SandboxPool(provider=own, size=1) as pool, pool.lease() as sandbox:
                assert (await sandbox.exec("true")).ok
        await own.close()

    asyncio.run(shared())


def test_what_the_leases_used_is_counted(provider: str) -> None:
    async def use() -> None:
        async with SandboxPool(provider=provider, size=1) as pool:
            async with pool.lease() as sandbox:
                await sandbox.exec("true")
                await sandbox.exec("sleep 9", timeout=0.2)
                await sandbox.exec("seq 1000", max_output=10)
            await until(lambda: pool.stats().commands == 3)
            stats = pool.stats()
            assert (stats.leases, stats.timeouts, stats.truncations) == (1, 1, 1)
            assert stats.exec_s.count == 3
            assert 0.2 <= stats.exec_s.largest < 10
            assert stats.as_metrics()["wait_s.p50"] > 0
            if provider == "docker":
                assert stats.cpu_s > 0
                assert stats.cpu_of_lease_s.count == 1
                assert stats.peak_memory_mib.largest > 0

    asyncio.run(use())


def test_a_reused_sandbox_holds_nothing_of_the_lease_before(provider: str) -> None:
    async def reuse() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease() as first:
                await first.exec(
                    "(setsid sleep 900 &); mkdir -p /tmp/a/b; touch /tmp/a/b/c .hidden /dev/shm/x; chmod 0 /tmp/a"
                )
            await until(lambda: pool.stats().ready == 1)
            async with pool.lease() as second:
                assert second is first
                left = await second.exec("ls -A /sandbox /dev/shm /tmp | grep -v :; ls -d /proc/[0-9]* | wc -l")
                assert left.stdout.split() == [b"3"] or left.stdout.split() == [b"4"]
            assert pool.stats().reused >= 1

    asyncio.run(reuse())


def test_more_sandboxes_are_kept_warm_with_more_demand_and_none_without_any() -> None:
    warm = WarmSandboxes(SandboxSpec())
    assert warm.target(8) == 0
    for tick in range(100):
        warm.note_arrival(100 + tick * 0.1)
        warm.note_start(0.5)
    assert 7 <= warm.target(8) <= 9
    for tick in range(500):
        warm.note_arrival(110 + tick * 0.001)
    assert warm.target(8) == 32
    assert warm.surplus(8, now=110.5 + 11) == []
    assert warm.target(8) == 0
    warm.floor = 3
    assert warm.missing(8) == 3


def test_with_reuse_the_sandboxes_of_a_wave_are_kept_for_the_next_one() -> None:
    """Waves of a step came every 20 s, and each found the sandboxes of the last one closed."""

    async def waves() -> None:
        warm, sandbox = WarmSandboxes(SandboxSpec(), reuses=True), cast(Sandbox, object())
        warm.floor = 8
        assert warm.missing(8) == 8
        for _ in range(8):
            warm.add(sandbox)
        for wave in range(3):
            for _ in range(64):
                warm.note_arrival(100.0 + 60 * wave)
                if warm.ready:
                    warm.ready.popleft()
                else:
                    warm.request()
                    assert warm.missing(8) == len(warm.waiting)
                warm.out += 1
            assert len(warm.waiting) == (0 if wave else 56)
            while warm.waiting:
                warm.add(sandbox)
            assert warm.missing(8) == 0
            for _ in range(64):
                warm.out -= 1
                warm.add(sandbox)
            assert warm.surplus(8, now=130.0 + 60 * wave) == []
        assert len(warm.surplus(8, now=220.0 + KEEP_S + 1)) == 56

    asyncio.run(waves())


def test_a_spec_that_nobody_started_is_not_kept_with_reuse() -> None:
    """Each snapshot is one."""
    warm = WarmSandboxes(SandboxSpec(), reuses=True)
    warm.note_arrival(100.0)
    warm.out += 1
    assert not warm.idle
    warm.out -= 1
    warm.add(cast(Sandbox, object()))
    assert len(warm.surplus(8, now=111.0)) == 1
    assert warm.idle


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.floats(0, 1))
def test_a_histograms_quantile_is_near_the_true_one(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    true = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert true / 1.001 <= histogram.quantile(share) <= true * 2**0.5 * 1.001 or histogram.quantile(share) == max(
        values
    )
    assert histogram.count == len(values)


def test_a_start_that_is_given_up_when_its_process_exists_ends_in_time_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect_pipes = BaseSubprocessTransport._connect_pipes
    opening: asyncio.Future[Sandbox]

    async def cancel_first(transport: BaseSubprocessTransport, waiter: asyncio.Future[None]) -> None:
        opening.cancel()
        await asyncio.sleep(0.2)
        await connect_pipes(transport, waiter)

    async def give_up() -> None:
        nonlocal opening
        provider = await connect_provider("local")
        monkeypatch.setattr(BaseSubprocessTransport, "_connect_pipes", cancel_first)
        opening = asyncio.ensure_future(provider.open(SandboxSpec(), run="given-up", timeout_s=20))
        async with asyncio.timeout(60):
            await asyncio.gather(opening, return_exceptions=True)
        assert opening.cancelled()
        await provider.close()

    before = _agents()
    asyncio.run(give_up())
    end = time.monotonic() + 30
    while _agents() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert _agents() - before == set()


@pytest.mark.skipif(not can_limit(), reason="this user can make no control groups")
def test_a_start_that_is_given_up_while_its_control_groups_are_made_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Cgroup] = []
    begun = threading.Event()

    def slow(name: str, spec: SandboxSpec) -> Cgroup:
        begun.set()
        time.sleep(0.3)
        made.append(make_cgroup(name, spec))
        return made[0]

    async def give_up() -> None:
        provider = await connect_provider("local")
        monkeypatch.setattr("roll_flash.sandboxes.local.provider.make_cgroup", slow)
        opening = asyncio.ensure_future(provider.open(SandboxSpec(), run="given-up", timeout_s=20))
        await asyncio.to_thread(begun.wait, 20)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        assert opening.cancelled()
        await until(lambda: bool(made))
        await provider.close()

    asyncio.run(give_up())
    assert [folder for folder in made[0].folders if folder.exists()] == []


def _agents() -> set[int]:
    """Process ids of the agents below this process, and of those whose controller is gone."""
    mine = set()
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):  # gone since it was listed
            if b"/.roll-flash/agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                mine.add(pid)
    return mine | set(orphaned_sandboxes())


SPOIL = r"""
import os
for path in ("/sandbox", "/tmp"):
    os.utime(path, (1, 1))
    os.chmod(path, 0o2555)
"""
SEEN = r"""
import os
for path in ("/sandbox", "/tmp", "/dev/shm"):
    status = os.stat(path)
    print(path, oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime > 10**9)
"""


def test_a_reused_sandboxes_folders_have_their_modes_and_times(provider: str) -> None:
    async def reuse() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease(SandboxSpec(files={"input": "x"})) as first:
                new = await first.exec(["python3", "-c", SEEN])
                spoiled = await first.exec(["python3", "-c", SPOIL])
                assert spoiled.exit_code == 0, spoiled
                assert (await first.exec(["python3", "-c", SEEN])).stdout != new.stdout
            await until(lambda: pool.stats().ready == 1)
            async with pool.lease(SandboxSpec(files={"input": "x"})) as second:
                assert second is first
                assert (await second.exec(["python3", "-c", SEEN])).stdout == new.stdout
                assert (await second.stats()).commands == 1
            assert (pool.stats().reused, pool.stats().not_reused) == (1, 0)

    asyncio.run(reuse())


def test_a_sandbox_that_cannot_be_made_new_is_closed_and_counted(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a mode could not be put back."""
    monkeypatch.setattr(reset, "_restoring", lambda spec, folders: [])

    async def spoil() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease() as first:
                await first.exec("chmod 0700 /tmp")
            await until(lambda: pool.stats().not_reused == 1 and not first.alive)
            assert pool.stats().reused == 0

    asyncio.run(spoil())


def test_a_sandbox_that_others_may_soon_take_for_a_leftover_is_not_reused(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sandbox, "MAX_AGE_S", 0.0)

    async def lease() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease():
                pass
            await until(lambda: pool.stats().not_reused == 1)

    asyncio.run(lease())


def test_folders_that_their_owner_may_not_write_to_are_removed(provider: str) -> None:
    """Go's package folders are so; with reuse they are gone for the next lease."""

    async def make() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease() as first:
                assert (await first.exec("mkdir -p a/b c/d && touch a/b/f c/d/f && chmod 555 a a/b c c/d")).ok
                await first.remove("a")
                assert (await first.exec("echo *")).stdout == b"c\n"
            await until(lambda: pool.stats().reused == 1)

    asyncio.run(make())


CLOSED = """
import socket
server = socket.create_server(("127.0.0.1", 8765))
client = socket.create_connection(("127.0.0.1", 8765))
server.accept()[0].close()
client.close()
"""


def test_with_reuse_no_port_of_the_lease_before_is_still_taken(provider: str) -> None:
    async def reuse() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease() as first:
                assert (await first.exec(["python3", "-c", CLOSED])).ok
            await until(lambda: pool.stats().reused + pool.stats().not_reused == 1)
            async with pool.lease() as second:
                bind = "import socket; socket.socket().bind(('127.0.0.1', 8765))"
                assert (await second.exec(["python3", "-c", bind])).ok

    asyncio.run(reuse())


SLOW_ADDRESSES = """
import socket, struct, threading, time
server = socket.create_server(("0.0.0.0", 0), backlog=64)
port = server.getsockname()[1]

def connect(number):
    client = socket.create_connection((f"127.0.7.{number}", port))
    return client, server.accept()[0]

def answer_late(number):  # what is received is acknowledged 40 ms later
    client, accepted = connections[number]
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(30):
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        client.send(b"x")
        time.sleep(0.05)
        accepted.recv(1)

connections = {number: connect(number) for number in range(1, 9)}
threads = [threading.Thread(target=answer_late, args=(number,)) for number in connections]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
[each.close() for pair in connections.values() for each in pair]
del connections
time.sleep(0.2)
for first in (1, 11):  # connections of before, and none
    waits = []
    for number in range(first, first + 8):
        client, _ = connect(number)
        waits.append(struct.unpack_from("<8xI", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 16))[0])
    print(sum(waits) / len(waits))
"""


@pytest.mark.docker
def test_a_network_does_not_remember_how_slow_its_addresses_were(docker: str) -> None:
    """For an hour, in a table that is no file: the next lease read bits that the one before had written there."""

    async def measure() -> None:
        async with SandboxPool(provider=docker, size=0) as pool, pool.lease() as sandbox:
            known, unknown = (await sandbox.exec(["python3", "-c", SLOW_ADDRESSES])).stdout_text.split()
            assert float(known) < float(unknown) + 5000, "microseconds until something is sent again"

    asyncio.run(measure())


FAST_CONNECTIONS = """
import socket
FAST, SAVE_REQUESTS, SAVED_REQUEST = 0x20000000, 27, 28
server = socket.socket()
server.setsockopt(socket.IPPROTO_TCP, SAVE_REQUESTS, 1)
server.bind(("0.0.0.0", 0))
server.listen(8)
for _ in range(2):
    client = socket.socket()
    try:
        client.sendto(b"x", FAST, ("127.0.9.1", server.getsockname()[1]))
        print(server.accept()[0].getsockopt(socket.IPPROTO_TCP, SAVED_REQUEST, 256).hex())
    except OSError as error:
        print(error.errno)
"""
ASKED_AGAIN = "fe04f989"
"""The experimental option for cookies, which the kernel sends to an address that knew no other."""


def test_a_network_does_not_remember_what_its_addresses_knew_of_fast_connections(docker: str) -> None:
    """A bit for each address, in the same table."""

    async def look() -> None:
        async with SandboxPool(provider=docker, size=0) as pool, pool.lease() as sandbox:
            told = await sandbox.exec(["python3", "-c", FAST_CONNECTIONS])
            assert len(told.stdout_text.split()) == 2, told
            assert ASKED_AGAIN not in told.stdout_text

    asyncio.run(look())


SENT_TO_ITSELF = """
import socket
kept = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
kept.bind("\\0kept")
kept.connect("\\0kept")
port = socket.socket()
port.bind(("127.0.0.1", 8766))
file = open("/tmp/file", "wb")
file.write(bytes(40 << 20))
file.flush()
socket.send_fds(kept, [b"x"], [kept.fileno(), port.fileno(), file.fileno()])
"""
TAKE_AGAIN = """
import socket
socket.create_server(("127.0.0.1", 8766))
open("/tmp/file", "wb").write(bytes(40 << 20))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind("\\0kept")
"""


def test_with_reuse_a_socket_that_was_sent_to_itself_keeps_nothing_from_the_next_lease(provider: str) -> None:
    """No process holds it, nor what was sent with it."""

    async def reuse() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease() as first:
                assert (await first.exec(["python3", "-c", SENT_TO_ITSELF])).ok
            await until(lambda: pool.stats().reused + pool.stats().not_reused == 1)
            async with pool.lease() as second:
                assert (await second.exec(["python3", "-c", TAKE_AGAIN])).stderr_text == ""

    asyncio.run(reuse())


SHARED_MEMORY = "defined shmget(7, 4096, 01666) or die $!"  # 01000 is IPC_CREAT


def test_a_sandbox_with_shared_memory_left_is_not_used_again(provider: str) -> None:
    async def reuse() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease() as first:
                assert (await first.exec(["perl", "-e", SHARED_MEMORY])).ok
            await until(lambda: pool.stats().not_reused == 1 and not first.alive)

    asyncio.run(reuse())


def test_with_reuse_no_message_queue_of_the_lease_before_is_left(provider: str) -> None:
    async def lease(pool: SandboxPool, create: str) -> bytes:
        async with pool.lease() as sandbox:
            await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
            return (await sandbox.exec(["/tmp/attack", "queue", create])).stdout

    async def reuse() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            assert await lease(pool, "1") == b"0\n"
            await until(lambda: pool.stats().reused == 1)
            assert await lease(pool, "0") == b"No such file or directory\n"

    asyncio.run(reuse())


def test_a_sandbox_of_root_is_not_used_again(provider: str) -> None:
    async def reuse() -> None:
        async with SandboxPool(provider=provider, size=0, reuse=True) as pool:
            async with pool.lease(SandboxSpec(user="0:0")) as first:
                await first.exec("true")
            await until(lambda: pool.stats().not_reused == 1)

    asyncio.run(reuse())
