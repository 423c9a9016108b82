"""Images that specs bring, and forks of a sandbox with a writable root."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from abuse import attack_program
from second_engine import bare_image

from roll_flash.sandboxes import (
    SandboxFileError,
    SandboxImageError,
    SandboxPool,
    SandboxSpec,
    SandboxSpecError,
    SandboxStartError,
    list_sandboxes,
    open_sandbox,
)
from roll_flash.sandboxes.client.agent_program import cache_folder
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.client.files import paused
from roll_flash.sandboxes.docker.api import open_engine
from roll_flash.sandboxes.docker.provider import DockerProvider
from roll_flash.sandboxes.files.build_context import packed_files
from roll_flash.sandboxes.images import build as image_build
from roll_flash.sandboxes.images import stored_images
from roll_flash.sandboxes.images.build import build_error, image_key, image_of, one_at_a_time
from roll_flash.sandboxes.images.default_image import ensure_image
from roll_flash.sandboxes.images.stored_images import BUILDS, prune_builds, use_build
from roll_flash.sandboxes.owner import Owner

pytestmark = pytest.mark.docker
BASE = "FROM roll-flash-sandbox:latest\n"
BUILT = packed_files({"built": "content"})


@pytest.fixture
def dockerfile(docker: str) -> Iterator[str]:
    # Without RUN, which would need the engine's network bridge.
    text = f"{BASE}COPY built /\n# {uuid.uuid4().hex}\n"
    yield text
    subprocess.run(["docker", "rmi", "-f", f"{BUILDS}:{image_key(text, BUILT)}"], capture_output=True, check=True)


def own_snapshots() -> list[str]:
    owner = str(Owner.current())
    return [entry.name for entry in list_sandboxes() if entry.kind == "snapshot" and entry.owner == owner]


def test_a_dockerfile_is_built_once_for_all_who_ask_at_once(
    dockerfile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def many() -> set[bytes]:
        async def one() -> bytes:
            async with open_sandbox(SandboxSpec(dockerfile=dockerfile, context=BUILT), provider="docker") as sandbox:
                return await sandbox.read("/built")

        return set(await asyncio.gather(*(one() for _ in range(4))))

    assert len(asyncio.run(many())) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split()[:2] for line in said if "is " in line] == [["is", "built,"], ["is", "ready"]]


def test_a_dockerfile_copies_what_its_folder_holds(docker: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"{BASE}COPY data /data\nCOPY --chown=1000 run.sh /\n# {uuid.uuid4().hex}\n")
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "data/deep/file").write_text("content")
    (tmp_path / "data/link").symlink_to("deep/file")
    (tmp_path / "run.sh").write_text("#!/bin/sh\ncat /data/link")
    (tmp_path / "run.sh").chmod(0o700)
    spec = SandboxSpec.from_folder(tmp_path, memory_mb=128)
    assert spec == SandboxSpec.from_folder(tmp_path, memory_mb=128)
    assert spec.dockerfile is not None

    async def run() -> bytes:
        async with open_sandbox(spec, provider="docker") as sandbox:
            return (await sandbox.exec("/run.sh")).stdout

    try:
        assert asyncio.run(run()) == b"content"
    finally:
        image = f"{BUILDS}:{image_key(spec.dockerfile, spec.context)}"
        subprocess.run(["docker", "rmi", "-f", image], capture_output=True, check=True)


def test_another_context_is_another_image() -> None:
    contexts = (b"", packed_files({"a": "1"}), packed_files({"a": "2"}), packed_files({"b": "1"}))
    assert len({image_key("FROM x", context) for context in contexts}) == 4
    assert SandboxSpec(dockerfile="FROM x", context={"a": "1"}).context == packed_files({"a": b"1"})


def test_a_build_context_that_cannot_be_used_is_refused(docker: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxSpecError, match="no Dockerfile"):
        SandboxSpec.from_folder(tmp_path)
    with pytest.raises(ValueError, match="give the dockerfile too"):
        SandboxSpec(context=b"x")

    async def build() -> None:
        async with open_sandbox(SandboxSpec(dockerfile=BASE, context=b"no archive"), provider="docker"):
            pass

    with pytest.raises(SandboxSpecError, match="no tar archive"):
        asyncio.run(build())


@pytest.mark.parametrize(
    "image", ["../events?x=", "get?names=roll-flash-sandbox:latest&x=", "a/../../events?", "a b", "a//b", "x#"]
)
def test_a_text_that_is_no_name_of_an_image_asks_the_engine_for_nothing_else(docker: str, image: str) -> None:
    """A task folder names its image: one was answered with all events of the engine, another with a whole archive."""

    async def ask() -> None:
        async with open_engine() as engine, asyncio.timeout(20):
            with pytest.raises(SandboxImageError, match="is no name of an image"):
                await image_of(engine, SandboxSpec(image=image))
            assert await stored_images.inspect_image(engine, image) is None

    asyncio.run(ask())


@pytest.mark.parametrize(
    "image",
    [
        *("debian", "roll-flash-sandbox:latest", "a.b-c__d/e:1.2_3-x", "Registry.example:5000/a/b:v1", "0123abcdef"),
        *(f"a/b@sha256:{'0' * 64}", f"sha256:{'0' * 64}", "[2001:db8::1]:5000/a"),
    ],
)
def test_names_of_images_are_taken(image: str) -> None:
    assert stored_images.IMAGE_NAME.fullmatch(image)


def test_a_dockerfile_that_fails_says_at_what(docker: str) -> None:
    async def build() -> None:
        async with open_sandbox(SandboxSpec(dockerfile=BASE + "COPY missing /\n"), provider="docker"):
            pass

    with pytest.raises(SandboxImageError, match="missing"):
        asyncio.run(build())


def test_a_lost_network_bridge_is_named_with_what_to_do() -> None:
    """The words of engine 20.10 after `ip link delete docker0`."""
    said = (
        "failed to create endpoint interesting_jepsen on network bridge: adding interface vethc5e6865 to bridge "
        "docker0 failed: could not find bridge docker0: route ip+net: no such network interface"
    )
    assert "network bridge is gone, restart the engine" in str(build_error("image:1", said))


def test_a_writable_root_is_forked_and_its_image_is_removed_at_the_end(docker: str) -> None:
    spec = SandboxSpec(writable_root=True, user="0:0")

    async def fork() -> bytes:
        async with SandboxPool(provider="docker", size=0) as pool:
            async with pool.lease(spec) as sandbox:
                await sandbox.exec("echo kept > /kept")
                forked = await sandbox.snapshot()
            assert len(await asyncio.to_thread(own_snapshots)) == 1
            async with pool.lease(forked) as sandbox:
                return await sandbox.read("/kept")

    assert asyncio.run(fork()) == b"kept\n"
    assert own_snapshots() == []


def test_an_image_without_shell_or_python_works_unchanged(docker: str) -> None:
    """Only one static program in it, and no file of ours."""

    async def run() -> None:
        async with open_sandbox(SandboxSpec(image=name), provider="docker") as sandbox:
            assert (await sandbox.exec(["/attack", "stream-socket", "1"])).stdout == b"0\n"
            assert (await sandbox.exec("true")).exit_code == 127
            await sandbox.write("file", b"x")
            assert await sandbox.read("file") == b"x"

    name = f"roll-flash-test:{uuid.uuid4().hex[:12]}"
    subprocess.run(["docker", "import", "-", name], input=bare_image(), capture_output=True, check=True)
    try:
        asyncio.run(run())
    finally:
        subprocess.run(["docker", "rmi", "-f", name], capture_output=True, check=True)


def test_ensuring_an_image_that_is_there_does_nothing(docker: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(ensure_image())
    assert capsys.readouterr().out == "sandbox image roll-flash-sandbox:latest is there\n"


def locks() -> set[str]:
    return {path.name for path in cache_folder().glob("build-*.lock")}


def test_locks_of_builds_do_not_add_up_and_are_never_held_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inside, most = 0, 0

    async def hold(what: str) -> None:
        nonlocal inside, most
        async with one_at_a_time("build", what):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    async def many() -> None:
        for index in range(300):
            await hold(str(index))
        nonlocal most
        most = 0
        monkeypatch.setattr(image_build, "LOCK_POLL_S", 0.001)
        await asyncio.gather(*(hold("one") for _ in range(20)))

    asyncio.run(many())
    assert len(locks()) == image_build.LOCKS
    assert most == 1


def test_a_lock_that_a_stopped_process_holds_is_an_error_in_time_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a run that was stopped by Ctrl-Z while it built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(image_build, "LOCK_TIMEOUTS_S", {"build": 0.4})
    monkeypatch.setattr(image_build, "PROGRESS_S", 0.1)

    async def hold_twice() -> None:
        async with one_at_a_time("build", "it"), asyncio.timeout(20), one_at_a_time("build", "it"):
            pass

    with pytest.raises(SandboxStartError, match=r"has held .*build-\d+\.lock for 0\.4 s.*end it"):
        asyncio.run(hold_twice())
    assert "another process holds" in capsys.readouterr().err


def test_a_build_that_nobody_asks_for_any_more_is_removed_and_one_in_use_stays(
    dockerfile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = f"{BUILDS}:{image_key(dockerfile, BUILT)}"

    listed = stored_images.list_images

    async def only_this(*words: Any) -> list[dict[str, Any]]:
        return [found for found in await listed(*words) if image in found["RepoTags"]]

    monkeypatch.setattr(stored_images, "list_images", only_this)

    async def grow_old() -> None:
        async with open_engine() as engine:
            async with open_sandbox(SandboxSpec(dockerfile=dockerfile, context=BUILT), provider="docker"):
                assert await prune_builds(engine, 1e-3) == []  # a container uses it
            assert await prune_builds(engine) == []
            await asyncio.sleep(1)
            monkeypatch.setattr(stored_images, "NOTE_EVERY_S", 0.5)
            assert await use_build(engine, image)  # notes the use
            age_s = await stored_images._unused_s(engine, image)
            assert age_s is not None
            assert age_s < 1
            await asyncio.sleep(0.01)
            assert [name for name, _ in await prune_builds(engine, 1e-3)] == [image]
            assert not await use_build(engine, image)

    asyncio.run(grow_old())


def test_a_fork_of_a_writable_root_has_what_was_changed_and_lacks_what_was_removed(docker: str) -> None:
    """Owners, modes, links and removals, as a file system on a disk would keep them."""
    change = """
        cd /root && mkdir -p a/b && echo deep > a/b/file && ln -s a/b/file link && chmod 750 a/b/file
        truncate -s 1000000 sparse && rm -r /etc/apt && rm /etc/debian_version
        rm -r /usr/share/bash-completion /etc/init.d 2> /dev/null; mkdir /etc/init.d && echo new > /etc/init.d/only
        mv /etc/issue /etc/issue.moved && echo more >> /etc/issue.net && mkfifo pipe
        rm /etc/host.conf && mkfifo /etc/host.conf
    """
    look = """
        cd /root && cat link && stat -c '%a %u %s' a/b/file sparse && ls -d /etc/apt /etc/debian_version /etc/issue
        ls /etc/init.d; tail -n 1 /etc/issue.net; ls /etc/issue.moved; test -f /etc/host.conf && echo a file
    """
    spec = SandboxSpec(writable_root=True, user="0:0")

    async def fork() -> list[str]:
        async with SandboxPool(provider="docker", size=0) as pool:
            async with pool.lease(spec) as sandbox:
                assert (await sandbox.exec(change)).ok
                seen = [(await sandbox.exec(look)).stdout_text]
                forked = await sandbox.snapshot()
                await sandbox.exec("echo later > /root/later; rm /root/link")
                again = await sandbox.snapshot()
            async with pool.lease(forked) as first, pool.lease(again) as second:
                seen.append((await first.exec(look)).stdout_text)
                seen.append((await second.exec("ls /root")).stdout_text)
        return seen

    before, after, later = asyncio.run(fork())
    assert before == "deep\n750 0 5\n644 0 1000000\nonly\nmore\n/etc/issue.moved\n"
    assert after == before
    assert later.split() == ["a", "later", "sparse"]


def test_a_second_fork_lacks_what_was_removed_since_the_first_in_folders_that_the_image_does_not_have(
    docker: str,
) -> None:
    make = """
        mkdir -p /new/sub /new/inner /opt/made /moved && cd /new
        touch gone sub/gone inner/kept old && ln -s gone link
        touch /opt/made/gone /moved/gone
    """
    change = """
        cd /new && rm gone sub/gone link /opt/made/gone /moved/gone && mv old renamed && rm -r inner && touch inner
        mv /moved /opt/moved && mkdir /moved && touch /moved/other
    """
    look = "find /new /opt /moved | sort"
    spec = SandboxSpec(writable_root=True, user="0:0")

    async def fork() -> list[str]:
        async with SandboxPool(provider="docker", size=0) as pool:
            async with pool.lease(spec) as sandbox:
                assert (await sandbox.exec(make)).ok
                await sandbox.snapshot()
                assert (await sandbox.exec(change)).ok
                seen = [(await sandbox.exec(look)).stdout_text]
                again = await sandbox.snapshot()
                seen.append((await sandbox.exec(look)).stdout_text)
            async with pool.lease(again) as sandbox:
                seen.append((await sandbox.exec(look)).stdout_text)
        return seen

    before, *after = asyncio.run(fork())
    assert "/new/renamed\n" in before
    assert "gone" not in before
    assert after == [before, before]


@pytest.mark.parametrize(
    ("path", "how"),
    [("passwd", "mkfifo passwd"), ("group", "mkfifo fifo; ln -s fifo group"), ("passwd", "ln -s /proc/kmsg passwd")],
)
def test_a_fork_is_refused_at_once_where_the_engine_would_wait_for_a_file(docker: str, path: str, how: str) -> None:
    async def fork() -> bytes:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            left_running = "while sleep 0.05; do date +%N > /root/alive; done > /dev/null &"
            assert (await sandbox.exec(f"{left_running} cd /etc && rm {path} && {how}")).ok
            async with asyncio.timeout(20):
                with pytest.raises(SandboxFileError, match=f"/etc/{path} is no plain file"):
                    await sandbox.snapshot()
            return (await sandbox.exec("rm /root/alive; sleep 0.5; ls /root/alive")).stdout

    assert asyncio.run(fork()), "what ran goes on"


@pytest.mark.parametrize("path", ["passwd", "group"])
@pytest.mark.parametrize("there", ["/dev/ptmx", "/tmp/users", "/proc/self/fd/99"])
def test_a_fork_is_refused_where_the_engine_would_read_another_file_than_here(
    docker: str, path: str, there: str
) -> None:
    """A fork has a `/dev` of its own: the engine waited for ever for a terminal that code inside had removed here."""

    async def fork() -> None:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            link = f"echo x > /tmp/users; rm /dev/ptmx; cd /etc && mv {path} real && ln -s {there} {path}"
            assert (await sandbox.exec(link)).ok
            with pytest.raises(SandboxFileError, match=f"/etc/{path} is no plain file"):
                await sandbox.snapshot()
            assert (await sandbox.exec(f"ln -sf real /etc/{path}")).ok
            await sandbox.snapshot()

    asyncio.run(fork())


def test_a_file_that_is_swapped_all_the_time_is_seen_as_what_it_is_when_all_has_stopped(docker: str) -> None:
    """A rename that had begun when its process was stopped is done afterwards."""

    async def fork() -> list[str]:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            await sandbox.write("/root/attack", attack_program(), mode=0o755)
            await sandbox.exec(["/root/attack", "swap-passwd", "40"], timeout=10)
            ended: list[str] = []
            while len(ended) < 6 or ("refused" not in ended and len(ended) < 20):
                try:
                    async with asyncio.timeout(20):
                        await sandbox.snapshot()
                    ended.append("taken")
                except SandboxFileError as error:
                    ended.append("refused" if "/etc/passwd is no plain file" in str(error) else str(error))
            return ended

    ended = asyncio.run(fork())
    assert "refused" in ended
    assert set(ended) <= {"refused", "taken"}


def test_what_would_wake_itself_while_all_has_to_stand_still_is_not_forked(docker: str) -> None:
    """It would put a pipe where the engine reads when everything has been looked at."""

    async def fork() -> bytes:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            await sandbox.write("/root/attack", attack_program(), mode=0o755)
            for number in (signal.SIGCONT, signal.SIGKILL):
                refused = await sandbox.exec(["/root/attack", "set-signal", str(int(number))])
                assert b"not permitted" in refused.stdout
            assert (await sandbox.exec(["/root/attack", "alarm-clock", str(int(signal.SIGCONT))])).ok
            async with asyncio.timeout(20):
                with pytest.raises(SandboxFileError, match=r"does not stop|is no plain file"):
                    await sandbox.snapshot()
            return (await sandbox.exec("echo here")).stdout

    assert asyncio.run(fork()) == b"here\n"


def test_what_wakes_when_the_engine_uses_up_the_memory_is_not_forked(docker: str) -> None:
    """The kernel then ended a stopped process, whose child went on and put a pipe where the engine reads."""
    spec = SandboxSpec(writable_root=True, user="0:0", memory_mb=128)

    async def fork() -> bytes:
        async with open_sandbox(spec, provider="docker") as sandbox:
            await sandbox.write("/root/attack", attack_program(), mode=0o755)
            async with sandbox.stream(["/root/attack", "wake-by-memory"]) as stream:
                told = await stream.next()
                assert told is not None
                assert told.data == b"full\n"
                async with asyncio.timeout(20):
                    with pytest.raises(SandboxFileError, match=r"leaves no memory|is no plain file"):
                        await sandbox.snapshot()
            await sandbox.kill_all()
            return (await sandbox.exec("echo here")).stdout

    assert asyncio.run(fork()) == b"here\n"


def test_after_a_fork_what_was_stopped_before_is_still_stopped_and_nothing_else(docker: str) -> None:
    async def fork() -> list[str]:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            # A missing file is no reason to refuse.
            stop_second = "kill -STOP $!; until grep -q 'State:.T' /proc/$!/status; do sleep 0.05; done"
            assert (await sandbox.exec(f"rm /etc/group; sleep 60 & sleep 61 & sleep 0.3; {stop_second}")).ok
            await sandbox.snapshot()
            seen = await sandbox.exec("grep -h State $(grep -l sleep /proc/[0-9]*/comm | sed s/comm/status/)")
            return sorted(line.split()[1] for line in seen.stdout_text.splitlines())

    assert asyncio.run(fork()) == ["S", "T"]


def test_all_stands_still_as_long_as_any_root_is_kept(docker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two snapshots at once, or one that was cancelled, let processes go on under the other one."""
    keep_root, stood_still = DockerProvider._keep_root, list[bool]()
    begun = asyncio.Semaphore(0)

    async def fork() -> str:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            assert (await sandbox.exec("while sleep 0.01; do date +%N > /root/alive; done > /dev/null & sleep 0.5")).ok

            async def keep_and_look(*arguments: Any) -> None:
                begun.release()
                before = await sandbox.read("/root/alive")
                await asyncio.sleep(0.3)
                await keep_root(*arguments)
                stood_still.append(await sandbox.read("/root/alive") == before)

            monkeypatch.setattr(DockerProvider, "_keep_root", keep_and_look)
            first, cancelled = asyncio.create_task(sandbox.snapshot()), asyncio.create_task(sandbox.snapshot())
            await begun.acquire()
            await begun.acquire()
            await asyncio.sleep(0.1)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await first
            return (await sandbox.exec("rm /root/alive; sleep 0.5; ls /root/alive")).stdout_text

    assert asyncio.run(fork()), "what ran goes on"
    assert stood_still == [True, True]


