"""What sandboxes do not share with the machine and with each other: its disk, users, what is counted per user."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from abuse import attack_program, shell, within
from conftest import need
from pydantic import ValidationError

from roll_flash.cli.main import main
from roll_flash.sandboxes import Sandbox, SandboxPool, SandboxSpec, SandboxSpecError
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.conformance import run_checks
from roll_flash.sandboxes.docker import provider as docker_provider
from roll_flash.sandboxes.docker.container_config import volume_paths
from roll_flash.sandboxes.docker.etc_files import with_user
from roll_flash.sandboxes.docker.isolation import EngineIsolation
from roll_flash.sandboxes.local.provider import HostUser
from roll_flash.sandboxes.owner import DOCKER_USERS, LOCAL_USERS, REMAPPED_USERS
from roll_flash.sandboxes.providers import connect_provider

MIB = 1 << 20
VOLUME = (
    "FROM roll-flash-sandbox:latest\nUSER root\n"
    "RUN mkdir -p /data/deep /tmp/inner && echo given > /data/deep/file && chmod -R 777 /data /tmp/inner\n"
    "VOLUME /data /data/deep /tmp/inner\n"
)
SPECS = {
    "default": SandboxSpec(),
    "root": SandboxSpec(user="0:0"),
    "writable-root": SandboxSpec(writable_root=True, user="0:0"),
    "volume": SandboxSpec(dockerfile=VOLUME),
    "volume-root": SandboxSpec(dockerfile=VOLUME, user="0:0"),
    "volume-writable-root": SandboxSpec(dockerfile=VOLUME, writable_root=True, user="0:0"),
}
PROBE = """
while read -r _ _ _ _ path _; do
    if test -d "$path"; then target=$path/.probe; else target=$path; fi
    (printf x >> "$target") 2> /dev/null && test -s "$target" && stat -f -c "%T $path" "$target"
