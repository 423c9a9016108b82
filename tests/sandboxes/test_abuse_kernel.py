"""Attacks on the kernel's interfaces, the agent and other sandboxes. Each runs for real and names its outcome."""

from __future__ import annotations

import asyncio
import secrets
import socket

import pytest
from abuse import attack_program, attempt, shell, within

from roll_flash.sandboxes import Sandbox
from roll_flash.sandboxes.providers import connect_provider
from roll_flash.sandboxes.spec import SandboxSpec

REFUSED = (
    b"not permitted",
    b"Invalid argument",
    b"Permission denied",
    b"not implemented",
    b"not supported",
    b"No such process",
)


def assert_refused(output: bytes) -> None:
    assert any(word in output for word in REFUSED), output


@pytest.mark.parametrize(
    "words",
    [
        ("io_uring",),
        ("aio",),
        ("sync",),
        ("core-scheduling",),
        ("secret-memory",),
        ("page-policy",),
        ("bpf",),
        ("keyctl",),
        ("userfaultfd",),
        ("perf",),
        ("unshare", str(0x10000000)),
        ("unshare", str(0x40000000)),
        ("unshare", str(0x20000)),
        ("clone-user",),
        ("clone3",),
        ("setns",),
        ("mount",),
        ("mknod",),
        ("chroot",),
        ("set-clock",),
        ("set-hostname",),
        ("handle",),
        ("module",),
        ("reboot",),
        ("setuid",),
        ("raw-socket",),
        ("socket-program", "26"),
        ("socket-program", "51"),
        ("filter",),
        ("filter-by-prctl",),
        ("delegation",),
        ("lock-open-file",),
        ("clone-files",),
        ("x32",),
        ("int80",),
    ],
    ids="-".join,
)
def test_the_kernel_refuses(provider: str, words: tuple[str, ...]) -> None:
    result = attempt(provider, *words)
    assert result.signal in (None, 11, 31)
    if result.signal is None:
        assert_refused(result.stdout)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("netlink", 16),
        ("packet", 17),
        ("vsock", 40),
        ("alg", 38),
        ("bluetooth", 31),
        ("can", 29),
        ("tipc", 30),
        ("rds", 21),
    ],
)
def test_a_socket_of_another_family_is_refused(provider: str, name: str, family: int) -> None:
    assert_refused(attempt(provider, "socket", str(family)).stdout)


@pytest.mark.parametrize(("name", "number"), [("udplite", 136), ("mptcp", 262), ("sctp", 132), ("smc", 256)])
def test_a_protocol_that_the_kernel_would_load_or_that_few_ask_for_is_refused(
    provider: str, name: str, number: int
) -> None:
    assert_refused(attempt(provider, "protocol", str(number)).stdout)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("protocol", "77"), b"Protocol not supported"),
        (("socket-type", "4"), b"Protocol not supported"),
        (("socket-type", "5"), b"Protocol not supported"),
        (("socket-type", "3"), b"Protocol not supported"),
        (("ioctl", "0x5423"), b"Operation not permitted"),
        (("socket-ioctl", "0x8940"), b"Operation not permitted"),
        (("socket-ioctl", "0x89a0"), b"Operation not permitted"),
        (("socket-ioctl", "0x8982"), b"Operation not permitted"),
    ],
    ids=["protocol", "rdm", "seqpacket", "raw", "line discipline", "bridge", "new bridge", "vlan"],
)
def test_the_kernel_is_never_asked_for_a_module(provider: str, words: tuple[str, ...], refused: bytes) -> None:
    """It would start modprobe on the machine each time, as root, which no limit of the sandbox covers."""
    assert attempt(provider, *words).stdout == refused + b"\n"


