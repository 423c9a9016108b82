"""Attacks on memory, processes, disk, output and time. Each runs for real and names its outcome."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable

import pytest
from abuse import attack_program, attempt, shell, within

from roll_flash.sandboxes import ExecResult, Sandbox, SandboxFileError, SandboxSpec
from roll_flash.sandboxes.client import commands
from roll_flash.sandboxes.local.cgroup import can_limit

MIB = 1 << 20


def test_a_fork_bomb_stops_at_the_process_limit_and_is_killed(limited: str) -> None:
    async def bomb(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        quiet = await processes(sandbox)
        result = await sandbox.exec(["/tmp/attack", "forks"], timeout=2)
        assert result.timed_out
        assert 20 <= int(result.stdout.split()[0]) <= 32
        await until_processes(sandbox, lambda count: count <= quiet)
        await sandbox.exec("f() { f | f & f; }; f", timeout=2)
        assert await processes(sandbox) <= 32

    within(limited, bomb, SandboxSpec(pids=32))


async def processes(sandbox: Sandbox) -> int:
    """Read from outside or by the agent itself: it takes no process."""
    count = (await sandbox.stats()).pids
    assert count is not None
    return count


async def until_processes(sandbox: Sandbox, condition: Callable[[int], bool]) -> None:
    end = time.monotonic() + 30
    while not condition(count := await processes(sandbox)):
        assert time.monotonic() < end, f"{count} processes"
        await asyncio.sleep(0.05)


async def fill_the_process_limit(sandbox: Sandbox, seconds: float) -> asyncio.Task[ExecResult]:
    """The shell that can fork no more ends and leaves one place, which the last sleep takes."""
    line = f"i=0; while [ $i -lt 40 ]; do sleep {seconds} & i=$((i+1)); done"
    assert b"fork" in (await sandbox.exec(line, timeout=30)).stderr
    last = asyncio.create_task(sandbox.exec(["sleep", str(seconds)], timeout=60))
    await until_processes(sandbox, lambda count: count >= sandbox.spec.pids)
    return last


def test_a_command_waits_for_a_place_below_the_process_limit(limited: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PROCESS_WAIT_S", 60.0)

    async def crowd(sandbox: Sandbox) -> None:
        last = await fill_the_process_limit(sandbox, 3)
        result = await sandbox.exec(["cat"], stdin=b"once", timeout=30)
        assert result.stdout == b"once", result
        await last

    within(limited, crowd, SandboxSpec(pids=16))


def test_a_process_limit_that_stays_full_is_told_and_ends_with_the_crowd(
    limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "PROCESS_WAIT_S", 0.3)

    async def crowd(sandbox: Sandbox) -> None:
        last = await fill_the_process_limit(sandbox, 5)
        result = await sandbox.exec("echo never", timeout=10)
        assert (result.exit_code, result.stdout) == (126, b"")
        assert b"temporarily unavailable" in result.stderr
        await last
        await until_processes(sandbox, lambda count: count < 4)

    within(limited, crowd, SandboxSpec(pids=16))


def test_a_memory_bomb_is_killed_and_the_sandbox_lives(limited: str) -> None:
    async def bomb(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        result = await sandbox.exec(["/tmp/attack", "memory"], timeout=30)
        assert result.signal == 9
        stats = await sandbox.stats()
        assert stats.oom_kills
        assert stats.peak_memory_bytes is not None
        assert stats.peak_memory_bytes <= 128 * MIB

    within(limited, bomb, SandboxSpec(memory_mb=128))


@pytest.mark.docker
def test_memory_bombs_without_end_are_ended_with_what_starts_them(docker: str) -> None:
    """For each the kernel writes into the machine's log, and the engine tells of it."""

    async def bombs(sandbox: Sandbox) -> tuple[ExecResult, ExecResult, int | None]:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        endless = await sandbox.exec(["/tmp/attack", "memory-again", "30"], timeout=40)
        return endless, await sandbox.exec("echo goes on"), (await sandbox.stats()).oom_kills

    endless, after, kills = within(docker, bombs, SandboxSpec(memory_mb=64))
    assert (endless.signal, after.stdout) == (9, b"goes on\n"), endless
    assert kills is not None
    assert kills < 1000


