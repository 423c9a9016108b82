"""A worker in this process, with a real tokenizer, real sandboxes, and a stand-in for the model server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from threading import Event, get_ident
from typing import Any

import gymnasium
import numpy as np
import pytest
from scheduler_world import whole_trajectory

from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.tree import SandboxConfig
from roll_flash.engines.inference import ClientSpec
from roll_flash.envs import Env, SandboxEnv, register_env
from roll_flash.envs.hosting import environment_threads
from roll_flash.envs.hosting.environment_threads import EnvironmentThreads
from roll_flash.errors import EnvError
from roll_flash.models.prepare import resolve_model
from roll_flash.rollout.episodes.episode import Deadlines, with_success
from roll_flash.rollout.worker import Outcome, Worker, WorkerSettings, picklable_outcome
from roll_flash.scheduling.tasks import make_task
from roll_flash.stream.blocks import hand_in
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, SamplingParams, Trajectory
from tests.inference.stand_in_server import StandInServer, answer, response, well

MAX_LENGTH = 256
LONG_S = 60.0
DEADLINES = Deadlines(20.0, 20.0, 40.0)
let_go = Event()
"""Set at the end of a test in which blocking environments hang."""


class Talking(Env):
    """Answers every turn with `observation`; ends after two."""

    def __init__(self, prompt: str = "say something", observation: str = "go on") -> None:
        self._prompt = prompt
        self._observation = observation
        self._turns = 0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._prompt, {}

    async def step(self, action: str) -> Any:
        self._turns += 1
        return self._observation, 1.0, self._turns == 2, False, {}


class Panic(BaseException):
    """What a library in Rust raises when it panics is no Exception either."""


class BreaksOff(Env):
    """Ends a step by `how`, which `except Exception` does not see."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "say something", {}

    async def step(self, action: str) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if self._how == "cancels its episode":
            task.cancel()
            await asyncio.sleep(0)
        errors = {"panics": Panic("index out of bounds"), "awaits what was cancelled": asyncio.CancelledError()}
        raise errors.get(self._how, KeyboardInterrupt())


class CatchesAll(Talking):
    """Catches its cancellation, as a bare `except` around a request does."""

    async def step(self, action: str) -> Any:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(LONG_S)
        return "go on", 1.0, False, False, {}


class UsesSandbox(SandboxEnv):
    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return (await self.sandbox.exec(["echo", "ready"])).stdout.decode(), {}


