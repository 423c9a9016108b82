"""vLLM servers on GPUs: options, environment, order of start. There is no GPU: the vLLM here poses as a CUDA build."""

from __future__ import annotations

import argparse
import asyncio
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from fake_nvml import FakeGpu, FakeNvml, in_slices

from roll_flash.config.tree import InferenceConfig, load_config
from roll_flash.engines.places import Places
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.inference.open import check_engine, computes_on_gpus, open_engine
from roll_flash.inference.servers.control import Launcher
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.inference.servers.metrics import kv_cache_tokens, logged_figures
from roll_flash.inference.servers.remote import check_slices
from roll_flash.inference.vllm import server as vllm_server
from roll_flash.inference.vllm.arguments import command_line
from roll_flash.inference.vllm.server import vllm_device
from roll_flash.system import system

GIB = 2**30
TREE: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}]}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "vllm_build", lambda: "cuda")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    return tmp_path


def launched(
    config: InferenceConfig, model: Path, *, shares_gpus: bool | None = None
) -> tuple[list[str], Mapping[str, str]]:
    """Return command and environment of a server; `shares_gpus` None: a child process outside of any plan."""
    places = None if shares_gpus is None else cast(Places, types.SimpleNamespace(shares_gpus=shares_gpus))
    launcher = launcher_of(config, model, places)
    return launcher.command(3, "10.0.0.1", 21_000), launcher.environment


def launcher_of(config: InferenceConfig, model: Path, places: Places | None = None) -> Launcher:
    engine = open_engine(config, model_folder=model, max_model_len=64, logs=model, places=places)
    return cast(ServerEngine, engine)._launcher


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


class TestAServerOnAGpu:
    def test_of_its_own_takes_a_fraction_of_it(self, cuda: None, model: Path) -> None:
        command, environment = launched(InferenceConfig(gpu_memory_utilization=0.7), model, shares_gpus=False)
        assert option(command, "--gpu-memory-utilization") == "0.7"
        assert "--kv-cache-memory-bytes" not in command
        assert (option(command, "--dtype"), option(command, "--seed")) == ("bfloat16", "3")
        assert option(command, "--tensor-parallel-size") == "1"
        assert option(command, "--scheduler-cls").endswith(".gpu_scheduler")
        assert "--enforce-eager" not in command, "CUDA graphs"
        assert not environment.keys() & {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"}

    def test_shared_with_the_learner_has_a_cache_of_fixed_size(self, cuda: None, model: Path) -> None:
        """vLLM then measures nothing, and starts again beside the learner although little is free."""
        command, _ = launched(InferenceConfig(kv_cache_gib=6), model, shares_gpus=True)
        assert option(command, "--kv-cache-memory-bytes") == str(6 * GIB)
        assert float(option(command, "--gpu-memory-utilization")) < 0.05

    def test_is_split_over_several(self, cuda: None, model: Path) -> None:
        command, _ = launched(InferenceConfig(tensor_parallel_size=4), model)
        assert option(command, "--tensor-parallel-size") == "4"

    def test_may_receive_handles_of_gpu_memory_with_ipc_only(self, cuda: None, model: Path) -> None:
        _, environment = launched(InferenceConfig(weight_transfer="ipc"), model)
        assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
        launcher = launcher_of(InferenceConfig(weight_transfer="nccl"), model)
        assert launcher.joins_learner
        assert not launcher.prepares_weights
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in launcher.environment

    def test_trains_models_that_vllm_on_a_cpu_cannot(self, cuda: None, model: Path) -> None:
        check_engine(InferenceConfig(weight_transfer="nccl"), model, trains=True)

    def test_is_planned_on_one(self, cuda: None) -> None:
        assert computes_on_gpus(InferenceConfig())
        assert computes_on_gpus(InferenceConfig(engine="transformers")) is False
        assert computes_on_gpus(InferenceConfig(engine="of-a-plug-in")) is None


@pytest.mark.vllm
def test_a_server_on_a_cpu_is_not_split(model: Path) -> None:
    assert (vllm_device(), computes_on_gpus(InferenceConfig())) == ("cpu", False)
    with pytest.raises(InferenceError, match=r"tensor_parallel_size=2 needs GPUs.*set it to 1"):
        check_engine(InferenceConfig(tensor_parallel_size=2), model, trains=False)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("extra", "disabled"), [({}, "1"), ({"enforce-eager": False}, "0"), ({"enforce_eager": True}, "1")]
)
def test_a_server_on_a_cpu_compiles_nothing_unless_told(extra: dict[str, Any], disabled: str, model: Path) -> None:
    _, environment = launched(InferenceConfig(extra_args=extra), model)
    assert environment["TORCHDYNAMO_DISABLE"] == disabled


