"""What is checked on the nodes of a run, and what is sent to those that lack it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll_flash.cluster import node_needs, preparation, sent_files
from roll_flash.cluster.environment_files import EnvironmentFiles, environment_files, environment_modules
from roll_flash.cluster.nodes import Node, living_nodes
from roll_flash.cluster.parts import Part
from roll_flash.cluster.plan import Row
from roll_flash.cluster.sent_files import Wanted
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import RunError
from roll_flash.models.prepare import resolve_model
from roll_flash.sandboxes.docker.api import open_engine
from roll_flash.sandboxes.images.transfer import find_image, image_pieces, load_image
from tests.cluster.machines import ROOT, Machine, machines, why_not
from tests.cluster.test_many_machines import PARTS, RUN_TIMEOUT_S, processes_left
from tests.leaks import Session

ENVIRONMENT = """
from pathlib import Path
from typing import Any
import gymnasium
from words import WORDS

class Say(gymnasium.Env):
    "Asks for a word of a file; the reward is the share of the letters that are right."

    def __init__(self, tasks: str) -> None:
        self._tasks = Path(tasks).read_text().split()

    def reset(self, *, seed=None, options=None):
        self._word = self._tasks[(seed or 0) % len(self._tasks)]
        return f"{WORDS} {self._word}", {}

    def step(self, action):
        right = sum(a == b for a, b in zip(action, self._word)) / len(self._word)
        return "", right, True, False, {"success": right > 0.9}
"""
PROJECT = "/tmp/project"
MODEL = "/tmp/models/mine"
CONFIG = f"""
base: {ROOT}/configs/ci.yaml
envs:
  - id: say.py:Say
    kwargs: {{tasks: tasks/words.txt}}
    max_turns: 1