class Hanging(gymnasium.Env[str, str]):
    """A plain environment that hangs in `step` while `hangs`."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def __init__(self, hangs: bool = True) -> None:
        self._hangs = hangs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "begin", {}

    def step(self, action: str) -> Any:
        if self._hangs:
            let_go.wait(LONG_S)
        return "end", 1.0, True, False, {}


register_env("Talking-v0", Talking)
register_env("BreaksOff-v0", BreaksOff)
register_env("CatchesAll-v0", CatchesAll)
register_env("UsesSandbox-v0", UsesSandbox)
gymnasium.register("Hanging-v0", Hanging)


class SilentServer(asyncio.Protocol):
    """Takes requests and never answers. Counts the connections that are open."""

    open_connections = 0
    requests = 0

    async def __aenter__(self) -> SilentServer:
        self._server = await asyncio.get_running_loop().create_server(lambda: self, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.open_connections += 1

    def data_received(self, data: bytes) -> None:
        self.requests += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.open_connections -= 1


def says(token_ids: Sequence[int]) -> Any:
    """A handler that answers with these tokens."""

    async def handler(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        spans = [{"version": "0", "start": 0, "end": len(token_ids)}] if token_ids else []
        content = [{"token_id": token, "logprob": -1.0} for token in token_ids]
        changes = {"token_ids": list(token_ids), "logprobs": {"content": content}, "weight_versions": spans}
        writer.write(response(json.dumps(answer(server, request, **changes, finish_reason="stop")).encode()))

    return handler


def play(
    scenario: Callable[[Worker, Any], Awaitable[Any]],
    served: Any = None,
    *,
    deadlines: Deadlines = DEADLINES,
    threads: int = 2,
    sandbox: SandboxConfig | None = None,
    success_above: Mapping[str, float] | None = None,
) -> Any:
    """Run `scenario` with a worker and its server."""

    async def run() -> Any:
        async with served or StandInServer(well) as server:
            model = ClientSpec("vllm", (server.endpoint,), "tiny", MAX_LENGTH)
            settings = WorkerSettings(
                model,
                resolve_model("tiny"),
                MAX_LENGTH,
                deadlines,
                sandbox,
                "worker-test",
                success_above=success_above or {},
                threads=threads,
            )
            worker = Worker(settings)
            try:
                await worker.start()
                return await scenario(worker, server)
            finally:
                await worker.close()

    return asyncio.run(run())


def episodes(env_id: str, count: int = 1, **kwargs: Any) -> list[EpisodeSpec]:
    tasks = [make_task(env_id, seed, kwargs) for seed in range(count)]
    return [EpisodeSpec(f"{env_id}-{t.seed}", "g", 0, t, SamplingParams(max_new_tokens=4), 4) for t in tasks]


async def outcomes(worker: Worker, count: int) -> list[Outcome]:
    ended: list[Outcome] = []
    async with asyncio.timeout(30):
        while len(ended) < count:
            ended += await worker.poll(1.0)
    return ended


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("require_bubblewrap")
def test_a_cancelled_episode_cancels_its_request_and_frees_its_sandbox() -> None:
    async def scenario(worker: Worker, server: SilentServer) -> None:
        pool = worker._pool
        assert pool is not None
        [episode] = episodes("UsesSandbox-v0")
        worker.submit([episode])
        await eventually(lambda: server.requests)
        assert pool.stats().leased == 1
        assert server.open_connections == 1
        [status] = worker.status()
        assert (status.episode_id, status.turn, status.waits_for) == (episode.episode_id, 0, "the model")
        assert worker.states() == {"model": 1}
        worker.cancel([episode.episode_id])
        await eventually(lambda: not worker.status())
        await eventually(lambda: pool.stats().leased == 0)
        await eventually(lambda: server.open_connections == 0)
        assert await worker.poll(0.05) == []

    play(scenario, SilentServer(), sandbox=SandboxConfig(provider="local", pool_size=1))


def test_the_log_names_the_server_of_each_turn() -> None:
    async def scenario(worker: Worker, server: StandInServer) -> None:
        worker.submit(episodes("Talking-v0"))
        [outcome] = await outcomes(worker, 1)
        assert isinstance(outcome, Trajectory)
        assert {turn.server for turn in outcome.turns} == {server.endpoint}

    play(scenario)


def test_a_cancelled_episode_ends_also_where_its_environment_catches_the_cancellation() -> None:
    async def scenario(worker: Worker, server: StandInServer) -> None:
        [episode] = episodes("CatchesAll-v0")
        worker.submit([episode])
        await eventually(lambda: [s for s in worker.status() if s.waits_for == "the environment's step"])
        assert worker.states() == {"environment": 1}
        await asyncio.sleep(0)
        worker.cancel([episode.episode_id])
        await eventually(lambda: not worker.status())
        assert len(server.requests) == 1
        assert await worker.poll(0.05) == []

    play(scenario)


def test_an_episode_that_is_cancelled_before_it_began_is_forgotten() -> None:
    async def scenario(worker: Worker, _: StandInServer) -> None:
        [episode] = episodes("Talking-v0")
        worker.submit([episode])
        worker.cancel([episode.episode_id])
        await eventually(lambda: not worker.status())

    play(scenario)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("panics", "env_error"),
        ("awaits what was cancelled", "env_error"),
        ("is interrupted", "env_error"),
        ("cancels its episode", "internal_error"),
    ],
)
def test_an_episode_that_breaks_off_in_whatever_way_is_a_failure_for_which_nobody_waits(how: str, cause: str) -> None:
    """It had no outcome: its group and its slot waited for it until the run was called stalled."""

    async def scenario(worker: Worker, _: StandInServer) -> list[Outcome]:
        worker.submit([*episodes("BreaksOff-v0", how=how), *episodes("Talking-v0")])
        return await outcomes(worker, 2)

    ended = {outcome.episode_id: outcome for outcome in play(scenario)}
    assert isinstance(ended["Talking-v0-0"], Trajectory)
    broken = ended["BreaksOff-v0-0"]
    assert isinstance(broken, EpisodeFailure)
    assert broken.cause == cause


def test_blocking_environments_that_hang_do_not_starve_the_others() -> None:
    """Four hang in a worker of two threads; a fifth plays."""
    let_go.clear()

    async def scenario(worker: Worker, _: StandInServer) -> None:
        worker.submit(episodes("Hanging-v0", 4))
        stuck = await outcomes(worker, 4)
        assert {outcome.cause for outcome in stuck if isinstance(outcome, EpisodeFailure)} == {"env_timeout"}
        worker.submit(episodes("Hanging-v0", hangs=False))
        [good] = await outcomes(worker, 1)
        assert isinstance(good, Trajectory)

    try:
        play(scenario, deadlines=Deadlines(20.0, 2.0, 20.0))
    finally:
        let_go.set()


def test_a_thread_that_was_given_up_is_replaced_until_too_many_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_threads, "MAX_ABANDONED_CALLS", 2)
    threads, release = EnvironmentThreads(1), Event()
    stuck = [threads.submit(release.wait, LONG_S)]
    while not stuck[0].running():
        time.sleep(0.001)
    assert not stuck[0].cancel()
    assert threads.submit(lambda: "played").result(timeout=10) == "played"
    stuck.append(threads.submit(release.wait, LONG_S))
    while not stuck[1].running():
        time.sleep(0.001)
    stuck[1].cancel()
    with pytest.raises(EnvError, match="2 blocking calls"):
        threads.submit(print)
    release.set()
    wait(stuck, timeout=10)
    deadline = time.monotonic() + 10
    while threads.lost and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads.submit(lambda: "again").result(timeout=10) == "again"
    threads.shutdown()


def test_a_call_that_waits_for_a_thread_and_is_cancelled_never_begins() -> None:
    threads, release, began = EnvironmentThreads(1), Event(), Event()
    first = threads.submit(release.wait, LONG_S)
    second = threads.submit(began.set)
    assert second.cancel()
    release.set()
    first.result(timeout=10)
    assert threads.submit(lambda: 1).result(timeout=10) == 1
    assert not began.is_set()
    threads.shutdown()


def test_calls_one_after_the_other_never_need_more_threads_than_run_at_once() -> None:
    threads, names = EnvironmentThreads(64), set[int]()

    async def play() -> None:
        for _ in range(1000):
            names.add(await asyncio.get_running_loop().run_in_executor(threads, get_ident))

    async def scenario() -> None:
        await asyncio.gather(*(play() for _ in range(3)))

    asyncio.run(scenario())
    threads.shutdown()
    assert len(names) <= 3


def test_an_observation_of_1_mb_ends_the_episode_and_keeps_what_was_played() -> None:
    async def scenario(worker: Worker, _: StandInServer) -> Outcome:
        worker.submit(episodes("Talking-v0", observation="x" * 1_000_000))
        return (await outcomes(worker, 1))[0]

    outcome = play(scenario)
    assert isinstance(outcome, Trajectory)
    assert (outcome.end, len(outcome.turns), outcome.reward) == ("context_limit", 1, 1.0)
    assert outcome.turns[0].end == len(outcome.token_ids)  # what no turn of the model follows is not trained on


def test_a_prompt_over_the_context_length_is_a_failure_that_says_both_lengths() -> None:
    async def scenario(worker: Worker, server: StandInServer) -> Outcome:
        worker.submit(episodes("Talking-v0", prompt="x" * 1_000))
        [outcome] = await outcomes(worker, 1)
        assert not server.requests
        return outcome

    outcome = play(scenario)
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == "prompt_too_long"
    assert str(MAX_LENGTH) in outcome.message
    assert "model.max_length" in outcome.message


def test_a_completion_that_is_only_the_end_of_turn_is_an_empty_action() -> None:
    async def scenario(worker: Worker, _: StandInServer) -> Outcome:
        worker.submit(episodes("Talking-v0"))
        return (await outcomes(worker, 1))[0]

    end_of_turn = load_tokenizer(resolve_model("tiny")).eos_token_id
    outcome = play(scenario, StandInServer(says([end_of_turn])))
    assert isinstance(outcome, Trajectory)
    assert [turn.action for turn in outcome.turns] == ["", ""]
    assert outcome.policy_tokens == 2


def test_a_completion_without_tokens_is_a_failure_that_names_the_server() -> None:
    async def scenario(worker: Worker, server: StandInServer) -> tuple[Outcome, str]:
        worker.submit(episodes("Talking-v0"))
        return (await outcomes(worker, 1))[0], server.endpoint

    outcome, endpoint = play(scenario, StandInServer(says([])))
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == "generate_error"
    assert endpoint in outcome.message


def test_info_in_which_a_model_nested_too_deeply_costs_neither_the_sample_nor_the_run() -> None:
    """An environment that repeats a model's JSON there sends what the driver can write down, at any depth."""
    episode = EpisodeSpec("e", "g", 0, make_task("tests.misbehaving:Info-v0", 0, {}), SamplingParams(), max_turns=2)
    for depth in (10, 60, 70, 300, 480, 900, 20_000):
        said: Any = 1
        for _ in range(depth):
            said = [said]
        nested = dataclasses.replace(whole_trajectory(episode, [1], 0.5), info={"right": 7, "said": said})
        outcome = picklable_outcome(nested, episode)
        assert isinstance(outcome, Trajectory)
        assert outcome.reward == 0.5
        assert list(outcome.info) == ["right", "said" if depth < 64 else "info_left_out"]
        assert outcome.info["right"] == 7  # a judge asks for it
        json.dumps(outcome.info)


