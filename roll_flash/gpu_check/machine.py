"""Checks of the machine: packages, driver, plan, raw speed; and the model that the other checks use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roll_flash.cluster.nodes import own_node
from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import Plan, make_plan
from roll_flash.config.tree import Config, load_config
from roll_flash.doctor import GPU_CHECKS, check_machine
from roll_flash.errors import ConfigError, PlacementError
from roll_flash.gpu_check.check import Bench, NotPossibleError, require
from roll_flash.gpu_check.settings import CONFIGS
from roll_flash.inference.open import computes_on_gpus
from roll_flash.models.prepare import resolve_model
from roll_flash.models.tiny import vocabulary, write_tokenizer
from roll_flash.planner.machines.hardware import load_hardware
from roll_flash.planner.machines.memory_check import check_gpu_memory
from roll_flash.processes.gpus import visible_gpus
from roll_flash.processes.nvml import read_driver
from roll_flash.processes.ray.local_ray import own_gpus, own_resources

GIB = 2**30
DOCTOR = ("python", "packages", "torch", "vllm", "ray", "gpu", "memory", "disk", "/dev/shm", *GPU_CHECKS)
"""Without Docker and sandboxes, which the checks do not use."""
BF16_CAPABILITY = (8, 0)
MATMUL_SHARE = 0.6
"""Of its published figure, which a GPU should reach with one large matrix product."""
RANDOM_WEIGHT = 0.04
"""Standard deviation of random weights: with it the next token is far from uniform, so that errors show."""


def doctor(bench: Bench) -> None:
    checks = check_machine(DOCTOR)
    bench.measured(**{check.name: check.detail for check in checks})
    for check in checks:
        if not check.ok and not check.required:
            bench.remark(f"{check.name}: {check.detail}; {check.fix}")
    broken = [f"{check.name}: {check.detail}; {check.fix}" for check in checks if not check.ok and check.required]
    require(not broken, "; ".join(broken))


def driver(bench: Bench) -> None:
    """Compare what the driver says (NVML) with what torch sees."""
    found = read_driver()
    if not found.gpus:
        raise NotPossibleError(found.problem or "there is no GPU")
    seen = visible_gpus(found)
    bench.measured(
        driver=found.version,
        cuda_of_driver=f"{found.cuda[0]}.{found.cuda[1]}",
        gpus=[f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB, {gpu.used_bytes / GIB:.1f} used" for gpu in found.gpus],
        torch=torch.__version__,
        cuda_of_torch=str(torch.version.cuda),
    )
    if bench.settings.rehearsal:
        raise NotPossibleError("torch and vLLM are CPU builds")
    require(torch.cuda.is_available(), f"the driver shows {len(seen)} GPU(s), but torch {torch.__version__} sees none")
    count = torch.cuda.device_count()
    require(count == len(seen), f"the driver shows {len(seen)} GPU(s), and torch {count}")
    capabilities = [torch.cuda.get_device_capability(index) for index in range(count)]
    bench.measured(capabilities=[f"{major}.{minor}" for major, minor in capabilities])
    require(
        min(capabilities) >= BF16_CAPABILITY, f"a GPU of capability {min(capabilities)} does not compute in bfloat16"
    )


def plan(bench: Bench) -> None:
    """Place the parts of the config, and add up the memory that they need. Raises PlacementError if they do not fit."""
    made, memory = _plan(bench.settings.config_with())
    bench.measured(plan=made.lines(), memory=memory)
    for line in [*made.lines()[1:], *memory]:
        bench.fits(f"this config: {line}")


def recipes(bench: Bench, folder: str = str(CONFIGS / "gpu")) -> None:
    """Plan every recipe on this machine; one that does not fit is no failure."""
    files = [file for file in sorted(Path(folder).glob("*.yaml")) if file.stem != "base"]
    if not files:
        raise NotPossibleError(f"{folder} has no recipes")
    if bench.settings.rehearsal:
        raise NotPossibleError("recipes are for GPUs, and there is none here")
    for file in files:
        bench.fits(f"{file.name}: {_fit(file)}")


def _fit(file: Path) -> str:
    config = load_config(file)
    if config.ray.address is not None:
        return "is for a cluster"
    try:
        return f"fits; {'; '.join(_plan(config)[1])}"
    except (PlacementError, ConfigError) as error:
        return f"does not fit: {error}"


def _plan(config: Config) -> tuple[Plan, list[str]]:
    gpus = own_gpus(config.ray)
    nodes = [own_node(own_resources(config.ray, gpus), gpus)]
    made = make_plan(run_parts(config, nodes, gpu_servers=computes_on_gpus(config.inference)), nodes)
    return made, check_gpu_memory(config, made)


def model(bench: Bench) -> None:
    """Prepare the model: one by name, or random weights in a shape."""
    folder, shape = bench.settings.model_folder, bench.settings.shape
    if shape is not None:
        bench.note(f"making random weights in the shape of {folder.name} (usually 10-60 s)")
        write_random_model(folder, shape)
        bench.remark("random weights")
    elif not folder.is_dir():
        resolve_model(bench.settings.config_with().model.path)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    require(size > 0, f"{folder}: no weights")
    bench.measured(model=folder.name, gib=size / GIB)


def write_random_model(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write a model folder for the config.json `tree`: random weights in bfloat16, and a tokenizer of characters.

    They are drawn on the GPU if half of what is free there holds them, since a CPU draws 100 million a second.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**tree, "initializer_range": RANDOM_WEIGHT, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config: Any = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(_room_for(made)):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    made.save_pretrained(folder)
    write_tokenizer(folder, vocabulary(config.get_text_config().vocab_size))


def _room_for(model: torch.nn.Module) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    free, _ = torch.cuda.mem_get_info()
    wanted = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return "cuda" if wanted < free / 2 else "cpu"


def speed(bench: Bench, size: int = 8192, megabytes: int = 1024) -> None:
    """Measure one large matrix product and plain copies: what steps and publications are compared with."""
    on_gpu = not bench.settings.rehearsal
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    first, second = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    tflops = 2 * size**3 / fastest_s(lambda: torch.mm(first, second), device) / 1e12
    bench.measured(matmul_tflops=tflops)
    number = megabytes << 20
    host, there = torch.ones(number, dtype=torch.uint8), torch.ones(number, dtype=torch.uint8, device=device)
    other = torch.zeros_like(there)
    bench.measured(
        copy_from_host_gb_s=number / fastest_s(lambda: there.copy_(host), device) / 1e9,
        copy_on_device_gb_s=number / fastest_s(lambda: other.copy_(there), device) / 1e9,
    )
    if on_gpu:
        pinned = host.pin_memory()
        bench.measured(copy_from_pinned_gb_s=number / fastest_s(lambda: there.copy_(pinned), device) / 1e9)
        _compare_with_published(bench, tflops)


def _compare_with_published(bench: Bench, tflops: float) -> None:
    published = published_tflops(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory)
    if published is None:
        bench.remark("no file in configs/hardware has published figures of this GPU")
        return
    bench.measured(published_tflops=published)
    if tflops < MATMUL_SHARE * published:
        bench.slow(
            f"a matrix product of 8192 x 8192 reaches {tflops:.0f} of the published {published:.0f} TFLOP/s: look for "
            "other processes on the GPU, and its power limit and temperature (nvidia-smi -q)"
        )


def published_tflops(name: str, memory_bytes: int) -> float | None:
    """Return the published bfloat16 TFLOP/s of a GPU from the hardware files; None if there is no file for it."""
    words = set(name.lower().replace("-", " ").split())
    found = []
    for file in sorted((CONFIGS / "hardware").glob("*.yaml")):
        gpu = load_hardware(file).gpu
        maker, *product = gpu.name.lower().replace("-", " ").split()
        numbered = [word for word in product if any(map(str.isdigit, word)) and not word.endswith("gb")][:1]
        if numbered and words >= {maker, *numbered}:
            is_other_form = ("pcie" in words) != ("pcie" in product)
            found.append((is_other_form, abs(gpu.memory_gib * GIB - memory_bytes), gpu.bf16_tflops))
    return min(found)[2] if found else None


def fastest_s(work: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """Return the shortest of several times in seconds of `work`, after one that is not counted."""
    found = []
    for _ in range(times + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
