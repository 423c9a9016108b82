"""Attacks through files, links, names and archives, in both directions. Each runs for real and names its outcome."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import lzma
import os
import random
import subprocess
import tarfile
import threading
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from abuse import within

from roll_flash.sandboxes import Sandbox, SandboxFileError, SandboxSpec
from roll_flash.sandboxes.client import files
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.client.frames import Entry
from roll_flash.sandboxes.files import snapshot
from roll_flash.sandboxes.files.tree_writer import TreeWriter


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("treasure")
    return path


def test_a_link_to_a_secret_of_the_machine_reads_only_the_sandboxs_own(provider: str, secret: Path) -> None:
    async def read(sandbox: Sandbox) -> None:
        await sandbox.exec(f"ln -s {secret} secret; ln -s /etc/shadow shadow; mkdir d; ln -s / d/root")
        for path in ("secret", "shadow", f"d/root{secret}", f"../../../..{secret}", "/proc/1/root" + str(secret)):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)

    within(provider, read)


def test_a_write_through_a_link_replaces_the_link(provider: str) -> None:
    async def write(sandbox: Sandbox) -> None:
        await sandbox.exec("echo old > target; ln -s target link; ln -s /etc/passwd passwd")
        await sandbox.write("link", b"new")
        await sandbox.write("passwd", b"new")
        assert await sandbox.read("target") == b"old\n"
        assert (await sandbox.exec("test -L link || test -L passwd")).exit_code == 1

    within(provider, write)


def test_a_write_that_cannot_be_finished_leaves_the_old_file(provider: str) -> None:
    async def write(sandbox: Sandbox) -> None:
        await sandbox.write("file", b"old")
        with pytest.raises(SandboxFileError, match="No space"):
            await sandbox.write("file", b"x" * (80 << 20))
        assert await sandbox.read("file") == b"old"
        assert (await sandbox.exec("ls -A")).stdout == b"file\n"

    within(provider, write)


def test_a_fifo_or_a_device_does_not_block_a_read(provider: str) -> None:
    async def read(sandbox: Sandbox) -> None:
        await sandbox.exec("mkfifo pipe; ln -s pipe link; ln -s /dev/zero zero; ln -s /dev/stdin stdin")
        for path in ("pipe", "link", "zero", "stdin", "/dev/random"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)

    within(provider, read)


def test_a_hard_link_to_a_file_of_root_is_refused(provider: str) -> None:
    async def link(sandbox: Sandbox) -> None:
        assert not (await sandbox.exec("ln /etc/passwd linked || ln /usr/bin/env linked")).ok

    within(provider, link)


def test_absurd_names_come_out_as_they_are(provider: str, tmp_path: Path) -> None:
    names = [b"new\nline", b"x" * 255, b"\xff\xfe", b" ", b"-rf", b"a\\b", "späße".encode(), b"$(reboot)"]

    async def name(sandbox: Sandbox) -> None:
        for number, raw in enumerate(names):
            await sandbox.write("d/" + os.fsdecode(raw), str(number))
        await sandbox.get_tree("d", tmp_path / "out")

    within(provider, name)
    found = {os.fsencode(path.name): path.read_text() for path in (tmp_path / "out").iterdir()}
    assert found == {raw: str(number) for number, raw in enumerate(names)}


def test_names_are_those_of_the_sandbox_whatever_the_locale_of_this_machine_is(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a locale that is not UTF-8 no sandbox with such a file could be copied or forked."""
    names = sorted([b"\xff", "späße".encode(), "€".encode()])

    async def name(sandbox: Sandbox) -> None:
        for raw in names:
            await sandbox.write("d/" + raw.decode(errors="surrogateescape"), "x")
        monkeypatch.setattr(os, "fsdecode", lambda name: name if isinstance(name, str) else name.decode("latin-1"))
        await sandbox.get_tree("d", tmp_path / "out")
        await sandbox.snapshot()

    within(provider, name)
    assert sorted(os.listdir(bytes(tmp_path / "out"))) == names


