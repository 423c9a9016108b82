"""What can be known to fail is one line before anything slow starts, in training, its dry run, and evaluation."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_nvml import FakeGpu, FakeNvml, install
from safetensors.numpy import save_file

from roll_flash import evaluator, trainer
from roll_flash.chat import tokenizer
from roll_flash.cli import dry_run
from roll_flash.cli.main import main
from roll_flash.cluster import reservation
from roll_flash.cluster.nodes import Node
from roll_flash.config.tree import Config, load_config
from roll_flash.config.user_code import load_object
from roll_flash.errors import ConfigError, ModelError, PlacementError
from roll_flash.inference.vllm import server as vllm_server
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.exporters.systems import EXPORTERS
from roll_flash.planner.machines import cpu_check, fit
from roll_flash.planner.machines.memory import GIB
from roll_flash.processes.ray import local_ray
from roll_flash.run.run_dir import RunDir
from roll_flash.sandboxes import SandboxError, SandboxImageMissing
from roll_flash.system import start_checks, system
from roll_flash.system.start_checks import check_parts, check_sandboxes

TREE: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "counting:Counting-v0"}]}


def config(*overrides: str, **tree: Any) -> Config:
    return load_config({**TREE, **tree}, overrides)


@pytest.fixture(autouse=True)
def nothing_slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("something slow was started")

    monkeypatch.setattr(trainer, "open_system", refuse)
    monkeypatch.setattr(trainer, "open_learner", refuse)
    monkeypatch.setattr(evaluator, "_open_runner", refuse)
    monkeypatch.setattr(fit, "_has_ray", lambda: False)  # tests before may have left Ray on in this process


def test_a_load_balancing_loss_of_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.router_aux_loss: the model has no experts; set it to 0"):
        check_parts(config("learner.router_aux_loss=0.1", "inference.engine=transformers"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("learner.routing_replay=true",), "the model has no experts; set it to auto"),
        (("learner.router_aux_loss=0.1",), "the model has no experts; set it to 0"),
        (("rollout.worker_resources={memory: 1.0e+15}",), "memory"),
    ],
)
def test_what_a_model_cannot_do_is_said_before_a_row_is_read(overrides: tuple[str, ...], says: str) -> None:
    rows = {"id": "Dataset-v0", "data": {"path": "/no/such.jsonl"}, "reward": "exact"}
    with pytest.raises((ConfigError, PlacementError), match=says):
        check_parts(config("inference.engine=transformers", *overrides, envs=[rows]))


@pytest.mark.parametrize("index", range(3), ids=["train", "dry run", "eval"])
def test_a_model_that_this_machine_cannot_hold_is_one_line_before_rows_and_ray(
    index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_check, "memory_bytes", lambda: 2**10)
    rows = ["envs=[{id: Dataset-v0, data: {path: /no/such.jsonl}, reward: exact}]"] if index < 2 else []
    words = commands(tmp_path, *rows, "learner.device=cpu", "inference.engine=transformers")[index]
    assert main(words) == 1
    said = capsys.readouterr().err.strip()
    assert "tiny: 0.6 M parameters need at least" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("index", range(3), ids=["train", "dry run", "eval"])
def test_memory_that_no_part_can_get_here_is_one_line(
    index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("rollout.worker_resources={CPU: 1, memory: 1.0e+15}", "inference.engine=transformers")
    assert main(commands(tmp_path, *words)[index]) == 1
    said = capsys.readouterr().err.strip()
    assert "memory" in said
    assert "worker" in said
    assert len(said.splitlines()) == 1


def test_memory_of_a_host_with_gpus_is_known_before_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "vllm_build", lambda: "cuda")
    monkeypatch.setattr(fit, "own_gpus", lambda config: {"0": 80 * GIB, "1": 80 * GIB})
    monkeypatch.setattr(fit, "_memory_of_ray", lambda: 2.0**20)
    with pytest.raises(PlacementError, match=r"on the host, and Ray has 0\.0 GiB"):
        fit.fit_here(config())


def test_a_run_says_memory_and_time_of_its_model_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config("learner.device=cpu", "inference.engine=transformers", f"runs={tmp_path}")
    checked = check_parts(run)
    said: list[str] = []
    start = system.Start.of(run, RunDir.create(run, resume=False), checked, resume=False)
    start.announce(SimpleNamespace(note=said.append, show=lambda **_: None))  # type: ignore[arg-type]
    assert [line for line in said if "0.6 M parameters need at least" in line]
    assert [line for line in said if "training takes" in line]


def test_a_dry_run_loads_the_tokenizer_and_draws_the_first_tasks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "my.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} and 1?{'x' * n}", "answer": "2"}) + "\n" for n in range(40)))
    loaded, drawn = [], []
    load, draw = tokenizer.load_tokenizer, start_checks.first_tasks_of_levels
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *about: (loaded.append(about), load(*about))[1])
    monkeypatch.setattr(start_checks, "first_tasks_of_levels", lambda *about: (drawn.append(about), draw(*about))[1])
    tokenizer._loaded.cache_clear()
    envs = [{"id": "Dataset-v0", "data": {"path": str(rows)}, "reward": "exact"}]
    words = ("inference.engine=transformers", "model.max_length=200", f"runs={tmp_path}", "rollout.max_new_tokens=8")
    lines = dry_run.dry_run(config(*words, envs=envs))
    assert any("Dataset-v0 resets with" in line for line in lines)
    assert (len(loaded), len(drawn)) == (1, 1)


@pytest.mark.parametrize("role", ["user", "human"])
def test_a_role_that_models_do_not_know_is_said(role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "my.jsonl"
    chats = [[{"role": "system", "content": "Be brief."}, {"role": role, "content": str(n)}] for n in range(9)]
    rows.write_text("".join(json.dumps({"messages": chat, "answer": "2"}) + "\n" for chat in chats))
    envs = [{"id": "Dataset-v0", "data": {"path": str(rows)}, "reward": "exact"}]
    check_parts(config("inference.engine=transformers", "model.max_length=200", f"runs={tmp_path}", envs=envs))
    is_said = "a prompt has a message with the role 'human', which the model may never" in capsys.readouterr().err
    assert is_said == (role == "human")


SLOW_SOURCE = """
import roll_flash
class Slow(roll_flash.TaskSource):
    made = []
    size = 7
    def __init__(self, env):
        self.made.append(dict(env.kwargs))
        self.number = 0
    def next(self):
        self.number += 1
        return roll_flash.Task(f"slow:{self.number}", "TextFrozenLake-v0", self.number, {"size": 3})
    def held_out(self, count):
        return [roll_flash.Task("slow:held_out", "TextFrozenLake-v0", 0, {"size": 3})]
    def state(self): return {"number": self.number}
    def restore(self, state): self.number = state["number"]
