"""`Sandbox.forward`: one port of this machine inside a sandbox without network, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from abuse import within
from test_pool import until

from roll_flash.sandboxes import Sandbox, SandboxDied, SandboxSpec, SandboxStartError
from roll_flash.sandboxes.client.commands import CommandStream
from roll_flash.sandboxes.client.frames import Frame, Reply, Request, encode
from roll_flash.sandboxes.network.relay import Relay, RelayedConnection
from roll_flash.sandboxes.result import OutputChunk

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
INSIDE = 8099
LARGE = 20_000_000

CLIENT = """
import socket, sys
def connect(timeout=30):
    return socket.create_connection(("127.0.0.1", 8099), timeout)
def everything(connection):
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data
"""


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[int]:
    """A server on this machine's loopback; its port."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):  # some tests are about clients that go
            await serve(reader, writer)

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()


async def python(sandbox: Sandbox, code: str, timeout: float = 60.0) -> str:
    result = await sandbox.exec(["python3", "-c", CLIENT + code], timeout=timeout)
    return (result.stdout_text + result.stderr_text).strip()


def test_a_hundred_connections_at_a_time_get_their_own_bytes_back(provider: str) -> None:
    code = """
all = [connect() for _ in range(100)]
peer = all[0].getpeername()[1]
for number, one in enumerate(all):
    one.sendall(f"connection {number}".encode())
    one.shutdown(socket.SHUT_WR)
right = sum(everything(one) == f"connection {number}".encode() for number, one in enumerate(all))
print(peer, right)
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(echo) as port, sandbox.forward(INSIDE, port) as forward:
            assert await python(sandbox, code) == f"{INSIDE} 100"
            assert forward.accepted == 100

    within(provider, run)


def test_more_connections_than_a_relay_takes_wait_their_turn(provider: str) -> None:
    code = """
all = [connect() for _ in range(160)]
right = 0
for one in all:
    one.sendall(b"x")
    one.shutdown(socket.SHUT_WR)
    right += everything(one) == b"x"
    one.close()
print(right)
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(echo) as port, sandbox.forward(INSIDE, port):
            assert await python(sandbox, code) == "160"

    within(provider, run)


def test_much_data_goes_through_whole_in_both_directions_at_once(provider: str) -> None:
    code = f"""
import hashlib, threading
data = bytes(range(256)) * ({LARGE} // 256)
one = connect()
def send():
    one.sendall(data)
    one.shutdown(socket.SHUT_WR)
thread = threading.Thread(target=send)
thread.start()
back = hashlib.sha256(everything(one)).digest()
print(back == hashlib.sha256(data).digest())
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(echo) as port, sandbox.forward(INSIDE, port):
            assert await python(sandbox, code) == "True"

    within(provider, run, SandboxSpec(memory_mb=512))


def test_a_reader_that_sleeps_holds_up_nobody_and_fills_no_memory(provider: str) -> None:
    taken = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        if await reader.read(1) == b"q":
            writer.write(b"quick")
            return
        while taken < LARGE:
            writer.write(b"x" * 65536)
            await writer.drain()
            taken += 65536

    code = """
slow = connect()
slow.sendall(b"s")
for _ in range(20):
    quick = connect()
    quick.sendall(b"q")
    assert everything(quick) == b"quick"
print("served")
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(flood) as port, sandbox.forward(INSIDE, port) as forward:
            assert await python(sandbox, code) == "served"
            assert taken < LARGE  # what nobody reads is not taken from the server
            assert forward.accepted == 21

    within(provider, run)


