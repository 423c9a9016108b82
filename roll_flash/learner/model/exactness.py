"""Checks at load time that a model computes packed rows exactly as plain transformers computes single sequences.

Models differ in positions, attention and logits, and most models that cannot be packed raise no error: they return
wrong numbers. Therefore each model is tested on a small tree of texts. Properties that short texts cannot show are read
from the model and its config.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll_flash.errors import ModelError, first_line
from roll_flash.learner.model.logit_transform import find_logit_transform
from roll_flash.learner.model.policy_model import PolicyModel, reset_dynamic_rope, rope_types
from roll_flash.learner.packing.rows import PackedRow, common_prefix_length, pack
from roll_flash.learner.packing.sequences import text_sequence

_LOG = logging.getLogger(__name__)
_TOLERANCE = 1e-3
"""Maximum difference of a log-probability in float32. Another summation order gives about 1e-5, a wrong formula 0.01 or
more. Multiplied by the standard deviation of the log-probabilities if that is below 1."""
_MIN_SPREAD = 0.02
"""Standard deviation of log-probabilities below which a model is too close to uniform for this test."""
_BRANCHES = ((24, 24, 12), (24, 24, 12), (24, 20, 16), (24, 40))
"""Part lengths of each text in tokens; texts with equal leading lengths share these parts, except the last part."""


def choose_exact_mode(policy: PolicyModel, folder: Path) -> None:
    """Enable prefix sharing in `policy` if it then gives the log-probabilities of plain transformers, else disable it.

    Logs one line if sharing is disabled. Raises ModelError if the model is inexact without sharing too.
    """
    texts = _texts(policy.head.shape[0])
    name = f"{folder}: {type(policy.model).__name__}"
    policy.eval()
    try:
        expected = [_plain_logprobs(policy, text) for text in texts]
        policy.logit_transform = find_logit_transform(policy.model, torch.from_numpy(texts[0].astype(np.int64)))
    except Exception as error:  # model code may raise anything
        raise ModelError(
            f"{name} does not run on a text of {len(texts[0])} tokens: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not torch.cat(expected).isfinite().all():
        raise ModelError(
            f"{name} gives log-probabilities that are not finite to a text of {len(texts[0])} tokens; its weights are "
            "damaged, or do not fit its config.json"
        )
    spread = min(1.0, float(torch.cat(expected).std()))
    tolerance = _TOLERANCE * max(_MIN_SPREAD, spread)
    if (leak := _sees_later_tokens(texts, expected)) > tolerance:
        raise ModelError(
            f"{name} cannot be trained: log-probabilities differ by {leak:.2g} between texts that begin alike, so "
            "tokens see what comes later; choose a causal language model, or look at the attention in its config.json"
        )
    reason = _cannot_be_seen(policy)
    if reason is None and spread < _MIN_SPREAD:
        reason = "to it all tokens are nearly as likely, so that what is wrong would hardly show"
    reason = reason or _difference(policy, texts, expected, tolerance, share=True)
    policy.alone_because = reason
    if reason is not None:
        _LOG.warning("%s: prefixes are not shared, each sequence is computed alone: %s", name, reason)
        if (reason := _difference(policy, texts, expected, tolerance, share=False)) is not None:
            raise ModelError(f"{name} cannot be trained: {reason}; choose a model of another architecture")


def _difference(
    policy: PolicyModel,
    texts: Sequence[NDArray[np.int32]],
    expected: Sequence[Tensor],
    tolerance: float,
    *,
    share: bool,
) -> str | None:
    """Describe how the policy's log-probabilities in training mode are wrong; None if they are correct."""
    rows = pack([text_sequence(text.tolist()) for text in texts], 1_000_000 if share else 1)
    largest = 0.0
    try:
        policy.share_prefixes(share)
        policy.train()
        for row in reversed(rows):
            found = _without_gradient(policy, row)
            for number, member in enumerate(row.members):
                chosen = torch.from_numpy(row.sequence_ids == number)
                difference = (found[chosen] - expected[member]).abs().max()
                largest = max(largest, float(difference.nan_to_num(nan=torch.inf)))
    except Exception as error:  # a model without support for the arguments may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    if largest <= tolerance:
        return None
    return f"log-probabilities differ by {largest:.2g} from those of transformers"


def _sees_later_tokens(texts: Sequence[NDArray[np.int32]], expected: Sequence[Tensor]) -> float:
    """Return the largest log-probability difference on the shared prefix of two texts; above 0, later tokens leak.

    Compares only texts of equal length, because RoPE frequencies may depend on the length.
    """
    largest = 0.0
    for (a, first), (b, second) in itertools.combinations(zip(texts, expected, strict=True), 2):
        if len(a) == len(b):
            number = common_prefix_length(a, b) - 1
            largest = max(largest, float((first[:number] - second[:number]).abs().max()))
    return largest


def _cannot_be_seen(policy: PolicyModel) -> str | None:
    """Return a reason against prefix sharing that short texts or new weights might not show; None if there is none."""
    if not policy.model._can_set_attn_implementation():
        return "its attention cannot be replaced"
    config: Any = policy.model.config
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    # `use_sliding_window` is ignored: models that read it set no window if it is false; the others do not read it.
    for key, value in config.to_dict().items():
        if key.endswith(("window", "window_size", "chunk_size")) and type(value) is int and value > 0:
            return f"{key} is {value}"
    for module in policy.model.modules():
        if changing := [kind for kind in rope_types(module).values() if "dynamic" in kind or kind == "longrope"]:
            return f"RoPE of type {changing[0]} depends on the longest sequence of a row"
    return None


@torch.no_grad()
def _without_gradient(policy: PolicyModel, row: PackedRow) -> Tensor:
    logprobs: Tensor = policy(row, 1.0)[0]
    return logprobs


@torch.no_grad()
def _plain_logprobs(policy: PolicyModel, text: NDArray[np.int32]) -> Tensor:
    """Return log-probabilities [T - 1] from the model's own forward pass with full logits."""
    reset_dynamic_rope(policy.model)
    token_ids = torch.from_numpy(text.astype(np.int64))
    logits: Tensor = policy.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]


def _texts(vocabulary: int) -> list[NDArray[np.int32]]:
    """Return a tree of texts of random tokens, which needs no tokenizer."""
    parts: dict[tuple[int, ...], NDArray[np.int32]] = {}
    texts = []
    for number, lengths in enumerate(_BRANCHES):
        text = np.empty(0, np.int32)
        for depth, length in enumerate(lengths):
            last = depth == len(lengths) - 1
            key = (*lengths[: depth + 1], number if last else -1)
            if key not in parts:
                parts[key] = np.random.default_rng(len(parts)).integers(3, vocabulary, length).astype(np.int32)
            text = np.concatenate([text, parts[key]])
        texts.append(text)
    return texts
