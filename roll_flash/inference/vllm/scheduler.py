"""vLLM scheduler for CPU with a prefix cache that can be cleared while requests are in flight.

After a weight update no new request may use the KV cache of the old weights. vLLM can clear its prefix cache only when
no request runs; otherwise every running request must compute all its tokens again, which takes seconds per update on a
CPU core. Here the cache is cleared and the running requests keep their blocks; their logprobs remain those of the
distribution they are sampled from (as in PipelineRL, arXiv 2509.19128).

Selected by vLLM's option `--scheduler-cls`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.scheduler import Scheduler

from roll_flash.inference.vllm.patches import patch_seeded_chunked_prefill


class CpuScheduler(Scheduler):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # On CPU the scheduler and the model share a process, and this is our only hook in it.
        patch_seeded_chunked_prefill()
        super().__init__(*arguments, **keywords)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache. Return True if no later request can reuse it."""
        if reset_running_requests:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        pool = self.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()
        return True
