"""Patches for vLLM. Each function installs one; it is safe to call more than once, and warns if this vLLM has other
internals.

- Streamed answers: weight versions in every piece. vLLM keeps the version of each token, but sends it only with the
  last piece of a stream. If a server dies before, the tokens already sent have no version, and clients start the turn
  again.
- Mixture of experts on CPU: packing at every load. vLLM's CPU kernel needs the experts in a special order. vLLM packs
  them when a server starts, but copies reloaded weights without packing: no error, but wrong numbers (log-probabilities
  are off by 0.5).
- Copied weights at every reload (`weight_sync/copied_weights.py`), also those of vLLM's own transfer engines.
- Latent attention (deepseek_v3) on CPU. vLLM's kernel for rotary positions expects all heads of a token in one
  dimension; given a dimension of heads, as latent attention does, it rotates the wrong numbers: no error, but
  log-probabilities are off by 0.5. Such tensors take vLLM's own PyTorch version. YaRN's positions have always done so.
- Ranks of tokens on CPU. vLLM compiles the line that counts them, with the machine's C++ compiler, at the first request
  for log-probabilities: on 2 cores 8 s of each start, and the end of the server where there is no compiler.
- Seeded requests with chunked prefill on CPU. After each chunk vLLM samples a token, discards it, and then rewinds the
  request's random generator. CPU generators cannot be rewound, so one such request crashed the whole server. The patch
  removes the generators of these requests while the discarded tokens are sampled: the generators stay unused, so the
  seed gives the same tokens for any chunk size.
- The server's port, which is kept for it (`processes/ports.py`): it must listen there with SO_REUSEPORT.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from roll_flash.weight_sync.copied_weights import refresh_copied_weights

_log = logging.getLogger(__name__)


def install(owner: Any, name: str, patched: Any) -> None:
    """Replace the function `name` of a class or module, once."""
    if not hasattr(getattr(owner, name), "is_patched"):
        patched.is_patched = True
        setattr(owner, name, patched)


def patch_streamed_versions() -> None:
    from vllm.v1.engine.output_processor import RequestState

    new_output: Any = getattr(RequestState, "_new_completion_output", None)
    if new_output is None or not hasattr(RequestState, "_weight_version_spans"):
        _log.warning("this vLLM tells no weight versions while it streams: turns of a dead server begin again")
        return

    def new_output_with_versions(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = new_output(self, *arguments, **keywords)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    install(RequestState, "_new_completion_output", new_output_with_versions)


def patch_expert_reload() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    set_up_kernel: Any = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if not current_platform.is_cpu():
        return
    if set_up_kernel is None:
        _log.warning("this vLLM packs experts in another way: new weights of a mixture of experts may be wrong")
        return

    def set_up_new_kernel(self: Any, *arguments: Any, **keywords: Any) -> None:
        self.moe_kernel = None  # for vLLM this means: nothing is loaded and packed yet
        set_up_kernel(self, *arguments, **keywords)

    install(UnquantizedFusedMoEMethod, "_setup_kernel", set_up_new_kernel)


def patch_copied_weights() -> None:
    from vllm.model_executor.model_loader import reload

    finalize: Any = getattr(reload, "finalize_layerwise_reload", None)
    if finalize is None:
        _log.warning("this vLLM reloads weights in another way: copies of new weights may be old ones")
        return

    def finalize_with_copies(model: Any, *arguments: Any, **keywords: Any) -> None:
        finalize(model, *arguments, **keywords)
        refresh_copied_weights(model)

    install(reload, "finalize_layerwise_reload", finalize_with_copies)


def patch_rotary_positions() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    forward: Any = getattr(RotaryEmbedding, "forward_cpu", None)
    if not current_platform.is_cpu():
        return
    if forward is None:
        _log.warning("this vLLM computes rotary positions in another way: latent attention on a CPU may be wrong")
        return

    def forward_heads(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        return (forward if query.ndim == 2 else type(self).forward_native)(self, positions, query, key)

    install(RotaryEmbedding, "forward_cpu", forward_heads)


def patch_token_ranks() -> None:
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import sampler

    if not current_platform.is_cpu():
        return
    if not hasattr(sampler, "batched_count_greater_than"):
        _log.warning("this vLLM counts the ranks of tokens in another way: servers on a CPU may need a C++ compiler")
        return

    def count_not_less(logprobs: torch.Tensor, of_token: torch.Tensor) -> torch.Tensor:
        # A float per element is four times as fast as the boolean mask and exact up to 2^24 elements.
        mask = torch.empty_like(logprobs, dtype=torch.float32)
        return torch.ge(logprobs, of_token, out=mask).sum(-1).long()

    install(sampler, "batched_count_greater_than", count_not_less)


def patch_seeded_chunked_prefill() -> None:
    """For the process that runs the model on CPU."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample: Any = getattr(CPUModelRunner, "_sample", None)
    bookkeeping: Any = getattr(CPUModelRunner, "_bookkeeping_sync", None)
    if sample is None or bookkeeping is None:
        _log.warning("this vLLM is built differently: seeded requests with long prompts may end a server on CPU")
        return

    def sample_without_generators(self: Any, *arguments: Any, **keywords: Any) -> Any:
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        self.removed_generators = {
            int(row): batch.generators.pop(int(row)) for row in discarded if row in batch.generators
        }
        return sample(self, *arguments, **keywords)

    def bookkeeping_with_generators(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return bookkeeping(self, *arguments, **keywords)
        finally:
            self.input_batch.generators.update(self.removed_generators)

    install(CPUModelRunner, "_sample", sample_without_generators)
    install(CPUModelRunner, "_bookkeeping_sync", bookkeeping_with_generators)


def patch_server_socket() -> None:
    """For the process that listens: it has imported the module."""
    launcher = sys.modules.get("vllm.entrypoints.launchers.launcher")
    if launcher is None:
        return
    create: Any = getattr(launcher, "create_server_socket", None)
    if create is None:
        _log.warning("this vLLM listens in another way: its port, which is kept for it, may be in use for it")
        return

    def create_on_kept_port(address: Any, **keywords: Any) -> Any:
        return create(address, **{**keywords, "reuse_port": True})

    install(launcher, "create_server_socket", create_on_kept_port)
