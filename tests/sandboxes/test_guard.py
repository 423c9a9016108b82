"""What outlives a controller removes what the controller could not: at whatever moment that was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from test_no_leaks import GONE_WITHIN_S, assert_gone, children_of, controller
from test_pool import until

from roll_flash.sandboxes import SandboxSpec, SandboxUnreachable, list_sandboxes, open_sandbox, reap
from roll_flash.sandboxes.docker.provider import DockerProvider
from roll_flash.sandboxes.owner import process_started

pytestmark = pytest.mark.docker
KILLED = Path(__file__).with_name("killed_controllers.py")
ROUNDS = 10
"""200 are `python tests/sandboxes/killed_controllers.py RUN 200`, then `roll-flash sandbox ls`."""


def test_controllers_killed_between_a_containers_creation_and_its_start_leave_nothing(docker: str) -> None:
    run = f"guard-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, str(KILLED), run, str(ROUNDS)], capture_output=True, text=True, timeout=900, check=True
    )
    assert sorted(done.stdout.split()[1::2]) == ["9"] * ROUNDS, done.stderr[-2000:]
    assert_gone(docker, run, [], GONE_WITHIN_S)


HOLDING = """
import asyncio, sys
from roll_flash.sandboxes import SandboxPool, SandboxSpec
from roll_flash.sandboxes.scratch import scratch_folder
async def main():
    async with SandboxPool(provider="docker", size=0, run=sys.argv[1]) as pool:
        async with pool.lease(SandboxSpec(writable_root=True, user="0:0")) as sandbox:
            await sandbox.snapshot()
            with scratch_folder("tree") as folder:
                (folder / "file").write_bytes(b"x" * 1000)
                print("ready", flush=True)
                await asyncio.sleep(600)
asyncio.run(main())
"""


def kinds_of(run: str, pid: int) -> list[str]:
    return sorted(entry.kind for entry in list_sandboxes() if entry.run == run or f":{pid}:" in entry.owner)


def test_a_killed_controllers_snapshots_and_scratch_folders_are_gone_with_its_containers(docker: str) -> None:
    run = f"holding-{os.getpid()}"
    with controller(HOLDING, run) as process:
        assert kinds_of(run, process.pid) == ["container", "folder", "snapshot"]
        process.kill()
    end = time.monotonic() + GONE_WITHIN_S
    while left := kinds_of(run, process.pid):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_what_a_controller_and_its_watchdog_left_is_seen_and_removed_by_the_reaper(docker: str) -> None:
    """Killed together, as a job scheduler or the machine's memory killer may do. A run that starts beside this test
    looks for leftovers, too, and may be first."""
    run = f"reaped-{os.getpid()}"
    with controller(HOLDING, run) as process:
        for watchdog in watchdogs_of(process.pid):
            os.kill(watchdog, 9)
        process.kill()
    end = time.monotonic() + GONE_WITHIN_S
    while "container" in (left := kinds_of(run, process.pid)):  # it removes itself
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert set(left) <= {"folder", "snapshot"}
    reaped = {entry.kind for entry in reap() if f":{process.pid}:" in entry.owner}
    assert reaped <= set(left)
    assert kinds_of(run, process.pid) == []


FORKING = """
import asyncio, sys
from roll_flash.sandboxes import SandboxPool, SandboxSpec
async def main():
    async with SandboxPool(provider="docker", size=0, run=sys.argv[1]) as pool:
        async with pool.lease(SandboxSpec(writable_root=True, user="0:0")) as sandbox:
            forked = await sandbox.snapshot()
            print("ready", flush=True); print(forked.image, flush=True)
            await asyncio.sleep(600)
