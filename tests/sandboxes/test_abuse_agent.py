"""Attacks that would keep the agent waiting: a sandbox that does not answer is nobody's fault, and earns no 0."""

from __future__ import annotations

import asyncio

import pytest
from abuse import attack_program, within

from roll_flash.sandboxes import Sandbox, SandboxFileError, SandboxSpec
from roll_flash.sandboxes.client.files import list_tree


def test_whoever_stops_each_command_before_it_has_begun_does_not_hold_up_the_agent(provider: str) -> None:
    async def stop(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        assert (await sandbox.exec("/tmp/attack stop-all > /dev/null 2>&1 &")).ok
        await asyncio.sleep(0.5)  # it has begun
        for _ in range(30):
            result = await sandbox.exec(["/bin/echo", "x"], timeout=0.1, grace=0)
            assert result.timed_out or result.stdout == b"x\n" or result.signal == 9, result
        await sandbox.kill_all()

    within(provider, stop)


def test_whoever_makes_each_command_idle_before_it_has_begun_does_not_hold_up_the_agent(provider: str) -> None:
    async def make_idle(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        assert (await sandbox.exec("/tmp/attack idle-all 40 > /dev/null 2>&1 &")).ok
        await asyncio.sleep(0.5)
        for _ in range(5):
            assert (await sandbox.exec(["/bin/echo", "x"], timeout=10)).stdout == b"x\n"
        await sandbox.kill_all()

    within(provider, make_idle, SandboxSpec(cpus=2))


@pytest.mark.docker
@pytest.mark.parametrize("writable_root", [False, True])
def test_root_that_replaces_dev_null_by_a_pipe_does_not_hold_up_the_agent(docker: str, writable_root: bool) -> None:
    async def replace(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("rm /dev/null && mkfifo /dev/null")).ok
        assert (await sandbox.exec(["cat"], timeout=10)).stdout == b""

    within(docker, replace, SandboxSpec(user="0:0", writable_root=writable_root))


@pytest.mark.docker
@pytest.mark.parametrize("open_files", [16, 32])
def test_pipes_of_what_is_left_running_do_not_use_up_the_agents_files(docker: str, open_files: int) -> None:
    async def leave(sandbox: Sandbox) -> None:
        for number in range(20):
            result = await sandbox.exec("sleep 600 & echo started", stdin=b"x")
            assert result.stdout == b"started\n", (number, result)
        assert (await sandbox.exec("sleep 600", timeout=0.2)).timed_out

    within(docker, leave, SandboxSpec(open_files=open_files))


LONG_NAMES = (
    "p=$(printf %0250d 0); mkdir d; cd d; for i in 1 2 3 4 5 6 7; do mkdir $p; cd $p; done; "
    f"seq -w 9000 | sed 's/$/{'x' * 240}/' | xargs touch"
)


def test_large_answers_that_are_asked_for_together_do_not_end_the_agent(provider: str) -> None:
    """Each alone is within its limit; together they are more than it lets wait for a controller that does not read."""
    flood = "head -c 17000000 /dev/zero"

    async def ask(sandbox: Sandbox) -> None:
        made = await sandbox.exec(LONG_NAMES, timeout=60)
        assert made.ok, made.stderr
        listings = [list_tree(sandbox._connection, "/sandbox/d", 20_000) for _ in range(5)]  # type: ignore[attr-defined]
        outputs = [sandbox.exec(flood, timeout=60, max_output=1 << 24) for _ in range(5)]
        errors = await asyncio.gather(*listings, return_exceptions=True)
        assert all(isinstance(error, SandboxFileError) for error in errors), errors
        assert [len(result.stdout) >> 24 for result in await asyncio.gather(*outputs)] == [1] * 5

    within(provider, ask, SandboxSpec(memory_mb=1024))
