"""Who may read the dashboard: only a browser of this machine with the token, and no page of another origin."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from served import Dashboard, serving
from written_run import RecordedRun

from roll_flash.dashboard.server import bind
from roll_flash.errors import ConfigError


@pytest.fixture
def dashboard(run: RecordedRun) -> Iterator[Dashboard]:
    with serving(run.folder) as dashboard:
        yield dashboard


def ask(dashboard: Dashboard, path: str = "/api/runs", method: str = "GET", **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, f"http://127.0.0.1:{dashboard.port}{path}", headers=names, timeout=60)


def test_without_the_token_nothing_is_shown_and_one_line_says_what_to_do(dashboard: Dashboard) -> None:
    for path in ("/", "/api/runs", "/pages/js/app.js", "/?token=wrong", "/?token="):
        answer = ask(dashboard, path)
        assert answer.status_code == 401
        assert answer.text == "open the address that `roll-flash dash` printed: it has a token that this one lacks\n"


def test_the_token_leaves_the_address_and_the_rest_of_it_stays(dashboard: Dashboard) -> None:
    answer = ask(dashboard, f"/?token={dashboard.token}&run=recorded&run=other&view=compare")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/?run=recorded&run=other&view=compare"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ask(dashboard, cookie=cookie.partition(";")[0]).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:7007", "", "[::2]", "0.0.0.0"]
)
def test_a_name_that_someone_pointed_to_this_machine_is_refused(dashboard: Dashboard, host: str) -> None:
    assert ask(dashboard, f"/?token={dashboard.token}", host=host).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1", "[::1]", "[::1]:8000"])
def test_a_tunnel_may_have_another_port(dashboard: Dashboard, host: str) -> None:
    assert ask(dashboard, f"/?token={dashboard.token}", host=host).status_code == 303


def test_a_page_of_another_origin_may_not_ask(dashboard: Dashboard) -> None:
    for site in ("cross-site", "same-site"):
        assert ask(dashboard, f"/?token={dashboard.token}", sec_fetch_site=site).status_code == 403


def test_it_only_reads(dashboard: Dashboard) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(dashboard, f"/api/runs?token={dashboard.token}", method).status_code == 405


def test_every_answer_forbids_inline_scripts_and_other_hosts(dashboard: Dashboard) -> None:
    with dashboard.client() as client:
        answers = [client.get(path) for path in ("/", "/api/runs", "/pages/style.css", "/none", "/pages/../server.py")]
    for answer in (*answers, ask(dashboard)):
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
    assert [answer.status_code for answer in answers] == [200, 200, 200, 404, 404]


@pytest.mark.parametrize("path", ["/pages/..%2f..%2fcli/main.py", "/pages/%2e%2e/server.py", "/pages//etc/passwd"])
def test_no_other_file_of_the_machine_can_be_read(dashboard: Dashboard, path: str) -> None:
    with dashboard.client() as client, socket.create_connection(("127.0.0.1", dashboard.port)) as plain:
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        plain.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n".encode()
        )
        assert plain.makefile("rb").readline().split()[1] == b"404"


def test_it_listens_on_this_machine_only(dashboard: Dashboard) -> None:
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        own = "127.0.0.2"  # also of this machine, and not the address it listens on
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own, dashboard.port), timeout=10)


def test_two_dashboards_on_one_port_are_refused_in_one_line(dashboard: Dashboard) -> None:
    with pytest.raises(ConfigError, match=rf"^port {dashboard.port}: Address already in use; .* --port$"):
        bind(dashboard.port)
    with pytest.raises(ConfigError, match=r"^port 70000: [^?]+; choose another with --port$"):
        bind(70000)
