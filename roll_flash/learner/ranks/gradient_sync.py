"""When the ranks add up their gradients: after each row, or once a step.

After each row every rank keeps its shard of the gradient only. Once a step (FSDP2's gradient accumulation without
communication) saves a reduce-scatter of the whole model per row, and every rank holds the gradient of all weights
meanwhile.
"""

from __future__ import annotations

from typing import cast

from torch.distributed.fsdp import FSDPModule

from roll_flash.learner.losses.objective import SINGLE_TOKEN
from roll_flash.learner.model.policy_model import PolicyModel


class GradientSync:
    """`begin_pass` before each forward and backward, `finish` before gradients are read or forgotten.

    Both must be called on all ranks in the same order; `finish` is a collective.
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
        """Add up what is owed, in one more pass, of a single token whose loss is multiplied by zero."""
        if not self._is_owed:
            return
        cast(FSDPModule, self._policy).set_requires_gradient_sync(True)
        logprobs, _ = self._policy(SINGLE_TOKEN)
        (logprobs.sum() * 0.0).backward()
        self._is_owed = False
