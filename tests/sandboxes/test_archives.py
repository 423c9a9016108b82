"""Archives: honest ones are read as `tarfile` reads them, hostile ones cost little and reach nothing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import re
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_flash.sandboxes import SandboxFileError, SandboxSpecError
from roll_flash.sandboxes.files.archives import unpack
from roll_flash.sandboxes.files.build_context import read_build_folder
from roll_flash.sandboxes.files.tree_model import File, Folder, Link, walk

ROOT = Path(__file__).parents[2]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
}


def read(packed: bytes, *, max_bytes: int = 1 << 26, max_entries: int = 1000) -> dict[str, bytes | str | None]:
    """Path -> content of a file, target of a link, None for a folder."""
    contents = io.BytesIO()
    found: dict[str, bytes | str | None] = {}
    for folder, name, member in walk(unpack(packed, contents, max_bytes=max_bytes, max_entries=max_entries)):
        assert isinstance(member, Folder | File | Link)
        if isinstance(member, File):
            found[folder.path_of(name)] = contents.getvalue()[member.offset :][: member.size]
        else:
            found[folder.path_of(name)] = member.target if isinstance(member, Link) else None
    return found


def refused(packed: bytes, match: str | None = None, *, max_bytes: int = 1 << 26, max_entries: int = 1000) -> None:
    with pytest.raises(SandboxFileError, match=match):
        read(packed, max_bytes=max_bytes, max_entries=max_entries)


Described = tuple[str, bytes, str | bytes]


def tar(*members: Described, format: int = tarfile.PAX_FORMAT) -> bytes:
    """Of (name, type, content of a file or target of a link)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=format) as archive:
        for name, kind, rest in members:
            made = tarfile.TarInfo(name)
            made.type = kind
            if isinstance(rest, str):
                made.linkname = rest
                archive.addfile(made)
            else:
                made.size = len(rest)
                archive.addfile(made, io.BytesIO(rest))
    return packed.getvalue()


def header(kind: bytes, data: bytes, size: int | None = None) -> bytes:
    """A raw member, whose size may be said wrongly."""
    made = tarfile.TarInfo("x")
    made.type, made.size = kind, len(data) if size is None else size
    return made.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


FILE, LINK, HARD, DIRECTORY = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
names = st.lists(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=5,
).map("/".join)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_usual_format_is_read(packer: str, format: int) -> None:
    content = bytes(range(256)) * 1000
    packed = tar(
        ("./", DIRECTORY, ""),
        ("./a", DIRECTORY, ""),
        ("./a/" + "b" * 90 + "/file", FILE, content),
        ("/absolute", FILE, b"x"),
        ("link", LINK, "a/" + "b" * 90),
        ("link/through", FILE, b"inside"),
        ("a/up", LINK, "../absolute"),
        ("hard", HARD, "./absolute"),
        ("empty", FILE, b""),
        format=format,
    )
    assert read(PACKERS[packer](packed)) == {
        "a": None,
        "a/" + "b" * 90: None,
        "a/" + "b" * 90 + "/file": content,
        "a/" + "b" * 90 + "/through": b"inside",
        "a/up": "../absolute",
        "absolute": b"x",
        "empty": b"",
        "hard": b"x",
        "link": "a/" + "b" * 90,
    }


