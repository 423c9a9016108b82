"""The resident agent in standard-library Python, for processors that the C agent is not built for. The same protocol.

It runs as process 1 of its sandbox with nothing but the image's `python3`. Without system calls of its own it can
neither install a system call filter nor hide its memory: the engine's own profile is what protects the kernel then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import struct
import time

from command import Command  # type: ignore[import-not-found]
from transfers import Transfers  # type: ignore[import-not-found]
from wire import (  # type: ignore[import-not-found]
    CANCEL,
    CANCELLED,
    CREDIT,
    DATA,
    DONE,
    END,
    EXEC,
    KILL_ALL,
    PING,
    PONG,
    PROTOCOL_VERSION,
    READY,
    SIGNAL,
    WINDOW,
    Payload,
    Wire,
)

KILL_ALL_S = 5.0


def children_cpu_s() -> float:
    """Of all children that were waited for; `os.wait4` would need a module that a small Python lacks."""
    times = os.times()
    return times.children_user + times.children_system


class Agent:
    def __init__(self) -> None:
        self.wire = Wire()
        self.commands: dict[int, Command] = {}
        self.ignored: list[int] = []
        self.transfers = Transfers(self.wire)

    def dispatch_or_end(self, kind: int, channel: int, data: bytes) -> None:
        try:
            if not EXEC <= kind <= KILL_ALL or (kind == EXEC and channel in self.commands):
                raise ValueError("no request, or one for a channel that is in use")
            self.dispatch(kind, channel, data)
        except (struct.error, ValueError, OverflowError):
            os.write(2, b"roll-flash agent: the controller sent a malformed request\n")
            os._exit(1)

    def dispatch(self, kind: int, channel: int, data: bytes) -> None:
        payload = Payload(data)
        command = self.commands.get(channel)
        if kind == EXEC:
            self.commands[channel] = Command(self, channel, payload)
        elif kind == PING:
            self.wire.send(PONG, channel, struct.pack("<II", len(self.commands), len(self.wire.outbound)))
        elif kind == KILL_ALL:
            self.kill_all(channel)
        elif command is None:
            self.transfers.dispatch(kind, channel, payload)
        elif kind == DATA:
            command.pending += data
            command.write()
        elif kind == END:
            command.input_ends = True
            command.write()
        elif kind == CANCEL:
            command.ended |= CANCELLED
            command.kill_tree()
        elif kind == CREDIT:
            command.credit += payload.take("<I")
        elif kind == SIGNAL and command.status is None:
            with contextlib.suppress(OSError):
                os.killpg(command.pid, payload.take("<I"))

    def kill_all(self, channel: int) -> None:
        """Everything but this process, which is process 1, is dead when this answers."""
        give_up = time.monotonic() + KILL_ALL_S
        try:
            while os.getpid() == 1 and time.monotonic() < give_up:
                os.kill(-1, signal.SIGKILL)
                self.reap()
                time.sleep(0.001)
            self.wire.send_error(channel, errno.EBUSY if os.getpid() == 1 else errno.EPERM, "kill all")
        except ProcessLookupError:
            self.reap()
            self.wire.send(DONE, channel, struct.pack("<Q", 0))

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                before = children_cpu_s()
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                for command in self.commands.values():
                    if command.pid == pid and command.status is None:
                        command.exited(status, children_cpu_s() - before)

    def tick(self) -> None:
        now = time.monotonic()
        for command in self.commands.values():
            if command.pid and command.status is None:
                if command.deadline is not None and now >= command.deadline:
                    command.time_out()
                elif command.kill_at is not None and now >= command.kill_at:
                    command.kill_tree()
        self.commands = {channel: command for channel, command in self.commands.items() if not command.finish()}

    def wait_ms(self) -> int | None:
        if self.transfers.ready():
            return 0
        due = [at for c in self.commands.values() for at in (c.deadline, c.kill_at) if at is not None]
        return max(0, int((min(due) - time.monotonic()) * 1000) + 1) if due else None

    def poll(self, wakeup: int) -> set[int]:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        if self.wire.outbound:
            poll.register(1, select.POLLOUT)
        for command in self.commands.values():
            for fd in command.outputs:
                if fd >= 0 and command.may_read():
                    poll.register(fd, select.POLLIN)
            if command.input >= 0 and command.pending:
                poll.register(command.input, select.POLLOUT)
        for fd in self.ignored:
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(self.wait_ms())}

    def read_ignored(self, ready: set[int]) -> None:
        for fd in [fd for fd in self.ignored if fd in ready]:
            with contextlib.suppress(BlockingIOError):
                if not os.read(fd, WINDOW):
                    os.close(fd)
                    self.ignored.remove(fd)

    def run(self) -> None:
        woken, wakeup = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.wire.send(READY, 0, struct.pack("<II", PROTOCOL_VERSION, os.getpid()) + b"p")
        self.wire.flush()
        while True:
            ready = self.poll(woken)
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
            for command in self.commands.values():
                for i in (0, 1):
                    if command.outputs[i] in ready:
                        command.read(i)
                if command.input in ready:
                    command.write()
            self.read_ignored(ready)
            self.reap()
            if 0 in ready:
                for frame in self.wire.frames():
                    self.dispatch_or_end(*frame)
            self.tick()
            self.transfers.pump()
            self.wire.flush()


if __name__ == "__main__":
    os.umask(0o022)
    Agent().run()