def test_a_tree_with_links_out_of_it_comes_out_without_them(provider: str, tmp_path: Path, secret: Path) -> None:
    async def fetch(sandbox: Sandbox) -> list[str]:
        line = f"mkdir -p d/e; ln -s {secret} d/a; ln -s ../../../x d/b; ln -s .. d/e/up; ln -s e d/fine; mkfifo d/p; "
        line += "echo x > d/e/f"
        await sandbox.exec(line)
        return sorted((await sandbox.get_tree("d", tmp_path / "out")).left_out)

    assert within(provider, fetch) == ["a", "b", "p"]
    assert not (tmp_path / "out/a").exists()
    assert (tmp_path / "out/fine/f").read_text() == "x\n"


def test_a_tree_that_is_swapped_for_a_link_while_it_is_read_writes_nothing_outside(
    provider: str, tmp_path: Path
) -> None:
    async def swap(sandbox: Sandbox) -> None:
        line = "mkdir -p d/s; echo x > d/s/f; while :; do mv d/s d/t; ln -s /etc d/s; rm d/s; mv d/t d/s; done"
        async with sandbox.stream(line, timeout=30):
            for number in range(10):
                try:
                    await sandbox.get_tree("d", tmp_path / str(number))
                except SandboxFileError:
                    continue

    within(provider, swap)
    outside = {path.name for path in tmp_path.iterdir()}
    assert outside <= {str(number) for number in range(10)}


def test_a_tree_over_the_limits_is_refused_before_anything_is_written(provider: str, tmp_path: Path) -> None:
    async def fetch(sandbox: Sandbox) -> None:
        await sandbox.exec("mkdir d; truncate -s 100G d/big; mkdir many; cd many; for i in $(seq 50); do : > $i; done")
        with pytest.raises(SandboxFileError):
            await sandbox.get_tree("d", tmp_path / "big")
        with pytest.raises(SandboxFileError):
            await sandbox.get_tree("many", tmp_path / "many", max_entries=49)

    within(provider, fetch)
    assert list(tmp_path.iterdir()) == []


def archive(*members: tuple[tarfile.TarInfo, bytes], mode: Literal["w", "w:gz"] = "w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def member(name: str, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(archive((member("../../escaped"), b"x")), id="a path that leads up"),
        pytest.param(archive((member("link", type=tarfile.SYMTYPE, linkname="/etc"), b"")), id="a link to the outside"),
        pytest.param(
            archive((member("a", type=tarfile.SYMTYPE, linkname="../.."), b""), (member("a/escaped"), b"x")),
            id="a file through a link",
        ),
        pytest.param(
            archive((member("hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"), b"")), id="a hard link out"
        ),
        pytest.param(archive((member("disk", type=tarfile.BLKTYPE, devmajor=8), b"")), id="a device"),
        pytest.param(archive((member("bomb"), bytes(300 << 20))), id="a bomb"),
        pytest.param(b"no archive at all", id="garbage"),
        pytest.param(archive((member("f"), b"x" * 1000))[:-20], id="an archive cut short"),
    ],
)
def test_a_hostile_archive_is_refused(provider: str, packed: bytes) -> None:
    async def put(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFileError):
            await sandbox.put_tree(packed, "d")
        assert (await sandbox.exec("ls -A")).stdout in (b"", b"d\n")

    within(provider, put)


def test_an_archive_with_links_longer_than_any_path_writes_nothing_outside(provider: str, tmp_path: Path) -> None:
    """The public archive of CVE-2025-4517, pointed at a folder of this test."""
    part, path, members = "d" * 247, "", []
    for letter in "abcdefghijklmnop":
        members += [member(f"{path}{part}", type=tarfile.DIRTYPE)]
        members += [member(f"{path}{letter}", type=tarfile.SYMTYPE, linkname=part)]
        path += part + "/"
    chain = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    members += [member(chain, type=tarfile.SYMTYPE, linkname="../" * 16)]
    members += [member("escape", type=tarfile.SYMTYPE, linkname=f"{chain}/{'../' * 8}{tmp_path}")]
    packed = archive(*((one, b"") for one in members), (member("escape/planted"), b"x"))

    async def put(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFileError, match="leads out"):
            await sandbox.put_tree(packed, "d")

    within(provider, put)
    assert list(tmp_path.iterdir()) == []


