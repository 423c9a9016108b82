"""Copies of checkpoints at a URL: what counts as a copy, what a user sees, and what a store may do wrong."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from roll_flash.cli.main import main
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import CheckpointError, ConfigError
from roll_flash.run.checkpoints.store import CheckpointCopies, CheckpointStore, check_store, store_of
from roll_flash.run.run_dir import Checkpoint, RunDir, list_checkpoints

WEIGHTS = bytes(range(256)) * 5000


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/runs"


@pytest.fixture
def config(tmp_path: Path, url: str) -> Config:
    tree = {"name": "mine", "runs": str(tmp_path / "runs"), "model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}
    return load_config({**tree, "checkpoint": {"copy_to": url, "keep": 2}})


@pytest.fixture
def run(config: Config) -> Iterator[RunDir]:
    with RunDir.create(config, resume=False) as run_dir:
        for step in (1, 2, 3):
            write(run_dir, step)
        yield run_dir


def write(run_dir: RunDir, step: int) -> Checkpoint:
    with run_dir.writing_checkpoint(step) as folder:
        (folder / "state").mkdir()
        (folder / "state" / "weights").write_bytes(WEIGHTS + bytes([step]))
        (folder / "trainer.json").write_text(json.dumps({"version": step}))
    return list_checkpoints(run_dir.folder)[-1]


def store(config: Config) -> CheckpointStore:
    found = store_of(config)
    assert found is not None
    return found


def put(config: Config, run: RunDir, *steps: int) -> CheckpointStore:
    copies = store(config)
    for checkpoint in list_checkpoints(run.folder):
        if checkpoint.step in steps:
            copies.put(checkpoint.folder, checkpoint.step, run.folder / "config.yaml")
    return copies


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store that fails as real ones do: it loses, cuts or changes what it is given, or refuses it."""

    protocol = "faulty"
    fault = ""

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        if self.fault == "hangs":
            time.sleep(60)
        super().pipe_file(path, value, *args, **kwargs)

    def rm(self, path: str, *args: Any, **kwargs: Any) -> None:
        if self.fault == "removes nothing":
            raise PermissionError("Access Denied")
        super().rm(path, *args, **kwargs)

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        if self.fault == "refuses":
            raise PermissionError("Access Denied: no credentials\nmore lines")
        if self.fault == "loses" and rpath.endswith("weights"):
            return
        super().put_file(lpath, rpath, *args, **kwargs)
        content = self.cat_file(rpath)
        if self.fault == "cuts" and rpath.endswith("weights"):
            self.pipe_file(rpath, content[:-1])
        if self.fault == "changes" and rpath.endswith("weights"):
            self.pipe_file(rpath, b"x" + content[1:])


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


def test_a_copy_comes_back_as_it_was(config: Config, run: RunDir, tmp_path: Path) -> None:
    copies = put(config, run, 1, 3)
    MemoryFileSystem().pipe_file(f"{copies.url.removeprefix('memory:/')}/step_3/of_another_run", b"")
    put(config, run, 3)
    assert copies.steps() == [1, 3]
    copies.get(3, tmp_path / "back")
    assert not (tmp_path / "back/of_another_run").exists()
    for path in (run.folder / "checkpoints/step_3").rglob("*"):
        if path.is_file():
            assert (tmp_path / "back" / path.relative_to(run.folder / "checkpoints/step_3")).read_bytes() == (
                path.read_bytes()
            )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("loses", "weights is missing"),
        ("cuts", f"has {len(WEIGHTS)} of {len(WEIGHTS) + 1} bytes"),
        ("changes", "state/weights has other bytes than were written"),
        ("refuses", "cannot write it: PermissionError: Access Denied: no credentials"),
    ],
)
def test_what_a_store_does_wrong_is_one_line_and_never_a_copy(
    config: Config, run: RunDir, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setattr(FaultyFileSystem, "fault", fault)
    faulty = CheckpointStore(f"faulty://{uuid.uuid4().hex}/mine")
    with pytest.raises(CheckpointError) as error:
        faulty.put(run.folder / "checkpoints/step_3", 3, run.folder / "config.yaml")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert faulty.steps() == []
    monkeypatch.setattr(FaultyFileSystem, "fault", "")
    faulty.put(run.folder / "checkpoints/step_3", 3, run.folder / "config.yaml")
    assert faulty.steps() == [3]


def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"s3://b/runs/mine: Install s3fs to access S3 \(`pip install s3fs`\)"):
        CheckpointStore("s3://b/runs/mine")
    with pytest.raises(ConfigError, match="not a URL that fsspec knows: Protocol not known: s4"):
        CheckpointStore("s4://b/runs/mine")
    with pytest.raises(ConfigError, match=r"cannot use it: .*; check the address, and the credentials"):
        CheckpointStore("file:///proc/nowhere").check()
    monkeypatch.setattr("roll_flash.run.checkpoints.store.CHECK_LIMIT_S", 0.1)
    monkeypatch.setattr(FaultyFileSystem, "fault", "hangs")
    with pytest.raises(ConfigError, match=r"no answer within 0.1 s; check the address"):
        CheckpointStore(f"faulty://{uuid.uuid4().hex}/mine").check()
    store(config).check()
    assert store(config).steps() == []


