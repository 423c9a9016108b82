"""Result of an evaluation: scores with intervals, failures by cause, usage; as JSON, as metrics and as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from roll_flash.evaluation.statistics import (
    Estimate,
    estimate_mean,
    estimate_pass_at_k,
    estimate_success,
    ks_to_report,
)
from roll_flash.monitor.metrics import EVAL_REWARD, EVAL_SUCCESS, EVAL_SUCCESS_HIGH, EVAL_SUCCESS_LOW
from roll_flash.run.trained_tasks import hashes_by_task, notes_on_tasks
from roll_flash.terminal import one_line
from roll_flash.types import ENDS_OF_THE_RUN

MAX_MESSAGE = 300
"""Characters of a failure's message in a table: it may quote an answer of an endpoint or an environment."""
MAX_COUNT = 1e15
"""Larger numbers in what an environment says of its tools are no counts."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of all attempts in the folder, including failed and repeated ones."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    unknown: int = 0
    """Attempts with unknown token counts."""
    cost: float | None = None
    """In the currency of the prices; None without prices."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Scores of ended attempts; failed attempts are masked, never scored 0, and listed by cause.

    Without reported success, `success` is None and `pass_at_k` empty; `reward` is None if no attempt ended.
    """

    label: str
    tasks: int
    attempts: int
    """Requested attempts per task."""
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
    """Duration of this call; a resumed evaluation does not count earlier calls."""
    tools: Mapping[str, ToolStatistics] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens by weight version; empty for third-party endpoints."""
    usage: Usage = field(default_factory=Usage)
    tried_again: int = 0
    """Attempts retried in this call after infrastructure failures."""
    stopped: str | None = None
    """Reason why not all attempts ran: a budget, or too many consecutive failures."""
    failure: str | None = None
    """Cause, task and message of one attempt without a score."""
    notes: tuple[str, ...] = ()
    """Facts that a reader must know about the scores."""
    task_hashes: frozenset[str] = frozenset()
    """Hashes of the distinct scored tasks; empty if they cannot be distinguished (`trained_tasks.py`)."""
    trained_on: int = 0
    """Number of these tasks that the run had trained on before; if above 0, the scores are not held out."""
    others: Mapping[str, EvalResult] = field(default_factory=dict)
    """Results of the environments after the first, by `env_N`."""

    @property
    def missing(self) -> int:
        """Attempts without a score."""
        return sum(self.failures.values())

    @property
    def timeouts(self) -> dict[str, int]:
        """Number of timeouts by source: causes of attempts without a score, and `tools` (calls)."""
        found = {cause: count for cause, count in self.failures.items() if cause.endswith("_timeout")}
        tools = sum(use.timeouts for use in self.tools.values())
        return {**found, **({"tools": tools} if tools else {})}

    @property
    def kind(self) -> str:
        """Label of the scores: `held-out`, or the share of tasks that were trained on."""
        if not self.trained_on:
            return "held-out"
        return f"not held out ({self.trained_on} of {len(self.task_hashes)} tasks were trained on)"

    @property
    def scores(self) -> str:
        """Success and reward in words; the reward alone where the environment reports no success."""
        named = (("success", self.success), ("reward", self.reward))
        found = ", ".join(f"{name} {estimate}" for name, estimate in named if estimate)
        return found or f"nothing was scored{f' ({self.failure})' if self.failure else ''}"

    def metrics(self) -> dict[str, float]:
        """Metrics that a run logs."""
        found: dict[str, float] = {"eval/failed": float(self.missing)}
        if self.trained_on:
            found["eval/trained_on"] = float(self.trained_on)
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
        """Plain data for JSON; keys of pass@k are text."""
        tree = asdict(replace(self, others={}))
        tree["pass_at_k"] = {str(k): asdict(estimate) for k, estimate in self.pass_at_k.items()}
        del tree["task_hashes"]
        tree |= {"distinct_tasks": len(self.task_hashes) or None, "kind": self.kind}
        tree |= {"missing": self.missing, "timeouts": self.timeouts}
        tree["others"] = {name: result.to_dict() for name, result in self.others.items()}
        return tree

    def table(self) -> str:
        """A few aligned lines for the terminal."""
        return _table(self)


