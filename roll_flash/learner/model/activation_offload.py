"""What gradient checkpointing keeps of the forward pass waits for the backward pass in host memory.

Checkpointing keeps the input of each layer. With this, GPU memory no longer grows with the number of layers times the
length of a row, for a copy to the host and back of each layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay: a copy costs more than they take."""


@contextmanager
def offload_activations(device_type: str = "cuda", smallest_bytes: int = _SMALLEST_BYTES) -> Iterator[None]:
    """Tensors that autograd saves in the block are kept in (pinned) host memory, parameters apart.

    `device_type`: where tensors must be to be moved.
    """

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if tensor.device.type != device_type or is_parameter or tensor.nbytes < smallest_bytes:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        # In order with the kernels that made it and with those that may use its memory next: all are on one stream.
        host.copy_(tensor.detach(), non_blocking=True)
        return tensor.device, host

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