def zipped(*members: tuple[str, int, bytes]) -> bytes:
    """Of (name, mode with type, content)."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one name twice is meant
        for name, mode, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def damaged(pack: Callable[[bytes], bytes]) -> bytes:
    """An archive of 100 KB that cannot be compressed, with damage in the middle of it."""
    packed = bytearray(pack(archive((member("f"), random.Random(0).randbytes(100_000)), mode="w")))
    packed[50_000:50_100] = bytes(100)
    return bytes(packed)


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(damaged(gzip.compress), id="gzip"),
        pytest.param(damaged(bz2.compress), id="bzip2"),
        pytest.param(damaged(lzma.compress), id="xz"),
        pytest.param(
            zipped(("n\u00e4me", 0o100644, b"x")).replace("\u00e4".encode(), b"\xff\xff"), id="a name that is no text"
        ),
        pytest.param(archive((member("a\0b", pax_headers={"path": "a\0b"}), b"x")), id="a name with a NUL"),
    ],
)
def test_a_damaged_archive_is_an_error_of_ours(provider: str, packed: bytes) -> None:
    async def put(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFileError, match="cannot be unpacked"):
            await sandbox.put_tree(packed, "d")

    within(provider, put)


def test_a_source_that_is_not_there_is_an_error(provider: str, tmp_path: Path) -> None:
    async def put(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFileError, match="No such file"):
            await sandbox.put_tree(tmp_path / "missing", "d")

    within(provider, put)


def test_links_that_lead_out_through_other_links_do_not_come_out(provider: str, tmp_path: Path, secret: Path) -> None:
    """As text each stays inside; step by step they reach a file of this machine, and a folder to plant files in."""
    down, up = "a/" * 40, "../" * 40
    line = f"mkdir -p d/{down} d/r; ln -s {up}r d/{down}z; cd d; "
    line += f"ln -s {down}z/{up}{secret} report.txt; ln -s {down}z/{up}{tmp_path} folder; "
    line += f"ln -s report.txt twice; ln -s {down}z/x fine; ln -s {down}z/.. root; echo x > r/x"

    async def fetch(sandbox: Sandbox) -> list[str]:
        assert (await sandbox.exec(line)).ok
        return sorted((await sandbox.get_tree("d", tmp_path / "out")).left_out)

    assert within(provider, fetch) == ["folder", "report.txt", "twice"]
    assert (tmp_path / "out/fine").read_text() == "x\n"
    assert (tmp_path / "out/root").resolve() == (tmp_path / "out").resolve()


def test_names_that_were_planted_do_not_stop_a_write(provider: str) -> None:
    async def write(sandbox: Sandbox) -> None:
        planted = await sandbox.exec("seq -f .roll-flash-%.0f~ 0 20000 | xargs touch", timeout=30)
        assert planted.ok, planted
        await sandbox.write("file", b"written")
        assert await sandbox.read("file") == b"written"

    within(provider, write)


def test_a_tree_of_long_names_is_refused_and_the_sandbox_lives(provider: str, tmp_path: Path) -> None:
    """Its listing would be larger than what the agent may have under way."""
    line = "p=$(printf %0250d 0); mkdir -p d; cd d; for i in 1 2 3 4 5 6 7; do mkdir $p; cd $p; done; seq -w 20000 | "
    line += f"sed 's/$/{'x' * 240}/' | xargs touch"

    async def fetch(sandbox: Sandbox) -> None:
        made = await sandbox.exec(line, timeout=60)
        assert made.ok, made.stderr
        with pytest.raises(SandboxFileError, match="too long"):
            await sandbox.get_tree("d", tmp_path / "out", max_entries=30_000)

    within(provider, fetch)


def test_a_folder_here_that_nests_too_deeply_is_refused(provider: str, tmp_path: Path) -> None:
    """Of a task of somebody else, say; Python's own walk ends at its limit of recursion."""
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=folder)
        folder, above = os.open("d", os.O_RDONLY, dir_fd=folder), folder
        os.close(above)
    os.close(folder)

    async def put(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFileError, match="deeper than 200"):
            await sandbox.put_tree(tmp_path, "d")

    try:
        within(provider, put)
    finally:
        subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)


