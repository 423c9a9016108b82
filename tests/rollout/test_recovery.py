"""A killed run goes on where it was: trained steps are repeated, ended episodes are kept, none is trained twice.

Real rollout, stream, journal, episode log and run folder; fleet and learner are stand-ins. A kill is a copy of the
run's folder at some moment, which is what a killed process leaves behind.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from scheduler_world import failure, whole_trajectory

from roll_flash.cli.main import main
from roll_flash.config.tree import Config, load_config
from roll_flash.engines.learner import StepResult
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import CheckpointError, LearnerError, RunError
from roll_flash.monitor.episode_files import steps
from roll_flash.monitor.episodes import EpisodesWriter, episode_record, read_episodes, trajectory_of
from roll_flash.monitor.json_lines import encode, with_checksum
from roll_flash.monitor.metrics import STEP_S
from roll_flash.rollout import episode_log
from roll_flash.rollout.episode_log import EpisodeLog
from roll_flash.rollout.fleet import Ended
from roll_flash.rollout.recovery import Recovery
from roll_flash.rollout.rollout import Rollout
from roll_flash.rollout.turns import TurnBook
from roll_flash.run.episode_space import EpisodeSpace
from roll_flash.run.journal import (
    Damage,
    Journal,
    compress_finished,
    cut_at,
    journal_files,
    read_journal,
    remove_before,
    set_aside,
    state_event,
)
from roll_flash.run.run_dir import Checkpoint, RunDir
from roll_flash.run.verify import verify_run
from roll_flash.scheduling.group_queues import group_id_of
from roll_flash.stream import LearnerLoader, TrajectoryStream, finished_episode
from roll_flash.system.resume import Resumed, read_state, resume
from roll_flash.types import EpisodeSpec, FinishedGroup, Task, Trajectory
from roll_flash.watchdog.activity import Activities, watched

STEPS = 8


@pytest.fixture(autouse=True)
def _writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes here end every few milliseconds."""
    monkeypatch.setattr(episode_log, "GROUP_COMMIT_S", 0.0)


class Fleet:
    """Stands in for workers: episodes end after a moment, some with a failure. `on_end` is called before each end."""

    failing = 0.1

    def __init__(self, seed: int, version: int, on_end: Callable[[], None]) -> None:
        self._random = random.Random(seed)
        self.version = version
        self._on_end = on_end
        self._ended: dict[str, Callable[[Ended], None]] = {}
        self.played: list[EpisodeSpec] = []
        self.turns = TurnBook()

    async def submit(self, episodes: Sequence[EpisodeSpec], receive: Callable[[Ended], None]) -> None:
        for spec in episodes:
            self.played.append(spec)
            began = self.version
            self._ended[spec.episode_id] = receive
            asyncio.get_running_loop().call_later(self._random.random() * 0.02, self._end, spec, began)

    def _end(self, spec: EpisodeSpec, began: int) -> None:
        if (receive := self._ended.pop(spec.episode_id, None)) is None:
            return
        self._on_end()
        versions = [began] * 3 + [self.version] * 2
        good = whole_trajectory(spec, versions, reward=self._random.random())
        receive(failure(spec) if self._random.random() < self.failing else finished_episode(good))

    async def cancel(self, episode_ids: Iterable[str]) -> None:
        for name in episode_ids:
            self._ended.pop(name, None)


class Learner:
    """Stands in for the learner; keeps what each step was made of."""

    def __init__(self, async_ratio: float) -> None:
        self.version = 0
        self.steps: dict[int, list[Any]] = {}
        self._async_ratio = async_ratio
        self._now: list[Any] = []

    async def load(self, folder: Path) -> None:
        self.version = json.loads((folder / "version.json").read_text())

    async def accumulate(self, groups: Sequence[FinishedGroup]) -> None:
        for episode in (episode for group in groups for episode in group.trajectories):
            assert episode.oldest_version >= self.version - self._async_ratio, "too old"
            assert isinstance(episode.data, Trajectory)
        self._now.append([(g.group_id, [(e.episode_id, e.reward) for e in g.trajectories]) for g in groups])

    async def finish_step(self) -> StepResult:
        self.version += 1
        self.steps[self.version], self._now = self._now, []
        return StepResult(self.version, 1, False, {"loss": float(self.version), "learning_rate": 2e-7})

    async def abandon_step(self) -> None:
        self._now = []


