"""What the GPU check makes of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_flash.gpu_check import settings
from roll_flash.models.prepare import resolve_model
from roll_flash.models.shape import read_shape


def test_a_recipe_with_a_revision_is_checked_with_the_local_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "REHEARSED", {"model": {"path": str(resolve_model("tiny")), "revision": "v2"}})
    model = settings.make_settings(tmp_path / "report", None, ()).config_with().model
    assert model.revision is None
    assert resolve_model(model.path, model.revision) == resolve_model("tiny")
    assert read_shape(model.path, model.revision).parameters > 0
