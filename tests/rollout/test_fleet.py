"""The fleet on real Ray actors: every episode has one outcome, also when a worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError

from roll_flash.config.tree import load_config
from roll_flash.engines.inference import ClientSpec
from roll_flash.errors import RunError
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.processes.background import first_failure
from roll_flash.processes.deadlines import RecentCount
from roll_flash.rollout import fleet as fleet_module
from roll_flash.rollout.episodes.episode import Deadlines
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.rollout import Rollout
from roll_flash.rollout.worker import ChatEndpoint, Outcome, WorkerSettings
from roll_flash.scheduling.tasks import SeedTasks, make_task
from roll_flash.stream import TrajectoryStream
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, SamplingParams, Trajectory
from roll_flash.watchdog.activity import Activities, watched
from tests.inference.stand_in_server import StandInServer, well

COUNTING = "tests.counting:Counting-v0"
STUCK = "tests.stuck:Stuck-v0"
ANSWER = b'{"choices": [{"message": {"role": "assistant", "content": "go"}, "finish_reason": "stop"}]}'


class Endpoint(BaseHTTPRequestHandler):
    """A stand-in for a model: answers every chat with the same word."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def endpoint() -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def make_settings(endpoint: str) -> WorkerSettings:
    return WorkerSettings(
        model=ChatEndpoint(endpoint, "any"),
        tokenizer_folder=None,
        max_length=256,
        deadlines=Deadlines(10.0, 10.0, 60.0),
        sandbox=None,
        run="fleet-test",
    )


def make_episodes(count: int, step_s: float) -> list[EpisodeSpec]:
    """Of three turns each, and not all equally long, so that they do not all end at once."""
    tasks = [make_task(COUNTING, seed, {"turns": 3, "step_s": step_s * (1 + seed % 3)}) for seed in range(count)]
    return [EpisodeSpec(f"e{task.seed}", "g", 0, task, SamplingParams(), max_turns=5) for task in tasks]


def stuck_episode(how: str) -> EpisodeSpec:
    return EpisodeSpec("stuck", "g", 0, make_task(STUCK, 0, {"how": how}), SamplingParams(), max_turns=5)


def ended_episode(seconds: float) -> FinishedEpisode:
    task = make_task(COUNTING, 0, {})
    return FinishedEpisode("e", "g", task, 1.0, True, 0.0, seconds, prompt_length=1, versions=(), policy_tokens=1)


def workers_of(outcomes: Sequence[Outcome]) -> set[int]:
    """Process ids of the workers that played these."""
    return {outcome.info["pid"] for outcome in outcomes if isinstance(outcome, Trajectory)}


