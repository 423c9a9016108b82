"""Every branch that only CUDA takes is listed, with what runs it: a test that forces it on the CPU, or `gpu-check`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from roll_flash.learner.model.token_logprobs import _add_product
from roll_flash.learner.packing.tree_attention import tree_layout

ROOT = Path(__file__).parents[2]
BRANCH = re.compile(
    r"is_cuda|torch\.cuda\.|\.type [!=]= \"(cuda|cpu)\"|_on_gpu\b|\bdevice [!=]= \"(cuda|cpu)\"|"
    r"(?<!def )(is_cpu_installation|vllm_device)\(\)|_build\(\) [!=]= \""
)
PAGE_LOCKED = "tests/inference/test_page_locked_publication.py"
START = "tests/learner/test_gpu_start.py"
DEVICE_WEIGHTS = "tests/learner/test_device_weights.py"
SERVERS = "tests/inference/test_gpu_servers.py"
GPUS = "tests/test_gpus.py"
PLAN = "tests/cluster/test_plan.py"

RUN_BY: dict[str, tuple[int, tuple[str, ...]]] = {
    "cluster/parts.py": (1, (PLAN,)),
    "config/sections/learner.py": (3, (PLAN, "tests/learner/test_learner_options.py")),
    "config/tree.py": (1, ("tests/test_config.py",)),
    "doctor.py": (3, (GPUS,)),
    "inference/open.py": (1, (SERVERS,)),
    "inference/vllm/mig.py": (1, (SERVERS,)),
    "inference/vllm/server.py": (10, (SERVERS, "tests/inference/test_routed_experts.py")),
    "learner/model/activation_offload.py": (1, ("tests/learner/test_learner_options.py",)),
    "learner/model/compiled_layers.py": (1, ("tests/learner/test_learner_options.py",)),
    "learner/model/token_logprobs.py": (3, ("tests/learner/test_cuda_branches.py", "roll_flash/gpu_check/logprobs.py")),
    "learner/packing/flex_tree.py": (2, ("roll_flash/gpu_check/attention.py",)),
    "learner/packing/tree_attention.py": (2, ("roll_flash/gpu_check/attention.py",)),
    "learner/ranks/checkpoint.py": (3, ("roll_flash/gpu_check/training.py",)),
    "learner/ranks/device.py": (4, ("tests/learner/test_rank_device.py",)),
    "learner/ranks/fsdp.py": (1, ("tests/learner/test_rank_device.py",)),
    "learner/ranks/rank.py": (10, (START, "roll_flash/gpu_check/training.py")),
    "learner/ranks/row_memory.py": (4, (START,)),
    "learner/weights/device.py": (5, (DEVICE_WEIGHTS, "roll_flash/gpu_check/servers.py")),
    "learner/weights/staged.py": (7, (PAGE_LOCKED, START)),
    "planner/measured/calibration.py": (1, ("tests/planner/test_calibration.py",)),
    "processes/gpus.py": (1, (GPUS,)),
    "processes/ray/local_ray.py": (2, (GPUS, "tests/test_start_checks.py")),
    "run/run_dir.py": (1, ("tests/test_run_dir.py",)),
    "weight_sync/double_buffer.py": (1, (PAGE_LOCKED, "roll_flash/gpu_check/servers.py")),
    "weight_sync/page_locked.py": (2, (PAGE_LOCKED,)),
    "weight_sync/shared_memory.py": (5, (PAGE_LOCKED, "roll_flash/gpu_check/servers.py")),
}
"""Lines that ask for CUDA or call it, by file below roll_flash, and what runs them."""


def test_every_branch_for_cuda_is_listed_with_what_runs_it() -> None:
    found: dict[str, int] = {}
    for path in sorted((ROOT / "roll_flash").rglob("*.py")):
        name = str(path.relative_to(ROOT / "roll_flash"))
        lines = [line for line in path.read_text().splitlines() if BRANCH.search(line)]
        if lines and not name.startswith("gpu_check/"):  # which runs only to try a GPU
            found[name] = len(lines)
    assert found == {file: count for file, (count, _) in RUN_BY.items()}, "run a new branch in a test and list it"
    for _, runners in RUN_BY.values():
        assert all((ROOT / runner).is_file() for runner in runners)


def test_products_of_bfloat16_are_accumulated_in_float32_off_the_cpu() -> None:
    """On the meta device, which takes the same branch as CUDA: dtypes and shapes, no values."""
    total = torch.zeros(3, 5, device="meta")
    first, second = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(4, 5, dtype=torch.bfloat16)
    _add_product(total, first.to("meta"), second.to("meta"))
    assert (total.dtype, total.shape) == (torch.float32, (3, 5))


@pytest.mark.parametrize("flex", [True, False])
def test_a_row_off_the_cpu_has_one_mask_for_all_of_it(flex: bool) -> None:
    """On the meta device too."""
    ends = np.full(300, 300)
    tree = tree_layout(np.arange(300), ends, torch.device("meta"), flex=flex)
    found = tree.flex.kv_indices if flex and tree.flex is not None else tree.mask
    assert tree.blocks == ()
    assert (tree.flex is not None) == flex == (tree.mask is None)
    assert found is not None
    assert found.device.type == "meta"
