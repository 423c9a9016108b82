"""`network="allowlist"`: only the hosts that the spec names are reached, through the controller. All on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from abuse import within
from conftest import need
from test_pool import until

from roll_flash.sandboxes import Sandbox, SandboxSpec
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.network import egress
from roll_flash.sandboxes.network.allowlist import Address, is_allowed, is_public
from roll_flash.sandboxes.network.relay import RelayedConnection

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

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

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


def test_what_is_run_after_all_was_killed_has_the_proxy(provider: str, port: int) -> None:
    """As the tests of a task do, which may install packages first."""

    async def run(sandbox: Sandbox) -> None:
        for _ in range(5):
            await sandbox.kill_all()
            assert (await fetch(sandbox, port, "yes"))[-1] == f"HTTP/1.0 200 OK {len(BODY)}"

    within(provider, run, SandboxSpec(network="allowlist", allow=(f"127.0.0.1:{port}",)))


OWN_SERVER = """
import http.server, threading, urllib.request
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8123), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for host in ("127.0.0.1", "localhost"):
    print(urllib.request.urlopen(f"http://{host}:8123/").status)
"""


@pytest.fixture
def with_urllib() -> str:
    """A provider whose Python has all modules: that of the default image has no client for HTTP."""
    need("local")
    return "local"


def test_a_program_reaches_a_server_in_its_own_sandbox_without_the_proxy(with_urllib: str) -> None:
    """The tests of a task that asked a server on localhost got a 403, whatever a model had done."""

    async def run(sandbox: Sandbox) -> None:
        said = await sandbox.exec(["python3", "-c", OWN_SERVER], timeout=20)
        assert said.stdout == b"200\n200\n", said.stderr_text

    within(with_urllib, run, SandboxSpec(network="allowlist", allow=("packages.example.org:443",)))


def test_a_loopback_address_on_the_list_is_that_of_the_controllers_machine(with_urllib: str, port: int) -> None:
    code = "import sys, urllib.request as r; print(len(r.urlopen(sys.argv[1]).read()))"

    async def run(sandbox: Sandbox) -> None:
        said = await sandbox.exec(["python3", "-c", code, f"http://127.0.0.1:{port}/"], timeout=20)
        assert said.stdout_text == f"{len(BODY)}\n", said.stderr_text

    within(with_urllib, run, SandboxSpec(network="allowlist", allow=(f"127.0.0.0/8:{port}",)))


UPLOAD = r"""
import socket, sys
size = 1_000_000
proxy = socket.create_connection(("127.0.0.1", 3128), 10)
head = f"POST http://127.0.0.1:{sys.argv[1]}/a HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
proxy.sendall(head.encode() + b"x" * size)
print(proxy.recv(65536).split(b"\r\n")[0].decode())
"""


def test_a_body_may_come_with_its_head_and_be_longer_than_any_head(provider: str, port: int) -> None:
    async def run(sandbox: Sandbox) -> None:
        said = await sandbox.exec(["python3", "-c", UPLOAD, str(port)], timeout=20)
        assert said.stdout == b"HTTP/1.0 200 OK\n", said.stderr_text

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


SLOW = r"""
import socket, sys
held = []
for _ in range(int(sys.argv[1])):
    held.append(socket.create_connection(("127.0.0.1", 3128), 30))
    held[-1].sendall(b"CONNECT exam")
""" + FETCH.replace("sys.argv[1:]", "sys.argv[2:]")


def test_slow_connections_do_not_close_the_proxy_to_others(provider: str, port: int) -> None:
    """More than the relay takes at a time, twice over; each has begun a request and goes on with it some other day."""

    async def run(sandbox: Sandbox) -> None:
        slow = ["python3", "-c", SLOW, "300", "127.0.0.1", str(port), "yes"]
        result = await sandbox.exec(slow, timeout=60)
        assert result.stdout_text.splitlines()[-1:] == [f"HTTP/1.0 200 OK {len(BODY)}"], result.stderr_text
        assert (await fetch(sandbox, port, "yes"))[-1] == f"HTTP/1.0 200 OK {len(BODY)}"

    within(provider, run, SandboxSpec(network="allowlist", allow=(f"127.0.0.1:{port}",)))


ASKING = r"""
import socket
asking = [socket.create_connection(("127.0.0.1", 3128), 10) for _ in range(40)]
for number, proxy in enumerate(asking):
    proxy.sendall(f"CONNECT name{number}.test:443 HTTP/1.1\r\n\r\n".encode())