@pytest.mark.parametrize("folder", ["/tmp", "/sandbox", "/dev/shm"])
@pytest.mark.docker
def test_filling_a_tmpfs_ends_at_its_size(docker: str, folder: str) -> None:
    result = shell(docker, f"head -c 500000000 /dev/zero > {folder}/fill; wc -c < {folder}/fill; rm {folder}/fill")
    assert b"No space left" in result.stderr
    assert int(result.stdout) <= 64 * MIB


@pytest.mark.docker
def test_filling_the_inodes_ends_at_their_limit(docker: str) -> None:
    line = "i=0; while [ $i -lt 2000 ]; do true > f$i || break; i=$((i+1)); done; ls | wc -l; rm f*"
    result = shell(docker, line, SandboxSpec(tmpfs_inodes=1000))
    assert int(result.stdout) < 1000
    assert b"No space left" in result.stderr


def test_the_root_file_system_cannot_be_written(provider: str) -> None:
    for path in ("/x", "/usr/x", "/etc/x", "/.roll-flash/x", "/var/x"):
        assert b"Read-only" in shell(provider, f"touch {path}").stderr or path == "/var/x"


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/stderr"])
def test_a_gigabyte_of_output_is_counted_and_not_kept(provider: str, target: str) -> None:
    async def flood(sandbox: Sandbox) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        redirect = ">&2" if target == "/dev/stderr" else ""
        result = await sandbox.exec(f"head -c 1000000000 /dev/zero {redirect}", timeout=60, max_output=65536)
        assert result.stdout_bytes + result.stderr_bytes == 1_000_000_000
        assert len(result.stdout) + len(result.stderr) < 66_000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024

    within(provider, flood)


@pytest.mark.docker
def test_a_large_file_is_read_only_as_far_as_is_allowed(docker: str) -> None:

    async def fill(sandbox: Sandbox) -> None:
        written = await sandbox.exec("head -c 200000000 /dev/zero > /full; stat -c %s /full", timeout=120)
        assert written.stdout == b"200000000\n"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(SandboxFileError):
            await sandbox.read("/full", max_bytes=1 << 20)
        result = await sandbox.exec(["cat", "/full"], timeout=120, max_output=1000)
        assert (result.stdout_bytes, len(result.stdout) < 1100) == (200_000_000, True)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024

    within(docker, fill, SandboxSpec(writable_root=True, user="0:0", memory_mb=512))


def test_a_huge_file_is_not_read_beyond_the_limit(provider: str) -> None:
    async def read(sandbox: Sandbox) -> None:
        await sandbox.exec("truncate -s 1000000000000 huge; head -c 30000000 /dev/zero > big")
        for path in ("huge", "big"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path, max_bytes=1_000_000)

    within(provider, read)


def test_a_loop_that_ignores_term_is_killed_in_time(provider: str) -> None:
    async def loop(sandbox: Sandbox) -> None:
        result = await sandbox.exec("trap '' TERM INT HUP; while :; do :; done", timeout=0.5, grace=0.3)
        assert result.timed_out
        assert result.duration_s < 0.5 + 0.3 + 1.0

    within(provider, loop)


def test_a_setsid_daemon_is_killed_with_its_command(provider: str) -> None:
    async def daemon(sandbox: Sandbox) -> None:
        line = "(setsid sh -c '(setsid sleep 6661 &) ; sleep 6662' &) ; sleep 6663"
        assert (await sandbox.exec(line, timeout=0.5)).timed_out
        left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "666" not in left.stdout_text

    within(provider, daemon)


def test_changing_the_mark_of_a_command_to_escape_its_timeout_is_refused(provider: str) -> None:
    assert b"not permitted" in attempt(provider, "mark").stdout


