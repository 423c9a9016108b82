"""docs/tools.md: what it says about calls, wrong calls, MCP servers and BFCL is so."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.config.tree import load_config
from roll_flash.envs import ToolEnv, make_env, tool
from roll_flash.envs.adapters.bfcl.items import CATEGORIES, load_items
from roll_flash.envs.base import SandboxEnv
from roll_flash.envs.datasets.source import DatasetTasks
from roll_flash.envs.tools.calls import ToolCall, parse_tool_calls
from roll_flash.envs.tools.functions import make_tool
from roll_flash.envs.tools.mcp.servers import McpServer
from roll_flash.envs.tools.prompt import TOOL_FORMATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tools.md").read_text()


def table_after(heading: str) -> list[list[str]]:
    """Cells of the first table after `heading`, less the code marks."""
    rows = PAGE.partition(heading)[2].partition("\n|---")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows]


class Shop(ToolEnv):
    async def begin(self, seed: int) -> str:
        return "What does a fig cost?"

    @tool()
    def price(self, fruit: str) -> int:
        """Tells the price of one fruit."""
        return 7


def test_every_format_that_it_shows_is_read() -> None:
    tools = {"price": make_tool(Shop.price, takes_env=True)}
    rows = table_after("**Calls are read in every format**")
    assert len(rows) == 6
    for _, text in rows:
        assert parse_tool_calls(text, tools) == [ToolCall("price", {"fruit": "fig"})]


@pytest.mark.parametrize(("text", "told"), table_after("## Wrong calls"))
def test_wrong_calls_are_answered_as_it_says(text: str, told: str) -> None:
    async def run() -> str:
        env = Shop()
        await env.reset(seed=0)
        observation, *_ = await env.step(text)
        assert isinstance(observation, list)
        return str(observation[0]["content"])

    assert asyncio.run(run()) == f"Error: {told}"


def saved_as(name: str) -> str:
    """The block of code that follows the paragraph with `name`."""
    found = re.search(rf"as `{re.escape(name)}`.*?```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, name
    return found[1]


@pytest.mark.docker
def test_its_environment_with_an_mcp_server_is_fit_to_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("stock_server.py", "market.py"):
        (tmp_path / name).write_text(saved_as(name))
    monkeypatch.chdir(tmp_path)
    assert "\nroll-flash envs check market.py:Market\n" in PAGE
    assert main(["envs", "check", "market.py:Market"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"ok +the oracle earns the full reward +4 seeds, 2.0 turns each", said), said


def test_its_servers_in_yaml_make_an_environment_with_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "times.yaml").write_text(saved_as("times.yaml"))
    (tmp_path / "times.jsonl").write_text(
        '{"prompt": "When?", "answer": "now"}\n{"prompt": "Where?", "answer": "here"}\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("times.yaml")
    task = DatasetTasks(config.envs[0]).next()
    assert isinstance(make_env(task.env_id, **task.kwargs).unwrapped, SandboxEnv)
    assert config.sandbox.image == "with-time"


def test_it_names_every_key_of_an_mcp_server() -> None:
    named = {name for cells in table_after("| key of a server") for name in re.findall(r"\w+", cells[0])}
    assert named == set(McpServer.model_fields)


def test_the_formats_and_categories_that_it_names_are_all() -> None:
    for name in (*TOOL_FORMATS, *CATEGORIES):
        assert f"`{name}`" in PAGE or f'"{name}"' in PAGE


def test_what_it_counts_in_the_data_is_so() -> None:
    for category in CATEGORIES:
        items = load_items(category)
        assert len(items) == 200
        empty = sum(not calls for item in items for calls in item.ground_truth)
        assert empty == (3 if category in ("multi_turn_base", "multi_turn_long_context") else 203)
        positional = sum(
            bool(re.match(r"\w+\((?!\w+\s*=)[^)]", call))
            for item in items
            for turn in item.ground_truth
            for call in turn
        )
        assert positional == 40
    long = [max(map(len, item.ground_truth)) for item in load_items("multi_turn_long_context")]
    assert {number: most for number, most in enumerate(long) if most > 20} == {38: 34, 46: 34}
