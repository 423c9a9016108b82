"""Finished turns of running episodes: recorded bit by bit, and played again from the same seed where that holds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scheduler_world import whole_trajectory

from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.tree import Config, load_config
from roll_flash.engines.inference import ClientSpec, Generation
from roll_flash.envs import Env, register_env
from roll_flash.envs.hosting.environments import EnvironmentMaker
from roll_flash.envs.task_sources import open_tasks
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.background import DaemonThreads
from roll_flash.rollout.episodes.conversation import TokenPolicy
from roll_flash.rollout.episodes.episode import Deadlines, Progress, run_episode
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.recovery import Recovery, RestoredGroup
from roll_flash.rollout.rollout import Rollout
from roll_flash.rollout.turn_file import FRAME, HEAD, NAME, OLD_NAME, TurnFile, read_turns
from roll_flash.rollout.turns import (
    DivergedError,
    EpisodeTurns,
    RecordedTurn,
    SentTurn,
    TurnBook,
    decode,
)
from roll_flash.rollout.worker import Outcome, WorkerSettings
from roll_flash.scheduling.tasks import make_task
from roll_flash.stream import TrajectoryStream, finished_episode
from roll_flash.types import EpisodeSpec, SamplingParams, Task, Trajectory
from tests.inference.stand_in_server import StandInServer, well

PATIENT = Deadlines(60.0, 60.0, 120.0)


class Rolls(Env):
    """Answers each turn with a number: from its seed, or by chance. Ends after four turns."""

    def __init__(self, by_chance: bool = False) -> None:
        self._by_chance = by_chance
        self._turns = 0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._random = np.random.default_rng(None if self._by_chance else seed)
        return "roll", {}

    async def step(self, action: str) -> Any:
        self._turns += 1
        return str(self._random.integers(10**9)), float(len(action)), self._turns == 4, False, {}


register_env("Rolls-v0", Rolls)
register_env("ChanceRolls-v0", Rolls, nondeterministic=True)


class RandomClient:
    """A stand-in for a server whose tokens are random and whose version grows with each turn."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.prompts: list[int] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        self.prompts.append(len(token_ids))
        count = int(self._random.integers(1, 6))
        logprobs = -self._random.exponential(size=count).astype(np.float32)
        versions = np.arange(len(self.prompts), len(self.prompts) + count, dtype=np.int32) // 2
        tokens = self._random.integers(5, 60, count).astype(np.int32)
        return Generation(tokens, logprobs, versions, "stop", "here", 0.25)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("tiny"))


def spec_of(env_id: str = "Rolls-v0", **kwargs: Any) -> EpisodeSpec:
    return EpisodeSpec("g00000001-r0", "g00000001", 0, make_task(env_id, 7, kwargs), SamplingParams(), 6)


