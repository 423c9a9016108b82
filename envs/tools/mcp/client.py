"""One session with an MCP server: handshake, list of tools, calls.

Written here instead of the package `mcp`, because a server is hostile (docs/dependencies.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from roll_flash.chat.model_text import MAX_DEPTH, MAX_VALUES, encodable, has_more_values, is_deeper
from roll_flash.envs.tools.functions import ToolError
from roll_flash.envs.tools.mcp.connections import MAX_ANSWER_BYTES, HttpConnection, ServerLostError, StdioConnection

PROTOCOL_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions that begin with a handshake, the newest first."""
MAX_LISTED, MAX_PAGES, MAX_PARTS = 1_000, 100, 100
"""Tools that a server may list, pages of them, and parts of a result that are shown. All pages together may have
MAX_ANSWER_BYTES, as one answer may."""


class McpClient:
    """Client of one server. Requests come one after the other, each with a deadline of its caller.

    Methods raise ServerLostError; ToolError, if only this request failed; SandboxError.
    """

    def __init__(self, connection: StdioConnection | HttpConnection) -> None:
        self.connection = connection
        self._number = 0
        self._lost = ""
        self._received = 0
        self._answered = True
        """Whether the last request was not given up: a late error without a number would be an answer to that one."""
        self.ignored = 0
        """Messages that were no answer: notifications, requests of the server, late answers, and what is no JSON."""

    async def shake_hands(self) -> None:
        about = {"name": "roll-flash", "version": "1"}
        wanted = {"protocolVersion": PROTOCOL_VERSIONS[0], "capabilities": {}, "clientInfo": about}
        version = (await self._request("initialize", wanted)).get("protocolVersion")
        if version not in PROTOCOL_VERSIONS:
            raise ServerLostError(f"it speaks version {version!r:.40} of the protocol, not {PROTOCOL_VERSIONS[0]}")
        if isinstance(self.connection, HttpConnection):
            self.connection.headers["MCP-Protocol-Version"] = version
        await self.connection.send(_encoded({"method": "notifications/initialized"}))

    async def list_tools(self) -> list[Any]:
        """Return the tools as the server describes them, unchecked."""
        tools: list[Any] = []
        params: dict[str, Any] = {}
        self._received = 0
        for _ in range(MAX_PAGES):
            page = await self._request("tools/list", params)
            tools += page["tools"] if isinstance(page.get("tools"), list) else []
            params = {"cursor": page.get("nextCursor")}
            if len(tools) > MAX_LISTED or self._received > MAX_ANSWER_BYTES:
                break
            if params["cursor"] is None:
                return tools
        limits = f"{MAX_LISTED} tools, or more than {MAX_PAGES} pages or {MAX_ANSWER_BYTES >> 20} MiB of them"
        raise ServerLostError(f"it lists more than {limits}")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the result as text."""
        result = await self._request("tools/call", {"name": tool, "arguments": dict(arguments)})
        text = content_as_text(result)
        if result.get("isError"):
            raise ToolError(text or "the tool failed")
        return text

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._lost:
            raise ServerLostError(self._lost)
        self._number += 1
        try:
            return await self._ask(method, _encoded({"id": self._number, "method": method, "params": params}))
        except ServerLostError as error:
            self._lost = str(error)
            await self.connection.close()
            raise

    async def _ask(self, method: str, message: bytes) -> dict[str, Any]:
        is_unread = False
        is_ours = self._answered or isinstance(self.connection, HttpConnection)
        self._answered = False
        async with aclosing(self.connection.exchange(message)) as received:
            async for text in received:
                self._received += len(text)
                match _parsed(text):
                    case {"id": self._number, "result": dict(result)}:
                        self._answered = True
                        return result
                    case {"id": self._number, "error": {"message": str(said)}}:
                        self._answered = True
                        raise ToolError(said)
                    case {"id": None, "error": {"message": str(said)}} if is_ours:  # it could not read ours
                        self._answered = True
                        raise ToolError(said)
                    case {"id": int() | str() as number, "method": asked}:  # it may ask if we are there, no more
                        refusal = {"error": {"code": -32601, "message": "not supported by this client"}}
                        reply = {"result": {}} if asked == "ping" else refusal
                        await self.connection.send(_encoded({"id": number, **reply}))
                    case None:
                        is_unread |= text.lstrip().startswith((b"{", b"["))
                self.ignored += bool(text.strip())
        if is_unread and method == "tools/call":  # JSON that Python refuses: the arguments of a call can ask for it
            raise ToolError("its answer cannot be read")
        raise ServerLostError("it answered neither with a result nor with an error")


def content_as_text(result: Mapping[str, Any]) -> str:
    """Return what a model sees of a result: its texts, notes in the place of other parts, or the structured content."""
    content, structured = result.get("content"), result.get("structuredContent")
    parts = content if isinstance(content, list) else []
    if not parts and isinstance(structured, dict):
        if has_more_values(structured, MAX_VALUES) or is_deeper(structured, MAX_DEPTH):
            return "(structured content, too large or nested too deep to be shown)"
        return json.dumps(structured, ensure_ascii=False)
    left_out = [f"({len(parts) - MAX_PARTS} more parts are not shown)"] if len(parts) > MAX_PARTS else []
    return "\n".join([*map(_part_as_text, parts[:MAX_PARTS]), *left_out])


def _part_as_text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": "resource_link", "uri": str(uri)}:
            return f"(a link to {uri[:300]})"
        case {"type": ("image" | "audio") as kind}:
            return f"({kind} of type {part.get('mimeType')!s:.60}, not shown)"
    return "(content that is no text, not shown)"


def _encoded(message: Mapping[str, Any]) -> bytes:
    """Raises ToolError for numbers that JSON does not have."""
    try:
        text = json.dumps({"jsonrpc": "2.0", **message}, allow_nan=False, ensure_ascii=False)
    except ValueError:
        raise ToolError("the numbers in its arguments must be finite") from None
    return encodable(text).encode()


def _parsed(text: bytes) -> Any:
    """Return the message; None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
