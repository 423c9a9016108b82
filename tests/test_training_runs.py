"""Whole runs as a user starts them: real processes, a real server, real sandboxes, the tiny model.

One run goes through its life: started, stopped by SIGTERM, resumed to the end, evaluated and exported.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from leaks import Session
from listening import key_holders, open_to_everybody

from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metric_table import find_metric
from roll_flash.monitor.metrics import STALENESS_MAX, STEP_S, read_metrics
from roll_flash.monitor.status import read_status
from roll_flash.processes.supervise import descendants
from roll_flash.rollout.turn_file import read_turns
from roll_flash.rollout.turns import decode
from roll_flash.run.journal import read_journal
from roll_flash.run.run_dir import list_checkpoints

ROOT = Path(__file__).parents[1]
RUN_TIMEOUT_S = 800


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "roll_flash", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and everything printed."""
    process = start(*arguments, **environment)
    try:
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, output


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and any(
            row["step"] >= step and STEP_S in row for row in read_metrics(folder)
        ):
            return
        assert process.poll() is None, f"the run ended early:\n{process.communicate()[0]}"
        time.sleep(0.2)
    raise AssertionError(f"no step {step} within {RUN_TIMEOUT_S} s")


def step_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder) if STEP_S in row]


def newest_step(folder: Path) -> int:
    return max(int(row["step"]) for row in step_rows(folder))


def pids(process: subprocess.Popen[str], *commands: str) -> set[int]:
    """Processes of the run whose command line contains one of these."""
    found = set()
    for pid in descendants(process.pid):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if any(command in line for command in commands):
            found.add(pid)
    return found


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run, interrupted after its first step and resumed for three more, on a machine without a compiler, behind a
    proxy, with somebody's own vLLM servers."""
    runs = tmp_path_factory.mktemp("runs")
    arguments = ["train", "configs/ci.yaml", "name=life", f"runs={runs}", "eval.tasks=4"]
    arguments += ["scheduler.async_ratio=auto", "scheduler.async_ratio_bounds=[0, 1]"]
    letters = {"id": "tests.letter_count:LetterCount-v0", "levels": [{"turns": 1}, {"turns": 2}], "weight": 2}
    counting = {"id": "tests.counting:Counting-v0"}
    arguments += [f"envs={json.dumps([{**env, 'max_turns': 2} for env in (letters, counting)])}"]
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    theirs = {"CC": "/no/compiler", "CXX": "/no/compiler", **proxies, "no_proxy": "", "VLLM_API_KEY": "theirs"}
    process = start(*arguments, "steps=400", **theirs)
    folder = runs / "life"
    try:
        wait_for_step(folder, 1, process)
        keys, listening = key_holders(process.pid), open_to_everybody(process.pid)
        process.send_signal(signal.SIGTERM)  # which Ray's core answers with a stack, unless it is taken back
        interrupted, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    stopped_at = [checkpoint.step for checkpoint in list_checkpoints(folder)]
    last = stopped_at[-1] + 3
    resume = [*arguments, f"steps={last}", "--resume", "--json"]
    code, resumed = run(*resume, **theirs)
    return {
        "resume": resume,
        "folder": folder,
        "keys": keys,
        "listening": listening,
        "interrupt_code": process.returncode,
        "interrupted": interrupted,
        "stopped_at": stopped_at,
        "last": last,
        "resume_code": code,
        "resumed": resumed,
    }


