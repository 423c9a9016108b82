"""Run third-party scorers in separate processes, because an answer can make them use up the worker's memory or hold
the GIL, as `10**999999999` does, and no thread can be interrupted then.

One single-threaded server process serves all calls of this process. It forks for each, so imports are done only once.
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
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from roll_flash.errors import EnvError

MAX_SCORING_S = 3.0
"""Processor time in seconds per call. All worker threads (`rollout.worker_threads`) may use it at once; even on two
cores that must end within the step timeout, because a timeout gives no sample."""
WAIT_S = 40.0
"""Maximum wait in seconds for an answer; the machine may be busy. Less than the time-out of a reward or a step."""
OWN_S = 0.5
"""Processor time in seconds of a call that is not done after WAIT_S, from which on that is the answer's doing: the
scorer has had enough for any right answer."""
MEMORY_MB = 128
"""Extra memory in MB that a call may use above the forked process. All threads of a worker may use it at once."""
NICENESS = 10
"""Gives the worker's other episodes and the learner priority."""
MAX_MESSAGE_BYTES = 1 << 16
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
"""Environment variables passed on; others may hold the run's keys."""
_STARTED, _UNUSED = b"\n", b"-"
MIN_WAIT_S = 0.01
"""A socket that waits for 0 seconds does not wait at all, not even for what has come."""
LINGER_S = 3.0
"""Seconds that the server stays without users, because another episode usually follows."""
_starting = threading.Lock()
_server: tuple[subprocess.Popen[bytes], socket.socket, int] | None = None
_users: weakref.WeakSet[Any] = weakref.WeakSet()


class ScoringEndedError(Exception):
    """The scorer exceeded its time or memory limit, or raised an error on what a model wrote."""


def register_user(user: Any) -> None:
    """Register a user. The server process, once started, stays while it has users."""
    _users.add(user)


def unregister_user(user: Any) -> None:
    """Remove a user. May be called more than once."""
    with _starting:
        _users.discard(user)
        if not _users and _server is not None and _server[2] == os.getpid():
            with contextlib.suppress(OSError):  # the server has ended
                _server[1].send(_UNUSED)


def score_in_subprocess(work: Callable[[], Any], *, modules: Sequence[str] = (), seconds: float = MAX_SCORING_S) -> Any:
    """Return the result of `work`, as JSON data. `modules` are slow imports. Raises ScoringEndedError, EnvError."""
    request = cloudpickle.dumps((sys.path, seconds)) + cloudpickle.dumps(work)
    if not (said := _answer(request, modules)):  # it may just have ended, for example because it had no users
        _start_anew()
        said = _answer(request, modules)
    _, started, result = said.partition(_STARTED)
    if not started:
        raise EnvError("a scorer's process ended before it began")
    if not result:
        raise ScoringEndedError(f"it raised an error, or takes more than {seconds:g} s or {MEMORY_MB} MB")
    return json.loads(result)


def _answer(request: bytes, modules: Sequence[str]) -> bytes:
    """Return the number of the process that scores, _STARTED, and the result; empty if it ended before it began."""
    ours, theirs = socket.socketpair()
    said, ends_at = b"", time.monotonic() + WAIT_S
    with ours:
        ours.settimeout(WAIT_S)
        with theirs:
            _ask(theirs, modules)
        try:
            ours.sendall(request)
            ours.shutdown(socket.SHUT_WR)
            while len(said) < MAX_MESSAGE_BYTES and (piece := ours.recv(MAX_MESSAGE_BYTES)):
                said += piece
                ours.settimeout(max(MIN_WAIT_S, ends_at - time.monotonic()))
            return said
        except ConnectionError:
            return b""
        except TimeoutError:
            if (used_s := _processor_s(said)) >= OWN_S:
                raise ScoringEndedError(f"not done after {WAIT_S:g} s, {used_s:.1f} s of them on a processor") from None
            raise EnvError(f"a scorer was not done after {WAIT_S:g} s: is the machine too busy?") from None


def _processor_s(said: bytes) -> float:
    """Return the processor time of the process that scores, which has `said` its number; 0 if it is not known."""
    process, _, _ = said.partition(_STARTED)
    try:
        with open(f"/proc/{int(process)}/stat") as usage:
            of_program, of_kernel = usage.read().rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return 0.0
    return (int(of_program) + int(of_kernel)) / os.sysconf("SC_CLK_TCK")


def _ask(connection: socket.socket, modules: Sequence[str]) -> None:
    """Send `connection` to the server, which forks a process to serve it. Starts the server if none runs."""
    global _server
    with _starting:
        if _server is None or _server[0].poll() is not None or _server[2] != os.getpid():
            _server = _start()
        try:
            socket.send_fds(_server[1], [" ".join(["json", *modules]).encode()], [connection.fileno()])
        except OSError:  # the caller sees that no answer comes
            return


def _start_anew() -> None:
    """Forget the server, so that the next request starts a new one. The old server ends after its requests."""
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
    """Serve requests until the parent process ends, which closes its socket, or until no users are left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=0)
    while True:
        try:
            said, (*received,), _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, 1)
        except TimeoutError:
            return
        if not said:
            return
        requests.settimeout(LINGER_S if said == _UNUSED else None)
        for name in said.decode().split():
            with contextlib.suppress(ImportError):  # work that needs the module will raise the error
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
    warnings.simplefilter("ignore")  # warnings quote the model's text
    with connection.makefile("rb") as whole:
        request = io.BytesIO(whole.read())
    _end_with_asker(connection)
    sys.path[:], seconds = cloudpickle.load(request)
    work = cloudpickle.load(request)
    connection.sendall(str(os.getpid()).encode() + _STARTED)
    with open("/proc/self/statm") as usage:
        used = int(usage.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = used + (MEMORY_MB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.sendall(_run_limited(work, seconds))


def _end_with_asker(connection: socket.socket) -> None:
    """End this process when the caller's socket closes, even if the worker was killed: the kernel then sends SIGIO."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)


def _run_limited(work: Callable[[], Any], seconds: float) -> bytes:
    """Return the result; empty if it takes too much memory. A timer ends work that takes too long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return json.dumps(work()).encode()
    except MemoryError:
        return b""


if __name__ == "__main__":
    main()
