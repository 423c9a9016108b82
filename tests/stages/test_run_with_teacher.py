"""Whole runs with a teacher, set as docs/algorithms.md shows: the distance to it falls, and a resume repeats it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from roll_flash.config.tree import load_config
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.json_lines import read_lines
from roll_flash.monitor.metric_table import find_metric
from roll_flash.monitor.metrics import STEP_S, read_metrics
from roll_flash.run.journal import read_journal
from roll_flash.run.run_dir import list_checkpoints
from roll_flash.run.verify import verify_run
from roll_flash.trainer import train
from tests.docs.pages import blocks_of

PAGE = [yaml.safe_load(block.text) for block in blocks_of("docs/algorithms.md") if block.language == "yaml"]
TEACHER, HINTED = (tree["distill"] for tree in PAGE if "distill" in tree)
STEPS = 12


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights, about 1.3 nats per token away."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = resolve_model("tiny"), tmp_path_factory.mktemp("teacher")
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for matrix in (each for each in model.parameters() if each.ndim == 2):
            matrix.add_(torch.randn(matrix.shape, generator=generator) * 0.5 * matrix.std())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(runs: Path, **tree: Any) -> dict[str, Any]:
    return {
        "name": "taught",
        "runs": str(runs),
        "steps": STEPS,
        "model": {"path": "tiny", "max_length": 96},
        "envs": [{"id": "tests.counting:Counting-v0", "max_turns": 2}],
        "scheduler": {"groups_per_step": 4, "group_size": 4},
        "rollout": {"max_new_tokens": 16, "max_concurrent": 16},
        "inference": {"engine": "transformers"},
        "learner": {"learning_rate": 1e-3},
        "eval": {"before_and_after": False},
        "checkpoint": {"every": 6, "keep": 2},
        **tree,
    }


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder) if STEP_S in row]


@pytest.mark.ray
def test_a_run_learns_from_a_teacher_alone_and_a_resume_repeats_what_it_said(
    tmp_path: Path, teacher: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    distill = {**TEACHER, "teacher": {"model": str(teacher)}}
    tree = settings(tmp_path, distill=distill)
    train(load_config(tree))
    folder = tmp_path / "taught"
    steps = steps_of(folder)
    assert len(steps) == STEPS
    distances = [row["distill/reverse_kl"] for row in steps]
    assert sum(distances[-4:]) < 0.95 * sum(distances[:4]), distances  # each is a mean over some 500 sampled tokens
    assert not [name for name in steps[-1].keys() - {"step", "time"} if find_metric(name) is None]
    assert steps[-1]["groups_without_signal"] == 0, "the environment pays each replica the same"
    assert steps[-1]["stream/balanced"] == 1
    lines = list(read_lines(folder / "logs/stages.jsonl"))
    assert all("reverse_kl" in line for line in lines), lines
    assert (folder / "logs/teacher/transformers-0.log").exists()

    # As a killed run leaves it: the last checkpoint was not written.
    newest = list_checkpoints(folder)[-1]
    assert newest.step == STEPS
    shutil.rmtree(newest.folder)
    capfd.readouterr()
    train(load_config({**tree, "steps": STEPS + 1}), resume=True)
    said = "".join(capfd.readouterr())
    assert f"repeating steps 7 to {STEPS} from the journal" in said
    assert "repeated with another result" not in said
    assert "cannot be repeated" not in said
    events, _ = read_journal(folder / "journal", 3)
    trained = [event for event in events if event["event"] == "trained"]
    assert [event["version"] for event in trained] == list(range(7, STEPS + 2))
    for event in trained:
        episodes = {name for batch in event["batches"] for _, rows in batch for name, _ in rows}
        assert set(event["teacher"]) == episodes
    assert all(finding.ok for finding in verify_run(folder))


@pytest.mark.ray
def test_a_run_teaches_itself_with_a_hint(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"say {number}", "answer": str(number)}) for number in range(50)]
    (tmp_path / "my.jsonl").write_text("\n".join(rows))
    tree = settings(
        tmp_path,
        distill=HINTED,
        steps=2,
        envs=[{"id": "Dataset-v0", "data": str(tmp_path / "my.jsonl"), "reward": "exact"}],
    )
    train(load_config(tree))
    folder = tmp_path / "taught"
    steps = steps_of(folder)
    assert len(steps) == 2
    assert all(row["distill/reverse_kl"] != 0 for row in steps)
    assert all("reverse_kl" in line for line in read_lines(folder / "logs/stages.jsonl"))
    assert not (folder / "logs/teacher").exists(), "no server of its own"
