"""The engine of a vLLM server on CPU is a fork of its API process, and has nothing of that one's event loop."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import psutil
import pytest

from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.watchdog.stacks import Process, processes_of, stacks_of

from .conftest import Served

FORKS = """
import asyncio, json, os, signal, socket, sys, time
from pathlib import Path
from roll_flash.inference.vllm.fork import Forks
from roll_flash.watchdog.stacks import register_stacks

def links():
    entries = list(Path("/proc/self/fd").iterdir())
    return {entry.name: f"{os.readlink(entry)} {inode(entry)}" for entry in entries if entry.is_symlink()}

def inode(entry):
    try:
        return os.stat(entry).st_ino
    except OSError:
        return 0

def child(writing):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    os.write(writing, json.dumps({"links": links(), "wakes": signal.set_wakeup_fd(-1)}).encode())
    time.sleep(60)

async def main():
    register_stacks("run-of-forks", "server")
    got = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, got.append, "SIGTERM")
    listening = socket.create_server(("127.0.0.1", 0))
    reading, writing = os.pipe()
    process = Forks().Process(target=child, args=(writing,))
    process.start()
    seen = json.loads(os.read(reading, 1 << 16))
    process.terminate()
    await asyncio.to_thread(process.join, 30)
    await asyncio.sleep(0.1)
    seen = {"child": seen["links"], "wakes": seen["wakes"]}
    print(json.dumps({**seen, "parent": links(), "exit": process.exitcode, "parent got": got}))

asyncio.run(main())
"""


def test_a_fork_has_neither_sockets_nor_signals_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    loops = ("socket:", "anon_inode:[eventpoll]")
    assert any(link.startswith(loops) for link in found["parent"].values())
    assert not any(link.startswith(loops) for link in found["child"].values())
    stacks = [{link for link in found[of].values() if "roll-flash-stacks" in link} for of in ("parent", "child")]
    assert [len(files) for files in stacks] == [1, 1]
    assert stacks[0] != stacks[1], "each has a file of its own for its stacks"
    assert found["exit"] == 3
    assert found["wakes"] == -1, "a signal is written to no file of the child's"
    assert found["parent got"] == [], "the signal was the child's alone"


@pytest.mark.vllm
@pytest.mark.parametrize("served", ["vllm"], indirect=True)
def test_the_engine_is_forked_and_the_port_is_the_api_processes_alone(served: Served) -> None:
    guard = psutil.Process(cast(ServerEngine, served.engine).guards()[0])
    (api,) = guard.children()
    (engine,) = [each for each in api.children() if "EngineCore" in " ".join(each.cmdline())]
    # The kernel draws the place of the heap for each program that starts; a fork has its parent's.
    assert _heap(engine.pid) == _heap(api.pid)
    assert not [each for each in engine.net_connections() if each.laddr in {own.laddr for own in api.net_connections()}]
    ours: list[Process] = [each for each in processes_of("") if each.pid in (api.pid, engine.pid)]
    said = stacks_of(ours)
    assert "run_engine_core" in said
    assert "api_server" in said


def _heap(pid: int) -> str:
    found = re.search(r"^([0-9a-f]+)-\S+ .*\[heap\]$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]