def config_of(folder: Path, episodes_gib: float | None = None, **scheduler: Any) -> Config:
    defaults = {"async_ratio": 1.0, "groups_per_step": 3, "group_size": 2}
    return load_config(
        {
            "name": "run",
            "runs": str(folder),
            "model": {"path": "tiny"},
            "envs": [{"id": "Env-v0"}],
            "scheduler": defaults | scheduler,
            "rollout": {"max_concurrent": 9, "retries": 1},
            "monitor": {"stall_timeout_s": 20.0, "episodes_gib": episodes_gib},
        }
    )


async def play(
    config: Config,
    run_dir: RunDir,
    learner: Learner,
    fleet: Fleet,
    *,
    resumed: Resumed | None = None,
    checkpoints: Collection[int] = (),
    on_step: Callable[[int], None] = lambda _: None,
    stream: TrajectoryStream | None = None,
) -> Rollout:
    """What the trainer does, up to STEPS. `on_step` is called when the journal has the step."""
    stream, journal = stream or TrajectoryStream(), Journal(run_dir.journal)
    journal.begin(journal.newest(resumed.checkpoint.step if resumed else 0))
    if resumed is not None and not resumed.recovery.is_marked:
        journal.write(state_event(resumed.recovery.mark, resumed.recovery.ended()))
    with EpisodesWriter(run_dir.episodes) as files:
        run = Rollout(
            config,
            fleet,  # type: ignore[arg-type]
            open_tasks(config),
            files,
            stream,
            version=learner.version,
            recovery=resumed.recovery if resumed else None,
            trajectories=resumed.trajectories if resumed else None,
            journal=journal,
        )
        loader = LearnerLoader(stream, micro_batch_tokens=12)
        space = EpisodeSpace(config, run_dir, run.written, lambda _: None)
        async with asyncio.timeout(60), run:
            while learner.version < STEPS:
                batches = []
                async with aclosing(loader.stream_step(run.groups_for_step())) as micro_batches:
                    async for micro_batch in micro_batches:
                        batches.append(micro_batch)
                        await learner.accumulate(micro_batch)
                result = await learner.finish_step()
                await run.version_advanced(result.version, batches, result.metrics)
                if result.version in checkpoints:
                    with run_dir.writing_checkpoint(result.version) as folder:
                        (folder / "state").mkdir()
                        (folder / "state/version.json").write_text(str(result.version))
                        (folder / "trainer.json").write_text(json.dumps(run.state()))
                        await run.written()
                await space.tidy(result.version)
                on_step(result.version)
                rows = {
                    "step": result.version,
                    STEP_S: 1.0,
                    "episodes": sum(len(g.trajectories) for b in batches for g in b),
                }
                with (run_dir.folder / "metrics.jsonl").open("a") as metrics:
                    metrics.write(json.dumps(rows) + "\n")
                fleet.version = result.version
                run.published(result.version)
        journal.close()
    return run


async def killed(
    folder: Path, seed: int, *, at: int | None = None, checkpoints: Collection[int] = (2,), **settings: Any
) -> tuple[Config, Learner, Path]:
    """A run to its end; and its folder as it was after step `at`, or at some moment after the checkpoint of step 2."""
    config = config_of(folder / "whole", **settings)
    learner, copy = Learner(config.scheduler.highest_async_ratio), folder / "killed/run"
    moment = random.Random(seed).randint(1, 24)
    seen = 0

    def on_end() -> None:
        nonlocal seen
        seen += (run_dir.checkpoint_folder(2) / "COMPLETE").exists()
        if at is None and seen == moment:
            shutil.copytree(run_dir.folder, copy)

    def on_step(version: int) -> None:
        if version == at:
            shutil.copytree(run_dir.folder, copy)

    with RunDir.create(config, resume=False) as run_dir:
        await play(config, run_dir, learner, Fleet(seed, 0, on_end), checkpoints=checkpoints, on_step=on_step)
    return config_of(folder / "killed", **settings), learner, copy