done < /proc/self/mountinfo
true
"""


@pytest.mark.docker
@pytest.mark.parametrize("kind", SPECS)
def test_no_place_that_can_be_written_lies_on_the_machines_disk(docker: str, kind: str) -> None:
    async def probe(sandbox: Sandbox) -> None:
        found = await sandbox.exec(PROBE, timeout=30)
        places = [line.split(" ", 1) for line in found.stdout_text.splitlines()]
        assert {"/tmp", "/sandbox"} <= {path for _, path in places}
        if sandbox.spec.writable_root:
            assert "/" in {path for _, path in places}
        for system, path in places:
            assert system == "tmpfs" or (path == "/" and system == "overlayfs"), (system, path)
        written = await sandbox.exec(
            "rm -f /.probe; echo x > /.probe && head -c 1500000000 /dev/zero > /big", timeout=60
        )
        assert not written.ok
        assert on_the_engines_disk(sandbox.name) < 100_000

    within(docker, probe, SPECS[kind])


@pytest.mark.docker
@pytest.mark.parametrize("kind", SPECS)
def test_no_place_that_can_be_written_takes_devices_or_set_id_files(docker: str, kind: str) -> None:
    """The engine's own folder of devices is root's alone; it has no file of any other owner."""
    line = "while read -r _ _ _ _ path options _; do test -w $path && test -d $path && echo $path $options; done"
    found = shell(docker, f"{line} < /proc/self/mountinfo; true", SPECS[kind]).stdout_text.splitlines()
    places = {path: options.split(",") for path, options in (place.split(" ") for place in found)}
    assert {"/tmp", "/sandbox"} <= places.keys()
    for path, options in places.items():
        assert {"nosuid", "nodev"} <= {*options} or "ro" in options or path.startswith("/dev"), (path, options)


def on_the_engines_disk(name: str) -> int:
    """Bytes in a container's own layer; nothing of the machine's may be mounted so that it can be written."""
    command = ["docker", "inspect", "--size", "-f", "{{json .}}", name]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    lent = {mount["Destination"]: mount["RW"] for mount in found["Mounts"] if mount["Type"] != "tmpfs"}
    assert lent.pop("/.roll-flash") is False
    assert lent.items() <= {"/etc/passwd": False, "/etc/hosts": False}.items()
    return int(found["SizeRw"])


@pytest.mark.docker
def test_the_engine_writes_down_no_output_and_gives_no_swap(docker: str) -> None:
    async def look(sandbox: Sandbox) -> dict[str, Any]:
        assert (await sandbox.exec("echo said >&2")).ok
        command = ["docker", "inspect", "-f", "{{json .}}", sandbox.name]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
        return dict(json.loads(done.stdout))

    found = within(docker, look, SandboxSpec(memory_mb=128))
    host = found["HostConfig"]
    assert (found["LogPath"], host["LogConfig"]["Type"]) == ("", "none")
    assert host["Memory"] == host["MemorySwap"] == 128 * MIB
    assert (host["AutoRemove"], host["ReadonlyRootfs"], host["Privileged"]) == (True, True, False)


@pytest.mark.docker
@pytest.mark.parametrize(("kind", "folder"), [("volume", "/data"), ("volume-root", "/data"), ("writable-root", "/var")])
def test_a_gigabyte_and_a_half_does_not_fit_under_256_megabytes(docker: str, kind: str, folder: str) -> None:
    """Also of files that are deleted while they are open, which no count of files would see."""
    hold = (
        "import os\nfiles, total = [], 0\n"
        "try:\n"
        "    for at in range(100):\n"
        f"        files.append(os.open('{folder}/hidden', os.O_RDWR | os.O_CREAT, 0o600))\n"
        f"        os.unlink('{folder}/hidden')\n"
        "        for _ in range(15): total += os.write(files[-1], bytes(1 << 20))\n"
        "except OSError as error:\n"
        "    print(error.strerror, total >> 20)\n"
    )

    async def fill(sandbox: Sandbox) -> None:
        result = await sandbox.exec(f"head -c 1500000000 /dev/zero > {folder}/big; stat -c %s {folder}/big", timeout=60)
        assert b"No space left" in result.stderr
        assert int(result.stdout) <= 128 * MIB
        await sandbox.exec(f"rm {folder}/big")
        hidden = (await sandbox.exec(["python3", "-c", hold], timeout=60)).stdout_text
        assert hidden.startswith("No space left"), hidden
        assert int(hidden.split()[-1]) <= 128

    within(docker, fill, SPECS[kind].model_copy(update={"memory_mb": 256}))


@pytest.mark.docker
@pytest.mark.parametrize("user", ["0:0", None])
def test_commands_on_a_writable_root_have_no_capabilities(docker: str, user: str | None) -> None:
    """The agent begins with some; what it left behind cannot be reached either."""
    attempts = ("mount", "chroot", "setns", "handle", "mknod", "unshare 131072", "clone-user", "setuid")

    async def look(sandbox: Sandbox) -> None:
        lines = (await sandbox.exec("grep Cap /proc/self/status")).stdout_text.splitlines()
        assert [line.split()[1] for line in lines] == ["0" * 16] * 5
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        for words in attempts if user is None else attempts[:-1]:
            said = (await sandbox.exec(["/tmp/attack", *words.split()])).stdout
            assert b"not permitted" in said or b"Invalid argument" in said, (words, said)
        for path in ("/.roll-flash-root/image/x", "/.roll-flash-root/changes/x", "/.roll-flash/x", "/proc/1/root/x/y"):
            assert not (await sandbox.exec(f"echo x > {path}")).ok, path

    within(docker, look, SandboxSpec(writable_root=True, user=user))


@pytest.mark.docker
def test_root_of_a_task_folder_writes_nothing_about_the_agent(docker: str) -> None:
    """For the score by which the kernel chooses whom to end first no capability is needed, only the same user."""
    look = "for f in $(find /proc/1 -type f 2> /dev/null); do (: >> $f) 2> /dev/null && echo $f; done"
    spec = SandboxSpec(writable_root=True, user="0:0")
    result = shell(docker, f"{look}; echo 1000 > /proc/1/oom_score_adj; cat /proc/1/oom_score_adj", spec)
    assert result.stdout == b"0\n"
    assert b"Read-only" in result.stderr


@pytest.mark.docker
@pytest.mark.parametrize("writable_root", [True, False])
def test_root_of_a_task_folder_cannot_hide_what_it_uses(docker: str, writable_root: bool) -> None:
    async def hide(sandbox: Sandbox) -> None:
        hidden = await sandbox.exec("chmod 0 /sys/fs/cgroup")
        assert b"Read-only" in hidden.stderr
        usage = await sandbox.stats()
        assert None not in (usage.memory_bytes, usage.peak_memory_bytes, usage.cpu_s, usage.pids, usage.oom_kills)

    within(docker, hide, SandboxSpec(writable_root=writable_root, user="0:0"))


WHO = """
import os, pwd
me = pwd.getpwuid(os.getuid())
print(me.pw_name, me.pw_dir, pwd.getpwnam("sandbox").pw_uid == os.getuid(), pwd.getpwnam("root").pw_uid)
"""
OTHER_USERS = (
    "FROM roll-flash-sandbox:latest\nUSER root\n"
    "RUN echo 'alice:x:4711:4711::/home/alice:/bin/sh' >> /etc/passwd && rm /etc/group\n"
)


@pytest.mark.docker
@pytest.mark.parametrize(
    "spec",
    [SandboxSpec(), SandboxSpec(dockerfile=OTHER_USERS, workdir="/work"), SandboxSpec(writable_root=True)],
    ids=["default", "an image with users", "a writable root"],
)
def test_the_user_of_a_sandbox_has_a_name(docker: str, spec: SandboxSpec) -> None:
    async def look(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("whoami")).stdout == b"sandbox\n"
        said = (await sandbox.exec(["python3", "-c", WHO])).stdout_text
        assert said == f"sandbox {spec.workdir} True 0\n"
        assert not (await sandbox.exec("echo x >> /etc/passwd || mv /etc/passwd /tmp")).ok
        if spec.dockerfile:
            assert (await sandbox.exec("id -u alice")).stdout == b"4711\n"

    within(docker, look, spec)


@pytest.mark.docker
def test_a_list_of_users_that_is_too_large_is_not_read_and_stays_the_images(docker: str) -> None:
    users = b"x:x:1:1::/:/x\n" * 40_000
    large = SandboxSpec(
        dockerfile="FROM roll-flash-sandbox:latest\nCOPY passwd /etc/passwd\n", context={"passwd": users}
    )
    assert shell(docker, "wc -l < /etc/passwd", large).stdout == b"40000\n"


OWN_SERVER = """
import socket
server = socket.create_server(("localhost", 8123))
socket.create_connection(("localhost", 8123)).sendall(b"asked")
print(server.accept()[0].recv(9), socket.gethostbyname(socket.gethostname()))
"""


async def ask_own_server(sandbox: Sandbox) -> None:
    """The tests of a task that asked for http://localhost failed, whatever a model had done."""
    said = await sandbox.exec(["python3", "-c", OWN_SERVER], timeout=30)
    assert said.stdout == b"b'asked' 127.0.0.1\n", said.stderr_text


