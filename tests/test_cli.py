"""The `roll-flash` command as a user meets it: exit codes, one-line errors, suggestions, quick help, clean ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from ray.exceptions import OutOfMemoryError
from typer.main import get_command

from roll_flash import __version__
from roll_flash.cli import evaluate
from roll_flash.cli.main import app, main
from roll_flash.config.tree import load_config
from roll_flash.errors import ConfigError, RollFlashError, RunError
from roll_flash.evaluation.result import score
from roll_flash.run.run_dir import RunDir
from tests.command_line import parse

ROOT = Path(__file__).parents[1]

TREE: dict[str, Any] = {"name": "maze", "model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}

ENVIRONMENT = '''
"""Environments of a user."""
import gymnasium

class Echo(gymnasium.Env):
    """Repeat what was said."""
    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def __init__(self, broken=False):
        self.broken = broken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.broken:
            raise OSError("no maze today")
        return "say hello", {}

    def step(self, action):
        return "", float("hello" in action), True, False, {"success": "hello" in action}

gymnasium.register("Echo-v0", Echo)
'''


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_environments.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))


def config_file(**changes: Any) -> str:
    Path("maze.yaml").write_text(yaml.safe_dump({**TREE, **changes}))
    return "maze.yaml"


def finished_run() -> None:
    with RunDir.create(load_config(TREE), resume=False) as run, run.writing_checkpoint(3) as folder:
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")


def roll_flash(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "roll_flash", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


# Help and start


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom roll_flash.cli.main import main\nmain(['--help'])\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'gymnasium', 'pydantic', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def test_help_lists_what_exists() -> None:
    done = roll_flash("--help")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.partition("Commands:\n")[2].splitlines()]
    watching = "status watch dash plot scale diagnose replay verify"
    described = f"init train eval eval-diff serve-gateway serve plan {watching} gpu-check export doctor"
    assert listed == [*described.split(), "envs", "sandbox", "checkpoints"]
    assert done.stdout.isascii()  # no boxes in pipes


@pytest.mark.parametrize(
    "command", [["train"], ["eval"], ["eval-diff"], ["envs", "list"], ["sandbox", "ls"], ["export"], ["doctor"]]
)
def test_each_command_has_help_and_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_each_help_has_an_example_that_the_program_takes(capsys: pytest.CaptureFixture[str]) -> None:
    def commands(command: Any, words: list[str]) -> Iterator[list[str]]:
        for name, child in getattr(command, "commands", {}).items():
            yield from commands(child, [*words, name])
        if not hasattr(command, "commands"):
            yield words

    found = list(commands(get_command(app), []))
    assert len(found) > 20
    for words in found:
        assert main([*words, "--help"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        example = said.partition("Example: roll-flash ")[2].partition(" docs/config.md lists")[0]
        assert example.split()[: len(words)] == words
        parse(shlex.split(example))


def test_tab_offers_the_names_of_runs(tmp_path: Path) -> None:
    for name in ("maze", "maze-seed1", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("")
    asked = {"_ROLL_FLASH_COMPLETE": "complete_bash", "COMP_WORDS": "roll-flash watch ma", "COMP_CWORD": "2"}
    done = roll_flash("watch", env={**os.environ, **asked})
    assert done.stdout.split() == ["maze", "maze-seed1"]


@pytest.mark.parametrize(
    ("override", "page"),
    [
        ("model.path=/no/such/model", "models"),
        ("stepz=3", "config"),
        ("envs.0.id=nothing.py:Nothing-v0", "environments"),
        ("envs.0={id: Dataset-v0, data: nothing.jsonl, reward: exact}", "data"),
    ],
)
def test_an_error_names_the_page_that_tells_more(capsys: pytest.CaptureFixture[str], override: str, page: str) -> None:
    assert main(["train", config_file(), override, "--dry-run"]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"(see docs/{page}.md)")


def test_the_pages_that_errors_name_are_there() -> None:
    pages = {each.page for each in _errors(RollFlashError)} - {None}
    assert len(pages) >= 6
    assert all((ROOT / str(page)).is_file() for page in pages)


def _errors(kind: type[RollFlashError]) -> Iterator[type[RollFlashError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _errors(child)


def test_the_help_of_train_says_where_every_key_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "docs/config.md" in said
    assert "python -m roll_flash.config.reference" in said


# Usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "roll-flash: No such command 'trian'. Did you mean 'train'? (see roll-flash --help)"),
        (["frobnicate"], "No such command 'frobnicate' (see roll-flash --help)"),
        ([], "Missing command"),
        (["--nonsense"], "No such option: --nonsense"),
        (["train", "--resum", "maze.yaml"], "No such option: --resum (Possible options: --resume)"),
        (["eval", "--modle=x"], "(Possible options: --model)"),
        (["train", "-x"], "No such option: -x"),
        (["train", "--name", "foo", "maze.yaml"], "No such option: --name; write it as name=foo (see"),
        (["train", "maze.yaml", "--learner.learning_rate=1e-5"], "write it as learner.learning_rate=1e-5"),
        (["train", "maze.yaml", "--max-new-tokens", "9"], "write it as rollout.max_new_tokens=9"),
        (["train", "maze.yaml", "--lr", "-1"], "write it as learner.learning_rate=-1"),
        (["train", "maze.yaml", "--steps"], "write it as steps=VALUE"),
        (["train", "--steps", "--json"], "write it as steps=VALUE"),
        (["eval", "--max_turns", "2", "--env", "Maze-v0"], "write it as envs.0.max_turns=2"),
        (["serve-gateway", "--engine=vllm"], "No such option: --engine"),
        (["envs", "check", "Maze-v0", "--steps", "2"], "No such option: --steps"),
        (["envs", "lst"], "Did you mean 'list'? (see roll-flash envs --help)"),
        (["export", "maze", "a", "b"], "unexpected extra argument(s) (b)"),
        (["eval", "-n", "many"], "Invalid value for '-n' / '--tasks': Input should be a valid integer"),
        (["eval", "--model"], "requires an argument"),
        (["sandbox", "check", "--userns", "none"], "'none' is not one of 'engine', 'required', 'host'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "train needs a CONFIG file"),
        (["train", "nothing.yaml"], "nothing.yaml: no such config file"),
        (["train", "maze.yaml", "other.yaml"], "one CONFIG is enough"),
        (["train", "maze.yaml", "scheduler.group_sise=4"], "did you mean 'scheduler.group_size'?"),
        (["train", "maze.yaml", "scheduler.group_size=-4"], "scheduler.group_size: input should be greater than"),
        (["train", "maze.yaml", "--resume", "envs.0.id=ShellMath-v0"], "no run to resume"),
        (["eval"], "give a CONFIG file, --env ID"),
        (["eval", "--env", "Maze-v0"], "--env needs --model"),
        (["export", "nobody", "out"], "nobody: no run of this name"),
        (["export", "nobody"], "export needs a DIR to write to, or --push ORG/NAME"),
        (["export", "nobody", "out", "--public"], "--public is for --push"),
        (["train", "maze.yaml", "--dry-run", "model.path=/no/such"], "/no/such: no such model folder"),
        (["train", "maze.yaml", "--dry-run", "envs.0.id=NoSuch-v0"], "envs: 'NoSuch-v0' is not registered"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("roll-flash: ")
    assert len(captured.err.splitlines()) == 1
    assert "Traceback" not in captured.err


def test_a_word_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--\x1b[2J\n"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("roll-flash tr", ["train"]),
        ("roll-flash envs ", ["list", "check", "demonstrate"]),
        ("roll-flash eval --en", ["--env", "--endpoint"]),
        ("roll-flash init --kind t", ["tools"]),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: list[str]) -> None:
    place = typed.count(" ")
    asked = {"_ROLL_FLASH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(place)}
    done = roll_flash(env={**os.environ, **asked})
    assert (done.returncode, done.stdout.split()) == (0, offered)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"roll-flash {__version__}\n"


def test_several_mistakes_are_shown_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config_file(), "steps=0", "stepz=1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "maze.yaml", "steps=7", "--resume", "seed=3"],
        ["train", "--resume", "steps=7", "maze.yaml", "seed=3"],
        ["train", "steps=7", "seed=3", "maze.yaml", "--resume"],
    ],
)
def test_words_and_options_come_in_any_order(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("roll_flash.trainer.train", _trainer(seen))
    config_file()
    main(arguments)
    ((config, resume),) = seen
    assert (config.steps, config.seed, resume) == (7, 3, True)


# Ends of a run


def _trainer(seen: list[Any], error: BaseException | None = None) -> Any:
    """Stands in for a training run of minutes: prints like one, then ends as told."""

    def train(config: Any, *, resume: bool = False) -> dict[str, Any]:
        seen.append((config, resume))
        print("step 1/1")
        if error is not None:
            raise error
        return SUMMARY

    return train


SUMMARY: dict[str, Any] = {
    **{
        "name": "maze",
        "env_id": "Maze-v0",
        "steps": 1,
        "total_steps": 1,
        "seconds": 2.0,
        "before": None,
        "after": None,
    },
    **{"tokens": 10, "tokens_per_s": 5.0, "run_folder": "runs/maze", "plot": None, "model_folder": None, "notes": []},
    "disk": {"checkpoints": 2_200_000, "logs": 1_000},
    "books": {"produced": 1, "trained": 1, "waiting": 0, "dropped": {}, "failed": {}, "balance": True},
}


def test_with_json_standard_output_is_one_object_and_progress_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roll_flash.trainer.train", _trainer([]))
    assert main(["train", config_file(), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == SUMMARY
    assert "step 1/1" in captured.err


def test_a_finished_run_ends_with_its_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roll_flash.trainer.train", _trainer([]))
    assert main(["train", config_file()]) == 0
    assert "Run maze is done" in capsys.readouterr().out


def test_a_user_without_a_home_is_told_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `docker run --user 4321` has: no HOME, and no line in /etc/passwd."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert main(["doctor", "--only", "python"]) == 2
    assert capsys.readouterr().err == "roll-flash: this user has no home folder: set HOME to one that you can write\n"


def test_a_user_in_a_folder_that_was_removed_is_told_to_go_elsewhere(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "from roll_flash.cli.main import main; raise SystemExit(main(['envs', 'list']))"]
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = "roll-flash: the current folder has been removed; go to another one with cd\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_no_other_user_can_write_what_a_command_makes(tmp_path: Path) -> None:
    words = ["-c", "from roll_flash.cli.main import main; raise SystemExit(main(['init', 'mine', '--model', 'tiny']))"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, umask=0, capture_output=True, check=True)
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o002]


@pytest.mark.parametrize("command", ["status .", "diagnose .", "verify .", "plan --from ."])
def test_what_reads_a_run_runs_no_module_of_the_current_folder(command: str, tmp_path: Path) -> None:
    """It may be the folder of a run from elsewhere."""
    for name in ("msgspec", "numpy", "psutil", "rich", "yaml"):
        (tmp_path / f"{name}.py").write_text("print('runs')")
    code = f"from roll_flash.cli.main import main; main({command.split()!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "runs" not in done.stdout.split()
    assert "roll-flash: " in done.stderr


def test_what_the_terminal_cannot_show_is_escaped() -> None:
    Path("maze.yaml").write_text(yaml.safe_dump({**TREE, "envs": [{"id": "größer-v0"}]}))
    done = roll_flash("train", "maze.yaml", "--dry-run", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert "'gr\\xf6\\xdfer-v0' is not registered" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RunError("all episodes failed"), 1, "roll-flash: all episodes failed"),
        (ConfigError("that cannot be"), 2, "roll-flash: that cannot be"),
        (ValueError("two\nlines"), 1, "internal error: ValueError: two lines; run again with --debug"),
        (ValueError("x" * 9000 + " the cause"), 1, "xxx the cause; run again"),
        (OutOfMemoryError("2 worker(s) were killed\n" + 900 * "x"), 1, "roll-flash: the memory of a node is full"),
        (PermissionError(13, "Permission denied", "/a/file"), 1, "roll-flash: /a/file: Permission denied; mend that"),
        (OSError(28, "No space left on device", "b"), 1, "roll-flash: b: No space left on device; mend that"),
        (OSError(22, "Invalid argument", "c"), 1, "internal error: OSError"),
        (KeyboardInterrupt(), 130, "interrupted; no checkpoint was written yet\n"),
    ],
)
def test_each_end_has_its_exit_code_and_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr("roll_flash.trainer.train", _trainer([], error))
    assert main(["train", config_file()]) == code
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert len(err) < 600


def test_after_ctrl_c_the_user_is_told_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run()
    monkeypatch.setattr("roll_flash.trainer.train", _trainer([], KeyboardInterrupt()))
    assert main(["train", config_file()]) == 130
    err = capsys.readouterr().err
    assert "a checkpoint of step 3 is in runs/maze; go on with the same command and --resume" in err


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_traceback_is_shown_with_debug_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.setattr("roll_flash.trainer.train", _trainer([], RunError("broken")))
    words = ["train", config_file()]
    assert main(["--debug", *words] if place == "before" else [*words, "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "roll-flash: broken"


def test_a_wrong_command_line_has_no_traceback_and_a_wrong_config_has_one_with_debug(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--debug", "trian"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["train", "nothing.yaml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


class Endpoint(BaseHTTPRequestHandler):
    """A stand-in for a model."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            b'{"choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}]}'
        )


