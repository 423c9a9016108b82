"""torch.compile of the decoder layers, one by one, so that all of them share what was compiled for the first.

Attention over the prefix tree stays as it is: its blocks are those of one row, and are done by kernels of their own.
What is compiled is what surrounds it (norms, rotations, activations), for rows of any length.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from roll_flash.errors import LearnerError
from roll_flash.learner.model.policy_model import PolicyModel
from roll_flash.learner.packing import tree_attention

BACKEND = "inductor"
_MOST_VARIANTS = 64
"""Of a layer's code: with and without gradient, rows of one token, dtypes."""


def compile_layers(policy: PolicyModel) -> None:
    """Compile at the first pass. Raises LearnerError on a CPU without a C++ compiler."""
    if BACKEND == "inductor" and policy.head.device.type == "cpu":
        _require_compiler()
    torch._dynamo.config.recompile_limit = max(_MOST_VARIANTS, torch._dynamo.config.recompile_limit)
    AttentionInterface.register(tree_attention.NAME, torch.compiler.disable(tree_attention.tree_attention))
    for layer in policy.layers:
        # The method, not the module: hooks (FSDP's, checkpointing's) stay outside of what is compiled.
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
