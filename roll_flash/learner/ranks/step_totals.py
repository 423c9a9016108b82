"""Collects the totals of a step between its first `accumulate` and its `finish_step`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from roll_flash.engines.learner import SampleName
from roll_flash.learner.losses.records import (
    Floats,
    RowRecord,
    by_staleness,
    off_policy_metrics,
    staleness_metrics,
    value_metrics,
)
from roll_flash.learner.losses.second_moment import SecondMoment
from roll_flash.learner.losses.shaping import ShapedReward
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.learner.packing.sequences import PreparedGroup


class StepTotals:
    """Counts, losses and per-token records of one step."""

    def __init__(self) -> None:
        self.policy_tokens = 0
        self.sequences = 0
        self.prox_s = 0.0
        self.reference_s = 0.0
        self.forward_backward_s = 0.0
        self.staging_s = 0.0
        self.second_moment: SecondMoment | None = None
        self._counts: Counter[str] = Counter()
        self._ages: Counter[int] = Counter()
        self._records: list[RowRecord] = []
        self._shaped: list[ShapedReward] = []
        self._waiting = 0
        self._checked = 0

    @property
    def empty(self) -> bool:
        return self.policy_tokens == 0 and not self._counts and not self._waiting

    @property
    def was_filtered(self) -> bool:
        """Return true if trajectories of the step were left out because they were cut."""
        return self._counts["overlong_filtered"] > 0

    def normalizer(self, normalization: Literal["tokens", "sequences", "constant"]) -> int:
        """Return the divisor of the step's gradient: policy tokens or sequences."""
        return self.policy_tokens if normalization == "tokens" else self.sequences

    def add_group(self, prepared: PreparedGroup) -> None:
        self._counts.update(prepared.counts)
        self._ages.update(dict(prepared.staleness))
        self.policy_tokens += prepared.policy_tokens
        self.sequences += prepared.num_valid

    def add_shaped(self, rewards: Iterable[ShapedReward]) -> None:
        self._shaped.extend(rewards)

    def add_demonstrations(self, sequences: Sequence[TrainSequence]) -> None:
        self.policy_tokens += sum(int(sequence.policy_mask.sum()) for sequence in sequences)
        self.sequences += len(sequences)

    def add_waiting(self, groups: int) -> None:
        """Count groups that are received but prepared only when the step is complete."""
        self._waiting += groups

    def loss_is_finite(self) -> bool:
        """Return true if the losses of all rows added since the last call are finite."""
        new, self._checked = self._records[self._checked :], len(self._records)
        return all(math.isfinite(record.loss) for record in new)

    def add_rows(self, records: Iterable[RowRecord]) -> None:
        self._records.extend(records)

    def logprobs(self) -> dict[SampleName, Floats]:
        """Return what `StepResult.logprobs` has."""
        return {name: values for record in self._records for name, values in record.by_sample.items()}

    def describe(self) -> str:
        """Format the counts for an error message."""
        return ", ".join(f"{name} {number}" for name, number in sorted(self._counts.items())) or "no groups were given"

    def metrics(self, normalizer: float, version: int | None) -> dict[str, float]:
        """Return all metrics of the step as a flat dict. Diagnostics cover the computed tokens.

        `version` is the version at the step's start; None omits the comparison with the sampler.
        """
        tokens = [len(record.logprobs) for record in self._records]
        computed = sum(record.computed_tokens for record in self._records)
        names = {name for record in self._records for name in record.means}
        metrics = {
            "policy_tokens": float(self.policy_tokens),
            "computed_policy_tokens": float(sum(tokens)),
            "computed_tokens": float(computed),
            "shared_tokens_saved": float(sum(record.padded_tokens for record in self._records) - computed),
            "rows": float(len(self._records)),
            "loss": sum(record.loss for record in self._records) / max(1, normalizer),
            "sequences": float(self.sequences),
            "prox_s": self.prox_s,
            "forward_backward_s": self.forward_backward_s,
            "staging_s": self.staging_s,
            **{name: float(number) for name, number in self._counts.items()},
            **staleness_metrics(sorted(self._ages.items())),
        }
        means = {
            name: sum(r.means[name] * n for r, n in zip(self._records, tokens, strict=True) if name in r.means)
            / max(1, sum(tokens))
            for name in names
        }
        if shaped := self._shaped:
            metrics["shaped_reward"] = sum(each.reward for each in shaped) / len(shaped)
            metrics["overlong_penalty"] = sum(each.penalty for each in shaped) / len(shaped)
            if self.reference_s:
                metrics["reference_s"] = self.reference_s
                metrics["kl_reference"] = sum(each.divergence for each in shaped) / sum(each.tokens for each in shaped)
        if (moment := self.second_moment) is not None:
            metrics |= {"second_moment": moment.before, "second_moment_kept": moment.after}
            metrics["left_out_fraction"] = moment.left_out / max(1, sum(tokens))
        pairs = [(r.values, r.returns) for r in self._records if r.values is not None and r.returns is not None]
        if pairs:
            metrics |= value_metrics(*(np.concatenate(arrays) for arrays in zip(*pairs, strict=True)))
        if self._records and version is not None:
            metrics |= self._off_policy_metrics(version)
        # A loss of the user may have a figure with the name of another.
        return metrics | {f"loss/{name}" if name in metrics else name: value for name, value in means.items()}

    def _off_policy_metrics(self, version: int) -> dict[str, float]:
        logprobs = np.concatenate([record.logprobs for record in self._records])
        behavior = np.concatenate([record.behavior_logprobs for record in self._records])
        ages = version - np.concatenate([record.versions for record in self._records])
        after_updates = np.concatenate([record.after_updates for record in self._records])
        names = set.intersection(*(set(record.indicators) for record in self._records))  # a loss may leave some out
        indicators = {name: np.concatenate([r.indicators[name] for r in self._records]) for name in sorted(names)}
        entropies = np.concatenate([record.entropies for record in self._records])
        return off_policy_metrics(logprobs, behavior, entropies) | by_staleness(
            logprobs - behavior, ages, after_updates, indicators
        )
