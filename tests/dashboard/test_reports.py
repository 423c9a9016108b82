"""What the pages are told: runs and their states, metrics, fates and advantages, transcripts, timeline, bad folders."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import Dashboard, serving
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from written_run import BEGIN_S, RecordedRun, trajectory

from roll_flash.dashboard import episode_index
from roll_flash.dashboard.folders import Sources
from roll_flash.dashboard.transcript import MAX_CHARACTERS, MAX_TOKENS, _texts
from roll_flash.diagnosis.reading import read_run
from roll_flash.errors import ConfigError
from roll_flash.monitor.episode_files import steps
from roll_flash.monitor.episode_files.steps import open_step, remove_steps
from roll_flash.monitor.json_lines import JsonLinesFile
from roll_flash.monitor.status import News, new_status, write
from roll_flash.replay.recorded import find_episode
from roll_flash.run.journal import compress_finished
from roll_flash.run.learner_logprobs import write_logprobs


def error_of(answer: httpx.Response) -> str:
    assert answer.status_code >= 400
    text: str = answer.json()["error"]
    assert "\n" not in text
    return text


def test_runs_are_listed_with_their_state_and_new_ones_appear(run: RecordedRun) -> None:
    runs = run.folder.parent
    with serving(runs) as dashboard:
        (card,) = dashboard.get("runs")["runs"]
        assert (card["name"], card["state"], card["step"], card["steps"]) == ("recorded", "running", 3, 20)
        assert card["recent"] == [0.5, 0.5, 0.5]
        other = RecordedRun(runs, "other", seed=5)
        other.step()
        other.close()
        (other.folder / "summary.json").write_text('{"steps": 1}')
        cards = {card["name"]: card for card in dashboard.get("runs")["runs"]}
        assert cards["other"]["state"] == "done"
        assert cards["other"]["experiment"] == cards["recorded"]["experiment"], "they differ in name and seed only"
        assert dashboard.get("run", run="other")["summary"] == {"steps": 1}


def test_the_list_of_runs_has_the_scores_of_evaluations(run: RecordedRun) -> None:
    (run.evaluation(2) / "results.json").write_text('{"success": {"value": 0.5}, "reward": {"value": 0.25}}')
    with serving(run.folder) as dashboard:
        cards = {card["kind"]: card for card in dashboard.get("runs")["runs"]}
    assert (cards["evaluation"]["reward"], cards["evaluation"]["success"]) == (0.25, 0.5)
    assert cards["run"]["reward"] == 0.5


def test_a_run_with_damaged_files_is_named_beside_the_others(run: RecordedRun) -> None:
    damaged = run.folder.parent / "damaged"
    damaged.mkdir()
    (damaged / "config.yaml").write_bytes(b"\xa6\xff")
    with serving(run.folder.parent) as dashboard:
        found = dashboard.get("runs")
    assert [card["name"] for card in found["runs"]] == ["recorded"]
    (error,) = found["errors"]
    assert error.startswith(f"{damaged}: its files are not as a run writes them: ")


def test_a_run_says_itself_what_it_does(run: RecordedRun) -> None:
    status = new_status("recorded", 20)
    news = [News(time_s=BEGIN_S, text="server 0 is back")]
    write(run.folder, replace(status, state="running", waits_for="2 groups", news=news, episodes={"model": 3}))
    with serving(run.folder) as dashboard:
        about = dashboard.get("run", run="recorded")
        assert (about["state"], about["status"]["waits_for"]) == ("running", "2 groups")
        write(run.folder, replace(status, state="failed", error="the disk is full"))
        about = dashboard.get("run", run="recorded")
        assert (about["state"], about["status"]["error"]) == ("failed", "the disk is full")


def test_lines_that_are_damaged_in_any_way_are_left_out(run: RecordedRun) -> None:
    damaged = b'{"step":1,"started_s":"\xff"}\n{"step":' + b"[" * 100_000 + b"\n"
    for name in ("metrics.jsonl", "logs/timeline.jsonl"):
        path = run.folder / name
        path.write_bytes(damaged + path.read_bytes())
    with serving(run.folder) as dashboard:
        assert len(dashboard.get("metrics", run="recorded", name="reward")["columns"]["reward"]) == 3
        assert dashboard.get("timeline", run="recorded")["whole"] is not None


def test_a_run_whose_process_is_gone_is_stopped(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.step()
    run.close()
    with serving(run.folder) as dashboard:
        assert dashboard.get("run", run="recorded")["state"] == "stopped"


def test_metrics_are_columns_and_of_two_rows_of_a_step_the_last_value_counts(run: RecordedRun) -> None:
    with serving(run.folder) as dashboard:
        found = dashboard.get("metrics", run="recorded", name=["reward", "unknown", "checkpoint/waited_s"])
        assert found["steps"] == [1, 2, 3]
        assert found["columns"] == {"reward": [0.5] * 3, "unknown": [None] * 3, "checkpoint/waited_s": [None] * 3}
        assert {"kl_k3", "idle/learner"} <= set(found["names"])
        file = JsonLinesFile(run.folder / "metrics.jsonl")
        file.write({"step": 3, "checkpoint/waited_s": 1.5, "reward": None})
        file.write({"step": 4, "reward": 0.75})
        file.close()
        with (run.folder / "metrics.jsonl").open("ab") as half:
            half.write(b'{"step": 5, "rew')
        found = dashboard.get("metrics", run="recorded", name=["reward", "checkpoint/waited_s"])
        assert found["columns"] == {"reward": [0.5, 0.5, 0.5, 0.75], "checkpoint/waited_s": [None, None, 1.5, None]}


def test_an_episode_shows_each_turn_with_its_tokens_as_they_were_sampled(run: RecordedRun) -> None:
    with serving(run.folder) as dashboard:
        episode = dashboard.get("episode", run="recorded", id="g00000002-r1")
    (sample,) = episode["samples"]
    assert [message["turn"] for message in sample["messages"]] == [None, 0, None, 1]
    assert "".join(sample["turns"][1]["tokens"]["texts"]) == sample["turns"][1]["action"] == "The answer is 42."
    record = next(
        json.loads(line)
        for line in (run.folder / "episodes/step_000002.jsonl").open()
        if '"g00000002-r1"' in line[:200]
    )
    turn = record["turns"][1]
    assert sample["turns"][1]["tokens"]["logprobs"] == record["logprobs"][turn["start"] : turn["end"]]
    assert set(sample["turns"][1]["tokens"]["versions"]) == {1}
    assert episode["replicas"] == [f"g00000002-r{n}" for n in range(4)]
    assert (episode["trained"], episode["rewards"]) == (3, {"correct": 1.0, "format": 0.5})


@pytest.mark.parametrize(
    ("learner", "expected"), [({}, 1.0), ({"advantage": "rloo"}, 2 / 3), ({"normalize_advantage": "none"}, 0.5)]
)
def test_advantages_are_those_of_the_learners_own_function(
    tmp_path: Path, learner: dict[str, Any], expected: float
) -> None:
    run = RecordedRun(tmp_path / "runs", learner=learner)
    run.step()
    run.close()
    with serving(run.folder) as dashboard:
        shown = [dashboard.get("episode", run="recorded", id=f"g00000000-r{n}")["advantage"] for n in range(4)]
    assert shown == pytest.approx([-expected, expected, -expected, expected], abs=1e-3)


def test_advantages_are_not_shown_where_the_learner_refused_what_was_to_be_compared(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.step(dropped_no_logprobs=1.0)
    run.step()
    run.close()
    with serving(run.folder) as dashboard:
        refused, whole = (dashboard.get("episode", run="recorded", id=f"g0000000{n}-r0") for n in range(2))
    assert refused["advantage"] is None
    assert whole["advantage"] is not None


@pytest.mark.parametrize("learner", [{"advantage": "gae"}, {"role_baseline": "group"}])
def test_advantages_are_not_shown_if_the_journal_does_not_have_what_they_are_of(
    learner: dict[str, str], tmp_path: Path
) -> None:
    """Values are known to the ranks alone, and the rewards of other roles than the first are in no journal."""
    run = RecordedRun(tmp_path / "runs", learner=learner)
    run.step()
    run.close()
    with serving(run.folder) as dashboard:
        assert dashboard.get("episode", run="recorded", id="g00000000-r0")["advantage"] is None


def test_an_episode_without_a_tokenizer_shows_numbers_and_a_dropped_group_its_reason(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.episodes.write(0, trajectory("lost", "g00000009", ["hm"]))
    run.episodes.write_dropped(0, {"group_id": "g00000009", "reason": "stale"})
    run.close()
    with serving(run.folder) as dashboard:
        episode = dashboard.get("episode", run="recorded", id="lost")
    assert (episode["dropped"], episode["trained"], episode["advantage"]) == ("stale", None, None)
    assert episode["samples"][0]["turns"][0]["tokens"]["texts"] is None


def test_tokens_are_compared_with_what_the_learner_said_of_them_if_it_was_recorded(run: RecordedRun) -> None:
    def turns(dashboard: Dashboard, number: int) -> list[dict[str, Any]]:
        (sample,) = dashboard.get("episode", run="recorded", id=f"g00000002-r{number}")["samples"]
        return [turn["tokens"] for turn in sample["turns"]]

    with serving(run.folder) as dashboard:
        sampled = [value for turn in turns(dashboard, 1) for value in turn["logprobs"]]
        said = (np.array(sampled) + np.arange(len(sampled)) / 100).astype(np.float32)
        write_logprobs(run.folder / "logs", 3, {("g00000002-r1", 0): said, ("g00000002-r2", 0): said[1:]})
        found = [value for turn in turns(dashboard, 1) for value in turn["differences"]]
        assert found == pytest.approx(np.arange(len(sampled)) / 100, abs=1e-5)
        assert [turn["differences"] for turn in turns(dashboard, 2)] == [None, None], "of another number of tokens"
        assert [turn["differences"] for turn in turns(dashboard, 3)] == [None, None]


def test_pieces_of_characters_that_never_come_to_an_end_are_shown_in_linear_time() -> None:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    euro, ids = tokenizer.encode("€").ids, []
    for letter in alphabet:
        ids += [tokenizer.token_to_id(letter)] * (MAX_TOKENS // len(alphabet))
    assert list(_texts([*euro, *euro], tokenizer)) == ["", "", "€", "", "", "€"]
    began = time.process_time()
    assert len(list(_texts([euro[0]] * MAX_TOKENS, tokenizer))) == MAX_TOKENS
    assert len(list(_texts(ids, tokenizer))) == len(ids)
    assert time.process_time() - began < 5  # it was 25 s for the first of them


def test_few_shot_answers_of_the_task_are_not_taken_for_turns(run: RecordedRun) -> None:
    given = trajectory("shots", "g5", ["mine"])
    example = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    run.step([trajectory("shots", "g5", ["mine"], messages=(*example, *given.messages))])
    with serving(run.folder) as dashboard:
        messages = dashboard.get("episode", run="recorded", id="shots")["samples"][0]["messages"]
    assert [message["turn"] for message in messages] == [None, None, None, 0]


def test_five_megabytes_of_an_observation_come_only_when_they_are_asked_for(run: RecordedRun) -> None:
    run.step([trajectory("long", "g6", ["cat big", "done"], observation="o" * 5_000_000)])
    with serving(run.folder) as dashboard, dashboard.client() as client:
        answer = client.get("/api/episode", params={"run": "recorded", "id": "long"})
        assert len(answer.content) < 200_000
        message = answer.json()["samples"][0]["messages"][2]
        assert (len(message["text"]), message["characters"]) == (MAX_CHARACTERS, 5_000_000)
        whole = client.get("/api/message", params={"run": "recorded", "id": "long", "sample": 0, "message": 2})
        assert whole.headers["content-type"].startswith("text/plain")
        assert len(whole.text) == 5_000_000


def test_the_timeline_shows_work_publications_episodes_and_single_turns(run: RecordedRun) -> None:
    with serving(run.folder) as dashboard:
        whole = dashboard.get("timeline", run="recorded")
        part = dashboard.get("timeline", run="recorded", begin=BEGIN_S + 10, end=BEGIN_S + 14)
        before = dashboard.get("timeline", run="recorded", begin=BEGIN_S + 8.5, end=BEGIN_S + 9.5)
    assert whole["whole"] == [BEGIN_S, BEGIN_S + 30]
    assert [span["kind"] for span in whole["work"]].count("accumulate") == 3
    assert whole["count"] == 12
    assert np.mean(whole["busy"]["accumulate"]) == pytest.approx(0.3, abs=0.01)
    assert sum(whole["running"]) * 30 / len(whole["running"]) == pytest.approx(12 * 3.5, rel=0.01)
    assert [span["kind"] for span in part["work"]] == ["publication", "stage judge"]
    assert [span["kind"] for span in before["work"]] == ["update", "stage judge"], "logged with the step after it"
    assert (before["work"][1]["end_s"] - BEGIN_S, before["work"][1]["rows"]) == (12, 4)
    assert part["count"] == 4
    begin, answered, stepped, server = part["episodes"][0]["turns"][0]
    assert (begin - BEGIN_S, answered - begin, stepped - answered, server) == pytest.approx(
        (10.2, 1.0, 0.4, "server-0")
    )


def test_pages_come_while_a_slow_disk_is_read(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    gives = threading.Event()

    def opened_slowly(path: Path) -> Any:
        """A stand-in for a disk that takes long to give the first bytes."""
        assert gives.wait(60)
        return open_step(path)

    monkeypatch.setattr(episode_index, "open_step", opened_slowly)
    monkeypatch.setattr(episode_index, "REFRESH_S", 0.0)
    with serving(run.folder) as dashboard:
        found = dashboard.get("episodes", once=True, run="recorded")
        assert (found["total"], found["is_complete"]) == (0, False)
        assert dashboard.get("run", run="recorded")["state"] == "running"
        assert dashboard.get("timeline", once=True, run="recorded")["is_complete"] is False
        gives.set()
        assert dashboard.get("episode", run="recorded", id="g00000002-r1")["reward"] == 1.0
        assert dashboard.get("episodes", run="recorded")["total"] == 12


def test_failures_are_counted_by_cause_environment_and_message(run: RecordedRun) -> None:
    for number in range(3):
        run.fail("env_error", f"door {number} is stuck", f"failed-{number}")
    run.fail("env_timeout", "too slow", "failed-9")
    with serving(run.folder) as dashboard:
        counts = dashboard.get("counts", run="recorded")
    assert (counts["episodes"], counts["failed"], counts["causes"]) == (16, 4, {"env_error": 3, "env_timeout": 1})
    assert counts["messages"] == [
        ["env_error", "door 2 is stuck", 3, "failed-2"],
        ["env_timeout", "too slow", 1, "failed-9"],
    ]


def test_an_evaluation_opens_like_a_run(run: RecordedRun) -> None:
    run.evaluation(2)
    with serving(run.folder) as dashboard:
        summary = dashboard.get("run", run="recorded/step_2")["summary"]
        assert summary["success"]["value"] == 0.5
        scores = {"success": summary["success"], "reward": None}
        assert dashboard.get("run", run="recorded")["evaluations"] == {"recorded/step_2": scores}
        assert dashboard.get("episodes", run="recorded/step_2")["total"] == 4
        assert dashboard.get("metrics", run="recorded/step_2")["steps"] == []
        (run.folder / "eval/step_2/results.json").write_text("{")
        assert dashboard.get("run", run="recorded")["evaluations"] == {"recorded/step_2": {}}


def test_an_empty_folder_is_no_run_and_its_names_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving() as dashboard:
        assert dashboard.get("runs") == {"runs": [], "errors": [], "roots": "runs"}
    RecordedRun(tmp_path / "runs").close()
    with pytest.raises(ConfigError, match=r"did you mean recorded\?"):
        Sources(["recorde"])


def test_a_run_that_has_only_begun_has_empty_pages(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs")
    with serving(run.folder) as dashboard:
        assert dashboard.get("timeline", run="recorded")["whole"] is None
        assert dashboard.get("episodes", run="recorded")["total"] == 0
        assert dashboard.get("counts", run="recorded")["steps"] is None
        assert dashboard.get("metrics", run="recorded", name=["reward"])["columns"] == {"reward": []}
    run.close()


def test_what_cannot_be_shown_is_one_line(run: RecordedRun) -> None:
    with serving(run.folder) as dashboard, dashboard.client() as client:
        assert "no run or evaluation" in error_of(client.get("/api/run", params={"run": "none"}))
        assert "no episode of this id" in error_of(client.get("/api/episode", params={"run": "recorded", "id": "x"}))
        assert "no episode of this group" in error_of(
            client.get("/api/group", params={"run": "recorded", "group": "x"})
        )
        assert "colour" in error_of(client.get("/api/episodes", params={"run": "recorded", "colour": "red"}))
        assert "min_step" in error_of(client.get("/api/episodes", params={"run": "recorded", "min_step": "many"}))
        (run.folder / "config.yaml").write_text("a: [1")
        assert error_of(client.get("/api/run", params={"run": "recorded"}))
        assert str(run.folder) in client.get("/api/runs").json()["errors"][0]


def test_a_run_of_a_newer_version_is_shown_with_a_notice(run: RecordedRun) -> None:
    path = next((run.folder / "journal").glob("after_step_*.jsonl"))
    path.write_bytes(
        b'{"crc32":"00000000","event":"begin","format":2}\n{"crc32":"00000000","event":"trained","steps":[]}\n'
    )
    with (run.folder / "config.yaml").open("a") as config:
        config.write("quantum: true\n")
    with serving(run.folder) as dashboard:
        about = dashboard.get("run", run="recorded")
        assert about["notices"] == ["written by a newer version (journal format 2): some of it may be missing here"]
        assert about["config"]["quantum"] is True
        assert dashboard.get("episode", run="recorded", id="g00000000-r1")["advantage"] is None


def test_a_journal_that_is_compressed_meanwhile_tells_the_same(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SMALL_BYTES", 0)

    def shown() -> list[Any]:
        asked = [dashboard.get("episode", run="recorded", id=f"g0000000{step}-r1") for step in (0, 1)]
        return [(episode["trained"], episode["advantage"]) for episode in asked]

    with serving(run.folder) as dashboard:
        before = shown()
        assert None not in before[0]
        journal = run.run_dir.journal
        (journal / "after_step_000009.jsonl").touch()
        compress_finished(journal, lambda: True)
        assert not (journal / "after_step_000000.jsonl").exists()
        assert shown() == before
    with serving(run.folder) as dashboard:
        assert shown() == before


def test_episodes_that_a_run_has_removed_are_told(run: RecordedRun) -> None:
    with serving(run.folder) as dashboard, dashboard.client() as client:
        assert dashboard.get("episodes", run="recorded")["total"] == 12
        assert dashboard.get("run", run="recorded")["notices"] == []
        remove_steps(run.folder / "episodes", 1)
        gone = "the episodes before step 1 were removed from the disk (monitor.episodes_gib)"
        assert dashboard.get("run", run="recorded")["notices"] == [gone]
        assert gone in error_of(client.get("/api/episode", params={"run": "recorded", "id": "g00000000-r1"}))
        assert dashboard.get("episode", run="recorded", id="g00000001-r1")["id"] == "g00000001-r1"
        assert dashboard.get("timeline", run="recorded")["whole"] is not None
    assert gone in read_run(run.folder).notes
    with pytest.raises(ConfigError, match=re.escape(gone)):
        find_episode(run.folder, "g00000000-r1")


def test_it_writes_nothing_into_a_run(run: RecordedRun) -> None:
    def files() -> dict[str, tuple[int, int]]:
        found = [path for path in run.folder.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    before = files()
    with serving(run.folder) as dashboard:
        for path in ("run", "counts", "mark", "metrics", "episodes", "timeline"):
            dashboard.get(path, run="recorded")
        dashboard.get("group", run="recorded", group="g00000001")
    assert files() == before


def test_what_cannot_be_read_is_one_line_beside_the_rest(run: RecordedRun) -> None:
    (run.folder / "episodes" / "step_000009.jsonl").mkdir()
    with serving(run.folder) as dashboard:
        counts = dashboard.get("counts", run="recorded")
    assert counts["episodes"] == 12
    assert counts["error"].endswith("step_000009.jsonl: Is a directory")
