"""`roll-flash serve`: one line for a command that cannot be run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from roll_flash.cli.main import main

PATIENCE_S = 300.0
KEY = "tml-key-of-a-test"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to serve"),
        (["--model", "tiny", "--api-key-env", "KEY_OF_ANOTHER_KIND"], "only keys that begin tml-"),
        (["--model", "tiny", "--port", "80000"], "from 0 to 65535"),
        (["--model", "tiny", "learner.engine=other"], "nobody provides 'other'"),
        (["tiny"], "a model is given with --model"),
    ],
)
def test_a_command_that_cannot_be_run_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.setenv("KEY_OF_ANOTHER_KIND", "sk-1")
    assert main(["serve", "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_a_server_that_has_trained_as_any_other(tmp_path: Path) -> None:
    """In a process of its own, which starts Ray and ends it."""
    options = ["--model", "tiny", "--port", "0", "--api-key-env", "KEY", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "roll_flash", "serve", *options, "inference.engine=transformers"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "KEY": KEY})
    try:
        assert server.stdout is not None
        url = next(found[1] for line in server.stdout if (found := re.search(r"TINKER_BASE_URL=(\S+),", line)))
        with httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": KEY}, timeout=PATIENCE_S) as http:
            session = http.post("/create_session", json={}).json()["session_id"]
            wanted = {"session_id": session, "base_model": "tiny", "model_seq_id": 0, "lora_config": {"rank": 2}}
            made = http.post("/create_model", json=wanted).json()
            while (answer := http.post("/retrieve_future", json={"request_id": made["request_id"]})).status_code == 408:
                pass
            assert answer.json() == {"model_id": made["model_id"]}
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 130
    finally:
        server.terminate()
        server.communicate()
