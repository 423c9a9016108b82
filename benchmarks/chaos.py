"""Faults in every part of a run, at random moments, and what must hold after each of them.

    python benchmarks/chaos.py [--faults 40] [--seed 0] [--only PART:FAULT ...] [--vllm] [--quick] [--json]

A run of the tiny model with sandboxes, kept alive (`roll-flash train --keep-alive`), is hit again and again: a fault is
drawn from FAULTS with the seed, at a random moment of a step, of a start or of a checkpoint. A fault is over when the
run has trained a step after it; then `roll-flash verify` must find nothing wrong. At the end the run is stopped with
Ctrl-C and resumed for one more step: its books must balance, and nothing may be left on the machine. The first thing
that does not hold ends the campaign with its seed and the number of the fault. `--quick` is one short fault of each
kind in QUICK and writes nothing; else results go to `benchmarks/results/chaos.{json,md}`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from leaks import Session  # noqa: E402

from roll_flash.monitor.metrics import STEP_S, read_metrics  # noqa: E402
from roll_flash.run.verify import verify_run  # noqa: E402
from roll_flash.sandboxes import list_sandboxes  # noqa: E402

RESULTS = Path(__file__).parent / "results"
START_S, RECOVERY_S, STOP_S = 400.0, 400.0, 120.0
"""Maximum time in seconds of a start, of a recovery, and of an end."""
POLL_S = 0.1
LONGEST_STOP_S, LONGEST_QUICK_STOP_S = 20.0, 3.0
"""Maximum duration in seconds of a SIGSTOP that passes by itself."""
PARTS = {
    "driver": ("-m roll_flash train",),
    "worker": ("ray::WorkerActor",),
    "learner": ("ray::LearnerRank",),
    "server": ("vllm.entrypoints.openai.api_server", "roll_flash.inference.transformers.server"),
    "host of a server": ("ray::ServerHost",),
    "raylet": ("raylet/raylet ",),
    "control store": ("gcs/gcs_server ",),
    "guard of sandboxes": ("roll_flash/sandboxes/docker/watchdog.py",),
}
"""What the command lines of a part's processes contain."""
KILL, TERM, STOP, NO_FILES, PAUSE, FULL = "kill -9", "SIGTERM", "SIGSTOP", "no file descriptors", "pause", "full"
FAULTS = [
    *((part, KILL) for part in PARTS),
    *((part, STOP) for part in PARTS),
    *((part, TERM) for part in PARTS if part != "driver"),  # of a driver it means: stop
    *((part, NO_FILES) for part in ("driver", "worker", "learner", "server")),
    ("sandbox", KILL),
    ("sandbox", PAUSE),
    ("disk", FULL),
]
QUICK = [
    *((part, fault) for part, fault in FAULTS if part in ("worker", "server", "sandbox", "guard of sandboxes")),
    *((part, fault) for part in ("learner", "driver") for fault in (STOP, NO_FILES, KILL)),
    ("disk", FULL),
]


class BrokenError(Exception):
    """Something did not hold."""


@dataclass(frozen=True)
class Outcome:
    """A fault and what came of it. `recovered_s`: from its end to the end of the next step."""

    number: int
    part: str
    fault: str
    waited_s: float
    """Time from the end of a step to the fault."""
    lasted_s: float
    recovered_s: float
    restarts: int
    """How often the run was started again."""


