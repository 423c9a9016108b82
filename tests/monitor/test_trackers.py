"""What W&B and MLflow keep of a run, read back with their own libraries. None of it needs a server or a network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll_flash.config.tree import load_config
from roll_flash.monitor.exporters import export
from roll_flash.monitor.exporters.export import Exports, check_exporters
from roll_flash.monitor.exporters.systems import MlflowExporter
from roll_flash.monitor.metrics import MetricsLog

pytestmark = pytest.mark.adapters

SECRET = "sk-very-secret"
KEY = 5 * "a1b2c3d4"
TREE: dict[str, Any] = {
    "name": "mine",
    "model": {"path": "tiny"},
    "envs": [{"id": "TextFrozenLake-v0", "kwargs": {"api_key": SECRET}}],
}
METRICS = {"reward": 0.25, "kl_k3": 0.1, "kl_k3/age_1": 0.2, "rewards/a (b)": 1.0}
SUMMARY = {"steps": 3, "books": {"trained": 4}}


@pytest.fixture(autouse=True)
def _nobodys_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings or keys of who runs the tests."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(export, "CLOSES_WITHIN_S", 300.0)  # MLflow needs many seconds of a busy core to make a database
    monkeypatch.chdir(tmp_path)


def config_with(*names: str, **keys: Any) -> dict[str, Any]:
    monitor = {"export": list(names), "export_offline": True}
    return load_config({**TREE, "monitor": monitor, **keys}).model_dump(mode="json")


def train(config: dict[str, Any], folder: Path, steps: range, *, resume_at: int | None = None, ends: bool) -> None:
    """Log steps as a run does."""
    check_exporters(config["monitor"]["export"])
    folder.mkdir(exist_ok=True)
    exports = Exports.of(config, folder, pytest.fail)
    log = MetricsLog(folder, tensorboard=False, resume_at=resume_at, exports=exports)
    for step in steps:
        log.log(step, {**METRICS, "reward": step / 4})
    log.close()
    if ends:
        exports.finish(SUMMARY)
    exports.close()
    if "wandb" in config["monitor"]["export"]:
        import wandb

        wandb.teardown()  # as when the process of a run ends: only then are its files complete


ROOT = Path(__file__).parents[2]


def test_a_run_and_its_resume_are_one_run_in_both(tmp_path: Path) -> None:
    """A whole run of the tiny model, with its summary."""
    words = ["name=mine", f"runs={tmp_path}", "monitor.export=[wandb, mlflow]", "monitor.export_offline=true"]
    words += ["envs.0.id=tests.counting:Counting-v0", "inference.engine=transformers", "eval.before_and_after=false"]
    for more in (["steps=1"], ["steps=2", "--resume"]):
        command = [sys.executable, "-m", "roll_flash", "train", "configs/ci.yaml", *words, *more]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "does not take" not in done.stdout
    folder = tmp_path / "mine"
    _, run = mlflow_run(folder)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert {step for step, _ in points(folder, "reward")} == {1, 2}
    assert points(folder, "summary/steps") == [(1, 1.0), (2, 2.0)]
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [[row["step"] for row in history(records(file)) if "reward" in row] for file in files] == [[1], [2]]


# W&B


@pytest.fixture
def wandb() -> Iterator[Any]:
    import wandb

    yield wandb
    wandb.teardown()


def records(file: Path) -> list[Any]:
    """Records of a file of W&B's offline mode."""
    from tests.monitor.wandb_file import read_records

    return read_records(file)