def test_what_ran_goes_on_after_a_snapshot_that_is_cancelled_while_it_is_stopped(docker: str) -> None:
    """It stood still for ever: nobody had waited for the answer, so nobody let it go on."""

    async def fork() -> str:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            assert (await sandbox.exec("while sleep 0.01; do date +%N > /root/alive; done > /dev/null & sleep 0.5")).ok
            assert isinstance(sandbox, AgentSandbox)
            stopping = asyncio.create_task(paused(sandbox._connection).__aenter__())
            await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            return (await sandbox.exec("rm /root/alive; sleep 0.5; ls /root/alive")).stdout_text

    assert asyncio.run(fork()), "what ran goes on"


@pytest.mark.parametrize("name", ["/.wh.usr", "/root/.wh.", "/root/a/.wh..wh..opq"])
def test_a_name_that_the_engine_takes_for_the_mark_of_a_removal_is_not_forked(docker: str, name: str) -> None:
    """The fork had no /usr; or the engine gave up the image, which looked like a failure of the machine."""

    async def fork() -> str:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            assert (await sandbox.exec(f"mkdir /root/a && touch {name} && mkfifo /root/.wh.pipe")).ok
            with pytest.raises(SandboxFileError, match=rf"{name.rpartition('/')[2]}: Invalid argument"):
                await sandbox.snapshot()
            assert (await sandbox.exec(f"rm {name}")).ok
            return (await sandbox.snapshot()).image or ""

    assert asyncio.run(fork())


