"""`roll-flash replay` as a user types it: what is compared and said, forks by a real server, going on by hand."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from recorded_run import play, spec_of, write_run

from roll_flash.cli.main import main
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.json_lines import encode, with_checksum
from roll_flash.types import EpisodeFailure, Task, Trajectory

ROOT = Path(__file__).parents[2]
ECHO = "tests.replay.replay_envs:Echo-v0"
REPAIR = "PythonRepair-v0"
MATH = "ShellMath-v0"
WAIT_S = 400.0


@pytest.fixture(autouse=True)
def _environments_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def echo_run(runs: Path, **kwargs: Any) -> Path:
    """A run with an episode of three turns, one that failed, and one whose texts are hostile."""
    task = Task("Echo-v0:7", ECHO, 7, kwargs)
    spec = spec_of(task, max_turns=4)
    outcomes = [play(spec, ["one", "two!", "three"], max_length=10**6)[0]]
    failed = spec_of(task, "g00000002-r0")
    outcomes.append(EpisodeFailure(failed.episode_id, failed.group_id, task, "env_timeout", "step took long", 1, 0))
    return write_run(runs, outcomes, envs=[{"id": ECHO, "max_turns": 4}], inference={"engine": "transformers"})


def test_a_whole_episode_is_played_again_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = echo_run(tmp_path)
    assert main(["replay", str(run), "g00000001-r0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("g00000001-r0 of Echo-v0:7: reward 12, success, terminated after 3 turns\nuser:\n")
    assert "turn 1, model:\n    two!\nturn 1, environment (reward 4):\n    two! with seed 7\n" in shown
    assert shown.endswith("3 of 3 turns played again, as recorded\n")
    assert not (run / "replays").exists()


def test_only_the_turns_before_the_given_one_are_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(echo_run(tmp_path)), "g00000001-r0", "--at-turn", "1", "--fork", "0"]) == 0
    shown = capsys.readouterr().out
    assert "one with seed 7" in shown
    assert "two!" not in shown
    assert "1 of 3 turns played again, as recorded" in shown


def test_an_answer_that_differs_is_one_line_with_its_turn_and_both_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = tmp_path / "changes"
    run = echo_run(tmp_path, changes=str(changes))
    changes.write_text("something\nelse\x1b[2J")
    assert main(["replay", str(run), "g00000001-r0"]) == 1
    line = capsys.readouterr().err
    assert line == (
        "roll-flash: g00000001-r0: in turn 1 the environment answers 'something\\nelse\\x1b[2J', which is not as "
        "recorded (recorded: 'two! with seed 7')\n"
    )


def test_what_a_model_or_an_environment_wrote_never_controls_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = echo_run(tmp_path, opening="\x1b]0;title\x07 hello\nturn 9, model:\r\u202e" + "x" * 100_000)
    assert main(["replay", str(run), "g00000001-r0"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b]0;title\\x07 hello\n    turn 9, model:\\r\\u202e" in shown
    assert not any(mark in shown for mark in "\x1b\x07\r\u202e")
    assert "characters left out" in shown
    assert len(shown) < 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["g00000001"], "no episode g00000001; did you mean g00000001-r0?"),
        (["g00000001-r1"], "did you mean g00000001-r0"),
        (["zzz"], "no episode zzz; its 2 ids are like g00000001-r0"),
        (["g00000002-r0"], "failed in turn 1 (env_timeout): step took long; a failure has no turns in the log: --at-"),
        (["g00000001-r0", "--at-turn", "4"], "g00000001-r0 has 3 turns: --at-turn 0 to 2 goes on, 3 plays all again"),
        (["g00000001-r0", "--at-turn", "3"], "has no turn 3 to go on from"),
        (["g00000001-r0", "--fork", "2"], "--fork needs --at-turn N"),
        (["g00000001-r0", "--model", "tiny"], "--model needs --at-turn N"),
        (["g00000001-r0", "--at-turn", "1", "--interactive", "--fork", "2"], "leave out --fork"),
        (["g00000001-r0", "--at-turn", "1", "--fork", "-1"], "--fork -1: a number from 0 on"),
        (["g00000001-r0", "--at-turn", "1"], "the run has no complete checkpoint yet"),
        (["g00000001-r0", "--at-turn", "1", "--endpoint", "http://127.0.0.1:1/v1"], "--endpoint needs --model NAME"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    run = echo_run(tmp_path)
    assert main(["replay", str(run), *words]) != 0
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_damaged_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = echo_run(tmp_path)
    log = run / "episodes/step_000000.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"action":"two!"', b'"action":"ten!"'))
    assert main(["replay", str(run), "g00000001-r0"]) == 2
    assert "step_000000.jsonl, line 1: the episode is damaged" in capsys.readouterr().err


@pytest.mark.ray
def with_column(run: Path, name: str, value: Any) -> None:
    """Change a column of the first episode; `...` removes it."""
    log = run / "episodes" / "step_000000.jsonl"
    first, *others = log.read_bytes().splitlines()
    record = {**json.loads(first), name: value}
    del record["crc32"]
    if value is ...:
        del record[name]
    log.write_bytes(b"\n".join([with_checksum(encode(record).encode()), *others, b""]))


@pytest.mark.parametrize("name", ["task_id", "env_id", "seed", "env_kwargs", "reward", "success", "end"])
def test_an_episode_without_a_column_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = echo_run(tmp_path)
    with_column(run, name, ...)
    assert main(["replay", str(run), "g00000001-r0"]) == 1
    assert capsys.readouterr().err == (
        f"roll-flash: {run}: its files are not as a run writes them: KeyError: '{name}'\n"
    )


@pytest.mark.parametrize(("name", "value"), [("action", 5), ("action", ["x"]), ("reward", "x"), ("observation", None)])
def test_a_turn_of_other_types_is_one_line(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = echo_run(tmp_path)
    first, *others = read_episodes(run / "episodes" / "step_000000.jsonl")[0]["turns"]
    with_column(run, "turns", [{**first, name: value}, *others])
    assert main(["replay", str(run), "g00000001-r0"]) == 1
    assert capsys.readouterr().err.startswith(f"roll-flash: {run}: its files are not as a run writes them: ")


@pytest.mark.parametrize("name", ["task_id", "end"])
def test_no_text_of_an_episode_looks_like_a_line_of_ours(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = echo_run(tmp_path)
    with_column(run, name, "x\n3 of 3 turns played again")
    main(["replay", str(run), "g00000001-r0", "--at-turn", "0", "--fork", "0"])
    assert "\n3 of 3" not in capsys.readouterr().out


def test_forks_of_a_model_go_on_from_the_turn_and_are_an_episode_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model on a server of the engine `transformers`; the second call adds to the log of the first."""
    run = echo_run(tmp_path)
    [original, _] = read_episodes(run / "episodes")
    command = ["replay", str(run), "g00000001-r0", "--at-turn", "2", "--model", str(resolve_model("tiny"))]
    assert main([*command, "--fork", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 forks are in" in shown
    assert shown.count("turn 2, model:") == 2
    forks = read_episodes(run / "replays" / "g00000001-r0-t2")
    assert sorted(fork["episode_id"] for fork in forks) == ["g00000001-r0-t2-f0", "g00000001-r0-t2-f1"]
    start = original["turns"][2]["start"]
    for fork in forks:
        assert fork["kind"] == "trajectory", fork["message"]
        assert fork["token_ids"][:start] == original["token_ids"][:start]
        assert not any(fork["policy_mask"][:start])
        assert all(fork["policy_mask"][fork["turns"][2]["start"] : fork["turns"][2]["end"]])
        assert [turn["in_prefix"] for turn in fork["turns"]] == [True, True, False]
    assert main(["replay", str(run), "g00000001-r0-t2-f1"]) == 0, "a fork can be played again like any episode"
    assert "3 of 3 turns played again, as recorded" in capsys.readouterr().out


class SaysEnd(BaseHTTPRequestHandler):
    """A stand-in for a model at an endpoint."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        choice = {"message": {"role": "assistant", "content": "end"}, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SaysEnd)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


@pytest.mark.ray
def test_a_model_at_an_endpoint_goes_on_with_the_conversation_so_far(tmp_path: Path, endpoint: str) -> None:
    run, out = echo_run(tmp_path), tmp_path / "out"
    command = ["replay", str(run), "g00000001-r0", "--at-turn", "1", "--endpoint", endpoint, "--model", "m"]
    assert main([*command, "--out", str(out)]) == 0
    said = [message["content"] for message in SaysEnd.asked[-2]["messages"]]
    assert said == ["say something", "one", "one with seed 7"]
    [fork] = read_episodes(out)
    assert [turn["action"] for turn in fork["turns"]] == ["one", "end", "end"]
    assert fork["completion_tokens"] == 2


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._descriptor, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "roll_flash", *arguments], stdin=inner, stdout=inner, stderr=inner, cwd=ROOT
        )
        os.close(inner)
        self.shown, self._seen = "", 0

    def wait_for(self, text: str) -> None:
        """Read until `text` is shown after all that was waited for before."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown[self._seen :]:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._descriptor], [], [], 1.0)[0]:
                self.shown += self._read()
        self._seen = self.shown.index(text, self._seen) + len(text)

    def _read(self) -> str:
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # Linux's end of a terminal whose program has ended
            data = b""
        assert data, f"the command has ended: {self.shown}"
        return data.decode()

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> int:
        """Wait for the end of the command; return its exit code."""
        try:
            while True:
                self.shown += os.read(self._descriptor, 1 << 16).decode()
        except OSError:
            return self.process.wait(timeout=WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._descriptor)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_user_goes_on_line_by_line_where_there_is_no_sandbox(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(
        terminal := Terminal("replay", str(echo_run(tmp_path)), "g00000001-r0", "--at-turn", "1", "--interactive")
    )
    terminal.wait_for("turn 1> ")
    terminal.type("mine\n")
    terminal.wait_for("mine with seed 7")
    terminal.wait_for("turn 2> ")
    terminal.type("last\n")
    assert terminal.end() == 0
    assert "the environment has ended the episode" in terminal.shown


def test_the_end_of_the_input_ends_the_episode_with_its_score(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(
        terminal := Terminal("replay", str(echo_run(tmp_path)), "g00000001-r0", "--at-turn", "1", "--interactive")
    )
    terminal.wait_for("turn 1> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "final score of what is there now: 0" in terminal.shown


def repair_run(runs: Path, provider: str) -> Path:
    """A run with an episode whose commands leave a file, in real sandboxes; the program is still wrong."""
    task = Task(f"{REPAIR}:3", REPAIR, 3)
    texts = ["<sh>echo written > note; cat note</sh>", "<answer>done</answer>"]
    outcome, _, _ = play(spec_of(task), texts, provider=provider)
    assert isinstance(outcome, Trajectory), outcome
    return write_run(runs, [outcome], envs=[{"id": REPAIR}], sandbox={"provider": provider})


@pytest.mark.usefixtures("require_bubblewrap")
def test_a_user_gets_a_shell_in_the_sandbox_at_that_turn(tmp_path: Path, terminals: list[Terminal]) -> None:
    run = repair_run(tmp_path, "local")
    terminals.append(
        terminal := Terminal("replay", str(run), "g00000001-r0", "--at-turn", "1", "--interactive", "--allow-weak")
    )
    terminal.wait_for("sandbox$ ")
    terminal.type("cat note; x=5\n")
    terminal.wait_for("    written")
    terminal.wait_for("sandbox$ ")
    terminal.type("printf '\\033[2J'$x; false\n")
    terminal.wait_for("    \\x1b[2J5")
    terminal.wait_for("exit code 1")
    terminal.wait_for("sandbox$ ")
    terminal.type("exit\n")
    assert terminal.end() == 0
    assert "final score of what is there now: 0" in terminal.shown
    assert "\x1b" not in terminal.shown


@pytest.mark.usefixtures("require_bubblewrap")
def test_recorded_commands_are_not_run_again_in_a_weak_sandbox_unless_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = repair_run(tmp_path, "local")
    assert main(["replay", str(run), "g00000001-r0"]) == 1
    assert "--allow-weak" in capsys.readouterr().err
    assert main(["replay", str(run), "g00000001-r0", "--allow-weak"]) == 0


@pytest.mark.docker
def test_an_episode_in_docker_is_brought_to_its_turn_and_its_commands_have_the_same_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], terminals: list[Terminal]
) -> None:
    task = Task(f"{MATH}:5", MATH, 5)
    texts = ["<sh>echo $((6*7)) | tee kept</sh>", "<answer>42</answer>"]
    outcome, _, _ = play(spec_of(task), texts, provider="docker")
    assert isinstance(outcome, Trajectory), outcome
    run = write_run(tmp_path, [outcome], envs=[{"id": MATH, "max_turns": 2}], sandbox={"provider": "docker"})
    assert main(["replay", str(run), "g00000001-r0"]) == 0
    assert "Output: 42" in capsys.readouterr().out
    terminals.append(terminal := Terminal("replay", str(run), "g00000001-r0", "--at-turn", "1", "--interactive"))
    terminal.wait_for("sandbox$ ")
    terminal.type("cat kept; id -u\n")
    terminal.wait_for("    42")
    terminal.wait_for("sandbox$ ")
    terminal.type("\x04")
    assert terminal.end() == 0
