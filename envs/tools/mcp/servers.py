"""MCP servers as sources of tools: what a config says about them, and their tools during an episode."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import pydantic
from pydantic_core import SchemaValidator, core_schema

from roll_flash.chat.model_text import MAX_DEPTH, cut_middle, encodable, has_more_values, is_deeper
from roll_flash.chat.openai_client import api_key_from
from roll_flash.envs.tools.calls import RESERVED_NAMES
from roll_flash.envs.tools.functions import (
    TOOL_OUTPUT_CHARACTERS,
    TOOL_TIMEOUT_S,
    Tool,
    ToolError,
    ToolOptions,
    without_titles,
)
from roll_flash.envs.tools.mcp.client import McpClient
from roll_flash.envs.tools.mcp.connections import HttpConnection, ServerLostError, StdioConnection
from roll_flash.errors import ConfigError, EnvError
from roll_flash.sandboxes import Sandbox
from roll_flash.sandboxes.network.allowlist import is_allowed

START_S = 60.0
"""Seconds in which all servers of an episode must have started and listed their tools."""
MAX_TOOLS = 128
"""Tools of one server that a model is shown; `tools` chooses among more."""
MAX_PROPERTIES = 128
"""Arguments of one tool."""
MAX_NAME, MAX_DESCRIPTION, MAX_SCHEMA = 64, 4_000, 20_000
"""Characters of a tool's name, description and JSON schema."""
_TYPES = {
    "string": core_schema.str_schema(),
    "integer": core_schema.int_schema(),
    "number": core_schema.float_schema(allow_inf_nan=False),
    "boolean": core_schema.bool_schema(),
    "array": core_schema.list_schema(),
    "object": core_schema.dict_schema(),
}


class McpServer(pydantic.BaseModel):
    """One server: a `command` in the episode's sandbox, or a `url` that the worker calls."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    command: tuple[str, ...] = ()
    """Program and arguments; it speaks over its standard input and output."""
    env: dict[str, str] = {}
    """Environment variables of the command."""
    url: str | None = None
    """Address of a server outside of the sandbox (streamable HTTP); `mcp_allow` must name its host."""
    api_key_env: str | None = None
    """Environment variable of the worker with the bearer token for `url`."""
    tools: tuple[str, ...] = ()
    """Names of the tools to show, as the server lists them. Empty: all."""
    prefix: bool = False
    """Put the server's name before the names of its tools; without it, only where two tools have one name."""
    timeout_s: Annotated[float, pydantic.Field(gt=0)] = TOOL_TIMEOUT_S
    """Seconds that one call may take."""
    max_characters: Annotated[int, pydantic.Field(ge=1)] = TOOL_OUTPUT_CHARACTERS
    """Characters of a result that the model sees, head and tail."""


