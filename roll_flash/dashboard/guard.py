"""Who may talk to the dashboard: a browser on this machine that was given the token, and no page of another origin.

Every answer carries a content security policy without inline script: should text of a model ever reach a page as
markup, nothing of it runs and nothing is fetched.
"""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Host names of this machine, with any port: an SSH tunnel may have another. Other names, which an attacker's DNS may
point here, are refused."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Middleware that answers only requests with the token: in the address once, then in a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        self._cookie = f"roll_flash_{token[:8]}"  # cookies of one host are shared by all ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if (host.rpartition(":")[0] or host if not host.endswith("]") else host) not in HOSTS:
            return _refuse(403, f"the dashboard answers only to {', '.join(sorted(HOSTS))}")
        if scope["method"] not in ("GET", "HEAD"):
            return _refuse(405, "the dashboard only reads")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _refuse(403, "a page of another origin may not use the dashboard")
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        if self._is_token(dict(query).get("token", "")):
            query = [(name, value) for name, value in query if name != "token"]
            address = scope["path"].lstrip("/")
            answer = RedirectResponse(f"/{address}?{urlencode(query)}" if query else f"/{address}", status_code=303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if not self._is_token(_cookies(headers).get(self._cookie, "")):
            return _refuse(401, "open the address that `roll-flash dash` printed: it has a token that this one lacks")
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _cookies(headers: Headers) -> dict[str, str]:
    found: SimpleCookie = SimpleCookie()
    try:
        found.load(headers.get("cookie", ""))
    except CookieError:  # of another program on this host
        return {}
    return {name: morsel.value for name, morsel in found.items()}


def _refuse(status: int, reason: str) -> Response:
    return PlainTextResponse(f"{reason}\n", status)


def new_token() -> str:
    return secrets.token_urlsafe(24)


def address(port: int, token: str, **query: Any) -> str:
    return f"http://127.0.0.1:{port}/?{urlencode({'token': token, **query}, doseq=True)}"