asyncio.run(main())
"""


def wait_for_its_containers(run: str, pid: int) -> None:
    end = time.monotonic() + GONE_WITHIN_S
    while "container" in kinds_of(run, pid):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_snapshot_that_another_controllers_sandbox_uses_is_removed_after_it(docker: str) -> None:
    """Without its name, which was removed at once, nobody found the image any more."""
    run = f"forking-{os.getpid()}"

    async def use(process: subprocess.Popen[str], image: str) -> None:
        spec = SandboxSpec(image=image, writable_root=True, user="0:0")
        async with open_sandbox(spec, provider="docker") as sandbox:
            process.kill()
            await asyncio.to_thread(wait_for_its_containers, run, process.pid)
            await asyncio.sleep(2)
            assert (await sandbox.exec("true")).ok

    with controller(FORKING, run) as process:
        assert process.stdout is not None
        image = process.stdout.readline().strip()
        number = subprocess.run(
            ["docker", "image", "inspect", "-f", "{{.Id}}", image], capture_output=True, text=True, check=True
        ).stdout.strip()
        asyncio.run(use(process, image))
    end = time.monotonic() + GONE_WITHIN_S
    while subprocess.run(["docker", "image", "inspect", number], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < end, number
        time.sleep(0.1)


def watchdogs_of(pid: int) -> set[int]:
    owner = f":{pid}:{process_started(pid)}".encode()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"watchdog.py" in command and owner in command:
            found.add(int(folder.name))
    return found


def test_the_watchdog_is_no_child_of_its_controller_and_holds_no_file_of_it(docker: str, tmp_path: Path) -> None:
    log = (tmp_path / "log").open("wb")
    program = (
        "import asyncio, sys\n"
        "from roll_flash.sandboxes.docker.provider import DockerProvider\n"
        "async def main():\n"
        "    await DockerProvider().connect(); print('ready', flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    with log, subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=log) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            (watchdog,) = watchdogs_of(process.pid)
            assert watchdog not in children_of(process.pid)
            files = [os.readlink(file) for file in Path(f"/proc/{watchdog}/fd").iterdir()]
            assert not [file for file in files if str(tmp_path) in file]
        finally:
            process.kill()


def test_a_watchdog_that_is_killed_is_replaced_before_the_next_container(docker: str) -> None:
    async def replaced() -> None:
        others = watchdogs_of(os.getpid())
        provider = DockerProvider()
        await provider.connect()
        (first,) = watchdogs_of(os.getpid()) - others
        os.kill(first, 9)
        await until(lambda: process_started(first) is None)
        sandbox = await provider.open(SandboxSpec(), run="guard", timeout_s=60)
        (second,) = watchdogs_of(os.getpid()) - others
        assert second != first
        await sandbox.close()
        await provider.close()
        assert watchdogs_of(os.getpid()) == others

    asyncio.run(replaced())


def test_a_watchdog_is_replaced_in_a_process_with_many_open_files(docker: str) -> None:
    """Connections of agents are descriptors of the worker; without a watchdog no sandbox started there any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    others = watchdogs_of(os.getpid())

    async def replaced() -> None:
        async with open_sandbox(provider="docker") as sandbox:
            with contextlib.ExitStack() as files:
                for _ in range(1100):
                    files.callback(os.close, os.open("/dev/null", os.O_RDONLY))
                for watchdog in watchdogs_of(os.getpid()) - others:
                    os.kill(watchdog, 9)
                await until(lambda: watchdogs_of(os.getpid()) <= others)
                async with sandbox.fresh() as fresh:
                    assert (await fresh.exec("true")).ok
                assert len(watchdogs_of(os.getpid()) - others) == 1

    try:
        asyncio.run(replaced())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("meanwhile", ["sweep", "close"])
def test_a_container_that_the_engine_creates_after_nobody_waits_any_more_is_removed(
    docker: str, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine did not answer in time, and finishes what it was asked for."""
    run = f"late-{uuid.uuid4().hex[:8]}"
    others = watchdogs_of(os.getpid())

    async def late() -> None:
        provider = DockerProvider()
        await provider.connect()
        await (await provider.open(SandboxSpec(), run="warm", timeout_s=60)).close()
        asked = provider.engine.call

        async def unanswered(method: str, path: str, **options: object) -> object:
            answer = await asked(method, path, **options)  # type: ignore[arg-type]
            if path.endswith("/create"):
                raise SandboxUnreachable("no answer in time")
            return answer

        monkeypatch.setattr(provider.engine, "call", unanswered)
        with pytest.raises(SandboxUnreachable):
            await provider.open(SandboxSpec(), run=run, timeout_s=60)
        monkeypatch.undo()
        if meanwhile == "sweep":
            await provider.sweep()
            assert [entry for entry in await asyncio.to_thread(list_sandboxes) if entry.run == run] == []
        await provider.close()

    asyncio.run(late())
    assert_gone(docker, run, sorted(watchdogs_of(os.getpid()) - others), GONE_WITHIN_S)


def test_a_forked_child_that_holds_the_pipe_does_not_hide_the_controllers_death(docker: str) -> None:
    program = (
        "import asyncio, os, time\n"
        "from roll_flash.sandboxes.docker.provider import DockerProvider\n"
        "async def main():\n"
        "    await DockerProvider().connect()\n"
        "    child = os.fork()\n"
        "    if not child: time.sleep(60)\n"
        "    print('ready', flush=True); print(child, flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    with controller(program) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        watchdogs = watchdogs_of(process.pid)
        process.kill()
        process.wait(timeout=10)
        try:
            assert len(watchdogs) == 1
            assert_gone(docker, "none", sorted(watchdogs), GONE_WITHIN_S)
        finally:
            os.kill(child, 9)