def with_cut_off_failures(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return records in which an attempt that the limit of turns or tokens ended, and whose environment said nothing of
    success, is no success. If the environment says so of no attempt, they stay as they are.

    Many environments tell success only when they end themselves: without the others the rate would be too high.
    """
    if all(record["success"] is None for record in records):
        return list(records)
    return [
        {**record, "success": False} if record["success"] is None and record.get("end") in ENDS_OF_THE_RUN else record
        for record in records
    ]


def score(
    records: Iterable[Mapping[str, Any]],
    *,
    label: str,
    tasks: int,
    attempts: int,
    seconds: float,
    pass_at: Sequence[int] = (),
    usage: Usage | None = None,
    tried_again: int = 0,
    stopped: str | None = None,
    trained: Collection[str] = (),
) -> EvalResult:
    """Score episode records (`roll_flash.monitor.episodes`), at most one per attempt. `trained`: hashes of the tasks
    that the model was trained on. Identical tasks count as one in every interval."""
    records = list(records)
    ended = [record for record in records if record["kind"] == "trajectory"]
    hashes = hashes_by_task(ended)
    failures = Counter(record["cause"] for record in records if record["kind"] == "failure")
    if (missing := tasks * attempts - len(records)) > 0:
        failures["not_run"] = missing
    rewards = _by_task(ended, "reward", hashes)
    successes = _by_task([record for record in ended if record["success"] is not None], "success", hashes)
    wanted = list(pass_at) or ks_to_report(attempts)
    passes = {k: estimate_pass_at_k(successes, k) for k in wanted if k <= attempts} if successes else {}
    usage, silent = usage or Usage(), sum(record["success"] is None for record in ended)
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
        tools=tool_statistics(ended),
        versions=_versions(ended),
        usage=usage,
        tried_again=tried_again,
        stopped=stopped,
        failure=_one_failure(records),
        notes=(*_notes(wanted, attempts, successes, silent, usage), *notes_on_tasks(hashes, trained)),
        task_hashes=frozenset(hashes.values()),
        trained_on=sum(name in trained for name in set(hashes.values())),
    )


def _one_failure(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe a failure of the most frequent cause."""
    failed = [record for record in records if record["kind"] == "failure"]
    if not failed:
        return None
    ((most, _),) = Counter(record["cause"] for record in failed).most_common(1)
    one = next(record for record in failed if record["cause"] == most)
    message = one_line(str(one.get("message", "")))
    return f"{most} at {one['task_id']}: {message:.{MAX_MESSAGE}}"


def _by_task(records: Sequence[Mapping[str, Any]], column: str, hashes: Mapping[str, str]) -> list[list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        found[hashes.get(record["task_id"], record["task_id"])].append(record[column])
    return list(found.values())


def _versions(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found: Counter[int] = Counter()
    for record in records:
        versions = np.asarray(record.get("versions", ()), dtype=np.int64)
        found.update(versions[versions >= 0].tolist())
    return {str(version): found[version] for version in sorted(found)}


def _notes(
    wanted: Sequence[int], attempts: int, successes: Sequence[Sequence[bool]], silent: int, usage: Usage
) -> tuple[str, ...]:
    """`silent`: number of scored attempts without a reported success."""
    notes = []
    if successes and silent:
        notes.append(
            f"{silent} scored attempts report no success and are left out of it and of pass@k: let the environment set "
            'info["success"] whenever it ends, or set envs.N.success_above'
        )
    if too_many := [k for k in wanted if k > attempts]:
        ks = ", ".join(f"pass@{k}" for k in too_many)
        notes.append(
            f"{ks}: not defined by {attempts} attempts at each task; make more of them with -k {max(too_many)}"
        )
    made = max(map(len, successes), default=0)
    if successes and (lacking := [k for k in wanted if made < k <= attempts]):
        ks = ", ".join(f"pass@{k}" for k in lacking)
        notes.append(f"{ks}: no task has that many scored attempts, {made} at most; run again for what is missing")
    if usage.unknown:
        notes.append(f"the tokens of {usage.unknown} attempts are not known: the endpoint does not tell them")
    return tuple(notes)


def _table(result: EvalResult) -> str:
    rows = _score_rows(result)
    rows += [
        ("ended by", counts_text(result.ends) or "none"),
        ("not scored", counts_text(result.failures) or "none"),
        *([("for example", result.failure)] if result.failure else []),
        ("time-outs", counts_text(result.timeouts) or "none"),
        *(
            [("tried again", f"{result.tried_again} attempts, after infrastructure failed")]
            if result.tried_again
            else []
        ),
        ("tokens, turns", f"{_tokens(result.usage)}, {result.turns:,} turns"),
        *([("cost", f"{result.usage.cost:.4g}")] if result.usage.cost is not None else []),
        *([("weight versions", ", ".join(result.versions))] if len(result.versions) > 1 else []),
        ("seconds", f"{result.seconds:.1f}"),
        *(("note", note) for note in result.notes),
    ]
    if result.stopped:
        rows.append(("STOPPED", f"{result.stopped}; {result.missing} of {result.tasks * result.attempts} are missing"))
    width = max(len(name) for name, _ in rows)
    lines = [result.label, *(f"  {name:<{width}}  {text}" for name, text in rows), *_tool_lines(result)]
    return "\n".join([*lines, *(_table(other) for other in result.others.values())])


def _score_rows(result: EvalResult) -> list[tuple[str, str]]:
    rows = [("tasks x attempts", f"{result.tasks} x {result.attempts}, {result.scored} scored")]
    if result.success:
        rows.append(("success", f"{result.success}  (95 % interval, {result.success.count} tasks)"))
    elif result.scored:
        rows.append(("success", "not reported by the environment; envs.N.success_above derives it from the reward"))
    else:
        rows.append(("success", "nothing was scored"))
    if result.reward:
        rows.append(("reward", str(result.reward)))
    for k, estimate in result.pass_at_k.items():
        tasks = "" if estimate.count == result.tasks else f"  ({estimate.count} tasks)"
        rows.append((f"pass@{k}", f"{estimate}{tasks}"))
    return rows


def _tool_lines(result: EvalResult) -> list[str]:
    if not result.tools:
        return []
    width = max(len("tool"), *(len(name) for name in result.tools))
    lines = [f"  {'tool':<{width}}  {'calls':>7}  {'errors':>7}  {'time-outs':>9}  {'s/call':>8}"]
    lines += [
        f"  {name:<{width}}  {use.calls:>7,}  {use.errors:>7,}  {use.timeouts:>9,}  {use.seconds_per_call:>8.3f}"
        for name, use in result.tools.items()
    ]
    return lines


def _tokens(usage: Usage) -> str:
    if not usage.prompt_tokens and not usage.completion_tokens:
        return "not known" if usage.unknown else "0"
    return f"{usage.prompt_tokens:,} read, {usage.completion_tokens:,} written"


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


@dataclass(slots=True)
class ToolStatistics:
    """Statistics of one tool. `errors` counts wrong calls, exceptions and `timeouts`; `attempts` those with a call."""

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    attempts: int = 0

    @property
    def seconds_per_call(self) -> float:
        return self.seconds / self.calls if self.calls else 0.0


def tool_statistics(records: Iterable[Mapping[str, Any]]) -> dict[str, ToolStatistics]:
    """Sum `info["tools"]` (see `roll_flash.envs.tools.tool_env`), the most called first. Third-party environments may
    put anything there: entries that do not look like counts are ignored."""
    found: dict[str, ToolStatistics] = {}
    for record in records:
        tools = record.get("info", {}).get("tools")
        if not isinstance(tools, Mapping):
            continue
        for name, use in tools.items():
            if isinstance(use, Mapping) and isinstance(use.get("calls"), (int, float)):
                _add(found.setdefault(str(name), ToolStatistics()), use)
    return dict(sorted(found.items(), key=lambda item: (-item[1].calls, item[0])))


def _add(total: ToolStatistics, use: Mapping[str, Any]) -> None:
    total.attempts += 1
    total.calls += int(_count(use["calls"]))
    total.errors += int(_count(use.get("errors")))
    total.timeouts += int(_count(use.get("timeouts")))
    total.seconds += _count(use.get("seconds"))


def _count(value: Any) -> float:
    return value if isinstance(value, int | float) and 0 <= value <= MAX_COUNT else 0.0
