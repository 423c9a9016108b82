"""`roll-flash serve` with the tiny model, for the real client of Tinker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roll_flash.serving import GatewayRequest, RunningGateway, open_gateway

START_S = 600.0
"""Beside other work a minute becomes ten."""


@contextmanager
def running(folder: Path) -> Iterator[RunningGateway]:
    """Serve in a thread of its own, as clients block theirs."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    found: list[RunningGateway] = []
    is_up = threading.Event()

    async def serve() -> None:
        request = GatewayRequest(
            model="tiny", port=0, out=str(folder), overrides=("inference.engine=transformers",), trains=True
        )
        try:
            async with open_gateway(request, note=lambda _: None) as gateway:
                found.append(gateway)
                is_up.set()
                await stop.wait()
        finally:
            is_up.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_up.wait(START_S)
        assert found, "the server did not start; its error is above"
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)


@pytest.fixture(scope="session")
def server(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running(tmp_path_factory.mktemp("serve")) as gateway:
        yield gateway


@pytest.fixture
def address(server: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.api_key)
    # tinker-cookbook asks for a list of prices on the web; nothing there may be reached from a test.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
