"""The HTTP routes of Tinker's training API, on the gateway's address and with its key.

    POST /api/v1/create_session, session_heartbeat, sessions/{id}/finish
    POST /api/v1/create_model, load_weights                                   one model is trained at a time
    POST /api/v1/forward_backward, optim_step                                 in the order in which they come
    POST /api/v1/save_weights, save_weights_for_sampler
    POST /api/v1/create_sampling_session, asample
    POST /api/v1/retrieve_future                                              the results of all of these

What a client asks for and cannot get is refused with one line that says so.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from roll_flash.config.sections.learner import LoraConfig
from roll_flash.engines.learner import AdamSettings
from roll_flash.gateway.apis.api_error import ApiError, bad_request, unsupported
from roll_flash.gateway.apis.request_fields import (
    MAX_ANSWERS,
    MAX_TOP_K,
    decode_object,
    flag,
    number,
    objects,
    strings,
    text,
    whole,
)
from roll_flash.gateway.server import GatewayServer
from roll_flash.tinker.futures import MAX_OPEN, Futures
from roll_flash.tinker.messages import MAX_DATA, PROTOBUF, read_gradient_request
from roll_flash.tinker.servers import BASE, Servers
from roll_flash.tinker.training import TrainedModel, checkpoint_folder, read_lora
from roll_flash.types import SamplingParams

BODY_S, POLL_S = 60.0, 25.0
"""Seconds in which a body must arrive, and after which a client must ask for a result again (it waits 45 s)."""
SILENT_S, SWEEP_S = 120.0, 5.0
"""A session whose client says nothing for so long has ended; clients say something every 10 s."""
MAX_SESSIONS, MAX_RANK = 64, 1024
MLP = ("gate_proj", "up_proj", "down_proj")
NOT_SAMPLED = (
    *("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"),
    "record_stability_info",
)
"""Fields of a request for samples that must be left out."""

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampler:
    """A client that samples. `weights` None: it follows the training."""

    weights: str | None
    path: str | None = None


@dataclass(slots=True)
class ClientSession:
    session_id: str
    last_s: float = field(default_factory=time.monotonic)
    model: TrainedModel | None = None


class TinkerRoutes:
    """Add the routes to a gateway that has not started yet; the caller closes the servers."""

    def __init__(self, gateway: GatewayServer, servers: Servers, names: frozenset[str], folder: Path) -> None:
        """`names`: what clients may call the model. `folder`: where checkpoints are written."""
        self._gateway = gateway
        self._servers = servers
        self._names = names
        self._folder = folder
        self._sessions: dict[str, ClientSession] = {}
        self._samplers: dict[str, Sampler] = {}
        self._saved: dict[str, str] = {}
        """Names of the weights of `save_weights_for_sampler`, by their path."""
        self._ending: set[asyncio.Task[None]] = set()
        self.futures = Futures()
        posts: dict[str, Callable[[Answer], Awaitable[Answer]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": _always({}),
            "telemetry": _always({"status": "accepted"}),  # clients report how they are used; nobody reads it here
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "load_weights": self._load,
            "get_info": self._info,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
        }
        router = gateway.app.router
        for path, handle in posts.items():
            router.add_post(f"/api/v1/{path}", self._json(handle))
        router.add_post("/api/v1/forward_backward", self._gradient)
        router.add_post("/api/v1/retrieve_future", self._retrieve)
        router.add_post("/api/v1/sessions/{session_id}/finish", self._finish)
        router.add_get("/api/v1/get_server_capabilities", self._capabilities)
        router.add_get("/api/v1/samplers/{name}", self._describe_sampler)

    async def sweep(self) -> None:
        """End sessions of silent clients; runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for session in list(self._sessions.values()):
                if time.monotonic() - session.last_s > SILENT_S:
                    await self._end(session)

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await self._end(session)
        await asyncio.gather(*self._ending)

    # Requests and their results

    def _json(self, handle: Callable[[Answer], Awaitable[Answer]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def route(request: web.Request) -> web.Response:
            return web.json_response(await handle(decode_object(await self._content(request) or b"{}")))

        return route

    async def _content(self, request: web.Request) -> bytes:
        self._require_key(request)
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "unsupported_encoding", "send the body as it is, without a Content-Encoding")
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError:
            raise ApiError(408, "request_timeout", f"the body did not come within {BODY_S:g} s") from None

    def _require_key(self, request: web.Request) -> None:
        if not self._gateway.is_admin(request):
            message = "TINKER_API_KEY must be the key of `roll-flash serve`, which it printed or was given"
            raise ApiError(401, "invalid_api_key", message)

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]], **more: Any) -> Answer:
        """Begin work, unless it is that of a request which is sent again."""
        if not self.futures.knows(name):
            self.futures.require_room()
            self.futures.start(name, work)
        return {"request_id": name, **more}

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = text(decode_object(await self._content(request)), "request_id")
        result = await self.futures.wait(name, POLL_S)
        if result is None:
            return web.json_response({"type": "try_again", "request_id": name, "queue_state": "active"}, status=408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(result)

    # Sessions

    async def _client_config(self, body: Answer) -> Answer:
        return {
            "parallel_fwdbwd_chunks": False,
            "fwdbwd_max_chunk_len": MAX_DATA,
            "fwdbwd_max_chunk_bytes_count": self._gateway.max_body_bytes // 2,
            "sample_max_concurrent_requests": MAX_OPEN // 2,
        }

    async def _create_session(self, body: Answer) -> Answer:
        if len(self._sessions) >= MAX_SESSIONS:
            raise ApiError(429, "too_many_sessions", f"{MAX_SESSIONS} sessions are open; end one")
        session = ClientSession(uuid.uuid4().hex)
        self._sessions[session.session_id] = session
        note = "adapters are trained for attention and MLP, not for the unembedding (docs/tinker.md)"
        return {"type": "create_session", "session_id": session.session_id, "info_message": note}

    async def _heartbeat(self, body: Answer) -> Answer:
        self._session(text(body, "session_id"))
        return {"type": "session_heartbeat"}

    async def _finish(self, request: web.Request) -> web.Response:
        await self._content(request)
        if (session := self._sessions.get(request.match_info["session_id"])) is not None:
            await self._end(session)
        return web.json_response({})

    def _session(self, session_id: str) -> ClientSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise ApiError(410, "session_ended", f"the session {session_id[:100]!r} has ended")
        session.last_s = time.monotonic()
        return session

    async def _end(self, session: ClientSession) -> None:
        """End a session, to its end even if the client that asked for it goes away: the learner must be closed."""
        if self._sessions.pop(session.session_id, None) is not None:
            ending = asyncio.create_task(self._close_session(session))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def _close_session(self, session: ClientSession) -> None:
        await self.futures.cancel(f"{session.session_id}:")
        for name in [name for name in self._samplers if name.startswith(f"{session.session_id}:")]:
            del self._samplers[name]
        if session.model is not None:
            await session.model.close()

    # Training

    async def _create_model(self, body: Answer) -> Answer:
        session = self._session(text(body, "session_id"))
        self._require_model_name(body.get("base_model"))
        if _object(body, "optimizer_config").get("type", "adamw") != "adamw":
            raise unsupported("optimizer_config", "only AdamW is computed here")
        given = _object(body, "lora_config")
        lora = self._servers.config.learner.lora
        wanted = {name: given.get(name) is not False for name in ("train_attn", "train_mlp")}
        targets = tuple(name for name in lora.targets if wanted["train_mlp" if name in MLP else "train_attn"])
        if not targets:
            raise unsupported("lora_config", "adapters of the unembedding alone; train attention or MLP as well")
        rank = whole(given, "rank", 1, MAX_RANK)
        if rank is None:
            raise bad_request("lora_config.rank must be given", "lora_config")
        lora = lora.model_copy(update={"rank": rank, "targets": targets})
        return self._open_model(session, body, lora, whole(given, "seed", 0), None, with_optimizer=False)

    def _open_model(
        self,
        session: ClientSession,
        body: Answer,
        lora: LoraConfig,
        seed: int | None,
        checkpoint: Path | None,
        *,
        with_optimizer: bool,
    ) -> Answer:
        model_id = f"{session.session_id}:train:{whole(body, 'model_seq_id', 0)}"
        name = f"{model_id}:0"
        answer = {"request_id": name, "model_id": model_id}
        if self.futures.knows(name):
            return answer
        busy = next((each for each in self._sessions.values() if each.model is not None), None)
        if busy is not None:
            raise bad_request(
                f"session {busy.session_id} trains a model, and one is trained at a time; it ends with "
                f"ServiceClient.close(), or {SILENT_S:g} s after its client is gone"
            )
        self.futures.require_room()
        # Here, not when the work begins: another request may come between.
        model = session.model = TrainedModel(model_id, self._servers, self._folder, lora, seed)

        async def opened() -> Answer:
            try:
                return await model.open(checkpoint, with_optimizer=with_optimizer)
            except BaseException:
                session.model = None
                await model.close()
                raise

        self.futures.start(name, opened)
        return answer

    def _model(self, model_id: Any) -> TrainedModel:
        session_id = str(model_id).partition(":")[0]
        model = self._session(session_id).model
        if model is None or model.model_id != model_id:
            raise ApiError(404, "model_not_found", f"no model {str(model_id)[:200]!r} is trained here")
        return model

    def _train(self, body: Mapping[str, Any], work: Callable[[], Coroutine[Any, Any, Any]]) -> Answer:
        return self._begin(f"{body['model_id']}:{_number_of(body, 1)}", work)

    async def _gradient(self, request: web.Request) -> web.Response:
        content = await self._content(request)
        servers = self._servers
        found = await asyncio.to_thread(
            lambda: read_gradient_request(
                content, vocabulary=servers.vocabulary, max_length=servers.config.model.max_length
            )
        )
        model = self._model(found.model_id)
        return web.json_response(
            self._train({"model_id": found.model_id, "seq_id": found.seq_id}, lambda: model.gradient(found))
        )

    async def _step(self, body: Answer) -> Answer:
        model = self._model(body.get("model_id"))
        if "adam_params" not in body:
            raise unsupported("optim_params", "only AdamParams are computed here")
        given = _object(body, "adam_params")

        def value(name: str, default: float, high: float, low: float = 0.0) -> float:
            found = number(given, name, low, high)
            return default if found is None else found

        adam = AdamSettings(
            learning_rate=value("learning_rate", 1e-4, 1e3),
            betas=(value("beta1", 0.9, 1 - 1e-9), value("beta2", 0.95, 1 - 1e-9)),
            eps=value("eps", 1e-12, 1, low=1e-20),  # with 0, a weight without a gradient would become NaN
            weight_decay=value("weight_decay", 0.0, 1e3),
            max_grad_norm=value("grad_clip_norm", 0.0, 1e9) or math.inf,
        )
        return self._train(body, lambda: model.step(adam))

    async def _save(self, body: Answer) -> Answer:
        model, name = self._model(body.get("model_id")), _name(body.get("path"))
        if flag(body, "overwrite"):
            raise unsupported("overwrite", "no checkpoint is overwritten; choose another name")
        return self._train(body, lambda: model.save(name))

    async def _load(self, body: Answer) -> Answer:
        checkpoint, with_optimizer = self._checkpoint(text(body, "path")), flag(body, "optimizer")
        if body.get("session_id") is None:
            raise unsupported("load_state", "use ServiceClient.create_training_client_from_state")
        session = self._session(text(body, "session_id"))
        if body.get("base_model") is not None:
            self._require_model_name(body["base_model"])
        lora = read_lora(checkpoint)
        return self._open_model(session, body, lora, None, checkpoint, with_optimizer=with_optimizer)

    def _checkpoint(self, path: str) -> Path:
        found = re.fullmatch(r"tinker://(\w+:train:\d+)/weights/([^/]+)", path)
        if found is None:
            raise bad_request(f"path: {path[:200]!r} is no path of save_state", "path")
        folder = checkpoint_folder(self._folder, found[1], "weights", _name(found[2]))
        read_lora(folder)
        return folder

    async def _info(self, body: Answer) -> Answer:
        model = self._model(body.get("model_id"))
        name, folder = self._gateway.backend.model, str(self._servers.folder)
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {"model_name": name, "tokenizer_id": folder},
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "model_name": name,
        }

    # Sampling

    async def _save_for_sampler(self, body: Answer) -> Answer:
        model = self._model(body.get("model_id"))
        name = None if body.get("path") is None else _name(body["path"])
        session_id = model.model_id.partition(":")[0]
        sampler = f"{session_id}:sample:{whole(body, 'sampling_session_seq_id', 0)}"
        path = f"tinker://{model.model_id}/sampler_weights/{name}"

        async def saved() -> Answer:
            weights = await model.save_for_sampler(name)
            if name is not None:
                self._saved[path] = weights
                return {"type": "save_weights_for_sampler", "path": path}
            self._samplers[sampler] = Sampler(None if body.get("kind") == "inflight" else weights)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        return self._train(body, saved)

    async def _create_sampler(self, body: Answer) -> Answer:
        session = self._session(text(body, "session_id"))
        path = body.get("model_path")
        if path is None:
            self._require_model_name(body.get("base_model"))
            weights = BASE
        elif isinstance(path, str) and path in self._saved:
            weights = self._saved[path]
        else:
            raise ApiError(
                404, "model_not_found", f"{str(path)[:200]}: no path of save_weights_for_sampler since the start"
            )
        name = f"{session.session_id}:sample:{whole(body, 'sampling_session_seq_id', 0)}"
        self._samplers[name] = Sampler(weights, path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def _sample(self, body: Answer) -> Answer:
        name = text(body, "sampling_session_id")
        self._session(name.partition(":")[0])
        if (sampler := self._samplers.get(name)) is None:
            raise ApiError(404, "sampler_not_found", f"no sampling session {name[:200]!r}")
        for given in NOT_SAMPLED:
            if body.get(given):
                raise unsupported(given, "not computed here; leave it out")
        prompt, count = _prompt(body, self._servers.vocabulary), whole(body, "num_samples", 1, MAX_ANSWERS) or 1
        room = self._servers.config.model.max_length - len(prompt)
        if room < 1:
            raise bad_request(f"a prompt of {len(prompt)} tokens leaves no room; see model.max_length", "prompt")
        sampling = self._sampling(_object(body, "sampling_params"), room)
        scores = 0
        if flag(body, "prompt_logprobs"):
            scores = whole(body, "prompt_logprobs_last_n", 1, len(prompt)) or len(prompt)
        request_id = f"{name}:{_number_of(body, 0)}"
        servers = self._servers

        async def sampled() -> bytes:
            if sampler.weights is None:
                return await servers.sample(request_id, prompt, count, sampling, scores=scores)
            async with servers.fixed(sampler.weights):
                return await servers.sample(request_id, prompt, count, sampling, scores=scores)

        ids = [f"{request_id}-{index}" for index in range(count)]
        return self._begin(request_id, sampled, sample_sequence_ids=ids)

    def _sampling(self, given: Answer, room: int) -> SamplingParams:
        top_k = whole(given, "top_k", -1, MAX_TOP_K) or 0
        stop: tuple[str, ...] = ()
        value = given.get("stop")
        if value == []:
            raise unsupported("stop", "an empty list, which would go on after the model's end token; leave it out")
        if isinstance(value, list) and all(type(token) is int for token in value):
            if others := set(value) - self._servers.end_ids:
                raise unsupported("stop", f"token {min(others)} is none of the model's end tokens; send a text instead")
        else:
            stop = strings(given, "stop")
        temperature, top_p = number(given, "temperature", 0, 2), number(given, "top_p", 1e-6, 1)
        return SamplingParams(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=max(0, top_k),
            max_new_tokens=min(room, whole(given, "max_tokens") or room),
            stop=stop,
            seed=whole(given, "seed", 0),
        )

    # About the server

    async def _capabilities(self, request: web.Request) -> web.Response:
        self._require_key(request)
        length = self._servers.config.model.max_length
        found = {"max_context_length": length, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [{"model_name": name, **found} for name in sorted(self._names)]})

    async def _describe_sampler(self, request: web.Request) -> web.Response:
        self._require_key(request)
        name = request.match_info["name"]
        if (sampler := self._samplers.get(name)) is None:
            raise ApiError(404, "sampler_not_found", f"no sampling session {name[:200]!r}")
        model = self._gateway.backend.model
        return web.json_response({"sampler_id": name, "base_model": model, "model_path": sampler.path})

    def _require_model_name(self, asked: Any) -> None:
        if not isinstance(asked, str) or asked not in self._names:
            known = ", ".join(sorted(self._names))
            raise ApiError(
                404, "model_not_found", f"the model {str(asked)[:200]!r} is not served here; ask for {known}"
            )


