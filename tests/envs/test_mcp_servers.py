"""Published MCP servers as sources of tools: in the sandbox over stdio, and outside over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from served_app import served

from roll_flash.envs import SandboxToolEnv, ToolEnv, reward
from roll_flash.envs.agents.presets import AGENTS_IMAGE
from roll_flash.envs.check.checks import check_environment
from roll_flash.sandboxes import SandboxSpec, open_sandbox

pytestmark = pytest.mark.adapters

FOLDERS = Path(sys.prefix)
"""Where requirements/install_adapters.sh puts the folders of servers."""
SPEC = SandboxSpec(image=AGENTS_IMAGE, memory_mb=1024, tmpfs_mb=256)


class Published(SandboxToolEnv):
    """The packages of a server are put into the sandbox; an image would have them."""

    tool_format = "hermes"
    sandbox_spec = SPEC

    def __init__(self, folder: str, *command: str, **options: Any) -> None:
        self.folder = folder
        server = {"command": ["python3", *command], "env": {"PYTHONPATH": f"/sandbox/{folder}"}, **options}
        super().__init__(mcp_servers={"published": server})

    async def begin(self, seed: int) -> str:
        await self.sandbox.put_tree(FOLDERS / self.folder, self.folder)
        return "What time is it in Tokyo?"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(env: Any, *actions: str) -> list[str]:
    """What followed each action."""

    async def run() -> list[str]:
        async with open_sandbox(SPEC) as sandbox:
            env.sandbox = sandbox
            try:
                return await answers(env, *actions)
            finally:
                await env.close()

    return asyncio.run(run())


async def answers(env: Any, *actions: str) -> list[str]:
    await env.reset(seed=1)
    steps = [await env.step(action) for action in actions]
    for name, use in steps[-1][4]["tools"].items():
        assert use["calls"] > 0, name
    return [step[0] if isinstance(step[0], str) else str(step[0][0]["content"]) for step in steps]


@pytest.mark.docker
def test_the_time_server_converts_times_in_the_sandbox() -> None:
    said = play(
        Published("mcp-servers", "mcp-servers/bin/mcp-server-time", "--local-timezone", "UTC"),
        call("convert_time", source_timezone="UTC", time="16:30", target_timezone="Asia/Tokyo"),
        call("convert_time", source_timezone="UTC", time="16:30", target_timezone="Nowhere"),
        call("convert_time", source_timezone="UTC", time="16:30"),
        call("get_current_time", timezone="Europe/Paris"),
    )
    assert "T01:30:00+09:00" in said[0]
    assert "Error: " in said[1]
    assert "Nowhere" in said[1]
    assert "the argument target_timezone is missing" in said[2]
    assert "Europe/Paris" in said[3]


@pytest.mark.docker
def test_the_sqlite_server_keeps_a_database_for_one_episode() -> None:
    """It is built on version 1 of the official package."""
    chosen = ["create_table", "read_query", "write_query"]
    command = ("mcp-servers-1/bin/mcp-server-sqlite", "--db-path", "/sandbox/notes.db")
    env = Published("mcp-servers-1", *command, tools=chosen)
    said = play(
        env,
        call("create_table", query="CREATE TABLE notes (number INTEGER, word TEXT)"),
        call("write_query", query="INSERT INTO notes VALUES (7, 'seven')"),
        call("read_query", query="SELECT word FROM notes WHERE number = 7"),
        call("read_query", query="SELECT word FROM elsewhere"),
    )
    assert "seven" in said[2]
    assert "no such table: elsewhere" in said[3]
    (said_later,) = play(env, call("read_query", query="SELECT word FROM notes"))
    assert "no such table" in said_later


class Outside(ToolEnv):
    """The tools of a server on loopback."""

    tool_format = "hermes"

    async def begin(self, seed: int) -> str:
        return f"Price number {seed}?"

    @reward()
    def said_six(self) -> bool:
        return self.final_answer == "6"


def price_server() -> Any:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop", log_level="ERROR")

    @server.tool()
    def price(fruit: str, count: int = 1) -> int:
        """Tell the price of some fruit."""
        return {"fig": 3}[fruit] * count

    return server.streamable_http_app()


def test_a_server_of_the_official_package_is_called_over_http() -> None:
    with served(price_server()) as url:
        options: dict[str, Any] = {
            "mcp_servers": {"shop": {"url": f"{url}/mcp"}},
            "mcp_allow": [url.removeprefix("http://")],
        }
        env = Outside(**options)

        async def run() -> list[str]:
            try:
                return await answers(env, call("price", fruit="fig", count=2), call("price", fruit="x"), "6")
            finally:
                await env.close()

        said = asyncio.run(run())
        assert "\n6\n" in said[0]
        assert "Error: Error executing tool price" in said[1]
        assert env.used("price").errors == 1
        report = check_environment(f"{__file__}:Outside", options, seeds=2, timeout_s=120)
        assert report.ok, report.as_table()