async def play(fleet: WorkerFleet, episodes: Sequence[EpisodeSpec], max_concurrent: int) -> list[Outcome]:
    return [outcome async for outcome in fleet.run(episodes, max_concurrent=max_concurrent)]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_every_episode_is_played_once_over_several_workers(endpoint: str) -> None:
    async def run() -> list[Outcome]:
        fleet = WorkerFleet(make_settings(endpoint), workers=2)
        try:
            await fleet.start()
            return await play(fleet, make_episodes(40, step_s=0.0), max_concurrent=8)
        finally:
            await fleet.close()

    outcomes = asyncio.run(run())
    assert Counter(outcome.episode_id for outcome in outcomes) == {f"e{i}": 1 for i in range(40)}
    assert all(isinstance(outcome, Trajectory) and outcome.reward == 3.0 for outcome in outcomes)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_workers_that_started_before_their_servers_play_with_them_also_one_that_died_meanwhile() -> None:
    async def run() -> list[Outcome]:
        settings = WorkerSettings(None, resolve_model("tiny"), 256, Deadlines(10.0, 10.0, 60.0), None, "fleet-test")
        fleet = WorkerFleet(settings, workers=2)
        try:
            await fleet.start()
            ray.kill(fleet._members[1].actor)
            async with StandInServer(well) as server:
                await fleet.serve(ClientSpec("vllm", (server.endpoint,), "tiny", 256))
                assert fleet.size == 2
                return await play(fleet, make_episodes(8, step_s=0.1), max_concurrent=8)
        finally:
            await fleet.close()

    outcomes = asyncio.run(run())
    assert all(isinstance(outcome, Trajectory) for outcome in outcomes), outcomes
    assert len(outcomes) == 8
    assert len(workers_of(outcomes)) == 2


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_killed_worker_loses_only_its_episodes_and_is_replaced(endpoint: str) -> None:
    async def run() -> list[Outcome]:
        fleet = WorkerFleet(make_settings(endpoint), workers=2)
        try:
            await fleet.start()
            outcomes = []
            async for outcome in fleet.run(make_episodes(24, step_s=0.15), max_concurrent=6):
                if not outcomes:
                    os.kill(outcome.info["pid"], signal.SIGKILL)  # type: ignore[union-attr]
                outcomes.append(outcome)
            seen = workers_of(outcomes)
            for _ in range(120):  # until the replacement, the third, is up and plays too
                if len(seen) == 3:
                    return outcomes
                seen |= workers_of(await play(fleet, make_episodes(4, step_s=0.1), max_concurrent=4))
            raise AssertionError("the killed worker was not replaced")
        finally:
            await fleet.close()

    outcomes = asyncio.run(run())
    assert Counter(outcome.episode_id for outcome in outcomes) == {f"e{i}": 1 for i in range(24)}
    lost = [outcome for outcome in outcomes if isinstance(outcome, EpisodeFailure)]
    assert 1 <= len(lost) <= 6
    assert {outcome.cause for outcome in lost} == {"worker_died"}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_worker_whose_event_loop_is_held_up_is_replaced_and_says_where(endpoint: str) -> None:
    async def run() -> tuple[Outcome, list[Outcome]]:
        fleet = WorkerFleet(make_settings(endpoint), workers=1, heartbeat_timeout_s=6.0)
        try:
            await fleet.start()
            [stuck] = await play(fleet, [stuck_episode("holds up the event loop")], max_concurrent=1)
            return stuck, await play(fleet, make_episodes(2, step_s=0.0), max_concurrent=2)
        finally:
            await fleet.close()

    stuck, others = asyncio.run(run())
    assert isinstance(stuck, EpisodeFailure)
    assert stuck.cause == "worker_died"
    assert "no sign of life for 6 s" in stuck.message
    assert "held up in step (stuck.py:" in stuck.message
    assert all(isinstance(outcome, Trajectory) for outcome in others)


class OneFails(WorkerFleet):
    """Worker 0 starts, worker 1 never comes to an end of that, worker 2 cannot when the first one has."""

    started: Any = None
    starting = 0

    async def _start_actor(self, index: int) -> Any:
        if index == 0:
            self.started = await super()._start_actor(index)
            return self.started
        self.starting += 1
        try:
            async with asyncio.timeout(60):
                while index == 1 or self.started is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            self.starting -= 1
        raise RunError("no place for it")