def test_numbers_without_end_in_info_cost_neither_the_sample_nor_the_run() -> None:
    """Beside the values of reward functions, an environment may report what a model wrote."""
    episode = EpisodeSpec("e", "g", 0, make_task("tests.misbehaving:Info-v0", 0, {}), SamplingParams(), max_turns=2)
    said = {"right": 1, "length": 10**400, "other": float("nan"), "least": -(10**3000)}
    whole = dataclasses.replace(whole_trajectory(episode, [1], 0.5), info={"rewards": said, 10**5000: "a name"})
    outcome = picklable_outcome(whole, episode)
    assert isinstance(outcome, Trajectory), outcome
    (ended,), _, _, lines = hand_in([outcome])
    assert isinstance(ended, FinishedEpisode)
    assert ended.rewards == (("right", 1.0),)
    assert json.loads(lines[0])["info"]["rewards"]["right"] == 1


class Untold:
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"a": np.array(1.5)}, {"a": 1.5}),
        ({"a": np.array(3)}, {"a": 3}),
        ({"a": Untold(), "b": 1}, {"b": 1, "info_left_out": {"a": "no text"}}),
        ({Untold(): 1, "b": 1}, {"b": 1, "info_left_out": {"a Untold": "no text"}}),
    ],
)
def test_info_without_a_text_costs_no_sample(said: dict[Any, Any], kept: dict[str, Any]) -> None:
    episode = EpisodeSpec("e", "g", 0, make_task("tests.misbehaving:Info-v0", 0, {}), SamplingParams(), max_turns=2)
    outcome = picklable_outcome(dataclasses.replace(whole_trajectory(episode, [1], 0.5), info=said), episode)
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.info == kept