class McpServers:
    """The servers of one environment. `open` starts them for an episode, `close` ends them."""

    def __init__(self, servers: Mapping[str, Any], allow: Sequence[str], label: str, *, has_sandbox: bool) -> None:
        """`label`: the environment, for messages. Raises ConfigError."""
        self._label, self._allow = label, tuple(allow)
        self._servers = {name: self._read(name, about, has_sandbox) for name, about in servers.items()}
        self._clients: list[McpClient] = []
        self.are_outside = any(server.url is not None for server in self._servers.values())
        """True if a server may keep a state that outlives the episode."""
        self.tools: dict[str, Tool] = {}
        """The tools of the episode, by the names that the model sees."""

    @property
    def ignored(self) -> int:
        """Messages of the servers in this episode that were no answer."""
        return sum(client.ignored for client in self._clients)

    async def open(self, sandbox: Sandbox | None, taken: Collection[str], timeout_s: float) -> None:
        """Start the servers and read their tools. `taken`: names of the environment's own tools.

        Raises EnvError if a server does not start in time or lists no usable tools, SandboxError.
        """
        name, limit_s, found = "", min(START_S, timeout_s), list[tuple[str, Tool]]()
        try:
            async with asyncio.timeout(limit_s):
                for name in self._servers:
                    found += [(name, tool) for tool in await self._start(name, sandbox)]
            self.tools = self._named(found, taken)
        except BaseException as error:
            await self.close()
            if isinstance(error, ServerLostError | ToolError | TimeoutError):
                said = str(error)[:600] or f"not ready after {limit_s:.3g} s"
                raise EnvError(f"{self._label}: MCP server {name}: {said}") from None
            raise

    async def close(self) -> None:
        """End the servers. Never raises; may be called more than once."""
        clients, self._clients, self.tools = self._clients, [], {}
        await asyncio.gather(*(client.connection.close() for client in clients))

    async def _start(self, name: str, sandbox: Sandbox | None) -> list[Tool]:
        server = self._servers[name]
        if server.url is not None:
            client = McpClient(HttpConnection(server.url, self._allow, api_key_from(server.api_key_env)))
        else:
            assert sandbox is not None, "the constructor has required it"
            client = McpClient(StdioConnection(sandbox, server.command, server.env))
        self._clients.append(client)
        await client.shake_hands()
        listed = await client.list_tools()
        names = [str(entry.get("name")) if isinstance(entry, dict) else "" for entry in listed]
        if missing := sorted(set(server.tools) - set(names)):
            raise ToolError(f"it has no tool {missing[0]!r}; it has {', '.join(names[:MAX_TOOLS]) or 'none'}")
        chosen = [entry for one, entry in zip(names, listed, strict=True) if one in (server.tools or names)]
        if len(chosen) > MAX_TOOLS:
            raise ToolError(f"it lists {len(chosen)} tools, more than {MAX_TOOLS}; choose some with `tools`")
        return [_make_tool(f"{self._label}: MCP server {name}", server, client, entry) for entry in chosen]

    def _named(self, found: Sequence[tuple[str, Tool]], taken: Collection[str]) -> dict[str, Tool]:
        """Return the tools by name, with that of their server before it where the config or a clash asks for it."""
        wanted = [f"{server}_{tool.name}" if self._servers[server].prefix else tool.name for server, tool in found]
        uses = Counter([*wanted, *taken, *RESERVED_NAMES])
        named: dict[str, Tool] = {}
        for (server, tool), own in zip(found, wanted, strict=True):
            name = (own if uses[own] == 1 else f"{server}_{tool.name}")[:MAX_NAME]
            if name in (*named, *taken, *RESERVED_NAMES):
                raise EnvError(f"{self._label}: MCP server {server}: two tools are named {name}; choose with `tools`")
            named[name] = dataclasses.replace(tool, name=name)
        return named

    def _read(self, name: str, about: Any, has_sandbox: bool) -> McpServer:
        where = f"{self._label}: mcp_servers.{name}"
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,31}", name) is None:
            raise ConfigError(f"{where}: the name of a server has up to 32 letters, digits and _")
        try:
            server = McpServer.model_validate(about)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{'.'.join([where, *map(str, first['loc'])])}: {first['msg']}") from None
        if (server.url is None) == (not server.command):
            raise ConfigError(f"{where}: give either a command, which runs in the sandbox, or a url")
        if server.url is None and not has_sandbox:
            raise ConfigError(f"{where}: a command needs a sandbox: derive from SandboxToolEnv, or give a url")
        if server.url is not None and (fault := self._fault_of(server.url)):
            raise ConfigError(f"{where}: {fault}")
        return server

    def _fault_of(self, url: str) -> str:
        """Return why a server may not be called at `url`; empty if it may."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
                return f"url {url!r} is no address of a server, such as https://HOST/mcp"
            return "" if is_allowed(self._allow, host, port) else f"mcp_allow has no entry for {host}, port {port}"
        except ValueError as error:
            return str(error)


def _make_tool(label: str, server: McpServer, client: McpClient, entry: Any) -> Tool:
    """Make a tool of an entry of a server's list. Raises ToolError if it is none, or too large."""
    match entry:
        case {"name": str(name), "inputSchema": dict(given)} if name and has_more_values(given, MAX_SCHEMA):
            schema = ""  # longer than it may be; to write it would hold up the worker
        case {"name": str(name), "inputSchema": dict(given)} if name and not is_deeper(given, MAX_DEPTH):
            schema = encodable(json.dumps(without_titles(given), ensure_ascii=False))
        case _:
            raise ToolError("an entry in its list has no name or no inputSchema, or one that is nested too deep")
    if not 0 < len(schema) <= MAX_SCHEMA:
        raise ToolError(f"the schema of its tool {name:.64} has more than {MAX_SCHEMA} characters; choose with `tools`")
    parameters = {"properties": {}, "required": [], **json.loads(schema), "type": "object"}

    async def call(**arguments: Any) -> str:
        try:
            return await client.call(name, arguments)
        except ServerLostError as error:
            if server.url is not None:  # most likely not of the model's doing
                raise EnvError(f"{label}: {error}") from None
            raise ToolError(f"the server of this tool cannot be used any more: {error}") from None

    legal = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return Tool(
        name=(f"_{legal}" if legal[0].isdigit() else legal)[:MAX_NAME],
        description=cut_middle(encodable(str(entry.get("description") or "")), MAX_DESCRIPTION),
        parameters=parameters,
        options=ToolOptions(server.timeout_s, server.max_characters),
        function=call,
        takes_env=False,
        validate=_validator_of(name, parameters),
    )


def _validator_of(name: str, schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the check of a call's arguments: which there are, and their types. All else in a schema the server checks,
    because a schema can be made so that checking takes for ever. Raises ToolError."""
    properties, required = schema["properties"], schema["required"]
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ToolError(f"the schema of its tool {name:.64} is none of an object")
    if len(properties) > MAX_PROPERTIES:
        raise ToolError(f"its tool {name:.64} has more than {MAX_PROPERTIES} arguments; choose others with `tools`")
    needed = {key for key in required if isinstance(key, str)}
    kinds = {key: str(part.get("type")) if isinstance(part, dict) else "" for key, part in properties.items()}
    fields = {
        key: core_schema.typed_dict_field(_TYPES.get(kind, core_schema.any_schema()), required=key in needed)
        for key, kind in kinds.items()
    }
    extra: Any = "forbid" if schema.get("additionalProperties") is False else "allow"
    validator = SchemaValidator(core_schema.typed_dict_schema(fields, extra_behavior=extra))
    return lambda arguments: dict(validator.validate_python(dict(arguments)))