def test_a_new_run_is_refused_where_copies_of_another_are_and_one_that_goes_on_is_not(
    config: Config, run: RunDir
) -> None:
    check_store(config, resume=False)
    put(config, run, 2, 3)
    with pytest.raises(ConfigError, match=r"has copies of a run of this name \(of steps 2, 3\)"):
        check_store(config, resume=False)
    check_store(config, resume=True)


def test_a_run_that_went_back_keeps_the_copies_that_it_makes(config: Config, run: RunDir) -> None:
    put(config, run, 2, 3)
    said: list[str] = []

    async def use() -> None:
        copies = CheckpointCopies(store(config), config.checkpoint, said.append)
        await copies.go_on_from(list_checkpoints(run.folder)[0])
        await copies.settled(60)

    asyncio.run(use())
    assert store(config).steps() == [1, 2, 3]
    assert "also has copies of steps 2, 3, which the run has not made since it went back" in said[0]


def test_what_was_begun_and_what_is_old_is_removed_and_what_is_kept_stays(config: Config, run: RunDir) -> None:
    copies = put(config, run, 1, 2, 3)
    fs: Any = MemoryFileSystem()
    root = copies.url.removeprefix("memory:/")
    fs.rm_file(f"{root}/step_3/COMPLETE")
    assert copies.steps() == [1, 2]
    copies.prune(3, keep=1)
    assert copies.steps() == [2]
    assert not fs.exists(f"{root}/step_3")
    put(config, run, 3)
    copies.prune(3, keep=1, keep_every=2)
    assert copies.steps() == [2, 3]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.01)


async def copied(copies: CheckpointCopies, newest: int) -> None:
    await until(lambda: copies.metrics().get("checkpoint/copied_step") == newest)


def test_checkpoints_are_copied_beside_the_run_and_removed_by_the_same_policy(config: Config, run: RunDir) -> None:
    async def use() -> None:
        copies = CheckpointCopies(store(config), config.checkpoint, lambda text: None)
        working = asyncio.create_task(copies.run())
        for step in (4, 5, 6):
            await copies.add(await asyncio.to_thread(write, run, step))
            run.prune_checkpoints(1)
            await copied(copies, step)
        working.cancel()

    asyncio.run(use())
    assert store(config).steps() == [5, 6]
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_6"]


