"""A hub on loopback that speaks as much of the API of huggingface.co as huggingface_hub needs to load and to upload."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_a_test"


class Hub:
    """Repositories by `ORG/NAME`: for each revision, a commit and its files."""

    def __init__(self) -> None:
        self.url = ""
        self.commits: dict[str, dict[str, str]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        """Content by commit."""
        self.gated: set[str] = set()
        self.private: dict[str, bool] = {}
        self.asked: list[str] = []
        """Method and path of every request."""
        self.breaks_after: int | None = None
        """Bytes after which the next download of a larger file breaks off."""
        self.broken: set[str] = set()
        """Names of files that are never sent."""
        self.starts: list[int] = []
        """First byte of each download that did not begin with 0."""
        self.status: int | None = None
        """Answer everything with this status."""
        self.objects: dict[str, bytes] = {}
        """Uploaded large files by their SHA-256."""

    def add(self, name: str, folder: Path | dict[str, bytes], revision: str = "main") -> str:
        """Add a commit with the files of a folder; return it."""
        if isinstance(folder, Path):
            folder = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        parts = b"".join(part for item in sorted(folder.items()) for part in (item[0].encode(), item[1]))
        commit = hashlib.sha1(parts + revision.encode()).hexdigest()
        self.commits.setdefault(name, {})[revision] = commit
        self.files[commit] = folder
        return commit

    def downloads(self) -> list[str]:
        """Names of the files that were downloaded, in order."""
        return [
            path.rsplit("/", 1)[1]
            for method, path in map(str.split, self.asked)
            if method == "GET" and "/resolve/" in path
        ]


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    do_GET = do_POST = do_PUT = do_HEAD

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.status is not None:
            return self._send(self.hub.status, b"{}")
        for pattern, answer in _ROUTES:
            if (match := re.fullmatch(pattern, path)) and self.command in answer.__name__.upper():
                return answer(self, **match.groupdict())
        self._refuse(404, "EntryNotFound")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), Content_Type="application/json")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", X_Error_Code=code)

    def _commit(self, name: str, revision: str | None) -> str | None:
        commits = self.hub.commits.get(name)
        if commits is None:
            self._refuse(404, "RepoNotFound")
            return None
        found = revision if revision in commits.values() else commits.get(revision or "main")
        if found is None:
            self._refuse(404, "RevisionNotFound")
        return found

    def get_about(self, name: str, revision: str | None = None) -> None:
        if commit := self._commit(name, revision):
            files = [{"rfilename": file, "size": len(data)} for file, data in self.hub.files[commit].items()]
            self._json({"id": name, "sha": commit, "private": self.hub.private.get(name, False), "siblings": files})

    def get_head_file(self, name: str, revision: str, file: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        if name in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
        data = self.hub.files[commit].get(file)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        if self.command == "GET" and file in self.hub.broken:
            return self._send(503, b"")
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.hub.starts.append(start)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._write_part(data, start)

    def _write_part(self, data: bytes, start: int) -> None:
        breaks_at = self.hub.breaks_after
        if breaks_at is not None and len(data) > breaks_at:
            self.hub.breaks_after = None
            self.wfile.write(data[start:breaks_at])
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def post_create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.commits:
            return self._send(409, json.dumps({"url": f"{self.hub.url}/{name}"}).encode())
        self.hub.private[name] = asked.get("visibility", "private") == "private"
        self.hub.add(name, {})
        self._json({"url": f"{self.hub.url}/{name}"})

    def post_preupload(self, name: str, revision: str) -> None:
        files = json.loads(self.body)["files"]
        modes = [{"path": each["path"], "shouldIgnore": False, "uploadMode": _mode(each["path"])} for each in files]
        self._json({"files": modes, "commitOid": self.hub.commits[name][revision]})

    def get_tree(self, name: str, revision: str) -> None:
        if commit := self._commit(name, revision):
            files = self.hub.files[commit].items()
            self._json([{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files])

    def post_batch(self, name: str) -> None:
        objects = json.loads(self.body)["objects"]
        upload = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/objects/{each['oid']}"}}} for each in objects
        ]
        self._json({"transfer": "basic", "objects": upload})

    def put_object(self, digest: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == digest
        self.hub.objects[digest] = self.body
        self._send(200, b"")

    def post_commit(self, name: str, revision: str) -> None:
        files = dict(self.hub.files[self.hub.commits[name][revision]])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.add(name, files, revision)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit, "success": True})

    def post_yaml(self) -> None:
        self._json({"errors": [], "warnings": []})

    def get_whoami(self) -> None:
        self._json({"name": "me"})


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


_NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
_ROUTES = [
    (rf"/api/models/{_NAME}", _Answers.get_about),
    (rf"/api/models/{_NAME}/revision/(?P<revision>.+)", _Answers.get_about),
    (rf"/api/models/{_NAME}/tree/(?P<revision>[^/]+)", _Answers.get_tree),
    (rf"/api/models/{_NAME}/preupload/(?P<revision>.+)", _Answers.post_preupload),
    (rf"/api/models/{_NAME}/commit/(?P<revision>.+)", _Answers.post_commit),
    (r"/api/repos/create", _Answers.post_create),
    (r"/api/validate-yaml", _Answers.post_yaml),
    (r"/api/whoami-v2", _Answers.get_whoami),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Answers.post_batch),
    (r"/objects/(?P<digest>\w+)", _Answers.put_object),
    (rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", _Answers.get_head_file),
]


@contextmanager
def open_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Start a hub and make huggingface_hub use it, with an empty cache."""
    from huggingface_hub import constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    settings = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,  # the other way to load and upload large files, which this hub does not have
        "HF_TOKEN_PATH": str(cache / "token"),
    }
    for key, value in settings.items():
        monkeypatch.setattr(constants, key, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