@pytest.mark.parametrize("user", [None, "0:0"])
def test_a_program_finds_its_own_server_as_localhost(provider: str, user: str | None) -> None:
    within(provider, ask_own_server, SandboxSpec(user=user))


@pytest.mark.docker
@pytest.mark.parametrize(
    "spec",
    [SandboxSpec(writable_root=True), SandboxSpec(writable_root=True, user="0:0", workdir="/work")],
    ids=["default", "as of a task folder"],
)
def test_a_program_with_a_writable_root_finds_it_too(docker: str, spec: SandboxSpec) -> None:
    within(docker, ask_own_server, spec)


@pytest.mark.docker
@pytest.mark.parametrize("how", ["ln -s /tmp/hosts", "mkdir", "ln -s /proc/1/mem", "echo 127.0.0.1 mine >"])
def test_a_fork_starts_whatever_was_made_of_its_list_of_hosts(docker: str, how: str) -> None:
    async def fork() -> str:
        async with SandboxPool(provider="docker", size=0) as pool:
            async with pool.lease(SandboxSpec(writable_root=True, user="0:0")) as sandbox:
                assert (await sandbox.exec(f"rm /etc/hosts; {how} /etc/hosts")).ok
                forked = await sandbox.snapshot()
            async with pool.lease(forked) as sandbox:
                return (await sandbox.exec("cat /tmp/hosts; echo up")).stdout_text

    assert asyncio.run(fork()) == "up\n"


def test_the_user_of_a_local_sandbox_has_a_name() -> None:
    need("local")
    assert shell("local", "whoami").stdout == b"sandbox\n"


