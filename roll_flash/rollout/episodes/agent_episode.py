"""Runs episodes of agents that bring their own loop: one gateway per worker, one gateway session per episode.

The gateway starts at the first such episode, listens on loopback only, and stops with the worker. An episode is
scored only if every model call was answered: a failed call that the agent did not cause masks the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.envs.hosting.environments import AsyncEnvironment
from roll_flash.gateway.backend import Backend
from roll_flash.gateway.policies import PolicySessions
from roll_flash.gateway.server import GatewayServer
from roll_flash.gateway.sessions.finished_episode import finished_episode, join_roles
from roll_flash.gateway.sessions.session import Session, SessionSettings, why_no_answer
from roll_flash.rollout.episodes.episode import Deadlines, EpisodeFailed, Progress, environment_errors
from roll_flash.types import EpisodeSpec, Trajectory


class AgentEpisodes:
    """The gateway of one worker. The caller closes the backend."""

    def __init__(self, backend: Backend, policies: PolicySessions, *, pins_groups: bool = False) -> None:
        """`pins_groups`: send all requests of a group to one server."""
        self._backend = backend
        self._policies = policies
        self._pins_groups = pins_groups
        self._gateway: GatewayServer | None = None
        self._starting = asyncio.Lock()

    async def play(
        self, spec: EpisodeSpec, env: AsyncEnvironment, deadlines: Deadlines, progress: Progress
    ) -> Trajectory:
        """Play one episode. Raises EpisodeFailed. Cancelling ends the session and its requests."""
        gateway = await self._started(deadlines)
        settings = SessionSettings(spec.sampling, spec.max_turns, spec.group_id if self._pins_groups else None)
        recorded = {
            role: gateway.open_session(
                replace(settings, sampling=spec.sampling.with_own_seed(place)),
                f"{spec.episode_id}-{role}" if place else spec.episode_id,
            )
            for place, role in enumerate(env.roles)
        }
        sessions = list(recorded.values())
        if getattr(env.unwrapped, "needs_unrecorded_calls", False):
            own = spec.sampling.with_own_seed(len(recorded))
            aside = replace(settings, sampling=own, max_calls=None)
            sessions.append(gateway.open_session(aside, f"{spec.episode_id}-unrecorded"))
        unrecorded_key = sessions[-1].api_key if len(sessions) > len(recorded) else ""
        try:
            others = self._policies.open(gateway, spec, env.policies)
            sessions += others.values()
            access = AgentGateway(
                gateway.port,
                sessions[0].api_key,
                self._backend.model,
                unrecorded_key,
                {role: session.api_key for role, session in recorded.items() if role},
                {name: session.api_key for name, session in others.items()},
                lambda: [answer for session in recorded.values() for answer in session.history.answers()],
            )
            return await self._play(spec, env, deadlines, progress, access, gateway, recorded, sessions)
        except EpisodeFailed:
            _raise_session_error(sessions)
            raise
        finally:
            records = [record for session in recorded.values() for record in session.history.records]
            progress.turn = len(records)
            progress.prompt_tokens = sum(record.prompt_tokens for record in records)
            progress.completion_tokens = sum(record.completion_tokens for record in records)
            for opened in sessions:
                await gateway.end_session(opened)

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()
        await self._policies.close()

    def metrics(self) -> dict[str, float]:
        """Return the gateway's metrics; empty before the first episode."""
        return self._gateway.metrics() if self._gateway is not None else {}

    async def _play(
        self,
        spec: EpisodeSpec,
        env: AsyncEnvironment,
        deadlines: Deadlines,
        progress: Progress,
        access: AgentGateway,
        gateway: GatewayServer,
        recorded: Mapping[str, Session],
        sessions: Sequence[Session],
    ) -> Trajectory:
        """Play with one session for each role, `recorded`; the others of `sessions` are only answered."""
        progress.now("the agent")
        async with environment_errors(deadlines.episode_s, "play"):
            await env.play(access)
        for opened in sessions:
            await gateway.end_session(opened)
        _raise_session_error(sessions)
        if not any(session.history.records for session in recorded.values()):
            if any(session.context_was_full for session in recorded.values()):
                raise EpisodeFailed("prompt_too_long", "the agent's first request did not fit into model.max_length")
            raise EpisodeFailed("env_error", why_no_answer(list(recorded.values())))
        progress.now("the environment's score")
        async with environment_errors(deadlines.step_s, "score"):
            rewards, info = await env.score()
        info = info if "" in rewards else {**info, "roles": rewards}
        played = {
            role: finished_episode(session, group_id=spec.group_id, task=spec.task, reward=rewards[role], info=info)
            for role, session in recorded.items()
            if session.history.records
        }
        return played[""] if "" in played else replace(join_roles(played), episode_id=spec.episode_id)

    async def _started(self, deadlines: Deadlines) -> GatewayServer:
        async with self._starting:
            if self._gateway is None:
                gateway = GatewayServer(self._backend, call_timeout_s=deadlines.generate_s)
                await gateway.start()
                self._gateway = gateway
            return self._gateway


def _raise_session_error(sessions: Sequence[Session]) -> None:
    """Raise the first trouble of the sessions. It goes before an agent's error, which it may have caused."""
    for session in sessions:
        if session.trouble is not None:
            raise EpisodeFailed(session.trouble.cause, session.trouble.message)
