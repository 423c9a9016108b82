"""The whole check, as a user starts it, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_flash.errors import ConfigError
from roll_flash.gpu_check.groups import all_groups, groups_named
from roll_flash.gpu_check.settings import Settings

TIMEOUT_S = 1200


def rehearse(output: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "roll_flash", "gpu-check", "--output", str(output), "--json", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout, done.stderr
    return done, json.loads(done.stdout)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("rehearsal") / "report"
    done, tree = rehearse(output)
    return {"done": done, "output": output, **tree, "results": {each["name"]: each for each in tree["results"]}}


@pytest.mark.ray
class TestRehearsal:
    def test_it_passes(self, rehearsed: dict[str, Any]) -> None:
        failed = {name: (each["text"], each["log"]) for name, each in rehearsed["results"].items() if each["log"]}
        assert failed == {}
        assert rehearsed["done"].returncode == 0
        assert rehearsed["ok"] is True

    def test_everything_that_a_cpu_can_do_has_passed(self, rehearsed: dict[str, Any]) -> None:
        left_out = {name for name, each in rehearsed["results"].items() if each["status"] != "passed"}
        assert {rehearsed["results"][name]["status"] for name in left_out} == {"not possible"}
        groups = {rehearsed["results"][name]["group"] for name in left_out}
        of_gpus = {"weights by ipc", "weights by nccl", "two ranks", "two servers", "a server on two GPUs"}
        assert groups == of_gpus | {"machine"}
        assert {name for name in left_out if rehearsed["results"][name]["group"] == "machine"} == {"driver", "recipes"}
        assert all("GPU" in rehearsed["results"][name]["text"] or name.partition(": ")[2] for name in left_out)

    def test_every_check_has_a_result(self, rehearsed: dict[str, Any], settings: Settings) -> None:
        assert list(rehearsed["results"]) == [check.name for group in all_groups(settings) for check in group.rows]

    def test_changed_weights_went_to_busy_servers(self, rehearsed: dict[str, Any]) -> None:
        figures = rehearsed["results"]["servers, weights by shm: publication"]["figures"]
        assert figures["requests_across_the_update"] > 0
        assert figures["parity_percentile"] < 1e-3 < figures["change_of_logprobs"]
        assert figures["parity_tokens"] >= 1000

    def test_a_server_was_killed_and_came_back(self, rehearsed: dict[str, Any]) -> None:
        figures = rehearsed["results"]["servers, weights by shm: a server is killed"]["figures"]
        assert figures["deaths"] == 1
        assert figures["parity_percentile"] < 1e-3

    def test_the_step_has_speed_and_memory(self, rehearsed: dict[str, Any]) -> None:
        figures = rehearsed["results"]["step"]["figures"]
        assert figures["tokens_per_s"] > 0
        assert figures["peak_gib"] > 0.1
        assert figures["sequence_tokens"] == 256

    def test_the_page_says_first_that_it_is_a_rehearsal(self, rehearsed: dict[str, Any]) -> None:
        page = (rehearsed["output"] / "report.md").read_text()
        assert page.splitlines()[2].startswith("**This is a rehearsal on a CPU.**")
        assert "ipc moves weights between GPUs" in page
        assert rehearsed["line"] in page
        assert "REHEARSAL" in rehearsed["line"]

    def test_the_logs_of_servers_are_kept(self, rehearsed: dict[str, Any]) -> None:
        logs = {log.name for log in (rehearsed["output"] / "servers").iterdir()}
        assert logs == {"transformers-0.log", "transformers-1.log"}

    def test_it_says_what_it_waits_for(self, rehearsed: dict[str, Any]) -> None:
        said = rehearsed["done"].stderr
        assert "this is a REHEARSAL" in said
        assert "starting servers and the rest of the learner" in said


@pytest.mark.nightly
@pytest.mark.vllm
def test_the_servers_can_be_vllm_on_a_cpu(tmp_path: Path) -> None:
    done, tree = rehearse(tmp_path / "report", "inference.engine=vllm", "inference.servers=1")
    assert done.returncode == 0, done.stderr
    assert tree["ok"]


def test_groups_are_chosen_by_words_in_their_names(tmp_path: Path) -> None:
    done, tree = rehearse(tmp_path / "report", "--only", "machine, ipc")
    assert done.returncode == 0, done.stderr
    assert {each["group"] for each in tree["results"]} == {"machine", "weights by ipc"}
    assert "only: machine, ipc" in tree["line"]


def test_a_word_that_is_in_no_name_is_refused_with_the_names(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"--only icp: is in no name; groups are machine; kernels"):
        groups_named("ipc,icp", all_groups(settings))


def test_a_wrong_word_leaves_no_folder_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "roll_flash", "gpu-check", "--only", "icp", "--output", str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--only icp: is in no name" in done.stderr
    assert not (tmp_path / "report").exists()


def test_a_folder_with_files_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    command = [sys.executable, "-m", "roll_flash", "gpu-check", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "choose another folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