def test_a_server_whose_output_nobody_reads_any_more_can_be_stopped() -> None:
    """As after `roll-flash serve-gateway | head -1`: what it said of the signal failed, and it went on for ever."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as endpoint:
        Thread(target=endpoint.serve_forever).start()
        try:
            address = f"http://127.0.0.1:{endpoint.server_port}/v1"
            words = ["serve-gateway", "--endpoint", address, "--model", "m", "--port", "0"]
            command = [sys.executable, "-m", "roll_flash", *words]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert process.stdout is not None
            assert any(b"Ctrl-C stops" in line for line in process.stdout)
        finally:
            endpoint.shutdown()
    time.sleep(0.5)  # it says more, and nobody reads that either
    process.stdout.close()
    process.terminate()
    try:
        assert process.wait(30) == 130
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("shell", "number"),
    [('exec "$@"', signal.SIGINT), ('exec "$@"', signal.SIGTERM), ('trap "" INT; exec "$@"', signal.SIGTERM)],
    ids=["ctrl-c", "sigterm", "sigterm in the background of a script"],
)
def test_ctrl_c_and_sigterm_end_a_command_cleanly_with_130(shell: str, number: signal.Signals, tmp_path: Path) -> None:
    """With a command that waits: its environment's module takes its time to import."""
    (tmp_path / "slow_module.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")
    Path("maze.yaml").write_text(yaml.safe_dump({**TREE, "envs": [{"id": "slow_module:Maze-v0"}]}))
    process = subprocess.Popen(
        ["sh", "-c", shell, "sh", sys.executable, "-m", "roll_flash", "train", "maze.yaml", "--dry-run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


# Subcommands


@pytest.mark.usefixtures("users_module")
def test_a_dry_run_prints_a_tree_that_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config_file(), "--dry-run", "envs.0.id=users_environments:Echo-v0", "steps=9"]) == 0
    out = capsys.readouterr().out
    assert "# environment: users_environments:Echo-v0 resets with 1 messages" in out
    assert "# disk: checkpoints take about 0.01 GiB each; up to 1 kept" in out
    assert load_config(yaml.safe_load(out)).steps == 9
    assert not Path("runs").exists()