@pytest.mark.parametrize("user", ["00:0", "0:00", "٠:0", "4294967296:0", f"{DOCKER_USERS[0]}:0", "+0:0", "0:0\n"])
def test_a_user_is_written_in_one_way(user: str) -> None:
    """Root as `00:0` was taken for another user, whose sandboxes are used again."""
    with pytest.raises(ValidationError, match="user"):
        SandboxSpec(user=user)
    assert SandboxSpec(user="1999999999:0").user == "1999999999:0"


def test_a_forks_list_of_users_has_the_sandbox_once() -> None:
    others = f"root:x:0:0::/root:/bin/sh\nno number:x:y\nlong:x:{'7' * 5000}:\npage:x:1:1:\x0c:/:\n"
    users = with_user(others, DOCKER_USERS[1], "/sandbox")
    again = with_user(users, DOCKER_USERS[2], "/work")
    assert again == f"sandbox:x:{DOCKER_USERS[2]}:1000::/work:/bin/sh\n{others}"


def test_the_list_of_users_is_as_in_the_image_whatever_the_locale_of_this_machine_is() -> None:
    program = """
import sys
from roll_flash.sandboxes.docker.etc_files import files_of_etc, with_user
with files_of_etc({"/etc/passwd": with_user("m\\u00fcller:x:1:1:\\udcff:/:\\n", 7, "/w")}) as files:
    sys.stdout.buffer.write(open(files["/etc/passwd"], "rb").read())
"""
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=ascii_only, check=False)
    assert done.stdout == b"sandbox:x:7:1000::/w:/bin/sh\nm\xc3\xbcller:x:1:1:\xff:/:\n", done.stderr


@pytest.mark.docker
def test_an_engine_that_does_not_see_this_machines_files_starts_sandboxes_all_the_same(
    docker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def elsewhere(contents: Mapping[str, str]) -> Any:
        return contextlib.nullcontext({path: f"/no/such/folder{path}" for path in contents})

    monkeypatch.setattr(docker_provider, "files_of_etc", elsewhere)

    async def use() -> list[str]:
        connected = await connect_provider(docker)
        opened = [await connected.open(SandboxSpec(), run="separation", timeout_s=30) for _ in range(2)]
        try:
            return [(await sandbox.exec("echo up")).stdout_text for sandbox in opened]
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in opened))
            await connected.close()

    assert asyncio.run(use()) == ["up\n"] * 2
    assert sum("have no name for their user" in record.message for record in caplog.records) == 1


@pytest.mark.docker
def test_a_writable_root_has_what_the_image_holds_in_its_volumes(docker: str) -> None:
    result = shell(
        docker,
        "cat /data/deep/file; echo more >> /data/deep/file && cat /data/deep/file",
        SPECS["volume-writable-root"],
    )
    assert result.stdout == b"given\ngiven\nmore\n"


@pytest.mark.docker
def test_a_writable_root_has_what_the_image_holds_in_a_volume_behind_a_link(docker: str) -> None:
    image = (
        "FROM roll-flash-sandbox:latest\nUSER root\n"
        "RUN mkdir -p /srv/db && echo given > /srv/db/file && ln -s srv /data\nVOLUME /data/db\n"
    )
    spec = SandboxSpec(dockerfile=image, writable_root=True, user="0:0")
    assert shell(docker, "cat /data/db/file", spec).stdout == b"given\n"


@pytest.mark.parametrize("path", ["/", "/proc/x", "/dev", "/.roll-flash", "/a/../../sys"])
def test_a_volume_that_cannot_be_bounded_is_refused(path: str) -> None:
    with pytest.raises(SandboxSpecError, match="declares a volume"):
        volume_paths([path], SandboxSpec())


def test_volumes_where_a_sandbox_has_a_tmpfs_anyway_are_left_to_it() -> None:
    assert volume_paths(["/tmp/", "/sandbox", "/data//x", "/data/x"], SandboxSpec()) == ("/data/x",)


@pytest.mark.docker
@pytest.mark.parametrize("kind", SPECS)
def test_with_reuse_the_next_lease_reads_nothing_of_the_first(docker: str, kind: str) -> None:
    reads_nothing_of_the_first(docker, SPECS[kind])


def test_with_reuse_the_next_lease_of_a_local_sandbox_reads_nothing_of_the_first() -> None:
    need("local")
    reads_nothing_of_the_first("local", SandboxSpec())