@pytest.mark.docker
@pytest.mark.vllm
class TestOneRunThroughItsLife:
    def test_sigterm_stops_as_ctrl_c_does_with_a_checkpoint_and_says_how_to_go_on(self, life: dict[str, Any]) -> None:
        assert life["interrupt_code"] == 130, life["interrupted"]
        assert len(life["stopped_at"]) == 1
        assert "--resume" in life["interrupted"]
        assert "*** SIGTERM" not in life["interrupted"]

    def test_what_takes_long_is_said_before_it_begins(self, life: dict[str, Any]) -> None:
        assert "rollout worker(s) (usually 20-100 s" in life["interrupted"]
        assert "stopping (SIGTERM)" in life["interrupted"]
        assert "training is done; writing the last checkpoint" in life["resumed"]
        assert "closing servers, workers and Ray (usually" in life["resumed"]

    def test_the_model_of_a_run_shares_its_files_with_the_last_checkpoint(self, life: dict[str, Any]) -> None:
        last = list_checkpoints(life["folder"])[-1].folder / "hf" / "model.safetensors"
        assert last.samefile(life["folder"] / "model" / "model.safetensors")

    def test_a_resumed_run_trains_the_steps_that_were_left_and_no_other(self, life: dict[str, Any]) -> None:
        assert life["resume_code"] == 0, life["resumed"]
        assert [row["step"] for row in step_rows(life["folder"])] == list(range(1, life["last"] + 1))

    def test_whatever_listens_is_on_loopback_and_asks_for_a_key(self, life: dict[str, Any]) -> None:
        assert life["listening"] == []

    def test_its_folder_is_its_users_alone_and_holds_no_key(self, life: dict[str, Any]) -> None:
        assert life["folder"].stat().st_mode & 0o777 == 0o700
        assert len(life["keys"]) >= 2
        for path in life["folder"].rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert not any(key.encode() in content for key in life["keys"]), path
        assert not any(key in life["interrupted"] + life["resumed"] for key in life["keys"])

    def test_server_and_learner_agree_after_every_update(self, life: dict[str, Any]) -> None:
        parity = [row["weights/parity"] for row in step_rows(life["folder"]) if "weights/parity" in row]
        assert parity
        assert max(parity) < 1e-3

    def test_no_token_was_trained_beyond_the_asynchronous_ratio(self, life: dict[str, Any]) -> None:
        assert max(row[STALENESS_MAX] for row in step_rows(life["folder"])) <= 1

    def test_every_episode_is_on_disk_with_tokens_logprobs_and_versions(self, life: dict[str, Any]) -> None:
        episodes = read_episodes(life["folder"] / "episodes")
        assert len(episodes) >= 4 * 16
        for episode in episodes:
            assert episode["kind"] == "trajectory", episode
            sizes = {len(episode[name]) for name in ("token_ids", "policy_mask", "logprobs", "versions")}
            assert len(sizes) == 1
            for position, is_policy in enumerate(episode["policy_mask"]):
                assert is_policy == any(turn["start"] <= position < turn["end"] for turn in episode["turns"])
                assert (episode["versions"][position] >= 0) == is_policy
                assert episode["logprobs"][position] <= 0

    def test_the_books_balance(self, life: dict[str, Any]) -> None:
        summary = json.loads(life["resumed"][life["resumed"].index("\n{\n") :])
        assert summary["books"]["balance"] is True

    def test_a_resumed_run_is_compared_with_the_evaluation_before_its_first_step(self, life: dict[str, Any]) -> None:
        summary = json.loads(life["resumed"][life["resumed"].index("\n{\n") :])
        assert "evaluated at the first start, with the weights of step 0: success" in life["resumed"]
        assert (summary["before"]["label"], summary["after"]["label"]) == ("step_0", f"step_{life['last']}")
        assert [row["step"] for row in read_metrics(life["folder"]) if "eval/success" in row] == [0, life["last"]]

    def test_the_exported_model_loads_in_transformers(self, life: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(life["folder"] / "model")
        tokenizer = AutoTokenizer.from_pretrained(life["folder"] / "model")
        assert model.config.vocab_size >= len(tokenizer)

    def test_the_metrics_tell_what_requests_sandboxes_and_the_stream_did(self, life: dict[str, Any]) -> None:
        last = step_rows(life["folder"])[-1]
        assert last["inference/requests"] > 0
        assert last["sandbox/leases"] > 0
        assert last["sandbox/commands"] >= last["sandbox/leases"]
        dropped = sum(count for name, count in last.items() if name.startswith("stream/dropped_"))
        assert last["stream/consumed"] + dropped + last["stream/waiting"] == last["stream/produced"]
        assert last["stream/balanced"] == 1

    def test_every_metric_is_described_in_the_reference(self, life: dict[str, Any]) -> None:
        names = {name for row in read_metrics(life["folder"]) for name in row} - {"step", "time"}
        assert len(names) > 100
        assert sorted(name for name in names if find_metric(name) is None) == []

    def test_its_last_status_says_what_there_was(self, life: dict[str, Any]) -> None:
        found = read_status(life["folder"])
        assert (found.name, found.state, found.step, found.total_steps) == ("life", "done", life["last"], life["last"])
        assert found.books["produced"] > 0
        assert found.episodes.keys() >= {"queued", "scoring", "ended"}
        assert 0 <= found.busy["learner"] <= 1
        assert [server["up"] for server in found.servers] == [1.0]
        assert sum(found.staleness.values()) > 0
        assert any("closing servers, workers and Ray" in each.text for each in found.news)

    def test_two_environments_are_mixed_by_weight_across_the_interruption(self, life: dict[str, Any]) -> None:
        episodes = read_episodes(life["folder"] / "episodes")
        groups = {episode["group_id"]: episode["env_id"] for episode in episodes}
        share = sum("LetterCount" in env_id for env_id in groups.values()) / len(groups)
        assert 0.5 < share < 0.85

    def test_each_environment_is_evaluated_and_each_level_is_watched(self, life: dict[str, Any]) -> None:
        rows = read_metrics(life["folder"])
        evaluated = [row["step"] for row in rows if "env_1/eval/success" in row]
        assert evaluated == [0, life["last"]]
        last = step_rows(life["folder"])[-1]
        assert 0 <= last["tasks/env_0/level_1_success"] <= 1
        assert last["tasks/env_0/level_0_share"] + last["tasks/env_0/level_1_share"] == pytest.approx(1)

    def test_every_decision_of_the_automatic_ratio_is_logged_with_its_reason(self, life: dict[str, Any]) -> None:
        lines = (life["folder"] / "logs" / "async_ratio.jsonl").read_text().splitlines()
        decisions = [json.loads(line) for line in lines]
        assert {decision["step"] for decision in decisions} == set(range(1, life["last"] + 1))
        assert all("idle" in decision["reason"] or "sample size" in decision["reason"] for decision in decisions)

    def test_the_timeline_has_each_step_once_also_across_the_interruption(self, life: dict[str, Any]) -> None:
        lines = [json.loads(line) for line in (life["folder"] / "logs/timeline.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, life["last"] + 1))
        assert sum(tokens for line in lines for work, _, _, tokens in line["learner"] if work == "accumulate") > 0
        assert all(line["cpu_cores"] >= 1 for line in lines)

    def test_a_plot_was_drawn(self, life: dict[str, Any]) -> None:
        assert (life["folder"] / "plots" / "reward.png").stat().st_size > 10_000

    @pytest.mark.nightly
    def test_its_checkpoint_is_evaluated_with_several_attempts(self, life: dict[str, Any], tmp_path: Path) -> None:
        code, output = run(
            *("eval", "--model", str(life["folder"]), "-n", "3", "-k", "2", "--temperature", "1"),
            *("--out", str(tmp_path / "eval"), "--json", "inference.engine=transformers"),
        )
        assert code == 0, output
        result = json.loads(output[output.index("{\n") :])
        assert (result["tasks"], result["attempts"], result["scored"]) == (3, 2, 6)
        assert set(result["pass_at_k"]) == {"1", "2"}
        assert len(list((tmp_path / "eval" / "transcripts").iterdir())) == 6

    @pytest.mark.nightly
    def test_resumed_when_all_is_done_it_is_evaluated_once_and_trains_nothing(self, life: dict[str, Any]) -> None:
        code, output = run(*life["resume"])
        assert code == 0, output
        rows = read_metrics(life["folder"])
        evaluated = [row["step"] for row in rows if "env_1/eval/success" in row]
        assert evaluated == [0, life["last"], life["last"]]
        assert [row["step"] for row in step_rows(life["folder"])] == list(range(1, life["last"] + 1))

    def test_the_name_of_a_run_is_not_taken_twice(self, life: dict[str, Any]) -> None:
        code, output = run("train", "configs/ci.yaml", "name=life", f"runs={life['folder'].parent}")
        assert code == 2
        assert "--resume" in output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["scheduler.groups_per_stp=4"], 2, "did you mean 'scheduler.groups_per_step'"),
        (["scheduler.group_size=-2"], 2, "scheduler.group_size"),
        (["steps=many"], 2, "steps"),
        (["model.path=/no/such/model"], 2, "/no/such/model: no such model folder"),
        (["envs.0.id=Nobody-v0"], 2, "Nobody-v0"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_starts(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    found, output = run("train", "configs/ci.yaml", "name=bad", f"runs={tmp_path}", *arguments)
    assert (found, len(output.strip().splitlines())) == (code, 1), output
    assert says in output


QUICK = ["inference.engine=transformers", "eval.before_and_after=false", "envs.0.max_turns=3"]
"""The engine for tiny models, which starts in seconds; everything else is the real thing."""


@pytest.mark.nightly
@pytest.mark.ray
def test_a_run_whose_episodes_all_fail_stops_and_says_why_and_begins_again_under_its_name(tmp_path: Path) -> None:
    """And what begins to fail after hours is saved first."""
    broken = tmp_path / "broken"
    broken.touch()
    arguments = ["train", "configs/ci.yaml", "name=fails", f"runs={tmp_path}", *QUICK, "steps=400"]
    arguments += ["envs.0.id=tests.counting:Breaking-v0", f"envs.0.kwargs={{file: {broken}}}"]
    arguments += ["scheduler.max_failures_in_a_row=8"]
    code, output = run(*arguments)
    assert code == 1, output
    assert "env_error" in output
    assert "no such level" in output
    assert "Traceback" not in output
    assert "(usually 10-40 s" in "".join(output.splitlines()[:3]), "what takes long is said before it begins"
    assert list_checkpoints(tmp_path / "fails") == []

    broken.unlink()
    process = start(*arguments, "--resume")
    try:
        wait_for_step(tmp_path / "fails", 1, process)
        broken.touch()
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert "begins again from its start" in output
    (checkpoint,) = list_checkpoints(tmp_path / "fails")
    assert checkpoint.step == step_rows(tmp_path / "fails")[-1]["step"] >= 1
    assert f"a checkpoint of step {checkpoint.step} is in" in output
    assert "--resume" in output


def child_of(process: subprocess.Popen[str], program: str) -> int:
    """A process of Ray's that a run has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and program in (path / "cmdline").read_text().partition("\0")[0]:
                return int(path.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError(f"the run has no {program}")


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.parametrize(("program", "name"), [("raylet", "raylet"), ("gcs_server", "control store")])
def test_when_ray_dies_the_run_saves_what_it_has_and_says_so_in_one_line(
    tmp_path: Path, program: str, name: str
) -> None:
    arguments = ["train", "configs/ci.yaml", "name=ray", f"runs={tmp_path}", *QUICK, "steps=400"]
    process = start(*arguments, "envs.0.id=tests.counting:Counting-v0", "checkpoint.every_minutes=0")
    try:
        wait_for_step(tmp_path / "ray", 1, process)
        os.kill(child_of(process, program), signal.SIGKILL)
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 1, output
    last = output.strip().splitlines()[-1]
    assert last.startswith("roll-flash: Ray's ")
    assert name in last
    assert "is gone" in last
    assert "state-dump" not in output
    (checkpoint,) = list_checkpoints(tmp_path / "ray")
    assert checkpoint.step == step_rows(tmp_path / "ray")[-1]["step"]


@pytest.mark.ray
@pytest.mark.docker
def test_a_run_bears_kill_9_of_its_learner_and_resumes_after_kill_9_of_its_driver(tmp_path: Path) -> None:
    """The steps after the checkpoint are repeated from the journal, no episode that had ended is played again, and
    nothing of the killed run stays."""
    arguments = [
        "train",
        "configs/ci.yaml",
        "name=killed",
        f"runs={tmp_path}",
        *QUICK,
        "steps=40",
    ]
    environment: dict[str, str] = {}
    session = Session.begin(environment)
    process = start(*arguments, **environment)
    try:
        wait_for_step(tmp_path / "killed", 2, process)
        assert open_to_everybody(process.pid) == []
        wait_for_step(tmp_path / "killed", 3, process)  # when step 3 begins, the checkpoint of step 1 is whole
        (rank,) = pids(process, "ray::RankActor")
        os.kill(rank, signal.SIGKILL)
        wait_for_step(tmp_path / "killed", newest_step(tmp_path / "killed") + 1, process)
        assert rank not in pids(process, "ray::RankActor")
    finally:
        process.kill()
    output, _ = process.communicate(timeout=30)
    assert output.count("; starting the learner again, from the checkpoint of step ") == 1, output
    assert output.count("the learner is back at step ") == 1, output
    assert "another result" not in output
    assert session.leaks() == []
    checkpoint = list_checkpoints(tmp_path / "killed")[-1].step
    events, _ = read_journal(tmp_path / "killed/journal", checkpoint)
    trained = [event["version"] for event in events if event["event"] == "trained"]
    ended = {event["episode"] for event in events if event["event"] == "ended"}
    assert trained[-1] >= 3 > checkpoint
    turns, _ = read_turns(tmp_path / "killed/journal")
    code, output = run(*arguments[:-1], f"steps={trained[-1] + 1}", "--resume")
    assert code == 0, output
    assert f"repeating steps {checkpoint + 1} to {trained[-1]} from the journal" in output
    assert "another result" not in output
    steps = {row["step"] for row in step_rows(tmp_path / "killed")}
    assert steps | {trained[-1]} == set(range(1, trained[-1] + 2)), "the last one may have been cut before its report"
    played = [row["episode_id"] for row in read_episodes(tmp_path / "killed/episodes") if row["kind"] == "trajectory"]
    assert not [name for name in ended if played.count(name) != 1]
    for row in read_episodes(tmp_path / "killed/episodes"):
        if row["info"].get("continued_turns"):
            [recorded] = decode(turns.of(row["episode_id"]))
            first = row["turns"][0]
            assert row["token_ids"][first["start"] : first["end"]] == recorded.generation.token_ids.tolist()
    code, output = run("verify", str(tmp_path / "killed"), "--repeat")
    assert code == 0, output
    assert f"lead to checkpoint {trained[-1] + 1}, bit by bit" in output


def test_docker_without_an_engine_is_one_clear_line_before_anything_starts(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/docker.sock"
    code, output = run(
        "train", "configs/ci.yaml", "name=bad", f"runs={tmp_path}", "sandbox.provider=docker", DOCKER_HOST=nowhere
    )
    assert code == 2
    *waits, line = output.strip().splitlines()
    assert f"no Docker engine answers at {nowhere}" in line
    assert all(wait.startswith("loading the tokenizer") for wait in waits), output
    assert not (tmp_path / "bad").exists()
    assert "Traceback" not in output


@pytest.mark.ray
def test_a_model_that_cannot_be_trained_is_refused_before_servers_start(tmp_path: Path) -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel

    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    config = CTRLConfig(
        vocab_size=json.loads((model / "config.json").read_text())["vocab_size"], n_embd=8, n_head=2, n_layer=1, dff=8
    )
    CTRLLMHeadModel(config).save_pretrained(model)
    arguments = ["train", "configs/ci.yaml", "name=refused", f"runs={tmp_path}", *QUICK, f"model.path={model}"]
    code, output = run(*arguments, "envs.0.id=tests.counting:Counting-v0")
    assert code == 2, output
    last = output.strip().splitlines()[-1]
    refused = "CTRLLMHeadModel is not a decoder-only language model with an output head (see docs/models.md)"
    assert last == f"roll-flash: {model}: {refused}"
    assert "whether model is computed exactly" in output, "what is waited for is said"
    assert list((tmp_path / "refused" / "logs").iterdir()) == [], "no server was started"
