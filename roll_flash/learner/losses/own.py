"""Checks a loss or an advantage function of the user for what a step relies on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from roll_flash.config.user_code import described
from roll_flash.errors import LearnerError, first_line
from roll_flash.learner.losses.policy import LossFunction, policy_loss
from roll_flash.learner.losses.token_advantages import own_advantage

_LENGTHS = (5, 9, 1, 7)
_TOLERANCE = 1e-9


def check_loss(function: LossFunction, **params: Any) -> None:
    """Try a loss on made-up sequences. Raises ValueError with one line for the first thing that is wrong.

    A step splits its sequences over micro-batches and ranks, in any order, and packs several into one tensor, in which
    the tokens of a sequence keep their order but need not be next to each other. So the loss of a token may depend on
    its sequence only, not on what else is in the tensor, nor on masked positions; it must be finite for any ratio and
    for an advantage of 0, and have a gradient.
    """
    torch.manual_seed(0)
    whole = _sequences(_LENGTHS)
    losses, gradient = _run(function, whole, params)
    if not (losses.isfinite().all() and gradient.isfinite().all()):
        raise ValueError("is not finite, on tokens with nothing unusual")
    if not gradient.any():
        raise ValueError("has no gradient: it must depend on tokens.logprobs, without detach() on every way to it")
    lengths = torch.tensor(_LENGTHS)
    ends = lengths.cumsum(0).tolist()
    for number, (end, length) in enumerate(zip(ends, _LENGTHS, strict=True)):
        part = {name: values[end - length : end] for name, values in whole.items()}
        part["sequence_ids"] = torch.zeros(length, dtype=torch.int64)
        part["turn_ids"] = part["turn_ids"] - part["turn_ids"].min()
        alone = _run(function, part, params)
        for what, found, expected in zip(("loss", "gradient"), alone, (losses, gradient), strict=True):
            if not _is_close(found, expected[end - length : end]):
                raise ValueError(
                    f"the {what} of a sequence changes with the others in the tensor (sequence {number} of "
                    f"{len(_LENGTHS)}): a step splits them over micro-batches and ranks. Return one loss per token; "
                    "means must be over tokens.sequence_ids, not over the tensor"
                )
    masked = {**whole, "mask": whole["mask"].clone()}
    masked["mask"][ends[0] : ends[1]] = False  # a whole sequence
    kept, kept_gradient = _run(function, masked, params)
    if not (_is_close(kept[masked["mask"]], losses[masked["mask"]]) and not kept_gradient[~masked["mask"]].any()):
        raise ValueError("the loss of a token changes with what tokens.mask leaves out")
    # In a row the tokens of sequences with a common beginning are not next to each other.
    order = torch.cat([torch.arange(length) for length in _LENGTHS]).argsort(stable=True)
    mixed = _run(function, {name: values[order] for name, values in whole.items()}, params)
    for what, found, expected in zip(("loss", "gradient"), mixed, (losses, gradient), strict=True):
        if not _is_close(found, expected[order]):
            raise ValueError(
                f"the {what} of a token changes where the tokens of a sequence are not next to each other, as in a row "
                "of several with a common beginning: find them by tokens.sequence_ids, not by their place"
            )
    _check_is_finite(function, whole, params)


def _check_is_finite(function: LossFunction, tokens: Mapping[str, Tensor], params: Mapping[str, Any]) -> None:
    """Try what each step has, and what a few have, in float32 as a step computes."""
    given = {name: values.float() if values.is_floating_point() else values for name, values in tokens.items()}
    logprobs, behavior, advantages = given["logprobs"], given["behavior_logprobs"], given["advantages"]
    limit = "use tokens.ratio(), which limits the difference"
    cases = {
        "where an advantage is 0, as that of a mean reward": {"advantages": advantages * (tokens["sequence_ids"] != 2)},
        "where the proximal policy is the policy, as in the first update of a step": {"prox_logprobs": logprobs},
        "where the sampler's log-probabilities are the policy's": {"behavior_logprobs": logprobs},
        **{
            f"where the log-probabilities of two policies differ by {gap:g}: {limit}": {
                "behavior_logprobs": logprobs - gap,
                "prox_logprobs": logprobs - gap,
            }
            for gap in (-100.0, 100.0)
        },
        f"where sampler and proximal policy differ by 100: {limit}": {"prox_logprobs": behavior - 100},
    }
    for where, changed in cases.items():
        loss, gradient = _run(function, {**given, **changed}, params)
        if not (loss.isfinite().all() and gradient.isfinite().all()):
            raise ValueError(f"is not finite {where}")


def learns_without_signal(function: LossFunction, **params: Any) -> bool:
    """Return true if a loss that `check_loss` accepts has a gradient where all advantages are 0."""
    tokens = _sequences(_LENGTHS)
    _, gradient = _run(function, tokens | {"advantages": torch.zeros_like(tokens["advantages"])}, params)
    return bool(gradient.abs().sum() > 0)  # not where it is NaN, of a loss that divides by its advantages


def advantages_of_equal_rewards(function: Callable[[NDArray[np.float64]], ArrayLike]) -> bool:
    """Return true if an advantage function that `check_advantage` accepts is not 0 for some group of equal rewards."""
    checked = own_advantage(function, "it")
    return any(np.any(checked([reward] * 4, True)) for reward in (-1.0, 0.0, 0.3, 1.0))


def check_advantage(function: Callable[[NDArray[np.float64]], ArrayLike]) -> None:
    """Try an advantage function on rewards of groups. Raises ValueError with one line for the first thing that is
    wrong: it must return one finite number per replica, also for a single one or equal rewards, whatever their order.
    """
    checked = own_advantage(function, "it")
    random = np.random.default_rng(0)
    for rewards in ([1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0], [1e6, -1e6], random.normal(size=16).tolist()):
        try:
            found = checked(rewards, True)
            order = random.permutation(len(rewards))
            moved = checked([rewards[place] for place in order], True)
        except LearnerError as error:
            raise ValueError(first_line(error)) from error
        if not np.allclose(moved, found[order], rtol=1e-6, atol=1e-9):
            raise ValueError(f"the advantage of a replica changes with the order of the others, with rewards {rewards}")


def _run(function: LossFunction, tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and the gradient of their sum. Raises ValueError if there is none."""
    logprobs = tensors["logprobs"].clone().requires_grad_()
    given: dict[str, Any] = {**tensors, "logprobs": logprobs}
    per_token: list[Tensor] = []

    def kept(tokens: Any, **its_params: Any) -> Any:
        found = function(tokens, **its_params)
        loss = found if isinstance(found, Tensor) else getattr(found, "loss", None)
        if not isinstance(loss, Tensor) or loss.shape != tokens.logprobs.shape:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(type(found).__name__)
            raise ValueError(f"must return one loss per token, shape {list(tokens.logprobs.shape)}, not {what}")
        per_token.append(loss.detach())
        return found

    try:
        output = policy_loss(kept, **given, normalizer=1.0, **params)
        if not output.loss.requires_grad:
            return per_token[0], torch.zeros_like(logprobs)
        (gradient,) = torch.autograd.grad(output.loss, logprobs, allow_unused=True)
    except ValueError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"raised {' '.join(described(error).split())}") from error
    return per_token[0], torch.zeros_like(logprobs) if gradient is None else gradient


def _sequences(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    count = sum(lengths)
    logprobs = -torch.rand(count, dtype=torch.float64) * 3
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {
        "logprobs": logprobs,
        "prox_logprobs": logprobs + torch.randn(count, dtype=torch.float64) * 0.1,
        "behavior_logprobs": logprobs + torch.randn(count, dtype=torch.float64) * 0.3,
        "advantages": torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)[ids],
        "mask": torch.ones(count, dtype=torch.bool),
        "sequence_ids": ids,
        "turn_ids": 2 * ids + (torch.cat([torch.arange(length) for length in lengths]) >= 3),  # two turns, or one
    }


def _is_close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE))
