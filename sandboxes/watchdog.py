"""Removes a controller's containers when the controller has died, even those it was just creating.

Runs as a process of its own with the standard library alone. An attached container removes itself when its controller
dies; one that was created but not yet started would stay. Usage: watchdog.py ENGINE-URL API-VERSION OWNER-LABEL, with a
pipe on stdin that the controller holds open; the byte `q` on it means that there is nothing to do.
"""

import http.client
import json
import os
import select
import signal
import socket
import sys
import time
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


def call(host: str, method: str, path: str) -> Any:
    if host.startswith("unix://"):
        connection: http.client.HTTPConnection = UnixConnection(host.removeprefix("unix://"))
    else:
        connection = http.client.HTTPConnection(urlsplit(host).netloc, timeout=10)
    try:
        connection.request(method, path)
        body = connection.getresponse().read()
        return json.loads(body) if body else None
    finally:
        connection.close()


def wait_for_end() -> bool:
    """True if the controller has died; False if it said that it is done."""
    parent = os.getppid()
    while True:
        ready, _, _ = select.select([0], [], [], 1.0)
        if ready:
            return os.read(0, 1) != b"q"
        if os.getppid() != parent:
            return True


def sweep(host: str, version: str, label: str) -> None:
    filters = quote(json.dumps({"label": [label]}))
    end, quiet_since = time.monotonic() + LONGEST_S, time.monotonic()
    while time.monotonic() < min(end, quiet_since + QUIET_S):
        try:
            for item in call(host, "GET", f"/v{version}/containers/json?all=1&filters={filters}") or []:
                call(host, "DELETE", f"/v{version}/containers/{item['Id']}?force=1&v=1")
                quiet_since = time.monotonic()
        except (OSError, http.client.HTTPException, ValueError) as error:
            print(f"roll-flash watchdog: {host}: {error!r}", file=sys.stderr)
        time.sleep(0.1)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if wait_for_end():
        sweep(*sys.argv[1:4])


if __name__ == "__main__":
    main()