def ask_until_it_ends(actor: Any) -> None:
    for _ in range(80):  # calls may still be answered while Ray ends the process
        ray.get(actor.status.remote(), timeout=20)
        time.sleep(0.25)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_worker_that_does_not_start_leaves_none_behind_that_starts_or_has(endpoint: str) -> None:
    async def run() -> OneFails:
        fleet = OneFails(make_settings(endpoint), workers=3)
        try:
            with pytest.raises(RunError, match="no place for it"):
                await fleet.start()
        finally:
            await fleet.close()
        assert fleet.starting == 0
        return fleet

    fleet = asyncio.run(run())
    with pytest.raises(RayActorError):
        ask_until_it_ends(fleet.started)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_run_that_stalls_names_the_episode_its_turn_and_what_it_waits_for(endpoint: str, tmp_path: Path) -> None:
    config = load_config(
        {
            "model": {"path": "tiny"},
            "envs": [{"id": STUCK}],
            "scheduler": {"groups_per_step": 1, "group_size": 2},
            "rollout": {"max_concurrent": 2},
            "monitor": {"stall_timeout_s": 6.0},
        }
    )

    async def run() -> None:
        fleet = WorkerFleet(make_settings(endpoint), workers=1)
        try:
            await fleet.start()
            tasks = SeedTasks(STUCK, {}, (0, 10), seed=0)
            with EpisodesWriter(tmp_path) as episodes:
                async with Rollout(config, fleet, tasks, episodes, TrajectoryStream()) as rollout:
                    async for _ in rollout.groups_for_step():
                        raise AssertionError("no group can become ready")
        finally:
            await fleet.close()

    says = r"no episode ended for 6 s .*g00000000-r\d turn 0 waits for the environment's step since \d+ s"
    with pytest.raises(RunError, match=says):
        asyncio.run(run())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_info_that_cannot_be_sent_costs_no_episode_but_one_that_says_so(endpoint: str) -> None:
    async def run() -> dict[str, Outcome]:
        fleet = WorkerFleet(make_settings(endpoint), workers=1)
        hows = {"a": "generator", "b": "class", "c": "cannot be shown", "d": "nothing"}
        try:
            await fleet.start()
            tasks = {name: make_task("tests.misbehaving:Info-v0", 0, {"how": how}) for name, how in hows.items()}
            episodes = [EpisodeSpec(n, "g", 0, task, SamplingParams(), max_turns=2) for n, task in tasks.items()]
            async with asyncio.timeout(60):
                return {outcome.episode_id: outcome for outcome in await play(fleet, episodes, max_concurrent=4)}
        finally:
            await fleet.close()

    outcomes = asyncio.run(run())
    for name, says in {"a": "<generator", "b": "Local", "c": "no words", "d": "None"}.items():
        outcome = outcomes[name]
        assert isinstance(outcome, Trajectory)
        assert says in str(outcome.info)
    assert outcomes["c"].info == {"info_left_out": {"value": "no words"}}  # type: ignore[union-attr]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_disk_that_is_full_ends_the_run_at_once_and_is_named(endpoint: str, tmp_path: Path) -> None:
    class FullDisk(EpisodesWriter):
        def write_line(self, step: int, line: bytes) -> None:
            raise RunError("episodes/step_000000.jsonl: cannot be written: No space left on device")

    config = load_config(
        {
            "model": {"path": "tiny"},
            "envs": [{"id": COUNTING}],
            "scheduler": {"groups_per_step": 1, "group_size": 2},
            "rollout": {"max_concurrent": 2},
        }
    )

    async def run() -> None:
        fleet = WorkerFleet(make_settings(endpoint), workers=1)
        try:
            with first_failure() as failure:
                await fleet.start()
                tasks = SeedTasks(COUNTING, {"turns": 1}, (0, 10), seed=0)
                async with asyncio.timeout(60), Rollout(config, fleet, tasks, FullDisk(tmp_path), TrajectoryStream()):
                    await failure.happened.wait()
                    failure.raise_error()
        finally:
            await fleet.close()

    with pytest.raises(RunError, match="No space left on device"):
        asyncio.run(run())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_cancelled_episode_gives_no_outcome_and_leaves_its_worker(endpoint: str) -> None:
    async def run() -> tuple[list[str], int]:
        fleet = WorkerFleet(make_settings(endpoint), workers=1)
        heard: list[str] = []
        try:
            await fleet.start()
            episodes = make_episodes(2, step_s=0.5)
            await fleet.submit(episodes, lambda outcome: heard.append(outcome.episode_id))
            await fleet.cancel(["e0"])
            for _ in range(200):
                if heard and not await fleet.status():
                    break
                await asyncio.sleep(0.1)
            return heard, len(await fleet.status())
        finally:
            await fleet.close()

    assert asyncio.run(run()) == (["e1"], 0)