@pytest.mark.parametrize(
    ("said", "reward", "above", "success"),
    [(None, 0.6, 0.5, True), (None, 0.5, 0.5, False), (False, 0.6, 0.5, False), (None, 0.6, None, None)],
)
def test_a_success_is_derived_from_the_reward_only_where_the_environment_does_not_say(
    said: bool | None, reward: float, above: float | None, success: bool | None
) -> None:
    episode = EpisodeSpec("e", "g", 0, make_task("tests.misbehaving:Info-v0", 0, {}), SamplingParams(), max_turns=2)
    ended = dataclasses.replace(whole_trajectory(episode, [1], reward), success=said)
    assert with_success(ended, above).success is success  # type: ignore[union-attr]
    failure = EpisodeFailure("e", "g", episode.task, "env_error", "", 0, 0)
    assert with_success(failure, above) is failure


def test_a_worker_derives_success_for_the_environments_of_its_settings() -> None:
    async def scenario(worker: Worker, _: StandInServer) -> Outcome:
        worker.submit(episodes("Talking-v0"))
        return (await outcomes(worker, 1))[0]

    for above, success in (({"Talking-v0": 1.5}, True), ({"Other-v0": 1.5}, None)):
        outcome = play(scenario, success_above=above)
        assert isinstance(outcome, Trajectory)
        assert (outcome.reward, outcome.success) == (2.0, success)
