"""Which node is asked for what before a run starts. The nodes are stand-ins that have everything, or lack something."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from roll_flash.cluster import preparation
from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Kind, Part
from roll_flash.cluster.plan import Row
from roll_flash.cluster.sent_files import Compared, Wanted
from roll_flash.config.tree import load_config
from roll_flash.errors import PlacementError
from roll_flash.learner.open import open_learner
from roll_flash.sandboxes import SandboxSpec
from roll_flash.sandboxes.images.build import build_name
from roll_flash.sandboxes.images.transfer import FoundImage

DOCKERFILE = "FROM roll-flash-sandbox:latest\nRUN true\n"


class Cluster:
    """What other nodes were asked for: names of files by what they belong to, and images."""

    def __init__(self) -> None:
        self.wanted: dict[str, dict[str, set[str]]] = {}
        self.images: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.differs: set[str] = set()

    def node(self, its: Node, kinds: set[Kind]) -> Any:
        return StandIn(self, its, kinds)


class StandIn:
    def __init__(self, cluster: Cluster, node: Node, kinds: set[Kind]) -> None:
        self.cluster, self.kinds, self.node_id, self.label = cluster, kinds, node.node_id, f"node {node.name}"

    async def ask(self, method: str, *arguments: Any, timeout_s: float = 0) -> Any:
        if method == "compare":
            wanted: Wanted = arguments[0]
            self.cluster.wanted.setdefault(self.node_id, {})[wanted.what] = set(wanted.files)
            return Compared((), tuple(sorted(self.cluster.differs & wanted.files.keys())))
        if method == "find_image":
            self.cluster.images.setdefault(self.node_id, []).append(arguments[1])
            return FoundImage(None, 1)
        return {"sees": False, "missing_modules": []}.get(method)

    def error(self, what: str) -> PlacementError:
        return PlacementError(f"{self.label} {what}")

    def close(self) -> None:
        return None


class Driver:
    def get_node_id(self) -> str:
        return "driver"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    async def nothing(*_: object) -> None:
        return None

    made = Cluster()
    monkeypatch.setattr(preparation, "OtherNode", made.node)
    monkeypatch.setattr(preparation.ray, "get_runtime_context", Driver)
    for name in ("_check_all", "_try_links"):
        monkeypatch.setattr(preparation.NodePreparation, name, nothing)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return made


def folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text(name)
    return path


def prepare(cluster: Cluster, model: Path | None, *, specs: tuple[SandboxSpec, ...] = (), **tree: Any) -> None:
    config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "ShellMath-v0"}], **tree})
    kinds: dict[str, tuple[Kind, ...]] = {"cpus": ("worker",), "gpus": ("server", "worker"), "ranks": ("rank",)}
    nodes = {name: Node(name, f"10.0.0.{number}", name, {}, {}) for number, name in enumerate(kinds, start=1)}
    rows = [Row(Part(f"{kind} {name}", kind, {}), nodes[name]) for name, its in kinds.items() for kind in its]
    asyncio.run(preparation.NodePreparation(config, model, specs, cluster.notes.append).prepare(rows))


def test_weights_go_only_where_something_computes_with_them(cluster: Cluster, tmp_path: Path) -> None:
    model = folder(tmp_path / "mine", "config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors")
    prepare(cluster, model)
    assert cluster.wanted == {
        "cpus": {"the tokenizer of mine": {"config.json", "tokenizer.json"}},
        "gpus": {"the model mine": {path.name for path in model.iterdir()}},
        "ranks": {"the model mine": {path.name for path in model.iterdir()}},
    }


def test_the_reference_of_the_kl_term_goes_to_ranks(cluster: Cluster, tmp_path: Path) -> None:
    reference = folder(tmp_path / "frozen", "config.json", "model.safetensors")
    prepare(cluster, None, learner={"kl": {"coefficient": 0.1, "reference": str(reference)}})
    assert cluster.wanted == {"ranks": {"the reference frozen": {"config.json", "model.safetensors"}}}
    cluster.wanted.clear()
    prepare(cluster, None, learner={"kl": {"coefficient": 0.0, "reference": str(reference)}})
    assert cluster.wanted == {}, "without a coefficient none is loaded"


def test_images_of_dockerfiles_go_where_workers_are(cluster: Cluster) -> None:
    built = SandboxSpec(dockerfile=DOCKERFILE)
    prepare(cluster, None, specs=(built, SandboxSpec(image="mine:1")))
    wanted = ["mine:1", build_name(built)]
    assert cluster.images == {"cpus": wanted, "gpus": wanted}


def test_a_file_of_an_argument_that_differs_there_ends_the_start(cluster: Cluster, tmp_path: Path) -> None:
    file = folder(tmp_path / "elsewhere", "words.txt") / "words.txt"
    cluster.differs = {"words.txt"}
    with pytest.raises(PlacementError, match=f"node cpus has another {file} than the driver"):
        prepare(cluster, None, envs=[{"id": "ShellMath-v0", "kwargs": {"words": str(file)}}])


def test_a_folder_elsewhere_that_cannot_be_sent_is_a_warning_with_the_node(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder(tmp_path / "elsewhere", "a", "b", "c")
    monkeypatch.setattr("roll_flash.cluster.sent_files.MAX_CODE_FILES", 2)
    cluster.differs = {"a", "b", "c"}
    prepare(cluster, None, envs=[{"id": "ShellMath-v0", "kwargs": {"tasks": str(elsewhere)}}])
    (note,) = cluster.notes
    assert note.startswith(f"warning: node cpus lacks the code in {elsewhere}, which is too large to be sent")


def test_data_beside_the_code_is_compared_too_but_may_be_the_nodes_own(cluster: Cluster) -> None:
    """Else data that changed after it was sent would stay old there; other code there is refused."""
    Path("env.py").touch()
    Path("notes.txt").touch()
    what = f"the code in {Path.cwd()}"
    cluster.differs = {"notes.txt"}
    prepare(cluster, None, envs=[{"id": "env.py:A-v0"}])
    assert cluster.wanted["cpus"][what] == {"env.py", "notes.txt"}
    cluster.differs = {"env.py"}
    with pytest.raises(PlacementError, match=r"another .*env\.py than the driver"):
        prepare(cluster, None, envs=[{"id": "env.py:A-v0"}])


def test_ranks_elsewhere_find_a_reference_that_is_named_from_the_drivers_folder(cluster: Cluster) -> None:
    folder(Path("frozen"))
    kl = {"coefficient": 0.1, "reference": "frozen"}
    config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "ShellMath-v0"}], "learner": {"kl": kl}})
    learner: Any = open_learner(config, model_folder=Path("model"))
    assert learner._config.kl.reference == str(Path("frozen").absolute())
