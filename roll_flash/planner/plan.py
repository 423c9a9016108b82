"""The plan of a run: what it would take, on which memory, at which price, and which settings would be better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import make_plan
from roll_flash.config.tree import Config
from roll_flash.errors import ConfigError, PlacementError
from roll_flash.models.shape import ModelShape, read_shape
from roll_flash.planner.gantt import draw_gantt
from roll_flash.planner.machines.arithmetic import arithmetic
from roll_flash.planner.machines.hardware import Hardware
from roll_flash.planner.machines.memory import needs
from roll_flash.planner.machines.memory_check import require_memory
from roll_flash.planner.measured.calibration import Calibration
from roll_flash.planner.measured.recording import read_recording, require_same_work
from roll_flash.planner.measured.replay import calibrated
from roll_flash.planner.prediction import Prediction, predict, simulate
from roll_flash.planner.search import Candidate, cpu_splits, differing_words, gpu_splits, search

SHOWN = 5
"""Settings that are printed."""
GANTT_STEPS = 6


@dataclass(frozen=True, slots=True)
class RunPlan:
    config: Config
    calibration: Calibration
    prediction: Prediction
    memory: tuple[str, ...]
    """A line for each way in which memory is used."""
    price_per_hour: float | None
    best: tuple[Candidate, ...]
    """Settings that a simulation of many found, best first."""
    notes: tuple[str, ...]

    def cost(self, step_s: float) -> float | None:
        """Price of a step of so many seconds."""
        return None if self.price_per_hour is None else self.price_per_hour * step_s / 3600

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for scripts."""
        return {
            "source": self.calibration.source,
            "error": self.calibration.error,
            "notes": list(self.notes),
            "memory": list(self.memory),
            "prediction": {name: asdict(figure) for name, figure in self.prediction.figures.items()},
            "problem": self.prediction.problem or None,
            "price_per_hour": self.price_per_hour,
            "best": [
                {"words": differing_words(self.config, each), **each.figures, "why": each.reason} for each in self.best
            ],
        }

    def draw(self, path: Path) -> None:
        """Draw the Gantt chart of the first steps. Raises RunError if the run would end before."""
        steps = min(GANTT_STEPS, self.config.steps)
        result = simulate(self.config, self.calibration, steps=steps, record=True)
        title = f"{self.config.name}: {steps} steps in {result.step_ends_s[-1]:.0f} s, predicted"
        draw_gantt(result, self.config.rollout.max_concurrent, title, path)


def plan_run(
    config: Config, *, run: Path | None = None, hardware: Hardware | None = None, searches: bool = True
) -> RunPlan:
    """Plan a run of `config` from the speeds of an earlier `run`, or by arithmetic for the GPUs of `hardware`; with
    both, the episodes of the run on these GPUs (a hardware file without a GPU adds only its price).

    Raises ConfigError if there is neither, PlacementError if the config does not fit on `hardware`, RunError if the run
    has trained too little.
    """
    planner = _Planner(config, run, hardware)
    memory = planner.memory(config)
    best = planner.search() if searches else ()
    calibration = planner.speeds(config)
    return RunPlan(
        config=config,
        calibration=calibration,
        prediction=predict(config, calibration),
        memory=tuple(memory),
        price_per_hour=hardware.price_per_hour if hardware else None,
        best=tuple(best),
        notes=(*planner.notes, *calibration.notes),
    )


class _Planner:
    """Speeds, memory and possible splits, for a config and changes of it."""

    def __init__(self, config: Config, run: Path | None, hardware: Hardware | None) -> None:
        if run is None and (hardware is None or hardware.gpu is None):
            raise ConfigError(
                "a plan needs speeds: --from RUN measures them from a run on your machine (a short one will do), "
                "--hardware FILE computes them for a GPU (configs/hardware)"
            )
        self._config = config
        self._hardware = hardware
        self._on_gpus = hardware is not None and hardware.gpu is not None
        self._measured: Calibration | None = None
        self.notes: list[str] = []
        if run is not None:
            self.notes += require_same_work(read_recording(run), config)
            self._measured, took, simulated = calibrated(run)
            self.notes.append(
                f"a simulation of the run itself takes {simulated.step_s:.1f} s per step; it took {took.step_s:.1f} s"
            )
        self._shape: ModelShape | None = read_shape(config.model.path, config.model.revision) if self._on_gpus else None

    def speeds(self, config: Config) -> Calibration:
        if self._hardware is not None and self._shape is not None:
            return arithmetic(config, self._shape, self._hardware, self._measured)
        assert self._measured is not None
        return self._measured

    def memory(self, config: Config) -> list[str]:
        """Raises PlacementError if the machines lack GPUs or their memory."""
        if self._hardware is None or self._shape is None:
            on_gpus = self._measured is not None and math.isinf(self._measured.speeds.cores)
            return needs(config, read_shape(config.model.path, config.model.revision), on_gpus=on_gpus)
        nodes = self._hardware.as_nodes()
        return require_memory(config, self._shape, make_plan(run_parts(config, nodes, gpu_servers=True), nodes))

    def search(self) -> Sequence[Candidate]:
        if self._hardware is not None and self._on_gpus:
            splits = gpu_splits(self._config, self._hardware.gpus)
        elif self._measured is not None and math.isfinite(self._measured.speeds.cores):
            splits = cpu_splits(self._config, self._measured.speeds.cores)
        else:  # the run's GPUs, whose number is not known here
            splits = [()]
        return search(self._config, self.speeds, self._fits, splits)

    def _fits(self, config: Config) -> bool:
        if not self._on_gpus:
            return True
        try:
            self.memory(config)
        except PlacementError:
            return False
        return True
