"""Compiles the decoder layers one by one with torch.compile, so that all layers share the code of the first.

Attention over the prefix tree is not compiled: its blocks depend on the row and have their own kernels. The operations
around it (norms, rotations, activations) are compiled for rows of any length.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from roll_flash.errors import LearnerError
from roll_flash.learner.model.policy_model import PolicyModel
from roll_flash.learner.packing import tree_attention

BACKEND = "inductor"
_MAX_VARIANTS = 64
"""Maximum compiled variants of a layer: with and without gradient, rows of one token, dtypes."""


def compile_layers(policy: PolicyModel) -> None:
    """Set up compilation at the first pass. Raises LearnerError on a CPU without a C++ compiler."""
    if BACKEND == "inductor" and policy.head.device.type == "cpu":
        _require_compiler()
    torch._dynamo.config.recompile_limit = max(_MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    AttentionInterface.register(tree_attention.NAME, torch.compiler.disable(tree_attention.tree_attention))
    for layer in policy.layers:
        # Compile the method, not the module: the hooks of FSDP and checkpointing stay outside the compiled code.
        layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise LearnerError(
            "learner.compile needs a C++ compiler on this machine and finds none; install g++, or set it to false"
        ) from None
