"""Files of episodes: compressed ones read as before, from any place, and what is damaged reads as one damaged line."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from roll_flash.monitor.episode_files import steps
from roll_flash.monitor.episode_files.blocks import BLOCK_BYTES
from roll_flash.monitor.episode_files.steps import (
    compress_step,
    compressed,
    content_of,
    decompress_step,
    open_step,
    remove_steps,
    removed_before,
    step_file,
    step_files,
)
from roll_flash.monitor.episodes import EpisodesWriter, read_episodes


def lines_of(seed: int, count: int = 400) -> list[bytes]:
    chance = random.Random(seed)
    return [
        b'{"n":%d,"text":"%s"}\n' % (n, chance.randbytes(chance.randint(0, 900)).hex().encode()) for n in range(count)
    ]


def written(folder: Path, lines: list[bytes], step: int = 3) -> Path:
    path = step_file(folder, step)
    path.write_bytes(b"".join(lines))
    return path


def test_a_compressed_file_reads_as_before_from_any_place(tmp_path: Path) -> None:
    lines = lines_of(0)
    path = written(tmp_path, lines)
    whole = path.read_bytes()
    assert len(whole) > 3 * BLOCK_BYTES
    compress_step(path)
    assert [each.name for each in tmp_path.iterdir()] == ["step_000003.jsonl.gz"]
    assert step_files(tmp_path) == [path]
    assert gzip.decompress(compressed(path).read_bytes()) == whole, "other programs read it"
    assert content_of(path).bytes == len(whole)
    with open_step(path) as file:
        assert list(file) == lines
        for _ in range(50):
            place = random.Random(_).randrange(len(whole))
            file.seek(place)
            assert file.read(5000) == whole[place : place + 5000]
        file.seek(-7, 2)
        assert (file.tell(), file.read(), file.read()) == (len(whole) - 7, whole[-7:], b"")
    decompress_step(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (whole, [path])


def cut(data: bytes) -> bytes:
    return data[: 2 * len(data) // 3]


def flipped(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def other_head(data: bytes) -> bytes:
    place = data.index(b"\x1f\x8b\x08\x04", 1000)
    return data[:place] + b"PK" + data[place + 2 :]


@pytest.mark.parametrize("damage", [cut, flipped, other_head])
def test_damage_costs_the_lines_that_it_touches_and_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    lines = lines_of(1)
    path = written(tmp_path, lines)
    compress_step(path)
    compressed(path).write_bytes(damage(compressed(path).read_bytes()))
    with open_step(path) as file:
        found = list(file)
    good = [line for line in found if b"\0" not in line]
    assert 0 < len(good) < len(lines)
    assert good == [line for line in lines if line in good]
    assert len(found) == len(good) + 1, "what is damaged is one line"
    with pytest.raises(ValueError, match=r"step_000003\.jsonl, line \d+: not a record"):
        read_episodes(path)


def test_a_kill_while_a_file_is_compressed_leaves_the_whole_one(tmp_path: Path) -> None:
    lines = lines_of(2)
    path = written(tmp_path, lines)
    blocks = iter([True, True, False])
    compress_step(path, lambda: next(blocks))
    assert list(tmp_path.iterdir()) == [path]
    compressed(path).write_bytes(b"half of it")  # as after a kill between renaming and removing
    assert step_files(tmp_path) == [path]
    with open_step(path) as file:
        assert list(file) == lines
    compress_step(path)
    with open_step(path) as file:
        assert list(file) == lines
    assert not path.exists()


def test_a_resumed_run_appends_to_a_file_that_was_compressed(tmp_path: Path) -> None:
    path = written(tmp_path, lines_of(3))
    compress_step(path)
    with EpisodesWriter(tmp_path) as writer:
        writer.write_line(3, b'{"n":400}')
    assert [record["n"] for record in read_episodes(tmp_path)] == list(range(401))
    assert not compressed(path).exists()


def test_removed_steps_read_as_removed_also_compressed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SMALL_BYTES", 0)
    for step in range(8):
        written(tmp_path, [b"x" * 999 + b"\n"], step)
    remove_steps(tmp_path, 3)
    assert (removed_before(tmp_path), step_files(tmp_path)[0]) == (3, step_file(tmp_path, 3))
    compress_step(step_file(tmp_path, 4))
    remove_steps(tmp_path, 6, since=3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step_000006.jsonl", "step_000006.removed", "step_000007.jsonl"
    ]  # fmt: skip
    with open_step(step_file(tmp_path, 4)) as file:
        assert file.read() == b"", "a reader that is slower than the run finds nothing there"
    with pytest.raises(FileNotFoundError, match="the episodes before step 6 were removed from the disk"):
        read_episodes(step_file(tmp_path, 4))