def test_a_missing_vllm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "vllm_build", lambda: None)
    with pytest.raises(InferenceError, match="vLLM is not installed"):
        vllm_device()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("tensor_parallel_size", "it is inference.tensor_parallel_size"),
        ("tensor-parallel-size", "it is inference.tensor_parallel_size"),
        ("--tp", "it is inference.tensor_parallel_size"),
        ("device_ids", "the plan of the run gives each server its GPUs"),
        ("data_parallel_size", "set inference.servers instead"),
        ("pipeline_parallel_size", "inference.tensor_parallel_size"),
        ("gpu_memory_utilization", "it is inference.gpu_memory_utilization"),
    ],
)
def test_an_option_that_the_run_sets_is_refused_with_its_key(key: str, says: str, cuda: None, model: Path) -> None:
    with pytest.raises(ConfigError, match=f"inference.extra_args.{key}: .*{says}"):
        check_engine(InferenceConfig(extra_args={key: 2}), model, trains=False)


class TestValuesArriveAsTheyAreInTheFile:
    def test_as_words_of_the_command_line(self) -> None:
        extra = {
            "cudagraph-capture-sizes": [1, 2, 4],
            "middleware": ["a.B", "c.D"],
            "allowed_origins": ["https://a", "https://b"],
            "disable_access_log_for_endpoints": ["/health", "/metrics"],
            "hf_overrides": {"rope": {"factor": 2.0}},
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 8192,
        }
        assert command_line({"max_num_batched_tokens": 1, "seed": 3}, extra) == [
            *("--max-num-batched-tokens", "8192", "--seed", "3"),
            *("--cudagraph-capture-sizes", "1", "2", "4"),
            *("--middleware", "a.B", "--middleware", "c.D"),
            *("--allowed-origins", '["https://a", "https://b"]'),
            *("--disable-access-log-for-endpoints", "/health,/metrics"),
            *("--hf-overrides", '{"rope": {"factor": 2.0}}'),
            "--enforce-eager",
            "--no-enable-prefix-caching",
        ]

    @pytest.mark.vllm
    def test_in_vllm(self, cuda: None, tmp_path: Path, model: Path) -> None:
        """The whole way: a file, the config, the command line of a server, and vLLM's own parser."""
        extra = {
            "cudagraph_capture_sizes": [1, 2, 4],
            "served-model-name": ["policy", "other"],
            "allowed_origins": ["https://a", "https://b"],
            "compilation_config": {"cudagraph_capture_sizes": [1, 8], "mode": 0},
            "hf_overrides": {"rope_scaling": {"factor": 2.0}},
            "lora_modules": [{"name": "a", "path": "/b"}, {"name": "c", "path": "/d"}],
            "middleware": ["a.B", "c.D"],
            "enable_prefix_caching": False,
        }
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({**TREE, "inference": {"extra_args": extra}}))
        config = load_config(file, ["inference.extra_args.cudagraph_capture_sizes=[2, 16]"]).inference
        command, _ = launched(config, model)
        got = vllm_parser().parse_args(command[3:])
        assert got.cudagraph_capture_sizes == [2, 16]
        assert got.served_model_name == ["policy", "other"]
        assert got.allowed_origins == ["https://a", "https://b"]
        assert got.compilation_config.cudagraph_capture_sizes == [1, 8]
        assert got.hf_overrides == {"rope_scaling": {"factor": 2.0}}
        assert [(lora.name, lora.path) for lora in got.lora_modules] == [("a", "/b"), ("c", "/d")]
        assert got.middleware == ["a.B", "c.D", vllm_server.MIDDLEWARE], "ours gets a request first"
        assert got.enable_prefix_caching is False
        assert (got.model, got.port, got.tensor_parallel_size) == (str(model), 21_000, 1)

    @pytest.mark.vllm
    def test_for_every_option_of_vllm_that_takes_a_list(self) -> None:
        """A vLLM that reads one of them in another way is found here."""
        parser = vllm_parser()
        tried = 0
        for action in parser._actions:
            is_json = getattr(action.type, "__name__", "") == "loads" and isinstance(action.default, list)
            if not action.option_strings or not (action.nargs == "+" or is_json) or action.dest == "lora_modules":
                continue
            items = list(action.choices or ())[:2] or (["a", "b"] if is_json or _takes(action, "a") else [1, 2])
            words = command_line({}, {action.dest: items})
            assert list(getattr(parser.parse_args(words), action.dest)) == items, action.dest
            tried += 1
        assert tried >= 5


