"""Simulates a recorded run with its own settings, to correct the speeds measured from it and to know their error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from roll_flash.monitor.metrics import LEARNER_IDLE, STEP_S
from roll_flash.planner.measured.calibration import Calibration, calibrate
from roll_flash.planner.measured.recording import Recording, read_recording
from roll_flash.planner.prediction import MAX_STEPS, simulate
from roll_flash.planner.simulation.result import SimulationResult

ROUNDS = 3
SEEDS = 6
MAX_CHANGE = 2.0
"""Factor by which a round changes a speed at most."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a run took, or a simulation of it, in seconds."""

    step_s: float
    turn_s: float
    """Mean time of a turn of the model."""
    learner_s: float
    """Work of the learner in a step."""


def calibrated(folder: Path) -> tuple[Calibration, Replayed, Replayed]:
    """Measure the run in `folder`, and scale the times of servers and learner until a simulation of the run takes as
    long as they did. Returns also what the run took, and the simulation at the end.

    What then still differs in the time of a step is an error of the simulation, and part of the calibration's `error`.
    Raises RunError if the run has trained too little, ConfigError if it has no config.
    """
    recording = read_recording(folder)
    calibration, measured = calibrate(recording), _measured(recording)
    simulated = _replay(recording, calibration)
    for _ in range(ROUNDS):
        servers, learner = measured.turn_s / simulated.turn_s, measured.learner_s / max(simulated.learner_s, 1e-9)
        speeds = calibration.speeds.scaled(_bounded(servers), _bounded(learner))
        calibration = replace(calibration, speeds=speeds)
        simulated = _replay(recording, calibration)
    error = math.hypot(calibration.error, measured.step_s / simulated.step_s - 1)
    return replace(calibration, error=error), measured, simulated


def _bounded(factor: float) -> float:
    return min(MAX_CHANGE, max(1 / MAX_CHANGE, factor))


def _measured(recording: Recording) -> Replayed:
    rows = [row for row in recording.steps if row.get(LEARNER_IDLE) is not None]
    rows = rows[len(rows) // 4 :]
    return Replayed(
        step_s=fmean(row[STEP_S] for row in rows),
        turn_s=fmean(turn.generate_s for episode in recording.episodes for turn in episode.turns),
        learner_s=fmean((1 - row[LEARNER_IDLE]) * row[STEP_S] for row in rows),
    )


def _replay(recording: Recording, calibration: Calibration) -> Replayed:
    steps = min(len(recording.steps), MAX_STEPS)
    results = [simulate(recording.config, calibration, steps=steps, seed=seed) for seed in range(SEEDS)]
    return Replayed(
        step_s=fmean(result.step_s for result in results),
        turn_s=fmean(result.generate_s / max(1, result.turns) for result in results),
        learner_s=fmean(_learner_s(result) for result in results),
    )


def _learner_s(result: SimulationResult) -> float:
    return (1 - result.learner_idle) * result.elapsed_s / max(1, result.steps)