"""


def command(head: Machine, verb: str, **settings: Any) -> list[str]:
    """Command in a folder of `head` alone, of a model on `head` alone."""
    wanted = {
        "name": "run",
        "model.path": MODEL,
        "inference.engine": "transformers",
        "ray.address": f"{head.address}:6379",
        "steps": 1,
        "eval.tasks": 4,
        **PARTS,
        **settings,
    }
    values = " ".join(f"'{key}={value}'" for key, value in wanted.items())
    return ["sh", "-c", f"cd {PROJECT} && rm -rf runs && exec {sys.executable} -m roll_flash {verb} run.yaml {values}"]


def write(machine: Machine, path: str, text: str) -> None:
    status, output = machine.run("sh", "-c", 'mkdir -p "${1%/*}" && printf %s "$2" > "$1"', "sh", path, text)
    assert status == 0, output


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[dict[str, Any]]:
    """Runs whose parts are all on `far`, with a model and a project that only `head` has at first."""
    if reason := why_not():
        pytest.skip(reason)
    environment: dict[str, str] = {}
    session = Session.begin(environment)
    model = resolve_model("tiny")
    with machines("head", "far") as (head, far):
        head.join_ray(cpus=1, **environment)
        far.join_ray(head, resources='{"envs": 1, "servers": 1, "ranks": 1}', **environment)
        head.run("sh", "-c", f"mkdir -p /tmp/models && cp -r {model} {MODEL}")
        write(head, f"{PROJECT}/run.yaml", CONFIG)
        write(head, f"{PROJECT}/say.py", ENVIRONMENT)
        write(head, f"{PROJECT}/words.py", "WORDS = 'say'\n")
        write(head, f"{PROJECT}/tasks/words.txt", "one two three four")
        write(head, f"{PROJECT}/runs/old/large.txt", "x")
        results: dict[str, Any] = {"first": head.run(*command(head, "train"), timeout_s=RUN_TIMEOUT_S)}
        results["there"] = far.run("find", "/tmp/project", "/tmp/models", "-type", "f")[1].split()
        results["left"] = processes_left(far)
        write(head, f"{PROJECT}/words.py", "WORDS = 'spell'\n")
        results["edited"] = head.run(*command(head, "eval"), timeout_s=RUN_TIMEOUT_S)
        write(far, f"{PROJECT}/say.py", "their own")
        results["others code"] = head.run(*command(head, "eval"))
        write(far, f"{PROJECT}/say.py", ENVIRONMENT)
        write(far, f"{MODEL}/config.json", "{}")
        results["other model"] = head.run(*command(head, "train"))
        yield results
    assert not session.leaks()


@pytest.mark.ray
def test_a_model_and_an_environment_on_the_drivers_disk_alone_are_sent(one_cluster: dict[str, Any]) -> None:
    status, output = one_cluster["first"]
    assert status == 0, output
    assert "step 1/1" in output
    assert "node far (10.77.0.2) lacks the model mine (" in output
    assert f"node far (10.77.0.2) lacks the code in {PROJECT} (" in output
    there = one_cluster["there"]
    assert {f"{PROJECT}/say.py", f"{PROJECT}/tasks/words.txt", f"{MODEL}/model.safetensors"} <= set(there)
    assert not [path for path in there if "runs" in path or "part-" in path or "probe" in path]
    assert one_cluster["left"] == 0


@pytest.mark.ray
def test_what_was_sent_stays_and_only_what_changed_is_sent_again(one_cluster: dict[str, Any]) -> None:
    status, output = one_cluster["edited"]
    assert status == 0, output
    assert "lacks the model" not in output
    assert output.count("lacks the code") == 1


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_run_on_one_node_starts_no_actor_for_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "OtherNode", None)
    here = living_nodes()[0]
    rows = [Row(Part("worker 0", "worker", {}), here)]
    notes: list[str] = []
    prepare = preparation.NodePreparation(load_config("configs/ci.yaml"), Path("none"), (), notes.append).prepare
    asyncio.run(prepare(rows))
    with pytest.raises(TypeError, match="not callable"):
        asyncio.run(prepare([*rows, Row(Part("worker 1", "worker", {}), replace(here, node_id="other"))]))
    assert not notes


@pytest.mark.ray
@pytest.mark.parametrize(
    ("run", "path"), [("others code", f"{PROJECT}/say.py"), ("other model", f"{MODEL}/config.json")]
)
def test_other_content_at_the_same_path_is_one_line_that_names_node_and_path(
    one_cluster: dict[str, Any], run: str, path: str
) -> None:
    status, output = one_cluster[run]
    assert status == 1, output
    (line,) = [line for line in output.splitlines() if "node far" in line]
    assert f"node far (10.77.0.2) has another {path} than the driver; remove" in line
    assert "Traceback" not in output


def test_only_a_clock_that_is_certainly_wrong_is_warned_about() -> None:
    difference_s = node_needs.clock_difference_s
    assert difference_s(100, 100.5, 101) == 0
    assert difference_s(100, 170, 101) == 69
    assert difference_s(100, 30, 101) == -70
    assert difference_s(100, 150, 200) == 0, "a slow answer says little"
    assert node_needs.clock_warning(60) == ""
    assert "a clock 69 s ahead of the driver's" in node_needs.clock_warning(69)
    assert "a clock 70 s behind the driver's" in node_needs.clock_warning(-70)


def node(name: str, address: str) -> Node:
    return Node(name, address, name, {}, {})


def test_a_loopback_address_among_others_is_refused_with_its_remedy() -> None:
    others = [node("head", "10.77.0.1"), node("gpus", "10.77.0.3")]
    far = node("far", "127.0.1.1")
    assert node_needs.address_problem(others, "10.77.0.2") == ""
    assert node_needs.address_problem([far, node("b", "127.0.0.1")], "127.0.0.1") == "", "one machine"
    for nodes in ([*others, far], [far]):
        problem = node_needs.address_problem(nodes, "10.77.0.2")
        assert "node far joined Ray with its loopback address 127.0.1.1" in problem
        assert "--node-ip-address=" in problem


def test_a_node_needs_the_drivers_versions_of_what_its_parts_import() -> None:
    config = load_config("configs/ci.yaml")
    here = node_needs.node_facts()
    for_workers = node_needs.needed_packages(config, {"worker"})
    for_servers = node_needs.needed_packages(config, {"worker", "server"})
    bare = replace(here, versions={name: here.versions[name] for name in ("roll-flash", "transformers")})
    old = replace(here, versions={**here.versions, "transformers": "4.0"})
    assert node_needs.software_problem(here, here, for_servers) == ""
    assert node_needs.software_problem(bare, here, for_workers) == ""
    assert node_needs.software_problem(bare, here, for_servers).startswith("has no torch; install torch ")
    assert "has transformers 4.0, the driver" in node_needs.software_problem(old, here, for_workers)
    assert "has Python 3.9, the driver" in node_needs.software_problem(replace(here, python="3.9"), here, for_workers)
    assert "other code of roll_flash" in node_needs.software_problem(replace(here, source="x"), here, for_workers)


def test_a_full_disk_is_found_before_sandboxes_start() -> None:
    facts = node_needs.node_facts()
    assert node_needs.disk_problem(replace(facts, free_bytes=2**30)) == ""
    assert "has 100 MiB left for temporary files" in node_needs.disk_problem(replace(facts, free_bytes=100 * 2**20))


def send(source: Path, target: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> Wanted:
    """Send a folder from here to here in pieces of `limit` bytes."""
    monkeypatch.setattr(sent_files, "PIECE_BYTES", limit)
    wanted = sent_files.whole("all", source)
    there = replace(wanted, path=target)
    missing = sent_files.compare(there).missing
    for piece in sent_files.pieces(wanted, missing):
        assert sum(len(data) for _, _, data in piece) <= limit
        sent_files.write_piece(target, "token", piece, sent_files.digest_of(piece))
    sent_files.put_in_place(there, "token", missing)
    return there


def test_files_of_every_size_arrive_with_their_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    sizes = {"empty": 0, "one": 1, "below/exact": 64, "below/two": 128, "odd": 333, ".hidden": 5, "runs/old": 5}
    for name, size in sizes.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(bytes(index % 251 for index in range(size)))
    (source / "one").chmod(0o755)
    (source / "below" / "again").symlink_to(source)
    there = send(source, target, 64, monkeypatch)
    for name in ("empty", "one", "below/exact", "below/two", "odd"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert (target / "one").stat().st_mode & 0o777 == 0o755
    assert not (target / ".hidden").exists()
    assert not (target / "runs").exists()
    assert sent_files.compare(there) == sent_files.Compared((), ())
    (target / "odd").write_bytes(b"edited there")
    assert sent_files.compare(there).different == ("odd",)


def test_a_damaged_piece_is_refused(tmp_path: Path) -> None:
    piece = [("file", 0, b"right")]
    with pytest.raises(RunError, match="arrived damaged"):
        sent_files.write_piece(tmp_path, "token", [("file", 0, b"wrong")], sent_files.digest_of(piece))
    assert not list(tmp_path.iterdir())


def test_too_much_code_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(5):
        (tmp_path / f"{index}.py").write_text("pass")
    monkeypatch.setattr(sent_files, "MAX_CODE_FILES", 3)
    found = sent_files.limited(tmp_path)
    assert found.too_large
    assert len(found.files) == 3


ANSWERS = "def mine(answer, expected):\n    return 1.0\n"


class TestFilesOfEnvironments:
    """What the config of an environment names is found, so that it can be sent."""

    @pytest.fixture(autouse=True)
    def in_a_project(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = tmp_path / "project"
        self.elsewhere = tmp_path / "elsewhere"
        for folder in (self.here, self.elsewhere):
            folder.mkdir()
            (folder / "answers.py").write_text(ANSWERS)
            (folder / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}')
        monkeypatch.chdir(self.here)
        monkeypatch.syspath_prepend(str(self.here))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def found(self, **env: Any) -> EnvironmentFiles:
        return environment_files(self.config(**env))

    def config(self, **env: Any) -> Config:
        return load_config({"model": {"path": "tiny"}, "envs": [{"id": "ShellMath-v0", **env}]})

    def test_named_files_are_sent_without_their_folder(self) -> None:
        kwargs = {"a": ["data.jsonl"], "b": str(self.elsewhere / "data.jsonl")}
        there = self.elsewhere / "data.jsonl"
        assert self.found(kwargs=kwargs) == EnvironmentFiles((there, self.here / "data.jsonl"), ())
        assert list(sent_files.limited(self.here / "data.jsonl").files) == ["data.jsonl"]

    def test_a_folder_elsewhere_may_be_one_of_a_sandbox(self) -> None:
        assert self.found(kwargs={"a": str(self.elsewhere)}) == EnvironmentFiles((), (self.elsewhere,))

    def test_what_each_machine_has_is_not_sent(self) -> None:
        of_machines = ["/tmp", "/usr/bin/env", "/bin/sh", "/dev/null", "/", str(self.here.parent)]
        assert self.found(kwargs={"paths": of_machines}) == EnvironmentFiles((), ())

    def test_modules_of_ids_are_sent_unless_they_are_installed(self) -> None:
        ids = ("roll_flash.envs:A", "yaml:B", f"{ROOT}/tests/letter_count.py:C")
        config = load_config({"model": {"path": "tiny"}, "envs": [{"id": each} for each in ids]})
        assert environment_files(config) == EnvironmentFiles((ROOT / "tests",), ())
        assert environment_modules(config) == ("roll_flash", "yaml")

    @pytest.mark.parametrize("reward", ["answers.py:mine", "answers:mine", {"function": "answers.py:mine"}])
    def test_a_reward_function_of_a_data_set_is_sent(self, reward: Any) -> None:
        files = self.found(id="Dataset-v0", data="data.jsonl", reward=["exact", reward])
        assert files == EnvironmentFiles((self.here,), ())

    def test_a_reward_elsewhere_and_files_of_its_arguments_are_sent(self) -> None:
        words = self.elsewhere / "data.jsonl"
        reward = {"function": f"{self.here}/answers.py:mine", "kwargs": {"words": str(words)}}
        assert self.found(id="Dataset-v0", data="data.jsonl", reward=reward).needed == (self.here, words)
        reward = {"function": f"{words.parent}/answers.py:mine"}
        assert self.found(id="Dataset-v0", data="data.jsonl", reward=reward).needed == (words.parent,)

    @pytest.mark.parametrize(
        "kwargs", [{"tools": ["answers.py:mine"]}, {"verifier_function": "answers:mine"}, {"a": {"b": "answers:mine"}}]
    )
    def test_functions_that_arguments_name_are_sent(self, kwargs: Any) -> None:
        assert self.found(kwargs=kwargs).needed == (self.here,)

    def test_other_texts_with_colons_name_no_code(self) -> None:
        texts = ["note:this", "http://host:80", "missing.py:f", "__main__:f", "a: b", ":", "sys:"]
        assert self.found(kwargs={"texts": texts}) == EnvironmentFiles((), ())
        assert environment_modules(self.config(kwargs={"texts": texts})) == ()
        assert environment_modules(self.config(kwargs={"f": "answers:mine"})) == ("answers",)


def test_the_weights_of_a_model_stay_where_nothing_computes_it(tmp_path: Path) -> None:
    names = ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "a.bin", "code.py")
    for name in names:
        (tmp_path / name).write_text(name)
    model = sent_files.whole("the model", tmp_path)
    assert set(model.files) == set(names)
    assert set(model.without_weights("the tokenizer").files) == set(names) - {"model.safetensors", "a.bin"}


@pytest.mark.docker
def test_an_image_travels_from_engine_to_engine(tmp_path: Path, a_bare_image: Callable[[], str]) -> None:
    """The same engine twice: the image is removed in between."""
    image = a_bare_image()
    archive = tmp_path / "image.tar"

    async def travel() -> tuple[int, int, int]:
        found = await find_image((), image)
        with archive.open("wb") as file:
            async for piece in image_pieces(found.engine, image, 1000):
                file.write(piece)
        async with open_engine() as engine:
            await engine.call("DELETE", f"/images/{image}")
        without = await find_image((), image)
        await load_image(None, archive)
        return found.size, without.size, (await find_image((), image)).size

    before, without, after = asyncio.run(travel())
    assert before == after > 0
    assert without == 0


@pytest.fixture
def a_bare_image(tmp_path: Path) -> Iterator[Callable[[], str]]:
    name = "roll-flash-travel:test"

    def make() -> str:
        (tmp_path / "content").mkdir()
        (tmp_path / "content" / "file").write_bytes(bytes(5000))
        packed = subprocess.run(["tar", "-C", tmp_path / "content", "-c", "."], capture_output=True, check=True).stdout
        subprocess.run(["docker", "import", "-", name], input=packed, capture_output=True, check=True)
        return name

    yield make
    subprocess.run(["docker", "rmi", name], capture_output=True, check=True)
