"""Compare two evaluations of the same tasks: difference with its interval, and tasks with a different outcome.

Attempts are averaged per task; each distinct task gives one paired difference, and tasks are resampled (paired
bootstrap, Efron 1979), so that a task that is hard for both does not add noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from roll_flash.errors import ConfigError
from roll_flash.evaluation.journal import EPISODES_FILE, PLAN_FILE, read_plan, read_records
from roll_flash.evaluation.result import with_cut_off_failures
from roll_flash.evaluation.statistics import Estimate, bootstrap_interval
from roll_flash.run.trained_tasks import hashes_by_task, notes_on_tasks

Record = Mapping[str, Any]
SOLVED_FROM = 0.5
"""Minimum success rate of a solved task."""
_ROUNDING = 1e-9
"""Differences that are further apart are not equal: 1 - 2/3 and 2/3 - 1/3 are, up to rounding."""
_OF_OTHER_KINDS = ("about.model", "about.weights", "about.revision", "about.endpoint", "sampling.seed")
"""What two evaluations are expected to differ in."""
_DEFAULT = "as by default"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two evaluations."""

    folder: Path
    name: str
    """Model and environment."""
    tasks: int
    attempts: int
    """Maximum scored attempts per task."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else the scores depend on."""


@dataclass(frozen=True, slots=True)
class TaskPair:
    """A task with scored attempts in both evaluations."""

    task_id: str
    a: float
    """Mean over the attempts: success if reported, else reward."""
    b: float
    attempts_a: tuple[Record, ...]
    attempts_b: tuple[Record, ...]

    @property
    def difference(self) -> float:
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class Comparison:
    a: Side
    b: Side
    measure: str
    """Compared quantity: `success` or `reward`."""
    value_a: float
    value_b: float
    difference: Estimate
    """B - A with its 95 % interval."""
    pairs: tuple[TaskPair, ...]
    notes: tuple[str, ...]

    @property
    def gained(self) -> list[TaskPair]:
        """Tasks that B solves and A does not."""
        return [pair for pair in self.pairs if self._flips(pair) and pair.difference > 0]

    @property
    def lost(self) -> list[TaskPair]:
        """Tasks that A solves and B does not."""
        return [pair for pair in self.pairs if self._flips(pair) and pair.difference < 0]

    def _flips(self, pair: TaskPair) -> bool:
        return self.measure == "success" and (pair.a >= SOLVED_FROM) != (pair.b >= SOLVED_FROM)

    @property
    def verdict(self) -> str:
        if self.difference.low > 0:
            return "B is better"
        return "A is better" if self.difference.high < 0 else "no difference can be told"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the conversations."""
        sides = {name: {**asdict(side), "folder": str(side.folder)} for name, side in (("a", self.a), ("b", self.b))}
        return {
            **sides,
            "measure": self.measure,
            "value_a": self.value_a,
            "value_b": self.value_b,
            "difference": asdict(self.difference),
            "verdict": self.verdict,
            "common_tasks": len(self.pairs),
            "gained": [pair.task_id for pair in self.gained],
            "lost": [pair.task_id for pair in self.lost],
            "tasks": [{"task_id": pair.task_id, "a": pair.a, "b": pair.b} for pair in self.pairs],
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """A few aligned lines for the terminal."""
        rows = [
            ("A", f"{self.value_a:.3f}  {self.a.name} ({self.a.folder})"),
            ("B", f"{self.value_b:.3f}  {self.b.name} ({self.b.folder})"),
            ("B - A", f"{_signed(self.difference)}  ({self.measure}, 95 % interval, {self.difference.count} tasks)"),
            ("verdict", self.verdict),
            ("solved by B only", _named(self.gained)),
            ("solved by A only", _named(self.lost)),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def compare_folders(a: str | Path, b: str | Path) -> Comparison:
    """Compare the common tasks of two folders. Raises ConfigError if there are none, or no evaluation."""
    (side_a, tasks_a), (side_b, tasks_b) = _read(Path(a).expanduser()), _read(Path(b).expanduser())
    common = [task for task in tasks_a if task in tasks_b]
    if not common:
        raise ConfigError(
            f"{a} and {b} have no scored tasks in common (the first ones are {_first(tasks_a)} and {_first(tasks_b)}); "
            "evaluate both on the same environment and seeds"
        )
    attempts = [record for task in common for record in (*tasks_a[task], *tasks_b[task])]
    measure = "success" if all(record["success"] is not None for record in attempts) else "reward"
    pairs = tuple(
        TaskPair(
            task,
            _mean(tasks_a[task], measure),
            _mean(tasks_b[task], measure),
            tuple(tasks_a[task]),
            tuple(tasks_b[task]),
        )
        for task in common
    )
    hashes = hashes_by_task(record for pair in pairs for record in pair.attempts_a)
    distinct: dict[str, list[tuple[float, float]]] = {}
    for pair in pairs:
        distinct.setdefault(hashes.get(pair.task_id, pair.task_id), []).append((pair.a, pair.b))
    a_of, b_of = np.array([np.mean(same, axis=0) for same in distinct.values()]).T
    return Comparison(
        side_a,
        side_b,
        measure,
        float(a_of.mean()),
        float(b_of.mean()),
        estimate_difference((b_of - a_of).tolist()),
        pairs,
        (*_notes(side_a, side_b, len(pairs)), *_notes_on_rows(side_a, side_b, pairs), *notes_on_tasks(hashes, ())),
    )


def estimate_difference(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences with its bootstrap interval.

    If all differences are equal, the bootstrap interval has no width; for few tasks that is too certain. It is then
    widened by 3 / n, the 95 % bound on the rate of an event that was never seen in n trials.
    """
    value = sum(differences) / len(differences)
    low, high = bootstrap_interval(differences)
    if max(differences) - min(differences) < _ROUNDING:
        spread = min(1.0, 3.0 / len(differences))
        low, high = value - spread, value + spread
    return Estimate(value, low, high, len(differences))


