"""Offloads the activations that gradient checkpointing saves to host memory until the backward pass.

Checkpointing saves the input of each layer. With offloading, GPU memory no longer grows with the number of layers times
the row length; the cost is one copy of each layer's input to the host and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MIN_BYTES = 1 << 20
"""Minimum size in bytes of an offloaded tensor; smaller ones are not worth the copy."""


@contextmanager
def offload_activations(device_type: str = "cuda", min_bytes: int = _MIN_BYTES) -> Iterator[None]:
    """Keep tensors that autograd saves inside the block in (pinned) host memory, except parameters.

    Only tensors on devices of type `device_type` are offloaded.
    """

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if tensor.device.type != device_type or is_parameter or tensor.nbytes < min_bytes:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        # Safe without a wait: the kernels that wrote the tensor or reuse its memory run on the same stream.
        host.copy_(tensor.detach(), non_blocking=True)
        return tensor.device, host

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
