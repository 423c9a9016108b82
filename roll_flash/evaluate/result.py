"""The outcome of an evaluation: scores with intervals, failures by cause, as text, as JSON and as metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roll_flash.evaluate.statistics import (
    Estimate,
    estimate_mean,
    estimate_pass_at_k,
    estimate_success,
    ks_to_report,
)
from roll_flash.monitor.metrics import EVAL_REWARD, EVAL_SUCCESS, EVAL_SUCCESS_HIGH, EVAL_SUCCESS_LOW


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Scores are over attempts that ended; attempts that failed are masked, never scored 0, and listed by cause.

    `success` and `pass_at_k` are empty when the environment reports no success, `reward` is None when nothing ended.
    """

    label: str
    tasks: int
    attempts: int
    """Attempts per task that were asked for."""
    scored: int
    """Attempts that ended with a reward."""
    success: Estimate | None
    reward: Estimate | None
    pass_at_k: Mapping[int, Estimate]
    failures: Mapping[str, int]
    """Attempts without a score, by cause; `not_run` are those that the runner never reported."""
    ends: Mapping[str, int]
    policy_tokens: int
    turns: int
    seconds: float
    """Of this call alone; what a resumed evaluation found on disk cost nothing."""

    def metrics(self) -> dict[str, float]:
        """The figures that a run logs."""
        found: dict[str, float] = {"eval/failed": float(sum(self.failures.values()))}
        if self.reward:
            found[EVAL_REWARD] = self.reward.value
        if self.success:
            found |= {
                EVAL_SUCCESS: self.success.value,
                EVAL_SUCCESS_LOW: self.success.low,
                EVAL_SUCCESS_HIGH: self.success.high,
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; pass@k under its number as text."""
        tree = asdict(self)
        tree["pass_at_k"] = {str(k): asdict(estimate) for k, estimate in self.pass_at_k.items()}
        return tree

    def table(self) -> str:
        """A few aligned lines for the terminal."""
        rows = [("tasks x attempts", f"{self.tasks} x {self.attempts}, {self.scored} scored")]
        if self.success:
            rows.append(("success", f"{self.success}  (95 % interval, {self.success.count} tasks)"))
        else:
            rows.append(("success", "not reported by the environment" if self.scored else "nothing was scored"))
        if self.reward:
            rows.append(("reward", str(self.reward)))
        rows += [
            (f"pass@{k}", f"{estimate}" + ("" if estimate.count == self.tasks else f"  ({estimate.count} tasks)"))
            for k, estimate in self.pass_at_k.items()
        ]
        rows.append(("ended by", _counts(self.ends)))
        rows.append(("not scored", _counts(self.failures)))
        tokens = f"{self.policy_tokens:,} sampled" if self.policy_tokens else "not known (chat endpoint)"
        rows.append(("tokens, turns", f"{tokens}, {self.turns:,} turns"))
        rows.append(("seconds", f"{self.seconds:.1f}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.label, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def score(records: Iterable[Mapping[str, Any]], *, label: str, tasks: int, attempts: int, seconds: float) -> EvalResult:
    """Score episode records (`roll_flash.monitor.episodes`), at most one of each attempt."""
    records = list(records)
    ended = [record for record in records if record["kind"] == "trajectory"]
    failures = Counter(record["cause"] for record in records if record["kind"] == "failure")
    missing = tasks * attempts - len(records)
    if missing:
        failures["not_run"] = missing
    rewards = _by_task(ended, "reward")
    successes = _by_task([record for record in ended if record["success"] is not None], "success")
    passes = {k: estimate_pass_at_k(successes, k) for k in ks_to_report(attempts)} if successes else {}
    return EvalResult(
        label=label,
        tasks=tasks,
        attempts=attempts,
        scored=len(ended),
        success=estimate_success(successes) if successes else None,
        reward=estimate_mean(rewards) if rewards else None,
        pass_at_k={k: estimate for k, estimate in passes.items() if estimate is not None},
        failures=dict(failures),
        ends=dict(Counter(record["end"] for record in ended)),
        policy_tokens=sum(record["policy_tokens"] for record in ended),
        turns=sum(len(record["turns"]) for record in ended),
        seconds=seconds,
    )


def _by_task(records: Sequence[Mapping[str, Any]], column: str) -> list[list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        found[record["task_id"]].append(record[column])
    return list(found.values())
