"""Patch for vLLM on CPU: seeded requests with chunked prefill.

After each chunk vLLM samples a token, discards it, and then rewinds the request's random generator. CPU generators
cannot be rewound, so one such request crashed the whole server. This patch removes the generators of these requests
while the discarded tokens are sampled: the generators stay unused, so the seed gives the same tokens for any chunk
size.
"""

from __future__ import annotations

import logging
from typing import Any

MARK = "lays_generators_aside"

_log = logging.getLogger(__name__)


def patch_seeded_chunked_prefill() -> None:
    """Install the patch in the process that runs the model on CPU. Safe to call more than once."""
    from vllm.v1.worker import cpu_model_runner

    runner: Any = cpu_model_runner.CPUModelRunner
    sample = getattr(runner, "_sample", None)
    book = getattr(runner, "_bookkeeping_sync", None)
    if sample is None or book is None:
        _log.warning("this vLLM is built differently: seeded requests with long prompts may end a server on CPU")
        return
    if getattr(sample, MARK, False):
        return

    def sample_with_the_rest(self: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = self.input_batch
        thrown_away = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        self.generators_aside = {
            int(row): batch.generators.pop(int(row)) for row in thrown_away if row in batch.generators
        }
        return sample(self, *arguments, **keywords)

    def book_and_bring_back(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return book(self, *arguments, **keywords)
        finally:
            self.input_batch.generators.update(self.generators_aside)

    setattr(sample_with_the_rest, MARK, True)
    runner._sample = sample_with_the_rest
    runner._bookkeeping_sync = book_and_bring_back
