"""Removes a controller's containers when the controller has died, even those it was just creating.

Runs as a process of its own with the standard library alone. An attached container removes itself when its controller
dies; one that was created but not yet started would stay. Usage: watchdog.py ENGINE-URL API-VERSION OWNER-LABEL
CERTIFICATES (a folder, or empty), with a pipe on stdin that the controller holds open; the byte `q` on it means that
there is nothing to do.
"""

import http.client
import json
import os
import select
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

QUIET_S = 2.0
"""The sweep ends when for so long nothing new has come up (the engine may still be creating what was asked for)."""
LONGEST_S = 60.0


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


class Engine:
    def __init__(self, host: str, version: str, certificates: str) -> None:
        self.host = host
        self._version = version
        # Read now: the folder may be gone by the time that it is needed.
        self._tls = _client_tls(Path(certificates)) if certificates else None

    def call(self, method: str, path: str) -> Any:
        connection = self._connect()
        try:
            connection.request(method, f"/v{self._version}{path}")
            body = connection.getresponse().read()
            return json.loads(body) if body else None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self.host.startswith("unix://"):
            return UnixConnection(self.host.removeprefix("unix://"))
        where = urlsplit(self.host).netloc
        if self._tls is not None:
            return http.client.HTTPSConnection(where, timeout=10, context=self._tls)
        return http.client.HTTPConnection(where, timeout=10)


def _client_tls(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    return context


def wait_for_end() -> bool:
    """True if the controller has died; False if it said that it is done."""
    parent = os.getppid()
    while True:
        ready, _, _ = select.select([0], [], [], 1.0)
        if ready:
            return os.read(0, 1) != b"q"
        if os.getppid() != parent:
            return True


def sweep(engine: Engine, label: str) -> None:
    filters = quote(json.dumps({"label": [label]}))
    end, quiet_since = time.monotonic() + LONGEST_S, time.monotonic()
    while time.monotonic() < min(end, quiet_since + QUIET_S):
        try:
            for item in engine.call("GET", f"/containers/json?all=1&filters={filters}") or []:
                if item["State"] == "created":
                    # Removed without having run, an attached container keeps its connection in the engine for ever.
                    engine.call("POST", f"/containers/{item['Id']}/start")
                engine.call("DELETE", f"/containers/{item['Id']}?force=1&v=1")
                quiet_since = time.monotonic()
        except (OSError, http.client.HTTPException, ValueError) as error:
            print(f"roll-flash watchdog: {engine.host}: {error!r}", file=sys.stderr)
        time.sleep(0.1)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    host, version, label, certificates = sys.argv[1:5]
    engine = Engine(host, version, certificates)
    if wait_for_end():
        sweep(engine, label)


if __name__ == "__main__":
    main()
