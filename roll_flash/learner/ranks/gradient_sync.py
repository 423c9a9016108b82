"""Controls when the ranks reduce their gradients: after each row, or once per step.

After each row: every rank holds only its shard of the gradient. Once per step (FSDP2's gradient accumulation without
communication): saves a reduce-scatter of the whole model per row, but every rank holds the full gradient until then.
"""

from __future__ import annotations

from typing import cast

from torch.distributed.fsdp import FSDPModule

from roll_flash.learner.losses.objective import SINGLE_TOKEN
from roll_flash.learner.model.policy_model import PolicyModel


class GradientSync:
    """Call `begin_pass` before each forward and backward, `finish` before gradients are read or discarded.

    All ranks must call both in the same order; `finish` is a collective.
    """

    def __init__(self, policy: PolicyModel, *, once_a_step: bool, ranks: int) -> None:
        self._policy = policy
        self._waits = once_a_step and ranks > 1
        self._is_owed = False

    def begin_pass(self) -> None:
        if self._waits and not self._is_owed:
            cast(FSDPModule, self._policy).set_requires_gradient_sync(False)
            self._is_owed = True

    def finish(self) -> None:
        """Reduce deferred gradients with one extra pass over a single token, whose loss is multiplied by zero."""
        if not self._is_owed:
            return
        cast(FSDPModule, self._policy).set_requires_gradient_sync(True)
        logprobs, _ = self._policy(SINGLE_TOKEN)
        (logprobs.sum() * 0.0).backward()
        self._is_owed = False
