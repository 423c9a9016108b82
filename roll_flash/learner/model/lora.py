"""Low-rank adapters: y = W x + (alpha / rank) B A x with W frozen (LoRA, arXiv 2106.09685, section 4.1).

Linear layers become adapted layers in place and keep their names, so that sharding, checkpoints, staging and export
work unchanged. A starts random and B at zero: the adapted model initially equals the base model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll_flash.config.sections.learner import LoraConfig
from roll_flash.errors import ModelError


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: `lora_a` is A [rank, in], `lora_b` is B [out, rank]."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    enabled: bool

    def forward(self, input: Tensor) -> Tensor:
        plain = super().forward(input)
        if not self.enabled:
            return plain
        down = nn.functional.linear(input, self.lora_a)
        return plain + self.scale * nn.functional.linear(down, self.lora_b)


def adapt(model: nn.Module, config: LoraConfig) -> None:
    """Freeze `model` and add adapters to its target layers. Raises ModelError if no layer has a target name, or if a
    target is the output head (log-probabilities read only its weight) or overrides `forward`."""
    model.requires_grad_(False)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in config.targets
    }
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() in found.values():
        raise ModelError("learner.lora.targets names the output head, which cannot have an adapter; leave it out")
    if not found:
        raise ModelError(f"learner.lora.targets: the model has no linear layer named {', '.join(config.targets)}")
    for name, module in found.items():
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            raise ModelError(f"learner.lora.targets: {name} is a {kind}, whose forward an adapter would replace")
    for module in found.values():
        _adapt_linear(module, config)


def adapters(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return a map from weight name to adapted layer."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Disable all adapters inside the block, which gives the base model."""
    layers = list(adapters(model).values())
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def _adapt_linear(module: Any, config: LoraConfig) -> None:
    module.__class__ = AdaptedLinear
    down = torch.empty(config.rank, module.in_features, dtype=module.weight.dtype)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    module.lora_a = nn.Parameter(down)
    module.lora_b = nn.Parameter(torch.zeros(module.out_features, config.rank, dtype=module.weight.dtype))
    module.scale = config.alpha / config.rank
    module.enabled = True