class Campaign:
    """One run, kept alive. Raises BrokenError for what does not hold."""

    def __init__(self, runs: Path, seed: int, *, vllm: bool, longest_stop_s: float) -> None:
        self.folder = runs / "chaos"
        self._runs = runs
        self._draw = random.Random(seed)
        self._longest_stop_s = longest_stop_s
        self._log = runs / "output.txt"
        self._environment = dict(os.environ)
        self._session = Session.begin(self._environment)
        self._arguments = [
            "configs/ci.yaml",
            "name=chaos",
            f"runs={runs}",
            "envs.0.max_turns=3",
            "eval.before_and_after=false",
            "checkpoint.every_minutes=1",
            "rollout.heartbeat_timeout_s=10",
            *([] if vllm else ["inference.engine=transformers"]),
        ]
        self._parent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._parent = self._command("train", *self._arguments, "steps=100000", "--keep-alive")
        self._wait("the first step", START_S, lambda: self.steps() > 0)

    def steps(self) -> int:
        return max((int(row["step"]) for row in read_metrics(self.folder) if STEP_S in row), default=0)

    def strike(self, number: int, part: str, fault: str) -> Outcome:
        """Let a step end, strike some time later, and wait until another step was trained."""
        before = self.steps()
        self._wait("a step", RECOVERY_S, lambda: self.steps() > before)
        waited = self._draw.uniform(0.0, 3.0)
        time.sleep(waited)
        starts = self._starts()
        began = time.monotonic()
        self._inject(part, fault)
        over = time.monotonic()
        after = self.steps()
        self._wait(f"a step after {fault} of {part}", RECOVERY_S, lambda: self.steps() > after)
        recovered = time.monotonic() - over
        self._verify()
        return Outcome(number, part, fault, waited, over - began, recovered, self._starts() - starts)

    def end(self) -> dict[str, Any]:
        """Stop the run, resume it for a step, and return its summary."""
        assert self._parent is not None
        self._parent.send_signal(signal.SIGINT)
        code = self._end_of(self._parent)
        if code != 130:
            raise BrokenError(f"Ctrl-C ended the run with exit code {code}; its last words:\n{self._last_words()}")
        last = self._command("train", *self._arguments, f"steps={self.steps() + 1}", "--resume")
        if (code := self._end_of(last, START_S)) != 0:
            raise BrokenError(f"the last step ended with exit code {code}:\n{self._last_words()}")
        self._verify()
        if leaks := self._session.leaks():
            raise BrokenError("left behind: " + "; ".join(leaks))
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        books = summary["books"]
        dropped = sum(count for name, count in books.items() if name.startswith("dropped_"))
        if books["produced"] != books["trained"] + dropped + books["waiting"]:
            raise BrokenError(f"the books do not balance: {books}")
        return summary

    def close(self) -> None:
        if self._parent is not None and self._parent.poll() is None:
            self._parent.kill()  # its run ends with it
            self._parent.wait()

    def _command(self, *words: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "roll_flash", *words],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _end_of(self, process: subprocess.Popen[bytes], timeout_s: float = STOP_S) -> int:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BrokenError(f"no end within {timeout_s:g} s:\n{self._last_words()}") from None

    def _wait(self, what: str, timeout_s: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._parent is not None and self._parent.poll() is not None:
                raise BrokenError(f"the run ended before {what}:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise BrokenError(f"no {what} within {timeout_s:g} s:\n{self._last_words()}")
            time.sleep(POLL_S)

    def _verify(self) -> None:
        if wrong := [finding for finding in verify_run(self.folder) if not finding.ok]:
            raise BrokenError("; ".join(f"{finding.check}: {finding.detail}" for finding in wrong))

    def _starts(self) -> int:
        return self._log.read_text().count("starting it again in")

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-12:])

    def _inject(self, part: str, fault: str) -> None:
        if part == "disk":
            return fill(self._runs, self._draw.uniform(0.5, 3.0))
        if part == "sandbox":
            return self._hit_sandbox(fault)
        found = self._processes(part)
        if not found:  # it is being started again
            return None
        pid = self._draw.choice(found)
        with suppress(ProcessLookupError):
            if fault in (KILL, TERM):
                os.kill(pid, signal.SIGKILL if fault == KILL else signal.SIGTERM)
            elif fault == STOP:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._draw.uniform(0.5, self._longest_stop_s))
                os.kill(pid, signal.SIGCONT)
            elif fault == NO_FILES:
                with no_more_files(pid):
                    time.sleep(self._draw.uniform(0.5, 5.0))
        return None

    def _processes(self, part: str) -> list[int]:
        return [pid for pid, command in self._own_processes() if any(text in command for text in PARTS[part])]

    def _own_processes(self) -> Iterator[tuple[int, str]]:
        assert self._parent is not None
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._session.marker.encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if int(path.name) != self._parent.pid:
                        yield int(path.name), command

    def _hit_sandbox(self, fault: str) -> None:
        drivers = set(self._processes("worker"))
        names = [one.name for one in list_sandboxes() if one.kind == "container" and owner_pid(one.owner) in drivers]
        if not names:
            return
        name = self._draw.choice(names)
        if fault == KILL:
            docker("kill", name)
        else:
            docker("pause", name)
            time.sleep(self._draw.uniform(0.5, 5.0))
            docker("unpause", name)


def owner_pid(owner: str) -> int | None:
    from roll_flash.sandboxes.owner import Owner

    try:
        return Owner.parse(owner).pid
    except ValueError:
        return None


def docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=False, capture_output=True, timeout=60)  # it may have ended meanwhile


@contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """A process can open nothing: no file, no socket."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def fill(folder: Path, seconds: float) -> None:
    """Leave no byte on the disk of a folder for a while."""
    path = folder / "filler"
    try:
        with suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(seconds)
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[bool]:
    """A disk of its own at `folder`; yield false where it cannot be mounted, which only root can."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "chaos", str(folder)], check=False, capture_output=True
    )
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def plan(
    kinds: list[tuple[str, str]], count: int, seed: int, only: list[str], *, has_disk: bool
) -> list[tuple[str, str]]:
    """Draw the faults: each kind once before any comes again."""
    kinds = [(part, fault) for part, fault in kinds if part != "disk" or has_disk]
    kinds = [(part, fault) for part, fault in kinds if not only or f"{part}:{fault}" in only]
    draw = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < count:
        draw.shuffle(kinds)
        found += kinds
    return found[:count]


def run(count: int | None, seed: int, only: list[str], *, vllm: bool) -> dict[str, Any]:
    """Run a campaign of `count` faults, None for that of `--quick`; return its outcomes and its run's books. Raises
    BrokenError with its seed."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder), 1200) as has_disk:
        kinds, longest_stop_s = (QUICK, LONGEST_QUICK_STOP_S) if count is None else (FAULTS, LONGEST_STOP_S)
        campaign = Campaign(Path(folder), seed, vllm=vllm, longest_stop_s=longest_stop_s)
        fault = ("", "")
        try:
            campaign.start()
            faults = plan(kinds, count or len(only or kinds), seed, only, has_disk=has_disk)
            for number, fault in enumerate(faults):
                outcomes.append(campaign.strike(number, *fault))
                print(json.dumps(asdict(outcomes[-1])), file=sys.stderr, flush=True)
            fault = ("", "")
            summary = campaign.end()
        except BrokenError as error:
            at = f"fault {len(outcomes)} ({fault[0]}: {fault[1]})" if fault[0] else "the end"
            raise BrokenError(f"seed {seed}, {at}: {error}") from None
        finally:
            campaign.close()
    return {"outcomes": [asdict(outcome) for outcome in outcomes], "books": summary["books"], "seed": seed}


def rows(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per kind of fault: how many, how often the run was started again, and how long it took."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        kinds[outcome["part"], outcome["fault"]].append(outcome)
    return [
        {
            "part": part,
            "fault": fault,
            "faults": len(found),
            "restarts": sum(one["restarts"] for one in found),
            "median_s": round(statistics.median(one["recovered_s"] for one in found), 1),
            "max_s": round(max(one["recovered_s"] for one in found), 1),
        }
        for (part, fault), found in sorted(kinds.items())
    ]


def table(result: dict[str, Any]) -> str:
    head = "| part | fault | faults | starts of the run | s to the next step, median | max |\n|---|---|---|---|---|---|"
    names = ("part", "fault", "faults", "restarts", "median_s", "max_s")
    lines = [f"| {' | '.join(str(one[name]) for name in names)} |" for one in result["rows"]]
    return "\n".join([head, *lines])


def save(result: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "chaos.json").write_text(json.dumps(result, indent=2) + "\n")
    total = sum(row["faults"] for row in result["rows"])
    text = (
        f"# Faults\n\n`python benchmarks/chaos.py --faults {total} --seed {result['seed']}` on {result['machine']}: "
        f"{total} faults in one run of the tiny model ({result['engine']}, Docker sandboxes). After each one "
        "`roll-flash verify` found nothing wrong; at the end the books balanced and nothing was left behind.\n\n"
    )
    (RESULTS / "chaos.md").write_text(f"{text}{table(result)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART:FAULT")
    parser.add_argument("--vllm", action="store_true", help="vLLM in the place of the engine for tiny models")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    faults = None if arguments.quick else arguments.faults
    try:
        found = run(faults, arguments.seed, arguments.only, vllm=arguments.vllm)
    except BrokenError as error:
        sys.exit(f"BROKEN: {error}")
    result = {
        "benchmark": "chaos",
        "machine": machine(),
        "seed": arguments.seed,
        "engine": "vLLM" if arguments.vllm else "the engine for tiny models",
        "rows": rows(found["outcomes"]),
        "books": found["books"],
    }
    if not arguments.quick:
        save(result)
    print(json.dumps(result) if arguments.json else f"{result['machine']}\n{table(result)}")


if __name__ == "__main__":
    main()
