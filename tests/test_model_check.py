"""`python -m benchmarks.model_check` with a real vLLM, and docs/models.md: its tables, commands and code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.model_check.__main__ import arguments
from benchmarks.model_check.architectures import ALONE, SERVED, SHARED
from benchmarks.model_check.comparison import TOLERANCE
from roll_flash.errors import ModelError
from roll_flash.models.prepare import resolve_model
from roll_flash.weight_sync.parity import FLOAT32_THRESHOLD
from tests.command_line import parse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "models.md").read_text()


def rows_of(table: str) -> list[list[str]]:
    """The cells of the table between its marks, without the line of its columns."""
    text = PAGE.partition(f"<!-- {table}: begin -->")[2].partition(f"<!-- {table}: end -->")[0]
    assert f"transformers {transformers.__version__}," in text, "made with another version: make it again"
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return lines[2:] if lines[1][0].startswith("---") else lines[1:]


def test_the_page_has_the_result_of_each_architecture_with_the_installed_transformers() -> None:
    rows = rows_of("architectures")
    layouts = {name: layout.partition(":")[0] for name, _, layout, *_ in rows}
    assert layouts == dict.fromkeys(SHARED, "shared prefixes") | dict.fromkeys(ALONE, "one by one")
    assert max(float(value) for *_, logprob, gradient in rows for value in (logprob, gradient)) <= TOLERANCE


def test_the_page_has_what_a_server_answered_for_each_architecture_that_is_published() -> None:
    rows = rows_of("published")
    assert tuple(name for name, *_ in rows) == SERVED
    assert all(float(value) <= FLOAT32_THRESHOLD for _, *values in rows for value in values)


def test_its_commands_are_ones_the_parser_takes() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines()]
    lines += [words.split() for words in re.findall(r"`(python -m .*?)`", PAGE)]
    checks = [words[3:] for words in lines if words[:3] == ["python", "-m", "benchmarks.model_check"]]
    commands = [words[1:] for words in lines if words[:1] == ["roll-flash"]]
    assert len(checks) == 6
    assert len(commands) >= 9
    for words in checks:
        arguments(words)
    for words in commands:
        parse(words)


def test_the_text_part_of_a_model_for_images_can_be_saved_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    whole = tmp_path / "models" / "gemma-3-4b-it"
    shutil.copytree(resolve_model("tiny"), whole, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    write_model_for_images(whole)
    with pytest.raises(ModelError, match="has a part for vision"):
        resolve_model(whole)
    exec(compile(code, "docs/models.md", "exec"), {})
    text = resolve_model(f"{whole}-text")
    assert json.loads((text / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]


def write_model_for_images(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model("gemma3").to_dict()
    text = {"vocab_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 1, "layer_types": None, **sizes}
    config["text_config"].update(text, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config["vision_config"].update(sizes, num_hidden_layers=1, image_size=28, patch_size=14)
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)


def published(*names: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.model_check", "--vllm", "--json", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


@pytest.mark.vllm
@pytest.mark.ray
def test_a_server_samples_with_the_weights_that_were_published() -> None:
    """Also where vLLM keeps views of weights: convolutions, beside attention."""
    (result,) = published("falcon_h1")
    assert result["ok"]
    assert max(result[when] for when in ("at_start", "after", "sampled")) <= FLOAT32_THRESHOLD


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.ray
def test_each_architecture_of_the_page_is_published() -> None:
    assert [result["name"] for result in published()] == list(SERVED)
