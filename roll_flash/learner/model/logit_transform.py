"""Finds by experiment how a model computes its logits from the last hidden states and the output head.

Every architecture names scales and softcaps differently, some with the inverse meaning. Therefore the config is not
trusted: a hook replaces the output of the head with chosen numbers, and the resulting logits show the function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll_flash.learner.model.exact_settings import LogitTransform
from roll_flash.learner.model.policy_model import reset_dynamic_rope

_TOLERANCE = 1e-5
_MIN_VALUE, _MAX_VALUE = 1e-3, 100.0
"""Range of the injected absolute values: the smallest shows the scale, the largest shows any softcap."""


@torch.no_grad()
def find_logit_transform(model: PreTrainedModel, token_ids: Tensor) -> LogitTransform | None:
    """Return the function from hidden states and head to logits; None if a LogitTransform cannot express it.

    `token_ids` int64 [T], any text.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    given = _ramp(head.weight.shape[0]).to(head.weight.device)
    seen: list[Tensor] = []

    def instead(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        return given.expand_as(output)

    hook = head.register_forward_hook(instead)
    reset_dynamic_rope(model)
    try:
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, -1].float()
    finally:
        hook.remove()
    reset_dynamic_rope(model)
    hidden = model.base_model(input_ids=token_ids[None], use_cache=False).last_hidden_state
    if len(seen) != 1 or seen[0].shape != hidden.shape or logits.shape != given.shape:
        return None
    before = _ratio(seen[0].flatten(), hidden.flatten())
    if not _close(before * hidden, seen[0]) or (before != 1.0 and head.bias is not None):
        return None
    smallest = given.abs().argmin()
    after = _ratio(logits[smallest, None], given[smallest, None])
    for softcap in (None, *_softcaps(model.config)):
        expected = after * given
        if softcap is not None:
            expected = softcap * torch.tanh(expected / softcap)
        if _close(expected, logits):
            return LogitTransform(_rounded(before * after), softcap)
    return None


def _ramp(number: int) -> Tensor:
    """Return values [number] with alternating signs and log-spaced absolute values."""
    sizes = torch.logspace(torch.tensor(_MIN_VALUE).log10(), torch.tensor(_MAX_VALUE).log10(), number)
    signs = torch.ones(number)
    signs[::2] = -1
    return sizes * signs


def _softcaps(config: Any) -> list[float]:
    """Return all positive values of config keys that contain `softcap`."""
    named = (value for key, value in config.to_dict().items() if "softcap" in key.replace("_", ""))
    return sorted({float(value) for value in named if isinstance(value, int | float) and value > 0})


def _ratio(values: Tensor, to: Tensor) -> float:
    wide, other = values.double(), to.double()
    return _rounded(float((wide * other).sum() / (other * other).sum()))


def _rounded(value: float) -> float:
    """Round to 6 digits, to remove the float32 error from a configured constant."""
    return float(f"{value:.6g}")


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
