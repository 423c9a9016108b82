"""A model's tensors under the names of its folder. In memory some have others: transformers 5 keeps the experts of a
layer in one tensor, folders and vLLM each expert in its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def as_stored(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `save_pretrained` would write for these of the model's tensors; views of them where it can be."""
    if not isinstance(model, PreTrainedModel):
        return dict(tensors)
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return stored


@torch.no_grad()
def write_stored(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Give the model stored tensors. Raises ValueError, with nothing changed, for a name that it does not store."""
    places: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, tensor in model.state_dict().items():
        shapes = as_stored(model, {name: torch.empty(tensor.shape, device="meta")})
        if [stored.shape for stored in shapes.values()] == [tensor.shape]:
            places[next(iter(shapes))] = tensor, None
        elif shapes.keys() & tensors.keys():
            # Numbers instead of values show where each value of a stored tensor lies in the model's.
            numbers = torch.arange(tensor.numel()).view(tensor.shape)
            places |= {part: (tensor, where) for part, where in as_stored(model, {name: numbers}).items()}
    if unknown := sorted(tensors.keys() - places.keys()):
        raise ValueError(f"{type(model).__name__} stores no {unknown[:2]}")
    for name, values in tensors.items():
        tensor, where = places[name]
        if where is None:
            tensor.copy_(values)
        else:
            tensor.view(-1)[where.view(-1)] = values.reshape(-1).to(tensor.dtype)


def converts_one_by_one(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether each tensor alone gives what it gives among all, so that no two whole ones are needed at once."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
    alone = [item for name, tensor in shapes.items() for item in as_stored(model, {name: tensor}).items()]
    together = as_stored(model, shapes)
    return [(name, t.shape) for name, t in sorted(alone)] == [(name, t.shape) for name, t in sorted(together.items())]