@pytest.mark.parametrize("seed", range(3))
def test_what_a_run_compresses_and_removes_is_missed_by_no_resume(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SMALL_BYTES", 0)

    async def run() -> None:
        config, whole, copy = await killed(tmp_path, seed, at=5, checkpoints=(2, 4), episodes_gib=1e-9)
        removed = steps.removed_before(copy / "episodes")  # on a busy machine no episode may end during a step
        assert removed in (2, 3)
        kept = {path.name for path in (copy / "episodes").glob("step_*.jsonl*")} - {"step_000005.jsonl"}
        assert kept <= {"step_000003.jsonl.gz", "step_000004.jsonl.gz"}
        said: list[str] = []
        resumed, learner = await resumed_from(config, said)
        assert (resumed.recovery.version, resumed.checkpoint.step, len(said)) == (5, 4, 2), said
        assert learner.steps[5] == whole.steps[5]
        names = {path.name for path in (copy / "journal").glob("after_step_*")}
        assert names == {"after_step_000002.jsonl.gz", "after_step_000004.jsonl"}
        findings = {finding.check: finding for finding in verify_run(copy)}
        assert not [finding for finding in findings.values() if not finding.ok]
        gone = f"are not checked: the episodes before step {removed} were removed from the disk"
        assert gone in findings["log"].detail
        assert "those before step 2 were removed with their episodes" in findings["journal"].detail
        (copy / "journal/after_step_000002.jsonl.gz").unlink()
        findings = {finding.check: finding for finding in verify_run(copy)}
        assert "those before step 4 are missing" in findings["journal"].detail
        assert [name for name, finding in findings.items() if not finding.ok] == ["journal"]

    asyncio.run(run())


@pytest.mark.parametrize("scheduler", [{"extra_groups": 3}, {"on_stale": "requeue", "extra_groups": 3}])
@pytest.mark.parametrize("seed", range(2))
def test_a_run_is_verified_from_whichever_checkpoint_its_journal_begins_at(
    seed: int, scheduler: dict[str, Any], tmp_path: Path
) -> None:
    checkpoints = (2, 4, 6)

    async def run() -> None:
        config = config_of(tmp_path, **scheduler)
        with RunDir.create(config, resume=False) as run_dir:
            await play(config, run_dir, Learner(1.0), Fleet(seed, 0, lambda: None), checkpoints=checkpoints)

    asyncio.run(run())
    run_folder = tmp_path / "run"
    assert any(event["event"] == "dropped" for event in read_journal(run_folder / "journal")[0])
    for step in checkpoints:
        steps.remove_steps(run_folder / "episodes", step)
        remove_before(run_folder / "journal", step)
        assert min(journal_files(run_folder / "journal")) == step
        assert not [finding for finding in verify_run(run_folder) if not finding.ok]


def trained_in(steps: dict[int, list[Any]]) -> list[str]:
    return [name for step in steps.values() for batch in step for _, rows in batch for name, _ in rows]


@pytest.mark.parametrize(
    "scheduler", [{}, {"on_stale": "requeue"}, {"async_ratio": 0.0, "in_order": True}, {"async_ratio": 2.0}]
)
@pytest.mark.parametrize("seed", range(6))
def test_a_killed_run_repeats_its_steps_and_keeps_every_episode_that_had_ended(
    seed: int, scheduler: dict[str, Any], tmp_path: Path
) -> None:
    async def run() -> None:
        config, whole, copy = await killed(tmp_path, seed, **scheduler)
        events, damage = read_journal(copy / "journal", 2)
        assert damage is None
        known = {event["episode"] for event in events if event["event"] == "ended"}
        trained_then = [event["version"] for event in events if event["event"] == "trained"]
        said: list[str] = []
        learner: Any = Learner(config.scheduler.highest_async_ratio)
        with RunDir.create(config, resume=True) as run_dir:
            checkpoint = run_dir.latest_checkpoint()
            assert checkpoint is not None
            resumed = await resume(config, run_dir, checkpoint, learner, said.append)
            assert learner.version == resumed.recovery.version == max(trained_then, default=2)
            assert learner.steps == {version: whole.steps[version] for version in trained_then}
            fleet = Fleet(seed + 100, learner.version, lambda: None)
            books = (await play(config, run_dir, learner, fleet, resumed=resumed)).books()
            episodes = read_episodes(run_dir.episodes)
        assert not known & {spec.episode_id for spec in fleet.played}, "an episode that had ended was played again"
        steps = {version: step for version, step in whole.steps.items() if version <= 2} | learner.steps
        names = trained_in(steps)
        assert len(names) == len(set(names)) == 2 * 3 * STEPS, "every trajectory is trained once"
        dropped = sum(count for name, count in books.items() if name.startswith("dropped_"))
        assert books["produced"] == books["trained"] + dropped + books["waiting"]
        logged = [row["episode_id"] for row in episodes if row["kind"] == "trajectory"]
        assert set(trained_in(learner.steps)) <= set(logged)
        assert not [line for line in said if "played" in line or "damaged" in line]
        for folder in (tmp_path / "whole/run", copy):
            assert not [finding for finding in verify_run(folder) if not finding.ok]

    asyncio.run(run())


def change_events(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the newest file of the journal as a defect of ours would write it: its checksums are right."""
    path = sorted((folder / "journal").glob("after_step_*.jsonl"))[-1]
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    for event in events:
        del event["crc32"]
    change(events)
    path.write_bytes(b"".join(with_checksum(encode(event).encode()) + b"\n" for event in events))


def last_of(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(event for event in reversed(events) if event["event"] == kind)


def change_event(folder: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the last event of a kind."""
    change_events(folder, lambda events: change(last_of(events, kind)))


def change_log(folder: Path, change: Callable[[list[bytes]], None]) -> None:
    path = sorted((folder / "episodes").glob("step_*.jsonl"))[1]
    lines = path.read_bytes().splitlines()
    change(lines)
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def age(lines: list[bytes]) -> None:
    for number, line in enumerate(lines):
        record = json.loads(line)
        del record["crc32"]
        record["versions"] = [value - 5 if value >= 0 else -1 for value in record["versions"]]
        lines[number] = with_checksum(encode(record).encode())


def go_back(lines: list[bytes]) -> None:
    """Let the third of three turns be of older weights than the first, of the same server."""
    place, record = next(
        (place, record) for place, line in enumerate(lines) if (record := json.loads(line))["kind"] == "trajectory"
    )
    del record["crc32"]
    record["turns"] = [{"start": start, "end": start + 1, "server": name} for start, name in enumerate("aba", start=1)]
    record["versions"][1:4] = [1, 0, 0]
    lines[place] = with_checksum(encode(record).encode())


def twice(event: dict[str, Any]) -> None:
    event["batches"].append(event["batches"][0])


TAMPERED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "an episode is trained twice": ("episodes", lambda run: change_event(run, "trained", twice)),
    "a group leaves twice": (
        "groups",
        lambda run: change_event(run, "trained", lambda event: event.update(without_rows=["g00000000"])),
    ),
    "a group was never admitted": (
        "groups",
        lambda run: change_event(run, "trained", lambda event: event["batches"][0][0].__setitem__(0, "g00001000")),
    ),
    "a step is missing": ("steps", lambda run: change_event(run, "trained", lambda event: event.update(version=99))),
    "the log lacks episodes": ("log", lambda run: change_log(run, list.clear)),
    "tokens are too old": ("staleness", lambda run: change_log(run, age)),
    "a server goes back": ("versions", lambda run: change_log(run, go_back)),
    "the journal has a flipped bit": ("journal", lambda run: flip(journal_of(run))),
}


def test_verify_names_a_journal_of_another_version_and_counts_damaged_lines_of_untrained_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> Path:
        return (await killed(tmp_path, 3, at=4))[2]

    copy = asyncio.run(run())
    events, _ = read_journal(copy / "journal")
    trained = set(
        trained_in({0: [batch for event in events if event["event"] == "trained" for batch in event["batches"]]})
    )
    lines = [(path, line) for path in (copy / "episodes").glob("step_*.jsonl") for line in path.open("rb")]
    path, line = next((path, line) for path, line in lines if json.loads(line)["episode_id"] not in trained)
    path.write_bytes(path.read_bytes().replace(line, line.replace(b"reward", b"rewarD")))
    assert main(["verify", str(copy)]) == 0
    assert "; 1 damaged lines are of none of them" in capsys.readouterr().out
    header = with_checksum(encode({"event": "begin", "format": 99}).encode())
    first = sorted((copy / "journal").glob("after_step_*.jsonl"))[0]
    first.write_bytes(header + b"\n" + first.read_bytes().partition(b"\n")[2])
    assert main(["verify", str(copy)]) == 1
    assert "after_step_000000.jsonl, line 1 is of format 99, not 1" in capsys.readouterr().err


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", TAMPERED)
def test_verify_finds_that(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        with RunDir.create(config_of(tmp_path), resume=False) as run_dir:
            await play(config_of(tmp_path), run_dir, Learner(1.0), Fleet(1, 0, lambda: None), checkpoints=(2,))

    asyncio.run(run())
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("ok ") == 7
    check, tamper = TAMPERED[what]
    tamper(tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert f"FAIL  {check} " in capsys.readouterr().out


def last_row(events: list[dict[str, Any]]) -> list[Any]:
    """The rows of the last group that was trained."""
    rows: list[Any] = last_of(events, "trained")["batches"][-1][-1][1]
    return rows


def end_twice(events: list[dict[str, Any]]) -> None:
    events.append({**last_of(events, "ended"), "kept": False})


def join_late(events: list[dict[str, Any]]) -> None:
    group = last_of(events, "trained")["batches"][-1][-1][0]
    events.append({**last_of(events, "ended"), "kept": True, "group": group, "episode": f"{group}-r9"})


def forget_end(events: list[dict[str, Any]]) -> None:
    """A replica that nobody ever heard of again, and the group is trained without it."""
    name, _ = last_row(events).pop()
    events[:] = [event for event in events if event.get("episode") != name]


PLANTED: dict[str, tuple[str, Callable[[list[dict[str, Any]]], None]]] = {
    "an episode ends twice": ("ended twice", end_twice),
    "an episode ends in a group that has left": ("which had left", join_late),
    "an episode that ended is not trained with its group": (
        "was neither trained nor dropped",
        lambda events: last_row(events).pop(),
    ),
    "an episode is trained that never ended": (
        "had not ended",
        lambda events: last_row(events)[0].__setitem__(0, "g00000000-r7"),
    ),
    "an episode is twice in its step": (
        "is trained twice",
        lambda events: last_row(events).append(last_row(events)[0]),
    ),
    "an episode vanishes": ("neither ended nor failed", forget_end),
    "an episode is dropped without a reason": (
        "was neither trained nor dropped",
        lambda events: next(event for event in events if event.get("lost")).update(lost={}),
    ),
}


class Judged(TrajectoryStream):
    """Its stage can score no third replica of the first groups of a step."""

    def put(self, row_id: str, *others: Any) -> None:
        super().put(row_id, *others)
        if row_id.endswith("-r2"):
            self.drop([self._rows[row_id]], "stage_judge_failed")


@pytest.mark.parametrize("what", PLANTED)
def test_verify_follows_each_episode_and_finds_that(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, group_size=3)

    async def run() -> None:
        with RunDir.create(config, resume=False) as run_dir:
            fleet = Fleet(1, 0, lambda: None)
            await play(config, run_dir, Learner(1.0), fleet, checkpoints=(2,), stream=Judged())

    asyncio.run(run())
    assert main(["verify", str(tmp_path / "run")]) == 0
    whole = capsys.readouterr().out
    assert "stage_judge_failed" in whole
    message, plant = PLANTED[what]
    change_events(tmp_path / "run", plant)
    assert main(["verify", str(tmp_path / "run")]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL  episodes"))
    assert message in line


class Unlucky(Fleet):
    failing = 0.4


def test_verify_counts_each_episode_once_and_knows_those_that_failed(tmp_path: Path) -> None:
    config = config_of(tmp_path, extra_replicas=1, on_stale="requeue", extra_groups=1)

    async def run() -> dict[str, int]:
        with RunDir.create(config, resume=False) as run_dir:
            return (await play(config, run_dir, Learner(1.0), Unlucky(3, 0, lambda: None), checkpoints=(2,))).books()

    books = asyncio.run(run())
    (detail,) = (finding.detail for finding in verify_run(tmp_path / "run") if finding.check == "episodes")
    counts = {words[1]: int(words[0]) for part in re.split(r"[=+;]", detail) if (words := part.split())}
    dropped = sum(count for name, count in books.items() if name.startswith("dropped_"))
    assert counts["ended"] == counts["trained"] + counts["dropped"] + counts["surplus"] + counts["waiting"]
    assert (counts["trained"], counts["waiting"]) == (books["trained"], books["waiting"])
    assert counts["dropped"] + counts["surplus"] >= dropped > 0
    assert counts["failed"] > 0


def test_a_batch_that_is_played_again_after_a_kill_ends_its_episodes_once(tmp_path: Path) -> None:
    async def ended_twice(seed: int) -> int:
        config, _, copy = await killed(tmp_path / str(seed), seed, mode="batch")
        await resumed_from(config, [])
        events, _ = read_journal(copy / "journal")
        again = [name for event in events if event["event"] == "opened" for name in event["again"]]
        names = [event["episode"] for event in events if event["event"] == "ended"]
        assert {name for name, count in Counter(names).items() if count > 1} <= set(again)
        assert not [finding for finding in verify_run(copy) if not finding.ok]
        return len(names) - len(set(names))

    assert sum(asyncio.run(ended_twice(seed)) for seed in range(6)) > 0, "no kill came in the middle of a batch"


def test_what_is_no_training_run_has_nothing_to_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("name: run\n")
    assert main(["verify", str(tmp_path)]) == 1
    assert "has no journal to verify" in capsys.readouterr().err


def test_the_task_source_goes_on_where_it_was(tmp_path: Path) -> None:
    async def run() -> None:
        config, _, _ = await killed(tmp_path, 3)
        learner: Any = Learner(1.0)
        with RunDir.create(config, resume=True) as run_dir:
            checkpoint = run_dir.latest_checkpoint()
            assert checkpoint is not None
            resumed = await resume(config, run_dir, checkpoint, learner, lambda _: None)
            fleet = Fleet(7, learner.version, lambda: None)
            await play(config, run_dir, learner, fleet, resumed=resumed)
            events, _ = read_journal(run_dir.journal)
        admitted = [event for event in events if event["event"] == "admitted" and event["drawn"]]
        source = open_tasks(config)
        assert [event["task"]["seed"] for event in admitted] == [source.next().seed for _ in admitted]
        assert len(admitted) >= 3 * STEPS
        tasks = {group_id_of(event["number"]): event["task"]["seed"] for event in admitted}
        assert {spec.group_id: spec.task.seed for spec in fleet.played}.items() <= tasks.items()

    asyncio.run(run())


def journal_of(copy: Path) -> Path:
    (path,) = (copy / "journal").glob("after_step_000002.jsonl")
    return path


async def resumed_from(config: Config, said: list[str]) -> tuple[Resumed, Learner]:
    learner: Any = Learner(1.0)
    with RunDir.create(config, resume=True) as run_dir:
        checkpoint = run_dir.latest_checkpoint()
        assert checkpoint is not None
        resumed = await resume(config, run_dir, checkpoint, learner, said.append)
        await play(config, run_dir, learner, Fleet(1, learner.version, lambda: None), resumed=resumed)
    return resumed, learner


@pytest.mark.parametrize("damage", ["cut in a line", "a flipped bit", "another version"])
def test_a_damaged_journal_is_used_up_to_the_damage_and_the_rest_set_aside(damage: str, tmp_path: Path) -> None:
    async def run() -> None:
        config, _, copy = await killed(tmp_path, 11, at=4)
        path, said = journal_of(copy), list[str]()
        data = path.read_bytes()
        if damage == "cut in a line":
            path.write_bytes(data[:-5])
        elif damage == "a flipped bit":
            flip(path)
        else:
            header = with_checksum(encode({"event": "begin", "format": 99}).encode())
            path.write_bytes(header + b"\n" + data.partition(b"\n")[2])
        _, learner = await resumed_from(config, said)
        assert learner.version == STEPS
        assert len([line for line in said if str(path) in line]) == (damage != "cut in a line")
        assert path.with_name(path.name + ".bak").exists() == (damage != "cut in a line")
        assert read_journal(copy / "journal", 2)[1] is None

    asyncio.run(run())


def test_a_run_whose_newest_checkpoint_is_damaged_repeats_the_steps_since_the_one_before(tmp_path: Path) -> None:
    async def run() -> None:
        config, whole, copy = await killed(tmp_path, 11, at=4, checkpoints=(2, 3))
        flip(copy / "checkpoints/step_3/trainer.json")
        resumed, learner = await resumed_from(config, [])
        assert resumed.checkpoint.step == 2
        assert {step: learner.steps[step] for step in (3, 4)} == {step: whole.steps[step] for step in (3, 4)}
        assert not [finding for finding in verify_run(copy) if not finding.ok]

    asyncio.run(run())


def test_a_journal_that_is_compressed_is_read_and_repaired_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SMALL_BYTES", 0)
    journal = Journal(tmp_path)
    for step in (0, 2, 4):
        journal.begin(step)
        journal.write({"event": "dropped", "group": f"g{step}"})
    events, _ = read_journal(tmp_path)
    compress_finished(tmp_path, lambda: True)
    packed = [f"after_step_00000{step}.jsonl.gz" for step in (0, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*packed, "after_step_000004.jsonl"]
    assert read_journal(tmp_path) == (events, None)
    assert read_journal(tmp_path, 2) == (events[2:], None)
    journal.close()

    flip(tmp_path / packed[1])
    left, damage = read_journal(tmp_path)
    assert damage is not None
    assert (left, damage.step) == (events[:2], 2)
    cut_at(tmp_path, damage)
    assert read_journal(tmp_path) == (events[:2], None)
    journal.begin(journal.newest(0))
    journal.write({"event": "dropped", "group": "g7"})
    journal.close()
    again, damage = read_journal(tmp_path)
    assert damage is None
    assert [event.get("group") for event in again] == [None, "g0", None, "g7"]

    set_aside(tmp_path, 0)
    assert read_journal(tmp_path) == ([], None)
    assert (tmp_path / f"{packed[0]}.bak").exists()


def test_a_journal_has_no_event_after_one_that_a_full_disk_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.begin(0)
    with monkeypatch.context() as full:
        full.setattr("roll_flash.monitor.json_lines.AppendedFile.append", Mock(side_effect=RunError("no space")))
        with pytest.raises(RunError, match="no space"):
            journal.write({"event": "dropped", "group": "g1"})
    with pytest.raises(RunError, match="no space"):
        journal.write({"event": "dropped", "group": "g2"})
    journal.begin(1)
    journal.write({"event": "dropped", "group": "g3"})
    journal.close()
    assert [event.get("group") for event in read_journal(tmp_path)[0]] == [None, None, "g3"]


def test_a_journal_file_that_is_cut_short_before_the_last_one_is_damaged(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (0, 2):
        journal.begin(step)
        journal.write({"event": "dropped", "group": "g1"})
    journal.close()
    first, last = sorted(tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:-5])
    assert read_journal(tmp_path)[1] is None, "what a killed process leaves"
    first.write_bytes(first.read_bytes()[:-5])
    events, damage = read_journal(tmp_path)
    assert damage is not None
    assert "after_step_000000.jsonl, line 2 is damaged" in damage.message
    assert len(events) == 1


def test_what_a_journal_sets_aside_replaces_nothing_that_was_set_aside_before(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "after_step_000002.jsonl").write_text(text)
        set_aside(tmp_path, 2)
    (tmp_path / "after_step_000001.jsonl.bak").write_text("first")
    (tmp_path / "after_step_000001.jsonl").write_text("second")
    cut_at(tmp_path, Damage(1, tmp_path / "after_step_000001.jsonl", 3, ""))
    for step in (1, 2):
        assert (tmp_path / f"after_step_00000{step}.jsonl.bak").read_text() == "first"
        assert (tmp_path / f"after_step_00000{step}.jsonl.bak2").read_text() == "second"


def test_a_new_journal_file_is_in_its_folder_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("roll_flash.run.journal.sync", synced.append)
    for _ in range(2):
        journal = Journal(tmp_path)
        journal.begin(0)
        journal.close()
    assert synced == [tmp_path]


def test_a_trajectory_that_the_disk_has_lost_is_played_again_and_a_step_without_it_trained_anew(tmp_path: Path) -> None:
    async def run() -> None:
        config, _, copy = await killed(tmp_path, 14, at=4)
        events, _ = read_journal(copy / "journal", 2)
        steps = [event for event in events if event["event"] == "trained"]
        lost = steps[0]["batches"][0][0][1][0][0]
        for path in (copy / "episodes").glob("step_*.jsonl"):
            path.write_bytes(b"".join(line for line in path.open("rb") if f'"{lost}"'.encode() not in line))
        said: list[str] = []
        resumed, learner = await resumed_from(config, said)
        assert resumed.recovery.version == 2
        assert sorted(learner.steps) == list(range(3, STEPS + 1))
        assert any(f"trajectory {lost} is lost" in line for line in said)
        assert not [finding for finding in verify_run(copy) if not finding.ok]

    asyncio.run(run())


def test_a_step_that_the_learner_refuses_to_repeat_is_trained_from_new_episodes(tmp_path: Path) -> None:
    class Refuses(Learner):
        async def accumulate(self, groups: Sequence[FinishedGroup]) -> None:
            raise LearnerError("too old for the new async_ratio")

    async def run() -> None:
        config, _, _ = await killed(tmp_path, 14, at=4)
        said: list[str] = []
        learner: Any = Refuses(1.0)
        with RunDir.create(config, resume=True) as run_dir:
            checkpoint = run_dir.latest_checkpoint()
            assert checkpoint is not None
            resumed = await resume(config, run_dir, checkpoint, learner, said.append)
        assert learner.version == resumed.recovery.version == 2
        assert said[-1] == (
            "steps after 2 cannot be repeated (too old for the new async_ratio): they are trained from new episodes"
        )

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [("loss", 0.5, "loss 0.5 instead of 3"), ("learning_rate", 1e-7, "learning_rate 1e-07 instead of 2e-07")],
)
def test_a_step_with_another_result_is_named(tmp_path: Path, name: str, value: float, difference: str) -> None:
    class Differs(Learner):
        async def finish_step(self) -> StepResult:
            result = await super().finish_step()
            return StepResult(result.version, 1, False, {name: value})

    async def run() -> None:
        config, _, _ = await killed(tmp_path, 14, at=4)
        said: list[str] = []
        learner: Any = Differs(1.0)
        with RunDir.create(config, resume=True) as run_dir:
            checkpoint = run_dir.latest_checkpoint()
            assert checkpoint is not None
            await resume(config, run_dir, checkpoint, learner, said.append)
        assert f"step 3 is repeated with another result: {difference}" in said

    asyncio.run(run())


def test_the_watchdog_knows_what_a_run_that_goes_on_waits_for(tmp_path: Path) -> None:
    """A rank that hung while it read the checkpoint stood still without a line."""
    activities, seen = Activities(), []

    class Looks(Learner):
        async def load(self, folder: Path) -> None:
            seen.extend(activities.lines())
            await super().load(folder)

        async def accumulate(self, groups: Sequence[FinishedGroup]) -> None:
            seen.extend(activities.lines())
            await super().accumulate(groups)

    async def run() -> None:
        config, _, _ = await killed(tmp_path, 14, at=4)
        learner: Any = Looks(1.0)
        with RunDir.create(config, resume=True) as run_dir, watched(activities):
            checkpoint = run_dir.latest_checkpoint()
            assert checkpoint is not None
            await resume(config, run_dir, checkpoint, learner, lambda _: None)

    asyncio.run(run())
    assert list(dict.fromkeys(seen)) == [
        "the learner: it loads the checkpoint since 0 s",
        "the learner: it repeats a step since 0 s",
    ]


def test_events_before_the_copy_of_a_checkpoint_are_not_applied_to_it(tmp_path: Path) -> None:
    """A run was killed while it wrote this checkpoint: the next try goes on with the file that it began."""
    task = Task("t", "Env-v0", 1).to_dict()
    state = {
        "mark": "new",
        "version": 4,
        "tasks": {},
        "next_group": 9,
        "groups": [],
        "requeued": [],
        "async_ratio": None,
    }
    admitted = [
        {"event": "admitted", "number": number, "task": task, "requeues": 0, "drawn": True} for number in (8, 9)
    ]
    events = [{"event": "state", "mark": "old"}, admitted[0], {"event": "state", "mark": "new"}, admitted[1]]
    recovery = Recovery.of(state)
    recovery.repeat(events, max_requeues=None)
    assert list(recovery.groups) == ["g00000009"]
    lost = Recovery.of(state)
    lost.repeat(events[:2], max_requeues=None)
    assert (lost.groups, lost.is_marked) == ({}, False)


def test_a_requeued_task_is_dropped_in_the_journal_before_it_is_admitted_again(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        config = config_of(tmp_path, on_stale="requeue", async_ratio=0.0, extra_groups=2)
        with RunDir.create(config, resume=False) as run_dir:
            await play(config, run_dir, Learner(0.0), Fleet(5, 0, lambda: None))
            return read_journal(run_dir.journal)[0]

    events = asyncio.run(run())
    again = [place for place, event in enumerate(events) if event["event"] == "admitted" and not event["drawn"]]
    dropped = [place for place, event in enumerate(events) if event["event"] == "dropped"]
    assert again, "no task was requeued"
    assert all(place < other for place, other in zip(dropped, again, strict=False))


def test_what_is_decided_after_the_rollout_has_ended_is_in_the_journal_too(tmp_path: Path) -> None:
    """Such as a step whose weights were there when Ctrl-C came, and the checkpoint after it."""

    async def run() -> None:
        journal = Journal(tmp_path)
        journal.begin(0)
        log = EpisodeLog(EpisodesWriter(tmp_path / "episodes"), journal)
        log.start()
        log.note({"event": "first"})
        await log.close()
        log.note({"event": "trained"})
        log.begin_journal(1, [])
        log.note({"event": "last"})
        await log.written()
        journal.close()

    asyncio.run(run())
    events, _ = read_journal(tmp_path)
    assert [event["event"] for event in events] == ["begin", "first", "trained", "begin", "last"]
    assert len(list(tmp_path.glob("after_step_*.jsonl"))) == 2


def test_the_state_of_another_program_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "trainer.json").write_text('{"version": 3}')
    with pytest.raises(CheckpointError, match="not readable as a trainer state"):
        read_state(Checkpoint(3, tmp_path))


def test_a_trajectory_is_read_from_its_record_bit_by_bit() -> None:
    task = Task("t", "Env-v0", 1)
    made = whole_trajectory(EpisodeSpec("g0-r0", "g0", 0, task, None, 1), [0] * 500, 0.1)  # type: ignore[arg-type]
    made.logprobs[1:] = -(np.random.default_rng(0).random(500).astype(np.float32) ** 9) * 40
    made.logprobs[7] = -9999.0
    back = trajectory_of(encode(episode_record(made)).encode(), task)
    for name in ("token_ids", "policy_mask", "logprobs", "versions"):
        assert getattr(back, name).dtype == getattr(made, name).dtype
        assert getattr(back, name).tobytes() == getattr(made, name).tobytes()
    assert (back.reward, back.success, back.end, back.turns, back.messages) == (0.1, None, "terminated", (), ())
