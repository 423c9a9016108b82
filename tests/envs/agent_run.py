"""One episode of an environment that brings its own loop, as a worker plays it, with a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from roll_flash.chat.openai_client import OpenAIChatClient
from roll_flash.config.sections.policies import PolicyConfig
from roll_flash.envs.hosting.environments import AsyncEnvironment
from roll_flash.envs.registration import make_env
from roll_flash.gateway.endpoint_backend import EndpointBackend
from roll_flash.gateway.policies import PolicySessions, fixed_policies
from roll_flash.processes.background import DaemonThreads
from roll_flash.rollout.episodes.agent_episode import AgentEpisodes
from roll_flash.rollout.episodes.episode import Deadlines, Progress
from roll_flash.types import EpisodeSpec, SamplingParams, Task, Trajectory

Says = Callable[[list[dict[str, Any]]], str | dict[str, Any]]
"""From the messages of a request to the text of the answer, or the assistant's message."""


async def agent_episode(env_id: str, seed: int, says: Says, *, max_turns: int = 9, **kwargs: Any) -> Trajectory:
    async def complete(request: web.Request) -> web.Response:
        said = says((await request.json())["messages"])
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = OpenAIChatClient(url, "policy")
    env = AsyncEnvironment(make_env(env_id, **kwargs), DaemonThreads())
    policies = {name: PolicyConfig(base_url=url, model=name) for name in env.policies}
    episodes = AgentEpisodes(EndpointBackend(client), PolicySessions(fixed_policies(policies)))
    spec = EpisodeSpec("e", "g", 0, Task("t", env_id, seed), SamplingParams(), max_turns)
    try:
        async with asyncio.timeout(120):
            assert env.runs_own_loop
            await env.reset(seed)
            return await episodes.play(spec, env, Deadlines(60, 60, 120), Progress())
    finally:
        await env.close()
        await episodes.close()
        await client.close()
        await runner.cleanup()
