"""A teacher that is a real server: what it says of sampled tokens is what transformers computes, on both ways to it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from roll_flash.config.sections.distill import TEACHER, DistillConfig
from roll_flash.stages.teacher import Teacher
from roll_flash.stream import Consumer, TrajectoryStream, finished_episode
from roll_flash.types import Trajectory
from tests.inference.conftest import MAX_MODEL_LEN, Served
from tests.learner.samples import make_trajectory

KEY_VARIABLE = "KEY_OF_THE_TEACHER_IN_A_TEST"


def played(served: Served, text: str) -> Trajectory:
    """An episode with every third token sampled, with a log-probability of -1."""
    token_ids = served.encode(text)
    mask = [place % 3 == 1 for place in range(len(token_ids))]
    return make_trajectory(token_ids, mask, reward=0.0, logprobs=[-1.0] * len(mask))


async def score(teacher: Teacher, trajectory: Trajectory) -> tuple[NDArray[np.float32] | None, dict[str, int]]:
    """The teacher's column of a row, None if the row was dropped, and the stream's counts."""
    stream = TrajectoryStream([Consumer(TEACHER)])
    stage = asyncio.create_task(teacher.stage(stream, lambda _: None).run())
    try:
        stream.put("e", "g", finished_episode(trajectory), {})
        (row,) = stream.close_group("g")
        await stream.settled([row], TEACHER)
        return row.columns.get(TEACHER), stream.counts()
    finally:
        stage.cancel()
        await asyncio.gather(stage, return_exceptions=True)
        await teacher.close()


def teacher_of(served: Served, **where: Any) -> Teacher:
    return Teacher(DistillConfig.model_validate({"teacher": where, "retries": 0}), served.tokenizer)


def assert_is_what_transformers_says(found: Any, served: Served, trajectory: Trajectory) -> None:
    """Of tokens that fit the server, with room for one more; the others have 0."""
    sampled = np.flatnonzero(trajectory.policy_mask)
    fit = sampled[sampled < MAX_MODEL_LEN - 1]
    expected = served.logprobs(trajectory.token_ids[: MAX_MODEL_LEN - 1].tolist())[fit - 1] + 1.0
    assert np.abs(found[: fit.size] - expected).max() < 1e-3
    assert found[fit.size :].tolist() == [0.0] * (sampled.size - fit.size)


def test_servers_of_the_run_say_what_transformers_computes(served: Served) -> None:
    teacher, trajectory = teacher_of(served, model="tiny"), played(served, "on-policy distillation, token by token")
    teacher.servers = served.engine.client_spec
    found, _ = served.run(score(teacher, trajectory))
    assert_is_what_transformers_says(found, served, trajectory)


def test_what_does_not_fit_a_server_has_no_term(served: Served) -> None:
    teacher = teacher_of(served, model="tiny")
    teacher.servers = served.engine.client_spec
    trajectory = played(served, "x" * MAX_MODEL_LEN)
    found, _ = served.run(score(teacher, trajectory))
    assert_is_what_transformers_says(found, served, trajectory)
    assert found is not None
    assert found[-1] == 0.0, "the last token does not fit"


@pytest.mark.parametrize("served", [pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True)
def test_an_endpoint_of_vllm_says_the_same_and_has_the_tokenizer_compared(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = served.engine.client_spec()
    monkeypatch.setenv(KEY_VARIABLE, spec.key)
    where = {"base_url": f"{spec.endpoints[0]}/v1", "api_key_env": KEY_VARIABLE}
    trajectory, long, longer = (played(served, text) for text in ("over HTTP", "x" * MAX_MODEL_LEN, "x" * 600))

    async def ask() -> list[Any]:
        asked = []
        for each in (trajectory, long):
            knowing = teacher_of(served, **where)
            await knowing.check()
            asked.append(await score(knowing, each))
        return [*asked, await score(teacher_of(served, **where), longer)]

    (found, _), (cut, _), (refused, counts_of_refused) = served.run(ask())
    assert_is_what_transformers_says(found, served, trajectory)
    assert_is_what_transformers_says(cut, served, long)
    assert refused is None
    assert counts_of_refused["dropped_teacher_too_long"] == 1, "by what vLLM answers"