def reads_nothing_of_the_first(provider: str, spec: SandboxSpec) -> None:
    async def lease_twice() -> str:
        async with SandboxPool(provider=provider, size=1, reuse=True) as pool:
            await pool.start(spec)
            async with pool.lease(spec) as sandbox:
                await sandbox.exec(PROBE.replace("printf x", "printf treasure"))
            for _ in range(500):
                if not pool.stats().closing and pool.stats().ready:
                    break
                await asyncio.sleep(0.02)
            async with pool.lease(spec) as sandbox:
                look = 'while read -r _ _ _ _ path _; do cat "$path/.probe" 2> /dev/null; done < /proc/self/mountinfo'
                return (await sandbox.exec(look)).stdout_text

    assert asyncio.run(lease_twice()) == ""


def test_with_reuse_terminals_are_as_new_for_the_next_lease(provider: str) -> None:
    """In a local sandbox they belong to its user, who could leave text in their times, or take them away."""

    async def leave(sandbox: Sandbox) -> bytes:
        changed = await sandbox.exec("touch -d @86400.5 /dev/pts/ptmx; chmod 123 /dev/pts /dev/pts/ptmx")
        assert changed.ok == (provider == "local")
        assert isinstance(sandbox, AgentSandbox)
        assert await sandbox.reset()
        return (await sandbox.exec("cd /dev/pts; stat -c %a . ptmx; stat -c %y . ptmx | grep ^1970")).stdout

    assert within(provider, leave) == b"755\n666\n"


@pytest.mark.docker
def test_with_reuse_times_of_what_belongs_to_root_are_as_new_for_the_next_lease(docker: str) -> None:
    """Whoever may write to a device, a folder or a link may set its times to now, and so leave a number there."""
    times = "cd /dev; stat -c '%n %x %y' . * pts/ptmx"

    async def leave(sandbox: Sandbox) -> list[str]:
        async def seen() -> set[str]:
            return {*(await sandbox.exec(times)).stdout_text.splitlines()}

        new = await seen()
        await sandbox.exec("cd /dev; touch -c null zero full random urandom tty shm mqueue pts/ptmx; touch -h fd stdin")
        assert isinstance(sandbox, AgentSandbox)
        left = await seen() - new
        assert len(left) > 8, left
        await asyncio.sleep(1.1)  # some of these file systems have times in whole seconds
        assert await sandbox.reset()
        return sorted(left & await seen())

    assert within(docker, leave) == []


@pytest.mark.parametrize("what", ["inotify", "timer", "pipe", "rights"])
def test_a_sandbox_that_takes_all_that_one_user_may_have_takes_nothing_of_another(provider: str, what: str) -> None:
    async def take() -> tuple[int, bytes]:
        connected = await connect_provider(provider)
        spec = SandboxSpec(open_files=512, pids=256)
        first, second = [await connected.open(spec, run="separation", timeout_s=30) for _ in range(2)]
        try:
            for sandbox in (first, second):
                await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
            line = "i=0; while [ $i -lt 200 ]; do /tmp/attack take WHAT 100000 & i=$((i+1)); done; wait"
            async with first.stream(line.replace("WHAT", what), timeout=60) as stream:
                said = b""
                while said.count(b"\n") < 200 and (chunk := await stream.next()) is not None:
                    said += chunk.data
                left = await second.exec(["/tmp/attack", "take", what, "1"])
            return sum(map(int, said.split())), left.stdout
        finally:
            await asyncio.gather(first.close(), second.close())
            await connected.close()

    taken, left = asyncio.run(take())
    assert taken > 50
    assert left == b"1\n"


@pytest.mark.docker
def test_root_of_the_machine_keeps_its_inotify_instances_timers_and_message_queues(docker: str) -> None:
    async def take(sandbox: Sandbox) -> None:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        for what in ("inotify", "queue"):
            assert (await sandbox.exec(["/tmp/attack", "take", what, "1"])).stdout == b"0\n"
        assert (await sandbox.exec("ulimit -i 2> /dev/null || grep pending /proc/self/limits")).stdout.count(
            b"4096"
        ) == 2

    within(docker, take, SandboxSpec(user="0:0"))