@pytest.mark.usefixtures("users_module")
def test_a_dry_run_finds_an_environment_that_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["envs.0.id=users_environments:Echo-v0", "envs.0.kwargs.broken=true"]
    assert main(["train", config_file(), "--dry-run", *words]) == 1
    assert re.search(r"reset\(seed=\d+\) raised OSError: no maze today", capsys.readouterr().err)


@pytest.mark.parametrize("part", ["__init__", "reset", "step"])
def test_a_mistake_of_an_environment_is_named_with_its_line(capsys: pytest.CaptureFixture[str], part: str) -> None:
    """Also an exit, which ended the command without a word."""
    methods = {
        "__init__": "def __init__(self): {}",
        "reset": "async def reset(self, *, seed=None, options=None): {}; return 'hi', {{}}",
        "step": "async def step(self, action): {}; return '', 0.0, True, False, {{}}",
    }
    for mistake, said in (("exit(3)", "SystemExit: 3"), ("{}['fruit']", "KeyError: 'fruit'")):
        file = Path(f"{part.strip('_')}_{len(said)}.py")
        lines = [f"    {text.format(mistake if name == part else 'pass')}" for name, text in methods.items()]
        file.write_text("\n".join(["import roll_flash", "class Mine(roll_flash.Env):", *lines, ""]))
        where = f"{said} ({file.name}:{[*methods].index(part) + 3})"
        assert main(["envs", "check", f"{file}:Mine", "--seeds", "2"]) in (1, 2)
        shown = capsys.readouterr()
        assert where in shown.out + shown.err
        if part != "step":
            assert main(["train", config_file(envs=[{"id": f"{file}:Mine"}]), "--dry-run"]) in (1, 2)
            assert where in capsys.readouterr().err