def lying(packed: bytes, size: int) -> bytes:
    """The same zip, whose directory and header say that its one file is small."""
    told, small = size.to_bytes(4, "little"), (10).to_bytes(4, "little")
    assert packed.count(told) == 2
    return packed.replace(told, small)


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(zipped(("../../escaped", 0o100644, b"x")), id="a path that leads up"),
        pytest.param(zipped(("/etc/escaped", 0o100644, b"x")), id="an absolute path"),
        pytest.param(zipped(("link", 0o120777, b"/etc")), id="a link"),
        pytest.param(zipped(("link", 0o120777, b".."), ("link/escaped", 0o100644, b"x")), id="a file through a link"),
        pytest.param(zipped(("a", 0o100644, b"1"), ("a", 0o100644, b"2")), id="one name twice"),
        pytest.param(zipped(("bomb", 0o100644, bytes(300 << 20))), id="a bomb"),
        pytest.param(
            lying(zipped(("bomb", 0o100644, bytes(299_999_999))), 299_999_999), id="a bomb that says it is none"
        ),
        pytest.param(zipped(("f", 0o100644, b"x" * 1000))[:-20], id="a zip cut short"),
    ],
)
def test_a_hostile_zip_is_refused(provider: str, packed: bytes) -> None:
    async def put(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFileError):
            await sandbox.put_tree(packed, "d")
        assert (await sandbox.exec("ls -A")).stdout in (b"", b"d\n")

    within(provider, put)


def test_an_honest_zip_arrives(provider: str) -> None:
    async def put(sandbox: Sandbox) -> None:
        packed = zipped(("bin/", 0o40755, b""), ("bin/run", 0o100755, b"#!/bin/sh\necho ran\n"), ("f", 0, b"x"))
        report = await sandbox.put_tree(packed, "d")
        assert (report.files, report.bytes) == (2, 20)
        assert (await sandbox.exec("d/bin/run; cat d/f")).stdout == b"ran\nx"

    within(provider, put)


def test_an_absolute_name_in_an_archive_stays_inside_the_target(provider: str) -> None:
    async def put(sandbox: Sandbox) -> None:
        await sandbox.put_tree(archive((member("/etc/x"), b"x")), "d")
        assert await sandbox.read("d/etc/x") == b"x"

    within(provider, put)


def test_an_honest_archive_arrives(provider: str) -> None:
    async def put(sandbox: Sandbox) -> None:
        await sandbox.put_tree(archive((member("bin/run", mode=0o4755), b"#!/bin/sh\necho ran\n")), "d")
        assert (await sandbox.exec("d/bin/run; stat -c %a d/bin/run")).stdout == b"ran\n755\n"

    within(provider, put)


def test_a_large_file_of_a_tree_is_never_whole_in_memory(provider: str, tmp_path: Path) -> None:
    """290 MB for one sparse file of each episode, of which hundreds end together; eight held up the loop for 1 s."""
    make = "mkdir t && truncate -s 60M t/large && echo end >> t/large && : > t/empty && truncate -s 1M t/one"

    async def copy(sandbox: Sandbox) -> int:
        assert (await sandbox.exec(make)).ok
        tracemalloc.start()
        try:
            await sandbox.get_tree("t", tmp_path / "out")
            report = await sandbox.put_tree(tmp_path / "out", "/tmp/t")
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (report.files, report.bytes) == (3, 61 * 2**20 + 4)
        assert (await sandbox.exec("for f in empty large one; do cmp t/$f /tmp/t/$f || exit 1; done")).ok
        return most

    assert within(provider, copy, SandboxSpec(memory_mb=512, tmpfs_mb=100)) < 16 << 20


NAMED = """
import os, sys
os.chdir("/sandbox")
for number in range(4000):
    open(f"{number:06d}" + "n" * 200, "wb").close()
open("large", "wb").write(bytes(int(sys.argv[1])))
"""


def test_whatever_a_snapshot_takes_can_be_put_back(provider: str) -> None:
    """Or code inside could choose that no fork of it starts."""
    spec = SandboxSpec(memory_mb=512, tmpfs_mb=100)

    async def take(sandbox: Sandbox) -> SandboxSpec:
        assert (await sandbox.exec(["python3", "-c", NAMED, str((64 << 20) - 4000 * 800)])).ok
        return await sandbox.snapshot()

    async def count(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("ls | wc -l")).stdout

    assert within(provider, count, within(provider, take, spec)) == b"4001\n"