"""


def test_names_that_nobody_waits_for_any_more_are_not_looked_up(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow name server, and a program that asks for more names than it can be asked for, then gives up."""
    asked: list[str] = []

    def look_up_slowly(host: str, port: int) -> list[Address]:
        asked.append(host)
        time.sleep(0.3)
        raise OSError("no such name")

    monkeypatch.setattr(egress, "resolve", look_up_slowly)

    async def run(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["python3", "-c", ASKING], timeout=30)).ok
        await until(lambda: len(asked) > 0)
        await sandbox.close()
        closed = len(asked)
        await asyncio.sleep(1)
        assert len(asked) <= closed + egress.LOOKUPS_OF_ONE

    within(provider, run, SandboxSpec(network="allowlist", allow=("*.test:443",)), must_live=False)


RESETTING = r"""
import socket, struct, sys
for _ in range(int(sys.argv[2])):
    proxy = socket.create_connection(("127.0.0.1", 3128), 10)
    proxy.sendall(f"CONNECT 127.0.0.1:{sys.argv[1]} HTTP/1.1\r\n\r\n".encode())
    proxy.recv(65536)
    proxy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    proxy.close()
"""


def test_connections_that_programs_inside_give_up_do_not_add_up(provider: str) -> None:
    """The server at the other end sends more than anybody reads, and never closes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                taken.append(connection)
                connection.setblocking(False)
                with contextlib.suppress(OSError):  # it takes no more now, or was given up already
                    connection.sendall(b"x" * 4_000_000)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]

        async def run(sandbox: Sandbox) -> None:
            assert isinstance(sandbox, AgentSandbox)
            assert sandbox._egress is not None
            relay = sandbox._egress._relay
            await sandbox.exec(["python3", "-c", RESETTING, str(port), "20"], timeout=30)
            await until(lambda: not relay._connections)

        try:
            within(provider, run, SandboxSpec(network="allowlist", allow=(f"127.0.0.1:{port}",)))
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


def test_a_host_that_vanishes_is_no_error_of_ours() -> None:
    """Nobody waits for the task of a connection: its error would be a traceback in the log."""

    async def send(frame: bytes) -> None: ...

    async def lose_the_host() -> None:
        accepted: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda reader, writer: accepted.append(writer), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            reader.set_exception(TimeoutError(110, "Connection timed out"))
            proxy = egress.Egress(lambda command: pytest.fail("nothing is started"), ())
            await proxy._join(RelayedConnection(1, send), reader, writer, b"GET / HTTP/1.1\r\n\r\n", b"")
            accepted[0].close()  # from Python 3.12 on, a server's end waits for its connections

    asyncio.run(asyncio.wait_for(lose_the_host(), 20))


def test_a_name_that_leads_to_a_private_address_is_refused_unless_that_is_named_too(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Names are looked up once: the second answer, as of a name that is bound anew, is never asked for."""
    answers = iter(["127.0.0.1", "127.0.0.1", "192.0.2.1"])
    monkeypatch.setattr(egress, "resolve", lambda host, port: [ipaddress.ip_address(next(answers))])
    name = f"rebind.example:{port}"

    async def refused(sandbox: Sandbox) -> None:
        assert "403" in (await fetch(sandbox, port, "yes", "rebind.example"))[0]

    async def reached(sandbox: Sandbox) -> None:
        assert (await fetch(sandbox, port, "yes", "rebind.example"))[-1] == f"HTTP/1.0 200 OK {len(BODY)}"

    need("local")
    within("local", refused, SandboxSpec(network="allowlist", allow=(name,)))
    assert f"{name} leads to 127.0.0.1, not public; allow 127.0.0.1:{port} too" in caplog.text
    within("local", reached, SandboxSpec(network="allowlist", allow=(name, f"127.0.0.0/8:{port}")))
    assert next(answers) == "192.0.2.1"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("64:ff9b::5db8:d70e", True),
        ("::ffff:93.184.215.14", True),
        ("0.0.0.0", False),
        ("127.9.9.9", False),
        ("10.0.0.1", False),
        ("172.31.255.255", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b:1::a00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:a00:1::1", False),
        ("fe80::1", False),
        ("fec0::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("2001:db8::1", False),
    ],
)
def test_what_is_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_this_machines_own_address_is_known_whatever_network_it_is_of() -> None:
    assert egress.is_local_address(ipaddress.ip_address("127.0.0.1"))
    assert not egress.is_local_address(ipaddress.ip_address("192.0.2.1"))


