"""An agent of the OpenAI client on real servers: what the gateway recorded is what the learner's model says."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from roll_flash.config.sections.policies import PolicyConfig
from roll_flash.gateway.policies import PolicySessions, check_policies, fixed_policies
from roll_flash.gateway.server import GatewayServer
from roll_flash.gateway.sessions.session import Session, SessionSettings
from roll_flash.gateway.token_backend import TokenBackend
from roll_flash.inference.client.token_client import open_client
from roll_flash.inference.vllm.server import MODEL_NAME
from roll_flash.scheduling.tasks import make_task
from roll_flash.types import EpisodeSpec, SamplingParams
from tests.inference.conftest import MAX_MODEL_LEN, Served

TURNS = 4


def test_several_turns_of_an_agent_do_not_drift_from_the_learner(served: Served) -> None:
    async def work() -> Session:
        client = open_client(served.engine.client_spec(), served.tokenizer)
        backend = TokenBackend(client, served.tokenizer, model="tiny", max_length=MAX_MODEL_LEN)
        gateway = GatewayServer(backend, call_timeout_s=60.0)
        port = await gateway.start()
        session = gateway.open_session(SessionSettings(SamplingParams(max_new_tokens=20)))
        try:
            async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=session.api_key) as agent:
                await _converse(agent)
        finally:
            await gateway.close()
            await client.close()
        return session

    session = served.run(work())
    assert session.trouble is None
    (sample,) = session.history.samples()
    assert len(sample.turns) == TURNS
    assert sample.policy_mask.sum() > TURNS
    rescored = np.concatenate([[0.0], served.logprobs(sample.token_ids.tolist())])
    assert np.abs(rescored - sample.logprobs)[sample.policy_mask].max() < 1e-3


@pytest.mark.parametrize("served", [pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True)
def test_a_real_endpoint_plays_as_a_fixed_policy(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM answers both: the policy in training with tokens, the fixed one with messages."""
    spec = served.engine.client_spec()
    monkeypatch.setenv("RIVALS_KEY", spec.key)
    config = PolicyConfig(
        base_url=f"{spec.endpoints[0]}/v1", model=MODEL_NAME, api_key_env="RIVALS_KEY", max_new_tokens=5
    )

    fixed = fixed_policies({"rival": config})

    async def work() -> tuple[Session, Session, str]:
        client, policies = open_client(spec, served.tokenizer), PolicySessions(fixed)
        await check_policies(fixed, print)
        gateway = GatewayServer(
            TokenBackend(client, served.tokenizer, model="tiny", max_length=MAX_MODEL_LEN), call_timeout_s=60.0
        )
        port = await gateway.start()
        session = gateway.open_session(SessionSettings(SamplingParams(max_new_tokens=20)))
        episode = EpisodeSpec("e", "g", 0, make_task("Any-v0", 0, {}), SamplingParams(seed=3), 8)
        rivals = policies.open(gateway, episode, ["rival"])
        try:
            async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=session.api_key) as agent:
                await _converse(agent)
                rival = agent.with_options(api_key=rivals["rival"].api_key)
                hello: Any = [{"role": "user", "content": "Your move."}]
                said = await rival.chat.completions.create(model="rival", messages=hello)
        finally:
            await gateway.close()
            await client.close()
            await policies.close()
        return session, rivals["rival"], said.choices[0].message.content or ""

    session, rival, said = served.run(work())
    assert (session.trouble, rival.trouble) == (None, None)
    assert said
    assert [record.completion_tokens for record in rival.history.records] == [5]
    assert len(session.history.samples()[0].turns) == TURNS


async def _converse(agent: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Speak."}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Go on, {turn}."})
        if turn % 2:
            text = ""
            async for chunk in await agent.chat.completions.create(model="tiny", messages=messages, stream=True):
                text += chunk.choices[0].delta.content or ""
        else:
            completion = await agent.chat.completions.create(model="tiny", messages=messages)
            text = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
