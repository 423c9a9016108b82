"""docs/replay.md, done as a new user would: files are saved, commands run one after the other, what it says holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metrics import STEP_S, read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
RUN_TIMEOUT_S = 800


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command has printed, and the folder in which they ran."""
    folder = tmp_path_factory.mktemp("page")
    for match in re.finditer(r"```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL):
        name = re.findall(r"as `(\w+\.(?:py|yaml))`", PAGE[: match.start()])[-1]
        (folder / name).write_text(match[1])
    program = f'roll-flash() {{ "{sys.executable}" -m roll_flash "$@"; }}\n'
    printed = {}
    for command in COMMANDS:
        ran = subprocess.run(
            ["bash", "-c", program + command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        printed[command] = ran.stdout
    return {"folder": folder, **printed}


def printed_by(done: dict[str, Any], part: str) -> str:
    [text] = [text for command, text in done.items() if part in command]
    assert isinstance(text, str)
    return text


@pytest.mark.ray
def test_an_episode_is_played_again(done: dict[str, Any]) -> None:
    assert done["roll-flash replay vowels g00000001-r2"].endswith("3 of 3 turns played again, as recorded\n")


@pytest.mark.ray
def test_forks_are_where_the_page_says(done: dict[str, Any]) -> None:
    assert printed_by(done, "--fork 4").count("turn 1, model:") == 4
    forks = read_episodes(done["folder"] / "runs/vowels/replays/g00000001-r2-t1")
    assert {fork["episode_id"] for fork in forks} == {f"g00000001-r2-t1-f{number}" for number in range(4)}


@pytest.mark.ray
def test_lines_of_the_user_are_actions(done: dict[str, Any]) -> None:
    shown = printed_by(done, "--interactive")
    assert "100% are vowels." in shown
    assert "67% are vowels." in shown
    assert "the environment has ended the episode" in shown


@pytest.mark.ray
def test_recorded_turns_are_context_in_a_run_that_trains_from_hard_states(done: dict[str, Any]) -> None:
    run = done["folder"] / "runs/hard"
    records = [record for record in read_episodes(run / "episodes") if record["kind"] == "trajectory"]
    begun = [record for record in records if "@" in record["task_id"]]
    assert begun
    assert len(begun) < len(records)
    for record in records:
        own = [turn for turn in record["turns"] if not turn["in_prefix"]]
        sampled = sum(turn["end"] - turn["start"] for turn in own)
        assert sum(record["policy_mask"]) == sampled == record["policy_tokens"]
        assert len(own) < 3 if record in begun else len(own) == 3
    prompts = {record["group_id"]: set() for record in begun}
    for record in begun:
        prompts[record["group_id"]].add(tuple(record["token_ids"][: record["prompt_length"]]))
    assert {len(each) for each in prompts.values()} == {1}, "replicas share the prompt up to the state"
    assert len([row for row in read_metrics(run) if STEP_S in row]) == 2
    assert "ok" in printed_by(done, "verify hard")


@pytest.mark.ray
def test_its_options_exist(done: dict[str, Any]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "roll_flash", "replay", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    for option in set(re.findall(r"--[a-z][a-z-]+", PAGE)):
        assert option in shown, option
