"""Compares the learner with plain transformers on one model: log-probabilities and gradients in float32.

The texts branch inside and after a prompt, their policy tokens are turns with observations between them, and one text
is longer than the windows, chunks and original context lengths of `architectures`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from roll_flash.errors import ModelError
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.packing.rows import TrainSequence, pack

TOLERANCE = 1e-5
_PROMPT, _TURN = 40, 45
_POLICY_TOKENS_OF_TURN = 30
_TEXTS = ((40, 150), (100, 170), (100, 130), (40, 90), (40, 260))
"""(tokens shared with the others, tokens) of each text."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of one model. `logprob` and `gradient` are None if the model is refused."""

    name: str
    model: str
    """Class in transformers."""
    layout: str
    """`shared prefixes`, `one by one`, or `refused`."""
    reason: str = ""
    """Why prefixes are not shared, or the model is refused."""
    logprob: float | None = None
    """Largest difference of a log-probability."""
    gradient: float | None = None
    """Largest difference of an element of a gradient, as a share of the largest element of all gradients. Not of each
    tensor's: some gradients are zero but for rounding, such as that of a bias of keys, which softmax ignores."""
    seconds: float = 0.0

    tolerance: float = TOLERANCE
    TABLE: ClassVar = ("architectures", ["architecture", "class", "computed as", "log-probabilities", "gradients"])

    @property
    def is_ok(self) -> bool:
        return all(value is not None and value <= self.tolerance for value in (self.logprob, self.gradient))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.is_ok}

    def line(self) -> str:
        """Return one line for the terminal."""
        if self.logprob is None:
            return f"{self.name}: refused: {self.reason}"
        why = f" ({self.reason})" if self.reason else ""
        figures = f"log-probabilities differ by {self.logprob:.1e}, gradients by {self.gradient:.1e}"
        return f"{self.name}: {self.layout}{why}; {figures} ({self.seconds:.1f} s)"

    def cells(self) -> list[str]:
        """Return the columns of `TABLE`."""
        figures = ("" if value is None else f"{value:.1e}" for value in (self.logprob, self.gradient))
        return [self.name, self.model, f"{self.layout}: {self.reason}".removesuffix(": "), *figures]


def compare_model(folder: Path, name: str, tolerance: float = TOLERANCE) -> Comparison:
    """Compare the model in `folder`; it is refused if the learner refuses it."""
    began = time.perf_counter()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = Comparison(name, type(plain).__name__, "refused", tolerance=tolerance)
    data = branching_texts(plain.get_input_embeddings().weight.shape[0])
    try:
        policy = load_policy_model(folder)
    except ModelError as error:
        return replace(found, reason=str(error).removeprefix(f"{folder}: "))
    expected, expected_gradients = plain_transformers(plain, data)
    del plain
    logprobs, gradients = learner(policy, data)
    return replace(
        found,
        layout="shared prefixes" if policy.shares_prefixes else "one by one",
        reason=policy.alone_because or "",
        logprob=max(_largest(logprobs[index] - expected[index]) for index in expected),
        gradient=gradient_difference(gradients, expected_gradients),
        seconds=time.perf_counter() - began,
    )


def learner(policy: PolicyModel, data: Sequence[TrainSequence]) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Return log-probabilities of the policy tokens of each sequence, and the gradients of their sum weighted by the
    advantages, as the learner computes them."""
    policy.train()
    logprobs: dict[int, Tensor] = {}
    for row in pack(data, 1_000_000 if policy.shares_prefixes else 1):
        found, _ = policy(row)
        (found * torch.tensor(row.advantages)).sum().backward()
        for number, member in enumerate(row.members):
            logprobs[member] = found.detach()[torch.tensor(row.sequence_ids == number)]
    return logprobs, _gradients(policy.model)


def plain_transformers(model: nn.Module, data: Sequence[TrainSequence]) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """As `learner`, each sequence in a model of transformers that has seen no other."""
    logprobs: dict[int, Tensor] = {}
    for index, sequence in enumerate(data):
        fresh: Any = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        tokens = torch.tensor(sequence.token_ids, dtype=torch.int64)
        distribution = fresh(input_ids=tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = torch.tensor(sequence.policy_mask[1:])
        values = distribution.gather(-1, tokens[1:, None])[:, 0][chosen]
        (values * torch.tensor(sequence.advantages[1:])[chosen]).sum().backward()
        logprobs[index] = values.detach()
    return logprobs, _gradients(model)


def branching_texts(vocabulary: int) -> list[TrainSequence]:
    """Return sequences of random tokens with advantages of both signs."""
    random = np.random.default_rng(0)
    common = random.integers(3, vocabulary, max(shared for shared, _ in _TEXTS))
    found = []
    for number, (shared, length) in enumerate(_TEXTS):
        tokens = np.concatenate([common[:shared], random.integers(3, vocabulary, length - shared)]).astype(np.int32)
        after_prompt = np.arange(length) - _PROMPT
        mask = (after_prompt >= 0) & (after_prompt % _TURN < _POLICY_TOKENS_OF_TURN)
        advantages = ((-1) ** number * (1 - 0.3 * (after_prompt // _TURN))).astype(np.float32)
        zeros = np.zeros(length, np.float32)
        found.append(TrainSequence(tokens, mask, zeros, np.zeros(length, np.int32), advantages))
    return found


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradient_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return `Comparison.gradient`; infinity if not the same tensors have a gradient."""
    if found.keys() != expected.keys():
        return float("inf")
    difference = max(_largest(found[name] - wanted) for name, wanted in expected.items())
    return difference / max(map(_largest, expected.values()))


def _largest(values: Tensor) -> float:
    return float(values.abs().max().nan_to_num(nan=torch.inf))
