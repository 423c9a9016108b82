"""Converts a model's tensors between their form in memory and in its folder. transformers 5 keeps all experts of a
layer in one tensor; folders and vLLM use one tensor per expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def as_stored(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert `tensors` to the form that `save_pretrained` writes; views of the inputs where possible."""
    if not isinstance(model, PreTrainedModel):
        return dict(tensors)
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return stored


@torch.no_grad()
def write_stored(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy stored tensors into the model. Raises ValueError, with the model unchanged, for an unknown name."""
    places: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, tensor in model.state_dict().items():
        shapes = as_stored(model, {name: torch.empty(tensor.shape, device="meta")})
        if [stored.shape for stored in shapes.values()] == [tensor.shape]:
            places[next(iter(shapes))] = tensor, None
        elif shapes.keys() & tensors.keys():
            # Converting indices instead of values shows the place of each stored value in the model's tensor.
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
    """Return true if each tensor can be converted alone, so that no two whole tensors are needed at once."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in state.items()}
    alone = [item for name, tensor in shapes.items() for item in as_stored(model, {name: tensor}).items()]
    together = as_stored(model, shapes).items()
    return sorted((name, t.shape) for name, t in alone) == sorted((name, t.shape) for name, t in together)