def test_a_sparse_file_of_a_terabyte_is_not_forked_to_the_engines_disk(docker: str) -> None:
    async def fork() -> None:
        async with open_sandbox(SandboxSpec(writable_root=True, user="0:0"), provider="docker") as sandbox:
            assert (await sandbox.exec("truncate -s 1000000000000 /sparse")).ok
            with pytest.raises(SandboxFileError, match="sparse: File too large"):
                await sandbox.snapshot()

    asyncio.run(fork())


def test_folders_without_number_are_not_forked_to_the_engines_disk(docker: str) -> None:
    """They take room there, but none of the layer's size."""
    spec = SandboxSpec(writable_root=True, root_mb=4, user="0:0")
    make = "import os\nfor number in range(2000): os.mkdir(f'/root/{number}')"

    async def fork() -> None:
        async with open_sandbox(spec, provider="docker") as sandbox:
            assert (await sandbox.exec(["python3", "-c", make])).ok
            with pytest.raises(SandboxFileError, match="Quota exceeded"):
                await sandbox.snapshot()
            assert (await sandbox.exec("rm -r /root/1???")).ok
            await sandbox.snapshot()

    asyncio.run(fork())


def test_a_folder_that_was_removed_with_what_the_engine_put_there_is_gone_in_a_fork(docker: str) -> None:
    """The engine mounts its own /etc/hosts; code inside removes the folder around it."""

    async def fork() -> str:
        async with SandboxPool(provider="docker", size=0) as pool:
            async with pool.lease(SandboxSpec(writable_root=True, user="0:0")) as sandbox:
                await sandbox.exec("cp -r /etc /kept 2> /dev/null; rm -r /etc")
                forked = await sandbox.snapshot()
            async with pool.lease(forked) as sandbox:
                return (await sandbox.exec("ls /kept/issue; ls /etc/issue 2>&1")).stdout_text

    assert "/kept/issue\n" in asyncio.run(fork())
