"""The planted runs: what is wrong with each, and which finding it must get first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.diagnosis.environments import STOP

BASE: Mapping[str, Any] = {
    "steps": 16,
    "model": {"path": "tiny", "max_length": 256},
    "inference": {"engine": "transformers"},
    "scheduler": {"groups_per_step": 3, "group_size": 4},
    "rollout": {"max_concurrent": 8, "max_new_tokens": 24, "stop": STOP, "retries": 0},
    "learner": {"learning_rate": 1e-3, "warmup_steps": 5},
    "checkpoint": {"every_minutes": 0},
    "eval": {"before_and_after": False},
    "monitor": {"tensorboard": False},
}
SENTENCES = "tests.diagnosis.environments:Sentences-v0"
SANDBOX = "tests.diagnosis.environments:SandboxSentences-v0"
LOOKUP = "tests.diagnosis.environments:Lookup-v0"


def env(id: str = SENTENCES, *, turns: int = 1, weight: float = 1.0, **kwargs: Any) -> dict[str, Any]:
    return {"id": id, "max_turns": turns, "weight": weight, "kwargs": kwargs}


@dataclass(frozen=True)
class Planted:
    """A run: words that change BASE, and a fault of the machinery that no config has."""

    name: str
    expected: tuple[str, ...]
    """Findings that it must have, the first of them first; empty: it must have none at all."""
    envs: Sequence[Mapping[str, Any]]
    words: Sequence[str] = ()
    stages: Sequence[Mapping[str, Any]] = ()
    fault: str | None = None
    """Name of a context in `faults.py`."""
    learner_temperature: float | None = None
    stops_after: int | None = None
    """Steps of a run that is looked at long before its end."""


def judge(**kwargs: Any) -> dict[str, Any]:
    return {"name": "judge", "entry_point": "tests.diagnosis.environments:Judge", "kwargs": kwargs, "reward": "replace"}


LONG = ["steps=1000000", "scheduler.groups_per_step=1", "scheduler.on_stale=wait"]
ANY_PARITY = "weights.parity_threshold=1000"
ONE_CHARACTER = ["rollout.max_new_tokens=1", "rollout.stop=[]"]
SOUND = (
    # On a busy machine many of its trajectories would be dropped as stale, which is a finding.
    Planted("sound-letters", (), [env()], ["scheduler.on_stale=wait"]),
    Planted("sound-sandbox", (), [env(SANDBOX, turns=2)], ["sandbox.provider=local", "steps=8"]),
    Planted(
        "sound-mixture",
        (),
        [
            {**env(weight=2), "levels": [{"shortest": 1}, {"shortest": 3}]},
            env(seconds=0.02),
        ],
        ["scheduler.async_ratio=2", "scheduler.on_stale=requeue", "steps=12"],
    ),
    Planted(
        "sound-synchronous",
        (),
        [env(LOOKUP, turns=2)],
        [*ONE_CHARACTER, "scheduler.async_ratio=0", "learner.advantage=rloo", "steps=12"],
    ),
)
FAULTY = (
    Planted("reward-for-nothing", ("reward-without-success",), [env(pays_for_nothing=True)], ["steps=24"]),
    Planted(
        "learner-temperature",
        ("mismatch-temperature",),
        [env()],
        ["rollout.temperature=0.6", "steps=12", "learner.warmup_steps=0"],
        learner_temperature=1.0,
    ),
    Planted(
        "stale-cache",
        ("mismatch-stale-cache",),
        [{**env(), "train_seeds": [0, 8]}],
        ["steps=12", "learner.warmup_steps=0"],
        fault="stale_prefix_cache",
    ),
    Planted("broken-level", ("level-always-fails",), [env(), env(impossible=True)], ["steps=24"]),
    Planted("stuck-doors", ("episodes-fail",), [env(breaks=0.3)], ["steps=8"]),
    Planted(
        "hung-sandbox",
        ("sandbox-hangs",),
        [env(SANDBOX, turns=2, hangs=True)],
        ["sandbox.provider=local", "rollout.step_timeout_s=2", "steps=8", "scheduler.max_failures_in_a_row=1000"],
    ),
    Planted(
        "clipped-lengths",
        ("clipped-answers",),
        [env()],
        ["rollout.max_new_tokens=4", "steps=5", "learner.learning_rate=3e-4"],
    ),
    Planted(
        "lying-tool",
        ("inconsistent-answers",),
        [{**env(LOOKUP, turns=2, lies=0.3), "train_seeds": [0, 4]}],
        [*ONE_CHARACTER, "scheduler.group_size=8", "rollout.max_concurrent=24", "steps=10"],
    ),
    Planted(
        "learning-rate-30",
        ("policy-moves-too-fast",),
        [env()],
        ["learner.learning_rate=3e-2", "learner.warmup_steps=0"],
    ),
    Planted("nothing-to-win", ("no-reward-variance",), [env(impossible=True)], ["steps=6"]),
    Planted(
        "trick-answer",
        ("same-answer-wins",),
        [env(pays_for_nothing=True, tells_success=False)],
        ["rollout.stop=['.']", "steps=26"],
    ),
    Planted(
        "rare-bonus",
        ("gradient-spikes",),
        [env(bonus=300.0)],
        ["learner.normalize_advantage=none", "steps=14"],
    ),
    Planted(
        "one-letter-for-all",
        ("entropy-collapse",),
        [env(LOOKUP, turns=2)],
        [*ONE_CHARACTER, "scheduler.async_ratio=0", "learner.learning_rate=1e-2", "steps=24"],
    ),
    Planted(
        "old-tokens",
        ("low-effective-sample-size",),
        [env()],
        [
            "scheduler.async_ratio=8",
            "scheduler.on_stale=wait",
            "rollout.max_concurrent=100",
            "learner.learning_rate=2e-3",
            "steps=12",
        ],
    ),
    Planted(
        "prefers-shorter",
        ("length-collapse",),
        [env(tells_success=False)],
        ["steps=24"],
        stages=[judge(prefers="shorter")],
    ),
    Planted(
        "prefers-longer",
        ("length-explosion",),
        [env(tells_success=False)],
        ["learner.learning_rate=2e-3", "rollout.max_new_tokens=64", "steps=24"],
        stages=[judge(prefers="longer")],
    ),
    Planted("float8-servers", ("mismatch-dtype",), [env()], [ANY_PARITY, "steps=6"], fault="float8_servers"),
    Planted(
        "forgotten-head",
        ("mismatch-weights",),
        [env()],
        [ANY_PARITY, "steps=12", "scheduler.async_ratio=0", "learner.learning_rate=3e-3", "learner.warmup_steps=0"],
        fault="forgotten_head",
    ),
    Planted("other-template", ("mismatch-template",), [env()], ["steps=6"], fault="other_template"),
    Planted("slow-level", ("level-hot",), [env(), env(seconds=4.0)], ["rollout.max_concurrent=4", "steps=6"]),
    Planted(
        "hung-environment",
        ("environment-hangs",),
        [env(hangs=True)],
        ["rollout.step_timeout_s=2", "steps=8", "scheduler.max_failures_in_a_row=1000"],
    ),
    Planted(
        "one-start-at-a-time",
        ("sandbox-queue",),
        [env(SANDBOX, turns=2)],
        ["sandbox.provider=local", "sandbox.max_parallel_starts=1", "sandbox.pool_size=0", "steps=3"],
        fault="slow_starts",
    ),
    Planted(
        "slow-judge", ("servers-idle",), [env()], ["scheduler.async_ratio=0", "steps=10"], stages=[judge(seconds=2.0)]
    ),
    Planted("slow-steps", ("learner-starved",), [env(seconds=1.0)], ["steps=10"]),
    Planted(
        "too-many-groups",
        ("staleness-at-bound",),
        [env()],
        ["scheduler.extra_groups=6", "rollout.max_concurrent=36", "steps=8"],
    ),
    Planted(
        "slow-tasks",
        ("eviction-bias",),
        [env(LOOKUP, turns=2, seconds=4.0)],
        [
            *ONE_CHARACTER,
            "scheduler.async_ratio=3",
            "rollout.max_concurrent=48",
            "learner.learning_rate=5e-5",
            "steps=12",
        ],
    ),
    Planted(
        "same-random-numbers",
        ("repeated-text",),
        [env(needs_mark=False)],
        ["rollout.stop=[]", "rollout.max_new_tokens=208", "model.max_length=320", "steps=3"],
        fault="same_random_numbers",
    ),
    Planted("kept-files", ("disk-runs-out",), [env(keeps="disk")], LONG, stops_after=21),
    Planted("kept-memory", ("memory-runs-out",), [env(keeps="memory")], LONG, stops_after=21),
)
ALL = (*SOUND, *FAULTY)