@pytest.mark.parametrize("form", ["1.1.1.1", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::1"])
def test_this_machines_own_address_is_known_in_each_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway from IPv6 to IPv4 would lead back here."""
    monkeypatch.setattr(egress, "is_local_address", lambda address: str(address) == "1.1.1.1")
    assert not egress.may_reach(["a.example:80"], ipaddress.ip_address(form), 80)
    monkeypatch.setattr(egress, "is_local_address", lambda address: str(address) == "1.1.1.2")
    assert egress.may_reach(["a.example:80"], ipaddress.ip_address(form), 80)


@pytest.mark.parametrize(
    "entry",
    [
        *("http://a:80", "a:99999", "*.:443", "a:0", "a", "a:", ":80", "*:443", "a.*.org:443", "**.a:1", "a..b:80"),
        *("a.:443", ".a:443", "a b:80", "a/b:80", "-a:80", "::1:80", "1.2.3:80", "[a]:80", "b\u00fccher.example:443"),
        *("127.0.0.1/33:80", "10.0.0.1/8:80", "a:\u0664\u0664\u0663", "a:8_0", "x" * 64 + ":80", "u@a:80", "a\n:80"),
    ],
)
def test_an_entry_that_names_no_host_and_port_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="allow: ") as caught:
        SandboxSpec(network="allowlist", allow=(entry,))
    assert f"allow: {entry!r}" in str(caught.value)


def test_upper_case_ipv6_and_networks_are_understood() -> None:
    allow = ("Packages.Example.ORG:443", "[2001:db8::1]:80", "10.0.0.0/8:3128", "under_score.example:1")
    SandboxSpec(network="allowlist", allow=allow)
    for host, port in (("packages.example.org", 443), ("[2001:db8:0::1]", 80), ("10.9.8.7", 3128)):
        assert is_allowed(allow, host, port)
        assert not is_allowed(allow, host, port + 1)
    assert not is_allowed(allow, "11.0.0.1", 3128)
    assert not is_allowed(allow, "0x0a090807", 3128)


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://a:80/x HTTP/1.1\r\nHost: other\r\nX: y",
        b"GET http://a:80/x HTTP/1.1\r\nhOST: other\r\nX: y\r\nProxy-Authorization: z",
    ],
)
def test_a_request_reaches_the_virtual_host_that_was_allowed(head: bytes) -> None:
    assert egress._target(head) == ("a", 80, b"GET /x HTTP/1.1\r\nHost: a:80\r\nX: y\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize("where", ["other[::1]:80", "[::1]other:80", "me@other[::1]:80", "other,[::1]:0080"])
def test_a_url_cannot_name_another_host_around_an_allowed_address(where: str) -> None:
    """A server of several hosts would answer for the one in `Host`."""
    try:
        host, port, first = egress._target(f"GET http://{where}/x HTTP/1.1".encode())
    except ValueError:  # newer Pythons refuse such a URL
        return
    assert (host, port) == ("::1", 80)
    assert first == b"GET /x HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("field", [b" folded", b"X: y\nHost: other", b"Host : other", b"X\0: y", b"no colon", b": y"])
def test_a_head_that_others_may_read_differently_is_none(field: bytes) -> None:
    with pytest.raises(ValueError, match="no request head"):
        egress._target(b"GET http://a:80/x HTTP/1.1\r\n" + field)
