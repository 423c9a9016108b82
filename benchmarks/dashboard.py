"""The dashboard with a large run: index, memory, first paint, and the time of each interaction.

    python benchmarks/dashboard.py [--quick] [--keep FOLDER]

Generates a run of 1,000 steps and 100,000 episodes of four turns, starts `roll-flash dash` with it, and measures: the
rate at which episodes are indexed after a start, the largest resident memory of the server, the time of its answers,
and in Chromium, if it is installed, the first paint and the time from an action to the changed page. Files are in the
page cache, as they are just after they were written. Then once more, with the episodes of finished steps compressed.
Writes results/dashboard.{json,md}. `--keep` leaves the run in a folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from machine import machine
from tokenizers import Tokenizer, decoders, models

from roll_flash.config.tree import load_config
from roll_flash.models.tiny import vocabulary
from roll_flash.monitor.episode_files.steps import compress_step, step_files
from roll_flash.monitor.episodes import episode_record
from roll_flash.monitor.json_lines import encode, with_checksum
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.run.journal import Journal
from roll_flash.run.run_dir import RunDir
from roll_flash.types import EpisodeFailure, Task, Trajectory, Turn

RESULTS = Path(__file__).parent / "results"
EPISODES, QUICK_EPISODES, PER_STEP, REPLICAS = 100_000, 2_000, 100, 10
STEP_S, TURNS, PROTOTYPES, REPEATS = 20.0, 4, 50, 20
BEGIN_S = 1_760_000_000.0
FAILED = 0.02
TOKENS = vocabulary()
IDS = {token: number for number, token in enumerate(TOKENS)}


def generate(runs: Path, episodes: int) -> Path:
    """Write a run as a training run writes it; texts are those of PROTOTYPES episodes."""
    config = load_config(
        {
            "name": "large",
            "runs": str(runs),
            "model": {"path": "tiny"},
            "envs": [{"id": "Sum-v0"}],
            "steps": episodes // PER_STEP,
        }
    )
    with RunDir.create(config, resume=False) as run_dir:
        metrics, journal, draw = (
            MetricsLog(run_dir.folder, tensorboard=False),
            Journal(run_dir.journal),
            random.Random(1),
        )
        journal.begin(0)
        lines = [encode(episode_record(_trajectory(number), "worker W")).encode() for number in range(PROTOTYPES)]
        failed = encode(
            episode_record(
                EpisodeFailure(
                    "EPISODE",
                    "GROUP",
                    Task("TASK", "Sum-v0", 1),
                    "env_timeout",
                    "step took longer than 60 s",
                    2,
                    0,
                    0,
                    0,
                    1.5,
                    2.5,
                ),
                "worker W",
            )
        ).encode()
        for step in range(episodes // PER_STEP):
            _write_step(run_dir, step, lines, failed, draw, metrics, journal)
        with run_dir.writing_checkpoint(episodes // PER_STEP) as folder:
            (folder / "hf").mkdir()
            tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[]))
            tokenizer.decoder = decoders.Fuse()
            tokenizer.save(str(folder / "hf" / "tokenizer.json"))
        metrics.close()
        journal.close()
        return run_dir.folder


def _trajectory(number: int) -> Trajectory:
    draw = random.Random(number)
    said = ["".join(draw.choice("abcdefghij 0123456789") for _ in range(60)) for _ in range(TURNS)]
    prompt = "Work out the sum of these numbers with the shell, step by step: " + " ".join(
        str(draw.randrange(999)) for _ in range(30)
    )
    tokens, mask, turns, messages = (
        [IDS[c] for c in prompt],
        [0] * len(prompt),
        [],
        [{"role": "user", "content": prompt}],
    )
    for turn, text in enumerate(said):
        turns.append(
            Turn(
                len(tokens),
                len(tokens) + len(text),
                text,
                "ok, go on",
                0.0,
                "stop",
                1.0,
                0.5,
                len(tokens),
                len(text),
                1000.5 + 2 * turn,
                f"server-{number % 2}",
            )
        )
        answer = "" if turn == TURNS - 1 else "ok, go on"
        tokens += [IDS[c] for c in text + answer]
        mask += [1] * len(text) + [0] * len(answer)
        messages += [{"role": "assistant", "content": text}, *([{"role": "user", "content": answer}] if answer else [])]
    shape = np.array(mask, np.bool_)
    logprobs = np.where(shape, -np.random.default_rng(number).exponential(1.0, len(tokens)), 0).astype(np.float32)
    return Trajectory(
        "EPISODE", "GROUP", Task("TASK", f"Sum-v{number % 3}", number), np.array(tokens, np.int32), shape, logprobs,
        np.where(shape, 3, -1).astype(np.int32), tuple(turns), tuple(messages), reward=number % 10 / 10,
        success=number % 10 > 4, end="terminated", prompt_length=len(prompt), started_s=1000.5, finished_s=1008.5,
        info={"rewards": {"correct": 1.0}},
    )  # fmt: skip


def _write_step(
    run_dir: RunDir,
    step: int,
    lines: list[bytes],
    failed: bytes,
    draw: random.Random,
    metrics: MetricsLog,
    journal: Journal,
) -> None:
    begin_s, batches = BEGIN_S + step * STEP_S, []
    with (run_dir.episodes / f"step_{step:06d}.jsonl").open("wb") as file:
        for group in range(PER_STEP // REPLICAS):
            name = f"g{step * (PER_STEP // REPLICAS) + group:08d}"
            members = []
            for replica in range(REPLICAS):
                number = draw.randrange(len(lines))
                is_failed = draw.random() < FAILED
                line = _at(failed if is_failed else lines[number], name, replica, begin_s + draw.random() * STEP_S)
                file.write(with_checksum(b'{"step":%d,' % step + line[1:]) + b"\n")
                if not is_failed:
                    members.append([f"{name}-r{replica}", number % 10 / 10])
            batches.append([name, members])
    journal.write({"event": "trained", "version": step + 1, "batches": [batches], "without_rows": []})
    work = [("accumulate", begin_s + 4 * n, begin_s + 4 * n + 3, 2000) for n in range(4)]
    spans = {
        "publication": {"version": step, "begin_s": begin_s, "end_s": begin_s + 2},
        "learner": [*work, ("update", begin_s + 17, begin_s + 19, 0)],
    }
    run_dir.log_timeline({"step": step + 1, "started_s": begin_s, "ended_s": begin_s + STEP_S, **spans})
    names = (
        "reward",
        "success",
        "staleness_mean",
        "staleness_max",
        "tokens_per_s",
        "step_s",
        "kl_k3",
        "idle/learner",
        "idle/servers",
    )
    others = {f"books/figure_{n}": float(n) for n in range(70)}
    metrics.log(step + 1, {**{name: 0.5 + 0.3 * math.sin(step / 50 + len(name)) for name in names}, **others})


def _at(line: bytes, group: str, replica: int, started_s: float) -> bytes:
    """The line of a prototype as another episode, at another time."""
    line = line.replace(b"EPISODE", f"{group}-r{replica}".encode()).replace(b"GROUP", group.encode())
    line = line.replace(b"TASK", f"Sum-v0:{group[1:]}".encode()).replace(b"worker W", b"worker %d" % (replica % 4))
    for second in (0.5, 2.5, 4.5, 6.5, 8.5):
        line = line.replace(b":%.1f" % (1000 + second), b":%.3f" % (started_s + second - 0.5))
    return line.replace(
        b'"started_s":1.5,"finished_s":2.5', b'"started_s":%.3f,"finished_s":%.3f' % (started_s, started_s + 60)
    )


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Yield its process and its address, when it has printed that."""
    command = [sys.executable, "-m", "roll_flash", "dash", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield psutil.Process(program.pid), program.stdout.readline().split(": ", 1)[1].strip()
        finally:
            program.terminate()


def measure(folder: Path, episodes: int) -> dict[str, Any]:
    with dashboard(folder) as (process, address), httpx.Client(timeout=600, follow_redirects=True) as client:
        client.get(address)
        base, peak = address.partition("/?")[0] + "/api/", 0
        began, began_cpu_s = time.monotonic(), _cpu_s(process)
        while not (counts := client.get(base + "counts", params={"run": "large"}).json())["is_complete"]:
            peak = max(peak, process.memory_info().rss)
        index_s = time.monotonic() - began
        assert counts["episodes"] == episodes, counts
        cpu_s = _cpu_s(process) - began_cpu_s
        figures: dict[str, Any] = {"episodes_per_s": episodes / index_s, "episodes_per_cpu_s": episodes / cpu_s}
        for name, path, query in _requests(episodes):
            took, cpu_s = [], _cpu_s(process)
            for _ in range(REPEATS):
                began = time.monotonic()
                client.get(base + path, params={"run": "large", **query}).raise_for_status()
                took.append(1000 * (time.monotonic() - began))
            figures[f"{name}_ms"] = _figure(took)
            figures[f"{name}_cpu_ms"] = 1000 * (_cpu_s(process) - cpu_s) / REPEATS
            peak = max(peak, process.memory_info().rss)
        figures |= _search(client, base, episodes)
        figures["memory_mb"] = max(peak, process.memory_info().rss) / 2**20
        if program := shutil.which("chromium"):
            figures |= _in_browser(program, address, episodes)
            figures["memory_mb"] = max(figures["memory_mb"], process.memory_info().rss / 2**20)
    return figures


def _cpu_s(process: psutil.Process) -> float:
    """Processor seconds so far: beside other work they say more than seconds."""
    times = process.cpu_times()
    return times.user + times.system


def _requests(episodes: int) -> list[tuple[str, str, dict[str, Any]]]:
    last = episodes // PER_STEP // 2
    middle = BEGIN_S + last * STEP_S
    return [
        ("runs", "runs", {}),
        ("metrics", "metrics", {"name": ["reward", "success", "kl_k3", "idle/learner", "step_s"]}),
        ("episodes", "episodes", {}),
        ("episodes_sorted", "episodes", {"sort": "reward"}),
        ("episodes_far", "episodes", {"offset": episodes - 100}),
        ("episodes_filtered", "episodes", {"env": "Sum-v1", "min_reward": 0.5, "sort": "tokens"}),
        ("episode", "episode", {"id": f"g{last:08d}-r0"}),
        ("group", "group", {"group": f"g{last:08d}"}),
        ("failures", "counts", {}),
        ("timeline", "timeline", {}),
        ("timeline_episodes", "timeline", {"begin": middle, "end": middle + 10 * STEP_S}),
        ("timeline_turns", "timeline", {"begin": middle, "end": middle + 8}),
    ]


def _search(client: httpx.Client, base: str, episodes: int) -> dict[str, Any]:
    """A text that nothing has: every conversation is read. Each request searches for a bounded time."""
    took, searched = [], 0
    while searched < episodes:
        began = time.monotonic()
        searched = client.get(base + "episodes", params={"run": "large", "text": "nowhere"}).json()["searched"]
        took.append(1000 * (time.monotonic() - began))
    return {"search_slice_ms": _figure(took), "search_all_s": sum(took) / 1000}


def _in_browser(program: str, address: str, episodes: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--disable-gpu", "--disable-dev-shm-usage", *sandbox]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        page.wait_for_selector("main[data-shown=runs]")
        base = address.partition("?")[0]
        figures: dict[str, Any] = {}
        for view in ("overview", "episodes", "timeline"):
            paints = []
            for _ in range(5):
                page.goto(f"{base}?run=large&view={view}")
                page.wait_for_selector(f"main[data-shown={view}]")
                paints.append(
                    page.evaluate(
                        "[performance.getEntriesByName('first-contentful-paint')[0].startTime, performance.now()]"
                    )
                )
            figures[f"{view}_first_paint_ms"] = _figure([first for first, _ in paints])
            figures[f"{view}_complete_ms"] = _figure([whole for _, whole in paints])
        figures |= _interactions(page, base, episodes)
        browser.close()
    return figures


TIMED = """async ([selector, action, value]) => {
  const main = document.querySelector("main"), target = document.querySelector(selector);
  const before = main.innerHTML.length + main.innerText;
  const began = performance.now();
  if (action === "scroll") target.scrollTop = value;
  else if (action === "key") target.dispatchEvent(new KeyboardEvent("keydown", { key: value }));
  else if (action === "click") target.click();
  for (;;) {
    await new Promise((done) => requestAnimationFrame(done));
    const isNew = main.innerHTML.length + main.innerText !== before;
    if (isNew && !/^…$/m.test(main.innerText)) return performance.now() - began;
    if (performance.now() - began > 10000) throw new Error(`${selector} ${action} changed nothing`);
  }
}"""
"""From an action to the first frame in which the page shows its result."""


def _interactions(page: Any, base: str, count: int) -> dict[str, Any]:
    def timed(view: str, make: Callable[[int], list[Any]]) -> dict[str, float]:
        page.goto(f"{base}?run=large&view={view}")
        page.wait_for_selector(f"main[data-shown={view}]")
        return _figure([page.evaluate(TIMED, make(number)) for number in range(REPEATS)])

    return {
        "scroll_ms": timed("episodes", lambda n: [".scroll", "scroll", (n * 7919 % 997 + 100) / 1200 * 35 * count]),
        "sort_ms": timed("episodes", lambda n: [f".row.head span:nth-child({4 + n % 3}) button", "click", None]),
        "tab_ms": timed("episodes", lambda n: [f"header nav a:nth-child({2 + (n + 1) % 3})", "click", None]),
    }


def _figure(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)}


ROWS = {
    "Milliseconds, in Chromium": {
        "overview_first_paint_ms": ("first paint of the overview", 1000),
        "episodes_first_paint_ms": ("first paint of the episodes", 1000),
        "timeline_first_paint_ms": ("first paint of the timeline", 1000),
        "overview_complete_ms": ("the overview is complete", None),
        "episodes_complete_ms": ("the episodes are complete", None),
        "timeline_complete_ms": ("the timeline is complete", None),
        "scroll_ms": ("scroll to another place of the table", 100),
        "sort_ms": ("sort the table", 100),
        "tab_ms": ("another view", 100),
    },
    "Milliseconds of an answer of the server": {
        "runs_ms": ("list of runs", 100),
        "metrics_ms": ("metrics", 100),
        "episodes_ms": ("first episodes", 100),
        "episodes_sorted_ms": ("sorted", 100),
        "episodes_far_ms": ("last of all", 100),
        "episodes_filtered_ms": ("filtered", 100),
        "episode_ms": ("one episode", 100),
        "group_ms": ("a group of ten", 100),
        "failures_ms": ("failures", 100),
        "timeline_ms": ("timeline, whole", 100),
        "timeline_episodes_ms": ("timeline, 1,000 episodes", 100),
        "timeline_turns_ms": ("timeline, single turns", 100),
        "search_slice_ms": ("a slice of a search in all conversations", 100),
    },
}
"""What the page shows of the figures that have a mean, a lowest and a highest value, with the goal for the mean."""


def as_markdown(report: dict[str, Any]) -> str:
    plain, compressed = report["plain"], report["compressed"]
    head = "| what | lowest | mean | highest | goal of the mean | mean, compressed |\n|---|---|---|---|---|---|"
    lines = [
        "# The dashboard with a large run",
        "",
        f"`python benchmarks/dashboard.py` on {report['machine']}; load before it {report['load_before']:.1f}.",
        "",
        f"A generated run of {report['episodes'] // PER_STEP:,} steps and {report['episodes']:,} episodes of four "
        f"turns, {plain['mb']:,.0f} MB of episodes; {compressed['mb']:,.0f} MB when finished steps are compressed, as "
        "runs do by default.",
        "",
        "| what | plain | compressed | goal |",
        "|---|---|---|---|",
    ]
    for name, what, form, goal in (
        ("episodes_per_s", "episodes indexed per second", ",.0f", "50,000, or pages meanwhile: they are shown"),
        ("memory_mb", "largest resident memory of the server, MB", ".0f", "500"),
        ("search_all_s", "a text that nothing has, searched in all conversations, s", ".1f", ""),
    ):
        both = " | ".join(format(variant["figures"][name], form) for variant in (plain, compressed))
        lines.append(f"| {what} | {both} | {goal} |")
    for title, rows in ROWS.items():
        lines += ["", f"{title}:", "", head]
        for name, (what, goal) in rows.items():
            if (found := plain["figures"].get(name)) is None:  # no Chromium
                continue
            cells = [f"{found[key]:,.0f}" for key in ("low", "mean", "high")]
            cells += [f"{goal:,}" if goal else "", f"{compressed['figures'][name]['mean']:,.0f}"]
            lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EPISODES:,} episodes; prints, writes nothing")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the run here, compressed")
    options = parser.parse_args()
    episodes = QUICK_EPISODES if options.quick else EPISODES
    report: dict[str, Any] = {"machine": machine(), "episodes": episodes, "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as scratch:
        folder = generate(Path(options.keep or scratch), episodes)
        for variant in ("plain", "compressed"):
            for path in step_files(folder / "episodes")[:-1] if variant == "compressed" else ():
                compress_step(path)
            size = sum(path.stat().st_size for path in (folder / "episodes").iterdir())
            report[variant] = {"mb": size / 2**20, "figures": measure(folder, episodes)}
    page = as_markdown(report)
    print(page)
    if not options.quick:
        (RESULTS / "dashboard.json").write_text(json.dumps(report, indent=2) + "\n")
        (RESULTS / "dashboard.md").write_text(page)


if __name__ == "__main__":
    main()