@pytest.mark.docker
def test_each_sandbox_has_a_user_of_its_own(docker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses a second container of the same name, and with it of the same user."""
    drawn = [("roll-flash-78000001", 0x78000001)] * 2 + [("roll-flash-78000002", 0x78000002)]
    monkeypatch.setattr(docker_provider, "new_user", lambda users: drawn.pop(0))

    async def users() -> list[str]:
        connected = await connect_provider(docker)
        opened = [await connected.open(SandboxSpec(), run="separation", timeout_s=30) for _ in range(2)]
        try:
            line = "id -u; cd ~ && touch file && echo $USER $(pwd)"
            return [(await sandbox.exec(line)).stdout_text for sandbox in opened]
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in opened))
            await connected.close()

    assert asyncio.run(users()) == [f"{0x78000001}\nsandbox /sandbox\n", f"{0x78000002}\nsandbox /sandbox\n"]
    assert drawn == []


@pytest.mark.docker
def test_a_user_that_the_spec_names_is_taken(docker: str) -> None:
    assert shell(docker, "id -u; id -g; touch x", SandboxSpec(user="1000:100")).stdout == b"1000\n100\n"
    root = SandboxSpec(user="1000:1000", writable_root=True)
    assert shell(docker, "id -u; touch /x", root).stdout == b"1000\n"


def test_two_local_sandboxes_of_this_machine_never_have_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [("roll-flash-test-a", 1), ("roll-flash-test-a", 1), ("roll-flash-test-b", 2), ("roll-flash-test-a", 1)]
    monkeypatch.setattr("roll_flash.sandboxes.local.provider.new_user", lambda users: drawn.pop(0))
    first, second = HostUser(), HostUser()
    assert (first.number, second.number) == (1, 2)
    first.release()
    third = HostUser()
    assert third.number == 1
    second.release()
    third.release()


INFO: dict[str, Any] = {
    "Runtimes": {"runc": {}, "runsc": {}},
    "DefaultRuntime": "runc",
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=default", "name=userns"],
    "CgroupVersion": "2",
}


def test_what_an_engine_does_not_have_is_refused_in_one_line() -> None:
    plain = EngineIsolation.of({**INFO, "SecurityOptions": ["name=seccomp,profile=default"]})
    plain.check(SandboxSpec(runtime="runsc", userns="host"))
    with pytest.raises(SandboxSpecError, match="runtime='kata': the engine has runc, runsc; install it"):
        plain.check(SandboxSpec(runtime="kata"))
    with pytest.raises(SandboxSpecError, match="no user namespaces; start it with userns-remap"):
        plain.check(SandboxSpec(userns="required"))
    with pytest.raises(SandboxSpecError, match="rootless engine cannot"):
        EngineIsolation.of({**INFO, "SecurityOptions": ["name=rootless"]}).check(SandboxSpec(userns="host"))


def test_users_fit_into_the_user_namespace_of_the_engine() -> None:
    remapped = EngineIsolation.of(INFO)
    remapped.check(SandboxSpec(userns="required"))
    assert remapped.users(SandboxSpec()) == REMAPPED_USERS
    assert remapped.users(SandboxSpec(userns="host")) == DOCKER_USERS
    assert not set(DOCKER_USERS[:2]) & set(LOCAL_USERS[:2])
    assert remapped.describe(SandboxSpec(runtime="runsc"))["runtime"] == "runsc"


@pytest.mark.docker
def test_runtime_and_user_namespace_are_chosen_by_the_spec(docker: str) -> None:
    async def chosen(sandbox: Sandbox) -> str:
        command = ["docker", "inspect", "-f", "{{.HostConfig.Runtime}} {{.HostConfig.UsernsMode}}", sandbox.name]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        return str(done.stdout).strip()

    spec = SandboxSpec(runtime="io.containerd.runc.v2", userns="host")
    assert within(docker, chosen, spec) == "io.containerd.runc.v2 host"
    with pytest.raises(SandboxSpecError, match="runtime='none-such'"):
        shell(docker, "true", SandboxSpec(runtime="none-such"))


def test_the_check_tells_how_strong_the_isolation_is(
    provider: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_flash.sandboxes.conformance.CHECKS", [])
    assert main(["sandbox", "check", "--provider", provider]) == 0
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines()[:-1])
    report = asyncio.run(run_checks(provider, SandboxSpec(), []))
    assert said == report.measures
    assert {"runtime", "user namespace", "user", "seccomp", "disk"} <= set(said)
    assert said["disk"] == "nothing is written to it"
