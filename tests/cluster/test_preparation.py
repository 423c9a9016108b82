"""Which node is asked for what before a run starts. The nodes are stand-ins that have everything, or lack something."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll_flash.cluster import preparation
from roll_flash.cluster.node_needs import node_facts
from roll_flash.cluster.nodes import Node
from roll_flash.cluster.other_nodes import NodeSetup
from roll_flash.cluster.parts import Kind, Part
from roll_flash.cluster.plan import Row
from roll_flash.cluster.sent_files import Compared, Wanted
from roll_flash.config.tree import load_config
from roll_flash.errors import PlacementError
from roll_flash.learner.open import open_learner
from roll_flash.sandboxes import SandboxSpec
from roll_flash.sandboxes.errors import SandboxUnavailable
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
        self.missing: set[str] = set()
        """Files that the node `cpus` lacks."""
        self.answers: dict[str, Any] = {}
        """What the node `cpus` answers in place of what a sound node does; an error is raised."""
        self.asked: list[str] = []

    def node(self, its: Node, kinds: set[Kind]) -> Any:
        return StandIn(self, its, kinds)


class StandIn:
    def __init__(self, cluster: Cluster, node: Node, kinds: set[Kind]) -> None:
        self.cluster, self.kinds, self.node_id, self.label = cluster, kinds, node.node_id, f"node {node.name}"

    async def ask(self, method: str, *arguments: Any, timeout_s: float = 0) -> Any:
        self.cluster.asked.append(method)
        if self.node_id == "cpus" and method in self.cluster.answers:
            if isinstance(answer := self.cluster.answers[method], Exception):
                raise answer
            return answer
        if method == "compare":
            wanted: Wanted = arguments[0]
            self.cluster.wanted.setdefault(self.node_id, {})[wanted.what] = set(wanted.files)
            missing = self.cluster.missing & wanted.files.keys() if self.node_id == "cpus" else ()
            return Compared(tuple(sorted(missing)), tuple(sorted(self.cluster.differs & wanted.files.keys())))
        if method == "find_image":
            self.cluster.images.setdefault(self.node_id, []).append(arguments[1])
            return FoundImage(None, 1)
        sound = {"sees": False, "missing_modules": [], "facts": node_facts(), "time_s": time.time()}
        return sound.get(method)

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

    async def send_piece(*_: object) -> None:
        made.asked.append("write")

    made = Cluster()
    monkeypatch.setattr(preparation, "send_piece", send_piece)
    monkeypatch.setattr(preparation, "OtherNode", made.node)
    monkeypatch.setattr(preparation.ray, "get_runtime_context", Driver)
    monkeypatch.setattr(preparation.ray.util, "get_node_ip_address", lambda: "10.0.0.9")
    monkeypatch.setattr(preparation.NodePreparation, "_try_links", nothing)
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


WITH_SANDBOXES = (SandboxSpec(image="mine:1"),)
FACTS = node_facts()
NOT_SENT = {"compare", "write", "open_folder", "load_image"}


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"facts": replace(FACTS, python="3.9")}, f"has Python 3.9, the driver {FACTS.python}; install"),
        (
            {"facts": replace(FACTS, versions={**FACTS.versions, "transformers": "4.0"})},
            f"has transformers 4.0, the driver {FACTS.versions['transformers']}; install",
        ),
        (
            {"facts": replace(FACTS, free_bytes=0)},
            "has 0 MiB left for temporary files; free 1 GiB, or set TMPDIR there",
        ),
        (
            {"find_image": SandboxUnavailable("cannot connect to the engine")},
            "has no usable Docker engine: cannot connect to the engine",
        ),
    ],
    ids=["Python", "packages", "space", "Docker"],
)
def test_what_a_node_lacks_is_one_line_before_anything_is_sent(
    cluster: Cluster, tmp_path: Path, answers: dict[str, Any], says: str
) -> None:
    model = folder(tmp_path / "mine", "config.json", "model.safetensors")
    cluster.answers, cluster.missing = answers, {"model.safetensors"}
    with pytest.raises(PlacementError) as caught:
        prepare(cluster, model, specs=WITH_SANDBOXES, sandbox={"provider": "docker"})
    assert str(caught.value).startswith(f"node cpus {says}")
    assert "\n" not in str(caught.value)
    assert not NOT_SENT & set(cluster.asked)


def test_an_image_that_no_node_has_is_said_before_anything_is_sent(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nowhere(*_: object) -> FoundImage:
        return FoundImage(None, 0)

    monkeypatch.setattr(preparation, "find_image", nowhere)
    model = folder(tmp_path / "mine", "config.json", "model.safetensors")
    cluster.answers = {"find_image": FoundImage(None, 0)}
    message = "^node cpus has no image mine:1, nor has the driver's node; build it on one of them$"
    with pytest.raises(PlacementError, match=message):
        prepare(cluster, model, specs=WITH_SANDBOXES, sandbox={"provider": "docker"})
    assert not NOT_SENT & set(cluster.asked)


def test_a_node_without_room_for_an_image_is_said_before_anything_is_sent(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(*_: object) -> FoundImage:
        return FoundImage(None, 3 * 2**30)

    monkeypatch.setattr(preparation, "find_image", here)
    model = folder(tmp_path / "mine", "config.json", "model.safetensors")
    cluster.answers = {"find_image": FoundImage(None, 0), "room": (Path("/tmp"), 2**31)}
    message = "^node cpus has 2048 MiB left at /tmp, and the image mine:1 needs 3072 MiB; free that there$"
    with pytest.raises(PlacementError, match=message):
        prepare(cluster, model, specs=WITH_SANDBOXES, sandbox={"provider": "docker"})
    assert not NOT_SENT & set(cluster.asked)


def test_a_node_without_room_for_the_model_gets_no_byte_of_it(cluster: Cluster, tmp_path: Path) -> None:
    model = folder(tmp_path / "mine", "config.json", "model.safetensors")
    (model / "config.json").write_bytes(bytes(3 * 2**20))
    cluster.answers, cluster.missing = {"room": (tmp_path, 2**20)}, {"config.json"}
    message = f"^node cpus has 1 MiB left at {tmp_path}, and the tokenizer of mine needs 3 MiB; free that there$"
    with pytest.raises(PlacementError, match=message):
        prepare(cluster, model)
    assert "write" not in cluster.asked


def test_room_is_that_of_the_disk_on_which_a_folder_will_be(tmp_path: Path) -> None:
    there, free_bytes = NodeSetup().room(tmp_path / "not" / "yet")
    assert there == tmp_path
    assert free_bytes > 0
    assert NodeSetup().room(None)[0] == Path(tempfile.gettempdir())


def test_a_clock_that_is_an_hour_off_is_a_warning_with_the_node(cluster: Cluster) -> None:
    cluster.answers = {"time_s": time.time() + 3600}
    prepare(cluster, None)
    (note,) = cluster.notes
    assert note.startswith("warning: node cpus has a clock 3")
    assert "s ahead of the driver's" in note
    assert note.endswith("set it (NTP)")


def test_a_node_that_others_cannot_reach_is_refused_where_it_has_all_parts(cluster: Cluster) -> None:
    config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "ShellMath-v0"}]})
    rows = [Row(Part("worker 0", "worker", {}), Node("far", "127.0.1.1", "far", {}, {}))]
    with pytest.raises(PlacementError, match=r"^node far joined Ray with its loopback address 127\.0\.1\.1"):
        asyncio.run(preparation.NodePreparation(config, None, (), cluster.notes.append).prepare(rows))
    assert not cluster.asked