def test_bytes_sent_one_by_one_come_in_few_frames_and_whole(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of one byte takes the controller as long as a full one: a sandbox could hold up all others."""
    frames = arrived = 0
    receive = RelayedConnection.receive

    async def counted(self: RelayedConnection, frame: Frame) -> None:
        nonlocal frames
        frames += 1
        await receive(self, frame)

    async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        while piece := await reader.read(1 << 16):
            arrived += len(piece)

    monkeypatch.setattr(RelayedConnection, "receive", counted)
    code = """
all = [connect() for _ in range(40)]
for one in all:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(1000):
    for one in all:
        one.send(b"x")
for one in all:
    one.shutdown(socket.SHUT_WR)
print(sum(len(everything(one)) for one in all))
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(sink) as port, sandbox.forward(INSIDE, port):
            began = time.monotonic()
            assert await python(sandbox, code) == "0"
            assert arrived == 40_000
            assert frames < 300 + 2_200 * (time.monotonic() - began)

    within(provider, run)


class FloodingStream:
    """Plays a relay that code inside has replaced: a frame of no use, again and again."""

    def __init__(self) -> None:
        self.frames = 0

    async def __aenter__(self) -> FloodingStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        yield OutputChunk("stdout", encode(Reply.READY, 0))
        flood = encode(Request.END, 7) * 100
        for _ in range(2000):
            self.frames += 100
            yield OutputChunk("stdout", flood)


def test_a_flood_of_frames_from_inside_takes_a_share_of_the_loop() -> None:
    async def run() -> None:
        async def serve(_: RelayedConnection) -> None:
            pytest.fail("there is no connection")

        flooding = FloodingStream()
        relay = Relay(lambda _: cast(CommandStream, flooding), INSIDE, serve, evict_after_s=1)
        began = time.monotonic()
        async with asyncio.timeout(10):
            await relay.start()
            await asyncio.sleep(0.5)
        await relay.close()
        assert 100 < flooding.frames < 200 + 64 / 0.015 * (time.monotonic() - began)

    asyncio.run(run())


def test_a_server_here_that_sleeps_holds_up_nobody(provider: str) -> None:
    done = asyncio.Event()

    async def lazy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(1) == b"q":
            writer.write(b"quick")
        else:
            await done.wait()

    code = """
slow = connect()
slow.setblocking(False)
slow.send(b"s")
for _ in range(2000):
    try:
        slow.send(b"x" * 65536)
    except BlockingIOError:
        break
quick = connect()
quick.sendall(b"q")
print(everything(quick).decode())
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(lazy) as port, sandbox.forward(INSIDE, port):
            try:
                assert await python(sandbox, code) == "quick"
            finally:
                done.set()

    within(provider, run)


def test_connections_to_a_server_that_reads_nothing_end_with_the_block(provider: str) -> None:
    code = """
for _ in range(3):
    one = connect(1)
    try:
        while True:
            one.sendall(b"x" * 65536)
    except TimeoutError:
        one.close()
"""
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts
        port = server.getsockname()[1]

        async def run(sandbox: Sandbox) -> None:
            async with sandbox.forward(INSIDE, port) as forward:
                assert await python(sandbox, code) == ""
                assert (forward.accepted, connections_to(port)) == (3, 3)
            await asyncio.sleep(0.1)
            assert connections_to(port) == 0

        within(provider, run)


def test_connections_of_a_relay_that_was_killed_end(provider: str) -> None:
    """Else each one that is killed would leave as many as it takes, until the worker has no descriptors."""
    code = """
import os, time
all = [connect() for _ in range(20)]
time.sleep(1)
os.kill(-1, 9)
"""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:  # the kernel accepts; nobody ever closes
        port = server.getsockname()[1]

        async def run(sandbox: Sandbox) -> None:
            async with sandbox.forward(INSIDE, port) as forward:
                await python(sandbox, code)
                assert forward.accepted == 20
                await until(lambda: connections_to(port) == 0, 20)

        within(provider, run)


def connections_to(port: int) -> int:
    """Number of connections of this machine to one of its ports that a process still holds."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2] == f"0100007F:{port:04X}" and row[9] != "0" for row in rows)


def test_each_side_sees_that_the_other_closed(provider: str) -> None:
    ended = asyncio.Event()

    async def goodbye(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1) == b"g":
            writer.write(b"goodbye" * 10_000)
            return
        assert await reader.read() == b""
        ended.set()

    code = """
one = connect()
one.sendall(b"g")
print(len(everything(one)))
connect().sendall(b"e")
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(goodbye) as port, sandbox.forward(INSIDE, port):
            assert await python(sandbox, code) == "70000"
            async with asyncio.timeout(20):
                await ended.wait()

    within(provider, run)


def test_nothing_else_of_this_machine_is_reached(provider: str) -> None:
    code = """
reached = []
for port in map(int, sys.argv[1:]):
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "172.17.0.1"):
        try:
            socket.create_connection((host, port), 2).close()
            reached.append((host, port))
        except OSError:
            pass
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
print(reached, devices)
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(echo) as port, serving(echo) as other, sandbox.forward(INSIDE, port):
            argv = ["python3", "-c", CLIENT + code, str(port), str(other)]
            assert (await sandbox.exec(argv, timeout=30)).stdout_text.strip() == "[] ['lo']"

    within(provider, run)