KEEPING_MEMORY = """
import errno, socket as s, struct as p, sys
group4, group6 = s.inet_aton("239.1.2.3"), s.inet_pton(s.AF_INET6, "ff02::1234")
whole4 = bytes(4) + p.pack("=HH4s", s.AF_INET, 0, group4) + bytes(120)
whole6 = p.pack("=II", 1, 0) + p.pack("=HHI16s", s.AF_INET6, 0, 0, group6) + bytes(104)
options = {
    "membership": (0, 35, group4 + s.inet_aton("127.0.0.1")),
    "membership of one source": (0, 39, group4 + 2 * s.inet_aton("127.0.0.1")),
    "group": (0, 42, whole4), "group of one source": (0, 46, whole4 + bytes(128)),
    "membership 6": (41, 20, group6 + p.pack("=I", 1)),
    "group 6": (41, 42, whole6), "group of one source 6": (41, 46, whole6 + bytes(128)),
    "packet options": (41, 6, p.pack("=Qii", 65000, 41, 50) + bytes(65000 - 16)),
    "flow label": (41, 32, group6 + p.pack("!I", 0xABC0) + p.pack("=BBHHHI", 0, 255, 1, 60, 60, 0)),
    "routing header": (41, 57, b"\\x00\\xfe\\x04" + bytes(2037)),
    "hop options": (41, 54, bytes(8)), "options before routing": (41, 55, bytes(8)), "options": (41, 59, bytes(8)),
    "upper protocol": (6, 31, b"tls"), "key": (6, 14, bytes(216)), "key of a prefix": (6, 32, bytes(216)),
    "authentication key": (6, 38, bytes(320)),
}
for name, (level, option, value) in options.items():
    try:
        s.socket(s.AF_INET6, s.SOCK_STREAM if level == 6 else s.SOCK_DGRAM).setsockopt(level, option, value)
        print(name, "was set")
    except OSError as error:
        if error.errno != errno.EPERM:
            print(name, error)
"""


def test_options_of_sockets_that_keep_memory_outside_of_all_limits_are_refused(provider: str) -> None:
    """With packet options alone, 900 sockets of a sandbox of 128 MiB had 115 MiB of the machine's memory."""
    result = shell(provider, f"python3 -c '{KEEPING_MEMORY}'")
    assert (result.stdout, result.stderr) == (b"", b"")


LOCK = """
import fcntl, os, sys, time
held = []
for place in [line.split()[1] for line in open("/proc/mounts")]:
    try:
        file = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if not any(os.path.samestat(os.fstat(file), os.fstat(one)) for one in held):
            held.append(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(place, "is locked")
    except OSError:
        pass
print(len(held) > 5, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("user", [None, "0:0"])
def test_two_sandboxes_have_no_file_in_common_that_they_could_lock(docker: str, user: str | None) -> None:
    """By locks, and by watching what the other opens, they could talk to each other."""

    async def lock() -> None:
        connected = await connect_provider(docker)
        spec = SandboxSpec(user=user)
        first, second = [await connected.open(spec, run="abuse", timeout_s=30) for _ in range(2)]
        try:
            async with first.stream(["python3", "-c", LOCK, "60"]) as stream:
                told = await stream.next()
                assert told is not None
                assert told.data == b"True\n"
                assert (await second.exec(["python3", "-c", LOCK, "0"])).stdout == b"True\n"
        finally:
            await asyncio.gather(first.close(), second.close())
            await connected.close()

    asyncio.run(lock())


@pytest.mark.parametrize("kind", ["map", "file", "segment"])
def test_huge_pages_of_the_machine_are_refused(provider: str, kind: str) -> None:
    """They are reserved for the machine's own programs, and no memory limit counts them."""
    assert attempt(provider, f"huge-{kind}").stdout == b"Operation not permitted\n"


def test_names_of_memory_are_refused(provider: str) -> None:
    """One for each mapping is memory of the kernel that no limit counts; a kernel without them has another error."""
    assert attempt(provider, "memory-name").stdout == b"Operation not permitted\n"


def test_nothing_of_the_machine_is_written_out_for_a_sandbox(provider: str) -> None:
    """It would write out all that the machine has not written yet, and no timeout ends a program that waits for that.
    For programs, which have nothing on a disk, it is done."""
    assert attempt(provider, "syncfs").stdout == b"0\n"
    assert attempt(provider, "fsync").stdout == b"0\n"
    assert shell(provider, "sync && sync -f /sandbox").exit_code == 0
    assert attempt(provider, "sync-quotas").stdout == b"Operation not permitted\n"
    for of_btrfs in ("0x9408", "0x80089418"):
        assert attempt(provider, "ioctl", of_btrfs).stdout == b"Operation not permitted\n"


def test_code_inside_cannot_read_the_agent_program(provider: str) -> None:
    """So the kernel protects a relay from its first instruction on: else code inside opened its output before that."""
    result = shell(provider, "cat /.roll-flash/agent")
    assert (result.stdout, result.exit_code) == (b"", 1)


