"""`network="allowlist"`: only the hosts that the spec names are reached, through the controller. All on loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from abuse import within
from roll_flash.sandboxes import Sandbox, SandboxSpec
from roll_flash.sandboxes.egress import is_allowed

FETCH = r"""
import socket, sys
host, port, tunnel = sys.argv[1:]
proxy = socket.create_connection(("127.0.0.1", 3128), 10)
if tunnel == "yes":
    proxy.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode())
    print(proxy.recv(4096).split(b"\r\n")[0].decode())
    proxy.sendall(b"GET /a HTTP/1.0\r\n\r\n")
else:
    proxy.sendall(f"GET http://{host}:{port}/a HTTP/1.1\r\nHost: x\r\n\r\n".encode())
data = b""
while piece := proxy.recv(65536):
    data += piece
print(data.split(b"\r\n")[0].decode(), len(data.partition(b"\r\n\r\n")[2]))
"""
BODY = b"x" * 3_000_000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


async def fetch(sandbox: Sandbox, port: int, tunnel: str, host: str = "127.0.0.1") -> list[str]:
    result = await sandbox.exec(["python3", "-c", FETCH, host, str(port), tunnel], timeout=20)
    return (result.stdout_text + result.stderr_text).splitlines()


@pytest.mark.parametrize("tunnel", ["yes", "no"])
def test_a_host_on_the_list_is_reached_and_no_other(provider: str, port: int, tunnel: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        assert (await fetch(sandbox, port, tunnel))[-1] == f"HTTP/1.0 200 OK {len(BODY)}"
        assert "403 Forbidden" in (await fetch(sandbox, port + 1, tunnel))[0]
        assert "403 Forbidden" in (await fetch(sandbox, port, tunnel, "localhost"))[0]
        assert (await sandbox.exec("echo $HTTPS_PROXY")).stdout == b"http://127.0.0.1:3128\n"
        devices = (await sandbox.exec("tail -n +3 /proc/net/dev")).stdout_text
        assert devices.split()[0] == "lo:"
        assert devices.count(":") == 1

    within(provider, run, SandboxSpec(network="allowlist", allow=(f"127.0.0.1:{port}",)))


def test_the_proxy_comes_back_after_code_inside_has_killed_it(provider: str, port: int) -> None:
    async def run(sandbox: Sandbox) -> None:
        await sandbox.exec("kill -9 -1")
        end = time.monotonic() + 60
        while (seen := await fetch(sandbox, port, "yes"))[-1:] != [f"HTTP/1.0 200 OK {len(BODY)}"]:
            assert time.monotonic() < end, seen
            await asyncio.sleep(0.2)

    within(provider, run, SandboxSpec(network="allowlist", allow=(f"127.0.0.1:{port}",)))


def test_garbage_for_the_proxy_is_refused(provider: str) -> None:
    code = (
        "import socket; s=socket.create_connection(('127.0.0.1', 3128)); s.sendall(b'\\xff' * 40000); print(s.recv(12))"
    )

    async def run(sandbox: Sandbox) -> None:
        assert b"502" in (await sandbox.exec(["python3", "-c", code], timeout=10)).stdout

    within(provider, run, SandboxSpec(network="allowlist", allow=("127.0.0.1:1",)))


@pytest.mark.parametrize(
    ("host", "port", "allowed"),
    [
        ("packages.example.org", 443, True),
        ("Packages.Example.org.", 443, True),
        ("packages.example.org", 80, False),
        ("evilpackages.example.org", 443, False),
        ("a.example.com", 443, True),
        ("a.b.example.com", 443, True),
        ("example.com", 443, False),
        ("badexample.com", 443, False),
        ("127.0.0.1", 443, False),
    ],
)
def test_names_are_compared_whole(host: str, port: int, allowed: bool) -> None:
    assert is_allowed(("packages.example.org:443", "*.example.com:443"), host, port) is allowed