def history(found: list[Any]) -> list[dict[str, Any]]:
    """Lines of `run.log`, in their order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]


def test_wandb_keeps_a_run_offline_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(config_with("wandb"), folder, range(1, 4), ends=False)
    train(config_with("wandb"), folder, range(2, 5), resume_at=1, ends=True)  # steps 2 and 3 are repeated
    first, second = (records(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")))
    runs = [next(record.run for record in found if record.HasField("run")) for found in (first, second)]
    assert {(run.project, run.display_name) for run in runs} == {("roll-flash", "mine")}
    assert {run.run_id for run in runs} == {(folder / "wandb.id").read_text()}
    assert [(row["step"], row["reward"]) for row in history(first)] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [(row["step"], row["reward"]) for row in history(second)] == [(2, 0.5), (3, 0.75), (4, 1.0)]
    assert METRICS.keys() <= history(first)[0].keys()
    assert [record.exit.exit_code for found in (first, second) for record in found if record.HasField("exit")] == [1, 0]
    defined = [record.metric for record in first if record.HasField("metric")]
    assert [(each.glob_name, each.step_metric) for each in defined] == [("*", "step")]


def test_wandb_gets_the_config_without_secrets_and_the_summary(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(config_with("wandb"), folder, range(1, 2), ends=True)
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = records(file)
    (run,) = (record.run for record in found if record.HasField("run"))
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["learner"] == config_with("wandb")["learner"]
    summary: dict[str, Any] = {}
    for record in found:
        if record.HasField("summary"):
            summary |= {
                update.key or "/".join(update.nested_key): update.value_json for update in record.summary.update
            }
    assert summary["summary/steps"] == "3.0"
    assert summary["summary/books/trained"] == "4.0"
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert "wandb-metadata.json" not in {path.name for path in folder.rglob("*")}  # it would have the command line


def test_a_wandb_server_that_never_answers_ends_no_run_and_keeps_no_process(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from roll_flash.monitor.exporters import export, systems
export.CLOSES_WITHIN_S = systems.OPENS_WITHIN_S = systems.FINISHES_WITHIN_S = 2.0
config = {config_with("wandb")!r}
config["monitor"]["export_offline"] = False
exports = export.Exports.of(config, Path("."), lambda line: print("note:", line))
exports.log(1, 0.0, {{"reward": 0.5}})
exports.close()
print("the run goes on")
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr
    *notes, last = done.stdout.splitlines()
    assert last == "the run goes on"
    assert notes[0].startswith("note: wandb does not take the metrics (")
    assert notes[-1] == "note: wandb did not get 1 points of metrics.jsonl, which has all"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_without_a_key_wandb_says_so_and_asks_nobody(tmp_path: Path, wandb: Any) -> None:
    config, notes = config_with("wandb"), list[str]()
    config["monitor"]["export_offline"] = False
    Exports.of(config, tmp_path, notes.append).close()
    (note,) = notes
    assert "wandb login" in note


# MLflow


def mlflow_run(folder: Path) -> Any:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'roll-flash'")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    client, run = mlflow_run(folder)
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]


def test_mlflow_begins_one_run_however_often_its_server_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    folder, log_batch, failures = tmp_path / "run", mlflow.MlflowClient.log_batch, iter([OSError("away")] * 2)
    folder.mkdir()

    def fail_twice(*arguments: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return log_batch(*arguments, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail_twice)
    exporter = MlflowExporter(folder, config_with("mlflow"))
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            exporter.open()
    exporter.open()
    exporter.close(None)
    _, run = mlflow_run(folder)
    assert run.data.params["name"] == "mine"


def test_mlflow_keeps_a_run_offline_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(config_with("mlflow"), folder, range(1, 4), ends=False)
    _, run = mlflow_run(folder)
    assert (run.info.status, run.info.run_name) == ("FAILED", "mine")
    changed = config_with("mlflow", steps=40)
    train(changed, folder, range(2, 5), resume_at=1, ends=True)  # steps 2 and 3 are repeated
    _, resumed = mlflow_run(folder)
    assert (resumed.info.run_id, resumed.info.status) == (run.info.run_id, "FINISHED")
    assert sorted(points(folder, "reward")) == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]
    assert {step for step, _ in points(folder, "kl_k3/age_1")} == {1, 2, 3, 4}
    assert {step for step, _ in points(folder, "rewards/a _b_")} == {1, 2, 3, 4}
    assert points(folder, "summary/books/trained") == [(4, 4.0)]


def test_mlflow_gets_the_config_without_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(config_with("mlflow"), folder, range(1, 2), ends=True)
    _, run = mlflow_run(folder)
    assert run.data.params["learner.loss.name"] == load_config(TREE).learner.loss.name
    assert run.data.params["envs.0.kwargs.api_key"] == "***"
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_an_id_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "mlflow.id").write_text("../../else\n")
    notes: list[str] = []
    Exports.of(config_with("mlflow"), tmp_path, notes.append).close()
    (note,) = notes
    assert note.startswith("mlflow does not take the metrics (ValueError: ")
    assert "mlflow.id has no id; remove it" in note
