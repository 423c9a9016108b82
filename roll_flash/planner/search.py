"""Looks for better settings of a run: alpha x split x concurrency x redundancy, each simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError, RunError
from roll_flash.planner.measured.calibration import Calibration
from roll_flash.planner.prediction import figures_of, simulate

ALPHAS = (0, 1, 2, 3, 4)
COARSE_STEPS, FINE_STEPS = 8, 24
FINALISTS = 8
FINE_SEEDS = 4
TIE = 0.02
"""Settings whose speed differs by less are alike: then the one with fresher data and less waste is better."""

Fits = Callable[[Config], bool]
"""True if the placement and the memory of a config are possible."""
Speeds = Callable[[Config], Calibration]
"""Speeds for a config: with computed ones, they depend on how GPUs are split."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of the config, as `key=value` words, and what simulations gave for it."""

    words: tuple[str, ...]
    config: Config
    figures: dict[str, float]

    @property
    def speed(self) -> float:
        """Trained episodes per second."""
        return self.figures["episodes_per_s"]

    @property
    def reason(self) -> str:
        """What limits it."""
        learner, servers = self.figures["learner_idle"], self.figures["servers_idle"]
        if learner < 0.1:
            return "the learner always works: only more ranks or less to compute makes it faster"
        if servers < 0.1:
            return "the servers always work: only more of them make it faster"
        if self.config.scheduler.highest_async_ratio == 0:
            return "servers and learner wait for each other"
        return "it waits for environments and slow episodes"


def search(config: Config, speeds: Speeds, fits: Fits, splits: Sequence[Sequence[str]]) -> list[Candidate]:
    """Return settings, best first; those that are alike in speed by staleness and waste. `splits`: alternatives of how
    machines are shared by ranks and servers, as words."""
    found = []
    for words in _grid(config, splits):
        changed = _changed(config, words)
        if changed is not None and fits(changed):
            found += _simulated(changed, words, speeds(changed), COARSE_STEPS, 1)
    found.sort(key=lambda candidate: -candidate.speed)
    finalists = [
        again
        for each in found[:FINALISTS]
        for again in _simulated(each.config, each.words, speeds(each.config), FINE_STEPS, FINE_SEEDS)
    ]
    return ranked(finalists)


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order by speed; of those within TIE of the fastest that is left, the freshest with the least waste is next."""
    left, ranked = sorted(candidates, key=lambda each: -each.speed), []
    while left:
        alike = [each for each in left if each.speed >= (1 - TIE) * left[0].speed]
        best = min(alike, key=lambda each: (each.figures["staleness_mean"] + each.figures["discarded"], -each.speed))
        ranked.append(best)
        left.remove(best)
    return ranked


def _grid(config: Config, splits: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    scheduler, slots = config.scheduler, config.rollout.max_concurrent
    alphas = sorted({*ALPHAS, scheduler.async_ratio} if scheduler.async_ratio != "auto" else {*ALPHAS})
    more_groups = max(1, scheduler.groups_per_step // 8)
    redundancies = [(0, 0)] if scheduler.in_order else [(0, 0), (more_groups, 0), (0, 1), (more_groups, 1)]
    redundancies += [(scheduler.extra_groups, scheduler.extra_replicas)]
    for alpha, split, concurrent, (groups, replicas) in itertools.product(
        alphas, splits, (slots // 2, slots, 2 * slots), dict.fromkeys(redundancies)
    ):
        yield (
            f"scheduler.async_ratio={alpha:g}",
            *split,
            f"rollout.max_concurrent={concurrent}",
            f"scheduler.extra_groups={groups}",
            f"scheduler.extra_replicas={replicas}",
        )


def _changed(config: Config, words: Sequence[str]) -> Config | None:
    """Return the config with these words; None if they contradict each other."""
    try:
        return load_config(config.model_dump(mode="json"), words)
    except ConfigError:
        return None


def _simulated(
    config: Config, words: tuple[str, ...], calibration: Calibration, steps: int, seeds: int
) -> list[Candidate]:
    """Return the candidate with means over seeds; nothing if the run would end early."""
    try:
        results = [simulate(config, calibration, steps=steps, seed=seed) for seed in range(seeds)]
    except RunError:
        return []
    figures = [figures_of(result) for result in results]
    return [Candidate(words, config, {name: fmean(each[name] for each in figures) for name in figures[0]})]


def differing_words(config: Config, candidate: Candidate) -> list[str]:
    """Return the words that change something in `config`."""
    return [word for word in candidate.words if _changed(config, [word]) != config]


def gpu_splits(config: Config, gpus: int) -> list[tuple[str, ...]]:
    """Return the ways to divide GPUs into ranks and servers."""
    size = config.inference.tensor_parallel_size
    if gpus == 1:
        return [("learner.ranks=1", "inference.servers=1")]
    return [
        (f"learner.ranks={gpus - servers * size}", f"inference.servers={servers}")
        for servers in range(1, (gpus - 1) // size + 1)
        if _is_power_of_two(gpus - servers * size) or gpus - servers * size == config.learner.ranks
    ]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def cpu_splits(config: Config, cores: float) -> list[tuple[str, ...]]:
    """Return the numbers of servers to try on one machine without GPUs."""
    most = max(config.inference.servers, int(min(cores, 8)) // config.inference.threads)
    return [(f"inference.servers={servers}",) for servers in range(1, most + 1)]
