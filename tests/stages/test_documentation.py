"""The stages of docs/streaming.md can be pasted: the config loads, the class is found and scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from roll_flash.config.tree import load_config
from roll_flash.stages.reward_stage import check_stages, make_stage

from .test_stages import trajectory

SECTION = (Path(__file__).parents[2] / "docs/streaming.md").read_text().split("## Judges and reward models in a run")[1]


def test_the_config_and_the_class_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python notest\n(# my_stages.py\n.*?)```", SECTION, re.DOTALL)
    (tree,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    (tmp_path / "my_stages.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}], **yaml.safe_load(tree)})
    check_stages(config)
    brevity = make_stage(config.stages[1])
    assert brevity.score([trajectory("g", 0, action="a " * 80), trajectory("g", 1)]) == [0.5, 1.0]
