"""Server with plain transformers that implements the vLLM routes which this project uses.

`python -m roll_flash.inference.transformers.server MODEL_FOLDER HOST PORT MAX_MODEL_LEN [experts]`; with `experts`,
answers have the experts of each token. One thread computes one token for
each request in flight in turn, so that pauses, aborts and new weights take effect between two tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from aiohttp import web

from roll_flash.inference.transformers.model import Request, TransformersModel
from roll_flash.processes.keys import REFUSED, is_authorized, key_from_environment
from roll_flash.watchdog.stacks import register_stacks

MAX_BODY_BYTES = 64 * 2**20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Routes of the server and their state. Only the single compute thread uses the model."""

    def __init__(self, model: TransformersModel, max_model_len: int, key: str) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._key = key
        self._version = "0"
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._in_flight: set[Request] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._aborted = asyncio.Event()
        """Set, then replaced by a new event, when the requests in flight are aborted."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._require_key])
        app.router.add_get("/health", self._ok)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/update_weights", self._update_weights)
        app.router.add_post("/finish_weight_update", self._label)
        app.router.add_post("/update_weight_version", self._label)
        app.router.add_post("/start_weight_update", self._ok)
        app.router.add_post("/init_weight_transfer_engine", self._ok)
        app.router.add_post("/reset_prefix_cache", self._ok)
        return app

    @web.middleware
    async def _require_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not is_authorized(request.path, authorization, self._key):
            return web.Response(status=401, body=REFUSED, content_type="application/json")
        return await handler(request)

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {len(self._in_flight)}\n')

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._version})

    async def _pause(self, http: web.Request) -> web.Response:
        self._running.clear()
        await self._in_thread(lambda: None)
        if http.query.get("mode", "abort") == "abort":
            for request in self._in_flight:
                request.abort()
            # Wake the requests that wait for the end of the pause.
            self._aborted.set()
            self._aborted = asyncio.Event()
        return web.json_response({})

    async def _resume(self, _: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({})

    async def _update_weights(self, http: web.Request) -> web.Response:
        update = (await http.json())["update_info"]
        try:
            await self._in_thread(self._model.load, update["path"], update.get("tag", ""))
        except (OSError, ValueError, RuntimeError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({})

    async def _label(self, http: web.Request) -> web.Response:
        body = await http.json()
        self._version = str(body.get("weight_version") or body.get("new_version"))
        return web.json_response({})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        try:
            request = Request(body["token_ids"], body.get("sampling_params", {}), self._model)
        except (KeyError, TypeError, ValueError) as error:
            return web.json_response({"error": f"not a generate request: {error!r}"}, status=400)
        if len(request.prompt) + request.max_tokens > self._max_model_len:
            return web.json_response({"error": f"more than {self._max_model_len} tokens"}, status=400)
        self._in_flight.add(request)
        try:
            if body.get("stream"):
                return await self._stream(http, request)
            return web.json_response(await self._complete(request))
        finally:
            self._in_flight.remove(request)

    async def _complete(self, request: Request) -> dict[str, Any]:
        """Sample the whole turn. If the client disconnects, it stops between two tokens."""
        scores = await self._in_thread(request.prompt_logprobs) if request.wants_prompt_logprobs else None
        while request.finish_reason is None:
            await self._one_token(request)
        return {"choices": [request.choice()], "prompt_logprobs": scores}

    async def _stream(self, http: web.Request, request: Request) -> web.StreamResponse:
        """Send the first token at once, then pieces of `stream_interval` tokens, like vLLM."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        sent = 0
        while request.finish_reason is None:
            await self._one_token(request)
            made = request.made
            if request.finish_reason is not None or sent == 0 or made - sent >= request.stream_interval:
                event = json.dumps({"choices": [request.choice(sent)]})
                await response.write(f"data: {event}\n\n".encode())
                sent = made
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _one_token(self, request: Request) -> None:
        """Sample one token; wait while the server is paused, unless the request is aborted."""
        while not self._running.is_set() and request.finish_reason is None:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._running, self._aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if request.finish_reason is None:
            await self._in_thread(request.step, self._version)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        future: Future[Any] = self._compute.submit(work, *arguments)
        return await asyncio.wrap_future(future)


def main(arguments: list[str]) -> None:
    register_stacks()
    folder, host, port, max_model_len, *options = arguments
    model = TransformersModel(folder, returns_experts="experts" in options)
    server = Server(model, int(max_model_len), key_from_environment())
    with suppress(KeyboardInterrupt):
        web.run_app(
            server.application(),
            host=host,
            port=int(port),
            reuse_port=True,  # `keep_port` has it
            print=None,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,  # security: bodies without the key would be unpacked too
        )


if __name__ == "__main__":
    main(sys.argv[1:])
