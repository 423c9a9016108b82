"""The space of episodes on the disk: what is removed, what stays, and what a step of a long run looks at."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from roll_flash.config.tree import Config, load_config
from roll_flash.monitor.episode_files.steps import removed_before, step_file, step_files
from roll_flash.run import episode_space
from roll_flash.run.episode_space import GIB, EpisodeSpace
from roll_flash.run.run_dir import RunDir

BYTES = 1000
"""Of the episodes of each step."""


def config_of(folder: Path, most_bytes: float | None) -> Config:
    return load_config(
        {
            "name": "run",
            "runs": str(folder),
            "model": {"path": "tiny"},
            "envs": [{"id": "Env-v0"}],
            "scheduler": {"async_ratio": 1.0, "groups_per_step": 1, "group_size": 2},
            "monitor": {"episodes_gib": None if most_bytes is None else most_bytes / GIB},
        }
    )


async def written() -> None:
    """The disk has everything at once."""


def write_steps(run_dir: RunDir, first: int, end: int) -> None:
    for step in range(first, end):
        step_file(run_dir.episodes, step).write_bytes(b"x" * (BYTES - 1) + b"\n")


def write_checkpoint(run_dir: RunDir, step: int) -> None:
    with run_dir.writing_checkpoint(step) as folder:
        (folder / "trainer.json").write_text("{}")


async def tidied(space: EpisodeSpace, version: int) -> dict[str, float]:
    space.step_ended(version)
    await space.tidy(version)
    return space.metrics()


def kept(run_dir: RunDir) -> list[str]:
    return [path.name for path in step_files(run_dir.episodes)]


def test_the_oldest_steps_are_removed_down_to_a_bound_but_none_that_is_needed(tmp_path: Path) -> None:
    async def run() -> None:
        said: list[str] = []
        config = config_of(tmp_path, 7.5 * BYTES)
        with RunDir.create(config, resume=False) as run_dir:
            space = EpisodeSpace(config, run_dir, written, said.append)
            write_steps(run_dir, 0, 10)
            assert (await tidied(space, 9))["machine/episodes_gib"] * GIB == 10 * BYTES, "no checkpoint: all are needed"
            write_checkpoint(run_dir, 9)
            metrics = await tidied(space, 9)
            assert (metrics["machine/episodes_removed_steps"], metrics["machine/episodes_gib"] * GIB) == (3, 7 * BYTES)
            assert kept(run_dir)[0] == "step_000003.jsonl"
            write_steps(run_dir, 10, 14)
            await tidied(space, 13)
            assert removed_before(run_dir.episodes) == 7
            write_steps(run_dir, 14, 30)
            metrics = await tidied(space, 29)
            assert (metrics["machine/episodes_removed_steps"], len(kept(run_dir))) == (8, 22), "a resume needs 8 to 29"
            assert len(list(run_dir.episodes.glob("*.removed"))) == 1
            assert [line[:39] for line in said] == ["the episodes before step 3 were removed"]

    asyncio.run(run())


def test_what_a_process_that_was_killed_had_begun_to_remove_is_removed(tmp_path: Path) -> None:
    async def run() -> None:
        config = config_of(tmp_path, None)
        with RunDir.create(config, resume=False) as run_dir:
            write_steps(run_dir, 0, 6)
            (run_dir.episodes / "step_000002.removed").touch()
            (run_dir.episodes / "step_000004.removed").touch()
            await tidied(EpisodeSpace(config, run_dir, written, print), 5)
            assert (removed_before(run_dir.episodes), kept(run_dir)[0]) == (4, "step_000004.jsonl")
            assert len(list(run_dir.episodes.glob("*.removed"))) == 1

    asyncio.run(run())


def test_files_of_finished_steps_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    stored_bytes = episode_space.stored_bytes

    def noted(path: Path) -> int:
        looked.append(path.name)
        return stored_bytes(path)

    monkeypatch.setattr(episode_space, "stored_bytes", noted)

    async def run() -> None:
        config = config_of(tmp_path, 1e6 * BYTES)
        with RunDir.create(config, resume=False) as run_dir:
            space = EpisodeSpace(config, run_dir, written, print)
            write_steps(run_dir, 0, 101)
            await tidied(space, 100)
            looked.clear()
            write_steps(run_dir, 101, 102)
            metrics = await tidied(space, 101)
            assert set(looked) == {"step_000100.jsonl", "step_000101.jsonl"}
            assert metrics["machine/episodes_gib"] * GIB == 102 * BYTES

    asyncio.run(run())


def test_a_disk_that_is_too_full_to_compress_on_gets_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress_step = episode_space.compress_step

    def full_at_20(path: Path, may_go_on: Callable[[], bool]) -> None:
        if path.name == "step_000020.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        compress_step(path, may_go_on)

    monkeypatch.setattr(episode_space, "compress_step", full_at_20)

    async def run() -> None:
        said: list[str] = []
        config = config_of(tmp_path, 7.5 * BYTES)
        with RunDir.create(config, resume=False) as run_dir:
            space = EpisodeSpace(config, run_dir, written, said.append)
            write_steps(run_dir, 0, 25)
            write_checkpoint(run_dir, 24)
            await tidied(space, 24)
            assert removed_before(run_dir.episodes) == 18
            assert sum("No space left on device" in line for line in said) == 1
            monkeypatch.setattr(episode_space, "compress_step", compress_step)
            await tidied(space, 24)
            assert (removed_before(run_dir.episodes), len(said)) == (18, 2)

    asyncio.run(run())
