"""What a model left running may not end for seconds after it was killed: the kernel first frees its memory, one page
after the other, with the processors of the sandbox. That is worth 0, and is a sample."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from roll_flash.envs.agents.verifier import CommandVerifier
from roll_flash.envs.shipped.file_quest import FileQuest
from roll_flash.envs.shipped.python_repair import PythonRepair
from roll_flash.sandboxes import SandboxFileError, SandboxSpec, open_sandbox
from roll_flash.sandboxes.client import files
from roll_flash.sandboxes.client.frames import Request
from tests.envs.test_agent_env import ASK, python
from tests.envs.test_agent_env import run as run_agent
from tests.envs.test_task_folders import harbor_task
from tests.envs.test_task_folders import play as play_task


@pytest.fixture
def all_but_first(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The answer of the agent when processes do not die within 5 s, from the Nth time on; the list holds N."""
    ask, left = files._simple, [0]

    async def answer(connection: Any, kind: Request, payload: bytes, what: str) -> None:
        if kind == Request.KILL_ALL:
            left[0] -= 1
            if left[0] < 0:
                raise SandboxFileError("kill all: Resource busy", errno.EBUSY)
        await ask(connection, kind, payload, what)

    monkeypatch.setattr(files, "_simple", answer)
    return left


@pytest.mark.usefixtures("all_but_first")
@pytest.mark.parametrize("env", [FileQuest(), PythonRepair()], ids=["FileQuest", "PythonRepair"])
def test_processes_that_do_not_end_are_worth_0_in_environments_with_tools(env: Any) -> None:
    async def play() -> tuple[float, bool, dict[str, Any]]:
        async with open_sandbox(SandboxSpec(), provider="local") as env.sandbox:
            await env.reset(seed=3)
            await env.step("<sh>true</sh>")
            _, earned, terminated, _, info = await env.step("<answer>done</answer>")
            return earned, terminated, info

    earned, terminated, info = asyncio.run(play())
    assert (earned, terminated, info["success"], info["sandbox_busy"]) == (0.0, True, False, True)


@pytest.mark.usefixtures("all_but_first")
def test_processes_that_do_not_end_are_worth_0_to_a_check() -> None:
    async def check() -> tuple[float, dict[str, Any]]:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            return await CommandVerifier("true", {}, 5.0)(sandbox, {})

    earned, info = asyncio.run(check())
    assert (earned, "does not end" in info["verifier_error"]) == (0.0, True)


@pytest.mark.docker
@pytest.mark.usefixtures("all_but_first")
def test_an_agent_whose_processes_do_not_end_earns_nothing_and_is_a_sample() -> None:
    assert run_agent(python(ASK, verifier="true"))[0] == 0.0


@pytest.mark.docker
def test_what_tests_started_of_the_models_work_and_does_not_end_earns_nothing(
    tmp_path: Path, all_but_first: list[int]
) -> None:
    all_but_first[0] = 1
    task = harbor_task(tmp_path / "task")

    async def works(*_: Any) -> None:
        """In an untouched sandbox the tests have a verdict."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roll_flash.envs.adapters.task_folders.env.TaskFolder._check_that_tests_work", works)
        _, earned, info = play_task(task, "<sh>true</sh>", "<answer>done</answer>")
    assert (earned, "does not end" in info["verifier_error"]) == (0.0, True)
