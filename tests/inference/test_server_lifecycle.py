"""Servers start with a clear word or not at all, and nothing of them outlives their owner."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from roll_flash.config.tree import InferenceConfig
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.inference.open import open_engine
from roll_flash.inference.servers.control import Launcher
from roll_flash.inference.servers.process import ServerProcess
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.ports import MIN_PORT
from roll_flash.processes.ray.guard import RayGuard
from roll_flash.processes.supervise import GuardedProcess, descendants, semaphore_prefix, sweep_semaphores

TREE = """
import os, signal, subprocess, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
print(memory.name, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
OWNER = """
import os, sys, time
from pathlib import Path
from roll_flash.processes.supervise import GuardedProcess
folder = Path(sys.argv[1])
(folder / "scratch").mkdir()
command = [sys.executable, "-c", sys.argv[2]]
process = GuardedProcess(command, env=os.environ, log=folder / "log", scratch=folder / "scratch")
print(process.pid, flush=True)
time.sleep(600)
"""


def group_members(group: int) -> list[int]:
    return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _live_group(stat) == group]


def _live_group(stat: Path) -> int | None:
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[2]) if fields[0] not in "ZX" else None


def marked(marker: str) -> list[int]:
    """Processes with `marker` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def wait_until(condition: Callable[[], object], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("victim", ["owner", "stop"])
def test_nothing_outlives_its_owner(victim: str, tmp_path: Path) -> None:
    """Not a child that ignores SIGTERM, not one in a session of its own, not shared memory, not the scratch folder."""
    marker = f"ROLL_FLASH_TEST_{os.getpid()}_{victim}=1"
    name, _, value = marker.partition("=")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), TREE],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    guard = int(owner.stdout.readline())
    log = tmp_path / "log"
    assert wait_until(lambda: log.exists() and log.read_text().strip(), 20)
    memory = Path("/dev/shm") / log.read_text().split()[0]
    assert memory.exists()
    assert len(marked(marker)) >= 4
    if victim == "owner":
        owner.kill()
        owner.wait()
    else:
        os.kill(guard, signal.SIGTERM)
    gone = wait_until(lambda: set(marked(marker)) <= {owner.pid}, 15)
    owner.kill()
    owner.wait()
    assert gone
    assert not memory.exists()
    assert not (tmp_path / "scratch").exists()


def test_a_command_dies_with_its_guard(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    process = GuardedProcess(command, env=os.environ, log=tmp_path / "log")
    assert wait_until(lambda: "up" in (tmp_path / "log").read_text(), 20)
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not group_members(process.pid), 5)
    process.stop()
    process.stop()


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["guard", "guard and command"])
def test_what_a_killed_guard_left_in_shared_memory_is_removed(kill: Callable[[int, int], None], tmp_path: Path) -> None:
    makes_both = (
        "import time, multiprocessing as m; from multiprocessing.shared_memory import SharedMemory; "
        "from roll_flash.processes.supervise import claim_semaphores; claim_semaphores(); "
        "lock = m.get_context('spawn').Lock(); memory = SharedMemory(create=True, size=4096); "
        "print(memory.name, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    process = GuardedProcess([sys.executable, "-c", makes_both], env=os.environ, log=log)
    assert wait_until(log.read_text, 20)
    pattern, memory = f"sem.{semaphore_prefix(process.pid)}-*", Path("/dev/shm") / log.read_text().strip()
    try:
        assert list(Path("/dev/shm").glob(pattern))
        kill(process.pid, signal.SIGKILL)
        process.stop()
        assert not list(Path("/dev/shm").glob(pattern))
        assert kill is os.killpg or not memory.exists()  # Python's tracker, which removes it, is in the group
    finally:
        memory.unlink(missing_ok=True)


def test_processes_below_a_command_end_when_its_guard_and_its_owner_are_killed(tmp_path: Path) -> None:
    below = (
        "import time; from roll_flash.processes.supervise import claim_semaphores, end_with_guard; "
        "import multiprocessing as m; claim_semaphores(); end_with_guard(); "
        "lock = m.get_context('spawn').Lock(); print('up', flush=True); time.sleep(600)"
    )
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {below!r}])"
    marker = f"TEST_{uuid.uuid4().hex}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), command],
        stdout=subprocess.PIPE,
        env={**os.environ, marker: "1", "SPT_NOENV": "1"},
    )
    assert owner.stdout is not None
    guard = int(owner.stdout.readline())
    assert wait_until(lambda: "up" in (tmp_path / "log").read_text(), 20)
    for pid in (guard, owner.pid):
        os.kill(pid, signal.SIGKILL)
    owner.wait()
    assert wait_until(lambda: not marked(marker), 15)
    sweep_semaphores()
    assert not list(Path("/dev/shm").glob(f"sem.{semaphore_prefix(guard)}-*"))


def test_semaphores_of_guards_that_are_gone_are_swept_and_others_kept() -> None:
    """Guards of another process namespace cannot be seen: what is named after them is removed when it is old."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours, elsewhere = f"sem.{semaphore_prefix(gone.pid)}", f"sem.mp-roll-flash-{os.getpid()}-1"
    left, living, old, young = (
        Path("/dev/shm") / name
        for name in (f"{ours}-left", f"sem.{semaphore_prefix(os.getpid())}-x", f"{elsewhere}-old", f"{elsewhere}-young")
    )
    try:
        for path in (left, living, old, young):
            path.touch()
        os.utime(old, (0, 0))
        sweep_semaphores()
        assert [path.exists() for path in (left, living, old, young)] == [False, True, False, True]
    finally:
        for path in (left, living, old, young):
            path.unlink(missing_ok=True)


