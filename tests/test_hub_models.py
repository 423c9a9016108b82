"""A model of a hub becomes a folder that loads, or one clear line: the real huggingface_hub, with a hub on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.errors import ModelError
from roll_flash.models.hub import is_hub_id
from roll_flash.models.prepare import resolve_model
from roll_flash.models.shape import read_shape
from tests.hub_server import TOKEN, Hub, open_hub

NAME = "someone/tiny-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with open_hub(monkeypatch, tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def tiny() -> Path:
    return resolve_model("tiny")


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def refused(name: str = NAME, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, revision)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_model_of_a_hub_is_downloaded_once_without_copies_in_other_formats(
    hub: Hub, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"pytorch_model.bin": b"code", "README.md": b"about", "original/model.safetensors": b"a copy"}
    hub.add(NAME, {**files_of(tiny), **extra, "consolidated.safetensors": b"another copy"})
    folder = resolve_model(NAME)
    assert files_of(folder) == files_of(tiny)
    assert folder.parent.parent.name == "models--someone--tiny-model"
    said = capsys.readouterr().err
    assert f"downloading {NAME} (main, 2 MiB) to {folder}" in said
    assert hub.downloads()[-1] == "model.safetensors", "small files first"
    hub.asked.clear()
    assert resolve_model(NAME) == folder
    assert not hub.asked, "a model in the cache needs no network"
    assert not capsys.readouterr().err


def test_a_revision_is_a_branch_or_a_commit(hub: Hub, tiny: Path) -> None:
    older = hub.add(NAME, {**files_of(tiny), "generation_config.json": b'{"eos_token_id": 1}'}, "v1")
    newest = hub.add(NAME, tiny)
    assert [resolve_model(NAME, revision).name for revision in (None, "v1", older)] == [newest, older, older]
    assert "has no revision v2" in refused(revision="v2")


def test_a_sharded_model_is_downloaded_whole(hub: Hub, tiny: Path) -> None:
    from safetensors.numpy import load_file, save

    names = sorted(weights := load_file(tiny / "model.safetensors"))
    shards = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    index = {"weight_map": {name: shard for shard, each in shards.items() for name in each}}
    files = {name: data for name, data in files_of(tiny).items() if name != "model.safetensors"}
    files |= {shard: save({name: weights[name] for name in each}) for shard, each in shards.items()}
    hub.add(
        NAME, {**files, "model.safetensors.index.json": json.dumps(index).encode(), "consolidated.safetensors": b""}
    )
    assert {path.name for path in resolve_model(NAME).glob("*.safetensors")} == set(shards)
    del files["model-00002-of-00002.safetensors"]
    hub.add(NAME, {**files, "model.safetensors.index.json": json.dumps(index).encode()}, "broken")
    assert "model-00002-of-00002.safetensors, which is not there" in refused(revision="broken")


def test_a_download_that_breaks_off_goes_on_where_it_stopped(
    hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.add(NAME, tiny)
    hub.breaks_after = 1_000_000
    assert files_of(resolve_model(NAME)) == files_of(tiny)
    assert hub.starts == [1_000_000]


def test_a_later_start_loads_only_the_files_that_an_earlier_one_did_not(
    hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    hub.add(NAME, tiny)
    hub.broken.add("model.safetensors")
    assert "answers Server error '503" in refused()
    hub.broken.clear()
    hub.asked.clear()
    assert files_of(resolve_model(NAME)) == files_of(tiny)
    assert hub.downloads() == ["model.safetensors"]


def test_without_network_one_line_says_what_to_run_where_there_is_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nowhere)
    said = refused(revision="v1")
    assert f"{nowhere} is not reached" in said
    assert f"hf download {NAME} --revision v1 --local-dir tiny-model, then copy that folder here" in said


def test_a_cache_that_was_copied_here_is_used_offline(
    hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout that huggingface_hub and `hf download` write: links in a snapshot, and the commit of each branch."""
    root = tmp_path / "cache" / "hub" / "models--someone--tiny-model"
    for part in ("blobs", "refs", "snapshots/abc"):
        (root / part).mkdir(parents=True)
    (root / "refs" / "main").write_text("abc")
    for name, data in files_of(tiny).items():
        (root / "blobs" / name).write_bytes(data)
        (root / "snapshots" / "abc" / name).symlink_to(f"../../blobs/{name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model(NAME) == root / "snapshots" / "abc"
    assert read_shape(NAME).parameters == read_shape("tiny").parameters
    (root / "snapshots" / "abc" / "model.safetensors").unlink()
    assert "may not be asked (HF_HUB_OFFLINE); on a machine with network: hf download" in refused()
    assert not hub.asked


def test_a_gated_model_asks_for_a_token_and_takes_it(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, tiny)
    hub.gated.add(NAME)
    assert f"its owner must grant access: ask for it on {hub.url}/{NAME}, then set HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert files_of(resolve_model(NAME)) == files_of(tiny)


def test_a_model_that_no_hub_has_is_one_line(hub: Hub) -> None:
    assert f"no such folder here, and no such model on {hub.url}" in refused("someone/nothing")


@pytest.mark.parametrize(
    ("status", "says"), [(500, "answers"), (401, "no such model|refuses access"), (403, "refuses access")]
)
def test_a_hub_with_an_error_is_one_line(hub: Hub, status: int, says: str) -> None:
    hub.status = status
    with pytest.raises(ModelError, match=says):
        resolve_model(NAME)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma3", "vision_config": {}}, "has a part for vision"),
        (
            {"model_type": "brand_new", "auto_map": {}},
            r"has no model_type 'brand_new', and the code that comes with it",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_its_weights_are_loaded(
    hub: Hub, tiny: Path, changes: dict[str, object], says: str
) -> None:
    config = json.loads((tiny / "config.json").read_text()) | changes
    hub.add(NAME, {**files_of(tiny), "config.json": json.dumps(config).encode()})
    with pytest.raises(ModelError, match=says):
        resolve_model(NAME)
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": b'{"model_type": "llama"}', "pytorch_model.bin": b""}, "only weights in PyTorch's own format"),
        ({"model-Q4.gguf": b""}, f"hf download {NAME} model-Q4.gguf --local-dir FOLDER"),
        ({"README.md": b""}, "it is no model of transformers"),
    ],
)
def test_a_model_in_another_format_says_what_to_do(hub: Hub, files: dict[str, bytes], says: str) -> None:
    hub.add(NAME, files)
    assert says in refused()
    assert not set(hub.downloads()) & {"pytorch_model.bin", "model-Q4.gguf"}