def test_the_port_is_gone_after_the_block_and_can_be_had_again(provider: str) -> None:
    code = "print(connect().connect_ex(('127.0.0.1', 8099)))"

    async def run(sandbox: Sandbox) -> None:
        async with serving(echo) as port:
            for _ in range(2):
                async with sandbox.forward(INSIDE, port):
                    assert "Refused" not in await python(sandbox, code)
                assert "ConnectionRefusedError" in await python(sandbox, code)

    within(provider, run)


def test_a_taken_port_is_named(provider: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        async with serving(echo) as port, sandbox.forward(INSIDE, port):
            with pytest.raises(SandboxStartError, match=f"port {INSIDE}.*[Aa]ddress"):
                async with sandbox.forward(INSIDE, port):
                    pytest.fail("the port cannot be had twice")
        with pytest.raises(ValueError, match="1024"):
            sandbox.forward(80, 1)

    within(provider, run)


def test_nobody_listening_here_closes_the_connection(provider: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, whatever a program tries."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]

    async def run(sandbox: Sandbox) -> None:
        async with sandbox.forward(INSIDE, free) as forward:
            assert await python(sandbox, "print({everything(connect()) for _ in range(20)})") == "{b''}"
            assert forward.refused == 20

    within(provider, run)
    assert [record.getMessage() for record in caplog.records if f"port {free} here" in record.getMessage()] == [
        f"a sandbox's port {INSIDE} leads to port {free} here: [Errno 111] Connect call failed ('127.0.0.1', {free})"
    ]


def test_it_comes_back_after_code_inside_has_killed_it(provider: str) -> None:
    code = """
import time
for _ in range(300):
    try:
        one = connect()
        one.sendall(b"again")
        one.shutdown(socket.SHUT_WR)
        if everything(one) == b"again":
            print("again")
            break
    except OSError:
        pass
    time.sleep(0.1)
"""

    async def run(sandbox: Sandbox) -> None:
        async with serving(echo) as port, sandbox.forward(INSIDE, port):
            assert await python(sandbox, code) == "again"
            await sandbox.exec("kill -9 -1")
            assert await python(sandbox, code) == "again"

    within(provider, run)


def test_a_sandbox_that_dies_closes_the_connections_of_its_server(provider: str) -> None:
    open_now, closed = asyncio.Event(), asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.set()
        await reader.read()
        closed.set()

    async def run(sandbox: Sandbox) -> None:
        async with serving(watch) as port, sandbox.forward(INSIDE, port):
            waiting = asyncio.ensure_future(python(sandbox, "everything(connect())"))
            async with asyncio.timeout(20):
                await open_now.wait()
                await sandbox.close()
                await closed.wait()
            with pytest.raises(SandboxDied):
                await waiting

    within(provider, run, must_live=False)
