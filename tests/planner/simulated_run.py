"""A run folder as a real run writes it, made from a simulation: what made it is known."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

from roll_flash.config.tree import Config
from roll_flash.monitor.episodes import DROPPED_FILE
from roll_flash.planner.measured.calibration import Calibration
from roll_flash.planner.prediction import simulation_settings
from roll_flash.planner.simulation.load import EpisodePlan
from roll_flash.planner.simulation.result import EpisodeSpan, SimulationResult
from roll_flash.planner.simulation.simulate import Simulation
from roll_flash.run.run_dir import TIMELINE

UNIX_S = 1_700_000_000.0


def write_run(folder: Path, config: Config, truth: Calibration, *, steps: int, background_cores: float = 0.0) -> None:
    """Simulate `steps` steps of `config` and write what a run of it would have written."""
    settings = simulation_settings(config, truth, background_cores=background_cores, record=True)
    result = Simulation(settings, truth.load).run(steps)
    (folder / "episodes").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text(config.to_yaml())
    timeline = result.timeline
    assert timeline is not None
    ended = [span for span in timeline.episodes.values() if span.ended_s]
    spans = [span for span in ended if span.fate in ("trained", "dropped", "unsettled")]
    write_lines(folder / "episodes/step_000000.jsonl", [_record(span, truth) for span in spans])
    stopped = [span for span in ended if span.fate == "cancelled"]  # without redundancy each was stale
    write_lines(folder / "episodes" / DROPPED_FILE, [_dropped(span) for span in stopped])
    write_lines(folder / "metrics.jsonl", _rows(config, truth, result))
    write_lines(folder / "logs" / TIMELINE, _timeline(config, truth, result))


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _dropped(span: EpisodeSpan) -> dict[str, Any]:
    turns = sum(part[0] == "environment" and part[2] < span.ended_s for part in span.parts[1:])
    return {"group_id": span.group_id, "stopped_s": [span.ended_s - span.started_s], "stopped_turns": [turns]}


def _record(span: EpisodeSpan, truth: Calibration) -> dict[str, Any]:
    """The fields of an episode's record that a plan reads."""
    seed, replica = int(span.group_id[1:]), int(span.episode_id.rpartition("-r")[2])
    plan: EpisodePlan = truth.load.plan(seed, replica, 0)
    parts = [part for part in span.parts if part[0] != "wait"]
    if plan.startup_s:
        parts = parts[1:]
    turns, versions = [], [-1] * (plan.prompts[-1] + plan.turns[-1][0])
    for place, (tokens, _) in enumerate(plan.turns):
        (_, began_s, ended_s), (_, stepped_s, done_s) = parts[2 * place : 2 * place + 2]
        start = plan.prompts[place]
        versions[start : start + tokens] = [span.step or 0] * tokens
        turns.append(
            {
                "start": start,
                "end": start + tokens,
                "generate_s": ended_s - began_s,
                "step_s": done_s - stepped_s,
                "prompt_tokens": start,
                "completion_tokens": tokens,
            }
        )
    return {
        "kind": "trajectory",
        "group_id": span.group_id,
        "started_s": UNIX_S + span.started_s,
        "finished_s": UNIX_S + span.ended_s,
        "turns": turns,
        "reward": plan.reward,
        "token_ids": [0] * plan.packed_tokens,
        "versions": versions,
        "branches": [],
    }


def _rows(config: Config, truth: Calibration, result: SimulationResult) -> list[dict[str, Any]]:
    ends = [0.0, *result.step_ends_s]
    servers, speeds = config.inference.servers, truth.speeds
    rows = []
    for step, (began_s, ended_s) in enumerate(itertools.pairwise(ends), start=1):
        rows.append(
            {
                "step": step,
                "time": UNIX_S + ended_s,
                "step_s": ended_s - began_s,
                "idle/learner": 1 - _inside(result, began_s, ended_s) / (ended_s - began_s),
                "weights/paused_s": speeds.pause_s,
                "weights/total_s": servers * (speeds.pause_s + speeds.publish_delay_s),
                "inference/server_prefix_cache_queries_0": 1.0,
                **(
                    {"inference/server_kv_cache_tokens_0": speeds.cache_tokens}
                    if speeds.cache_tokens < math.inf
                    else {}
                ),
            }
        )
    return rows


def _inside(result: SimulationResult, began_s: float, ended_s: float) -> float:
    assert result.timeline is not None
    return sum(max(0.0, min(b, ended_s) - max(a, began_s)) for a, b in result.timeline.learner)


def _timeline(config: Config, truth: Calibration, result: SimulationResult) -> list[dict[str, Any]]:
    """A line for each step: the learner's spans until its update, and the staging of the weights after it."""
    assert result.timeline is not None
    groups = sorted((span.step, span.group_id) for span in result.timeline.episodes.values() if span.step is not None)
    spans, lines, place = result.timeline.learner, [], 0
    for step, ended_s in enumerate(result.step_ends_s, start=1):
        of_step: list[list[Any]] = []
        while place < len(spans) and spans[place][1] <= ended_s + 1e-9:
            of_step.append(["accumulate", UNIX_S + spans[place][0], UNIX_S + spans[place][1], 0])
            place += 1
        of_step[-1][0] = "update"
        tokens = _tokens(config, truth, [group for number, group in groups if number == step - 1])
        for span in of_step[:-1]:  # one line through all of them: tokens by their time
            computed_s = sum(each[2] - each[1] for each in of_step[:-1])
            span[3] = round(tokens * (span[2] - span[1]) / computed_s)
        if place < len(spans):
            of_step.append(["stage", UNIX_S + spans[place][0], UNIX_S + spans[place][1], 0])
            place += 1
        times = {"started_s": of_step[0][1], "ended_s": of_step[-1][2]}
        cores = 0 if truth.speeds.cores == float("inf") else truth.speeds.cores
        lines.append({"step": step, **times, "learner": of_step, "cpu_cores": cores})
    return lines


def _tokens(config: Config, truth: Calibration, episodes: list[str]) -> int:
    """Tokens of the groups of a step, the prompt of each once."""
    size, total = config.scheduler.group_size, 0
    for group in dict.fromkeys(episodes):
        plans = [truth.load.plan(int(group[1:]), replica, 0) for replica in range(size)]
        prompts = [plan.prompts[0] for plan in plans]
        total += sum(plan.packed_tokens for plan in plans) - sum(prompts) + max(prompts)
    return total
