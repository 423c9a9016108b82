"""HTTP server of the gateway: authentication, errors, and the routes that call the model.

Invariants: a request without the key of an open session or of the gateway reaches no model; if the agent disconnects,
its request is cancelled on the servers and leaves no record; failures not caused by the agent are noted as trouble of
the session.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from roll_flash.errors import InferenceError, RollFlashError
from roll_flash.gateway.apis import anthropic_messages, chat_completions, responses_api
from roll_flash.gateway.apis.api_error import ApiError, ApiStyle, bad_request
from roll_flash.gateway.apis.event_stream import send
from roll_flash.gateway.apis.request_fields import decode_object, flag
from roll_flash.gateway.backend import Backend
from roll_flash.gateway.connections import READ_BYTES, Connections
from roll_flash.gateway.http_log import HttpLog
from roll_flash.gateway.model_call import ModelCall, Reply
from roll_flash.gateway.sessions.history import CallRecord
from roll_flash.gateway.sessions.session import Session, SessionSettings
from roll_flash.gateway.sessions.work import SMALL_CHARACTERS, WorkThreads

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MIN_BODY_BYTES, MAX_BODY_BYTES = 2 * 2**20, 32 * 2**20
"""Bounds of the maximum body size, which is BYTES_PER_TOKEN per token of the context."""
BYTES_PER_TOKEN = 32
CHARACTERS_PER_TOKEN = 32
"""Approximate size of an answer as JSON, with its logprobs."""
ENDED_SESSIONS_KNOWN = 10_000
"""Maximum remembered keys of ended sessions, which get another error than wrong keys."""
SHUTDOWN_S = 5.0
MAX_OPEN_REQUESTS = 256
"""Maximum requests in progress per session; a sandbox has half as many connections."""
MAX_DESCRIPTORS = 1 << 16
"""File descriptors requested at start; the usual limit of 1,024 is enough for few agents only."""
MAX_BACKLOG = 2048
CALLS = frozenset(("/v1/models", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"))
OF_THIS_CALL = web.RequestKey("session", Session)
"""Session of a request with the gateway's own key, which ends with the request."""
STYLES: Mapping[str, ApiStyle] = {"/v1/messages": "anthropic", "/v1/messages/count_tokens": "anthropic"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class GatewayCounts:
    """Cumulative counts."""

    sessions: int = 0
    calls: int = 0
    answers: int = 0
    refused: int = 0
    """Requests answered with an error of the agent's."""
    failed: int = 0
    """Requests answered with an error of ours."""
    disconnects: int = 0
    """Agents that disconnected before their answer."""
    malformed: int = 0
    """Requests that were not HTTP, answered with 400."""
    forks: int = 0
    rewrites: int = 0


class GatewayServer:
    """One listening socket for any number of sessions. Belongs to one event loop; the caller closes the backend."""

    def __init__(self, backend: Backend, *, call_timeout_s: float, admin_key: str = "") -> None:
        """`admin_key`: key of clients that open sessions over HTTP, and with which a call belongs to no session: it is
        answered and not recorded. Empty disables that."""
        self.backend = backend
        self._admin_key = admin_key.encode()
        self._call_timeout_s = call_timeout_s
        self._sessions: dict[str, Session] = {}
        """Open sessions by api key."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._counts = GatewayCounts()
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._connections = Connections()
        self.port = 0
        length = backend.max_length or MAX_BODY_BYTES
        self._max_body_bytes = min(max(BYTES_PER_TOKEN * length, MIN_BODY_BYTES), MAX_BODY_BYTES)
        self._threads = WorkThreads()
        self.app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._errors, self._bounded])
        self.app.on_response_prepare.append(self._keep_or_close)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/models/{name:.+}", self._model)
        self.app.router.add_post("/v1/chat/completions", self._chat_completions)
        self.app.router.add_post("/v1/responses", self._responses)
        self.app.router.add_post("/v1/messages", self._messages)
        self.app.router.add_post("/v1/messages/count_tokens", self._count_tokens)

    @property
    def max_body_bytes(self) -> int:
        return self._max_body_bytes

    async def start(self, host: str = LOOPBACK, port: int = 0) -> int:
        """Listen, and return the port. Raises OSError if the port is not available."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = max(soft, min(hard, MAX_DESCRIPTORS))
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
        share = descriptors // 4  # for silent connections, and as much for those that come at once
        self._runner = web.AppRunner(
            self.app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
            keepalive_timeout=3600,
            read_bufsize=READ_BYTES,
            logger=HttpLog(self._count_malformed),
            auto_decompress=False,  # a small body could expand to a large one, on the event loop
        )
        await self._runner.setup()
        assert self._runner.server is not None
        accept = self._connections.watch(self._runner.server, share)
        backlog = min(share, MAX_BACKLOG)
        self._listening = await asyncio.get_running_loop().create_server(accept, host, port, backlog=backlog)
        self.port = int(self._listening.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """End every session and close the socket."""
        for session in list(self._sessions.values()):
            await self.end_session(session)
        if self._listening is not None:
            self._listening.close()
        self._connections.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._threads.close()

    def open_session(
        self, settings: SessionSettings, session_id: str | None = None, backend: Backend | None = None
    ) -> Session:
        """`backend`: answers this session in the place of the gateway's own."""
        session = self._new_session(settings, session_id)
        session.backend = backend or self.backend
        self._sessions[session.api_key] = session
        self._counts.sessions += 1
        return session

    def _new_session(self, settings: SessionSettings, session_id: str | None = None) -> Session:
        session = Session(session_id or uuid.uuid4().hex, settings, self._call_timeout_s, self._threads)
        session.backend = self.backend
        return session

    async def end_session(self, session: Session) -> None:
        """End a session and cancel its requests. Safe to call twice."""
        if self._sessions.pop(session.api_key, None) is None:
            return
        self._ended[session.api_key] = None
        if len(self._ended) > ENDED_SESSIONS_KNOWN:
            self._ended.popitem(last=False)
        self._counts.forks += session.history.forks
        self._counts.rewrites += session.history.rewrites
        self._connections.session_ended(session.api_key)
        await session.end()

    def metrics(self) -> dict[str, float]:
        """Totals since the start. Forks and rewrites count only ended sessions."""
        counts = {f"gateway_{name}": float(count) for name, count in asdict(self._counts).items()}
        kept = {"gateway_kept_connections": float(len(self._connections))}
        return {**counts, **kept, "gateway_open_sessions": float(len(self._sessions))}

    def session_of(self, request: web.Request) -> Session:
        """Session of a request. Raises ApiError if the key is missing, unknown, or of an ended session."""
        if OF_THIS_CALL in request:
            return request[OF_THIS_CALL]
        key = api_key_of(request)
        if key in self._sessions:
            return self._sessions[key]
        if key in self._ended:
            raise ApiError(410, "session_ended", "the session has ended: its episode was scored or given up")
        what = "the api key is not one of an open session" if key else "no api key was given"
        raise ApiError(401, "invalid_api_key", f"{what}; send the session's as `Authorization: Bearer KEY`")

    def is_admin(self, request: web.Request) -> bool:
        """Keys are compared as the bytes that were sent, which need not be text."""
        key = api_key_of(request).encode(errors="surrogateescape")
        return bool(self._admin_key) and hmac.compare_digest(key, self._admin_key)

    def _count_malformed(self) -> None:
        self._counts.malformed += 1

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._connections.request_started(request)
        try:
            return await handler(request)
        except ApiError as error:
            problem = error
        except web.HTTPRequestEntityTooLarge:
            problem = ApiError(413, "request_too_large", f"the body is larger than {self._max_body_bytes >> 20} MiB")
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}{_meant(request.path)}"
            problem = ApiError(error.status, "not_found", what)
        except (ConnectionError, asyncio.CancelledError):
            self._counts.disconnects += 1
            raise
        except RollFlashError as error:
            problem = ApiError(500, "internal_error", str(error))
        except Exception as error:  # a bug of ours; the agent still gets an answer
            logger.exception("%s %s", request.method, request.path)
            problem = ApiError(500, "internal_error", f"{type(error).__name__}: {error}")
        if (session := self._sessions.get(api_key_of(request))) is not None:
            session.refusal = problem.message
        if problem.status >= 500:
            self._counts.failed += 1
        else:
            self._counts.refused += 1
        return web.json_response(problem.body(STYLES.get(request.path, "openai")), status=problem.status)

    @web.middleware
    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Limit the requests in progress per session, so that a slow agent cannot block others."""
        session = self._sessions.get(api_key_of(request))
        is_call = request.path in CALLS or request.path.startswith("/v1/models/")
        if session is None and is_call and self.is_admin(request):
            request[OF_THIS_CALL] = session = self._new_session(SessionSettings())
            try:
                return await handler(request)
            finally:
                await session.end()
        if session is None:
            return await handler(request)
        if session.open_requests >= MAX_OPEN_REQUESTS:
            raise ApiError(429, "session_busy", f"{MAX_OPEN_REQUESTS} requests of this session are under way")
        session.open_requests += 1
        try:
            return await handler(request)
        finally:
            session.open_requests -= 1

    async def _keep_or_close(self, request: web.Request, response: web.StreamResponse) -> None:
        """Keep or close the connection; called before the headers of an answer are sent."""
        key = api_key_of(request)
        if key in self._sessions and self._connections.keep(request, key):
            return
        if not self.is_admin(request):
            response.force_close()
            response.headers["Connection"] = "close"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [_described(self.session_of(request).backend)]})

    async def _model(self, request: web.Request) -> web.Response:
        backend = self.session_of(request).backend
        _require_model({"model": request.match_info["name"]}, backend)
        return web.json_response(_described(backend))

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        asking = self.session_of(request)
        # Else a field of an endpoint's own, such as another model or penalties, would undo what the run has set.
        forwards = asking.backend.max_length is None and asking.settings.sampling is None
        parse = partial(chat_completions.parse, forwards=forwards)
        session, body, call = await self._read(request, parse)
        streams, usage = flag(body, "stream"), chat_completions.wants_usage(body)
        reply, records = await self._complete(call, session)
        if streams:
            events = chat_completions.events(reply, session.backend.model, with_usage=usage)
            return await self._send(request, events, session, records)
        return await self._send_whole(session, records, partial(chat_completions.render, reply, session.backend.model))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        earlier = self.session_of(request).responses
        parse = partial(responses_api.parse, earlier=earlier)
        brought = partial(responses_api.earlier_characters, earlier=earlier)
        session, body, call = await self._read(request, parse, brought)
        streams = flag(body, "stream")
        reply, records = await self._complete(call, session)
        response_id = responses_api.new_response_id()
        session.responses[response_id] = records[0]
        if streams:
            events = responses_api.events(reply, session.backend.model, response_id, body)
            return await self._send(request, events, session, records)
        render = partial(responses_api.render, reply, session.backend.model, response_id, body)
        return await self._send_whole(session, records, render)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session, body, call = await self._read(request, anthropic_messages.parse)
        streams = flag(body, "stream")
        reply, records = await self._complete(call, session)
        model = session.backend.model
        if streams:
            return await self._send(request, anthropic_messages.events(reply, model), session, records)
        return await self._send_whole(session, records, partial(anthropic_messages.render, reply, model))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """Count tokens; it counts as a model call, because it costs as much."""
        session, _, call = await self._read(request, anthropic_messages.parse)
        session.admit()
        self._counts.calls += 1
        with _noting_trouble(session):
            tokens = await session.run(session.backend.count_tokens(call, session))
        return web.json_response({"input_tokens": tokens})

    async def _read(
        self,
        request: web.Request,
        parse: Callable[[dict[str, Any]], ModelCall],
        brought: Callable[[dict[str, Any]], int] | None = None,
    ) -> tuple[Session, dict[str, Any], ModelCall]:
        """Read a request: at most one large body per session at a time, none if the session has no calls left.
        `brought`: characters of what a body refers to, which are read with it."""
        session = self.session_of(request)
        session.require_calls_left()
        size = request.content_length
        if (size or 0) > self._max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, size or 0)

        def understand() -> tuple[dict[str, Any], ModelCall]:
            body = decode_object(content)
            _require_model(body, session.backend)
            call = parse(body)
            assert call.keys
            return body, call

        content = await content_of(request, session)
        characters = len(content)
        if brought is not None and characters <= SMALL_CHARACTERS:
            characters += brought(decode_object(content))
        try:
            body, call = await session.work.do(understand, characters)
        except InferenceError as error:  # only this: other failures could be caused by what the agent sent
            raise _noted(session, error) from None
        return session, body, call

    async def _complete(self, call: ModelCall, session: Session) -> tuple[Reply, list[CallRecord]]:
        number = session.admit(call.n)
        self._counts.calls += 1
        records: list[CallRecord] = []

        async def completed() -> Reply:
            reply, recorded = await session.backend.complete(call, session, number)
            records.extend(recorded)  # at once: the agent may disconnect before the caller goes on
            return reply

        with _noting_trouble(session, records):
            reply = await session.run(completed())
        self._counts.answers += len(records)
        return reply, records

    async def _send(
        self, request: web.Request, events: Any, session: Session, records: list[CallRecord]
    ) -> web.StreamResponse:
        with _noting_trouble(session, records):
            return await send(request, events)

    async def _send_whole(
        self, session: Session, records: list[CallRecord], render: Callable[[], dict[str, Any]]
    ) -> web.Response:
        def rendered() -> bytes:
            return msgspec.json.encode(render())

        size = CHARACTERS_PER_TOKEN * sum(record.completion_tokens for record in records)
        with _noting_trouble(session, records):
            return web.Response(body=await session.work.do(rendered, size), content_type="application/json")


def _require_model(body: Mapping[str, Any], backend: Backend) -> None:
    asked = body.get("model")
    if asked is None:
        raise bad_request(f"model must be given: {backend.model!r}", "model")
    if asked != backend.model:
        message = f"the model {str(asked)[:100]!r} does not exist here; ask for {backend.model!r}"
        raise ApiError(404, "model_not_found", message, "model")


def _meant(path: str) -> str:
    """Return a hint if a path is one of ours with another beginning, as from a client with another base URL."""
    meant = next((call for call in CALLS if path != call and path.endswith(call.removeprefix("/v1"))), None)
    if meant is None:
        return ""
    return f"; it is {meant}: OpenAI's clients take a base URL that ends with /v1, Anthropic's one without it"


def _described(backend: Backend) -> dict[str, Any]:
    described = {"id": backend.model, "object": "model", "created": 0, "owned_by": "roll-flash"}
    return described if backend.max_length is None else {**described, "max_model_len": backend.max_length}


@contextmanager
def _noting_trouble(session: Session, records: Sequence[CallRecord] = ()) -> Iterator[None]:
    """Note failures that the agent did not cause. If an answer is sent meanwhile, `records` are it: any failure, also
    the agent's, discards what it has not received."""
    try:
        yield
    except BaseException as error:
        for record in records:
            session.history.discard(record)
        match error:
            case ApiError():
                raise
            case ConnectionError() if records:
                raise
            case TimeoutError():
                message = f"no answer of the model after {session.timeout_s:g} s"
                session.note_trouble("generate_timeout", message)
                raise ApiError(504, "generate_timeout", message) from None
            case InferenceError():
                raise _noted(session, error) from None
            case Exception():
                session.note_trouble("internal_error", f"{type(error).__name__}: {error}")
        raise


def _noted(session: Session, error: InferenceError) -> ApiError:
    session.note_trouble("generate_error", str(error))
    return ApiError(503, "generate_error", str(error))


async def content_of(request: web.Request, session: Session) -> bytes:
    """Read the body. Raises ApiError if it is compressed or does not arrive in time."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "unsupported_encoding", "send the body as it is, without a Content-Encoding")
    size = request.content_length
    try:
        async with asyncio.timeout(session.timeout_s):
            if size is not None and size <= SMALL_CHARACTERS:
                return await request.read()
            async with session.reading:
                return await request.read()
    except TimeoutError:
        message = f"the body did not come within {session.timeout_s:g} s"
        raise ApiError(408, "request_timeout", message) from None


def api_key_of(request: web.Request) -> str:
    """Read the key from OpenAI's or Anthropic's header; empty if there is none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key else request.headers.get("x-api-key", "").strip()