def test_workers_that_die_again_and_again_end_the_run_and_old_deaths_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stand-in for Ray's actors; how a real one is replaced is tested above."""
    clock = Mock()
    monkeypatch.setattr(fleet_module, "MAX_WORKER_DEATHS", 2)
    monkeypatch.setattr(fleet_module, "time", clock)
    monkeypatch.setattr(fleet_module, "ray", Mock())

    async def run() -> None:
        fleet = WorkerFleet(make_settings("http://127.0.0.1:9/v1"), workers=1)
        monkeypatch.setattr(fleet, "_deaths", RecentCount(100))
        monkeypatch.setattr(fleet, "_start_actor", lambda index: asyncio.sleep(0, "another actor"))
        member = fleet_module._WorkerHandle(0, "an actor")
        for clock.monotonic.return_value in (0.0, 99.0, 150.0, 240.0):
            await fleet._replace(member, "died")
        clock.monotonic.return_value = 241.0
        with pytest.raises(RunError, match="3 rollout workers died within"):
            await fleet._replace(member, "died")

    asyncio.run(run())


def test_a_worker_that_dies_while_it_starts_again_is_counted_and_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stand-in for Ray's actors."""
    monkeypatch.setattr(fleet_module, "MAX_WORKER_DEATHS", 3)
    monkeypatch.setattr(fleet_module, "ray", Mock())

    async def run() -> None:
        fleet = WorkerFleet(make_settings("http://127.0.0.1:9/v1"), workers=1)
        starts = AsyncMock(side_effect=[ActorDiedError(), ActorDiedError(), "another actor", *[ActorDiedError()] * 9])
        monkeypatch.setattr(fleet, "_start_actor", starts)
        member = fleet_module._WorkerHandle(0, "an actor")
        await fleet._replace(member, "died")
        assert member.actor == "another actor"
        with pytest.raises(RunError, match="4 rollout workers died within"):
            await fleet._replace(member, "died")

    asyncio.run(run())


def test_a_new_worker_that_dies_while_it_starts_is_counted_and_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stand-in for Ray's actors. The second one dies when it is asked for the servers that it cannot reach."""
    monkeypatch.setattr(fleet_module, "MAX_WORKER_DEATHS", 3)
    monkeypatch.setattr(fleet_module, "ray", Mock())

    def actor(*answers: Any) -> Any:
        return Mock(unreachable_servers=Mock(remote=AsyncMock(side_effect=answers)), close=Mock(remote=AsyncMock()))

    async def run() -> None:
        fleet = WorkerFleet(make_settings("http://127.0.0.1:9/v1"), workers=1)
        whole = actor([])
        starts = AsyncMock(side_effect=[ActorDiedError(), actor(ActorDiedError()), whole, *[ActorDiedError()] * 9])
        monkeypatch.setattr(fleet, "_start_actor", starts)
        await fleet._start_worker(0)
        assert [member.actor for member in fleet._members] == [whole]
        with pytest.raises(RunError, match="4 rollout workers died within"):
            await fleet._start_worker(1)

    asyncio.run(run())


def test_an_evaluation_stands_still_only_after_far_longer_than_its_episodes_take() -> None:
    """Episodes that begin together end together: the wait for the first one is as long as an episode."""

    async def run() -> list[int]:
        fleet = WorkerFleet(make_settings(""), workers=1)
        outcomes: asyncio.Queue[FinishedEpisode | EpisodeFailure] = asyncio.Queue()
        for seconds in (20.0, 1.0):
            outcomes.put_nowait(ended_episode(seconds))
        activities = Activities()
        with watched(activities):
            await fleet._next_outcomes(outcomes)
            waiting = asyncio.ensure_future(fleet._next_outcomes(outcomes))
            await asyncio.sleep(0)
            seconds_of_alarms = [s for s in range(60) for each in activities.tick(1.0) if each.stands_still]
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return seconds_of_alarms

    first, *_ = asyncio.run(run())
    assert first + 1 == 40


def test_an_evaluation_whose_turns_end_does_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "POLL_S", 0.001)

    async def run() -> tuple[float, float]:
        fleet = WorkerFleet(make_settings(""), workers=1)
        activities = Activities()
        with watched(activities):
            waiting = asyncio.ensure_future(fleet._next_outcomes(asyncio.Queue()))
            await asyncio.sleep(0)
            (activity,) = activities._running
            before = activity.since_s
            activities.tick(3.0)
            fleet._turns_ended += 1
            while activity.since_s == before:  # noqa: ASYNC110 - the wait that is tested changes it
                await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return before, activity.since_s

    assert asyncio.run(run()) == (0.0, 3.0)