def test_a_process_anywhere_on_the_machine_whose_name_is_no_text_ends_no_server() -> None:
    """Code in a sandbox, or another user, may call one so."""
    named = "import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([255]), 0, 0, 0); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", named], stdout=subprocess.PIPE) as odd:
        assert odd.stdout is not None
        odd.stdout.readline()
        try:
            assert odd.pid in descendants()
        finally:
            odd.kill()


def test_links_of_another_user_among_the_semaphores_are_left_alone() -> None:
    ring = Path(f"/dev/shm/sem.{semaphore_prefix(os.getpid())}-ring")
    ring.symlink_to(ring.name)
    try:
        sweep_semaphores()
        assert ring.is_symlink()
    finally:
        ring.unlink()


def test_what_ray_had_only_just_started_ends_with_it(tmp_path: Path) -> None:
    """An agent that still imports has no file open; it would make the removed folder anew. Readers of a log are not
    Ray's."""
    program, session = tmp_path / "agent.py", f"{tmp_path}/rf-ray/session"
    program.write_text("import time; time.sleep(600)")
    guard = RayGuard(tmp_path / "rf-ray")
    agent = subprocess.Popen([sys.executable, str(program), f"--session-dir={session}"])
    reader = subprocess.Popen(["sh", "-c", "read line", "less", f"{session}/logs/agent.log"], stdin=subprocess.PIPE)
    try:
        guard.stop()
        assert agent.wait(10) == -signal.SIGKILL
        assert reader.poll() is None
    finally:
        for process in (agent, reader):
            process.kill()
            process.communicate()