@settings(max_examples=40)
@given(
    st.dictionaries(names, st.binary(max_size=2000), max_size=8),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_any_honest_archive_is_read_as_tarfile_reads_it(files: dict[str, bytes], format: int) -> None:
    files = {name: data for name, data in files.items() if not any(other.startswith(name + "/") for other in files)}
    packed = tar(*((name, FILE, data) for name, data in files.items()), format=format)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        expected = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    found = read(packed) if files else {}
    assert {name: data for name, data in found.items() if data is not None} == expected == files


def long_chain(end: str, *, up: int = 16) -> list[Described]:
    """Links through folders whose names together are longer than any path: CVE-2025-4517."""
    part, path, members = "d" * 247, "", []
    for letter in "abcdefghijklmnop":
        members += [(f"{path}{part}", DIRECTORY, ""), (f"{path}{letter}", LINK, part)]
        path += part + "/"
    chain = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    return [*members, (chain, LINK, "../" * up), ("escape", LINK, chain + "/" + end)]


ESCAPES: dict[str, list[Described]] = {
    "the public archive": [*long_chain("../../../../../../../etc"), ("flag", HARD, "escape/x"), ("flag", FILE, b"x")],
    "the same with a file through it": [*long_chain("../../../tmp"), ("escape/x", FILE, b"x")],
    "one step too far up": [*long_chain("."), ("escape/../x", FILE, b"x")],
    "deep as text, shallow as links": [
        ("a/b/c/z", LINK, "../../../r"),
        ("r", DIRECTORY, ""),
        ("x", LINK, "a/b/c/z/../../y"),
    ],
    "a link made to lead out later": [
        ("a/b", DIRECTORY, ""),
        ("x", LINK, "a/../a/b/../../y/.."),
        ("y", LINK, ".."),
        ("z", LINK, "y"),
    ],
    "a loop": [("a", LINK, "b"), ("b", LINK, "a")],
    "a loop as a folder": [("a", LINK, "a"), ("a/x", FILE, b"x")],
    "up from what is not there": [("x", LINK, "missing/../y")],
    "up from a file": [("f", FILE, b""), ("x", LINK, "f/../y")],
    "a chain of fifty links": [(f"l{i}", LINK, f"l{i + 1}") for i in range(50)],
    "an absolute link": [("x", LINK, "/etc/passwd")],
    "an empty link": [("x", LINK, "")],
    "a hard link to what is not there": [("x", HARD, "y")],
    "a hard link to a folder": [("y", DIRECTORY, ""), ("x", HARD, "y")],
    "a hard link to a link": [("y", LINK, "z"), ("x", HARD, "y")],
    "an absolute hard link": [("etc/passwd", FILE, b""), ("x", HARD, "/etc/passwd")],
    "a hard link through a link out": [("y", LINK, ".."), ("x", HARD, "y/z")],
    "a hard link up": [("x", HARD, "../y")],
    "a file as a folder": [("x", FILE, b""), ("x/y", FILE, b"")],
    "a file in place of a folder": [("x", DIRECTORY, ""), ("x", FILE, b"")],
    "a name with ..": [("a/../../x", FILE, b"")],
    "no name at all": [(".", FILE, b"")],
    "a FIFO": [("x", tarfile.FIFOTYPE, "")],
    "a device": [("x", tarfile.CHRTYPE, "")],
    "a member of no known kind": [("x", b"Q", "")],
    "a deep folder": [("a/" * 300 + "x", FILE, b"")],
    "a long name": [("a" * 256, FILE, b"")],
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_an_archive_whose_links_or_names_lead_out_is_refused(escape: str) -> None:
    refused(tar(*ESCAPES[escape]))


def test_a_link_to_what_the_archive_does_not_hold_is_taken() -> None:
    assert read(tar(("a/x", LINK, "../build/out"))) == {"a": None, "a/x": "../build/out"}


@pytest.mark.parametrize("name", ["PKG-INFO", "BZh9", "]"])
def test_a_tar_is_one_whatever_its_first_name_looks_like(name: str) -> None:
    """A zip, bzip2, lzma."""
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert read(tar((name, FILE, b"x"), format=format)) == {name: b"x"}


def context_of(folder: Path, *ignored: str, file: str = ".dockerignore") -> set[str]:
    for name in ("Dockerfile", "kept", "solution.sh", "tests/a", "tests/deep/b.key", "deep/tests/c", "deep/d.key"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / file).write_text("\n".join(ignored))
    with tarfile.open(fileobj=io.BytesIO(read_build_folder(folder)[1])) as packed:
        return set(packed.getnames()) - {file}


@pytest.mark.parametrize(
    ("lines", "left_out"),
    [
        (["solution.sh", "/tests/"], {"solution.sh", "tests/a", "tests/deep/b.key"}),
        (["# solution.sh", "", " ./solution.sh "], {"solution.sh"}),
        (["**/tests"], {"tests/a", "tests/deep/b.key", "deep/tests/c"}),
        (["*/tests", "no-such-file"], {"deep/tests/c"}),
        (["**/*.key", "!deep/d.key"], {"tests/deep/b.key"}),
        (["**.key"], {"tests/deep/b.key", "deep/d.key"}),
        (["t**/b.key", "de**.key", "**te??s/*"], {"tests/a", "tests/deep/b.key", "deep/tests/c"}),
        (["*", "!kept"], {"solution.sh", "tests/a", "tests/deep/b.key", "deep/tests/c", "deep/d.key"}),
        (["*", "!tests", "tests/**/*.key"], {"kept", "solution.sh", "tests/deep/b.key", "deep/tests/c", "deep/d.key"}),
        (["[^a-r]olution.s?", "kep"], {"solution.sh"}),
        (["\\kept", "sol\\*", "deep\\/d.key"], {"kept", "deep/d.key"}),
        ([".", "..", "!", "/"], set()),
    ],
)
@pytest.mark.parametrize("file", [".dockerignore", "Dockerfile.dockerignore"])
def test_a_build_context_has_no_file_that_its_dockerignore_names(
    tmp_path: Path, lines: list[str], left_out: set[str], file: str
) -> None:
    everything = {"kept", "solution.sh", "tests/a", "tests/deep/b.key", "deep/tests/c", "deep/d.key"}
    assert context_of(tmp_path, *lines, file=file) == everything - left_out


def test_a_dockerignore_costs_little_and_is_no_file_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / ("a" * 250)).write_text("x")
    hard = ["*a" * 120 + "b", "/".join(["**", "a*"] * 100)] * 60
    assert seconds_of(lambda: context_of(tmp_path, *hard)) < 5
    with pytest.raises(SandboxSpecError, match="larger than 64 KiB"):
        context_of(tmp_path, *hard * 2)
    (tmp_path / ".dockerignore").unlink()
    (tmp_path / ".dockerignore").symlink_to("/etc/passwd")
    with pytest.raises(SandboxSpecError, match="a link"):
        read_build_folder(tmp_path)


def test_a_dockerfile_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes(b"FROM \xff")
    with pytest.raises(SandboxSpecError, match=r"Dockerfile: is no UTF-8 text"):
        read_build_folder(tmp_path)


def test_a_later_file_of_the_same_name_wins() -> None:
    assert read(tar(("x", LINK, "y"), ("y", FILE, b"1"), ("x", FILE, b"2"))) == {"x": b"2", "y": b"1"}


def peak_of(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


HUGE = 16 << 20


@pytest.mark.parametrize("packer", ["gz", "bz2", "xz"])
@pytest.mark.parametrize("kind", [b"x", b"L"])
def test_a_small_archive_with_a_huge_header_needs_little_memory(packer: str, kind: bytes) -> None:
    compressed = (
        PACKERS[packer](header(kind, b"", HUGE) + b"0" * HUGE)
        if packer != "xz"
        else lzma.compress(header(kind, b"", HUGE) + b"0" * HUGE, preset=0)
    )
    assert peak_of(lambda: refused(compressed, "a header of")) < 4 << 20


def test_many_headers_of_the_largest_size_are_refused() -> None:
    packed = gzip.compress(header(b"L", b"n" * (1 << 18)) * 100)
    assert peak_of(lambda: refused(packed, "unpacks to more than")) < 4 << 20


def test_many_headers_without_a_member_are_refused() -> None:
    refused(gzip.compress(header(b"x", b"") * 5000), "unpacks to more than")


def test_zeros_without_end_after_the_archive_are_refused() -> None:
    refused(gzip.compress(tar(("x", FILE, b"x")) + bytes(HUGE)), "follows its end")


def test_many_empty_streams_are_refused() -> None:
    refused(gzip.compress(b"") * 5000, "unpacks to more than")


def test_a_stream_that_needs_a_huge_dictionary_is_refused() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28, "preset": 0}]
    refused(lzma.compress(tar(("x", FILE, b"x")), filters=filters), "emory")