def test_the_environments_that_ship_are_listed_with_what_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "list", "--json"]) == 0
    found = {entry["id"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert "tool-use" in found["ShellMath-v0"]["about"]
    assert not [name for name, entry in found.items() if entry["about"].startswith("Arguments")]
    assert "CartPole-v1" not in found
    assert main(["envs", "list", "--all"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out


@pytest.mark.usefixtures("users_module")
def test_an_environment_of_a_user_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    __import__("users_environments")
    assert main(["envs", "list"]) == 0
    assert "Repeat what was said." in capsys.readouterr().out


def test_export_tells_where_the_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    finished_run()
    assert main(["export", "maze@3", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert Path("out/config.json").is_file()
    assert main(["export", "maze", "out"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_doctor_reports_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    assert {"python", "torch", "memory"} <= {check["name"] for check in report["checks"]}


def test_sandbox_ls_is_a_list_also_where_no_engine_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    for place in ("tempfile.tempdir", "roll_flash.sandboxes.scratch.SHORT_PLACE"):
        monkeypatch.setattr(place, str(tmp_path))  # other tests have folders in the usual ones
    assert main(["sandbox", "ls", "--json"]) == 0
    shown = capsys.readouterr()
    assert "containers were not looked for: no Docker engine answers at" in shown.err
    listed = json.loads(shown.out)
    assert [each for each in listed if each["kind"] != "local"] == []  # of local ones other tests may have some
    assert main(["sandbox", "reap"]) == 0
    said = capsys.readouterr().out
    assert said == "nothing to remove\n" or listed, said


def test_eval_prints_its_table_and_fails_only_when_nothing_could_be_scored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    episode = {"kind": "trajectory", "reward": 1.0, "end": "terminated", "policy_tokens": 3, "turns": [1]}
    failure = {"kind": "failure", "cause": "generate_error", "task_id": "a", "message": "no server"}
    seen: list[Any] = []

    def evaluation(*records: dict[str, Any]) -> Any:
        async def run_evaluation(request: Any) -> Any:
            seen.append(request)
            return score(records, label="test", tasks=1, attempts=1, seconds=1.0), Path("runs/eval/x")

        return run_evaluation

    command = "roll_flash.evaluator.run_evaluation"
    monkeypatch.setattr(command, evaluation({**episode, "task_id": "a", "success": True}))
    assert main(["eval", "--env", "Echo-v0", "--model", "m", "-n", "5", "-k", "2", "seed=3", "--out", "o"]) == 0
    assert "success" in capsys.readouterr().out
    request = seen[0]
    assert (request.env, request.model, request.tasks, request.attempts) == ("Echo-v0", "m", 5, 2)
    assert (request.config, request.overrides, request.out) == (None, ("seed=3",), "o")
    monkeypatch.setattr(command, evaluation(failure))
    assert main(["eval", "maze.yaml", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failures"] == {"generate_error": 1}


def test_eval_tells_in_a_log_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with evaluate._progress() as status:
        status("1 of 9 attempts scored")
        monkeypatch.setattr(evaluate, "STATUS_EVERY_S", 0.0)
        status("2 of 9 attempts scored")
    assert capsys.readouterr().err == "2 of 9 attempts scored\n"


def test_output_that_nobody_reads_any_more_is_no_crash() -> None:
    done = subprocess.run(
        f"{sys.executable} -m roll_flash envs list --all | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.docker
def test_sandbox_check_runs_the_conformance_suite(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["sandbox", "check", "--provider", "docker", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [each for each in report["checks"] if not each["ok"]] == []
    assert (code, report["ok"]) == (0, True)
    assert report["isolation"] == "strong"
    assert len(report["checks"]) > 15


def test_sandbox_check_of_an_unknown_provider_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "check", "--provider", "dokcer"]) == 2
    assert "docker, local" in capsys.readouterr().err
