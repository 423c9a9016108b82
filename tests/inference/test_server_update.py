"""How a server is asked to take new weights: made ready first, then exchanged in a pause. The server is a stand-in."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest

from roll_flash.engines.inference import ServerUpdate, StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.inference.servers.control import ServerControl
from roll_flash.inference.servers.prepare import prepare_weights
from roll_flash.inference.servers.update import update_server

PREPARE_S = 0.3


class PreparingServer:
    """Holds the pipe open for `PREPARE_S`, as the plug-in in vLLM does. Fails when asked to load, if it `fails`."""

    prepares_weights = True
    endpoint = "http://a"
    is_running = True
    version = 0

    def __init__(self, prepare_s: float = PREPARE_S, fails: bool = False, cannot_end: bool = False) -> None:
        self.asked: list[str] = []
        self.timeouts_s: dict[str, float] = {}
        self._prepare_s = prepare_s
        self._fails = fails
        self._cannot_end = cannot_end
        self._preparing: list[asyncio.Task[None]] = []

    async def prepare(self, weights: StagedWeights) -> None:
        await prepare_weights(cast(ServerControl, self), weights)

    async def post(self, path: str, body: Any = None, *, timeout_s: float = 600) -> Any:
        path = path.partition("?")[0]
        self.timeouts_s[path] = timeout_s
        info = (body or {}).get("update_info", {})
        self.asked.append("prepare" if "ready_pipe" in info else path)
        if "ready_pipe" in info:
            self._preparing.append(asyncio.create_task(self._prepare(os.open(info["ready_pipe"], os.O_WRONLY))))
        elif path == "/update_weights" and self._fails:
            raise InferenceError("the weights do not fit the model")
        elif path == "/finish_weight_update" and self._cannot_end:
            raise InferenceError("no answer")
        return {"success": True}

    async def _prepare(self, ready_pipe: int) -> None:
        await asyncio.sleep(self._prepare_s)
        os.close(ready_pipe)


def update(server: PreparingServer, give_up_after_s: float = 30.0) -> ServerUpdate:
    async def main() -> ServerUpdate:
        weights = StagedWeights(4, "/weights", 8)
        async with asyncio.timeout(give_up_after_s):
            return await update_server(cast(ServerControl, server), weights, "keep")

    return asyncio.run(main())


def test_generation_goes_on_until_the_new_weights_are_ready() -> None:
    server = PreparingServer()
    done = update(server)
    assert server.asked[:4] == ["/start_weight_update", "prepare", "/pause", "/update_weights"]
    assert server.asked[-1] == "/resume"
    assert done.total_s >= PREPARE_S > done.paused_s
    assert server.version == 4


def test_weights_that_could_not_be_made_ready_are_an_error_and_the_server_goes_on() -> None:
    server = PreparingServer(fails=True)
    with pytest.raises(InferenceError, match="do not fit"):
        update(server)
    assert server.asked[-1] == "/resume"
    assert server.version == 0


def test_an_update_that_is_given_up_is_ended_so_that_the_next_one_can_begin() -> None:
    server = PreparingServer(prepare_s=20)
    with pytest.raises(TimeoutError):
        update(server, give_up_after_s=0.3)
    assert server.asked == ["/start_weight_update", "prepare", "/finish_weight_update"]
    assert server.timeouts_s["/finish_weight_update"] <= 10, "the end of a run does not wait for a server that hangs"


def test_an_update_that_is_cancelled_stays_cancelled_when_its_server_does_not_answer() -> None:
    with pytest.raises(TimeoutError):
        update(PreparingServer(prepare_s=20, cannot_end=True), give_up_after_s=0.3)