def test_usual_kinds_of_sockets_are_allowed(provider: str) -> None:
    code = """
import socket as s
for family in (s.AF_INET, s.AF_INET6):
    for kind, protocols in ((s.SOCK_STREAM, (0, s.IPPROTO_TCP)), (s.SOCK_DGRAM, (0, s.IPPROTO_UDP))):
        for protocol in protocols:
            s.socket(family, kind | s.SOCK_NONBLOCK, protocol).close()
for kind in (s.SOCK_STREAM, s.SOCK_DGRAM, s.SOCK_SEQPACKET):
    s.socketpair(s.AF_UNIX, kind)
"""

    async def run(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", code])
        assert (result.exit_code, result.stderr) == (0, b"")

    within(provider, run)


@pytest.mark.parametrize("family", [1, 2, 10], ids=["unix", "ipv4", "ipv6"])
def test_a_socket_of_a_harmless_family_is_allowed(provider: str, family: int) -> None:
    assert attempt(provider, "stream-socket", str(family)).stdout == b"0\n"


@pytest.mark.parametrize(
    ("family", "address"),
    [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1"), ("AF_UNIX", "")],
    ids=["ipv4", "ipv6", "unix"],
)
def test_a_listener_on_this_machine_cannot_be_reached(provider: str, family: str, address: str) -> None:
    with socket.socket(getattr(socket, family)) as server:
        server.bind(f"\0roll-flash-{secrets.token_hex(8)}" if family == "AF_UNIX" else (address, 0))
        server.listen()
        where = repr(server.getsockname())
        code = f"import socket; s = socket.socket(socket.{family}); s.settimeout(2); print(s.connect_ex({where}))"

        async def connect(sandbox: Sandbox) -> bytes:
            return (await sandbox.exec(["python3", "-c", code], timeout=20)).stdout.strip()

        assert within(provider, connect) not in (b"0", b"")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_there_is_no_route_out(provider: str) -> None:
    result = shell(
        provider, "tail -n +2 /proc/net/route; cat /proc/net/ipv6_route | grep -v ' lo$'; tail -n +3 /proc/net/dev"
    )
    assert [line.split(":")[0].strip() for line in result.stdout_text.splitlines()] == ["lo"]


def test_a_server_inside_can_be_used_inside(provider: str) -> None:
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); "
        "c.send(b'x'); print(s.accept()[0].recv(1))"
    )
    assert shell(provider, f'python3 -c "{code}"').stdout == b"b'x'\n"


@pytest.mark.parametrize(
    "line", ["kill -9 1", "kill -TERM 1", "kill -STOP 1", "kill -9 -1; true", "kill -STOP -1; true"]
)
def test_signals_do_not_reach_the_agent(provider: str, line: str) -> None:
    async def send(sandbox: Sandbox) -> None:
        await sandbox.exec(line, timeout=2)
        assert (await sandbox.exec("echo lives")).stdout == b"lives\n"

    within(provider, send)


@pytest.mark.parametrize(
    "words", [("ptrace", "1"), ("seize", "1"), ("read-memory", "1"), ("pidfd_getfd", "1")], ids="-".join
)
def test_the_agent_cannot_be_traced(provider: str, words: tuple[str, ...]) -> None:
    assert_refused(attempt(provider, *words).stdout)


def test_the_agents_limits_and_priorities_cannot_be_changed(provider: str) -> None:
    """They would be those of all later commands, of the check and the next lease too, or end the agent."""

    async def change(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        told = "cat /proc/1/limits; cut -d' ' -f18,19,40,41 /proc/1/stat; grep allowed /proc/1/status"
        before = (await sandbox.exec(told)).stdout
        for what in ("limit", "nice", "nice-group", "nice-user", "processors", "idle", "io-idle", "io-idle-user"):
            assert_refused((await sandbox.exec(["/tmp/attack", "agent", what])).stdout)
        assert (await sandbox.exec(told)).stdout_text.splitlines() == before.decode().splitlines()

    within(provider, change)


@pytest.mark.parametrize("call", ["nice", "idle", "attributes"])
def test_priorities_stay_as_they_are_whatever_a_program_sets(provider: str, call: str) -> None:
    """A command that another one makes idle before its program runs would hold up the agent, which waits for it."""
    assert attempt(provider, "priority", call).stdout == b"0 0 0\n0 0 0\n"


def test_what_crashes_is_given_to_no_program_of_the_machine(provider: str) -> None:
    """A limit of 0 on core files does not keep the kernel from that, one of 1 does; who sets 0 keeps 1."""
    assert attempt(provider, "core").stdout == b"1 1\n0\n"


def test_a_lease_on_a_program_does_not_hold_up_the_agent_that_starts_it(provider: str) -> None:
    async def lease(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        await sandbox.write("/sandbox/program", "#!/bin/sh\necho ran\n", mode=0o755)
        holding = asyncio.ensure_future(sandbox.exec(["/tmp/attack", "lease", "/sandbox/program"], timeout=3))
        await asyncio.sleep(0.3)
        assert (await sandbox.exec(["/sandbox/program"], timeout=2)).stdout == b"ran\n"
        assert_refused((await holding).stdout)

    within(provider, lease)


@pytest.mark.parametrize("path", ["mem", "environ", "fd/0", "fd/1", "maps", "cwd", "root", "exe", "auxv", "stack"])
def test_the_agents_proc_entries_are_closed(provider: str, path: str) -> None:
    result = shell(provider, f"ls -d /proc/1/{path}/ 2>&1; cat /proc/1/{path} 2>&1; echo x 2>&1 > /proc/1/{path}; true")
    assert b"ermission denied" in result.stdout + result.stderr


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/drop_caches",
        "/proc/sys/kernel/modprobe",
        "/proc/pressure/cpu",
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/pids/pids.max",
        "/sys/fs/cgroup/memory/release_agent",
        "/sys/kernel/uevent_helper",
        "/sys/power/state",
    ],
)
def test_kernel_settings_cannot_be_written(provider: str, path: str) -> None:
    result = shell(provider, f"true >> {path} && echo OPENED")
    assert b"OPENED" not in result.stdout


