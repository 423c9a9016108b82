"""Files and trees of the sandbox, as its user."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Callable

from wire import (  # type: ignore[import-not-found]
    BACKLOG_LIMIT,
    CANCEL,
    CHUNK,
    CREDIT,
    DATA,
    DEEPEST,
    DONE,
    END,
    ENTRY,
    GRANT,
    LIST,
    MKDIR,
    OUT,
    READ,
    REMOVE,
    SYMLINK,
    WRITE,
    Payload,
    Wire,
)


class Transfers:
    """Files: regular ones only; a write appears at once or not at all."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.reads: dict[int, tuple[int, int, int, int, str]] = {}
        self.writes: dict[int, tuple[int, str, str, int]] = {}

    def dispatch(self, kind: int, channel: int, payload: Payload) -> None:
        action: dict[int, Callable[[int, Payload], None]] = {
            READ: self.read,
            WRITE: self.write,
            LIST: self.list,
            MKDIR: self.mkdir,
            SYMLINK: self.symlink,
        }
        action |= {REMOVE: self.remove, DATA: self.data, END: self.end, CANCEL: self.cancel, CREDIT: self.credit}
        try:
            if kind in action:
                action[kind](channel, payload)
        except OSError as error:
            self.drop(channel)
            self.wire.send_error(channel, error.errno or errno.EIO, error.filename or "")

    def ready(self) -> bool:
        return len(self.wire.outbound) < BACKLOG_LIMIT and any(read[1] > 0 for read in self.reads.values())

    def pump(self) -> None:
        for channel, read in [*self.reads.items()]:
            fd, credit, left, moved, path = read
            if credit <= 0 or len(self.wire.outbound) > BACKLOG_LIMIT:
                continue
            try:
                data = os.read(fd, min(credit, CHUNK))
                if len(data) > left:
                    raise OSError(errno.EFBIG, "", path)
            except OSError as error:
                self.drop(channel)
                self.wire.send_error(channel, error.errno or errno.EIO, path)
                continue
            if not data:
                self.drop(channel)
                self.wire.send(DONE, channel, struct.pack("<Q", moved))
                continue
            self.reads[channel] = (fd, credit - len(data), left - len(data), moved + len(data), path)
            self.wire.send(OUT, channel, data)

    def drop(self, channel: int) -> None:
        if channel in self.reads:
            os.close(self.reads.pop(channel)[0])
        if channel in self.writes:
            fd, temporary, _, _ = self.writes.pop(channel)
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def read(self, channel: int, payload: Payload) -> None:
        window, limit, path = payload.take("<I"), payload.take("<Q"), payload.text()
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        mode = os.fstat(fd).st_mode
        kernel = os.path.realpath(f"/proc/self/fd/{fd}").startswith("/proc/")
        if not stat.S_ISREG(mode) or kernel:
            os.close(fd)
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "", path)
        self.reads[channel] = (fd, window, limit, 0, path)

    def write(self, channel: int, payload: Payload) -> None:
        mode, path = payload.take("<I"), payload.text()
        if os.path.lexists(path) and not os.path.islink(path) and not os.path.isfile(path):
            raise OSError(errno.EISDIR if os.path.isdir(path) else errno.EINVAL, "", path)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        temporary = os.path.join(os.path.dirname(path), f".roll-flash-{channel}~")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self.writes[channel] = (fd, temporary, path, 0)
        os.fchmod(fd, mode & 0o777)

    def data(self, channel: int, payload: Payload) -> None:
        if channel not in self.writes:
            return
        fd, temporary, path, moved = self.writes[channel]
        view = memoryview(payload.data)
        while view:
            view = view[os.write(fd, view) :]
        self.writes[channel] = (fd, temporary, path, moved + len(payload.data))
        self.wire.send(GRANT, channel, struct.pack("<I", len(payload.data)))

    def end(self, channel: int, payload: Payload) -> None:
        if channel in self.writes:
            _, temporary, path, moved = self.writes[channel]
            os.rename(temporary, path)
            self.drop(channel)
            self.wire.send(DONE, channel, struct.pack("<Q", moved))

    def cancel(self, channel: int, payload: Payload) -> None:
        if channel in self.reads or channel in self.writes:
            raise OSError(errno.ECANCELED, "", "cancelled")

    def credit(self, channel: int, payload: Payload) -> None:
        if channel in self.reads:
            fd, credit, left, moved, path = self.reads[channel]
            self.reads[channel] = (fd, credit + payload.take("<I"), left, moved, path)

    def mkdir(self, channel: int, payload: Payload) -> None:
        mode, path = payload.take("<I"), payload.text()
        os.makedirs(path, mode & 0o777, exist_ok=True)
        self.wire.send(DONE, channel, bytes(8))

    def symlink(self, channel: int, payload: Payload) -> None:
        target, path = payload.text(), payload.text()
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        os.symlink(target, path)
        self.wire.send(DONE, channel, bytes(8))

    def list(self, channel: int, payload: Payload) -> None:
        limit, root = payload.take("<Q"), payload.text()
        count = 0
        todo = [(root, "", 0)]
        while todo:
            folder, prefix, depth = todo.pop()
            for entry in os.scandir(folder):
                status, name = entry.stat(follow_symlinks=False), prefix + entry.name
                target = os.readlink(entry.path) if entry.is_symlink() else ""
                count += 1
                if count > limit or depth > DEEPEST:
                    raise OSError(errno.E2BIG, "", root)
                frame = struct.pack("<IQq", status.st_mode, status.st_size, int(status.st_mtime))
                for text in (os.fsencode(name), os.fsencode(target)):
                    frame += struct.pack("<I", len(text)) + text
                self.wire.send(ENTRY, channel, frame)
                if entry.is_dir(follow_symlinks=False):
                    todo.append((entry.path, name + "/", depth + 1))
        self.wire.send(DONE, channel, struct.pack("<Q", count))

    def remove(self, channel: int, payload: Payload) -> None:
        path = payload.text()
        if path.endswith("/"):
            for entry in os.scandir(path):
                remove_tree(entry.path)
        elif os.path.lexists(path):
            remove_tree(path)
        self.wire.send(DONE, channel, bytes(8))


def remove_tree(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for entry in os.scandir(path):
            remove_tree(entry.path)
        os.rmdir(path)
    else:
        os.unlink(path)
