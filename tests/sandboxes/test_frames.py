"""The wire protocol: an honest agent is understood, whatever the pieces; the rest is refused, not believed."""

from __future__ import annotations

import asyncio
import socket
import stat
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_flash.sandboxes import ExecResult, SandboxDied, SandboxError, SandboxFileError, SandboxSpec, SandboxStartError
from roll_flash.sandboxes.client import commands, files
from roll_flash.sandboxes.client.commands import Command, CommandStream, run_command
from roll_flash.sandboxes.client.connection import AgentConnection, StreamProtocol
from roll_flash.sandboxes.client.frames import (
    HEADER,
    MAX_REPLY,
    Demultiplexer,
    ExitFlag,
    Frame,
    FrameDecoder,
    FrameError,
    Reply,
    encode,
    u32,
)
from roll_flash.sandboxes.files import trees
from roll_flash.sandboxes.files.tree_writer import TreeWriter

frames = st.lists(
    st.tuples(st.sampled_from(list(Reply)), st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=8
)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({0, len(data), *(point % (len(data) + 1) for point in cuts)})
    return [data[start:end] for start, end in pairwise(points)]


@given(frames, st.lists(st.integers(0, 10_000), max_size=20))
def test_frames_arrive_whole_however_the_bytes_are_cut(sent: list[tuple[Reply, int, bytes]], cuts: list[int]) -> None:
    decoder = FrameDecoder()
    data = b"".join(encode(*one) for one in sent)
    seen = [frame for piece in cut(data, cuts) for frame in decoder.feed(piece)]
    assert seen == [Frame(*one) for one in sent]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=300)), max_size=8), st.lists(st.integers(0, 9999))
)
def test_the_engines_stream_is_taken_apart_however_it_is_cut(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(bytes([stream, 0, 0, 0]) + len(body).to_bytes(4, "big") + body for stream, body in sent)
    seen = {1: b"", 2: b""}
    demultiplexer = Demultiplexer()
    for piece in cut(data, cuts):
        for stream, body in demultiplexer.feed(piece):
            seen[stream] += bytes(body)
    assert seen == {stream: b"".join(body for which, body in sent if which == stream) for stream in (1, 2)}


def test_a_frame_over_the_limit_is_refused_before_it_is_stored() -> None:
    with pytest.raises(FrameError):
        list(FrameDecoder().feed(HEADER.pack(Reply.OUT, 1, MAX_REPLY + 1)))


class SilentTransport(asyncio.WriteTransport):
    """Takes everything and answers nothing: the test plays the agent."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


async def with_hostile_agent(replies: bytes) -> tuple[AgentConnection, SandboxError | None]:
    connection = AgentConnection("hostile")
    connection.opened(SilentTransport())
    connection.receive(encode(Reply.READY, 0, u32(1)))
    running = asyncio.ensure_future(run_command(connection, SandboxSpec(), Command("x", 30, max_output=100), None))
    await asyncio.sleep(0)
    for piece in cut(replies, [7, 100, 333]):
        connection.receive(piece)
    if connection.error is None:
        running.cancel()
    await asyncio.wait({running})
    return connection, connection.error


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=600) | frames.map(lambda sent: b"".join(encode(*one) for one in sent)))
def test_garbage_from_inside_is_an_error_of_that_sandbox_and_nothing_else(replies: bytes) -> None:
    _, error = asyncio.run(with_hostile_agent(replies))
    assert error is None or (isinstance(error, SandboxDied) and error.reason == "protocol")


@pytest.mark.parametrize(
    "replies",
    [
        pytest.param(encode(Reply.OUT, 1, b"x" * 1300), id="more output than the cap"),
        pytest.param(encode(Reply.OUT, 1), id="a piece of output that holds nothing"),
        pytest.param(encode(Reply.ERR, 1), id="a piece of errors that holds nothing"),
        pytest.param(encode(Reply.OUT, 2, b"x"), id="a channel that nobody opened"),
        pytest.param(encode(Reply.GRANT, 1, u32(1)), id="a grant for what was never sent"),
        pytest.param(encode(Reply.GRANT, 1, u32(0)), id="a grant of nothing"),
        pytest.param(encode(Reply.EXIT, 1, b"short"), id="a short exit"),
        pytest.param(encode(Reply.DONE, 1), id="a file's answer to a command"),
        pytest.param(encode(Reply.READY, 0, u32(1)), id="a second greeting"),
        pytest.param(b"\xff" * 64, id="no frame at all"),
    ],
)
def test_an_agent_that_breaks_the_protocol_is_given_up(replies: bytes) -> None:
    _, error = asyncio.run(with_hostile_agent(replies))
    assert isinstance(error, SandboxDied)
    assert error.reason == "protocol"


class PlayedAgent(SilentTransport):
    """Answers the first request with what it is given, and nothing afterwards."""

    def __init__(self, replies: Callable[[int], Iterator[bytes]]) -> None:
        super().__init__()
        self._replies = replies
        self.connection = AgentConnection("played")
        self.connection.opened(self)
        self.connection.receive(encode(Reply.READY, 0, u32(1)))

    def write(self, data: Any) -> None:
        _, channel, _ = HEADER.unpack_from(data)
        replies, self._replies = self._replies, lambda _: iter(())
        for reply in replies(channel):
            asyncio.get_running_loop().call_soon(self.connection.receive, reply)


def entry(mode: int, path: bytes, target: bytes = b"", size: int = 0) -> bytes:
    return struct.pack("<IQ", mode, size) + u32(len(path)) + path + u32(len(target)) + target


def test_a_file_that_never_ends_is_given_up_at_its_limit() -> None:
    async def read() -> None:
        agent = PlayedAgent(lambda channel: repeat(encode(Reply.OUT, channel, b"x" * 1000), 200))
        with pytest.raises(SandboxDied, match="more than was granted"):
            await files.read_file(agent.connection, "/file", 100_000)

    asyncio.run(read())


@pytest.mark.parametrize("given_up", [False, True])
def test_an_agent_that_sends_single_bytes_without_end_is_read_at_leisure(given_up: bool) -> None:
    """Also the answer to a command that was given up: nothing else limits that."""

    async def frames_taken() -> int:
        ours, agent = socket.socketpair()
        connection = AgentConnection("flood")
        await asyncio.get_running_loop().create_connection(lambda: StreamProtocol(connection), sock=ours)
        agent.sendall(encode(Reply.READY, 0, u32(1)))
        await connection.ready(10)
        stream = CommandStream(connection, SandboxSpec(), Command("x", None), lambda result: None)
        await stream.__aenter__()
        if given_up:
            await stream.__aexit__()
        sent: list[int] = []
        frame = encode(Reply.ENTRY if given_up else Reply.OUT, 1, b"x")
        flood = threading.Thread(target=send_without_end, args=(agent, frame, sent))
        flood.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await (asyncio.sleep(9) if given_up else stream.wait())
        assert connection.error is None
        connection.lost(SandboxDied("the test has ended", "closed"))
        await asyncio.to_thread(flood.join)
        agent.close()
        return sum(sent)

    assert asyncio.run(frames_taken()) < 110_000


def send_without_end(agent: socket.socket, frame: bytes, sent: list[int]) -> None:
    with suppress(OSError):
        while True:
            agent.sendall(frame * 1000)
            sent.append(1000)


def test_a_file_of_empty_pieces_is_given_up() -> None:
    async def read() -> None:
        agent = PlayedAgent(lambda channel: repeat(encode(Reply.OUT, channel), 10))
        with pytest.raises(SandboxDied, match="holds nothing"):
            await files.read_file(agent.connection, "/file", 100_000)

    asyncio.run(read())


def test_a_listing_of_endless_names_is_given_up() -> None:
    async def listing() -> None:
        one = entry(stat.S_IFREG, b"x" * 100_000)
        agent = PlayedAgent(lambda channel: repeat(encode(Reply.ENTRY, channel, one), 1000))
        with pytest.raises(SandboxDied, match="more entries"):
            await files.list_tree(agent.connection, "/", 20_000)

    asyncio.run(listing())


def test_output_in_single_bytes_takes_little_more_memory_than_its_size() -> None:
    async def command() -> int:
        connection = AgentConnection("bytes")
        connection.opened(SilentTransport())
        connection.receive(encode(Reply.READY, 0, u32(1)))
        running = asyncio.ensure_future(
            run_command(connection, SandboxSpec(), Command("x", 30, max_output=1 << 17), None)
        )
        await asyncio.sleep(0)
        tracemalloc.start()
        for _ in range(1 << 12):
            connection.receive(encode(Reply.OUT, 1, b"x"))
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        running.cancel()
        await asyncio.wait({running})
        return used

    assert asyncio.run(command()) < 1 << 16


LISTINGS: dict[str, list[bytes]] = {
    "a file below a link": [entry(stat.S_IFLNK, b"a", b"."), entry(stat.S_IFREG, b"a/x")],
    "a link below a link": [entry(stat.S_IFLNK, b"a", b"../.."), entry(stat.S_IFLNK, b"a/x", b"y")],
    "a link that is a folder too": [
        entry(stat.S_IFLNK, b"a", b"b"),
        entry(stat.S_IFDIR, b"a"),
        entry(stat.S_IFLNK, b"a/x"),
    ],
    "a folder that is not listed": [entry(stat.S_IFREG, b"a/" * 1000 + b"x")],
    "names that lead up": [
        entry(stat.S_IFDIR, b".."),
        entry(stat.S_IFLNK, b"../x", b"y"),
        entry(stat.S_IFDIR, b"a/.."),
    ],
    "odd names": [
        entry(stat.S_IFDIR, name) for name in (b"", b"/", b".", b"a/", b"/tmp", b"a//b", b"a\0b", b"x" * 256)
    ],
    "odd links": [entry(stat.S_IFLNK, b"%d" % i, to) for i, to in enumerate((b"", b"/", b"a\0b", b"..", b"a/../.."))],
    "a loop": [entry(stat.S_IFLNK, b"a", b"b/x"), entry(stat.S_IFLNK, b"b", b"a/x")],
    "long links": [entry(stat.S_IFLNK, b"a", b"./" * 2100), entry(stat.S_IFLNK, b"b", b"./" * 600 + b"x/y")],
}


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_that_lies_puts_nothing_but_its_plain_members_down(listing: str, tmp_path: Path) -> None:
    members = LISTINGS[listing]

    async def fetch() -> trees.TreeReport:
        def answer(channel: int) -> Iterator[bytes]:
            yield from (encode(Reply.ENTRY, channel, member) for member in members)
            yield encode(Reply.DONE, channel)

        agent = PlayedAgent(answer)
        return await trees.get_tree(agent.connection, "/", tmp_path / "out", max_bytes=1 << 20, max_entries=100)

    report = asyncio.run(fetch())
    kept = list((tmp_path / "out").rglob("*"))
    assert len(kept) + len(report.left_out) == len(members)
    assert all((tmp_path / "out") in (path.resolve(), *path.resolve().parents) for path in kept)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_this_machine_that_becomes_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with TreeWriter(tmp_path / "out") as writer:
        writer.make_folders(["a", "a/b"])
        (tmp_path / "out/a/b").rmdir()
        (tmp_path / "out/a/b").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "out/a/file").symlink_to(tmp_path / "elsewhere/file")
        for write in (
            lambda: writer.write_file("a/b/x", b"x", 0o644),
            lambda: writer.write_file("a/file", b"x", 0o644),
            lambda: writer.make_links([("a/b/x", "y")]),
            lambda: writer.make_folders(["a/b/x"]),
            lambda: writer.write_file("a/b", b"x", 0o644),
        ):
            with pytest.raises(SandboxFileError, match="cannot be written"):
                write()
    with pytest.raises(SandboxFileError, match="given up"):
        writer.write_file("late", b"x", 0o644)
    assert list((tmp_path / "elsewhere").iterdir()) == []


class BusyTransport(SilentTransport):
    """Answers each command with "not started for want of a process"."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.connection: AgentConnection

    def write(self, data: Any) -> None:
        _, channel, _ = HEADER.unpack_from(data)
        self.asked += 1
        end = struct.pack("<IiIQQQQQ", ExitFlag.NOT_STARTED | ExitFlag.BUSY, 126, 0, 0, 0, 0, 0, 0)
        asyncio.get_running_loop().call_soon(self.connection.receive, encode(Reply.EXIT, channel, end))


def test_an_agent_that_always_says_busy_is_asked_again_for_so_long_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PROCESS_WAIT_S", 0.2)

    async def ask() -> tuple[ExecResult, int]:
        transport = BusyTransport()
        connection = transport.connection = AgentConnection("busy")
        connection.opened(transport)
        connection.receive(encode(Reply.READY, 0, u32(1)))
        return await run_command(connection, SandboxSpec(), Command("x", 30, max_output=100), None), transport.asked

    result, asked = asyncio.run(ask())
    assert result.exit_code == 126
    assert 2 <= asked <= 11


def test_an_agent_of_another_version_is_refused() -> None:
    async def start() -> None:
        connection = AgentConnection("other")
        connection.opened(SilentTransport())
        connection.receive(encode(Reply.READY, 0, u32(99)))
        await connection.ready(1.0)

    with pytest.raises(SandboxError, match="protocol 99"):
        asyncio.run(start())


def test_an_agent_that_never_greets_is_a_start_error() -> None:
    async def start() -> None:
        connection = AgentConnection("silent")
        connection.opened(SilentTransport())
        await connection.ready(0.05)

    with pytest.raises(SandboxStartError, match="did not answer"):
        asyncio.run(start())
