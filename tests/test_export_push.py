"""`roll-flash export --push` with the real huggingface_hub and a hub on loopback."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.models.prepare import resolve_model
from tests.hub_server import Hub, open_hub

NAME = "me/mine"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with open_hub(monkeypatch, tmp_path / "cache") as opened:
        yield opened


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint of step 3, in the current folder."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "runs" / "maze" / "checkpoints" / "step_3"
    shutil.copytree(resolve_model("tiny"), checkpoint / "hf")
    (checkpoint / "COMPLETE").touch()
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "counting:Counting-v0"}]}
    (tmp_path / "runs" / "maze" / "config.yaml").write_text(json.dumps(tree))
    return checkpoint


def test_a_model_is_uploaded_private_and_can_be_trained_from_there(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "maze", "--push", NAME]) == 0
    said = capsys.readouterr()
    assert said.out == f"{hub.url}/{NAME}: model of step 3\n"
    assert f"uploading 2 MiB to {hub.url}/{NAME}" in said.err
    assert hub.private == {NAME: True}
    uploaded = hub.files[hub.commits[NAME]["main"]]
    assert uploaded == {file.name: file.read_bytes() for file in (run / "hf").iterdir()}
    assert (resolve_model(NAME) / "model.safetensors").read_bytes() == uploaded["model.safetensors"]


def test_a_newer_step_replaces_it_without_old_shards(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(NAME, {"model-00001-of-00002.safetensors": b"old", "README.md": b"about it"})
    hub.private[NAME] = True
    assert main(["export", "maze@3", "out", "--push", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["address"] == f"{hub.url}/{NAME}"
    assert Path("out/config.json").is_file()
    assert set(hub.files[hub.commits[NAME]["main"]]) == {*(file.name for file in (run / "hf").iterdir()), "README.md"}


def test_only_with_public_can_everybody_read_it(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "maze", "--push", NAME, "--public"]) == 0
    assert hub.private == {NAME: False}
    before = dict(hub.commits[NAME])
    capsys.readouterr()
    assert main(["export", "maze", "--push", NAME]) == 2
    said = capsys.readouterr().err
    assert f"{NAME}: everybody can read it on the hub; add --public" in said
    assert len(said.splitlines()) == 1
    assert hub.commits[NAME] == before, "nothing was uploaded"


def test_what_prevents_an_upload_is_one_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str = NAME) -> str:
        assert main(["export", "maze", "--push", name]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    assert "mine: is no name of a model on a hub; write ORG/NAME" in said("mine")
    hub.status = 401
    assert "refuses access (401); set HF_TOKEN to a token with write access" in said()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nowhere)
    assert f"not uploaded: {nowhere} is not reached" in said()