@pytest.mark.parametrize(
    "members",
    [
        pytest.param([("a/" * 150 + f"{i}/x", FILE, b"") for i in range(20)], id="folders on the way count"),
        pytest.param([(f"{i}", FILE, b"") for i in range(101)], id="files"),
        pytest.param([(f"{i}", LINK, "x") for i in range(101)], id="links"),
        pytest.param([(f"{i}", DIRECTORY, "") for i in range(101)], id="folders"),
    ],
)
def test_more_entries_than_allowed_are_refused(members: list[Described]) -> None:
    refused(tar(*members), "more than .* 100 files", max_entries=100)


def test_hard_links_count_with_what_they_repeat() -> None:
    packed = tar(("x", FILE, bytes(1 << 20)), *((f"{i}", HARD, "x") for i in range(10)))
    refused(packed, "unpacks to more than", max_bytes=8 << 20)


@pytest.mark.parametrize(
    "data",
    [
        b"8 path=a\n",
        b"x path=a\n",
        b"99999999999 path=a\n",
        b"5 a\n",
        b"0 path=\n",
        b"-1 a=b\n",
        b"10 size=\xff\xff\n",
        b"12 size=1e9\n",
    ],
)
def test_a_damaged_extension_header_is_refused(data: bytes) -> None:
    refused(header(b"x", data) + tar(("x", FILE, b"")))


