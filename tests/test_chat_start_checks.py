"""What the chat template, the length of prompts or the model's context would fail in every episode, fails at start."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from roll_flash.config.tree import load_config
from roll_flash.errors import RollFlashError
from roll_flash.models.context_length import context_length
from roll_flash.models.prepare import resolve_model
from roll_flash.models.tiny import CHAT_TEMPLATE
from roll_flash.system.start_checks import check_parts


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "my.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n} and 1?", "answer": "2"}) + "\n" for n in range(40)))
    return file


def model_with(tmp_path: Path, template: str = CHAT_TEMPLATE, **settings: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def check(rows: Path, model: Path | str, *overrides: str, **data: Any) -> None:
    tree = {
        "model": {"path": str(model), "max_length": 256},
        "envs": [{"id": "Dataset-v0", "data": {"path": str(rows), **data}, "reward": "exact"}],
    }
    check_parts(load_config(tree, overrides))


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT_TEMPLATE
)


def test_a_template_that_refuses_the_system_message_is_one_line(rows: Path, tmp_path: Path) -> None:
    folder = model_with(tmp_path, NO_SYSTEM)
    check(rows, folder)
    with pytest.raises(
        RollFlashError, match=r"the chat template refuses the roles system, user: System role not supported"
    ):
        check(rows, folder, system="Be brief.")


def test_a_template_without_an_end_of_turn_is_said(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_with(tmp_path, CHAT_TEMPLATE.replace("<|im_end|>", ""))
    check(rows, folder, "rollout.stop=[END]")
    assert "shows no special token" not in capsys.readouterr().err
    check(rows, folder)
    assert "the chat template shows no special token at the end of a turn of the model" in capsys.readouterr().err


WITHOUT_SYSTEM = "{% set messages = messages | rejectattr('role', 'eq', 'system') | list %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITHOUT_SYSTEM])
def test_a_template_that_leaves_out_the_system_message_is_said(
    template: str, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_with(tmp_path, template)
    check(rows, folder)
    assert "leaves out" not in capsys.readouterr().err
    check(rows, folder, system="Be brief.")
    is_said = "the chat template leaves out text of system messages" in capsys.readouterr().err
    assert is_said == (template == WITHOUT_SYSTEM)


def test_prompts_that_are_all_too_long_are_one_line_and_a_few_are_not(rows: Path) -> None:
    long = json.dumps({"prompt": "x" * 300, "answer": "2"}) + "\n"
    few = rows.read_text() + "".join(long.replace("xx", f"{n:02}", 1) for n in range(40, 42))
    rows.write_text(few)
    check(rows, "tiny")
    with pytest.raises(RollFlashError, match=r"no prompt leaves room for an answer in model\.max_length=256"):
        check(rows, "tiny", system="x" * 300)


def test_the_prompt_of_an_environment_is_rendered_too(tmp_path: Path) -> None:
    tree = {"model": {"path": "tiny", "max_length": 80}, "envs": [{"id": "counting:Counting-v0"}]}
    with pytest.raises(RollFlashError, match="leaves no room"):
        check_parts(load_config(tree | {"model": {"path": "tiny", "max_length": 30}}, ["rollout.max_new_tokens=8"]))
    check_parts(load_config(tree | {"model": {"path": "tiny", "max_length": 2000}}))


ENVIRONMENTS = """
import roll_flash


class Silent(roll_flash.Env):
    async def reset(self, *, seed=None, options=None):
        return "", {}


class Unseeded(roll_flash.Env):
    async def reset(self):
        return "Hello", {}


class Broken(roll_flash.Env):
    async def reset(self, *, seed=None, options=None):
        return self.prices["fig"], {}
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Silent", "EnvError: reset returned an empty observation"),
        ("Unseeded", "TypeError: .*unexpected keyword argument 'seed'"),
        ("Broken", r"AttributeError: .*no attribute 'prices' \(mine.py:17\)"),
    ],
)
def test_a_first_task_that_cannot_begin_is_said_before_servers_start(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ENVIRONMENTS)
    check_parts(load_config({"model": {"path": "tiny"}, "envs": [{"id": f"{file}:{name}"}]}))
    assert re.search(f"cannot begin, and others may not: {why}", capsys.readouterr().err)


def test_a_thinking_model_with_few_new_tokens_is_warned_of(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = CHAT_TEMPLATE + (
        "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    )
    folder = model_with(tmp_path, template)
    check(rows, folder)
    said = capsys.readouterr().err
    assert "rollout.max_new_tokens=64 may end a turn within its thoughts" in said
    assert len(said.splitlines()) == 1
    check(rows, folder, "model.chat_template_kwargs={enable_thinking: false}")
    check(rows, folder, "model.max_length=2000", "rollout.max_new_tokens=1000")
    assert capsys.readouterr().err == ""


def test_episodes_longer_than_the_model_can_read_are_one_line(rows: Path, tmp_path: Path) -> None:
    folder = model_with(tmp_path, max_position_embeddings=200)
    with pytest.raises(RollFlashError, match=r"model\.max_length=256 is more than the 200 tokens"):
        check(rows, folder)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"text_config": {"max_position_embeddings": 50}, "max_position_embeddings": 100}, 50),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 400),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {
                    "full": {"rope_type": "linear", "factor": 8.0},
                    "sliding": {"rope_type": "default"},
                },
            },
            800,
        ),
    ],
)
def test_scaling_of_positions_counts_for_the_length(tmp_path: Path, settings: dict[str, Any], length: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert context_length(tmp_path) == length


def test_demonstrations_that_cannot_be_read_are_one_line(rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"messages": talk})] * 30
    file.write_text("\n".join(lines))
    check(rows, "tiny", f"warm_start.demonstrations={file}")
    file.write_text("\n".join([*lines, '{"messages": [{"role": "user", "content": "a"}]}']))
    with pytest.raises(RollFlashError, match=r"talks\.jsonl, line 31: an assistant message must come after"):
        check(rows, "tiny", f"warm_start.demonstrations={file}")
    file.write_text(json.dumps({"messages": [talk[0], {"role": "assistant", "content": "b" * 300}]}))
    with pytest.raises(RollFlashError, match="holds nothing to imitate within 256 tokens"):
        check(rows, "tiny", f"warm_start.demonstrations={file}")


def test_a_row_that_ends_with_an_answer_is_no_prompt(rows: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(json.dumps({"messages": talk, "answer": "b"}) + "\n")
    with pytest.raises(RollFlashError, match=r"my\.jsonl, line 1: 'messages' end with.*warm_start\.demonstrations"):
        check(rows, "tiny")


def test_a_first_prompt_that_takes_long_is_waited_for_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start was silent for 20 s, in which an environment loaded its data."""
    monkeypatch.setattr("roll_flash.envs.hosting.waiting.FIRST_SAID_S", 0.05)
    monkeypatch.setattr("roll_flash.envs.hosting.first_prompts.RESET_S", 0.2)
    lines = ["    async def reset(self, *, seed=None, options=None): await asyncio.sleep(60)"]
    lines += ["    async def step(self, action): return '', 0.0, True, False, {}", ""]
    (tmp_path / "slow.py").write_text("\n".join(["import asyncio, roll_flash", "class Slow(roll_flash.Env):", *lines]))
    env = f"{tmp_path}/slow.py:Slow"
    check_parts(load_config({"model": {"path": "tiny"}, "envs": [{"id": env}]}, ["inference.engine=transformers"]))
    assert f"waiting for the first prompt of {env} (at most 0.2 s)" in capsys.readouterr().err
