"""A dashboard in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from roll_flash.dashboard.folders import Sources
from roll_flash.dashboard.guard import address, new_token
from roll_flash.dashboard.server import bind, make_app, make_server

STOP_TIMEOUT_S = 60.0
MOST_QUESTIONS = 500
"""Each waits `server.WAIT_S` for the index."""


@dataclass(frozen=True)
class Dashboard:
    port: int
    token: str

    def address(self, **query: Any) -> str:
        return address(self.port, self.token, **query)

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """A client that has the token's cookie."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, follow_redirects=True) as client:
            client.get("/", params={"token": self.token}).raise_for_status()
            yield client

    def get(self, path: str, *, once: bool = False, **query: Any) -> Any:
        """Return what the page would be told: like the page, ask again until the episodes are read, or only `once`."""
        with self.client() as client:
            for _ in range(MOST_QUESTIONS):
                answer = client.get(f"/api/{path}", params=query).raise_for_status().json()
                if once or not isinstance(answer, dict) or answer.get("is_complete", True):
                    return answer
        raise TimeoutError(f"{path}: the episodes were not read in {MOST_QUESTIONS} requests")


@contextmanager
def serving(*words: str | Path) -> Iterator[Dashboard]:
    token, bound = new_token(), bind(0)
    server = make_server(make_app(Sources([str(word) for word in words]), token))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield Dashboard(bound.getsockname()[1], token)
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
        bound.close()
        assert not thread.is_alive()
