"""`python -m benchmarks.model_check`: a wrong name is one line, before any model is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.model_check.architectures import check_names
from roll_flash.errors import ModelError


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lama", r"did you mean llama\?"),
        ("qwen3_next_", r"did you mean qwen3_next\?"),
        ("xyz", "give an architecture of"),
    ],
)
def test_a_wrong_name_is_told_what_was_probably_meant(name: str, hint: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: no architecture and no model has this name; {hint}"):
        check_names(["llama", name])


def test_a_model_that_cannot_be_trained_is_known_before_anything_is_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="no tokenizer"):
        check_names([str(tmp_path)])


def test_a_search_in_the_list_of_transformers_is_said_and_a_near_name_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llamma"}))
    with pytest.raises(ModelError, match=r"no model_type 'llamma'; did you mean llama\? docs/models.md lists"):
        check_names([str(tmp_path)])
    assert "looking for model_type 'llamma' in the list of transformers" in capsys.readouterr().err
