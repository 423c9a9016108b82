"""Environments that ask fixed policies beside the one in training, through the same gateway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from test_agent_episodes import ask, client_of

from roll_flash.config.sections.policies import PolicyConfig
from roll_flash.config.tree import RolloutConfig, load_config
from roll_flash.engines.inference import ClientSpec
from roll_flash.envs import Env, register_env
from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.envs.hosting.environments import check_environments
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.gateway import endpoint_backend
from roll_flash.gateway.policies import FixedPolicy, PolicySessions, check_policies, fixed_policies
from roll_flash.models.prepare import resolve_model
from roll_flash.rollout.episodes.episode import Deadlines
from roll_flash.rollout.worker import Outcome, Worker, WorkerSettings
from roll_flash.scheduling.tasks import make_task
from roll_flash.system.start_checks import check_parts
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams, Trajectory
from tests.inference.stand_in_server import StandInServer, well

NAMES = ("rival", "user")


class Council(Env):
    """The policy in training speaks once, then each fixed policy `calls` times; all that was said is in the info."""

    runs_own_loop = True
    policies = NAMES

    def __init__(
        self,
        calls: int = 2,
        ask_as: str = "",
        loop: bool = True,
        fields: Mapping[str, Any] | None = None,
        at_once: int = 1,
    ) -> None:
        """`fields` are added to each request to a fixed policy, of which there are `at_once` at a time."""
        self._calls, self._ask_as, self.runs_own_loop = calls, ask_as, loop
        self._fields, self._at_once = dict(fields or {}), at_once

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "", {}

    async def play(self, gateway: AgentGateway) -> None:
        self._said: list[tuple[str, str]] = []
        self._models: list[str] = []
        async with client_of(gateway) as client:
            await ask(client, gateway, [{"role": "user", "content": "You begin."}])
            for name in NAMES:
                other = client.with_options(api_key=gateway.policy_keys[name])
                self._models += [model.id async for model in other.models.list()]
                for _ in range(self._calls):
                    messages: list[Any] = [{"role": "user", "content": f"Your turn, {name}."}]
                    asking = (
                        other.chat.completions.create(
                            model=self._ask_as or name,
                            messages=messages,
                            temperature=0.1,
                            max_tokens=5000,
                            extra_body=self._fields,
                        )
                        for _ in range(self._at_once)
                    )
                    for answer in await asyncio.gather(*asking):
                        self._said += [(name, choice.message.content or "") for choice in answer.choices]

    async def score(self) -> tuple[float, Mapping[str, Any]]:
        return 1.0, {"said": self._said, "models": self._models}


register_env("Council-v0", Council)


class Endpoint:
    """A stand-in for an endpoint: it answers with the name of the model that was asked for, or with `status`."""

    def __init__(self, status: int = 200, takes_s: float = 0.0) -> None:
        self.status = status
        self._takes_s, self._free = takes_s, asyncio.Semaphore(8)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []

    async def __aenter__(self) -> Endpoint:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if self.status != 200:
            said = f"no such model for {request.headers.get('Authorization')}"
            return web.json_response({"error": {"message": said}}, status=self.status)
        body = await request.json()
        for _ in range(body.get("n", 1)):
            async with self._free:
                await asyncio.sleep(self._takes_s)
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        message = {"role": "assistant", "content": f"I am {body['model']}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})


def fixed(url: str, **fields: Any) -> dict[str, FixedPolicy]:
    return fixed_policies({name: PolicyConfig(base_url=url, model=f"the-{name}", **fields) for name in NAMES})


async def play(
    policies: Mapping[str, FixedPolicy], kwargs: Any, episodes: int = 1, generate_s: float = 20.0
) -> list[Outcome]:
    async with StandInServer(well, version=2) as server:
        model, deadlines = ClientSpec("vllm", (server.endpoint,), "tiny", 512), Deadlines(generate_s, 20.0, 40.0)
        settings = WorkerSettings(model, resolve_model("tiny"), 512, deadlines, None, "agents", policies=policies)
        worker = Worker(settings)
        ended: list[Outcome] = []
        try:
            await worker.start()
            task = make_task("Council-v0", 0, kwargs)
            sampling = SamplingParams(max_new_tokens=6, seed=1)
            worker.submit([EpisodeSpec(f"c{number}", "g", 0, task, sampling, 8) for number in range(episodes)])
            async with asyncio.timeout(40):
                while len(ended) < episodes:
                    ended += await worker.poll(1.0)
        finally:
            await worker.close()
        return ended


def test_each_fixed_policy_answers_and_only_the_one_in_training_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIVALS_KEY", "secret")

    async def run() -> None:
        async with Endpoint() as endpoint:
            policies = fixed(endpoint.url, api_key_env="RIVALS_KEY", temperature=0.5, max_new_tokens=99)
            (outcome,) = await play(policies, {})
            assert isinstance(outcome, Trajectory), outcome
            assert outcome.info["said"] == [[name, f"I am the-{name}"] for name in NAMES for _ in range(2)]
            assert outcome.info["models"] == list(NAMES)
            assert (outcome.policy_tokens, len(outcome.turns), outcome.branches) == (6, 1, ())
            assert set(endpoint.keys) == {"Bearer secret"}, "the gateway knows the key, the agent does not"
            assert "secret" not in repr(policies)
            assert {(body["temperature"], body["max_tokens"]) for body in endpoint.asked} == {(0.5, 99)}
            assert len({body["seed"] for body in endpoint.asked}) == 4, "no two calls draw the same random numbers"

    asyncio.run(run())


def test_the_calls_of_an_episode_are_limited_and_its_other_models_do_not_exist() -> None:
    async def run() -> None:
        async with Endpoint() as endpoint:
            (outcome,) = await play(fixed(endpoint.url, max_calls=3), {"calls": 4})
            assert isinstance(outcome, EpisodeFailure)
            assert (outcome.cause, "3 calls of the model are used up" in outcome.message) == ("env_error", True)
            (outcome,) = await play(fixed(endpoint.url), {"ask_as": "policy"})
            assert isinstance(outcome, EpisodeFailure)
            assert "'policy' does not exist here; ask for 'rival'" in outcome.message

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"5": 100}}, {"presence_penalty": 2}, {"response_format": {"type": "json_object"}}],
)
def test_an_agent_cannot_change_how_a_fixed_policy_samples(fields: dict[str, Any]) -> None:
    async def run() -> None:
        async with Endpoint() as endpoint:
            (outcome,) = await play(fixed(endpoint.url), {"fields": fields})
            assert isinstance(outcome, EpisodeFailure)
            assert (outcome.cause, f"{next(iter(fields))}: " in outcome.message) == ("env_error", True)
            assert not endpoint.asked

    asyncio.run(run())


def test_fields_of_an_endpoints_own_do_not_reach_it() -> None:
    """Some routers take a list of other models, some servers a chat template or a minimum of tokens."""
    fields = {"models": ["theirs"], "min_p": 1, "min_tokens": 500, "chat_template": "{{ 1 }}", "web_search_options": {}}

    async def run() -> None:
        async with Endpoint() as endpoint:
            (outcome,) = await play(fixed(endpoint.url), {"fields": fields})
            assert isinstance(outcome, Trajectory), outcome
            assert {*endpoint.asked[0]} == {"model", "messages", "temperature", "seed", "max_tokens"}

    asyncio.run(run())


@pytest.mark.parametrize("many", [{"at_once": 64}, {"fields": {"n": 64}}])
def test_an_agent_that_asks_a_fixed_policy_very_often_at_once_is_scored(many: dict[str, Any]) -> None:
    """The endpoint makes 8 answers at a time. All 64 together would exceed the deadline of a call, and a certain 0
    would become no sample."""

    async def run() -> None:
        async with Endpoint(takes_s=0.4) as endpoint:
            (outcome,) = await play(fixed(endpoint.url), {"calls": 1, **many}, generate_s=2.0)
            assert isinstance(outcome, Trajectory), outcome
            assert len(outcome.info["said"]) == 128
            assert len({body["seed"] for body in endpoint.asked}) == 128

    asyncio.run(run())


def test_a_large_request_for_many_answers_is_written_once_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it for each answer, on the event loop, held up all other episodes: 64 times a body of 4 MB took 8 s."""
    threads: list[threading.Thread] = []
    encoded = endpoint_backend._encoded

    def watched(*given: Any) -> bytes:
        threads.append(threading.current_thread())
        return encoded(*given)

    monkeypatch.setattr(endpoint_backend, "_encoded", watched)
    described = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}

    async def run() -> None:
        async with Endpoint() as endpoint:
            (outcome,) = await play(fixed(endpoint.url), {"calls": 1, "fields": {"n": 64, "tools": [described]}})
            assert isinstance(outcome, Trajectory), outcome
            assert len({body["seed"] for body in endpoint.asked}) == 128
            assert all(len(body["tools"][0]["function"]["description"]) == 100_000 for body in endpoint.asked)

    asyncio.run(run())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_policy_that_the_start_could_not_know_is_named_and_no_session_stays_open() -> None:
    async def run() -> None:
        async with Endpoint() as endpoint:
            known = {"rival": fixed(endpoint.url)["rival"]}
            gateway, spec = Mock(), Mock()
            sessions = PolicySessions(known)
            with pytest.raises(ConfigError, match="asks the policy 'user', which the config does not name"):
                sessions.open(gateway, spec, NAMES)
            gateway.open_session.assert_not_called()
            await sessions.close()
            (outcome,) = await play(known, {})
            assert isinstance(outcome, EpisodeFailure)
            assert "asks the policy 'user'" in outcome.message

    asyncio.run(run())


