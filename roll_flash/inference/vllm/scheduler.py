"""vLLM's scheduler on CPU, with a prefix cache that can be forgotten while requests are in flight.

After a weight update no new request may build on keys and values of the old weights. vLLM can clear its prefix cache
only when nothing runs, or else makes every running request compute all its tokens again: on a CPU core that is seconds
for each update. Here the cache forgets what it has, and the running requests keep their blocks; their logprobs remain
those of the distribution they are sampled from (as in PipelineRL, arXiv 2509.19128).

Chosen by vLLM's own option `--scheduler-cls`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.scheduler import Scheduler

from roll_flash.inference.vllm.cpu_seeds import lay_generators_aside


class KeepingScheduler(Scheduler):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # On CPU the scheduler and the model share a process, where nothing else of ours is asked to begin.
        lay_generators_aside()
        super().__init__(*arguments, **keywords)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """True if no request from now on reuses what was cached."""
        if reset_running_requests:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        pool = self.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()
        return True
