"""How a model is computed exactly, as ranks tell the driver: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Function from hidden states and head to logits: x = scale * product, then c * tanh(x / c) with softcap c."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class ExactSettings:
    """Settings for exact computation of a model; `choose_exact_mode` finds them once, and every rank reuses them."""

    shares_prefixes: bool
    logit_transform: LogitTransform | None
    vocabulary: int
