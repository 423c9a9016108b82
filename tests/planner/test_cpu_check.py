"""What a model needs on a CPU is said before it is loaded, and what cannot fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.planner.machines import cpu_check
from roll_flash.planner.machines.memory import GIB, MemoryUse


def dry_run(tmp_path: Path, *words: str) -> int:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": {"path": "tiny"}, "envs": [{"id": "counting:Counting-v0"}]}))
    return main(["train", str(file), f"runs={tmp_path}", "learner.device=cpu", *words, "--dry-run"])


def test_a_dry_run_says_memory_and_time_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_check, "memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(cpu_check, "_operations_per_s", lambda: 100e9)
    assert dry_run(tmp_path, "inference.servers=2", "inference.engine=vllm") == 0
    said = capsys.readouterr().out
    assert "# CPU: 0.6 M parameters need at least 2.0 GiB (key-value caches 2.0) of 8.0 GiB" in said
    assert "# CPU: training takes 0.0364 s or more per 1,000 tokens, an estimate: 6 operations" in said
    assert "100 GFLOP/s measured" in said


def test_a_model_that_this_machine_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_check, "memory_bytes", lambda: GIB // 2)
    assert dry_run(tmp_path, "inference.engine=vllm") == 1
    said = capsys.readouterr().err
    assert "tiny: 0.6 M parameters need at least 1.0 GiB (key-value caches 1.0) of 0.5 GiB on this machine" in said
    assert len(said.splitlines()) == 1


def test_the_arithmetic_is_that_of_a_run_in_float32(tmp_path: Path) -> None:
    from collections import Counter

    from roll_flash.config.tree import load_config
    from roll_flash.models.shape import read_shape

    tree = {"model": {"path": "Qwen3-0.6B"}, "envs": [{"id": "counting:Counting-v0"}]}
    shape, counts = read_shape("Qwen3-0.6B"), Counter({"rank": 2, "server": 3})
    number = shape.parameters
    least = cpu_check._least(load_config(tree), shape, counts)
    assert least.parts == {
        "weights": 4 * number,
        "gradients": 4 * number,
        "moments": 8 * number,
        "servers": 3 * 4 * number,
        "key-value caches": 3 * GIB,
    }
    adapters = cpu_check._least(load_config(tree, ["learner.lora.rank=8", "inference.dtype=bfloat16"]), shape, counts)
    trained = adapters.parts["gradients"] // 4
    assert 0 < trained < number / 20
    assert adapters.parts["weights"] == 4 * number
    assert adapters.parts["servers"] == 3 * 2 * number
    assert adapters.parts["moments"] == 8 * trained


def test_servers_of_a_teacher_are_counted() -> None:
    from collections import Counter

    from roll_flash.config.tree import load_config
    from roll_flash.models.shape import read_shape

    tree = {"model": {"path": "Qwen3-0.6B"}, "envs": [{"id": "counting:Counting-v0"}]}
    tree["distill"] = {"teacher": {"model": "Qwen3-4B", "servers": 2}}
    shape, teacher = read_shape("Qwen3-0.6B"), read_shape("Qwen3-4B")
    least = cpu_check._least(load_config(tree), shape, Counter({"rank": 1, "server": 1}))
    assert least.parts["servers of the teacher"] == 2 * (4 * teacher.parameters + GIB)


def test_a_small_sum_has_no_empty_parentheses() -> None:
    assert MemoryUse({"weights": 2**20}).text() == "0.0 GiB"
    assert MemoryUse({"weights": 2 * GIB, "moments": 2**20}).text() == "2.0 GiB (weights 2.0)"
