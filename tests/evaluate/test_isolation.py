"""An evaluation does not run unknown code in a weak sandbox unless it is told to; training only warns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from roll_flash.config.tree import Config, load_config
from roll_flash.evaluator import EvalRequest, plan_evaluation
from roll_flash.sandboxes import SandboxUnavailable
from roll_flash.system.start_checks import check_parts, check_sandboxes, require_isolation


def config(*overrides: str, env: str = "ShellMath-v0") -> Config:
    return load_config({"model": {"path": "tiny"}, "envs": [{"id": env}]}, overrides)


def require(config: Config) -> None:
    """As an evaluation does before it starts."""
    specs = check_parts(config, trains=False, serves=False).sandboxes
    require_isolation(config, asyncio.run(check_sandboxes(config, specs)))


def test_a_weak_sandbox_is_refused_with_what_to_do() -> None:
    with pytest.raises(SandboxUnavailable, match=r"isolation is weak.*Docker.*--allow-weak"):
        require(config("sandbox.provider=local"))


def test_auto_without_an_engine_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")
    with pytest.raises(SandboxUnavailable, match="isolation is weak"):
        require(config())


def test_it_is_taken_where_it_is_allowed() -> None:
    require(config("sandbox.provider=local", "sandbox.allow_weak=true"))


def test_an_environment_without_a_sandbox_needs_no_permission() -> None:
    require(config("sandbox.provider=local", env="counting:Counting-v0"))


def test_the_flag_sets_the_key(tmp_path: Path) -> None:
    request = EvalRequest(env="ShellMath-v0", model="tiny", out=str(tmp_path), allow_weak=True)
    assert plan_evaluation(request).config.sandbox.allow_weak
