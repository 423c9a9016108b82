"""Controls when the ranks reduce their gradients: after each row, or once per step.

After each row: every rank holds only its shard of the gradient. Once per step (FSDP2's gradient accumulation without
communication): saves a reduce-scatter of the whole model per row, but every rank holds the full gradient until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.distributed.fsdp import FSDPModule

from roll_flash.learner.losses.objective import SINGLE_TOKEN
from roll_flash.learner.model.policy_model import PolicyModel


class GradientSync:
    """Call `begin_pass` before each forward and backward, `finish` before gradients are read or discarded.

    All ranks must call both in the same order; `finish` is a collective.
    """

    def __init__(self, models: Sequence[PolicyModel], *, once_a_step: bool, ranks: int) -> None:
        """`models`: all that are trained."""
        self._models = models
        self._waits = once_a_step and ranks > 1
        self._is_owed = False

    def begin_pass(self) -> None:
        if self._waits and not self._is_owed:
            for model in self._models:
                cast(FSDPModule, model).set_requires_gradient_sync(False)
            self._is_owed = True

    def finish(self) -> None:
        """Reduce deferred gradients with one extra pass over a single token, whose loss is multiplied by zero."""
        if not self._is_owed:
            return
        for model in self._models:
            cast(FSDPModule, model).set_requires_gradient_sync(True)
            (model(SINGLE_TOKEN)[0].sum() * 0.0).backward()
        self._is_owed = False