LINKED = """import os
os.symlink(1000 * "x", "1")
for number in range(2, 4100): os.link("1", str(number), follow_symlinks=False)"""


@pytest.mark.parametrize(
    ("workdir", "fill"),
    [
        ("/sandbox", "truncate -s 17M large"),
        ("/sandbox", "truncate -s 17M /tmp/large"),
        ("/tmp/work", "truncate -s 17M large"),
        ("/sandbox", "seq 5000 | xargs truncate -s 1"),
        ("/sandbox", "head -c 6000000 /dev/zero >1; ln 1 2; ln 1 3"),
        ("/sandbox", f"python3 -c '{LINKED}'"),
    ],
    ids=["sparse", "sparse in /tmp", "a folder in /tmp", "many", "hard links", "hard links of a link"],
)
def test_what_does_not_fit_into_another_sandbox_is_no_snapshot(provider: str, workdir: str, fill: str) -> None:
    """No fork of it started: sparse files and hard links take less room than their copies."""
    full = "rm -rf * /tmp/large; head -c 16777216 /dev/zero > full; ln -s full link"

    async def take(sandbox: Sandbox) -> SandboxSpec:
        assert (await sandbox.exec(fill, timeout=60)).ok
        with pytest.raises(SandboxFileError, match="its files do not fit into another like it"):
            await sandbox.snapshot()
        assert (await sandbox.exec(full)).ok
        return await sandbox.snapshot()

    async def look(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("wc -c < link")).stdout

    spec = SandboxSpec(memory_mb=64, workdir=workdir)
    assert within(provider, look, within(provider, take, spec)) == b"16777216\n"


