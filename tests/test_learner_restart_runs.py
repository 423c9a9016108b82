"""Ranks of the learner of a real run are killed: it starts again in place, and comes to the same weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from test_training_runs import QUICK, RUN_TIMEOUT_S, newest_step, pids, run, start, step_rows, wait_for_step

from roll_flash.monitor.json_lines import encode, with_checksum
from roll_flash.run.run_dir import list_checkpoints
from roll_flash.run.verify import verify_run


def weights(folder: Path, step: int) -> bytes:
    (found,) = [each for each in list_checkpoints(folder) if each.step == step]
    return (found.hf / "model.safetensors").read_bytes()


def change_reward(folder: Path) -> None:
    """Change a reward of the newest step in the journal, as a defect of ours would: its checksum is right."""
    for path in sorted((folder / "journal").glob("after_step_*.jsonl"), reverse=True):
        lines = path.read_bytes().splitlines()
        trained = [number for number, line in enumerate(lines) if json.loads(line)["event"] == "trained"]
        if trained:
            event = json.loads(lines[trained[-1]])
            del event["crc32"]
            first, *others = event["batches"][0][0][1]
            rewards = [reward for _, reward in others]
            # The best becomes the worst, or another one the best: with the same order, advantages could be the same.
            first[1] = min(rewards) - 1 if first[1] > max(rewards) else max(rewards) + 1
            lines[trained[-1]] = with_checksum(encode(event).encode())
            path.write_bytes(b"".join(line + b"\n" for line in lines))
            return
    raise AssertionError("no step in the journal")


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.docker
def test_a_killed_rank_costs_no_step_no_episode_and_no_bit_of_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "dies"
    arguments = ["train", "configs/ci.yaml", "name=dies", *QUICK]
    arguments += ["checkpoint.every=4", "checkpoint.every_minutes=0", "checkpoint.keep=1000", "learner.ranks=2"]
    process = start(*arguments, f"runs={tmp_path}", "steps=100000")
    try:
        wait_for_step(folder, 2, process)
        others = pids(process, "ray::WorkerActor", "transformers.server", "raylet/raylet ", "gcs_server")
        assert len(others) >= 4
        for _ in range(2):
            ranks = pids(process, "ray::RankActor")
            assert len(ranks) == 2
            os.kill(max(ranks), signal.SIGKILL)
            killed_at = time.monotonic()
            wait_for_step(folder, newest_step(folder) + 3, process)
            print(f"three steps after {time.monotonic() - killed_at:.1f} s")
            assert not ranks & pids(process, "ray::RankActor")
        assert others <= pids(process, "ray::WorkerActor", "transformers.server", "raylet/raylet ", "gcs_server")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        process.kill()
    print(output)
    assert process.returncode == 130, output
    assert output.count("; starting the learner again, from the checkpoint of step ") == 2, output
    assert output.count("the learner is back at step ") == 2, output
    assert "with another result" not in output
    assert not [finding for finding in verify_run(folder) if not finding.ok]
    verified = run("verify", str(folder), "--repeat")
    assert verified[0] == 0, verified
    assert "bit by bit" in verified[1]
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    change_reward(changed)
    verified = run("verify", str(changed), "--repeat", "--trust")
    assert verified[0] == 1, verified
    assert re.search(r"FAIL  repeated .* \d+ tensors differ: \S+ by at most \d", verified[1]), verified
    last = newest_step(folder)
    assert [row["step"] for row in step_rows(folder)] == list(range(1, last + 1))

    again = tmp_path / "again" / "dies"  # a learner that never died: all steps, from the journal alone
    shutil.copytree(folder, again)
    for checkpoint in list_checkpoints(again)[1:]:
        shutil.rmtree(checkpoint.folder)
    code, output = run(*arguments, f"runs={again.parent}", f"steps={last}", "--resume")
    assert code == 0, output
    assert f"to {last} from the journal" in output
    assert weights(again, last) == weights(folder, last)