"""


@pytest.mark.parametrize("levels", [[], [{"size": 3}, {"size": 4}]])
def test_a_dry_run_makes_each_task_source_of_the_user_once(levels: list[dict[str, int]], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_SOURCE)
    entry_point = f"{tmp_path}/slow.py:Slow"
    envs = [{"id": "TextFrozenLake-v0", "task_source": {"entry_point": entry_point}, "levels": levels}]
    lines = dry_run.dry_run(config("inference.engine=transformers", f"runs={tmp_path}", envs=envs))
    assert f"tasks: {7 * max(1, len(levels))} to train on" in lines
    assert load_object(entry_point).made == [*levels, {}]


def test_levels_that_alone_have_an_argument_are_refused_before_each_task_of_the_evaluation_fails(
    tmp_path: Path,
) -> None:
    """An evaluation uses no level: all its attempts failed, after servers and workers had started."""
    (tmp_path / "sized.py").write_text(
        "import roll_flash\nclass Sized(roll_flash.Env):\n"
        "    def __init__(self, size): self.size = size\n"
        "    async def reset(self, *, seed=None, options=None): return 'go', {}\n"
    )
    envs = [{"id": f"{tmp_path}/sized.py:Sized", "levels": [{"size": 3}, {"size": 4}]}]
    words = ("inference.engine=transformers", f"runs={tmp_path}")
    with pytest.raises(ConfigError, match=r"kwargs \{\}: TypeError.*'size'.*; evaluations use kwargs without a level"):
        check_parts(config(*words, envs=envs))
    assert check_parts(config(*words, envs=[{**envs[0], "kwargs": {"size": 5}}])).first_tasks
    assert check_parts(config(*words, "eval.before_and_after=false", envs=envs)).first_tasks


def test_a_missing_library_of_another_system_for_metrics_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, _, packages = EXPORTERS["mlflow"]
    monkeypatch.setitem(EXPORTERS, "mlflow", (make, "no_such_library", packages))
    run = config("monitor.export=[otel, mlflow]", "inference.engine=transformers", f"runs={tmp_path}")
    for start in (dry_run.dry_run, trainer.train):
        with pytest.raises(ConfigError, match=r"monitor\.export: mlflow: .*; pip install mlflow$"):
            start(run)
    assert not run.run_folder.exists()
    assert check_parts(run, trains=False).model_folder is not None


def test_a_dry_run_names_the_systems_that_get_the_metrics(tmp_path: Path) -> None:
    run = config("monitor.export=[otel, prometheus]", "inference.engine=transformers", f"runs={tmp_path}")
    assert "metrics also go to: otel, prometheus" in dry_run.dry_run(run)


def test_a_tokenizer_that_has_changed_is_loaded_anew(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve_model("tiny"), tmp_path / "model")
    first = tokenizer.load_checked_tokenizer(folder, {})
    assert tokenizer.load_checked_tokenizer(folder, {}) is first
    (folder / "chat_template.jinja").write_text("{{ messages }} another")
    assert tokenizer.load_checked_tokenizer(folder, {}).chat_template == "{{ messages }} another"


@pytest.mark.parametrize("setting", ["ray.address=10.0.0.1:6379", "rollout.worker_resources={disk: 1}"])
def test_what_only_ray_knows_is_left_to_it(setting: str) -> None:
    assert fit.fit_here(config(setting)) is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with all that is looked at before a model is loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(resolve_model("tiny") / name, folder)
    save_file({"weight": np.zeros(64, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def taken() -> Any:
    """A port that is taken after one that is free: below those that the kernel gives to others meanwhile."""
    for port in range(20_001 + os.getpid() % 5_000, 30_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as listening:
            socket.create_server(("127.0.0.1", port - 1)).close()
            yield listening.getsockname()[1]
            return


def commands(tmp_path: Path, *words: str) -> list[list[str]]:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(TREE))
    words = (f"runs={tmp_path / 'runs'}", *words)
    return [
        ["train", str(file), *words],
        ["train", str(file), *words, "--dry-run"],
        ["eval", str(file), *words, "--out", str(tmp_path / "eval"), "--allow-weak"],
    ]


@pytest.mark.parametrize("index", range(3), ids=["train", "dry run", "eval"])
class TestEachCommandSaysInOneLine:
    def said(self, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        assert main(commands(tmp_path, *words)[index]) in (1, 2)
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1, said
        assert not (tmp_path / "runs").exists()
        assert not (tmp_path / "eval" / "logs").exists()
        return said

    def test_that_no_engine_answers(
        self, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        said = self.said(index, tmp_path, capsys, "envs.0.id=ShellMath-v0", "sandbox.provider=docker")
        assert "docker" in said.lower()

    def test_that_weights_are_cut_short(
        self, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
    ) -> None:
        weights = model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 8)
        assert "weights cannot be read" in self.said(index, tmp_path, capsys, f"model.path={model}")

    def test_that_there_is_no_chat_template(
        self, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
    ) -> None:
        (model / "chat_template.jinja").unlink()
        assert "has no chat template" in self.said(index, tmp_path, capsys, f"model.path={model}")

    def test_that_a_port_is_taken(
        self, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], taken: int
    ) -> None:
        words = (f"inference.port={taken - 1}", "inference.servers=2")
        assert f"port {taken} " in self.said(index, tmp_path, capsys, *words)

    def test_that_nobody_has_the_engine(self, index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no engine is named 'vlm'" in self.said(index, tmp_path, capsys, "inference.engine=vlm")


@pytest.mark.parametrize("index", range(2), ids=["train", "dry run"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["warm_start.demonstrations=/no/such.jsonl"], "warm_start.demonstrations: data /no/such.jsonl: no such file"),
        (["learner.kl.coefficient=0.1", "learner.kl.reference=/no/such"], "/no/such"),
        (["learner.engine=megatron"], "nobody provides 'megatron'"),
        (["inference.weight_transfer=nccl"], "needs GPUs"),
        (["model.max_length=64"], "rollout.max_new_tokens=64 leaves no room for a prompt in model.max_length=64"),
    ],
)
def test_training_says_before_it_starts_what_it_lacks(
    index: int, words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(commands(tmp_path, *words)[index]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert says in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("index", range(2), ids=["train", "dry run"])
def test_a_run_folder_that_cannot_be_made_is_one_line(
    index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(commands(tmp_path, "runs=/proc/1/nowhere")[index]) == 2
    said = capsys.readouterr().err.strip()
    assert "/proc/1/nowhere/run: the run folder cannot be written" in said
    assert len(said.splitlines()) == 1


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "run" / ".lock").mkdir(parents=True)
    assert main(commands(tmp_path)[0]) == 2
    said = capsys.readouterr().err.strip()
    assert "the run folder cannot be written" in said
    assert len(said.splitlines()) == 1


@pytest.mark.vllm
def test_a_model_whose_new_weights_vllm_on_a_cpu_does_not_take_is_refused_for_training_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_checks, "fit_here", lambda config, **_: None)  # it is too large for this machine
    (model / "config.json").write_text('{"model_type": "gpt_oss"}')
    trained = config(f"model.path={model}")
    with pytest.raises(ModelError, match=r"gpt_oss cannot be trained with vLLM on a CPU.*inference.engine"):
        check_parts(trained)
    assert check_parts(trained, trains=False).model_folder == model
    assert check_parts(config(f"model.path={model}", "inference.engine=transformers")).model_folder == model


@pytest.mark.docker
def test_an_image_that_no_engine_has_is_known_before_anything_starts() -> None:
    missing = config("sandbox.provider=docker", "sandbox.image=nobody/has-this:1", envs=[{"id": "ShellMath-v0"}])
    with pytest.raises(SandboxImageMissing, match="nobody/has-this:1"):
        asyncio.run(check_sandboxes(missing, check_parts(missing).sandboxes))


def test_a_sandbox_that_no_provider_can_give_is_known_before_anything_starts(require_bubblewrap: None) -> None:
    wrong = config("sandbox.provider=local", "sandbox.image=debian:12", envs=[{"id": "ShellMath-v0"}])
    with pytest.raises(SandboxError, match="local sandbox has no images"):
        asyncio.run(check_sandboxes(wrong, check_parts(wrong).sandboxes))


def test_an_environment_without_a_sandbox_needs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    plain = config("sandbox.provider=docker")
    assert asyncio.run(check_sandboxes(plain, check_parts(plain).sandboxes)) is None


TWO = {"0": 80 * GIB, "1": 80 * GIB}


class TestMoreGpusThanThereAre:
    """Two GPUs, which are not there; the servers compute on GPUs, as vLLM's CUDA build does."""

    SAYS = (
        "the run needs 5 GPU(s) (1 rank(s) of 1 and 2 server(s) of 2), and there are 2; lower learner.ranks, "
        "inference.servers or inference.tensor_parallel_size, or add nodes"
    )
    WORDS = ("inference.servers=2", "inference.tensor_parallel_size=2", "learner.device=cuda")

    @pytest.fixture(autouse=True)
    def two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_server, "vllm_build", lambda: "cuda")
        for module in (fit, system):
            monkeypatch.setattr(module, "own_gpus", lambda config: {"0": 0, "1": 0})

    def test_is_one_line_of_a_dry_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*commands(tmp_path, *self.WORDS)[0], "--dry-run"]) in (1, 2)
        assert capsys.readouterr().err.strip() == f"roll-flash: {self.SAYS} (see docs/scaling.md)"

    def test_ends_a_start_before_anything_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        resources = {"CPU": 16.0, "GPU": 2.0}
        nodes = [Node("id", "127.0.0.1", "here", resources, resources)]

        @asynccontextmanager
        async def nothing(*_: object) -> AsyncIterator[Any]:
            async def is_alive() -> bool:
                return False

            yield is_alive

        for module, name in ((system, "local_ray"), (system, "watching_ray")):
            monkeypatch.setattr(module, name, nothing)
        for module in (system, reservation):
            monkeypatch.setattr(module, "living_nodes", lambda *_: nodes)

        async def start() -> None:
            preparation: Any = SimpleNamespace(prepare=None)
            async with AsyncExitStack() as stack, asyncio.timeout(10):
                run = config(*self.WORDS)
                await system._start_ray(stack, run, preparation, lambda note: None, None)

        with pytest.raises(PlacementError) as caught:
            asyncio.run(start())
        assert str(caught.value) == self.SAYS


