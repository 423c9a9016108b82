"""Temporary folders of a process that was killed are found by their owner and removed; those of others stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_flash.models.prepare import COMPILED_VARIABLE
from roll_flash.sandboxes import reap
from roll_flash.sandboxes.client import agent_program
from roll_flash.sandboxes.scratch import (
    OWNER_FILE,
    SHORT_PLACE,
    SOCKET_PATH_BYTES,
    make_scratch_folder,
    make_short_folder,
    scratch_folder,
    scratch_folders,
)

LEAVES = """
import os, signal
from roll_flash.sandboxes.scratch import make_scratch_folder, make_short_folder, scratch_folder
with scratch_folder("quest") as quest:
    for folder in (make_scratch_folder("server"), make_short_folder("ray"), quest):
        (folder / "file").write_text("left")
        print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-", dir=SHORT_PLACE) as folder:
        yield Path(folder)


def test_sockets_have_short_paths_wherever_temporary_files_are(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = "ray/session_2026-11-26_19-34-29_123456_4194304/sockets/plasma_store"
    for place, expected in ((short_path, short_path), (tmp_path / ("long" * 20), Path(SHORT_PLACE))):
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        folder = make_short_folder("ray")
        try:
            assert folder.parent == expected
            assert len(f"{folder}/{below}") <= SOCKET_PATH_BYTES
            assert folder in [found.path for found in scratch_folders()]
        finally:
            shutil.rmtree(folder)


def test_what_a_killed_process_leaves_is_reaped_and_nothing_else(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{short_path}/nowhere.sock")
    said = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False, timeout=60)
    left = said.stdout.split()
    assert len(left) == 3, said.stderr
    (short_path / "rf-mine").mkdir()
    (short_path / "roll-flash-notes").mkdir()
    with scratch_folder("quest") as quest:
        own = {str(quest), str(make_scratch_folder("server")), str(make_short_folder("ray"))}
        assert {entry.name for entry in reap() if entry.kind == "folder"} == set(left)
        assert not any(os.path.exists(folder) for folder in left)
        assert own <= {str(path) for path in short_path.iterdir()}
    assert (short_path / "rf-mine").is_dir()
    assert (short_path / "roll-flash-notes").is_dir()


def test_a_folder_of_another_user_is_not_looked_into(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold whatever fills the memory of who reads it."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    (short_path / "rf-ray-theirs").mkdir()
    with (short_path / "rf-ray-theirs" / OWNER_FILE).open("wb") as file:
        file.truncate(1 << 43)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert scratch_folders() == []


def test_servers_and_ray_have_folders_with_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places that make folders which outlive a `with` of their own; all others use `scratch_folder`."""
    root = Path(__file__).parents[1]
    made = [
        f"{path.relative_to(root)}: {line.strip()}"
        for package in ("roll_flash", "envs", "sandboxes")
        for path in sorted((root / package).rglob("*.py"))
        for line in path.read_text().splitlines()
        if "mkdtemp(" in line or "TemporaryDirectory(" in line or "mkstemp(" in line
    ]
    assert [entry.partition(":")[0] for entry in made] == [
        "roll_flash/models/prepare.py",
        *["sandboxes/scratch.py"] * 3,
    ], made


def test_models_and_the_sandbox_agent_are_kept_where_the_user_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roll_flash.models import prepare

    monkeypatch.delenv("ROLL_FLASH_CACHE", raising=False)
    for name, root in (("XDG_CACHE_HOME", tmp_path / "roll-flash"), ("ROLL_FLASH_CACHE", tmp_path / "own")):
        monkeypatch.setenv(name, str(tmp_path if name == "XDG_CACHE_HOME" else root))
        assert prepare.cache_folder() == root / "models"
        assert agent_program.cache_folder() == root


MAKES_A_RANK = """
from roll_flash.learner.ranks.rank_actor import RankActor
try:
    RankActor()  # imports torch's compiler before it misses its arguments
except TypeError as error:
    print(error)
"""


def test_a_rank_leaves_no_cache_of_torch_among_temporary_files(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != COMPILED_VARIABLE}
    environment |= {"TMPDIR": str(tmp_path / "t"), "ROLL_FLASH_CACHE": str(tmp_path / "cache")}
    (tmp_path / "t").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MAKES_A_RANK], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "LearnerRank.__init__() missing" in done.stdout
    assert not list((tmp_path / "t").iterdir())
