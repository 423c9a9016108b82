"""docs/gateway.md, done as a reader would: its commands are taken, its scripts run against a real engine."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from roll_flash.engines.inference import ClientSpec
from roll_flash.models.prepare import resolve_model
from roll_flash.rollout.episodes.episode import Deadlines
from roll_flash.rollout.worker import Worker, WorkerSettings
from roll_flash.scheduling.tasks import make_task
from roll_flash.serving import GatewayRequest, open_gateway
from roll_flash.types import EpisodeSpec, SamplingParams, Trajectory
from tests.command_line import parse

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_its_commands_are_understood() -> None:
    assert len(COMMANDS) == 2
    for command in COMMANDS:
        program, *arguments = command.split()
        assert program == "roll-flash"
        parse(arguments)


def test_its_errors_are_those_that_are_answered() -> None:
    sources = "".join(path.read_text() for path in (Path(__file__).parents[2] / "roll_flash/gateway").rglob("*.py"))
    codes = re.findall(r"`([a-z_]+)`", "".join(line for line in PAGE.splitlines() if re.match(r"\| [45]\d\d", line)))
    assert len(codes) > 8
    assert [code for code in codes if f'"{code}"' not in sources and code != "param"] == []


def test_its_scripts_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, reading, environment = SCRIPTS
    monkeypatch.chdir(tmp_path)
    Path("capital.py").write_text(environment)

    async def run() -> str:
        request = GatewayRequest(model="tiny", port=0, overrides=("inference.engine=transformers",))
        output = io.StringIO()
        async with open_gateway(request, note=lambda _: None) as serving:
            monkeypatch.setenv("GATEWAY_KEY", serving.api_key)
            with redirect_stdout(output):
                for source in (script.replace("http://127.0.0.1:8321", serving.url), reading):
                    await asyncio.to_thread(exec, compile(source, "docs/gateway.md", "exec"), {})
        return output.getvalue()

    told, episode = asyncio.run(run()).splitlines()
    assert "'kind': 'trajectory', 'reward': 0.5, 'success': False, 'turns': 2, 'samples': 1" in told
    reward, tokens, turns = episode.split()
    assert (float(reward), int(turns)) == (0.5, 2)
    assert 2 <= int(tokens) <= 32


def test_its_environment_is_played_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.inference.stand_in_server import StandInServer, well

    monkeypatch.chdir(tmp_path)
    Path("capital.py").write_text(SCRIPTS[2])

    async def run() -> object:
        async with StandInServer(well) as server:
            model = ClientSpec("vllm", (server.endpoint,), "tiny", 256)
            deadlines = Deadlines(20.0, 20.0, 40.0)
            worker = Worker(WorkerSettings(model, resolve_model("tiny"), 256, deadlines, None, "docs"))
            try:
                await worker.start()
                task = make_task("capital.py:Capital-v0", 0, {})
                worker.submit([EpisodeSpec("e", "g", 0, task, SamplingParams(max_new_tokens=8), 4)])
                return (await worker.poll(30.0))[0]
            finally:
                await worker.close()

    outcome = asyncio.run(run())
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.success, len(outcome.turns)) == (0.0, False, 1)
