"""Records which experts a mixture of experts chooses for each token, and lets it choose given ones.

A router that computes a token twice, in a server and in the learner, may choose other experts the second time: kernels
and dtypes round differently, and the experts at the edge of the top k are close. Log-probabilities then differ by far
more than rounding does. Routing replay (R3, arXiv 2510.11370) lets the learner use the experts that the server used.

It replaces only the choice. The weights of the chosen experts still come from the router's own scores, normalised as
the model does, so that gradients reach the router. The choice is a call of `torch.topk` over the experts in each of
these models, and is replaced there, whatever the code around it looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll_flash.models.shape import decoder_layers, model_on_meta

_TOP_K = (torch.topk, torch.Tensor.topk)


class Routing:
    """Switch between free choice, recording and replay, for all layers of a model. A model needs only one.

    The experts of the last `replay` stay until the next call, because gradient checkpointing computes layers again in
    the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.num_layers = len(decoder_layers(model))
        self._blocks = expert_blocks(model)
        self._replayed: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        for layer, block in self._blocks.items():
            block.forward = self._steered(layer, block)

    def replay(self, experts: Tensor | None) -> None:
        """Use these experts in the next passes, [tokens, layers, k]; a token with -1 chooses freely, and so does every
        token if `experts` is None. Layers without experts are ignored. Raises ValueError for another shape."""
        if experts is not None and (experts.ndim != 3 or experts.shape[1] != self.num_layers):
            raise ValueError(f"experts of shape {tuple(experts.shape)} for a model of {self.num_layers} layers")
        self._replayed = experts

    def start_recording(self) -> None:
        self._recorded = {}

    def recorded(self) -> Tensor:
        """Return the experts of the pass since `start_recording`, int16 [tokens, layers, k]; 0 in layers without."""
        assert self._recorded, "no pass was recorded"
        (shape,) = {tuple(found.shape) for found in self._recorded.values()}
        experts = torch.zeros(shape[0], self.num_layers, shape[1], dtype=torch.int16)
        for layer, found in self._recorded.items():
            experts[:, layer] = found.to("cpu", torch.int16)
        self._recorded = None
        return experts

    def _steered(self, layer: int, block: nn.Module) -> Callable[..., Any]:
        forward, num_experts = block.forward, _num_experts(block)

        def steered_forward(*arguments: Any, **keywords: Any) -> Any:
            wanted, recorded = self._replayed, self._recorded
            if wanted is None and recorded is None:
                return forward(*arguments, **keywords)
            with _TopK(num_experts, None if wanted is None else wanted[:, layer]) as choice:
                found = forward(*arguments, **keywords)
            if recorded is not None:
                (recorded[layer],) = choice.made
            return found

        uncompiled: Callable[..., Any] = torch.compiler.disable(steered_forward)
        return uncompiled


class _TopK(TorchFunctionMode):
    """Replaces the choice of experts: a top k over the last of two dimensions, of the size `num_experts`."""

    def __init__(self, num_experts: int, wanted: Tensor | None) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._wanted = wanted
        self.made: list[Tensor] = []
        """What was chosen, [tokens, k], by each top k."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP_K or args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return found
        chosen = found[1]
        if self._wanted is not None:
            if self._wanted.shape != chosen.shape:
                shapes = f"{tuple(self._wanted.shape)} for a choice of {tuple(chosen.shape)}"
                raise ValueError(f"experts of shape {shapes} (tokens, experts of a token)")
            chosen = torch.where(self._wanted < 0, chosen, self._wanted.to(chosen.dtype))
            found = torch.return_types.topk((args[0].gather(1, chosen), chosen))
        self.made.append(chosen)
        return found


def expert_blocks(model: nn.Module) -> dict[int, nn.Module]:
    """Return the module that chooses and uses experts, by the number of its decoder layer."""
    found: dict[int, nn.Module] = {}
    for number, layer in enumerate(decoder_layers(model)):
        for module in layer.modules():
            if isinstance(getattr(module, "experts", None), nn.Module):
                found[number] = module
    return found


def why_not_replayed(folder: Path) -> str | None:
    """Return why the routing of the model in `folder` cannot be recorded and replayed; None if it can.

    Tries it on the meta device, without weights. Raises ModelError if transformers cannot read the model's config.
    """
    model = model_on_meta(folder / "config.json")
    blocks = expert_blocks(model)
    if not blocks:
        return "the model has no experts"
    if getattr(model.config, "topk_method", None) == "group_limited_greedy":
        return "its router gives the weight 0 to experts outside of some groups"
    if model.config.model_type == "jetmoe":
        return "its attention chooses experts too, and the choices of a layer are recorded once"
    for layer, block in blocks.items():
        if (choices := _choices(block, model.config.get_text_config().hidden_size)) != 1:
            return f"its router makes {choices} choices of the k best experts, not one (layer {layer})"
    return None


def _choices(block: nn.Module, hidden_size: int) -> int:
    with torch.no_grad(), _TopK(_num_experts(block), None) as choice, suppress(Exception):
        # Experts may need real numbers, after the choice is made.
        block(torch.empty(1, 3, hidden_size, device="meta"))
    return len(choice.made)


def _num_experts(block: nn.Module) -> int:
    """0 if it is not known."""
    experts: Any = block.experts
    return len(experts) if isinstance(experts, nn.ModuleList) else int(getattr(experts, "num_experts", 0))