def test_an_endpoint_that_fails_is_the_cause_of_the_episodes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIVALS_KEY", "a-secret")

    async def run() -> None:
        async with Endpoint(status=404) as endpoint:
            (outcome,) = await play(fixed(endpoint.url, api_key_env="RIVALS_KEY"), {})
        assert isinstance(outcome, EpisodeFailure)
        assert (outcome.cause, endpoint.url in outcome.message) == ("generate_error", True)
        assert "no such model for Bearer [the key]" in outcome.message, "some endpoints quote the key"

    asyncio.run(run())


def test_a_policy_that_does_not_answer_is_named_before_anything_starts() -> None:
    said: list[str] = []

    async def run() -> None:
        async with Endpoint() as endpoint:
            await check_policies(fixed(endpoint.url), said.append)
            assert [body["max_tokens"] for body in endpoint.asked] == [1, 1]
            assert [line.partition(" for ")[0] for line in said] == [
                f"asking the fixed policy {name}" for name in NAMES
            ]
            endpoint.status = 404
            with pytest.raises(InferenceError, match=r"policies\.rival: http://127.*no such model"):
                await check_policies(fixed(endpoint.url), said.append)
            with pytest.raises(ConfigError, match="NOT_SET is not set"):
                fixed(endpoint.url, api_key_env="NOT_SET")

    asyncio.run(run())


def test_what_cannot_work_is_refused() -> None:
    task = make_task("Council-v0", 0, {})
    with pytest.raises(ConfigError, match=r"the policy .user., which the config does not name: set policies\.user"):
        check_environments([task], RolloutConfig(), policies=("rival",))
    with pytest.raises(ConfigError, match="policies need runs_own_loop"):
        check_environments([make_task("Council-v0", 0, {"loop": False})], RolloutConfig(), policies=NAMES)
    check_environments([task], RolloutConfig(), policies=NAMES)
    described = {"model": {"path": "tiny"}, "envs": [{"id": "Council-v0"}], "inference": {"engine": "transformers"}}
    named = {name: {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "NOT_SET"} for name in NAMES}
    with pytest.raises(ConfigError, match="NOT_SET is not set"):
        check_parts(load_config({**described, "policies": named}))
    policy = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    with pytest.raises(ConfigError, match="'policy' is the name of the policy in training"):
        load_config({**described, "policies": {"policy": policy}})
    with pytest.raises(ConfigError, match="policies"):
        load_config({**described, "policies": {"not a name": policy}})
