"""Patch for vLLM on CPU: packs mixture-of-experts weights again at every load.

vLLM's CPU kernel needs the experts in a special order. vLLM packs them when a server starts, but copies reloaded
weights without packing: no error, but wrong numbers (log-probabilities are off by 0.5).
"""

from __future__ import annotations

import logging
from typing import Any

METHOD = "_setup_kernel"
MARK = "packs_again"

_log = logging.getLogger(__name__)


def patch_expert_reload() -> None:
    """Install the patch: vLLM treats each load on a CPU as the first one. Safe to call more than once."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    original = getattr(UnquantizedFusedMoEMethod, METHOD, None)
    if not current_platform.is_cpu() or getattr(original, MARK, False):
        return
    if original is None:
        _log.warning("this vLLM packs experts in another way: new weights of a mixture of experts may be wrong")
        return

    def packing(self: Any, *arguments: Any, **keywords: Any) -> None:
        self.moe_kernel = None  # for vLLM this means: nothing is loaded and packed yet
        original(self, *arguments, **keywords)

    setattr(packing, MARK, True)
    setattr(UnquantizedFusedMoEMethod, METHOD, packing)
