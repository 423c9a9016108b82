"""Splits a step into the parts of its optimizer steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roll_flash.learner.packing.rows import TrainSequence


def split_minibatches(
    groups: Mapping[str, Sequence[TrainSequence]], count: int, seed: Sequence[int]
) -> list[list[TrainSequence]]:
    """`count` parts of about as many policy tokens each, groups whole (replicas share a prompt that is computed once).

    In an order drawn from `seed` and the group ids, each group goes to the part with the fewest tokens so far: the
    order in which groups came in does not show. Parts may be empty where there are fewer groups than parts.
    """
    names = sorted(groups)
    np.random.default_rng(list(seed)).shuffle(names)
    parts: list[list[TrainSequence]] = [[] for _ in range(count)]
    tokens = [0] * count
    for name in names:
        part = tokens.index(min(tokens))
        parts[part].extend(groups[name])
        tokens[part] += sum(int(sequence.policy_mask.sum()) for sequence in groups[name])
    return parts
