"""Block web pages in a user's browser from a gateway on the same machine.

A page cannot know a key. The gateway also rejects requests that a page could send without one: with a foreign `Origin`,
with the content type of a form, or to a loopback address under another name (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from roll_flash.config.addresses import is_loopback
from roll_flash.gateway.apis.api_error import ApiError

NO_FORM = ("application/json", "application/x-protobuf")
"""What a page can send only after it has asked, which no answer of ours permits."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def refuse_web_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject requests of web pages. Raises ApiError."""
    origin = request.headers.get("Origin")
    if origin is not None and not is_loopback(_host(origin)):
        raise ApiError(403, "foreign_origin", "web pages of other machines may not use this gateway")
    host = _host(f"//{request.headers.get('Host', '')}")
    if is_loopback(_local_address(request)[0]) and not is_loopback(host):
        raise ApiError(403, "foreign_host", f"this is a loopback address; ask for it as {local_url(request)}")
    kind = request.headers.get("Content-Type")  # aiohttp's own `content_type` raises any error for some of them
    if request.can_read_body and kind is not None and kind.partition(";")[0].strip().lower() not in NO_FORM:
        raise ApiError(415, "unsupported_media_type", "send Content-Type: application/json")
    return await handler(request)


def local_url(request: web.Request) -> str:
    """Local address of the connection, whatever the Host header says."""
    address, port = _local_address(request)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _host(url: str) -> str:
    """Host of a URL; empty if invalid."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _local_address(request: web.Request) -> tuple[str, int]:
    if request.transport is None:
        raise ConnectionResetError("the agent has gone away")
    address, port, *_ = request.transport.get_extra_info("sockname")
    return str(address), int(port)
