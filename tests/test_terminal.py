"""What a model or an endpoint said reaches a terminal as text: it moves no cursor and turns no letters around."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import cast

import pytest

import roll_flash
from roll_flash.cli.main import main
from roll_flash.envs.tools.results import limit_prints
from roll_flash.monitor.progress import Progress
from roll_flash.processes.terminal_logs import make_logs_printable
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.images import build
from roll_flash.terminal import one_line, outliving_readers, printable, say

EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\u202eabc\u2066\u2028\x00\x7f\ud800"
HARMLESS = r"\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\u202eabc\u2066\u2028\x00\x7f\ud800"


HIDDEN = "a\u200bb\u2060\u180e\ufeff\ufff9\U000e0041\U000e007f"
SHOWN = r"a\u200bb\u2060\u180e\ufeff\ufff9\U000e0041\U000e007f"


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.dumps({"error": {"message": f"no {EVIL}"}}).encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def refusing() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_control_characters_are_shown_and_all_else_stays() -> None:
    assert printable(EVIL) == HARMLESS
    assert printable("a\tb\nc é 漢 \U0001f600 <b>") == "a\tb\nc é 漢 \U0001f600 <b>"
    assert one_line("a \n\x1b b\u2029") == r"a \x1b b"


def test_an_endpoints_error_reaches_the_terminal_as_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refusing() as url:
        assert main(["eval", "--env", "TextFrozenLake-v0", "-n", "1", "--endpoint", url, "--model", "m"]) == 1
    shown = capsys.readouterr().err
    assert r"no \x1b[2J\x1b]0;title\x07" in shown
    assert not any(character in shown for character in "\x1b\x07\x9b\r\u202e\u2028\x00")


def test_what_a_run_notes_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1) as progress:
        progress.note(f"warning: {EVIL}")
    assert capsys.readouterr().out == f"warning: {HARMLESS}\n"
    seen = io.StringIO()
    seen.isatty = lambda: True  # type: ignore[method-assign]
    with Progress(1, stream=seen) as progress:
        progress.status(EVIL)
    assert "\x1b]0" not in seen.getvalue()
    assert "\x07" not in seen.getvalue()


def test_a_record_of_the_log_is_one_line_of_text() -> None:
    make_logs_printable()
    assert logging.lastResort is not None
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "said %s", (f"{EVIL}\nERROR forged",), None)
    shown = logging.lastResort.format(record)
    assert "\n" not in shown
    assert "\x1b" not in shown


def test_what_a_tool_prints_of_a_models_text_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    with limit_prints():
        print(EVIL)
    assert capsys.readouterr().out == f"{HARMLESS}\n"


def test_the_command_line_prints_through_one_door() -> None:
    root = Path(roll_flash.__file__).parent
    for path in (*root.glob("*.py"), *root.glob("evaluate/*.py"), *root.glob("monitor/*.py")):
        if path.name != "terminal.py":
            names = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if _is_named_call(node)}  # type: ignore[attr-defined]
            assert "print" not in names, path


def _is_named_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it printed before is not printed twice. Both ways in which a run prints are tried."""
    read, write = os.pipe()
    with open(write, "w") as out, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        with outliving_readers():
            progress = Progress(3)
            progress.note("step 1")
            assert os.read(read, 100) == b"step 1\n"
            os.close(read)
            for _ in range(3):
                progress.note("step 2")
                say("step 3")


def test_text_that_would_not_be_seen_is_shown_and_joiners_of_scripts_stay() -> None:
    assert printable(HIDDEN) == one_line(HIDDEN) == SHOWN
    for text in ("می\u200cخواهم", "👩\u200d👧", "क्\u200dष", "é"):
        assert printable(text) == text


def test_what_a_build_prints_of_a_dockerfile_is_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command of a Dockerfile writes the lines that are shown every few seconds."""
    monkeypatch.setattr(build, "PROGRESS_S", 0.0)

    class Engine:
        async def stream(self, *_: object, **__: object) -> AsyncIterator[dict[str, str]]:
            yield {"stream": f"{EVIL}\nsecond"}

    asyncio.run(build.build_image(cast(EngineApi, Engine()), "image", b""))
    said = capsys.readouterr().err
    assert printable(said) == said
    assert len(said.splitlines()) == 3


PRINTS = """
import sys
from roll_flash.terminal import outliving_readers, say
with outliving_readers():
    for _ in range(2000):
        say("step 1 " * 10)
    print("step 2", end="")
sys.exit(7)
"""


def test_a_run_goes_on_when_the_disk_of_its_output_is_full_or_its_terminal_is_gone() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", PRINTS], stdout=full, check=False).returncode == 7
    controller, terminal = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", PRINTS], stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    os.close(controller)
    assert (process.wait(60), process.stderr.read() if process.stderr else b"") == (7, b"")