SETTINGS = """
import os
for folder, _, names in os.walk("/proc/sys"):
    for name in names:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_NONBLOCK))
            print(folder, name)
        except OSError:
            pass
"""


MODES = r"""
for f in /proc/[!0-9]*; do
    if [ -L "$f" ] || ! { [ -f "$f" ] || [ -d "$f" ]; }; then continue; fi
    chmod "$(stat -c %a "$f")" "$f" 2> /dev/null && echo "$f"  # as it is: the machine's modes would change
done
ls /proc | grep -c locks
"""


@pytest.mark.docker
@pytest.mark.parametrize("writable_root", [False, True])
def test_root_cannot_change_the_modes_of_the_machines_files_in_proc(docker: str, writable_root: bool) -> None:
    """Without them other sandboxes, also later ones, could not read their memory, processors or locks."""
    spec = SandboxSpec(user="0:0", writable_root=writable_root)
    assert shell(docker, MODES, spec).stdout == b"1\n"


@pytest.mark.parametrize("user", [None, "0:0"])
def test_no_setting_of_the_kernel_can_be_written(provider: str, user: str | None) -> None:
    """Those of the sandbox's own namespaces would last into the next lease."""

    async def look(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec(["python3", "-c", SETTINGS])).stdout

    assert within(provider, look, SandboxSpec(user=user)) == b""


@pytest.mark.parametrize(
    "path", ["/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/etc/shadow"]
)
def test_secrets_of_the_machine_cannot_be_read(provider: str, path: str) -> None:
    assert shell(provider, f"head -c 1 {path} | wc -c").stdout.strip() == b"0"


def test_a_setuid_file_gives_no_rights(provider: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        await sandbox.exec("cp /tmp/attack /tmp/raised; chmod 6755 /tmp/raised")
        assert_refused((await sandbox.exec(["/tmp/raised", "setuid"])).stdout)
        result = await sandbox.exec("echo | su root -c 'id -u' 2>&1; grep NoNewPrivs /proc/self/status", timeout=10)
        assert b"\n0\n" not in b"\n" + result.stdout
        assert b"NoNewPrivs:\t1" in result.stdout

    within(provider, run)


def test_there_are_no_capabilities(provider: str) -> None:
    lines = shell(provider, "grep Cap /proc/self/status").stdout_text.splitlines()
    assert len(lines) == 5
    assert all(line.split()[1] == "0" * 16 for line in lines)


def test_the_clock_and_the_hostname_of_the_machine_stay(provider: str) -> None:
    name = socket.gethostname()
    shell(provider, "hostname evil; date -s 2000-01-01")
    assert socket.gethostname() == name


def test_another_sandboxs_files_and_processes_are_out_of_sight(provider: str) -> None:
    async def look() -> None:
        connected = await connect_provider(provider)
        first, second = [await connected.open(SandboxSpec(), run="abuse", timeout_s=30) for _ in range(2)]
        try:
            await first.write("/sandbox/secret", b"treasure")
            hidden = asyncio.ensure_future(first.exec("sleep 4441", timeout=3))
            await asyncio.sleep(0.2)
            line = (
                "grep -rs treasure /sandbox /tmp /dev/shm /proc/*/root/sandbox; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
            )
            seen = (await second.exec(line)).stdout
            assert b"4441" not in seen
            assert seen.count(b"treasure") == seen.count(b"grep -rs treasure")
            await hidden
        finally:
            await asyncio.gather(first.close(), second.close())
            await connected.close()

    asyncio.run(look())