@pytest.mark.parametrize("size", [b"\x80" + b"\xff" * 11, b"\xff" * 12, b"77777777777\0", b"abc"])
def test_an_absurd_size_is_refused(size: bytes) -> None:
    block = bytearray(tar(("x", FILE, b"x")))
    block[124:136] = size.ljust(12, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    refused(bytes(block))


def test_a_sparse_member_is_refused_with_what_to_do() -> None:
    refused(header(b"x", b"22 GNU.sparse.major=1\n") + tar(("x", FILE, b"")), "--sparse")
    refused(header(b"S", b""), "--sparse")


def test_names_that_are_no_text_are_taken_as_they_are() -> None:
    raw = "caf\udce9"
    assert read(tar((raw, FILE, b"x"), format=tarfile.GNU_FORMAT)) == {raw: b"x"}
    assert read(tar((raw, FILE, b"x"), format=tarfile.PAX_FORMAT)) == {raw: b"x"}


def deflated(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("a/b", b"some text " * 200)
        archive.writestr("c", b"more")
    return packed.getvalue()


HONEST = [tar(("a/b", FILE, b"some text " * 200), ("c", LINK, "a/b"), ("n" * 150, FILE, b"x"))]
HONEST += [pack(HONEST[0]) for pack in (gzip.compress, bz2.compress, lzma.compress)] + [deflated()]


@settings(max_examples=300)
@given(
    st.sampled_from(HONEST),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6),
    st.integers(0, 1 << 16),
)
def test_a_damaged_archive_is_an_error_of_ours_or_a_tree(
    packed: bytes, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(packed[: end % (len(packed) + 1)] if end % 3 else packed)
    for at, value in changes:
        if data:
            data[at % len(data)] = value
    with suppress(SandboxFileError):
        read(bytes(data))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_of_an_unbounded_method_is_refused_with_what_to_do(method: int) -> None:
    refused(deflated(method), "deflate")


def test_a_zip_with_a_huge_directory_is_refused_before_it_is_read() -> None:
    entry = b"PK\x01\x02" + bytes(24) + b"\x01\0" + bytes(16) + b"x"
    count = 100_000
    end = b"PK\x05\x06" + bytes(4) + b"\xff\xff" * 2 + (count * len(entry)).to_bytes(4, "little") + bytes(6)
    packed = entry * count + end
    assert peak_of(lambda: refused(packed, "more than 1000 files")) < 3 * len(packed)


def test_an_archive_larger_than_what_it_may_hold_is_not_read() -> None:
    refused(bytes(8 << 20), "bytes", max_bytes=1 << 20, max_entries=10)


def seconds_of(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began


def test_many_empty_streams_before_a_long_one_cost_no_copy_of_it_each() -> None:
    packed = gzip.compress(b"", mtime=0) * 4000 + gzip.compress(random.Random(1).randbytes(8 << 20), 1)
    assert seconds_of(lambda: refused(packed)) < 2.0  # four times as much with a copy for each


@pytest.mark.parametrize("packer", ["gz", "bz2", "xz"])
def test_streams_without_end_are_refused_after_a_few_thousand(packer: str) -> None:
    packed = PACKERS[packer](b"") * 60_000
    assert seconds_of(lambda: refused(packed, "5000 compressed streams", max_entries=20_000)) < 1.5  # else 3 s


def test_names_that_go_through_links_again_and_again_cost_little() -> None:
    members: list[Described] = [("l", LINK, "." + "/." * 400), *[("/".join("l" * 45), DIRECTORY, b"")] * 900]
    packed = tar(*members)
    assert seconds_of(lambda: refused(packed, "links", max_entries=1000)) < 2.0  # more without a bound


def test_headers_of_many_small_fields_cost_little() -> None:
    fields = header(b"x", b"6 a=b\n" * 43_000)
    assert seconds_of(lambda: refused(gzip.compress(fields * 32), "steps", max_entries=1000)) < 1.0  # else 2 s


def test_folders_that_are_there_already_are_not_walked_down_to_without_end() -> None:
    deep = tarfile.TarInfo("a/" * 120)
    deep.type = DIRECTORY
    packed = gzip.compress(deep.tobuf(tarfile.USTAR_FORMAT) * 60_000)
    assert seconds_of(lambda: refused(packed, "steps", max_entries=20_000)) < 4.0  # else 9 s


def test_a_zip_whose_extra_fields_are_copied_again_and_again_is_refused() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(64):
            archive.writestr(f"{number}", b"")
        for member in archive.filelist:
            member.extra = bytes(64_000)
    assert seconds_of(lambda: refused(packed.getvalue(), "a header of 64000 bytes")) < 0.5  # else 2 s


def overlapping(count: int, stream: bytes) -> bytes:
    """A zip whose members share one stream: the headers of later members lie in stored blocks of earlier ones."""
    packed, starts = bytearray(), []
    for number in range(count):
        starts.append(len(packed))
        packed += struct.pack("<4s5H3I2H5s", b"PK\3\4", 20, 0, 8, 0, 0, 0, 0, 0, 5, 0, b"%05d" % number)
        packed += struct.pack("<BHH", 0, 35, 0xFFFF - 35) if number < count - 1 else stream
    directory, held = bytearray(), b""
    for number, start in reversed([*enumerate(starts)]):
        sizes = (zlib.crc32(held), len(packed) - start - 35, 1 << 30)
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 0, *sizes, 5, 0, 0, 0, 0, 0, start)
        directory += b"%05d" % number
        held = bytes(packed[start : start + 35]) + held
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(packed), 0)
    return bytes(packed + directory) + end


def test_members_of_a_zip_that_share_a_stream_which_unpacks_to_nothing_are_refused() -> None:
    empty_blocks = int(("010" + "0" * 7) * 4, 2)  # four of the shortest
    stream = int(f"{empty_blocks:040b}"[::-1], 2).to_bytes(5, "little") * 400_000 + b"\3\0"
    assert seconds_of(lambda: refused(overlapping(200, stream), "(?i)overlap")) < 0.5  # else 2 s
    assert read(overlapping(1, stream)) == {"00000": b""}


def test_nothing_of_ours_unpacks_with_tarfile() -> None:
    """Its `filter` is missing before Python 3.11.4, and those of some later versions let links out."""
    folders = ("roll_flash", "envs", "sandboxes", "docker", "benchmarks", "examples", "tests")
    unpacking = re.compile(r"\.(extract|extractall|unpack_archive)\(")
    found = [
        str(path) for name in folders for path in (ROOT / name).rglob("*.py") if unpacking.search(path.read_text())
    ]
    assert found == []
