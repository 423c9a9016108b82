"""Settings of a rehearsal, and a bench that keeps what is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roll_flash.gpu_check.check import Bench
from roll_flash.gpu_check.settings import Settings, create_folder, make_settings
from roll_flash.models.prepare import resolve_model


@dataclass
class Reported:
    bench: Bench
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        return {name: value for event in self.events for name, value in event.get("figures", {}).items()}

    def texts(self, kind: str) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == kind]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    resolve_model("tiny")
    settings = make_settings(tmp_path / "report", None, ())
    create_folder(settings.output)
    return settings


@pytest.fixture
def reported(settings: Settings) -> Reported:
    events: list[dict[str, Any]] = []
    return Reported(Bench(settings, events.append), events)
