"""HTTP routes of a standalone gateway, which open, score and cancel sessions.

    POST   /v1/sessions                {"task_id", "env_id", "seed", "group_id", "max_calls", "sampling", "metadata"}
    GET    /v1/sessions                open sessions and totals
    POST   /v1/sessions/{id}/reward    {"reward", "success", "info"}; {} asks the verifier
    POST   /v1/reward                  the same, with the session's own key
    DELETE /v1/sessions/{id}           cancel it: nothing is scored

Every opened session ends as one line in the episodes: a trajectory, or a failure with its reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from aiohttp import web

from roll_flash.gateway.apis.api_error import ApiError, bad_request
from roll_flash.gateway.apis.request_fields import (
    MAX_TOP_K,
    decode_object,
    flag,
    number,
    strings,
    text,
    whole,
)
from roll_flash.gateway.model_call import RequestedSampling
from roll_flash.gateway.server import GatewayServer, content_of
from roll_flash.gateway.sessions.finished_episode import finished_episode, session_figures
from roll_flash.gateway.sessions.session import Session, SessionSettings, as_requested, why_no_answer
from roll_flash.gateway.sessions.verifier import Verifier, VerifierError
from roll_flash.gateway.sessions.web_pages import local_url, refuse_web_pages
from roll_flash.monitor.episodes import EpisodesWriter, Outcome
from roll_flash.types import MAX_REWARD, EpisodeFailure, FailureCause, SamplingParams, Task, Trajectory

SWEEP_S = 5.0
SAMPLING_FIELDS = tuple(entry.name for entry in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class OpenSession:
    """An open session and its task."""

    session: Session
    task: Task
    group_id: str


class SessionRoutes:
    """Add the session routes to a gateway that has not started yet."""

    def __init__(
        self,
        gateway: GatewayServer,
        episodes: EpisodesWriter,
        *,
        verifier: Verifier | None,
        idle_s: float,
        url: str | None = None,
    ) -> None:
        """`admin_key` of the gateway is needed to open and list sessions. `idle_s`: idle seconds after which a session
        is cancelled. `url`: base URL that sessions get; None is the address at which they were opened."""
        self.gateway = gateway
        self._episodes = episodes
        self._verifier = verifier
        self._idle_s = idle_s
        self._url = url
        self._opened: dict[str, OpenSession] = {}
        self.sessions_being_scored: set[str] = set()
        """Ids of sessions that a verifier is scoring."""
        self._ending: set[asyncio.Task[Outcome]] = set()
        self.scored = 0
        self.failed = 0
        gateway.app.middlewares.append(refuse_web_pages)
        router = gateway.app.router
        router.add_post("/v1/sessions", self._open)
        router.add_get("/v1/sessions", self._list)
        router.add_post("/v1/sessions/{session_id}/reward", self._reward)
        router.add_delete("/v1/sessions/{session_id}", self._give_up)
        router.add_post("/v1/reward", self._reward)

    async def sweep(self) -> None:
        """Cancel idle sessions; runs until cancelled."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._idle_s))
            for opened in list(self._opened.values()):
                session = opened.session
                idle_s = time.monotonic() - session.last_activity_s
                is_busy = session.requests_in_flight or session.session_id in self.sessions_being_scored
                if idle_s > self._idle_s and not is_busy and session.session_id in self._opened:
                    await self._fail(opened, "episode_timeout", f"no call and no reward for {idle_s:.0f} s")

    async def close(self) -> None:
        """Cancel all open sessions."""
        for opened in list(self._opened.values()):
            if opened.session.session_id in self._opened:  # a request may have ended it meanwhile
                await self._fail(opened, "cancelled", "the gateway was stopped before the session had a reward")
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _open(self, request: web.Request) -> web.Response:
        self._require_admin(request)
        body = decode_object(await request.read() or b"{}")
        settings = SessionSettings(_sampling(body.get("sampling")), whole(body, "max_calls"))
        metadata = body.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise bad_request("metadata must be an object", "metadata")
        names = {name: text(body, name) for name in ("task_id", "env_id", "group_id") if body.get(name) is not None}
        session = self.gateway.open_session(settings)
        task_id = names.get("task_id", session.session_id)
        task = Task(task_id, names.get("env_id", "agents"), whole(body, "seed", 0) or 0, metadata)
        group_id = names.get("group_id", task_id)
        self._opened[session.session_id] = OpenSession(session, task, group_id)
        answer = {
            "session_id": session.session_id,
            "api_key": session.api_key,
            "base_url": f"{self._url or local_url(request)}/v1",
            "model": self.gateway.backend.model,
        }
        return web.json_response(answer, status=201)

    async def _list(self, request: web.Request) -> web.Response:
        self._require_admin(request)
        data = [
            {"session_id": name, "task_id": opened.task.task_id, **session_figures(opened.session)}
            for name, opened in self._opened.items()
        ]
        counts = {**self.gateway.metrics(), "gateway_scored": self.scored, "gateway_given_up": self.failed}
        return web.json_response({"object": "list", "data": data, "metrics": counts})

    async def _give_up(self, request: web.Request) -> web.Response:
        opened = self._find(request)
        await self._to_its_end(self._fail(opened, "cancelled", "given up by a request"))
        return web.json_response({"session_id": opened.session.session_id, "kind": "failure", "cause": "cancelled"})

    async def _reward(self, request: web.Request) -> web.Response:
        opened = self._find(request)
        session = opened.session
        content = await content_of(request, session) or b"{}"
        body = await session.work.do(partial(decode_object, content), len(content))
        if session.trouble is not None:
            trouble = session.trouble
            outcome = await self._to_its_end(self._fail(opened, trouble.cause, trouble.message))
            return web.json_response(_summary(outcome))
        if not session.history.records:
            raise bad_request(f"there is nothing to score: {why_no_answer([session])}")
        reward, info = await self._score(opened, body)
        return web.json_response(_summary(await self._to_its_end(self._finish(opened, reward, info))))

    async def _to_its_end(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Finish `work` even if the client disconnects: an ended session must be written."""
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return await asyncio.shield(task)

    async def _score(self, opened: OpenSession, body: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        reward = number(body, "reward", -MAX_REWARD, MAX_REWARD)
        if reward is None:
            if self._verifier is None:
                raise bad_request("reward must be a number; without one a verifier is needed (--verifier)", "reward")
            return await self._verified(opened, self._verifier)
        info = body.get("info") or {}
        if not isinstance(info, dict):
            raise bad_request("info must be an object", "info")
        return reward, {**info, "success": flag(body, "success")} if "success" in body else dict(info)

    async def _verified(self, opened: OpenSession, verifier: Verifier) -> tuple[float, dict[str, Any]]:
        session = opened.session
        judged = list(session.history.records)
        episode = finished_episode(session, group_id=opened.group_id, task=opened.task, reward=0.0, info={})
        self.sessions_being_scored.add(session.session_id)
        try:
            found = await verifier.score(episode)
        except VerifierError as error:
            raise ApiError(500, "verifier_failed", str(error)) from None
        finally:
            self.sessions_being_scored.discard(session.session_id)
            session.last_activity_s = time.monotonic()
        if session.history.records != judged:
            raise ApiError(409, "session_changed", "the agent went on while the verifier ran; ask again")
        return found

    async def _finish(self, opened: OpenSession, reward: float, info: Mapping[str, Any]) -> Outcome:
        """Write the scored episode; trouble during the verification fails it."""
        if (trouble := opened.session.trouble) is not None:
            return await self._fail(opened, trouble.cause, trouble.message)
        await self._end(opened)
        if not opened.session.history.records:  # the agent went away meanwhile, before it had its only answer
            return self._write_failure(opened, "cancelled", "the agent has received no answer of the model")
        episode = finished_episode(opened.session, group_id=opened.group_id, task=opened.task, reward=reward, info=info)
        self.scored += 1
        self._episodes.write(0, episode)
        return episode

    async def _fail(self, opened: OpenSession, cause: FailureCause, message: str) -> EpisodeFailure:
        await self._end(opened)
        return self._write_failure(opened, cause, message)

    def _write_failure(self, opened: OpenSession, cause: FailureCause, message: str) -> EpisodeFailure:
        session, records = opened.session, opened.session.history.records
        failure = EpisodeFailure(
            session.session_id,
            opened.group_id,
            opened.task,
            cause,
            message,
            turn=len(records),
            attempt=0,
            prompt_tokens=sum(record.prompt_tokens for record in records),
            completion_tokens=sum(record.completion_tokens for record in records),
        )
        self.failed += 1
        self._episodes.write(0, failure)
        return failure

    async def _end(self, opened: OpenSession) -> None:
        """End the session. Raises ApiError if another request already did."""
        if self._opened.pop(opened.session.session_id, None) is None:
            opened.session.require_open()
        await self.gateway.end_session(opened.session)

    def _find(self, request: web.Request) -> OpenSession:
        """Find a session by its key, or by its id with the admin key."""
        session_id = request.match_info.get("session_id")
        if session_id is None or not self.gateway.is_admin(request):
            session = self.gateway.session_of(request)
            if session_id not in (None, session.session_id):
                raise ApiError(403, "wrong_session", "the api key is that of another session")
            session_id = session.session_id
        if session_id not in self._opened:
            raise ApiError(404, "session_not_found", f"no open session {session_id!r}")
        return self._opened[session_id]

    def _require_admin(self, request: web.Request) -> None:
        if not self.gateway.is_admin(request):
            message = "this needs the gateway's own key, which it was given (--api-key-env) or told when it started"
            raise ApiError(401, "invalid_api_key", message)


def _sampling(value: Any) -> SamplingParams | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not set(value) <= set(SAMPLING_FIELDS):
        raise bad_request(f"sampling must be an object with some of {', '.join(SAMPLING_FIELDS)}", "sampling")
    if value.get("top_p") == 0:
        raise bad_request("sampling.top_p must be more than 0", "sampling")
    return as_requested(
        RequestedSampling(
            temperature=number(value, "temperature", 0, 2),
            top_p=number(value, "top_p", 0, 1),
            top_k=whole(value, "top_k", 0, MAX_TOP_K),
            max_tokens=whole(value, "max_new_tokens"),
            stop=strings(value, "stop"),
            seed=whole(value, "seed", 0),
        )
    )


def _summary(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Trajectory):
        return {
            "session_id": outcome.episode_id,
            "kind": "trajectory",
            "reward": outcome.reward,
            "success": outcome.success,
            "turns": sum(len(sample.turns) for sample in outcome.samples),
            "samples": len(outcome.samples),
            "policy_tokens": outcome.policy_tokens,
        }
    return {
        "session_id": outcome.episode_id,
        "kind": "failure",
        "cause": outcome.cause,
        "message": outcome.message,
    }