def _takes(action: Any, text: str) -> bool:
    try:
        return bool(action.type(text) == text)
    except (TypeError, ValueError, argparse.ArgumentTypeError):
        return False


def vllm_parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def test_the_cache_of_a_server_with_several_engines_is_that_of_all() -> None:
    info = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="{}"}} 1.0\n'
    usage = 'vllm:kv_cache_usage_perc{{engine="{}"}} {}\nvllm:num_requests_running{{engine="{}"}} {}\n'
    text = "".join([info.format(0, 100), info.format(1, 50), usage.format(0, 0.5, 0, 3), usage.format(1, 0.1, 1, 4)])
    assert kv_cache_tokens(text) == 16 * 150
    figures = {"kv_cache_usage": pytest.approx(0.3), "requests_running": 7.0, "kv_cache_tokens": 16.0 * 150}
    assert logged_figures(text) == figures


def test_a_server_is_not_split_over_slices() -> None:
    """CUDA lets a process use one slice only, so that all ranks of the server would meet there."""
    split = InferenceConfig(tensor_parallel_size=2)
    with pytest.raises(InferenceError, match=r"MIG slices.*\(MIG-a, MIG-b\); set it to 1"):
        check_slices(split, ("MIG-a", "MIG-b"))
    check_slices(split, ("0", "1"))
    check_slices(InferenceConfig(), ("MIG-a",))


@pytest.mark.vllm
def test_vllm_asks_about_the_gpu_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CUDA platform, whose kernels and driver are stubbed: the CPU wheel has its Python code."""
    from vllm.platforms import current_platform

    from roll_flash.inference.vllm.mig import patch_mig_slices

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms import cuda as vllm_cuda

    platform: Any = vllm_cuda.NvmlCudaPlatform
    monkeypatch.setattr(vllm_cuda, "pynvml", FakeNvml(FakeGpu(), in_slices(20, 10, 10)))
    name = "device_control_id_to_physical_device_id"
    monkeypatch.setattr(platform, name, getattr(platform, name))  # to be put back
    assert platform.device_control_id_to_physical_device_id("MIG-2aaa") == 2, "a GPU that there is not: mended below"
    patch_mig_slices()
    assert platform.device_control_id_to_physical_device_id("MIG-2aaa") == 2, "on a CPU nothing is patched"
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    for _ in range(2):
        patch_mig_slices()
        assert platform.device_control_id_to_physical_device_id("MIG-2aaa") == 1
    assert platform.device_control_id_to_physical_device_id("GPU-0000") == 0
    assert platform.device_control_id_to_physical_device_id("1") == 1


class StandIn:
    """A learner or an engine, which takes a moment to start."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    async def check_model(self, places: object) -> None:
        self._events.append("the model is tried")

    async def start(self) -> None:
        self._events.append(f"{self._name} starts")
        await asyncio.sleep(0.05)
        self._events.append(f"{self._name} is up")

    async def close(self) -> None:
        return None


TRIED = "the model is tried"
ONE_AFTER_ANOTHER = [TRIED, "server starts", "server is up", "learner starts", "learner is up"]
TOGETHER = [TRIED, "server starts", "learner starts", "server is up", "learner is up"]


@pytest.mark.parametrize(
    ("shares_gpus", "goes_on", "order"),
    [
        (True, False, ONE_AFTER_ANOTHER),
        (False, False, TOGETHER),
        (True, True, ONE_AFTER_ANOTHER),
        (False, True, ["server starts", TRIED, "learner starts", "server is up", "learner is up", "it is restored"]),
    ],
)
def test_a_new_model_is_tried_first_and_on_a_shared_gpu_the_server_is_up_before_the_learner_takes_memory(
    shares_gpus: bool, goes_on: bool, order: list[str]
) -> None:
    events: list[str] = []
    learner, server = StandIn("learner", events), StandIn("server", events)
    places = types.SimpleNamespace(shares_gpus=shares_gpus)
    config = load_config(TREE)
    parts = cast(Any, learner), cast(Any, server), cast(Any, places)
    restore = (lambda: events.append("it is restored")) if goes_on else None
    asyncio.run(system._start_models(*parts, config, lambda _: None, restore))
    assert events == order