def test_a_full_disk_is_known_before_the_download(hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, tiny)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    assert "set HF_HOME to a folder on another disk" in refused()


def test_only_the_config_is_downloaded_to_know_the_size_of_a_model(hub: Hub, tiny: Path) -> None:
    hub.add(NAME, tiny)
    assert read_shape(NAME).parameters == read_shape("tiny").parameters
    assert hub.downloads() == ["config.json"]


def test_a_name_of_a_hub_is_an_organization_and_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert not any(map(is_hub_id, ("models/mine", "tiny", "/no/such", "a/b/c", "./b", "../b", "~/b")))
    with pytest.raises(ModelError, match="only a model of a hub"):
        resolve_model(resolve_model("tiny"), "v1")


def test_a_config_with_a_name_of_a_hub_can_be_trained(
    hub: Hub, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add(NAME, tiny, "v1")
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"path": NAME}, "envs": [{"id": "counting:Counting-v0"}]}))
    words = [str(tmp_path / "run.yaml"), f"runs={tmp_path / 'runs'}", "model.revision=v1", "--dry-run"]
    assert main(["train", *words]) == 0
    assert f"snapshots/{commit}" in capsys.readouterr().out


def test_the_environment_says_which_hub_and_a_log_gets_no_progress_bars(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    hub.add(NAME, tiny)
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "roll_flash.models.prepare", NAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert files_of(Path(done.stdout.strip())) == files_of(tiny)
    assert done.stderr.splitlines() == [f"downloading {NAME} (main, 2 MiB) to {done.stdout.strip()}"]