def test_a_dry_run_on_a_cluster_checks_the_memory_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"CPU": 16.0, "GPU": 2.0}
    nodes = [Node("id", "10.0.0.1", "there", resources, resources)]
    monkeypatch.setattr(dry_run, "local_ray", lambda _: nullcontext())
    monkeypatch.setattr(dry_run, "living_nodes", lambda *_: nodes)
    monkeypatch.setattr(dry_run, "with_gpu_memory", lambda them: [replace(each, gpus=TWO) for each in them])
    found = asyncio.run(dry_run._fit_with_ray(config("ray.address=10.0.0.1:6379")))
    assert [row.node.gpus for row in found.plan.rows if row.part.kind == "rank"] == [TWO]


def test_a_dry_run_says_which_gpus_the_parts_get(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "vllm_build", lambda: "cuda")
    monkeypatch.setattr(fit, "own_gpus", lambda config: {"MIG-a": 20 * 2**30, "MIG-b": 20 * 2**30})
    monkeypatch.setattr(fit, "_memory_of_ray", lambda: 64.0 * GIB)  # whatever else uses that of this machine
    assert main([*commands(tmp_path, "ray.num_cpus=8")[0], "--dry-run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("# placement: ")]
    assert lines[0][2:] == ["part", "node", "CPUs", "GPUs", "GPU", "memory", "ports"]
    assert [(line[2], line[7:10]) for line in lines[1:3]] == [
        ("rank", ["MIG-a", "20", "GiB"]),
        ("server", ["MIG-b", "20", "GiB"]),
    ]


def test_a_dry_run_says_that_gpus_stay_unused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml(FakeGpu()))
    monkeypatch.setattr(local_ray, "is_cpu_installation", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main([*commands(tmp_path)[0], "--dry-run"]) == 0
    assert (
        "# placement: 1 GPU(s) of this machine stay unused: torch and vLLM here are CPU builds"
        in capsys.readouterr().out
    )
