"""The examples of pages that have no test of their own, run as they stand: docs/inference.md, docs/plan.md,
docs/sandboxes.md, docs/scaling.md, docs/scheduling.md; and the last one of docs/agents.md."""

from __future__ import annotations

import asyncio
import io
import re
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_flash.config.tree import Config, load_config
from roll_flash.planner.machines.hardware import load_hardware

from .pages import ROOT, blocks_of

SMALLEST: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "TextFrozenLake-v0"}]}


def texts(page: str, language: str) -> list[str]:
    return [block.text for block in blocks_of(page) if block.language == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configs of the repository."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", ["docs/inference.md", "docs/sandboxes.md", "docs/scheduling.md"])
def test_its_part_of_a_config_is_taken(page: str) -> None:
    (text,) = texts(page, "yaml")
    tree = yaml.safe_load(text)
    config = load_config({**SMALLEST, **tree})
    assert set(tree) <= set(Config.model_fields)
    assert config.model_dump(exclude_unset=True).keys() >= tree.keys()


def test_the_config_for_a_cluster_is_taken(tmp_path: Path) -> None:
    (text,) = texts("docs/scaling.md", "yaml")
    (tmp_path / "quickstart.yaml").symlink_to(ROOT / "configs" / "quickstart.yaml")
    (tmp_path / "cluster.yaml").write_text(text)
    config = load_config(tmp_path / "cluster.yaml")
    assert (config.rollout.workers, config.inference.servers, config.learner.ranks) == (8, 8, 8)


def test_the_machine_to_plan_for_is_taken(folder: Path) -> None:
    """tests/planner plans for such machines."""
    (text,) = texts("docs/plan.md", "yaml")
    (folder / "my-machine.yaml").write_text(text)
    hardware = load_hardware("my-machine.yaml")
    assert (hardware.gpus, hardware.price_per_hour) == (2, 6.0)


def test_the_simulation_of_a_load_of_yours_runs() -> None:
    (source,) = texts("docs/scheduling.md", "python")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, "docs/scheduling.md", "exec"), {"__name__": "example"})
    rows = [line.split() for line in printed.getvalue().splitlines()]
    assert [row[0] for row in rows] == ["0", "1", "2", "4"]
    step_s = [float(row[1]) for row in rows]
    assert step_s[0] > step_s[-1] > 0


@pytest.mark.docker
def test_sandboxes_do_what_the_page_shows() -> None:
    """With programs of the default image in the place of my-server and my-client."""
    alone, pooled, together = texts("docs/sandboxes.md", "python")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(alone, "docs/sandboxes.md", "exec"), {"__name__": "example"})
    assert printed.getvalue() == "0 42\n\n"
    together = together.replace('image="my-server:1"', 'network="internal"').replace("my-client localhost:8000", "true")
    together = together.replace('["my-server", "--port", "8000"]', '["sleep", "60"]')
    inner = pooled.replace("        ...", textwrap.indent(together, " " * 8).rstrip())
    imports = "from roll_flash.sandboxes import SandboxPool, SandboxSpec"
    source = f"{imports}\nasync def main(spec):\n{textwrap.indent(inner, '    ')}"
    names: dict[str, Any] = {}
    exec(compile(source, "docs/sandboxes.md", "exec"), names)
    asyncio.run(names["main"](names["SandboxSpec"](memory_mb=64)))


@pytest.mark.docker
def test_a_port_is_forwarded_as_the_page_on_agents_shows() -> None:
    *_, source = texts("docs/agents.md", "python")
    exec(compile(source, "docs/agents.md", "exec"), {"__name__": "example"})


def test_each_key_that_the_pages_name_is_one() -> None:
    """`section.key` in code: a section of the config and a key of it."""
    known = set(re.findall(r"^- \*\*`(\S+)`\*\*", (ROOT / "docs/config.md").read_text(), re.MULTILINE))
    known |= {key.rpartition(".")[0] for key in known}
    known |= {key.removesuffix(".N") for key in known} | {key.replace(".N", "") for key in known}
    sections = {key.partition(".")[0] for key in known if "." in key}
    unknown = []
    for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]:
        text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", text):
            for word in re.findall(r"[a-z_]+(?:\.(?:NAME|[a-zN0-9_]+))+", code):
                key = re.sub(r"\.\d+(?=\.|$)", ".N", word)
                if key.partition(".")[0] in sections and not is_known(key, known):
                    unknown.append(f"{path.name}: {word}")
    assert unknown == []


def is_known(key: str, known: set[str]) -> bool:
    is_file_or_method = key.rpartition(".")[2] in (
        "py",
        "yaml",
        "json",
        "jsonl",
        "md",
        "exec",
        "forward",
        "fresh",
        "read",
        "kill_all",
    )
    return key in known or is_file_or_method or any(key.startswith(f"{name}.") for name in known if "kwargs" in name)
