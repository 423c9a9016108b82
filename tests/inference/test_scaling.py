"""`roll-flash scale` while a run runs: the request goes through the run's folder, servers and workers come and go.

Servers and workers are stand-ins.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll_flash.engines.inference import ClientSpec
from roll_flash.errors import ConfigError, PlacementError, RunError
from roll_flash.run import scale_request
from roll_flash.run.scale_request import ANSWER, REQUEST, ask_to_scale
from roll_flash.system import elastic
from roll_flash.system.elastic import ElasticParts

from .test_dropped_servers import IN_MEMORY, Room, play
from .test_supervision import StandIn

ROOM_FOR_WORKERS = 2


class Server(StandIn):
    def __init__(self, index: int, events: list[str]) -> None:
        super().__init__()
        self.index, self.name, self.endpoint = index, f"server {index}", f"http://{index}"
        self._events = events

    async def close(self) -> None:
        self._events.append(f"{self.name} ends")
        await super().close()


class Fleet:
    """Workers that are told which servers there are."""

    def __init__(self, events: list[str]) -> None:
        self.size = 1
        self._events = events

    async def use(self, spec: ClientSpec) -> None:
        self._events.append(f"{spec.clients} worker(s) know {' '.join(spec.endpoints)}")

    async def resize(self, workers: int) -> None:
        if workers > ROOM_FOR_WORKERS:
            raise PlacementError("worker 2 needs 1 CPU, and no node has that free")
        self.size = workers


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that is running: its lock is held."""
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path


def test_a_running_run_gets_more_and_fewer_servers_and_workers(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    (run_folder / "config.json").write_text("{}")  # the model's folder too
    monkeypatch.setattr(elastic, "FOLLOW_EVERY_S", 0.01)
    monkeypatch.setattr(scale_request, "ANSWER_POLL_S", 0.01)

    def room() -> Room:
        made = Room(1, monkeypatch, run_folder)
        made.servers[:] = [Server(index, events) for index in range(2)]
        made.engine._servers = [made.engine._new_server(0)]
        return made

    async def ask(servers: int | None, workers: int | None) -> str:
        return await asyncio.to_thread(ask_to_scale, run_folder, servers, workers, 10.0)

    async def act(room: Room) -> None:
        await room.engine.publish(IN_MEMORY)
        notes: list[str] = []
        fleet: Any = Fleet(events)
        parts = ElasticParts(room.engine, fleet, room.engine.client_spec(), run_folder, notes.append)
        running = asyncio.create_task(parts.run())
        try:
            assert await ask(2, 2) == "2 server(s) and 2 worker(s) now"
            assert room.taken == [(0, 1), (1, 1)], "a new server has the newest weights"
            assert await ask(1, None) == "1 server(s) and 2 worker(s) now"
            with pytest.raises(RunError, match=r"^worker 2 needs 1 CPU, and no node has that free$"):
                await ask(None, 3)
            assert not running.done()
            assert "scaling: 1 server(s) and 2 worker(s) now" in notes
        finally:
            running.cancel()

    play(room, act)
    assert events == [
        "1 worker(s) know http://0 http://1",
        "2 worker(s) know http://0 http://1",
        "2 worker(s) know http://0",
        "server 1 ends",
        "server 0 ends",
    ]
    assert not (run_folder / REQUEST).exists()


def test_a_run_that_is_not_running_cannot_be_scaled(tmp_path: Path) -> None:
    for lock in (False, True):
        if lock:
            (tmp_path / ".lock").touch()
        with pytest.raises(ConfigError, match="no run is running there; start one with roll-flash train"):
            ask_to_scale(tmp_path, 2, None, 1.0)
    assert not (tmp_path / REQUEST).exists()


def test_a_run_that_does_not_answer_is_said_and_the_request_is_withdrawn(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_request, "ANSWER_POLL_S", 0.01)
    (run_folder / ANSWER).write_text('{"id": "of another request", "text": "3 server(s)", "done": true}')
    with pytest.raises(RunError, match=r"the run did not answer within 0\.1 s; its log says why"):
        ask_to_scale(run_folder, 2, None, 0.1)
    assert not (run_folder / REQUEST).exists()