def play(tokenizer: Any, spec: EpisodeSpec, seed: int) -> tuple[Trajectory, list[SentTurn], RandomClient]:
    client: Any = RandomClient(seed)
    sent: list[SentTurn] = []
    turns = EpisodeTurns(spec, sent.append)
    policy = TokenPolicy(client, tokenizer, spec.sampling, episode_id="e", max_length=500, turns=turns)
    maker = EnvironmentMaker(DaemonThreads())

    async def episode() -> Any:
        return await run_episode(spec, lambda: maker.open(spec.task), policy, PATIENT, Progress(), turns=turns)

    played = asyncio.run(episode())
    assert isinstance(played, Trajectory)
    return played, sent, client


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_an_episode_goes_on_after_its_finished_turns_and_the_model_is_asked_only_for_the_rest(
    tokenizer: Any, finished: int
) -> None:
    first, sent, _ = play(tokenizer, spec_of(), 1)
    assert [turn.index for turn in sent] == [0, 1, 2], "the last turn comes with the trajectory"
    spec = replace(spec_of(), played=tuple(turn.record for turn in sent[:finished]))
    again, sent_again, client = play(tokenizer, spec, 2)
    assert len(client.prompts) == 4 - finished
    assert [turn.index for turn in sent_again] == [0, 1, 2][finished:]
    assert again.info.get("continued_turns", 0) == finished
    end = first.turns[finished].start
    for name in ("token_ids", "policy_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(again, name)[:end], getattr(first, name)[:end])
    for before, now in zip(first.turns[:finished], again.turns, strict=False):
        assert (now.action, now.observation, now.reward) == (before.action, before.observation, before.reward)
    assert again.reward == sum(turn.reward for turn in again.turns)


def test_an_environment_that_answers_otherwise_is_found_out(tokenizer: Any) -> None:
    _, sent, _ = play(tokenizer, spec_of(), 1)
    records = tuple(turn.record for turn in sent)
    with pytest.raises(DivergedError, match="answer in turn 0"):
        play(tokenizer, replace(spec_of(by_chance=True), played=records), 1)
    other = msgspec.msgpack.decode(records[1])
    other[2] += 1
    changed = msgspec.msgpack.encode(other)
    with pytest.raises(DivergedError, match="prompt of turn 1"):
        play(tokenizer, replace(spec_of(), played=(records[0], changed)), 1)


def test_an_environment_that_is_registered_as_nondeterministic_begins_again(tokenizer: Any) -> None:
    _, sent, _ = play(tokenizer, spec_of(), 1)
    spec = replace(spec_of("ChanceRolls-v0"), played=tuple(turn.record for turn in sent))
    played, sent, client = play(tokenizer, spec, 2)
    assert sent == []
    assert len(client.prompts) == 4
    assert "continued_turns" not in played.info


def generation(*versions: int) -> Generation:
    count = len(versions)
    return Generation(
        np.arange(count, dtype=np.int32),
        np.array([-0.1, -1e-30, -3.4e38][:count], np.float32),
        np.array(versions, np.int32),
        "length",
        "there",
        1.5,
    )


def turn_of(episode_id: str, index: int, *versions: int) -> SentTurn:
    return RecordedTurn(1, generation(*versions), 2).sent(episode_id, index)


def test_what_is_recorded_is_read_as_it_was() -> None:
    sent = turn_of("e", 0, 4, 4, 5)
    [read] = decode([sent.record])
    before = generation(4, 4, 5)
    for name in ("token_ids", "logprobs", "versions"):
        found, wanted = getattr(read.generation, name), getattr(before, name)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    assert (read.prompt, read.answer, read.generation.finish_reason) == (1, 2, "length")


def turns_in(folder: Path) -> list[SentTurn]:
    """Write a file of turns of three episodes; return them in its order."""
    turns = [turn_of("a", 0, 1), turn_of("b", 0, 2, 3), turn_of("a", 1, 1), turn_of("c", 0, 1), turn_of("a", 2, 1)]
    file = TurnFile(folder)
    file.begin([turns[0].record])
    for turn in turns[1:]:
        file.write(turn.record)
    file.close()
    return turns


def test_the_file_has_the_turns_since_it_began_and_no_file_of_an_older_version_beside_it(tmp_path: Path) -> None:
    file = TurnFile(tmp_path)
    (tmp_path / OLD_NAME).touch()
    file.begin([turn_of("old", 0, 1).record])
    file.close()
    turns_in(tmp_path)
    assert os.listdir(tmp_path) == [NAME]
    book, line = read_turns(tmp_path)
    assert line == ""
    assert book.versions() == {"a": (1, 1), "b": (2, 3), "c": (1, 1)}
    assert len(book.of("a")) == 3


def flipped(place: int, change: int = 1) -> Callable[[bytearray], None]:
    def flip(content: bytearray) -> None:
        content[place] ^= change

    return flip


def cut(content: bytearray) -> None:
    del content[-5:]


def zeros(content: bytearray) -> None:
    content.extend(bytes(1 << 20))


FIRST = len(HEAD)
DAMAGES: dict[str, tuple[Callable[[bytearray], None], dict[str, int], str]] = {
    "cut in the last record": (cut, {"a": 2, "b": 1, "c": 1}, "damaged in 1 places"),
    "a flipped bit in the first turn of a": (flipped(FIRST + FRAME.size + 9), {"b": 1, "c": 1}, "damaged in 1 places"),
    "a flipped bit in its checksum": (flipped(FIRST + 4), {"b": 1, "c": 1}, "damaged in 1 places"),
    "a length beyond the end": (flipped(FIRST + 2), {}, "damaged in 1 places"),
    "a length beyond all memory": (flipped(FIRST + 3, 0x80), {}, "damaged in 1 places"),
    "zeros after the end": (zeros, {"a": 3, "b": 1, "c": 1}, "damaged in 1 places"),
    "another version": (flipped(FIRST - 2, 3), {}, "of another version"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_turns_are_left_out_and_said_in_one_line(damage: str, tmp_path: Path) -> None:
    turns_in(tmp_path)
    change, left, said = DAMAGES[damage]
    content = bytearray((tmp_path / NAME).read_bytes())
    change(content)
    (tmp_path / NAME).write_bytes(content)
    book, line = read_turns(tmp_path)
    assert {name: len(book.of(name)) for name in "abc" if book.of(name)} == left
    assert said in line
    assert str(tmp_path / NAME) in line


def test_turns_of_an_older_version_are_not_read_and_that_is_said(tmp_path: Path) -> None:
    assert read_turns(tmp_path)[1] == ""
    (tmp_path / OLD_NAME).touch()
    book, line = read_turns(tmp_path)
    assert book.records() == []
    assert f"{OLD_NAME}: of an older version" in line


def test_a_turn_takes_at_most_1_3_times_the_bytes_of_its_tokens_logprobs_and_versions(tmp_path: Path) -> None:
    count = 24
    tokens, logprobs = np.arange(count, dtype=np.int32), np.full(count, -0.1, np.float32)
    generation = Generation(tokens, logprobs, np.full(count, 70_000, np.int32), "length", "http://127.0.0.1:41234", 0.3)
    sent = RecordedTurn(2**32 - 1, generation, 2**32 - 1).sent("g00000001-r0", 3)
    file = TurnFile(tmp_path)
    file.begin([sent.record] * 100)
    file.close()
    assert (tmp_path / NAME).stat().st_size <= 1.3 * 100 * 3 * 4 * count


def config_of(**scheduler: Any) -> Config:
    return load_config(
        {
            "model": {"path": "tiny"},
            "envs": [{"id": "Env-v0"}],
            "scheduler": {"async_ratio": 1.0, "groups_per_step": 4, "group_size": 2, **scheduler},
        }
    )


def test_turns_that_no_step_may_train_are_not_kept_and_a_group_is_as_old_as_its_oldest_turn() -> None:
    book = TurnBook()
    ages = {1: (8, 9), 2: (7, 9), 3: (9, 9), 4: (9, 10)}
    for number, versions in ages.items():
        book.add(turn_of(f"g0000000{number}-r0", 0, *versions))
    book.add(turn_of("g00000003-r1", 0, 8))  # has ended
    book.add(turn_of("g00000009-r0", 0, 9))  # of a group that has left
    groups = {f"g0000000{n}": RestoredGroup(n, Task(f"t{n}", "Env-v0", n), 0) for n in ages}
    ended = finished_episode(whole_trajectory(spec_of(), [9, 9, 9, 9, 9]))
    ended = replace(ended, episode_id="g00000003-r1", group_id="g00000003")
    groups["g00000003"].episodes.append(ended.episode_id)
    config = config_of()
    recovery = Recovery("m", 9, 10, groups, [], None, open_tasks(config).state())

    class Fleet:
        turns = book

    class Files:
        pass

    run = Rollout(
        config,
        Fleet(),  # type: ignore[arg-type]
        open_tasks(config),
        Files(),  # type: ignore[arg-type]
        TrajectoryStream(),
        version=9,
        recovery=recovery,
        trajectories={ended.episode_id: ended},
    )
    assert set(book.versions()) == {"g00000001-r0", "g00000003-r0"}
    last_steps = {group.group_id: group.last_step for group in run.scheduler.unfinished_groups()}
    assert last_steps == {"g00000001": 9, "g00000002": None, "g00000003": 10, "g00000004": None}
    assert run.take_notices() == [str(book)]


def kill_worker(folder: Path) -> None:
    [pid] = [int(path.name[4:]) for path in folder.glob("pid-*")]
    os.kill(pid, signal.SIGKILL)
    (folder / "go").touch()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("workers", [1, 2])
def test_the_episode_of_a_killed_worker_goes_on_elsewhere(tmp_path: Path, workers: int) -> None:
    """Two of its three turns had ended: the model is asked for the third one only."""

    async def run() -> tuple[list[Outcome], int, WorkerFleet]:
        async with StandInServer(well) as server:
            model = ClientSpec("vllm", (server.endpoint,), "tiny", 256)
            fleet = WorkerFleet(WorkerSettings(model, resolve_model("tiny"), 256, PATIENT, None, "turns"), workers)
            task = make_task("tests.counting:CountingToFile-v0", 3, {"folder": str(tmp_path), "turns": 3})
            spec = EpisodeSpec("e", "g", 0, task, SamplingParams(max_new_tokens=4), 5)
            try:
                await fleet.start()
                playing = asyncio.ensure_future(_all(fleet, spec))
                async with asyncio.timeout(60):
                    while len(fleet.turns.of("e")) < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                    asked = len(server.requests)
                    while len(server.requests) < 3:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                kill_worker(tmp_path)
                async with asyncio.timeout(120):
                    return await playing, len(server.requests) - asked, fleet
            finally:
                await fleet.close()

    [outcome], asked, fleet = asyncio.run(run())
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.info["continued_turns"] == 2
    assert outcome.reward == 3.0
    assert asked <= 2, "the third turn was asked for once before the kill and once after it"
    assert (fleet.turns.moved_episodes, fleet.turns.moved_turns) == (1, 2)
    assert fleet.turns.records() == []


async def _all(fleet: WorkerFleet, spec: EpisodeSpec) -> list[Outcome]:
    return [outcome async for outcome in fleet.run([spec], max_concurrent=1)]