def _always(answer: Answer) -> Callable[[Answer], Awaitable[Answer]]:
    async def handle(body: Answer) -> Answer:
        return answer

    return handle


def _object(body: Mapping[str, Any], name: str) -> Answer:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{name} must be an object", name)
    return value or {}


def _number_of(body: Mapping[str, Any], low: int) -> int:
    """Return a request's number, which tells whether it is sent again: without any, it would be taken for another."""
    if (found := whole(body, "seq_id", low)) is None:
        raise bad_request("seq_id must be given", "seq_id")
    return found


def _name(value: Any) -> str:
    """Check the name of a checkpoint, which becomes a folder."""
    if not isinstance(value, str) or not re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,100}", value):
        raise bad_request("the name of a checkpoint has 1 to 100 letters, digits, '.', '_' or '-', and no '.' first")
    return value


def _prompt(body: Answer, vocabulary: int) -> list[int]:
    chunks = objects(_object(body, "prompt"), "chunks")
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise unsupported("prompt", "only text is computed here, no images and no sound")
    lists = [chunk.get("tokens") or [] for chunk in chunks]
    tokens: list[Any] = [token for each in lists for token in (each if isinstance(each, list) else [None])]
    if not tokens or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise bad_request(f"prompt: token ids must be from 0 to {vocabulary - 1}, and at least one", "prompt")
    return tokens
