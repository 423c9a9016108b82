"""Takes supervised steps on demonstrations before reinforcement learning begins, with the same learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from roll_flash.config.sections.learner import WarmStartConfig
from roll_flash.config.tree import ModelConfig
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import ConfigError
from roll_flash.learner.demonstrations import Demonstrations, open_demonstrations
from roll_flash.processes.background import call_in_thread
from roll_flash.types import Trajectory
from roll_flash.watchdog.activity import doing

FIRST_STEP_S = 120.0
"""What the first supervised step may take before it counts as slow; the others as long as those before."""


async def warm_start(
    learner: LearnerEngine,
    config: WarmStartConfig,
    *,
    model_folder: Path,
    model: ModelConfig,
    seed: int,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Take `config.steps` supervised steps without changing the weight version. Returns metrics `warm_start/...`.

    Raises ConfigError if there are no demonstrations, LearnerError if the learner fails.
    """
    demonstrations = await call_in_thread(lambda: open_demonstrations(config, model_folder, model))
    too_long: list[int] = []
    drawn = _drawn(demonstrations, np.random.default_rng(seed), too_long)
    losses: list[float] = []
    for step in range(config.steps):
        with doing("the warm start", "its supervised step has not ended", may_take_s=FIRST_STEP_S):
            batch = await call_in_thread(lambda: list(islice(drawn, config.batch_size)))
            result = await learner.sft_step(batch, config.learning_rate, counts=False)
        losses.append(result.metrics["loss"])
        report(f"warm start: step {step + 1} of {config.steps}, loss {losses[-1]:.3f}")
    return {
        "warm_start/demonstrations": float(len(demonstrations)),
        "warm_start/too_long": float(len(too_long)),
        "warm_start/first_loss": losses[0],
        "warm_start/last_loss": losses[-1],
    }


def _drawn(demonstrations: Demonstrations, random: np.random.Generator, too_long: list[int]) -> Iterator[Trajectory]:
    """Draw each demonstration once, in random order, before any comes again. Without end. Adds to `too_long` the number
    of each that is left out."""
    while True:
        found = 0
        for index in random.permutation(len(demonstrations)):
            samples = demonstrations[int(index)]
            if not samples:
                too_long.append(int(index))
            found += len(samples)
            yield from samples
        if not found:
            raise ConfigError("warm_start.demonstrations: none is short enough for model.max_length")
