"""What a worker hands in comes back as it was, and the driver learns what it needs without reading it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from roll_flash.errors import StreamError
from roll_flash.monitor import episodes
from roll_flash.monitor.episodes import EpisodesWriter, episode_record, find_trajectories
from roll_flash.monitor.json_lines import encode
from roll_flash.stream import blocks
from roll_flash.stream.blocks import TokenBlock, fetch_lines, fetch_tokens, fetch_trajectories, hand_in, join, located
from roll_flash.types import Branch, EpisodeFailure, FinishedEpisode, StoredTrajectory, Trajectory, Turn
from tests.learner.samples import TASK, make_group

FAILURE = EpisodeFailure("failed", "group", TASK, "env_error", "boom", 0, 0)


def trajectory(number: int = 0, *, branches: int = 0) -> Trajectory:
    first, *others = make_group(number, replicas=1 + branches).trajectories
    made = [
        Branch(
            token_ids=other.token_ids,
            policy_mask=other.policy_mask,
            logprobs=other.logprobs,
            versions=other.versions,
            turns=(Turn(12, 15, "go", "", 0.0, "stop", 0.1, 0.2),),
            messages=({"role": "user", "content": f"branch {place}"},),
            prompt_length=12,
        )
        for place, other in enumerate(others)
    ]
    info = {"score": 0.5, "path": [1, 2]}
    messages = ({"role": "user", "content": "hé"},)
    return dataclasses.replace(first, branches=tuple(made), info=info, messages=messages)


def assert_same(one: Any, other: Any) -> None:
    for field in dataclasses.fields(one):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == yours.dtype
            np.testing.assert_array_equal(mine, yours)
        elif field.name == "branches":
            assert len(mine) == len(yours)
            for my, your in zip(mine, yours, strict=True):
                assert_same(my, your)
        else:
            assert mine == yours


@pytest.mark.parametrize("branches", [0, 2])
def test_a_trajectory_comes_back_as_it_went(branches: int) -> None:
    sent = trajectory(branches=branches)
    _, block, [_, text], [_, line] = hand_in([trajectory(7), sent])
    assert_same(join(text, block[1]), sent)
    assert line.decode() == encode(episode_record(sent))
    assert len(text) < 3000, "arrays are not in it"


def test_a_line_of_the_log_names_the_worker() -> None:
    *_, [line] = hand_in([trajectory()], "worker 3")
    assert json.loads(line)["worker"] == "worker 3"


def test_no_line_of_the_log_is_longer_than_one_that_is_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent may rewrite its history in each call, with megabytes: the run could not be resumed."""
    monkeypatch.setattr(episodes, "MAX_RECORD_BYTES", 20_000)
    long = trajectory(branches=1)
    (branch,) = long.branches
    message = {"role": "user", "content": "é\x01" * 20_000, "name": ["x" * 20_000]}
    branch = dataclasses.replace(branch, messages=(message,), turns=())
    long = dataclasses.replace(long, branches=(branch,), messages=(message,) * 3, info={"said": "y" * 20_000})
    *_, lines = hand_in([long, trajectory(1)])
    with EpisodesWriter(tmp_path) as writer:
        for line in lines:
            assert len(line) < 20_000
            writer.write_line(0, line)
        writer.write_line(0, b"{" + b" " * 20_000 + b"}")
    assert "is not in the log" in caplog.text
    found = find_trajectories(tmp_path, {each.episode_id: TASK for each in (long, trajectory(1))})
    back = found[long.episode_id]
    assert "characters left out" in back.messages[0]["content"]
    assert np.array_equal(back.token_ids, long.token_ids)
    assert np.array_equal(back.branches[0].logprobs, branch.logprobs)
    assert len(found) == 2


def test_experts_come_back_and_a_trajectory_without_them_is_marked() -> None:
    first, second = trajectory(1), trajectory(2)
    experts = np.arange(len(first.token_ids) * 6, dtype=np.int16).reshape(-1, 3, 2)
    _, block, texts, _ = hand_in([dataclasses.replace(first, routed_experts=experts), second])
    assert_same(join(texts[0], block[0]), dataclasses.replace(first, routed_experts=experts))
    marked = np.full((len(second.token_ids), 3, 2), -1, np.int16)
    assert_same(join(texts[1], block[1]), dataclasses.replace(second, routed_experts=marked))
    assert [sample["routed_experts"].shape for sample in block[0].samples()] == [experts.shape]


def test_metadata_say_what_scheduling_and_learning_need() -> None:
    sent = trajectory(branches=1)
    [about], _, _, _ = hand_in([sent])
    assert isinstance(about, FinishedEpisode)
    assert about.data is None
    oldest = min(int(each.versions[each.policy_mask].min()) for each in sent.samples)
    assert (about.policy_tokens, about.oldest_version) == (sent.policy_tokens, oldest)
    assert about.tokens == sum(len(sample.token_ids) for sample in sent.samples)
    assert (about.samples, about.turns, len(about.own_turns)) == (2, 3, 2)
    assert sum(tokens for tokens, _, _ in about.own_turns) == int(sent.policy_mask.sum())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_trajectories_outlive_the_worker_that_handed_them_in() -> None:
    @ray.remote
    class Worker:
        def __init__(self, outcomes: list[Any]) -> None:
            self.outcomes = outcomes

        async def poll(self) -> Any:
            return hand_in(self.outcomes)

    worker: Any = Worker.remote([trajectory(0), FAILURE, trajectory(1, branches=1)])
    ended, *stored = worker.poll.options(num_returns=4).remote()
    outcomes = located(ray.get(ended), *stored)
    ray.kill(worker)
    first, failure, second = outcomes
    assert failure == FAILURE
    assert isinstance(first, FinishedEpisode)
    assert isinstance(second, FinishedEpisode)
    whole = fetch_trajectories([first.data, second.data])
    assert_same(whole[0], trajectory(0))
    assert_same(whole[1], trajectory(1, branches=1))
    assert isinstance(second.data, StoredTrajectory)
    assert json.loads(fetch_lines([second.data])[0])["episode_id"] == whole[1].episode_id

    @ray.remote
    def rank(planned: list[StoredTrajectory]) -> int:
        return sum(len(each.token_ids) for each in fetch_tokens(planned))

    assert ray.get(rank.remote([first.data, second.data])) == first.tokens + second.tokens


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_trajectories_that_are_lost_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @ray.remote
    def never() -> TokenBlock:
        asyncio.run(asyncio.sleep(60))
        return TokenBlock.of([])

    monkeypatch.setattr(blocks, "FETCH_TIMEOUT_S", 0.2)
    lost = never.remote()
    try:
        with pytest.raises(StreamError, match=r"object store were not there within 0\.2 s.*resume the run"):
            fetch_tokens([StoredTrajectory(0, lost)])
    finally:
        ray.cancel(lost, force=True)
