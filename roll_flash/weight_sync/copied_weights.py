"""Weights that vLLM keeps a copy of outside of its parameters, so that no reload refreshes it.

What else was checked is listed in docs/inference.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.inference_mode()  # in which vLLM makes the copies
def refresh_copied_weights(model: nn.Module) -> None:
    """Bring all copies in a vLLM model up to date, at their addresses, which CUDA graphs read.

    Where vLLM computes the router and the gate of the shared expert of a mixture at once, it joins their weights at the
    first forward pass.
    """
    for module in model.modules():
        joined: Any = getattr(module, "_combined_gate_weight", None)
        if joined is not None:
            parts: Any = (module.gate, module.shared_expert_gate)
            torch.cat([part.weight for part in parts], out=joined)
