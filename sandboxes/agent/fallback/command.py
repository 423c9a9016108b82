"""One command: its processes, its pipes, and its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from wire import (  # type: ignore[import-not-found]
    BACKLOG_LIMIT,
    BUSY,
    CHUNK,
    ERR,
    EXEC_MERGE,
    EXEC_STDIN,
    EXIT,
    GRANT,
    MARK,
    NOT_STARTED,
    OUT,
    TIMED_OUT,
    WINDOW,
    Payload,
)

if TYPE_CHECKING:
    from __main__ import Agent


class Kept:
    """The first and the last bytes of one output, and how many there were."""

    def __init__(self, cap: int) -> None:
        self.first, self.last_size, self.total = cap // 2, cap - cap // 2, 0
        self.head, self.tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.first - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if len(self.tail) > self.last_size + WINDOW:
            del self.tail[: -self.last_size]

    def content(self) -> bytes:
        return bytes(self.head + self.tail[-self.last_size :])


def processes() -> dict[int, tuple[int, str]]:
    """Process id -> (parent, state)."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
                found[int(name)] = (int(fields[1]), fields[0])
    return found


class Command:
    def __init__(self, agent: Agent, channel: int, payload: Payload) -> None:
        self.agent, self.channel = agent, channel
        timeout_ms, self.grace_ms, self.cap, self.credit, flags, words, settings = (
            payload.take("<I") for _ in range(7)
        )
        directory = payload.text()
        argv = [payload.text() for _ in range(words)]
        variables = dict(payload.text().split("=", 1) for _ in range(settings))
        self.mark = f"{channel}-{time.monotonic_ns()}"
        self.started = time.monotonic()
        self.deadline = self.started + timeout_ms / 1000 if timeout_ms else None
        self.kill_at: float | None = None
        self.ended = self.pid = 0
        self.status: int | None = None
        self.cpu_s = 0.0
        self.kept = [Kept(self.cap or 2), Kept(self.cap or 2)]
        self.left: list[int | None] = [None, None]
        self.outputs, self.input, self.pending, self.input_ends = [-1, -1], -1, bytearray(), False
        self.start(flags, directory, argv, {**os.environ, **variables, MARK: self.mark})

    def start(self, flags: int, directory: str, argv: list[str], variables: dict[str, str]) -> None:
        child = [os.open("/dev/null", os.O_RDONLY), -1, -1]
        if flags & EXEC_STDIN:
            os.close(child[0])
            child[0], self.input = os.pipe()
        self.outputs[0], child[1] = os.pipe()
        if flags & EXEC_MERGE:
            child[2] = os.dup(child[1])
        else:
            self.outputs[1], child[2] = os.pipe()
        for fd in (self.input, *self.outputs):
            if fd >= 0:
                os.set_blocking(fd, False)
        told, tell = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                become(child, tell, directory, argv, variables)
        except OSError as error:
            os.write(tell, struct.pack("<i", error.errno) + os.fsencode(argv[0]))
        for fd in (*child, tell):
            os.close(fd)
        why = os.read(told, 4096)
        os.close(told)
        if why:
            self.not_started(struct.unpack_from("<i", why)[0], os.fsdecode(why[4:]))

    def not_started(self, number: int, what: str) -> None:
        if self.pid:
            os.waitpid(self.pid, 0)
        self.pid = 0
        self.ended |= NOT_STARTED | (BUSY if number == errno.EAGAIN else 0)
        text = os.fsencode(f"{what}: {os.strerror(number)}\n")
        self.kept[1].total = len(text)
        self.agent.wire.send(ERR, self.channel, text)
        self.send_exit(127 if number in (errno.ENOENT, errno.ENOTDIR) else 126, 0)
        self.close()

    def close(self) -> None:
        for fd in (self.input, *self.outputs):
            if fd >= 0:
                os.close(fd)
        self.input, self.outputs = -1, [-1, -1]

    def send_exit(self, code: int, number: int) -> None:
        took = int((time.monotonic() - self.started) * 1e6)
        totals = (self.kept[0].total, self.kept[1].total)
        frame = struct.pack("<IiIQQQQQ", self.ended, code, number, *totals, took, int(self.cpu_s * 1e6), 0)
        self.agent.wire.send(EXIT, self.channel, frame)

    def members(self) -> dict[int, str]:
        """Descendants of the first process, and whoever carries this command's mark in its environment."""
        everyone = processes()
        mark = f"{MARK}={self.mark}".encode()
        found = set() if self.status is not None else {self.pid}
        for pid in everyone:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if pid != os.getpid() and mark in file.read().split(b"\0"):
                    found.add(pid)
        grown = True
        while grown:
            more = {pid for pid, (parent, _) in everyone.items() if parent in found} - found
            found |= more
            grown = bool(more)
        return {pid: everyone[pid][1] for pid in found if pid in everyone}

    def freeze(self) -> None:
        for _ in range(50):
            running = [pid for pid, state in self.members().items() if state not in "TtZX"]
            if not running:
                return
            send_signal(running, signal.SIGSTOP)

    def kill_tree(self) -> None:
        self.freeze()
        send_signal([*self.members()], signal.SIGKILL)
        self.kill_at = None

    def time_out(self) -> None:
        self.ended |= TIMED_OUT
        self.deadline = None
        if not self.grace_ms:
            self.kill_tree()
            return
        self.freeze()
        send_signal([*self.members()], signal.SIGTERM)
        send_signal([*self.members()], signal.SIGCONT)
        self.kill_at = time.monotonic() + self.grace_ms / 1000

    def exited(self, status: int, cpu_s: float) -> None:
        self.status, self.cpu_s = status, cpu_s
        if self.kill_at is not None:
            self.kill_tree()
        for i in (0, 1):
            self.left[i] = 1 << 20 if self.outputs[i] >= 0 else 0

    def may_read(self) -> bool:
        return bool(self.cap) or (self.credit > 0 and len(self.agent.wire.outbound) < BACKLOG_LIMIT)

    def read(self, i: int) -> bool:
        """False when there is nothing more for now."""
        if self.outputs[i] < 0 or not self.may_read() or self.left[i] == 0:
            return False
        wanted = WINDOW if self.cap else min(self.credit, CHUNK)
        try:
            data = os.read(self.outputs[i], wanted if self.left[i] is None else min(wanted, self.left[i]))
        except BlockingIOError:
            self.left[i] = None if self.left[i] is None else 0
            return False
        if not data:
            os.close(self.outputs[i])
            self.outputs[i], self.left[i] = -1, 0
            return False
        if (left := self.left[i]) is not None:
            self.left[i] = left - len(data)
        if self.cap:
            self.kept[i].add(data)
        else:
            self.kept[i].total += len(data)
            self.credit -= len(data)
            self.agent.wire.send((OUT, ERR)[i], self.channel, data)
        return True

    def write(self) -> None:
        sent = 0
        try:
            while sent < len(self.pending):
                sent += os.write(self.input, self.pending[sent : sent + CHUNK])
        except BlockingIOError:
            pass  # the pipe is full: what is left goes when it can be written again
        except OSError:
            sent = len(self.pending)
            if self.input >= 0:
                os.close(self.input)
            self.input = -1
        if sent:
            del self.pending[:sent]
            self.agent.wire.send(GRANT, self.channel, struct.pack("<I", sent))
        if self.input_ends and not self.pending and self.input >= 0:
            os.close(self.input)
            self.input = -1

    def finish(self) -> bool:
        """True once the command has ended and its output is on its way."""
        if not self.pid:
            return True
        if self.status is None:
            return False
        for i in (0, 1):
            while self.read(i):
                pass
            if self.outputs[i] >= 0 and self.left[i]:
                return False
        if self.cap:
            for i in (0, 1):
                content = self.kept[i].content()
                for at in range(0, len(content), CHUNK):
                    self.agent.wire.send((OUT, ERR)[i], self.channel, content[at : at + CHUNK])
        number = os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0
        self.send_exit(128 + number if number else os.WEXITSTATUS(self.status), number)
        self.agent.ignored += [fd for fd in self.outputs if fd >= 0]
        self.outputs = [-1, -1]
        self.close()
        return True


def become(child: list[int], tell: int, directory: str, argv: list[str], variables: dict[str, str]) -> NoReturn:
    what = argv[0]
    try:
        os.setsid()
        for fd in (0, 1, 2):
            os.dup2(child[fd], fd)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        what = directory
        os.chdir(directory)
        what = argv[0]
        os.execvpe(argv[0], argv, variables)
    except OSError as error:
        os.write(tell, struct.pack("<i", error.errno) + os.fsencode(what))
    finally:
        os._exit(127)


def send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
