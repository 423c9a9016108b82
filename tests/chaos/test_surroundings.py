"""What the campaign breaks is broken while the block lasts, and whole after it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roll_flash.inference.client.http_connections import BadAnswerError
from roll_flash.inference.client.token_protocol import decode_piece
from tests.chaos.faults import KILL, NO_FILES, NO_MEMORY, STOP, Case, Moment, inject
from tests.chaos.planted.sitecustomize import GARBAGE, SERVER
from tests.chaos.surroundings import CLOCK_VARIABLE, GARBAGE_VARIABLE, PLANTED, ROOT

ANSWER = {
    "choices": [
        {
            "token_ids": [5, 6],
            "logprobs": {"content": [{"token_id": 5, "logprob": -1.5}, {"token_id": 6, "logprob": -0.5}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        }
    ]
}
PLACES = """
import json, os, socket, subprocess, sys, threading, time
from pathlib import Path
from tests.chaos.surroundings import Surroundings, separate_from_the_machine
before = os.listdir("/dev/shm")
is_separate = separate_from_the_machine()
place = Surroundings(Path(sys.argv[1]), is_separate=is_separate)
found = {"has": sorted(place.has), "shm": os.listdir("/dev/shm")}
if "disk" in place.has:
    file = (place.runs / "open").open("ab", buffering=0)
    (place.runs / "folder").mkdir()
    def write():
        try:
            file.write(bytes(1 << 16))
            (place.runs / "folder" / f"{time.monotonic_ns()}").write_bytes(bytes(1 << 16))
        except OSError as error:
            return error.strerror
        return "written"
    for name in ("full_disk", "read_only_disk"):
        with getattr(place, name)():
            found[name] = write()
        found[f"after {name}"] = write()
    for name in ("hanging_disk", "slow_disk"):
        with getattr(place, name)():
            thread = threading.Thread(target=write)
            thread.start()
            thread.join(0.4 if name == "hanging_disk" else 30)
            found[name] = thread.is_alive()
        thread.join(30)
        found[f"after {name}"] = thread.is_alive()
if "network" in place.has:
    server = socket.create_server(("127.0.0.1", 0))
    def connect():
        with socket.socket() as client:
            client.settimeout(0.3)
            return client.connect_ex(server.getsockname()) == 0
    with place.packets_dropped("-p", "tcp", "--dport", str(server.getsockname()[1])):
        found["cut"] = connect()
    found["after cut"] = connect()
clock = [sys.executable, "-c", "import time; print(time.time())"]
def difference():
    environment = {**os.environ, **place.environment}
    return float(subprocess.run(clock, env=environment, capture_output=True, check=True).stdout) - time.time()
with place.clock_set(-3600):
    found["clock"] = difference()
found["after clock"] = difference()
place.close()
print(json.dumps(found))
"""
SERVES = f"""
import asyncio, json, os, sys
from aiohttp import ClientSession, web
ANSWER = {json.dumps(ANSWER)!r}
async def main():
    app = web.Application()
    async def answer(request):
        return web.Response(text=ANSWER)
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with ClientSession() as client:
        async def ask():
            async with client.post(f"http://127.0.0.1:{{port}}/") as response:
                return [response.status, (await response.read()).decode()]
        found = {{"": await ask()}}
        for kind in {list(GARBAGE)!r}:
            with open(os.environ["{GARBAGE_VARIABLE}"], "w") as file:
                file.write(kind)
            found[kind] = await ask()
        os.unlink(os.environ["{GARBAGE_VARIABLE}"])
        found["after"] = await ask()
    await runner.cleanup()
    print(json.dumps(found))
asyncio.run(main())
"""


def output(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_disk_network_and_clock_are_broken_inside_the_block_only(tmp_path: Path) -> None:
    found = json.loads(output("-c", PLACES, str(tmp_path)))
    assert {"sandbox", "answers", "clock"} <= set(found["has"])
    assert (found["clock"], found["after clock"]) == (pytest.approx(-3600, abs=300), pytest.approx(0, abs=300))
    if os.geteuid() != 0:
        pytest.skip("a disk and a network of its own need root")
    assert found["shm"] == []
    if "disk" in found["has"]:
        assert found["full_disk"] == "No space left on device"
        assert found["read_only_disk"] == "Operation not permitted"
        assert found["after full_disk"] == found["after read_only_disk"] == "written"
        assert found["hanging_disk"]
        assert not any(found[name] for name in ("after hanging_disk", "slow_disk", "after slow_disk"))
    if "network" in found["has"]:
        assert (found["cut"], found["after cut"]) == (False, True)


def test_every_kind_of_garbage_is_an_answer_that_the_client_refuses(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(bytes(8))
    planted = {"PYTHONPATH": str(PLANTED), GARBAGE_VARIABLE: str(tmp_path / "kind"), CLOCK_VARIABLE: str(clock)}
    found = json.loads(output("-c", SERVES, SERVER, **planted))
    for when in ("", "after"):
        assert decode_piece(found.pop(when)[1].encode()).token_ids == [5, 6]
    assert set(found) == set(GARBAGE)
    for status, body in found.values():
        if status == 200:
            with pytest.raises(BadAnswerError):
                decode_piece(body.encode())


class OneProcess:
    """Stand-in for a run: one process is each of its parts."""

    surroundings = None

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def processes(self, names: object) -> list[tuple[int, str]]:
        return [(self._pid, "a process")]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


LOOKS: dict[str, Callable[[int], object]] = {
    STOP: state,
    NO_FILES: lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE),
    NO_MEMORY: lambda pid: resource.prlimit(pid, resource.RLIMIT_AS),
}


@pytest.mark.parametrize("fault", LOOKS)
def test_a_fault_that_passes_leaves_a_process_as_it_was(fault: str) -> None:
    process = subprocess.Popen(["sleep", "600"])
    look, seen = LOOKS[fault], []
    try:
        time.sleep(0.2)
        before = look(process.pid)
        thread = threading.Thread(
            target=inject, args=(Case("worker", fault, Moment.EPISODE, 1), OneProcess(process.pid), 0.6)
        )
        thread.start()
        while thread.is_alive():
            seen.append(look(process.pid))
            time.sleep(0.01)
        assert any(one != before for one in seen)
        assert look(process.pid) == before or (fault == STOP and state(process.pid) in "SR")
    finally:
        process.kill()
        process.wait()


class NothingLeft(OneProcess):
    def processes(self, names: object) -> list[tuple[int, str]]:
        return []


def test_a_part_that_has_ended_in_a_shutdown_is_not_waited_for() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        inject(Case("worker", KILL, Moment.SHUTDOWN, 1), NothingLeft(0), 0.6)
    assert time.monotonic() - began_s < 60