def test_a_copy_that_fails_is_said_counted_and_made_later_also_when_the_run_has_removed_the_checkpoint(
    run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_flash.run.checkpoints.store.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(FaultyFileSystem, "fault", "refuses")
    faulty = CheckpointStore(f"faulty://{uuid.uuid4().hex}/mine")
    said: list[str] = []

    async def use() -> None:
        copies = CheckpointCopies(faulty, config.checkpoint, said.append)
        working = asyncio.create_task(copies.run())
        await copies.add(list_checkpoints(run.folder)[0])
        run.prune_checkpoints(1)
        await until(lambda: copies.metrics()["checkpoint/copy_failures"] >= 2)
        monkeypatch.setattr(FaultyFileSystem, "fault", "")
        await copied(copies, 1)
        working.cancel()

    asyncio.run(asyncio.wait_for(use(), 60))
    assert said[0].startswith("the checkpoint of step 1 could not be copied: faulty://")
    assert faulty.find_damage(1) is None


def test_only_the_newest_of_what_a_store_does_not_take_keeps_its_space(
    run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyFileSystem, "fault", "refuses")
    faulty = CheckpointStore(f"faulty://{uuid.uuid4().hex}/mine")

    async def use() -> None:
        copies = CheckpointCopies(faulty, config.checkpoint, lambda text: None)
        for step in (4, 5, 6):
            await copies.add(await asyncio.to_thread(write, run, step))
            await copies.settled(60)
            run.prune_checkpoints(1)
        assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step_6", "step_6.copying"]
        monkeypatch.setattr(FaultyFileSystem, "fault", "")
        await copies.settled(60)

    asyncio.run(use())
    assert faulty.find_damage(6) is None
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_6"]


def test_a_checkpoint_is_not_sent_again_because_an_old_copy_cannot_be_removed(
    run: RunDir, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = CheckpointStore(f"faulty://{uuid.uuid4().hex}/mine")
    sent: list[str] = []

    def put_file(self: Any, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        sent.append(rpath)
        super(FaultyFileSystem, self).put_file(lpath, rpath, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "put_file", put_file)

    async def use() -> None:
        copies = CheckpointCopies(faulty, config.checkpoint, lambda text: None)
        for checkpoint in list_checkpoints(run.folder):
            await copies.add(checkpoint)
            monkeypatch.setattr(FaultyFileSystem, "fault", "removes nothing" if checkpoint.step == 3 else "")
            await copies.settled(60)
        count = len(sent)
        await copies.settled(60)
        assert copies.metrics()["checkpoint/copy_failures"] == 2
        assert len(sent) == count
        monkeypatch.setattr(FaultyFileSystem, "fault", "")
        await copies.settled(60)
        assert len(sent) == count

    asyncio.run(use())
    assert faulty.steps() == [2, 3]


def test_ls_verify_and_rm_take_a_url(config: Config, run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    copies = put(config, run, 1, 2)
    assert main(["checkpoints", "ls", copies.url]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [("step", "state"), ("1", "unread"), ("2", "unread")]
    assert main(["checkpoints", "verify", copies.url]) == 0
    MemoryFileSystem().pipe_file(f"{copies.url.removeprefix('memory:/')}/step_2/trainer.json", b'{"version": 9}')
    assert main(["checkpoints", "verify", copies.url, "2"]) == 1
    assert "damaged: trainer.json has other bytes than were written" in capsys.readouterr().out
    assert main(["checkpoints", "rm", copies.url, "7"]) == 2
    assert "no complete copy of step 7; it has: 1, 2" in capsys.readouterr().err
    assert main(["checkpoints", "rm", copies.url, "2"]) == 0
    assert copies.steps() == [1]


def test_get_brings_a_run_to_a_machine_that_never_had_it(
    config: Config, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = put(config, run, 2, 3)
    assert main(["checkpoints", "get", copies.url]) == 2
    assert "the run is in use by process" in capsys.readouterr().err
    run.close()
    assert main(["checkpoints", "get", copies.url]) == 2
    assert "step_3: exists already" in capsys.readouterr().err
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert main(["checkpoints", "get", copies.url]) == 0
    assert f"train {tmp_path}/runs/mine/config.yaml --resume" in capsys.readouterr().out
    with RunDir.create(config, resume=True) as again:
        assert [each.step for each in list_checkpoints(again.folder)] == [3]
        assert again.config_changes == []
    assert main(["checkpoints", "get", f"{copies.url}-not"]) == 2
    assert "no complete copy of a checkpoint" in capsys.readouterr().err


def test_names_and_a_config_that_no_run_writes_are_not_followed(
    config: Config, run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = put(config, run, 3)
    root = copies.url.removeprefix("memory:/")
    MemoryFileSystem().pipe_file(f"{root}/step_3/../../../../outside", b"of somebody else")
    run.close()
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert main(["checkpoints", "get", copies.url]) == 0
    assert not list(tmp_path.rglob("outside"))
    for content in (b"a: " + b"[" * 100_000, b"- 1", b"\xff", b"a: 1:" + b"1:" * 5000):
        MemoryFileSystem().pipe_file(f"{root}/config.yaml", content)
        capsys.readouterr()
        assert main(["checkpoints", "get", copies.url]) == 2
        assert "config.yaml: not as a run writes it: " in capsys.readouterr().err
