"""What a run folder tells about speeds: its episodes turn by turn, its steps, and when its learner worked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.checked_files import as_a_run_writes
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError, RunError
from roll_flash.monitor.episode_files.steps import open_steps
from roll_flash.monitor.episodes import DROPPED_FILE
from roll_flash.monitor.json_lines import read_lines
from roll_flash.monitor.metrics import STEP_S, read_metrics
from roll_flash.run.run_dir import TIMELINE

MAX_EPISODES = 20_000
"""The newest episodes are read, at most this many."""
MIN_EPISODES = 16
"""With fewer episodes nothing can be said about their spread."""

Span = tuple[float, float]
"""Start and end in seconds of Unix time."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    started_s: float
    generate_s: float
    step_s: float
    tokens: int
    prompt: int
    first_version: int
    last_version: int

    @property
    def span(self) -> Span:
        return self.started_s, self.started_s + self.generate_s


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    group_id: str
    startup_s: float
    """Time before the first turn."""
    started_s: float
    finished_s: float
    turns: tuple[RecordedTurn, ...]
    reward: float
    packed_tokens: int

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class StoppedEpisode:
    """An episode that was stopped because its group was dropped."""

    group_id: str
    lasted_s: float
    turns: int
    """Number of turns that it had finished; 0 if that is not known."""


