"""docs/evaluation.md: its commands run one after the other as they stand there, and mean what it says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_flash.cli.main import main
from roll_flash.config.tree import load_config
from roll_flash.evaluation.attempts import RETRIED_CAUSES
from roll_flash.monitor.json_lines import read_lines
from roll_flash.types import FailureCause

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its commands have been run, in a folder of their own."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in COMMANDS:
            program, *arguments = shlex.split(command)
            assert program == "roll-flash"
            assert main(arguments) == 0, command
        yield folder


@pytest.mark.ray
def test_the_first_evaluation_leaves_what_the_page_lists(done: Path) -> None:
    listed = re.findall(r"^\| `([\w.]+)/?` \|", PAGE.partition("## What comes out")[2], re.MULTILINE)
    assert listed == ["report.html", "results.json", "episodes.jsonl", "transcripts", "plan.json"]
    for name in listed:
        assert (done / "first" / name).exists()
    results = json.loads((done / "first" / "results.json").read_text())
    assert (results["scored"], results["missing"], results["stopped"]) == (6, 0, None)


@pytest.mark.ray
def test_the_same_greedy_evaluation_repeats_token_by_token(done: Path) -> None:
    def sampled(name: str) -> dict[str, Any]:
        kept = ("token_ids", "logprobs", "reward", "success", "end", "messages")
        records = read_lines(done / name / "episodes.jsonl")
        return {record["episode_id"]: [record[column] for column in kept] for record in records}

    first, second = sampled("first"), sampled("second")
    assert len(first) == 6
    assert first == second


@pytest.mark.ray
def test_its_comparison_is_written(done: Path) -> None:
    assert "Conversations" in (done / "second" / "eval-diff.html").read_text()


def test_its_config_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "X-v0"}], **yaml.safe_load(block)}
    assert load_config(tree).eval.every == 10


def test_its_names_exist() -> None:
    config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "X-v0"}]})
    for section, key in re.findall(r"`(eval|rollout)\.(\w+)`", PAGE):
        assert hasattr(getattr(config, section), key), key
    assert f"{config.eval.max_failures_in_a_row} attempts fail one after another" in PAGE
    causes = set(FailureCause.__args__)  # type: ignore[attr-defined]
    assert {"sandbox_error", "generate_timeout"} <= RETRIED_CAUSES <= causes
    assert {"env_error", "env_timeout"} <= causes - RETRIED_CAUSES