@pytest.mark.parametrize("first_process", ["dies-on-term", "ignores-term"])
def test_processes_that_hand_on_to_a_successor_do_not_outlive_a_timeout(provider: str, first_process: str) -> None:
    """Successors of a forker whose command has lost its first process belong to process 1."""
    words = ["/tmp/attack", "chain", "4", *(["x"] if first_process == "ignores-term" else [])]

    async def outlive(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        daemon = "sleep 5551 > /dev/null & echo started"
        assert (await sandbox.exec(daemon)).stdout == b"started\n"
        assert (await sandbox.exec("mkfifo /tmp/end")).exit_code == 0
        wait = "read -r line < /tmp/end; echo fine"  # does not fork: the attack leaves no room for that
        other = asyncio.ensure_future(sandbox.exec(wait, timeout=None))
        for turn in range(12):
            assert (await sandbox.exec(words, timeout=0.04, grace=0.05 * (turn % 3))).timed_out
            left = await sandbox.exec("rm -f /tmp/alive; sleep 0.1; test -e /tmp/alive")
            assert left.exit_code == 1, f"turn {turn}: some live on"
        left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "/tmp/attack" not in left.stdout_text
        assert "sleep 5551" in left.stdout_text, "what an earlier command left running is not this command's"
        assert (await sandbox.exec("echo end > /tmp/end")).exit_code == 0
        result = await other
        assert result.stdout == b"fine\n", result

    within(provider, outlive)


@pytest.mark.parametrize("how", ["processes", "threads"])
def test_processes_that_others_continue_while_they_are_stopped_do_not_outlive_a_timeout(
    provider: str, how: str
) -> None:
    """Who hands on faster than it is found is ended with everything else in the sandbox, which it could kill itself.

    A process whose first thread has ended looks like a zombie.
    """

    async def outlive(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        for helpers, chains, others in 2 * ((2, 8, 200), (1, 2, 400), (1, 12, 200), (1, 4, 40)):
            crowd = f"i=0; while [ $i -lt {others} ]; do sleep 60 & i=$((i+1)); done; /tmp/attack go-on {helpers} &"
            await sandbox.exec(f"({crowd}) > /dev/null 2>&1")
            result = await sandbox.exec(["/tmp/attack", "chain", str(chains), how], timeout=0.1, grace=0.0)
            assert result.timed_out
            assert result.duration_s < 20
            left = await sandbox.exec("rm -f /tmp/alive; sleep 0.1; test -e /tmp/alive")
            assert left.exit_code == 1, "some live on"
            await sandbox.kill_all()

    within(provider, outlive, SandboxSpec(pids=512, cpus=2.0))


def test_stdin_that_is_never_closed_does_not_hang_a_command_past_its_timeout(provider: str) -> None:
    async def wait(sandbox: Sandbox) -> None:
        async with sandbox.stream("cat", stdin=True, timeout=0.5) as stream:
            result = await stream.wait()
        assert result.timed_out
        assert result.duration_s < 0.5 + 0.2 + 1.0

    within(provider, wait)


def test_a_program_can_open_as_many_files_as_the_spec_says(provider: str) -> None:
    assert shell(provider, "ulimit -n; ulimit -Hn", SandboxSpec(open_files=32)).stdout == b"32\n32\n"


def test_locks_on_files_without_end_are_ended_with_what_holds_them(provider: str) -> None:
    """They are memory of the kernel that no limit counts."""

    async def lock(sandbox: Sandbox) -> tuple[ExecResult, ExecResult, str]:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        some = await sandbox.exec(["/tmp/attack", "locks", "5000"], timeout=20)
        endless = await sandbox.exec(["/tmp/attack", "locks", "100000"], timeout=20)
        until_none = "i=0; while grep -q POSIX /proc/locks && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done"
        left = await sandbox.exec(f"{until_none}; grep -c POSIX /proc/locks")  # what is killed takes a while to end
        return some, endless, left.stdout_text

    some, endless, left = within(provider, lock, SandboxSpec(tmpfs_inodes=20_000))
    assert some.stdout.startswith(b"5000\n"), some
    assert endless.signal == 9, endless
    assert left == "0\n"


@pytest.mark.parametrize("call", ["setxattr", "lsetxattr", "fsetxattr", "setxattrat"])
def test_no_file_gets_an_access_list(provider: str, call: str) -> None:
    """64 KiB of them for each file are memory of the kernel that no limit counts; copying files goes on without."""
    number = ("setxattr", "lsetxattr", "fsetxattr", "setxattrat").index(call)
    assert attempt(provider, "access-list", str(number)).stdout.lower().endswith(b"not supported\n")
    copied = shell(provider, "echo x >one && cp -a one two && mv two /tmp && cat /tmp/two")
    assert (copied.exit_code, copied.stdout, copied.stderr) == (0, b"x\n", b"")


@pytest.mark.parametrize(("kind", "few", "many"), [("sockets", 1500, 3000), ("terminals", 200, 500)])
def test_what_the_kernel_does_not_count_is_ended_with_what_holds_it(
    provider: str, kind: str, few: int, many: int
) -> None:
    """Each socket may keep 0.2 MB of errors and time stamps; terminals are also counted over the machine."""

    async def take(sandbox: Sandbox) -> tuple[ExecResult, ExecResult, ExecResult]:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        some = await sandbox.exec(["/tmp/attack", kind, str(few)], timeout=20)
        await sandbox.kill_all()
        endless = await sandbox.exec(["/tmp/attack", kind, str(many)], timeout=20)
        return some, endless, await sandbox.exec("echo goes on")

    some, endless, after = within(provider, take)
    assert (some.exit_code, some.stdout) == (0, b"0\n"), some
    assert endless.signal == 9, endless
    assert after.stdout == b"goes on\n"


@pytest.mark.parametrize("user", [None, "0:0"])
def test_terminals_are_counted_where_their_folder_is_hidden(provider: str, user: str | None) -> None:
    """It belongs to root inside, in a local sandbox to its user."""

    async def take(sandbox: Sandbox) -> ExecResult:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        return await sandbox.exec("chmod 311 /dev/pts; exec /tmp/attack terminals 500", timeout=20)

    assert within(provider, take, SandboxSpec(user=user)).signal == 9


@pytest.mark.docker
def test_root_inside_cannot_hide_what_is_counted(docker: str) -> None:
    hidden = shell(docker, "chmod 0 /proc/net/sockstat && sleep 10", SandboxSpec(user="0:0"), timeout=20.0)
    assert hidden.signal == 9, hidden


RECEIVES = """
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
    one = socket.socket(socket.AF_INET, kind)
    before = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, before // 4)
    print(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before)
print(int(open("/proc/sys/net/ipv4/tcp_rmem").read().split()[2]) <= 1 << 17)
"""


def test_what_a_socket_may_keep_cannot_be_changed(provider: str) -> None:
    """It may keep as much of errors and time stamps, which no limit counts."""
    seen = within(provider, lambda sandbox: sandbox.exec(["python3", "-c", RECEIVES])).stdout.split()
    assert seen[:2] == [b"True", b"True"]
    assert seen[2] == (b"True" if provider == "docker" else b"False"), "docs/security.md says so of local"


CLOSED = """
import socket
server = socket.create_server(("127.0.0.1", 8000))
for _ in range(6000):
    client = socket.create_connection(("127.0.0.1", 8000))
    accepted = server.accept()[0]
    client.close()
    accepted.close()
print(open("/proc/net/sockstat").read().split("tw ")[1].split()[0])
"""


@pytest.mark.docker
def test_few_closed_connections_are_remembered(docker: str) -> None:
    """Each is memory of the machine for a minute, which no limit counts."""
    seen = within(docker, lambda sandbox: sandbox.exec(["python3", "-c", CLOSED])).stdout
    assert 0 < int(seen) <= 2048


def test_using_up_the_file_descriptors_hurts_only_the_command(provider: str) -> None:
    assert int(attempt(provider, "descriptors").stdout) <= 1024 * 1024


@pytest.mark.docker
def test_ten_thousand_short_commands_leave_no_growth(docker: str) -> None:
    async def many(sandbox: Sandbox) -> None:
        async def burst(count: int) -> None:
            for _ in range(count // 20):
                results = await asyncio.gather(*(sandbox.exec(["/bin/true"]) for _ in range(20)))
                assert all(result.exit_code == 0 for result in results)

        await burst(1000)
        before = await sandbox.stats()
        await burst(9000)
        after = await sandbox.stats()
        assert after.commands == 10_000
        assert after.pids == before.pids
        assert before.memory_bytes is not None
        assert after.memory_bytes is not None
        assert after.memory_bytes - before.memory_bytes < 2 * MIB

    within(docker, many, SandboxSpec(pids=128))


@pytest.mark.skipif(not can_limit(), reason="this user can make no control groups")
def test_bytes_in_connections_that_nobody_reads_are_bounded_in_a_local_sandbox() -> None:
    """Version 1 of control groups counts them apart from memory, and engines set no limit there."""
    result = attempt("local", "connections", "60", spec=SandboxSpec(memory_mb=64), timeout=30.0)
    assert 0 < int(result.stdout_text.splitlines()[0]) < 64, result
