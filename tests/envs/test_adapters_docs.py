"""docs/adapters.md: what it says to write into a config can be made, and played where nothing else must run for it."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_flash.envs.registration import ADAPTERS, make_env
from tests.command_line import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adapters.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
CONFIGS: list[dict[str, Any]] = [env for block in BLOCKS for env in yaml.safe_load(block)["envs"]]
NEEDS_MORE_TO_BEGIN = {"OpenEnv-v0", "MiniWoB-v0"}
"""A server; a sandbox."""


@pytest.mark.adapters
def test_its_environments_can_be_made_and_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, _ = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "sums.py").write_text(block)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for config in CONFIGS:
        if "eval_args" in config["kwargs"]:
            continue  # of verifiers 0.4: verifiers_0_4.py plays it
        env: Any = make_env(config["id"], **config["kwargs"])
        if config["id"] not in NEEDS_MORE_TO_BEGIN:
            begun = env.reset(seed=1)
            observation, _ = asyncio.run(begun) if inspect.iscoroutine(begun) else begun
            assert observation


def test_it_names_every_adapter_and_shows_each_in_a_config() -> None:
    adapters = {env_id for env_id in ADAPTERS if f"| `{env_id}` |" in PAGE}
    assert {"TaskFolder-v0", "ReasoningGym-v0", "TextArena-v0", "TextArenaDuel-v0", "Verifiers-v0"} <= adapters
    assert {config["id"] for config in CONFIGS} == adapters


def test_its_commands_are_commands() -> None:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
    assert lines
    for line in lines:
        parse(line.split()[1:])
