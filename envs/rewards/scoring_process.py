"""Others' scorers run in processes of their own: what an answer makes them do must not take the worker's memory, nor
hold its interpreter's lock, as `10**999999999` does, which no thread can be kept from.

One process without threads is there for all calls of this one. It forks for each, so that what they import is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from roll_flash.errors import EnvError

MOST_SCORING_S = 3.0
"""Of processor time. All threads of a worker (`rollout.worker_threads`) may take it at once; on two cores too that must
end within a step's time, as what is given up is no sample."""
WAIT_S = 60.0
"""For a machine that is busy."""
MEMORY_MB = 128
"""More than the process had before. As many may take it at once as a worker has threads."""
NICENESS = 10
"""The worker's other episodes and the learner go first."""
MOST_SAID_BYTES = 1 << 16
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
"""Of the environment; keys of a run may be in it."""
_BEGUN, _UNUSED = b"\n", b"-"
LINGER_S = 3.0
"""Without users: most episodes are followed by another one."""
_starting = threading.Lock()
_server: tuple[subprocess.Popen[bytes], socket.socket, int] | None = None
_users: weakref.WeakSet[Any] = weakref.WeakSet()


class ScoringEndedError(Exception):
    """The scorer took more time or memory than it may."""


def join(user: Any) -> None:
    """The process that forks, once it is there, stays while it has users."""
    _users.add(user)


def leave(user: Any) -> None:
    """May be called more than once."""
    with _starting:
        _users.discard(user)
        if not _users and _server is not None and _server[2] == os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                _server[1].send(_UNUSED)


def score_apart(work: Callable[[], Any], *, modules: Sequence[str] = (), seconds: float = MOST_SCORING_S) -> Any:
    """What `work` returns, which is JSON. `modules` take long to import. Raises ScoringEndedError, EnvError."""
    request = cloudpickle.dumps((sys.path, seconds)) + cloudpickle.dumps(work)
    if not (said := _answer(request, modules)):  # it may just have ended, as for want of users
        _start_anew()
        said = _answer(request, modules)
    if not said.startswith(_BEGUN):
        raise EnvError("a scorer's process ended before it began")
    if said == _BEGUN:
        raise ScoringEndedError(f"it takes more than {seconds:g} s or {MEMORY_MB} MB")
    return json.loads(said)


def _answer(request: bytes, modules: Sequence[str]) -> bytes:
    """Nothing of a process that ended before it began."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(WAIT_S)
        with theirs:
            _ask(theirs, modules)
        try:
            ours.sendall(request)
            ours.shutdown(socket.SHUT_WR)
            return _read(ours)
        except ConnectionError:
            return b""
        except TimeoutError:
            raise EnvError(f"a scorer was not done after {WAIT_S:g} s: is the machine too busy?") from None


def _read(connection: socket.socket) -> bytes:
    said = b""
    while len(said) < MOST_SAID_BYTES and (piece := connection.recv(MOST_SAID_BYTES)):
        said += piece
    return said


def _ask(connection: socket.socket, modules: Sequence[str]) -> None:
    """Have a process forked that serves `connection`; one that waits for that is started if there is none."""
    global _server
    with _starting:
        if _server is None or _server[0].poll() is not None or _server[2] != os.getpid():
            _server = _start()
        try:
            socket.send_fds(_server[1], [" ".join(["json", *modules]).encode()], [connection.fileno()])
        except OSError:  # whoever waits for an answer sees that there is none
            return


def _start_anew() -> None:
    """Whoever asks next asks another process. The last one ends with its requests."""
    global _server
    with _starting:
        _server = None


def _start() -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(WAIT_S)
    few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | few
    with theirs:
        command = [sys.executable, "-m", "roll_flash.envs.rewards.scoring_process"]
        process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)
    return process, ours, os.getpid()


def main() -> None:
    """Ends with the process that started it, whose end of the connection is then closed, and for want of users."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=0)
    while True:
        try:
            said, (*received,), _, _ = socket.recv_fds(requests, MOST_SAID_BYTES, 1)
        except TimeoutError:
            return
        if not said:
            return
        requests.settimeout(LINGER_S if said == _UNUSED else None)
        for name in said.decode().split():
            with contextlib.suppress(ImportError):  # who needs it will say so
                importlib.import_module(name)
        for number in received:
            if os.fork() == 0:
                requests.close()
                _serve(socket.socket(fileno=number))
                os._exit(0)
            os.close(number)


def _serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # they quote what a model wrote
    with connection.makefile("rb") as whole:
        request = io.BytesIO(whole.read())
    _end_with_asker(connection)
    sys.path[:], seconds = cloudpickle.load(request)
    work = cloudpickle.load(request)
    connection.sendall(_BEGUN)
    with open("/proc/self/statm") as usage:
        used = int(usage.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (used + (MEMORY_MB << 20),) * 2)
    connection.sendall(_within(work, seconds))


def _end_with_asker(connection: socket.socket) -> None:
    """When nobody waits any more, be it that a worker was killed: the kernel then sends SIGIO."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)


def _within(work: Callable[[], Any], seconds: float) -> bytes:
    """Nothing for what takes too much memory. A timer ends what takes too long, whatever it is about."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return json.dumps(work()).encode()
    except MemoryError:
        return b""


if __name__ == "__main__":
    main()