def test_a_file_that_grows_while_its_snapshot_is_taken_is_counted_as_it_was_read(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fork of it started: only the size from before, as listed, was counted."""
    listed = files.list_tree

    async def take(sandbox: Sandbox) -> None:
        async def grow(*args: Any) -> Any:
            entries = await listed(*args)
            assert (await sandbox.exec("truncate -s 17M large")).ok
            return entries

        assert (await sandbox.exec("truncate -s 1 large")).ok
        await sandbox.snapshot()
        monkeypatch.setattr(files, "list_tree", grow)
        with pytest.raises(SandboxFileError, match="its files do not fit into another like it"):
            await sandbox.snapshot()

    within(provider, take, SandboxSpec(memory_mb=64))


LONG = """
import os, sys
left = int(sys.argv[1]) - len(os.getcwd())
while left:
    name = "n" * (199 if left > 256 else left - 1)
    os.mkdir(name)
    os.chdir(name)
    left -= 1 + len(name)
make = {"file": os.mknod, "link": lambda name: os.symlink("x", name), "folder": os.mkdir}
make[sys.argv[2]]("last")
"""


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_path_that_is_too_long_in_another_sandbox_is_no_snapshot(provider: str, kind: str) -> None:
    """No fork of it started: one cannot be made there by its whole name, or not the file that takes its place."""

    async def take(sandbox: Sandbox) -> SandboxSpec:
        assert (await sandbox.exec(["python3", "-c", LONG, "4094" if kind != "file" else "4080", kind])).ok
        with pytest.raises(SandboxFileError, match="name too long"):
            await sandbox.snapshot()
        assert (await sandbox.exec(["sh", "-c", "rm -r n*"])).ok
        assert (await sandbox.exec(["python3", "-c", LONG, "4040", kind])).ok
        return await sandbox.snapshot()

    async def count(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("find . -name last | wc -l")).stdout

    assert within(provider, count, within(provider, take)) == b"1\n"


EMPTY_LINKS = """
import os
for folder in ("/sandbox", "/tmp"):
    os.chdir(folder)
    open("full", "wb").write(bytes(20 << 20))
    open("0", "wb").close()
    for number in range(1, 19000):
        os.link("0", str(number))
"""


def test_what_takes_more_memory_in_another_sandbox_is_no_snapshot(limited: str) -> None:
    """Links to one file are files there, of which each takes memory even if it is empty: no fork of it started."""
    spec = SandboxSpec(memory_mb=72, tmpfs_mb=32)

    async def take(sandbox: Sandbox) -> SandboxSpec:
        assert (await sandbox.exec(["python3", "-c", EMPTY_LINKS])).ok
        with pytest.raises(SandboxFileError, match="its files do not fit into another like it"):
            await sandbox.snapshot()
        assert (await sandbox.exec("rm full")).ok
        return await sandbox.snapshot()

    async def count(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("ls | wc -l")).stdout

    assert within(limited, count, within(limited, take, spec)) == b"19000\n"


def test_what_is_removed_while_a_snapshot_is_taken_is_not_in_it(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that makes and removes files all the time could choose that there is no snapshot."""
    listed = files.list_tree

    async def take(sandbox: Sandbox) -> SandboxSpec:
        async def vanish(*words: Any) -> Any:
            entries = await listed(*words)
            assert (await sandbox.exec("rm -f gone; rm -rf folder; touch folder")).ok
            return entries

        assert (await sandbox.exec("mkdir folder; touch a gone folder/gone z")).ok
        monkeypatch.setattr(files, "list_tree", vanish)
        return await sandbox.snapshot()

    async def look(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("find . -type f | sort")).stdout

    assert within(provider, look, within(provider, take)) == b"./a\n./z\n"


DEEP = """
import os
for _ in range(198):
    os.mkdir("d")
    os.chdir("d")
for number in range(4000):
    os.mkdir(str(number))
"""


@pytest.mark.docker
def test_deep_names_of_a_snapshot_are_put_back_in_time(docker: str) -> None:
    """40,000 of them took two minutes, so that no fork of such a snapshot started."""

    async def take(sandbox: Sandbox) -> SandboxSpec:
        assert (await sandbox.exec(["python3", "-c", DEEP])).ok
        return await sandbox.snapshot()

    async def used(sandbox: Sandbox) -> float:
        return (await sandbox.stats()).cpu_s or 0.0

    assert 0.0 < within(docker, used, within(docker, take)) < 2.0  # else 6


MANY = """
import os
for number in range(4000):
    os.mkdir(f"d{number}")
    os.symlink("x", f"l{number}")
"""


def test_many_members_of_a_snapshot_are_put_back_in_few_turns_of_a_busy_loop(provider: str) -> None:
    """One turn for each of 40,000 took longer than a start may, in a worker with 3 ms of other work in each turn."""

    async def count(sandbox: Sandbox) -> int:
        assert isinstance(sandbox, AgentSandbox)
        assert (await sandbox.exec(["python3", "-c", MANY])).ok
        forked = await sandbox.snapshot()
        await sandbox.remove("/sandbox/")
        turns = 0

        async def work() -> None:
            nonlocal turns
            while True:
                time.sleep(0.002)  # noqa: ASYNC251 - it is what the loop is busy with
                turns += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(work())
        await snapshot.populate(sandbox._connection, forked)
        working.cancel()
        assert (await sandbox.exec("ls | wc -l")).stdout == b"8000\n"
        return turns

    assert within(provider, count, SandboxSpec(open_files=16)) < 3000


def test_many_files_of_a_snapshot_are_read_in_few_turns_of_a_busy_loop(provider: str) -> None:
    """Read one after another, 9,500 of them took 80 s in a worker with 2 ms of other work in each turn."""

    async def count(sandbox: Sandbox) -> int:
        assert (await sandbox.exec("seq 1000 | xargs touch")).ok
        turns = 0

        async def work() -> None:
            nonlocal turns
            while True:
                turns += 1
                time.sleep(0.001)  # noqa: ASYNC251 - it is what the loop is busy with
                await asyncio.sleep(0)

        working = asyncio.create_task(work())
        assert (await sandbox.snapshot()).tree.count(b"sandbox/") == 1000
        working.cancel()
        return turns

    assert within(provider, count) < 600


def test_deep_files_are_written_with_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open the 198 folders above each of 18,000 files took 26 s, and held up the event loop for 1.5 s."""
    opened, open_file = 0, os.open
    folders = ["/".join(["d"] * depth) for depth in range(1, 199)]

    def counted(*words: Any, **options: Any) -> int:
        nonlocal opened
        opened += 1
        return open_file(*words, **options)

    monkeypatch.setattr(os, "open", counted)
    before = len(os.listdir("/proc/self/fd"))
    with TreeWriter(tmp_path / "out") as writer:
        writer.make_folders([*folders, *(f"{folders[-2]}/{number}" for number in range(100))])
        for number in range(100):
            writer.write_file(f"{folders[-1]}/{number}", b"x", 0o644)
            writer.write_file(f"{folders[-2]}/{number}/file", b"y", 0o644)
        writer.write_file("d/file", b"z", 0o644)
        assert len(os.listdir("/proc/self/fd")) < before + 20
    assert len(os.listdir("/proc/self/fd")) == before
    assert opened < 1500
    assert (tmp_path / "out" / folders[-2] / "99/file").read_bytes() == b"y"
    assert (tmp_path / "out" / folders[-1] / "99").read_bytes() == b"x"
    assert (tmp_path / "out/d/file").read_bytes() == b"z"


def test_a_name_that_is_listed_twice_is_taken_once(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that a program removes and makes again while its folder is read: no fork of such a snapshot started."""
    listed = snapshot.files.list_tree

    async def twice(*words: Any) -> list[Entry]:
        found = await listed(*words)
        return [*found, *found, *(Entry(0o100644, 0, one.path + b"/below", b"") for one in found if one.target)]

    async def take(sandbox: Sandbox) -> SandboxSpec:
        await sandbox.exec("mkdir folder; echo 1 >folder/file; ln -s file folder/link; ln -s folder folder2")
        monkeypatch.setattr(snapshot.files, "list_tree", twice)
        return await sandbox.snapshot()

    async def look(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("ls . folder; cat folder2/link")).stdout

    assert within(provider, look, within(provider, take)) == b".:\nfolder\nfolder2\n\nfolder:\nfile\nlink\n1\n"


@pytest.mark.parametrize("workdir", ["/tmp", "/tmp/", "/tmp/work"])
def test_a_working_directory_in_tmp_is_taken_once(provider: str, workdir: str) -> None:
    async def take(sandbox: Sandbox) -> SandboxSpec:
        await sandbox.exec("mkdir d; echo 1 > d/a; ln -s d/a link; ln -s d /tmp/other")
        return await sandbox.snapshot()

    async def look(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("cat link; readlink /tmp/other")).stdout

    fork = within(provider, take, SandboxSpec(workdir=workdir))
    assert within(provider, look, fork) == b"1\nd\n"


def test_names_count_for_a_snapshot(provider: str) -> None:
    """It is kept in memory for as long as specs of it are."""

    async def take(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["python3", "-c", NAMED, str((64 << 20) - 4000 * 600)])).ok
        with pytest.raises(SandboxFileError, match="its files and their names take more than 64 MiB"):
            await sandbox.snapshot()

    within(provider, take, SandboxSpec(memory_mb=512, tmpfs_mb=100))


def test_other_sandboxes_need_not_wait_while_a_snapshot_is_packed_or_read(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes seconds for many small files, and half a second for deep names."""
    threads: dict[str, threading.Thread] = {}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            threads[name] = threading.current_thread()
            return function(*words, **options)

        return call

    monkeypatch.setattr(snapshot, "_plain", noted("listed", snapshot._plain))
    monkeypatch.setattr(snapshot, "_packed", noted("packed", snapshot._packed))
    monkeypatch.setattr(snapshot, "_unpacked", noted("read", snapshot._unpacked))

    async def take(sandbox: Sandbox) -> SandboxSpec:
        await sandbox.exec("mkdir folder; touch folder/file; ln -s file folder/link")
        return await sandbox.snapshot()

    async def look(sandbox: Sandbox) -> bytes:
        return (await sandbox.exec("ls folder")).stdout

    assert within(provider, look, within(provider, take)) == b"file\nlink\n"
    assert threads.keys() == {"listed", "packed", "read"}
    assert threading.main_thread() not in threads.values()
