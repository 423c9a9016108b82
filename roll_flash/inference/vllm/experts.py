"""Mixtures of experts on a CPU, packed again whenever vLLM loads weights.

vLLM's kernel for the CPU wants the experts in an order of its own. vLLM packs them when a server starts, but when
weights are loaded again it copies them as they are: no error, and other numbers (log-probabilities are off by 0.5).
"""

from __future__ import annotations

import logging
from typing import Any

METHOD = "_setup_kernel"
MARK = "packs_again"

_log = logging.getLogger(__name__)


def pack_experts_again() -> None:
    """Let vLLM treat each load on a CPU as its first. Safe to call more than once."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    original = getattr(UnquantizedFusedMoEMethod, METHOD, None)
    if not current_platform.is_cpu() or getattr(original, MARK, False):
        return
    if original is None:
        _log.warning("this vLLM packs experts in another way: new weights of a mixture of experts may be wrong")
        return

    def packing(self: Any, *arguments: Any, **keywords: Any) -> None:
        self.moe_kernel = None  # by this vLLM knows that nothing has been loaded and packed yet
        original(self, *arguments, **keywords)

    setattr(packing, MARK, True)
    setattr(UnquantizedFusedMoEMethod, METHOD, packing)
