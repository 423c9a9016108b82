"""Removes the leftovers of a dead controller: its containers, the images of its snapshots, its scratch folders.

Runs as a separate process with the standard library only. An attached container removes itself when its controller
dies; a container that was created but not started would stay. `guard.py` is the controller's side: it writes
`+NAME IMAGE` before it requests a container (`+NAME -` for an image), `-NAME` after the answer, and `q` at the end.

    watchdog.py ENGINE-URL API-VERSION OWNER-LABEL CERTIFICATES FOLDERS SNAPSHOTS

CERTIFICATES: a folder or empty. FOLDERS: glob pattern of the owner's scratch folders. SNAPSHOTS: repository of its
images.
"""

import contextlib
import glob
import http.client
import json
import os
import select
import shutil
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

SWEEP_IDLE_S = 2.0
"""The sweep ends when it has found nothing new for this time in seconds."""
SWEEP_TIMEOUT_S = 60.0
"""Maximum duration of the sweep in seconds, if requested objects have neither appeared nor been ruled out."""
UNREACHABLE_S = 10.0
"""Seconds after which the sweep gives up on an engine that accepts no connection."""
POLL_S = 0.1
READY = b"ready\n"
FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError)
"""Errors of a request or of an invalid answer."""


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
        # Read now: the folder may be gone later.
        self._tls = _client_tls(Path(certificates)) if certificates else None

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request; return the status and the decoded JSON of the answer."""
        connection = self._connect()
        try:
            sent = json.dumps(body) if body is not None else None
            connection.request(method, f"/v{self._version}{path}", sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            return response.status, json.loads(answer) if answer else None
        finally:
            connection.close()

    def listed(self, path: str, **filters: str) -> list[Any]:
        wanted = quote(json.dumps({name: [value] for name, value in filters.items()}))
        status, found = self.call("GET", f"{path}?all=1&filters={wanted}")
        if status != 200:
            raise ValueError(f"GET {path}: {status}")
        return list(found or ())

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


class Journal:
    """Unanswered requests: names of containers with their images, names of images with `-`."""

    def __init__(self) -> None:
        self.pending: dict[str, str] = {}
        self._rest = b""

    def follow(self, owner: str) -> bool:
        """Read the controller's messages until it dies (True) or reports its end (False)."""
        while True:
            if not select.select([0], [], [], 1.0)[0]:
                if not _lives(owner):  # a child of the controller may hold the pipe open
                    return True
                continue
            piece = os.read(0, 1 << 16)
            if not piece:  # the controller is dying, or closed the pipe without `q`: then wait for its death
                while _lives(owner):
                    time.sleep(POLL_S)
                return True
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                if line == b"q":
                    return False
                self._note(line.decode())

    def _note(self, line: str) -> None:
        name, _, image = line[1:].partition(" ")
        if line.startswith("+"):
            self.pending[name] = image
        else:
            self.pending.pop(name, None)


def _lives(owner: str) -> bool:
    """Same as `owner.Owner.lives`."""
    _, pid, started = owner.split(":")
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" and fields[19] == started


class Sweep:
    """Removal of leftovers. `died` False: the controller ended normally; only pending requests are searched for."""

    def __init__(self, engine: Engine, label: str, died: bool, pending: dict[str, str], snapshots: str) -> None:
        self._engine = engine
        self._label = label
        self._died = died
        self._pending = pending
        self._snapshots = snapshots
        self._placeholders: set[str] = set()

    def run(self) -> None:
        now = quiet_since = reached = time.monotonic()
        end = now + SWEEP_TIMEOUT_S
        while now < min(end, reached + UNREACHABLE_S) and (self._pending or now < quiet_since + SWEEP_IDLE_S):
            try:
                if self._round():
                    quiet_since = time.monotonic()
                reached = time.monotonic()
            except (ConnectionRefusedError, FileNotFoundError):
                quiet_since = time.monotonic()  # the engine may be restarting
            except FAILURES:
                quiet_since = reached = time.monotonic()  # the engine is busy
            time.sleep(POLL_S)
            now = time.monotonic()
        for name in self._placeholders:
            with contextlib.suppress(*FAILURES):  # the next reaper finds the rest by the owner label
                self._engine.call("DELETE", f"/containers/{name}?force=1&v=1")

    def _round(self) -> bool:
        """Search once and remove what is found; True if anything was found."""
        found = False
        for item in self._engine.listed("/containers/json", label=self._label):
            found |= self._remove_container(item)
        for item in self._engine.listed("/images/json", label=self._label, reference=self._snapshots):
            found |= self._remove_image(item)
        for name, image in list(self._pending.items()):
            found |= image != "-" and self._take_name(name, image)
        return found

    def _remove_container(self, item: Any) -> bool:
        names = {str(name).lstrip("/") for name in item["Names"] or ()}
        if names & self._placeholders or not (self._died or names & self._pending.keys()):
            return False
        if item["State"] == "created":
            # If removed before it ran, an attached container keeps its connection in the engine forever.
            self._engine.call("POST", f"/containers/{item['Id']}/start")
        self._engine.call("DELETE", f"/containers/{item['Id']}?force=1&v=1")
        self._forget(names)
        return True

    def _remove_image(self, item: Any) -> bool:
        """Not by force: if a sandbox of another controller uses the image, that would remove only its name."""
        names = {name for name in item["RepoTags"] or () if self._died or name in self._pending}
        self._forget({name for name in names if self._engine.call("DELETE", f"/images/{name}")[0] in (200, 404)})
        return bool(names)

    def _take_name(self, name: str, image: str) -> bool:
        """Create a placeholder container with this name; True if the engine never began to create the requested one.

        The engine then refuses the request if it reads it later. If the creation has begun, the name is already
        reserved and the placeholder is refused.
        """
        mark, _, value = self._label.partition("=")
        body = {"Image": image, "Cmd": ["/none"], "Labels": {"roll-flash.sandbox": "1", mark: value}}
        status, _ = self._engine.call("POST", f"/containers/create?name={quote(name)}", body)
        if status == 201:
            self._placeholders.add(name)
        if status not in (201, 400, 404):
            return False
        self._forget({name})
        return True

    def _forget(self, names: set[str]) -> None:
        for name in names:
            self._pending.pop(name, None)


def leave_controller() -> None:
    """Detach from the controller: a program that ends a controller may also end its children (Ray does)."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    leave_controller()
    host, version, label, certificates, folders, snapshots = sys.argv[1:7]
    engine, journal = Engine(host, version, certificates), Journal()
    os.write(1, READY)
    died = journal.follow(label.partition("=")[2])
    if died:
        for folder in glob.glob(folders):
            shutil.rmtree(folder, ignore_errors=True)
    if died or journal.pending:
        Sweep(engine, label, died, journal.pending, snapshots).run()


if __name__ == "__main__":
    main()