def _read(folder: Path) -> tuple[Side, dict[str, list[Record]]]:
    if not (folder / EPISODES_FILE).is_file():
        raise ConfigError(
            f"{folder}: no evaluation there (it has no {EPISODES_FILE}); give a folder that `roll-flash eval` wrote"
        )
    plan = read_plan(folder) or {}
    by_id = {record["episode_id"]: record for record in read_records(folder)}
    tasks: dict[str, list[Record]] = {}
    for record in with_cut_off_failures([*by_id.values()]):
        if record["kind"] == "trajectory":
            tasks.setdefault(str(record["task_id"]), []).append(record)
    if not tasks:
        raise ConfigError(f"{folder}: none of its attempts was scored; run the evaluation again to resume it")
    for attempts in tasks.values():
        attempts.sort(key=lambda record: str(record["episode_id"]))
    model = plan.get("about", {}).get("model", folder.name)
    name = f"{plan.get('env_id', PLAN_FILE + ' is missing')} with {model}"
    kwargs, settings = plan.get("env_kwargs") or {}, _settings(plan)
    side = Side(folder, name, len(tasks), max(map(len, tasks.values())), kwargs, settings)
    return side, dict(sorted(tasks.items()))


def _settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an evaluation, by dotted key, without the model and what chooses tasks and samples."""
    nested = {key: plan.get(key) or {} for key in ("sampling", "about")}
    found = {f"{key}.{name}": value for key, tree in nested.items() for name, value in tree.items()}
    found |= {key: plan.get(key) for key in ("max_turns", "reward", "success_above")}
    return {key: value for key, value in found.items() if key not in _OF_OTHER_KINDS}


def _notes(a: Side, b: Side, common: int) -> list[str]:
    notes = []
    differ = sorted(key for key in {*a.env_kwargs, *b.env_kwargs} if a.env_kwargs.get(key) != b.env_kwargs.get(key))
    if differ:
        kwargs = [", ".join(f"{key}={side.env_kwargs.get(key)}" for key in differ) for side in (a, b)]
        notes.append(
            f"A was made with {kwargs[0]} and B with {kwargs[1]}: tasks of the same name may not be the same tasks"
        )
    for key in sorted({*a.settings, *b.settings}):
        of_a, of_b = (side.settings.get(key, _DEFAULT) for side in (a, b))
        if of_a != of_b and None not in (of_a, of_b):  # older versions did not note all
            notes.append(
                f"A was made with {key} {of_a!s:.80} and B with {of_b!s:.80}: that alone may make a difference"
            )
    if others := _in_both(a.folder, b.folder):
        notes.append(
            f"these are the first environments only; for the others: eval-diff {a.folder / others[0]} "
            f"{b.folder / others[0]}" + (f", and so on to {others[-1]}" if len(others) > 1 else "")
        )
    if a.attempts != b.attempts:
        notes.append(
            f"A has up to {a.attempts} attempts at each task and B {b.attempts}: the means are compared, pass@k only "
            f"makes sense up to k = {min(a.attempts, b.attempts)}"
        )
    for name, side in (("A", a), ("B", b)):
        if side.tasks > common:
            notes.append(f"{side.tasks - common} tasks of {name} have no counterpart and are left out")
    return notes


def _notes_on_rows(a: Side, b: Side, pairs: Sequence[TaskPair]) -> list[str]:
    """Tell of tasks that have one name and come from different rows, or from the same ones with another template."""
    if a.env_kwargs != b.env_kwargs:
        return []  # all differ, and that is told
    differing = {pair.task_id: names for pair in pairs if (names := _differing_arguments(pair))}
    if not differing:
        return []
    arguments = ", ".join(sorted({name for names in differing.values() for name in names}))
    return [
        f"{len(differing)} tasks have other arguments ({arguments}) in A and B, such as {_first(differing)}: tasks of "
        "the same name may not be the same tasks"
    ]


def _differing_arguments(pair: TaskPair) -> set[str]:
    a, b = (attempts[-1].get("env_kwargs") or {} for attempts in (pair.attempts_a, pair.attempts_b))
    return {name for name in {*a, *b} - {"rewards"} if a.get(name) != b.get(name)}


def _in_both(a: Path, b: Path) -> list[str]:
    """Return the names of the folders with further environments, in order."""
    names = sorted((path.name for path in a.glob("env_*")), key=lambda name: (len(name), name))
    return [name for name in names if all((folder / name / EPISODES_FILE).is_file() for folder in (a, b))]


def _mean(records: Sequence[Record], measure: str) -> float:
    return sum(float(record[measure]) for record in records) / len(records)


def _first(tasks: Mapping[str, Any]) -> str:
    return next(iter(tasks))


def _named(pairs: Sequence[TaskPair], most: int = 8) -> str:
    names = [pair.task_id for pair in pairs]
    rest = f", and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)}" + (f": {', '.join(names[:most])}{rest}" if names else "")


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"
