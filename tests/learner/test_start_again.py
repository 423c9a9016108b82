"""A learner that lost a rank starts again, with as many ranks as have a place."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import ray

from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.engines.places import Place
from roll_flash.errors import LearnerLostError, PlacementError
from roll_flash.learner.ranks import fsdp
from roll_flash.learner.ranks.fsdp import FsdpLearner
from tests.learner.in_process import assert_same_weights, weights_of
from tests.learner.samples import make_group

GROUP = make_group(0, prompt=20)


class Places:
    """Room on this machine for every part but those in `full`."""

    own_ray, shares_gpus = True, False

    def __init__(self) -> None:
        self.full: set[str] = set()

    async def place(self, part: str) -> Place:
        if part in self.full:
            raise PlacementError(f"{part} needs 1 CPU, and no node has that free")
        return Place(part, ray.get_runtime_context().get_node_id(), "here", "127.0.0.1", {"num_cpus": 0})

    async def give_back(self, part: str) -> None:
        self.full.add(part)

    async def is_lost(self, part: str) -> bool:
        return part in self.full


async def step(learner: FsdpLearner) -> None:
    await learner.accumulate([GROUP])
    await learner.finish_step()


async def kill_a_rank(learner: FsdpLearner) -> None:
    weights = await learner.stage_weights()
    os.kill(int(weights.path.split("/")[2]), signal.SIGKILL)
    async with asyncio.timeout(300):
        await learner.lost.wait()  # nothing was asked of it


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_it_goes_on_from_a_checkpoint_with_fewer_ranks_and_later_with_all_again(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        places = Places()
        config = LearnerConfig(learning_rate=1e-3, start_timeout_s=1500, step_timeout_s=600, ranks=2)
        learner = FsdpLearner(tiny_model, config, async_ratio=10)
        try:
            await learner.check_model(places)
            await learner.start()
            await step(learner)
            await (await learner.begin_save(tmp_path / "one"))
            await step(learner)
            expected = await weights_of(learner)

            await kill_a_rank(learner)
            with pytest.raises(LearnerLostError, match=r"learner rank 0 died"):
                learner.raise_if_lost()
            places.full = {"rank 1"}
            await learner.start()
            assert not learner.lost.is_set()
            assert learner.version == 0
            assert "the learner has 1 of 2 ranks: rank 1 needs 1 CPU, and no node has that free" in caplog.text
            await learner.load(tmp_path / "one")
            await step(learner)
            assert learner.version == 2
            assert_same_weights(await weights_of(learner), expected)

            places.full = set()
            await kill_a_rank(learner)
            await learner.start()
            await learner.load(tmp_path / "one")
            await step(learner)
            assert len(learner._ranks) == 2
            assert_same_weights(await weights_of(learner), expected)

            places.full = {"rank 0", "rank 1"}
            await learner.close()
            with pytest.raises(LearnerLostError, match="rank 1 needs 1 CPU"):
                await learner.start()
        finally:
            await learner.close()

    asyncio.run(run())


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_call_whose_answer_is_lost_ends_and_one_that_takes_long_does_not(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the copy of a checkpoint (a thread that starts without memory is waited for without end), and where
    another call has ended meanwhile."""
    monkeypatch.setattr(fsdp, "_IDLE_S", 2.0)
    monkeypatch.setattr(fsdp, "_WATCH_EVERY_S", 0.1)

    async def run() -> None:
        learner = FsdpLearner(tiny_model, LearnerConfig(threads=1), async_ratio=1)
        try:
            await learner.start()
            began_s, size = time.monotonic(), 128
            while time.monotonic() - began_s < 2 * fsdp._IDLE_S:  # the last call alone takes longer than _IDLE_S
                began_s, size = time.monotonic(), 2 * size
                await learner.logprobs_of([[place % 50] * 200 for place in range(size)])
            rank = learner._ranks[0]
            lost = asyncio.get_running_loop().create_future()
            waits = asyncio.ensure_future(learner._gather([rank.call.remote("process_id"), lost], "begin_save", 600.0))
            await asyncio.sleep(0)
            await learner._gather([rank.call.remote("process_id")], "release", 60.0)
            with pytest.raises(LearnerLostError, match=r"a call has no answer, and no rank has done anything for 2 s"):
                async with asyncio.timeout(30):
                    await waits
            assert learner.lost.is_set()
        finally:
            await learner.close()

    asyncio.run(run())
