"""The plan of a run: what it would take, on which memory, at which price, and which settings would be better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import make_plan
from roll_flash.config.tree import Config
from roll_flash.errors import ConfigError, PlacementError
from roll_flash.models.shape import read_shape
from roll_flash.planner.gantt import draw_gantt
from roll_flash.planner.machines.arithmetic import arithmetic
from roll_flash.planner.machines.hardware import Hardware
from roll_flash.planner.machines.memory import needs
from roll_flash.planner.machines.memory_check import require_memory
from roll_flash.planner.measured.calibration import Calibration
from roll_flash.planner.measured.recording import read_recording, require_same_work
from roll_flash.planner.measured.replay import calibrated
from roll_flash.planner.prediction import Prediction, predict, simulate
from roll_flash.planner.search import Candidate, Speeds, cpu_splits, differing_words, gpu_splits, search

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
    both, the episodes of the run on these GPUs.

    Raises ConfigError if there is neither, PlacementError if the config does not fit on `hardware`, RunError if the run
    has trained too little.
    """
    notes: list[str] = []
    measured = None
    if run is not None:
        notes += require_same_work(read_recording(run), config)
        measured, took, simulated = calibrated(run)
        notes.append(
            f"a simulation of the run itself takes {simulated.step_s:.1f} s per step; it took {took.step_s:.1f} s"
        )
    if hardware is not None:
        machines = _on_gpus(config, hardware, measured)
    elif measured is not None:
        machines = _as_measured(config, measured)
    else:
        raise ConfigError(
            "a plan needs speeds: --from RUN measures them from a run on your machine (a short one will do), "
            "--hardware FILE computes them for a GPU (configs/hardware)"
        )
    memory = machines.memory(config)
    best = search(config, machines.speeds, machines.fits, machines.splits) if searches else ()
    calibration = machines.speeds(config)
    return RunPlan(
        config=config,
        calibration=calibration,
        prediction=predict(config, calibration),
        memory=tuple(memory),
        price_per_hour=hardware.price_per_hour if hardware else None,
        best=tuple(best),
        notes=(*notes, *calibration.notes),
    )


@dataclass(frozen=True, slots=True)
class _Machines:
    """For a config and changes of it."""

    speeds: Speeds
    memory: Callable[[Config], list[str]]
    """Returns lines. Raises PlacementError if the machines lack GPUs or their memory."""
    splits: Sequence[Sequence[str]]

    def fits(self, config: Config) -> bool:
        try:
            self.memory(config)
        except PlacementError:
            return False
        return True


def _on_gpus(config: Config, hardware: Hardware, measured: Calibration | None) -> _Machines:
    shape, nodes = read_shape(config.model.path, config.model.revision), hardware.as_nodes()

    def memory(changed: Config) -> list[str]:
        return require_memory(changed, shape, make_plan(run_parts(changed, nodes, gpu_servers=True), nodes))

    return _Machines(
        speeds=lambda changed: arithmetic(changed, shape, hardware, measured),
        memory=memory,
        splits=gpu_splits(config, hardware.gpus),
    )


def _as_measured(config: Config, measured: Calibration) -> _Machines:
    """The machines of the run. On GPUs, whose number is not known here, only the config's own split is tried."""
    shape, cores = read_shape(config.model.path, config.model.revision), measured.speeds.cores
    return _Machines(
        speeds=lambda _: measured,
        memory=lambda changed: needs(changed, shape, on_gpus=math.isinf(cores)),
        splits=[()] if math.isinf(cores) else cpu_splits(config, cores),
    )
