"""The metrics of a run: valid whatever is logged, continued where a resumed run goes on, readable by TensorBoard."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from roll_flash.monitor.metrics import NOT_FINITE, MetricsLog, newest_step, read_metrics, series


def test_values_that_are_not_finite_become_counted_nulls(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.log(1, {"reward": 0.5, "idle/learner": 0.25, "idle/servers": math.nan, "grad_norm": math.inf})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row["idle/learner"] == 0.25
    assert row["idle/servers"] is None
    assert row["grad_norm"] is None
    assert row[NOT_FINITE] == 2


def test_something_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    with pytest.raises(TypeError, match="'idle/learner' must be a number"):
        log.log(1, {"idle/learner": "much"})
    log.close()


def test_a_resumed_run_drops_the_steps_it_will_do_again_but_keeps_a_copy(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    for step in range(1, 6):
        log.log(step, {"reward": step / 10})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    log = MetricsLog(tmp_path, tensorboard=False, resume_at=3)
    log.log(4, {"reward": 9.0})
    log.close()
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 9.0)]
    kept = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl.bak").read_text().splitlines()]
    assert kept == [4, 5]


def test_a_damaged_line_is_set_aside_by_a_resume_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = [b'{"step": 2, "rew\x00rd": 0.2}', b'{"stfp": 2}', b"[" * 5000, b'{"step": null}']
    path.write_bytes(b"\n".join([b'{"step": 1}', *damaged, b'{"step": 3}', b""]))
    MetricsLog(tmp_path, tensorboard=False, resume_at=3).close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]
    assert path.with_name("metrics.jsonl.bak").read_bytes().splitlines() == damaged
    assert capsys.readouterr().err == f"{path}: 4 damaged lines are now in metrics.jsonl.bak\n"


def test_the_newest_step_is_read_in_spite_of_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_step(tmp_path) == 0
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew{"step": 3}\n{"step": 4}\n{"st')
    assert newest_step(tmp_path) == 4


def test_events_of_tensorboard_that_cannot_be_written_end_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, tensorboard=True)
    log.log(1, {"reward": 0.1})
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    events.unlink()
    events.mkdir()  # no disk can be filled here
    for step in (2, 3):
        log.log(step, {"reward": 0.2})
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().err == "TensorBoard gets no more metrics (Is a directory); the run goes on\n"


def test_resuming_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.log(1, {"reward": 1.0})
    log.close()
    MetricsLog(tmp_path, tensorboard=False, resume_at=1).close()
    assert len(read_metrics(tmp_path)) == 1
    assert not (tmp_path / "metrics.jsonl.bak").exists()


def test_a_series_holds_the_last_finite_value_of_each_step() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "a": 1.0},
        {"step": 1, "a": None},
        {"step": 2, "b": 3.0},
        {"step": 0, "a": 2.0},
    ]
    assert series(rows, "a") == ([0], [2.0])
    assert series(rows, "c") == ([], [])


def test_tensorboard_shows_every_finite_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, tensorboard=True)
    log.log(1, {"reward": 0.25, "idle/learner": 0.5, "grad_norm": math.nan})
    log.log(2, {"reward": 0.75})
    log.close()
    resumed = MetricsLog(tmp_path, tensorboard=True, resume_at=1)
    resumed.log(2, {"reward": 1.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"reward", "idle/learner"}
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 1.0)]
