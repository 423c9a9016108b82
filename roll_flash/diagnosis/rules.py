"""All rules, causes before what they cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roll_flash.diagnosis import episodes, learning, throughput
from roll_flash.diagnosis.findings import Finding
from roll_flash.diagnosis.mismatch import mismatch
from roll_flash.diagnosis.reading import read_run
from roll_flash.diagnosis.run_view import RunView

Rule = Callable[[RunView], Finding | None]
RULES: tuple[Rule, ...] = (
    mismatch,
    throughput.sandbox_hangs,
    episodes.level_always_fails,
    throughput.episodes_fail,
    episodes.inconsistent_answers,
    learning.policy_moves_too_fast,
    learning.reward_without_success,
    episodes.same_answer_wins,
    episodes.clipped_answers,
    throughput.disk_runs_out,
    throughput.memory_runs_out,
    learning.gradient_spikes,
    learning.length_change,
    learning.entropy_collapse,
    learning.no_reward_variance,
    episodes.repeated_text,
    learning.low_sample_size,
    episodes.level_hot,
    throughput.eviction_bias,
    throughput.staleness_at_bound,
    throughput.sandbox_queue,
    throughput.servers_idle,
    throughput.learner_starved,
)


def find(view: RunView) -> list[Finding]:
    """Return what the rules find, errors first; of equal severity, causes before what they cause."""
    found = [finding for rule in RULES if (finding := rule(view)) is not None]
    return sorted(found, key=lambda finding: finding.severity != "error")


def diagnose(run_folder: Path | str) -> list[Finding]:
    """Read the folder of a run and return its problems, the most important first. Raises RunError, with one line, for a
    folder that is none, cannot be read, or is damaged."""
    return find(read_run(Path(run_folder)))
