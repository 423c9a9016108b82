"""The Python API as a user meets it: the same names, config and results as on the command line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import roll_flash
from roll_flash.evaluation.result import EvalResult, score
from roll_flash.evaluator import EvalRequest, plan_evaluation
from roll_flash.models.shape import read_shape
from roll_flash.monitor.json_lines import JsonLinesFile
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.run.run_dir import RunDir
from roll_flash.summary import summarize
from roll_flash.trainer import OnStep

ROOT = Path(__file__).parents[1]
TREE: dict[str, Any] = {"name": "maze", "model": {"path": "tiny"}, "envs": [{"id": "Maze-v0", "max_turns": 3}]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(config: roll_flash.Config | None = None, *, ended: bool = True) -> roll_flash.Run:
    """Two steps with their checkpoints and episodes, written as a run writes them."""
    config = config or roll_flash.load_config(TREE)
    with RunDir.create(config, resume=False) as folder:
        log = MetricsLog(folder.folder, tensorboard=False)
        for step in (1, 2):
            log.log(step, {"reward": step / 4, "step_s": 2.0})
            file = JsonLinesFile(folder.episodes / f"step_{step - 1:06d}.jsonl")
            file.write({"step": step - 1, "kind": "trajectory", "reward": 1.0})
            file.close()
            with folder.writing_checkpoint(step) as checkpoint:
                (checkpoint / "hf").mkdir()
                (checkpoint / "hf" / "config.json").write_text("{}")
        log.close()
        if ended:
            summarize(folder.folder, before=None, after=None, books={"produced": 4, "trained": 4})
    return roll_flash.Run(config.name)


# Names


def test_every_public_name_is_there_and_is_completed() -> None:
    assert set(roll_flash.__all__) <= set(dir(roll_flash))
    for name in roll_flash.__all__:
        assert getattr(roll_flash, name) is not None
    assert {"load_config", "train", "evaluate", "Run"} <= set(roll_flash.__all__)


def test_a_file_is_a_config_and_one_override_needs_no_list() -> None:
    Path("maze.yaml").write_text(json.dumps(TREE))
    assert roll_flash.load_config("maze.yaml", "steps=3").steps == 3
    with pytest.raises(roll_flash.ConfigError, match=r"Maze-v0.* is not registered"):
        roll_flash.train("maze.yaml")
    with pytest.raises(roll_flash.ConfigError, match=r"nothing\.yaml: no such config file"):
        roll_flash.train(Path("nothing.yaml"))


def test_names_stay_what_they_are_when_their_modules_are_imported() -> None:
    """A package of the same name would take the place of a function."""
    code = (
        "import roll_flash, roll_flash.trainer, roll_flash.evaluation.result, roll_flash.run.results\n"
        "print(all(callable(getattr(roll_flash, name)) for name in ('load_config', 'train', 'evaluate', 'Run')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n"


def test_the_import_is_light() -> None:
    code = (
        "import sys, roll_flash\ndir(roll_flash)\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'gymnasium', 'pydantic', 'numpy', 'typer')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = roll_flash.trian


# Run


def test_a_run_is_found_by_name_by_path_and_in_another_folder(tmp_path: Path) -> None:
    run = write_run()
    assert run.folder == Path("runs/maze")
    assert roll_flash.Run(tmp_path / "runs" / "maze").folder == tmp_path / "runs" / "maze"
    assert roll_flash.Run("maze", runs=tmp_path / "runs").folder == tmp_path / "runs" / "maze"
    assert repr(run) == "Run('runs/maze')"


def test_a_run_that_is_not_there_is_an_error_with_a_suggestion() -> None:
    write_run()
    with pytest.raises(roll_flash.ConfigError, match="did you mean maze"):
        roll_flash.Run("mase")


def test_a_run_gives_its_config_metrics_and_episodes() -> None:
    run = write_run()
    assert run.config == roll_flash.load_config(TREE)
    assert [(row["step"], row["reward"]) for row in run.metrics()] == [(1, 0.25), (2, 0.5)]
    assert [record["step"] for record in run.episodes()] == [0, 1]
    assert [record["step"] for record in run.episodes(step=1)] == [1]
    with pytest.raises(FileNotFoundError, match="step_000007"):
        run.episodes(step=7)


def test_the_model_of_a_run_is_the_newest_one() -> None:
    run = write_run()
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1, 2]
    assert run.model == run.folder / "checkpoints" / "step_2" / "hf"


def test_a_run_before_its_first_step_has_no_metrics_and_no_model() -> None:
    with RunDir.create(roll_flash.load_config(TREE), resume=False):
        run = roll_flash.Run("maze")
        assert (run.metrics(), run.episodes(), run.checkpoints, run.model) == ([], [], [], None)


def test_the_summary_of_a_run_is_that_of_its_end() -> None:
    summary = write_run().summary()
    assert (summary["name"], summary["steps"], summary["seconds"]) == ("maze", 2, 4.0)
    assert summary["books"]["balance"] is True


def test_a_run_that_has_not_ended_has_no_summary() -> None:
    run = write_run(ended=False)
    with pytest.raises(roll_flash.RollFlashError, match="has not ended"):
        run.summary()


def test_a_run_that_goes_on_has_no_summary_of_its_earlier_end() -> None:
    run = write_run()
    with RunDir.create(roll_flash.load_config(TREE), resume=True), pytest.raises(roll_flash.RollFlashError):
        run.summary()


# evaluate


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[EvalRequest]:
    """What would be evaluated; stands in for servers and workers."""
    seen: list[EvalRequest] = []

    async def run_evaluation(request: EvalRequest) -> tuple[EvalResult, Path]:
        await asyncio.sleep(0)
        seen.append(request)
        return score([], label="test", tasks=1, attempts=1, seconds=1.0), Path("out")

    monkeypatch.setattr("roll_flash.evaluator.run_evaluation", run_evaluation)
    return seen


def test_keyword_arguments_are_the_options_of_the_command(requests: list[EvalRequest]) -> None:
    result = roll_flash.evaluate(
        env="Maze-v0", model=Path("folder"), tasks=5, attempts=2, pass_at=[1, 2], out=Path("o"), overrides=["seed=3"]
    )
    assert isinstance(result, roll_flash.EvalResult)
    (request,) = requests
    assert request == EvalRequest(
        env="Maze-v0", model="folder", tasks=5, attempts=2, pass_at="1,2", out="o", overrides=("seed=3",)
    )
    roll_flash.evaluate(Path("maze.yaml"), overrides="seed=3")  # as `load_config` takes one
    assert requests[-1] == EvalRequest(config="maze.yaml", overrides=("seed=3",))


def test_an_evaluation_runs_where_an_event_loop_runs_already(requests: list[EvalRequest]) -> None:
    async def cell() -> EvalResult:
        return roll_flash.evaluate(Path("maze.yaml"))

    assert asyncio.run(cell()).label == "test"
    assert requests == [EvalRequest(config="maze.yaml")]


def test_a_loaded_config_is_evaluated_like_its_file() -> None:
    config = roll_flash.load_config(TREE, ["eval.tasks=7"])
    Path("maze.yaml").write_text(config.to_yaml())
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    loaded, file = (
        plan_evaluation(EvalRequest(config=source, model="model", attempts=2)) for source in (config, "maze.yaml")
    )
    assert loaded == file
    assert (loaded.config.eval.tasks, loaded.config.eval.attempts, loaded.config.model.path) == (7, 2, "model")


def test_what_cannot_be_evaluated_is_one_error() -> None:
    with pytest.raises(roll_flash.ConfigError, match="nothing to evaluate on"):
        roll_flash.evaluate()


# The README and the example


def test_the_lines_of_the_readme_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: list[EvalRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    """With stand-ins for what takes minutes."""

    def train(config: roll_flash.Config, *, on_step: OnStep) -> None:
        for row in write_run(config).metrics():
            on_step(row["step"], row)

    monkeypatch.setattr("roll_flash.trainer.train", train)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    page = (ROOT / "README.md").read_text().partition("## From Python")[2]
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(lines, "README.md", "exec"), {})
    assert "1 0.25\n2 0.5\n" in capsys.readouterr().out
    assert requests == [EvalRequest(model="runs/mine", tasks=20, attempts=4)]


@pytest.mark.ray
def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "python_api.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "step 1: reward" in said
    assert "step 2: reward" in said
    rows = [json.loads(line) for line in (tmp_path / "runs/python-api/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 2
    assert roll_flash.Run(tmp_path / "runs" / "python-api").summary()["steps"] == 2


@pytest.mark.nightly
@pytest.mark.ray
def test_the_example_runs_in_the_cells_of_a_notebook(tmp_path: Path) -> None:
    """An event loop runs already, as in Jupyter; `test_background.py` has each of the cases in which that matters."""
    code = (
        "import asyncio, pathlib\n"
        f"source = pathlib.Path({str(ROOT / 'examples' / 'python_api.py')!r}).read_text()\n"
        "async def notebook():\n"
        "    names = {'__name__': '__main__'}\n"
        "    for cell in source.split('# %%'):\n"
        "        exec(compile(cell.partition('\\n')[2], 'cell', 'exec'), names)\n"
        "asyncio.run(notebook())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2: reward" in done.stdout


LOOKS = """
import sys
import threading
import psutil
import roll_flash
import roll_flash.trainer

def look(step, metrics):
    started = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    print("torch" in sys.modules, any("gcs_server" in line for line in started))
    print([line for line in started if "dashboard.py" in line or "monitor.py" in line])

config = roll_flash.load_config(sys.argv[1], [f"runs={sys.argv[2]}", "steps=1"])
summarize, driver = roll_flash.trainer.summarize, []

def in_which_thread(*args, **kwargs):
    driver.append(threading.current_thread() is threading.main_thread())
    return summarize(*args, **kwargs)

roll_flash.trainer.summarize = in_which_thread
roll_flash.train(config, on_step=look)
print("the summary holds up the driver:", driver)
"""


@pytest.mark.ray
def test_a_run_starts_and_imports_only_what_it_uses(tmp_path: Path) -> None:
    """All of it is waited for before the first step."""
    read_shape("tiny")  # once, with torch
    command = [sys.executable, "-c", LOOKS, str(ROOT / "examples/first.yaml"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "False True\n[]\n" in done.stdout
    assert "the summary holds up the driver: [False]" in done.stdout