def test_the_exit_status_of_a_command_is_told(tmp_path: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", "raise SystemExit(3)"], env=os.environ, log=tmp_path / "log")
    assert wait_until(lambda: process.returncode is not None, 20)
    assert process.returncode == 3
    process.stop()


def start_error(config: InferenceConfig, model_folder: Path, logs: Path) -> str:
    async def start() -> str:
        engine = open_engine(config, model_folder=model_folder, max_model_len=128, logs=logs)
        try:
            with pytest.raises(InferenceError) as caught:
                await engine.start()
            return str(caught.value)
        finally:
            await engine.close()

    return asyncio.run(start())


def test_a_busy_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = start_error(InferenceConfig(engine="transformers", port=port), resolve_model("tiny"), tmp_path)
    assert message.startswith(f"port {port} on 127.0.0.1 cannot be used: Address already in use; set inference.port")


ENDS = Launcher("ended", "float32", lambda index, host, port: [sys.executable, "-c", "raise SystemExit(3)"], {})


def test_a_server_that_is_started_again_waits_for_its_process_that_is_slow_to_die(tmp_path: Path) -> None:
    async def start_twice() -> None:
        server = ServerProcess(0, ENDS, InferenceConfig(), tmp_path, "key")
        with pytest.raises(InferenceError, match=r"did not start \(exit 3\)"):
            await server.start()
        left = socket.create_server(("127.0.0.1", server.port), reuse_port=True)
        asyncio.get_running_loop().call_later(0.5, left.close)
        with pytest.raises(InferenceError, match=r"did not start \(exit 3\)"):
            await server.start()
        await server.close()

    asyncio.run(start_twice())


def test_no_other_user_gets_the_port_of_a_server_and_its_key(tmp_path: Path) -> None:
    """All can read the port in the command line, seconds before the server listens there."""

    async def start() -> None:
        server = ServerProcess(0, ENDS, InferenceConfig(), tmp_path, "key")
        with pytest.raises(InferenceError, match=r"did not start \(exit 3\)"):
            await server.start()
        try:
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", server.port))
            if os.geteuid() == 0:
                os.seteuid(65534)
                try:
                    with pytest.raises(OSError, match="in use"):
                        socket.create_server(("127.0.0.1", server.port), reuse_port=True)
                finally:
                    os.seteuid(0)
        finally:
            await server.close()
        socket.create_server(("127.0.0.1", server.port)).close()

    asyncio.run(start())


def test_requests_share_a_connection_until_an_error_after_which_the_server_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Starlette does: it answers 500, and closes the connection a moment later without having said so. All go
    straight there, whatever proxies and certificates the environment names."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        fails = False
        async for line in reader:
            fails = fails or b"/fails" in line
            if line == b"\r\n":
                writer.write(f"HTTP/1.1 {500 if fails else 200} .\r\ncontent-length: 2\r\n\r\n{{}}".encode())
                if fails:
                    await asyncio.sleep(0.05)
                    break
        writer.close()

    async def ask() -> None:
        launcher = Launcher("none", "float32", lambda index, host, port: [], {})
        server = ServerProcess(0, launcher, InferenceConfig(), tmp_path, "key")
        async with await asyncio.start_server(serve, "127.0.0.1") as listening:
            server._reach(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            for _ in range(3):
                await server.get("/works")
            assert len(connections) == 1
            with pytest.raises(InferenceError, match="500"):
                await server.get("/fails")
            await server.get("/works")
            assert len(connections) == 2
            await server.close()

    asyncio.run(ask())


def test_no_connection_is_given_the_port_of_a_server_that_is_not_there_yet(tmp_path: Path) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    launcher = Launcher("none", "float32", lambda index, host, port: [], {})
    ports = [ServerProcess(index, launcher, InferenceConfig(), tmp_path, "key").port for index in range(20)]
    assert max(ports) < first or first <= MIN_PORT, "unless this machine gives every port to connections"


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_model_that_cannot_be_loaded_is_one_line_with_the_cause(engine: str, tmp_path: Path) -> None:
    shutil.copytree(resolve_model("tiny"), tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "no-such-architecture", "architectures": ["NoSuchModel"]}'
    )
    message = start_error(InferenceConfig(engine=engine), tmp_path / "model", tmp_path)
    assert "did not start (exit 1)" in message
    assert "no-such-architecture" in message
    assert str(tmp_path / f"{engine}-0.log") in message
    assert "\n" not in message


def test_a_server_that_takes_too_long_is_stopped_and_said(tmp_path: Path) -> None:
    config = InferenceConfig(engine="transformers", start_timeout_s=0.3)
    message = start_error(config, resolve_model("tiny"), tmp_path)
    assert "was not healthy after 0.3 s (inference.start_timeout_s)" in message
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_an_engine_that_nobody_registered_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no engine is named 'sglang'; known: transformers, vllm"):
        open_engine(InferenceConfig(engine="sglang"), model_folder=tmp_path, max_model_len=8, logs=tmp_path)
