"""vLLM schedulers with a prefix cache that weight updates invalidate while requests are in flight.

After a weight update no new request may use keys and values of the old weights. vLLM can clear its prefix cache only
when no request runs; otherwise every running request must compute all its tokens again. Here each update gives the
cache a new salt, which is part of the hash of every block: later requests find only blocks that were computed for
requests as new as themselves, and running requests keep theirs. Their logprobs remain those of the distribution they
are sampled from (as in PipelineRL, arXiv 2509.19128). What they go on to compute builds on old keys, and nobody else
finds it either. Old blocks are the first to be reused for new tokens.

Selected by vLLM's option `--scheduler-cls`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from roll_flash.inference.vllm.patches import patch_seeded_chunked_prefill

MARK = " after reset "


class KeepingScheduler(Scheduler):
    """Invalidates its prefix cache without clearing it. For any device."""

    _resets = 0

    def add_request(self, request: Request) -> None:
        if self._resets:
            self._salt(request)
        super().add_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Let no later request use what is cached now. Returns True, unless `reset_connector` fails."""
        if reset_running_requests:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        self._resets += 1
        for request in self.requests.values():
            if request.num_computed_tokens == 0:  # waiting: nothing of it is computed with the old weights
                self._salt(request)
        return not reset_connector or bool(self.reset_connector_cache())

    def _salt(self, request: Request) -> None:
        own = (request.cache_salt or "").partition(MARK)[0]
        request.cache_salt = f"{own}{MARK}{self._resets}"
        request.block_hashes.clear()
        request.update_block_hashes()


class CpuScheduler(KeepingScheduler):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # On CPU the scheduler and the model share a process, and this is our only hook in it.
        patch_seeded_chunked_prefill()
        super().__init__(*arguments, **keywords)


class KeepingAsyncScheduler(KeepingScheduler, AsyncScheduler):
    """For GPUs, where vLLM plans the next step while one is computed."""


def gpu_scheduler(vllm_config: Any, **keywords: Any) -> KeepingScheduler:
    """Return the scheduler for what vLLM has decided: some of its options exclude asynchronous scheduling."""
    chosen = KeepingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else KeepingScheduler
    return chosen(vllm_config=vllm_config, **keywords)
