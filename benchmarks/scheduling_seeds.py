"""A claim over several seeds: means of all figures, and between which values they were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from scheduling_claims import CLAIMS, Measured, Row


@dataclass
class Figure:
    """What several seeds gave: their mean, the smallest and the largest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.fmean(values), min(values), max(values))


@dataclass
class Result:
    """`rows` have a `Figure` where `measure` gave a number that is no whole one, and are the same in all seeds else."""

    name: str
    setting: str
    unit: str
    target: float
    figure: Figure
    seeds: int
    rows: list[dict[str, Any]]
    note: str
    comparable: bool = True

    @property
    def met(self) -> str:
        """`yes` only if every seed reached the target."""
        if not self.comparable:
            return "not comparable"
        if self.figure.low >= self.target:
            return "yes"
        return "in the mean" if self.figure.mean >= self.target else "no"

    def means(self) -> list[Row]:
        return _means(self.rows)


def measure_all(seeds: int, quick: bool, processes: int) -> list[Result]:
    """Every claim with seeds 0 to `seeds` - 1, `processes` measurements at a time."""
    jobs = [(index, seed) for index in range(len(CLAIMS)) for seed in range(seeds)]
    with ProcessPoolExecutor(processes) as pool:
        futures = {job: pool.submit(_measure, *job, quick) for job in jobs}
        measured = {job: future.result() for job, future in futures.items()}
    return [_combine(index, [measured[index, seed] for seed in range(seeds)]) for index in range(len(CLAIMS))]


def _measure(index: int, seed: int, quick: bool) -> Measured:
    return CLAIMS[index].measure(seed, quick)


def _combine(index: int, measured: Sequence[Measured]) -> Result:
    claim = CLAIMS[index]
    rows = []
    for several in zip(*(one.rows for one in measured), strict=True):
        row: dict[str, Any] = {}
        for name, value in several[0].items():
            row[name] = Figure.of([one[name] for one in several]) if isinstance(value, float) else value
        rows.append(row)
    figure = Figure.of([one.figure for one in measured])
    note = claim.note(_means(rows))
    return Result(
        claim.name,
        claim.setting,
        claim.unit,
        claim.target,
        figure,
        len(measured),
        rows,
        note,
        claim.comparable,
    )


def _means(rows: list[dict[str, Any]]) -> list[Row]:
    return [{name: value.mean if isinstance(value, Figure) else value for name, value in row.items()} for row in rows]


def as_dict(result: Result) -> dict[str, Any]:
    return {**asdict(result), "met": result.met}
