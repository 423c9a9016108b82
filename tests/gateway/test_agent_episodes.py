"""Episodes of agents that bring their own loop, played by a worker as any other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

import httpx
import numpy as np
import openai
import pytest
from aiohttp import web
from conftest import until

from roll_flash.engines.inference import ClientSpec
from roll_flash.envs import Env, register_env
from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.sequences import check_staleness
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import episode_record
from roll_flash.rollout.episodes.episode import Deadlines
from roll_flash.rollout.worker import ChatEndpoint, Outcome, Worker, WorkerSettings
from roll_flash.scheduling.tasks import make_task
from roll_flash.stream import finished_episode, finished_group
from roll_flash.types import EpisodeFailure, EpisodeSpec, Group, SamplingParams, Trajectory
from tests.inference.stand_in_server import StandInServer, well
from tests.learner.samples import prepare_group, sequences_of

MAX_LENGTH = 512
Agent = Callable[[AgentGateway, int], Awaitable[None]]


class Agents(Env):
    """Plays one of `AGENTS`; worth what its seed says."""

    runs_own_loop = True
    closed: ClassVar[list[int]] = []

    def __init__(self, agent: str, reward: float | None = None) -> None:
        self._agent = AGENTS[agent]
        self._reward = reward

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is not None
        self._seed = seed
        return "", {"seed": seed}

    async def play(self, gateway: AgentGateway) -> None:
        await self._agent(gateway, self._seed)
        self._answers = [answer["content"] for answer in gateway.answers()]

    async def score(self) -> tuple[float, Mapping[str, Any]]:
        return self._seed + 0.5 if self._reward is None else self._reward, {"success": True, "answers": self._answers}

    async def close(self) -> None:
        self.closed.append(self._seed)


async def ask(client: openai.AsyncOpenAI, gateway: AgentGateway, messages: list[Any]) -> str:
    completion = await client.chat.completions.create(model=gateway.model, messages=messages)
    return completion.choices[0].message.content or ""


def client_of(gateway: AgentGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.api_key, max_retries=0)


async def two_turns(gateway: AgentGateway, seed: int) -> None:
    async with client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": f"task {seed}"}]
        messages.append({"role": "assistant", "content": await ask(client, gateway, messages)})
        messages.append({"role": "user", "content": "and then?"})
        await ask(client, gateway, messages)


async def forgets(gateway: AgentGateway, seed: int) -> None:
    await two_turns(gateway, seed)
    async with client_of(gateway) as client:
        await ask(client, gateway, [{"role": "user", "content": f"what I remember of {seed}"}])


async def never_asks(gateway: AgentGateway, seed: int) -> None:
    return


async def crashes(gateway: AgentGateway, seed: int) -> None:
    await two_turns(gateway, seed)
    raise RuntimeError("the agent fell over")


async def goes_on_for_ever(gateway: AgentGateway, seed: int) -> None:
    async with client_of(gateway) as client:
        for turn in range(100):
            await ask(client, gateway, [{"role": "user", "content": f"turn {turn}"}])


async def gives_up_at_the_limit(gateway: AgentGateway, seed: int) -> None:
    try:
        await goes_on_for_ever(gateway, seed)
    except openai.PermissionDeniedError:
        return


async def ignores_errors(gateway: AgentGateway, seed: int) -> None:
    async with httpx.AsyncClient(headers={"x-api-key": gateway.api_key}) as http:
        body = {"model": gateway.model, "messages": [{"role": "user", "content": "Hi"}]}
        await http.post(f"{gateway.base_url}/chat/completions", json=body)


async def asks_another_model(gateway: AgentGateway, seed: int) -> None:
    async with httpx.AsyncClient(headers={"x-api-key": gateway.api_key}) as http:
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}]}
        await http.post(f"{gateway.base_url}/chat/completions", json=body)


async def asks_at_another_path(gateway: AgentGateway, seed: int) -> None:
    async with httpx.AsyncClient(headers={"x-api-key": gateway.api_key}) as http:
        await http.post(f"{gateway.base_url.removesuffix('/v1')}/chat/completions", json={})


async def hangs(gateway: AgentGateway, seed: int) -> None:
    await two_turns(gateway, seed)
    await asyncio.sleep(3600)


async def asks_for_too_much(gateway: AgentGateway, seed: int) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(client, gateway, [{"role": "user", "content": "x" * 2 * MAX_LENGTH}])


AGENTS: dict[str, Agent] = {
    agent.__name__: agent
    for agent in (
        two_turns,
        forgets,
        never_asks,
        crashes,
        goes_on_for_ever,
        gives_up_at_the_limit,
        ignores_errors,
        asks_another_model,
        asks_at_another_path,
        hangs,
        asks_for_too_much,
    )
}
register_env("Agents-v0", Agents)


def spec(agent: str, seed: int = 3, max_turns: int = 8, **kwargs: Any) -> EpisodeSpec:
    task = make_task("Agents-v0", seed, {"agent": agent, **kwargs})
    return EpisodeSpec(f"{agent}-{seed}", "g", 0, task, SamplingParams(max_new_tokens=6), max_turns)


def play(*specs: EpisodeSpec, handler: Any = well, deadlines: Deadlines | None = None) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with StandInServer(handler, version=2) as server:
            model = ClientSpec("vllm", (server.endpoint,), "tiny", MAX_LENGTH)
            return await _play(model, specs, deadlines)

    return asyncio.run(run())


async def _play(model: Any, specs: tuple[EpisodeSpec, ...], deadlines: Deadlines | None = None) -> list[Outcome]:
    folder = resolve_model("tiny")
    settings = WorkerSettings(model, folder, MAX_LENGTH, deadlines or Deadlines(20.0, 20.0, 40.0), None, "agents")
    worker = Worker(settings)
    ended: list[Outcome] = []
    try:
        await worker.start()
        worker.submit(list(specs))
        async with asyncio.timeout(40):
            while len(ended) < len(specs):
                ended += await worker.poll(1.0)
    finally:
        await worker.close()
    return ended


def played(*specs: EpisodeSpec, **options: Any) -> list[Trajectory]:
    outcomes = play(*specs, **options)
    trajectories = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    assert len(trajectories) == len(outcomes), outcomes
    return trajectories


def test_an_agents_calls_are_the_turns_of_its_trajectory() -> None:
    (trajectory,) = played(spec("two_turns"))
    assert trajectory.reward == 3.5 == sum(turn.reward for turn in trajectory.turns)
    assert trajectory.success is True
    assert trajectory.end == "terminated"
    assert len(trajectory.turns) == 2
    assert trajectory.turns[0].observation == "and then?"
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 2
    assert trajectory.policy_tokens == 12
    assert finished_episode(trajectory).oldest_version == 2
    assert trajectory.info["seed"] == 3
    said = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    assert trajectory.info["answers"] == said, "an environment can score what was said, whatever its agent wrote"
    assert trajectory.branches == ()
    assert 3 in Agents.closed


def test_a_rewritten_history_is_a_branch_that_the_record_and_the_stream_keep() -> None:
    (trajectory,) = played(spec("forgets"))
    assert len(trajectory.branches) == 1
    assert trajectory.policy_tokens == 18
    assert trajectory.info["gateway"]["rewrites"] == 1
    record = json.loads(json.dumps(episode_record(trajectory), default=lambda array: np.asarray(array).tolist()))
    assert record["branches"][0]["messages"][0]["content"] == "what I remember of 3"
    assert len(record["branches"][0]["token_ids"]) == len(trajectory.branches[0].token_ids)
    about = finished_episode(trajectory)
    assert about.samples == 2
    assert about.tokens == sum(len(sample.token_ids) for sample in trajectory.samples)
    assert about.packed_tokens <= about.tokens
    oldest = min(int(each.versions[each.policy_mask].min()) for each in trajectory.samples)
    assert (about.policy_tokens, about.oldest_version) == (18, oldest)


@pytest.mark.parametrize("normalization", ["tokens", "sequences"])
def test_branches_are_trained_with_the_advantage_of_their_episode(normalization: Any) -> None:
    trajectories = played(spec("forgets", 1), spec("two_turns", 0))
    group = Group("g", trajectories[0].task, tuple(sorted(trajectories, key=lambda t: t.reward)))
    prepared = prepare_group(group, 2, AdvantageConfig(normalization=normalization))
    assert len(sequences_of(prepared)) == 3
    assert prepared.policy_tokens == 12 + 18
    assert prepared.num_valid == 2
    assert prepared.staleness == [(0, 30)]
    values = [float(s.advantages[s.policy_mask][0]) for s in sequences_of(prepared)]
    assert values == pytest.approx([-1.0, 1.0, 1.0], abs=1e-3)
    weights = [s.token_weight for s in sequences_of(prepared)]
    assert weights == ([1.0] * 3 if normalization == "tokens" else pytest.approx([1 / 12, 1 / 18, 1 / 18]))


def test_the_staleness_bound_covers_branches() -> None:
    (trajectory,) = played(spec("forgets"))
    trajectory.branches[0].versions[trajectory.branches[0].policy_mask] = 0
    assert finished_episode(trajectory).oldest_version == 0
    group = Group("g", trajectory.task, (trajectory,))
    with pytest.raises(Exception, match="older than version 2"):
        check_staleness([finished_group(group)], 2, 1.0)


@pytest.mark.parametrize(
    ("agent", "cause", "says"),
    [
        ("never_asks", "env_error", "asked 0 times"),
        ("asks_another_model", "env_error", "a request was refused: the model 'gpt-4o' does not exist here; ask for"),
        ("asks_at_another_path", "env_error", "POST /chat/completions: Not Found; it is /v1/chat/completions"),
        ("crashes", "env_error", "the agent fell over"),
        ("goes_on_for_ever", "env_error", "PermissionDenied"),
        ("asks_for_too_much", "prompt_too_long", "model.max_length"),
    ],
)
def test_an_agent_that_fails_is_a_failure_with_a_cause(agent: str, cause: str, says: str) -> None:
    (outcome,) = play(spec(agent))
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == cause
    assert says in outcome.message


def test_a_reward_that_is_no_number_is_a_failure() -> None:
    (outcome,) = play(spec("two_turns", reward=float("nan")))
    assert isinstance(outcome, EpisodeFailure)
    assert (outcome.cause, outcome.turn) == ("bad_reward", 2)
    assert outcome.completion_tokens == 12


def test_the_runs_limit_of_turns_ends_the_agents_calls() -> None:
    (trajectory,) = played(spec("gives_up_at_the_limit", max_turns=3))
    assert trajectory.end == "max_turns"
    assert sum(len(sample.turns) for sample in trajectory.samples) == 3


def test_an_episode_whose_server_failed_is_masked_though_its_agent_went_on() -> None:
    async def broken(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 x\r\nContent-Length: 3\r\n\r\nbad")

    (outcome,) = play(spec("ignores_errors"), handler=broken)
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == "generate_error"
    assert "HTTP 400" in outcome.message


def test_an_agent_that_hangs_is_ended_with_its_episode() -> None:
    (outcome,) = play(spec("hangs"), deadlines=Deadlines(20.0, 20.0, 2.0))
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause in ("episode_timeout", "env_timeout")


def test_cancelling_an_episode_ends_its_session_and_its_request() -> None:
    async def silent(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async def run() -> None:
        async with StandInServer(silent) as server:
            model = ClientSpec("vllm", (server.endpoint,), "tiny", MAX_LENGTH)
            settings = WorkerSettings(
                model, resolve_model("tiny"), MAX_LENGTH, Deadlines(60.0, 60.0, 60.0), None, "agents"
            )
            worker = Worker(settings)
            try:
                await worker.start()
                worker.submit([spec("two_turns")])
                await until(lambda: server.requests)
                assert worker.client_metrics()["gateway_open_sessions"] == 1
                worker.cancel(["two_turns-3"])
                await until(lambda: not worker.status())
                assert worker.client_metrics()["gateway_open_sessions"] == 0
                await until(lambda: worker.client_metrics()["outstanding_tokens_0"] == 0)
            finally:
                await worker.close()

    asyncio.run(run())


def test_behind_an_endpoint_an_agents_messages_are_recorded() -> None:
    asked: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        asked.append(await request.json())
        message = {"role": "assistant", "content": f"answer {len(asked)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})

    async def run() -> list[Outcome]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            return await _play(ChatEndpoint(url, "their-model"), (spec("two_turns"),))
        finally:
            await runner.cleanup()

    (trajectory,) = asyncio.run(run())
    assert isinstance(trajectory, Trajectory)
    assert [message["content"] for message in trajectory.messages][1::2] == ["answer 1", "answer 2"]
    assert asked[1]["model"] == "their-model"
    assert asked[1]["max_tokens"] == 6
    assert (trajectory.reward, len(trajectory.turns), len(trajectory.token_ids)) == (3.5, 2, 0)
    assert trajectory.turns[0].prompt_tokens == 9
