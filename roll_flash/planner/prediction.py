"""Predicts a run: simulations of its config with measured or computed speeds, with an error bar for each figure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from roll_flash.config.tree import Config
from roll_flash.errors import RunError
from roll_flash.planner.measured.calibration import Calibration, computes_late
from roll_flash.planner.simulation.result import SimulationResult
from roll_flash.planner.simulation.servers import ServerSpec
from roll_flash.planner.simulation.settings import LearnerSpec, SimulationSettings
from roll_flash.planner.simulation.simulate import Simulation

MAX_STEPS = 40
"""Steps that are simulated at most; a run's later steps are like these."""
ALONE_BATCH = 1e9
"""`half_rate_batch` of servers that a larger batch does not slow down."""
FIGURES = (
    "step_s",
    "episodes_per_s",
    "servers_idle",
    "learner_idle",
    "staleness_mean",
    "staleness_max",
    "discarded",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A predicted value, and the interval in which a run is expected to lie (about 95 %)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over the steps of a run, without the first quarter, in which it fills up."""

    figures: Mapping[str, Figure]
    """By the names in FIGURES; idle and discarded as fractions, staleness in steps."""
    problem: str = ""
    """Why the run would end early; then there are no figures."""

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]


def simulation_settings(
    config: Config, calibration: Calibration, *, background_cores: float = 0.0, record: bool = False
) -> SimulationSettings:
    """Return what simulates a run of `config` with the speeds of `calibration`."""
    loss = calibration.speeds.ess_loss
    return SimulationSettings(
        scheduler=config.scheduler,
        retries=config.rollout.retries,
        slots=config.rollout.max_concurrent,
        servers=_servers(config, calibration),
        learner=_learner(config, calibration),
        record=record,
        longest_episode_s=config.rollout.episode_timeout_s,
        max_new_tokens=config.rollout.max_new_tokens,
        sandboxes=calibration.sandboxes,
        scoring=calibration.scoring,
        sample_size=lambda staleness: 1 - loss * staleness,
        cores=calibration.speeds.cores,
        background_cores=background_cores,
    )


def _servers(config: Config, calibration: Calibration) -> ServerSpec:
    speeds, inference = calibration.speeds, config.inference
    alone_s = speeds.token_s + speeds.sequence_s
    return ServerSpec(
        count=inference.servers,
        max_sequences=inference.max_num_seqs,
        tokens_per_s=1 / alone_s,
        half_rate_batch=alone_s / speeds.sequence_s if speeds.sequence_s else ALONE_BATCH,
        prompt_token_s=speeds.prompt_token_s,
        request_s=speeds.request_s,
        cache_tokens=speeds.cache_tokens,
        cache_block=16 if speeds.has_prefix_cache else 1 << 60,
        admission_ratio=inference.admission_ratio,
        routes=config.scheduler.replicate,
        threads=inference.threads,
    )


def _learner(config: Config, calibration: Calibration) -> LearnerSpec:
    speeds, learner = calibration.speeds, config.learner
    split = speeds.ranks / learner.ranks
    train_s, proximal_s = speeds.train_token_s * split, speeds.proximal_token_s * split
    is_late, keeps = computes_late(config), learner.keeps_groups
    return LearnerSpec(
        streams=True,
        call_s=speeds.call_s,
        token_s=(proximal_s if keeps else 0.0) if is_late else train_s,
        late_token_s=train_s if is_late else 0.0,
        computes_all=learner.computes_silent_groups or config.distill is not None,
        batch_tokens=learner.micro_batch_tokens * learner.ranks,
        step_s=speeds.update_s,
        stage_s=speeds.stage_s,
        report_s=speeds.report_s,
        publish_s=speeds.pause_s,
        publish_delay_s=speeds.publish_delay_s,
        publish_batches=config.inference.servers,
        threads=learner.ranks * learner.threads,
    )


def simulate(
    config: Config, calibration: Calibration, *, steps: int, seed: int = 0, record: bool = False
) -> SimulationResult:
    """Simulate a run of `config`. Raises RunError if it would end early.

    What the other processes need of shared cores depends on the turns per second, which a first simulation finds.
    """
    load = calibration.load.with_seed(seed)
    background = calibration.speeds.background_s
    cores = 0.0
    if background and math.isfinite(calibration.speeds.cores):
        for _ in range(2):
            settings = simulation_settings(config, calibration, background_cores=cores)
            result = Simulation(settings, load).run(min(steps, 6))
            cores = background * result.turns / result.elapsed_s
    settings = simulation_settings(config, calibration, background_cores=cores, record=record)
    return Simulation(settings, load).run(steps)


def predict(config: Config, calibration: Calibration, *, repeats: int = 8) -> Prediction:
    """Predict a run of `config`: means over simulations with other draws and with speeds that vary by the error of the
    calibration. The interval of a figure is two standard deviations of them wide on each side."""
    steps = min(config.steps, MAX_STEPS)
    found = []
    try:
        for seed in range(repeats):
            varied = _varied(calibration, seed)
            found.append(figures_of(simulate(config, varied, steps=steps, seed=seed)))
    except RunError as error:
        return Prediction({}, str(error))
    return Prediction({name: _figure([each[name] for each in found]) for name in FIGURES})


def _varied(calibration: Calibration, seed: int) -> Calibration:
    """Speeds that differ by the error; pairs of seeds differ in opposite directions, so that the mean stays."""
    chance, sign = random.Random(seed // 2), 1 if seed % 2 else -1
    servers, learner = (math.exp(sign * calibration.error * chance.gauss(0, 1)) for _ in range(2))
    return replace(calibration, speeds=calibration.speeds.scaled(servers, learner))


def figures_of(result: SimulationResult) -> dict[str, float]:
    """Return the figures of one simulation."""
    return {name: float(getattr(result, name)) for name in FIGURES}


def _figure(values: Sequence[float]) -> Figure:
    value = fmean(values)
    error = 2 * stdev(values) if len(values) > 1 else 0.0
    return Figure(value, max(0.0, value - error), value + error)
