"""Did a short run do what a run must do? `python .ci/check_run.py RUN_FOLDER` prints what it found, or fails.

Looked for: every step was trained, each publication of weights passed the parity probe, an episode lived through a
weight update (its tokens carry more than one version), no token was staler than allowed, the books balance, and the
files tell the same story (`roll-flash verify`).

Whether an episode lives through an update is chance in a run of few and short ones; after `--few` none has to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll_flash.config.tree import Config, load_config
from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metrics import STALENESS_MAX, STEP_S, read_metrics
from roll_flash.run.verify import verify_run
from roll_flash.summary import check_counts
from roll_flash.weight_sync.parity import parity_threshold

Rows = list[dict[str, Any]]


def steps_trained(config: Config, steps: Rows, episodes: Rows) -> str:
    assert len(steps) == config.steps, f"{len(steps)} of {config.steps} steps were trained"
    return f"{len(steps)} steps, {len(episodes)} episodes"


def parity_probed(config: Config, steps: Rows, episodes: Rows) -> str:
    found = [row["weights/parity"] for row in steps if row.get("weights/parity") is not None]
    assert found, "no publication of weights was probed"
    threshold = parity_threshold(config.weights, "float32")
    assert all(value <= threshold for value in found), f"parity {max(found):.2g} is above {threshold:g}"
    return f"parity probe after {len(found)} updates, 99th percentile {max(found):.2g} (at most {threshold:g})"


def updated_in_flight(config: Config, steps: Rows, episodes: Rows) -> str:
    across_episode = across_turn = 0
    for episode in episodes:
        versions = episode["versions"]
        spans = [set(versions[turn["start"] : turn["end"]]) for turn in episode["turns"]]
        across_episode += len(set().union(*spans)) > 1
        across_turn += any(len(span) > 1 for span in spans)
    assert across_episode, "no episode was in flight while weights were updated"
    return f"weight update in flight: {across_episode} episodes, {across_turn} of them in the middle of a turn"


def staleness_bounded(config: Config, steps: Rows, episodes: Rows) -> str:
    oldest = max(row[STALENESS_MAX] for row in steps)
    allowed = config.scheduler.highest_async_ratio
    assert oldest <= allowed, f"a token of staleness {oldest:g} was trained; allowed: {allowed:g}"
    return f"staleness at most {oldest:g} (allowed {allowed:g})"


def books_balance(config: Config, steps: Rows, episodes: Rows) -> str:
    last = {name.removeprefix("books/"): value for name, value in steps[-1].items() if name.startswith("books/")}
    books = check_counts(last)
    assert books["balance"], f"produced is not trained + dropped + waiting: {last}"
    return f"books balance: {books}"


CHECKS: tuple[Callable[[Config, Rows, Rows], str], ...] = (
    steps_trained,
    parity_probed,
    updated_in_flight,
    staleness_bounded,
    books_balance,
)


def main(folder: Path, *, few: bool = False) -> int:
    config = load_config(folder / "config.yaml")
    steps = [row for row in read_metrics(folder) if row.get(STEP_S) is not None]
    episodes = [row for row in read_episodes(folder / "episodes") if row["kind"] == "trajectory"]
    failed = 0
    for check in CHECKS:
        if few and check is updated_in_flight:
            continue
        try:
            print(f"ok    {check(config, steps, episodes)}")
        except AssertionError as reason:
            failed += 1
            print(f"FAIL  {reason}")
    for finding in verify_run(folder):
        failed += not finding.ok
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.check}: {finding.detail}")
    return 1 if failed else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case [run_folder]:
            sys.exit(main(Path(run_folder)))
        case [run_folder, "--few"]:
            sys.exit(main(Path(run_folder), few=True))
    sys.exit("usage: python .ci/check_run.py RUN_FOLDER [--few]")