@dataclass(frozen=True, slots=True)
class LearnerSpan:
    work: str
    """`accumulate`, `update` or `stage`."""
    started_s: float
    ended_s: float
    tokens: int

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A line of `logs/timeline.jsonl`."""

    step: int
    started_s: float
    learner: tuple[LearnerSpan, ...]
    cpu_cores: int


@dataclass(frozen=True, slots=True)
class Recording:
    folder: Path
    config: Config
    episodes: tuple[RecordedEpisode, ...]
    failures: int
    """Attempts that ended without a trajectory."""
    stopped: tuple[StoppedEpisode, ...]
    steps: tuple[Mapping[str, Any], ...]
    """The rows of `metrics.jsonl` that end a step."""
    timeline: tuple[RecordedStep, ...]
    damaged: int = 0
    """Lines of `episodes/` that were left out."""

    @property
    def learner_spans(self) -> list[LearnerSpan]:
        return [span for step in self.timeline for span in step.learner]

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the steps; None if it was never measured."""
        values = [float(row[name]) for row in self.steps if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    def last(self, name: str) -> float:
        """Return the newest value of a metric, such as a count since the start of the run; 0 if there is none."""
        values = [float(row[name]) for row in self.steps if row.get(name) is not None]
        return values[-1] if values else 0.0


def read_recording(folder: Path) -> Recording:
    """Read a run folder, also of a run that still trains. Raises RunError if it says too little, or what no run writes,
    ConfigError if its config cannot be read."""
    with as_a_run_writes(folder):
        return _recording(folder)


def _recording(folder: Path) -> Recording:
    steps = [row for row in read_metrics(folder) if row.get(STEP_S) is not None]
    records, damaged = _newest_records(folder)
    episodes = [_episode(record) for record in records if record["kind"] == "trajectory" and record["turns"]]
    timeline = [_step(line) for line in read_lines(folder / "logs" / TIMELINE)]
    if not steps or not timeline or len(episodes) < MIN_EPISODES:
        raise RunError(
            f"{folder}: {len(steps)} finished steps and {len(episodes)} episodes are too few to measure speeds; a plan "
            f"needs a step and {MIN_EPISODES} episodes of them"
        )
    for before, after in itertools.pairwise(timeline):
        if after.started_s < before.started_s:
            raise RunError(
                f"{folder}: the clock went back by {before.started_s - after.started_s:.0f} s or more before step "
                f"{after.step}, so its times measure nothing; take another run"
            )
    return Recording(
        folder=folder,
        config=load_config(folder / "config.yaml"),
        episodes=tuple(episodes),
        failures=sum(record["kind"] == "failure" for record in records),
        stopped=_stopped(folder),
        steps=tuple(steps),
        timeline=tuple(timeline),
        damaged=damaged,
    )


def _newest_records(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return records, newest steps first, and the number of damaged lines between them."""
    found: list[dict[str, Any]] = []
    damaged = 0
    for _, lines in open_steps(folder / "episodes", newest_first=True):
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                found.append(record)
            else:
                damaged += line.endswith(b"\n")
        if len(found) >= MAX_EPISODES:
            break
    return found, damaged


def _stopped(folder: Path) -> tuple[StoppedEpisode, ...]:
    found = [
        StoppedEpisode(str(group.get("group_id", "")), float(lasted_s), int(turns))
        for group in read_lines(folder / "episodes" / DROPPED_FILE)
        for lasted_s, turns in itertools.zip_longest(
            group.get("stopped_s", ()), group.get("stopped_turns", ()), fillvalue=0
        )
    ]
    return tuple(found[-MAX_EPISODES:])


def _episode(record: Mapping[str, Any]) -> RecordedEpisode:
    """Turns from a recording (`Turn.in_prefix`) are part of the start: the model was not asked for them."""
    turns = [turn for turn in record["turns"] if not turn.get("in_prefix")]
    played_s = sum(turn["generate_s"] + turn["step_s"] for turn in turns)
    startup_s = max(0.0, record["finished_s"] - record["started_s"] - played_s)
    now_s, found = record["started_s"] + startup_s, []
    for turn, versions in zip(turns, _versions_of_turns(record, turns), strict=True):
        found.append(_turn(turn, versions, now_s))
        now_s += turn["generate_s"] + turn["step_s"]
    return RecordedEpisode(
        group_id=record["group_id"],
        startup_s=startup_s,
        started_s=record["started_s"],
        finished_s=record["finished_s"],
        turns=tuple(found),
        reward=float(record["reward"]),
        packed_tokens=len(record["token_ids"]) + sum(len(branch["token_ids"]) for branch in record["branches"]),
    )


def _versions_of_turns(record: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[Sequence[int]]:
    """Return for each turn the versions of its tokens; empty if they are unknown.

    Turns at 0:0 (`model.thinking: strip`) are in branches without turns of their own, in this order. Such a turn begins
    where its prompt ends.
    """
    later = [branch["versions"] for branch in record["branches"] if not branch["turns"]]
    found: list[Sequence[int]] = []
    place = read = 0  # the branch of the last turn that was found in one, and where it ended there
    for turn in turns:
        start, end = int(turn["start"]), int(turn["end"])
        if end:
            found.append(record["versions"][start:end])
            continue
        start = turn["prompt_tokens"] or 0
        end = start + (turn["completion_tokens"] or 0)
        at = [n for n in range(place, len(later)) if (n > place or start >= read) and _sampled(later[n], start, end)]
        found.append(later[at[0]][start:end] if at else [])
        place, read = (at[0], end) if at else (place, read)
    return found


def _sampled(versions: Sequence[int], start: int, end: int) -> bool:
    """True if the model sampled each token of `start:end`; versions of other tokens are -1."""
    return start < end <= len(versions) and min(versions[start:end]) >= 0


def _turn(turn: Mapping[str, Any], versions: Sequence[int], started_s: float) -> RecordedTurn:
    start, end = int(turn["start"]), int(turn["end"])
    return RecordedTurn(
        started_s=started_s,
        generate_s=float(turn["generate_s"]),
        step_s=float(turn["step_s"]),
        tokens=max(1, int(turn["completion_tokens"] or end - start)),
        prompt=int(turn["prompt_tokens"] or start),
        first_version=int(versions[0]) if versions else 0,
        last_version=int(versions[-1]) if versions else 0,
    )


def _step(line: Mapping[str, Any]) -> RecordedStep:
    spans = tuple(LearnerSpan(str(work), float(a), float(b), int(tokens)) for work, a, b, tokens in line["learner"])
    cores = int(line.get("cpu_cores") or 0)
    return RecordedStep(int(line["step"]), float(line["started_s"]), spans, cores)


def overlap_share(spans: Sequence[Span], others: Sequence[Span]) -> list[float]:
    """Return for each span the share of it that lies in the union of `others`, between 0 and 1."""
    import numpy as np

    times, covered = _coverage(others)
    found = []
    for start, end in spans:
        inside = float(np.interp(end, times, covered) - np.interp(start, times, covered)) if times else 0.0
        found.append(min(1.0, inside / (end - start)) if end > start else 0.0)
    return found


def _coverage(spans: Sequence[Span]) -> tuple[list[float], list[float]]:
    """Return times and, at each, how long the union of `spans` has lasted so far; linear between them."""
    times: list[float] = []
    covered: list[float] = []
    total = 0.0
    for start, end in merged(spans):
        times += [start, end]
        covered += [total, total + end - start]
        total += end - start
    return times, covered


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the union of spans as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def require_same_work(recording: Recording, config: Config) -> list[str]:
    """Return a line for each difference of `config` from the recorded run that changes what was measured.

    Raises ConfigError for another model: its speeds say nothing.
    """
    run = recording.config
    if run.model.path != config.model.path:
        raise ConfigError(
            f"model.path: {recording.folder} measured {run.model.path}, not {config.model.path}; make a short run with "
            "that model first"
        )
    return [
        f"{name} differs from that of the run: {effect}"
        for effect, names in (
            ("its episodes may be others than those measured", _SAME_EPISODES),
            ("a token may take the learner another time than was measured", _SAME_TRAINING),
        )
        for name, of in names.items()
        if of(run) != of(config)
    ]


_SAME_EPISODES: Mapping[str, Callable[[Config], object]] = {
    "envs": lambda config: [(env.id, env.kwargs, env.max_turns) for env in config.envs],
    "rollout.max_new_tokens": lambda config: config.rollout.max_new_tokens,
    "rollout.temperature": lambda config: config.rollout.temperature,
    "model.max_length": lambda config: config.model.max_length,
    "inference.engine": lambda config: config.inference.engine,
    "inference.threads": lambda config: config.inference.threads,
}
_SAME_TRAINING: Mapping[str, Callable[[Config], object]] = {
    "learner.lora.rank": lambda config: config.learner.lora.rank,
    "learner.kl": lambda config: (config.learner.kl.coefficient > 0, config.learner.kl.in_reward),
    "learner.advantage": lambda config: (config.learner.has_critic, config.learner.critic.kind),
    "learner.gradient_checkpointing": lambda config: config.learner.gradient_checkpointing,
}
