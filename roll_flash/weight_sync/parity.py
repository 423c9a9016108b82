"""Parity probe: checks that servers and learner compute the same log-probabilities with the same weights.

The probe texts share a prefix and then branch, so that the check covers the learner's shared prefixes and the servers'
prefix caches. The check uses the mean and a high percentile of the differences over many tokens: in bfloat16 the
maximum depends on a single unlucky token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.tree import WeightsConfig
from roll_flash.errors import ParityError, RunError

FLOAT32_THRESHOLD = 1e-3
BFLOAT16_THRESHOLD = 0.25
PERCENTILE = 99
MEAN_SHARE = 0.2
"""Limit of the mean difference, as a fraction of the limit of the percentile."""
WHOLE_PROBE_TOKENS = 1024
_TEXT_TOKENS = 128
_TEXTS_AFTER_UPDATE = 2
_PASSAGES = (
    " She opened the letter slowly, read it twice, and said nothing until the kettle began to sing. ",
    "\ndef mean(values):\n    if not values:\n        return 0.0\n    return sum(values) / len(values)\n",
    '\n{"name": "search", "arguments": {"query": "tides at Brest", "limit": 3, "since": "2021-04-09"}}\n',
    " If 3x + 7 = 40 then x = 11, and 11 * 11 = 121; 121 / 4 = 30.25, which is less than 31. ",
    "\n$ ls -la /var/log | sort -k5 -n | tail -3\n-rw-r--r-- 1 root root 90211 May  7 06:25 syslog\n",
    " Der Zug kam zu spät; je suis arrivé après minuit, y nadie me esperaba en la estación. ",
    "\n# Results\n\n| run | loss | tokens |\n|---|---|---|\n| a | 1.37 | 20480 |\n| b | 1.29 | 40960 |\n",
    " First check that the tank is empty. Then close the valve, wait ten minutes, and write down the pressure. ",
)


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids of texts with a common prefix."""

    texts: Sequence[Sequence[int]]

    def after_update(self, number: int) -> Probe:
        """Return a small subset of the texts, a different one for each update."""
        count = len(self.texts)
        chosen = {(number * _TEXTS_AFTER_UPDATE + index) % count for index in range(_TEXTS_AFTER_UPDATE)}
        return Probe([self.texts[index] for index in sorted(chosen)])


@dataclass(frozen=True, slots=True)
class Parity:
    """Absolute differences of log-probabilities, for the server that differs most from the learner."""

    mean: float
    percentile: float
    """99th percentile of the differences."""
    largest: float
    tokens: int


def load_probe(model_folder: Path, text: str, max_length: int) -> Probe:
    """Return texts that begin with `text` and continue differently, at least 1,000 tokens in total.

    Raises RunError if `text` is shorter than two tokens.
    """
    tokenizer = load_tokenizer(model_folder)
    first, *passages = (
        [int(token) for token in tokenizer(part, add_special_tokens=False)["input_ids"]] for part in (text, *_PASSAGES)
    )
    if len(first) < 2:
        raise RunError("weights.parity_text must be at least two tokens long")
    length = max(4, min(_TEXT_TOKENS, max_length - 1))
    beginning = first[: length // 4]
    going_on = [*first[len(beginning) :], *(token for passage in passages for token in passage)]
    branch = length - len(beginning)
    number = -(-WHOLE_PROBE_TOKENS // branch)
    texts = []
    for index in range(number):
        start = index * len(going_on) // number
        repeated = going_on[start:] + going_on * (1 + branch // len(going_on))
        texts.append([*beginning, *repeated[:branch]])
    return Probe(texts)


def compare(expected: Sequence[NDArray[np.float32]], found: Sequence[Sequence[NDArray[np.float32]]]) -> Parity:
    """Compare log-probabilities: `expected[text]` from the learner, `found[text][server]` from the servers."""
    wanted = np.concatenate(expected)
    servers = [np.concatenate(texts) for texts in zip(*found, strict=True)]
    differences = [np.abs(answer.astype(np.float64) - wanted) for answer in servers]
    # np.max propagates NaN; Python's max depends on the order.
    return Parity(
        mean=float(np.max([values.mean() for values in differences])),
        percentile=float(np.max([np.percentile(values, PERCENTILE) for values in differences])),
        largest=float(np.max([values.max() for values in differences])),
        tokens=len(wanted),
    )


def check(parity: Parity, threshold: float) -> None:
    """Raises ParityError if the percentile exceeds `threshold`, the mean exceeds its share of it, or one is NaN."""
    if parity.percentile <= threshold and parity.mean <= MEAN_SHARE * threshold:
        return
    raise ParityError(
        f"server and learner disagree about the same weights: log-probabilities of {parity.tokens} tokens differ by "
        f"{parity.mean:.3g} on average and {parity.percentile:.3g} at the {PERCENTILE}th percentile, more than "
        f"{MEAN_SHARE * threshold:g} or {threshold:g} (weights.parity_threshold); training on such data would be "
        "wrong. Check that both use the same model, dtype and chat template"
    )


def parity_threshold(config: WeightsConfig, dtype: str) -> float:
    """Return the configured threshold, or the default for the servers' dtype."""
    if config.parity_threshold is not None:
        return config.parity_threshold
    return FLOAT32_THRESHOLD if dtype == "float32" else BFLOAT16_THRESHOLD
