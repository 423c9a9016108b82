"""One run, kept alive, that is hit by one fault after the other, and what must hold after each.

After a fault the run trains a step, `roll-flash verify` finds nothing wrong, and no process has lost its parent. After
a shutdown nothing is left on the machine; after the last one the books balance and no temporary file is left either.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.errors import RollFlashError
from roll_flash.evaluation.journal import RESULTS_FILE
from roll_flash.monitor.metrics import STEP_S, read_metrics
from roll_flash.processes.supervise import end_with_parent
from roll_flash.run.verify import verify_run
from roll_flash.sandboxes.owner import LABEL_OWNER, Owner
from roll_flash.summary import check_counts
from tests.chaos.faults import PARTS, Case, Moment, inject
from tests.chaos.surroundings import ROOT, Surroundings
from tests.leaks import Session, describe_process

START_S, RECOVERY_S, STOP_S, ORPHAN_S = 900.0, 600.0, 300.0, 120.0
"""Maximum time in seconds of a start, of a recovery, of an end, and of a process whose parent was killed."""
EPISODE_S, EVALUATION_S, START_PART_S, SHUTDOWN_S = 2.0, 0.5, 3.0, 2.0
"""A fault comes at most so many seconds after the beginning of its moment."""
POLL_S, MOMENT_POLL_S = 0.1, 0.01
CLOSE_S = 60.0
TAIL_BYTES = 1 << 16
CHECKPOINT_EVERY, EVALUATION_EVERY = 4, 8
GROUPS_PER_STEP = 2
"""Half of CONFIG's: each fault waits for a moment of a step, and for the end of another."""
CONFIG = "configs/ci.yaml"
"""The tiny model."""


_OWNER = re.compile(re.escape(LABEL_OWNER) + r"=(\S+)")


class BrokenError(Exception):
    """Something did not hold."""


@dataclass(frozen=True)
class Outcome:
    """A fault and where its time went."""

    part: str
    fault: str
    moment: str
    seed: int
    waited_s: float
    """Until its moment."""
    lasted_s: float
    recovered_s: float
    """From its end to the end of the next step, with a new start after a shutdown."""
    checked_s: float
    restarts: int
    """How often the run was started again because of it."""


class Campaign:
    """Raises BrokenError for what does not hold."""

    def __init__(
        self, folder: Path, surroundings: Surroundings, *, vllm: bool, longest_s: float, config: str = CONFIG
    ) -> None:
        """`longest_s`: most seconds of faults that pass by themselves."""
        self.surroundings = surroundings
        self.folder = surroundings.runs / "chaos"
        self._longest_s = longest_s
        self._log = folder / "output.txt"
        self._environment = {**os.environ, **surroundings.environment}
        self._session = Session.begin(self._environment)
        self._arguments = [
            config,
            "name=chaos",
            f"runs={surroundings.runs}",
            "envs.0.max_turns=3",
            f"scheduler.groups_per_step={GROUPS_PER_STEP}",
            "eval.before_and_after=false",
            "eval.tasks=4",
            f"eval.every={EVALUATION_EVERY}",
            f"checkpoint.every={CHECKPOINT_EVERY}",
            "checkpoint.keep=2",
            "rollout.heartbeat_timeout_s=20",
            *([] if vllm else ["inference.engine=transformers"]),
        ]
        self._parent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        before = self.steps()
        goes_on = ["--resume"] if before else []
        self._parent = self._command("train", *self._arguments, "steps=1000000", "--keep-alive", *goes_on)
        self._wait("the first step", START_S, lambda: self.steps() > before)

    def steps(self) -> int:
        """Number of the newest step."""
        found = 0
        with suppress(FileNotFoundError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            for line in file.read().splitlines():
                with suppress(ValueError):  # the first line was cut off, the last one is being written
                    row = json.loads(line)
                    found = max(found, row["step"] if STEP_S in row else 0)
        return found

    def strike(self, case: Case) -> Outcome:
        """Wait for the moment, strike, wait until another step was trained, and check what must hold."""
        starts, times = self._starts(), [time.monotonic()]

        def lap() -> float:
            times.append(time.monotonic())
            return times[-1] - times[-2]

        self._reach(case)
        waited_s = lap()
        try:
            inject(case, self, self._longest_s)
        except TimeoutError as error:
            if case.moment is not Moment.SHUTDOWN:  # then its part may have ended before
                raise BrokenError(f"{case}: {error}; the run's last words:\n{self._last_words()}") from None
        lasted_s = lap()
        if case.moment is Moment.SHUTDOWN:
            self._end_with_a_fault()
        after = self.steps()
        self._wait(f"a step after {case}", RECOVERY_S, lambda: self.steps() > after)
        recovered_s = lap()
        self._verify()
        self._look_for_orphans()
        checked_s = lap()
        laps = (round(seconds, 2) for seconds in (waited_s, lasted_s, recovered_s, checked_s))
        return Outcome(case.part, case.fault, case.moment, case.seed, *laps, self._starts() - starts)

    def end(self, *, goes_on: bool = True) -> dict[str, Any]:
        """Stop the run, resume it for a step if it `goes_on`, and return the books."""
        code = self._interrupt()
        if code != 130:
            raise BrokenError(f"Ctrl-C ended the run with exit code {code}; its last words:\n{self._last_words()}")
        if goes_on:
            last = self._command("train", *self._arguments, f"steps={self.steps() + 1}", "--resume")
            if (code := self._end_of(last, START_S)) != 0:
                raise BrokenError(f"the last step ended with exit code {code}:\n{self._last_words()}")
        self._verify()
        self._look_for_leaks()
        if goes_on and (left := sorted(path.name for path in self.surroundings.temporary.iterdir())):
            raise BrokenError(f"temporary files left behind: {', '.join(left)}")
        return self._books()

    def close(self) -> None:
        """End what is left of the run."""
        if self._parent is None:
            return
        self._parent.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._parent.wait(CLOSE_S)
        self._parent.kill()
        self._parent.wait()
        deadline = time.monotonic() + CLOSE_S
        while (left := list(self._own())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """See `faults.Run`."""
        return [(pid, command) for pid, command in self._own() if any(text in command for text in names)]

    def _own(self) -> Iterator[tuple[int, str]]:
        """Yield all processes of the run but the one that keeps it alive."""
        assert self._parent is not None
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                is_own = self._session.marker.encode() in (path / "environ").read_bytes()
                if is_own and int(path.name) != self._parent.pid:
                    yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def _reach(self, case: Case) -> None:
        draw = random.Random(case.seed)
        match case.moment:
            case Moment.EPISODE:
                time.sleep(draw.uniform(0, EPISODE_S))
            case Moment.UPDATE:
                self._wait_for_moment(case, self._journal_grows_by(b'"trained"'))
            case Moment.PUBLICATION:
                before = self.steps()
                self._wait_for_moment(case, lambda: self.steps() > before)
            case Moment.CHECKPOINT:
                self._wait_for_moment(case, lambda: any(self.folder.glob("checkpoints/step_*.partial")))
            case Moment.EVALUATION:
                self._wait_for_moment(case, self._evaluates)
                time.sleep(draw.uniform(0, EVALUATION_S))
            case Moment.START:
                self._restart_driver()
                if case.part in PARTS:
                    self._wait(f"a process of {case.part}", START_S, lambda: bool(self.processes(PARTS[case.part])))
                time.sleep(draw.uniform(0, START_PART_S))
            case Moment.SHUTDOWN:
                assert self._parent is not None
                self._parent.send_signal(signal.SIGINT)
                time.sleep(draw.uniform(0, SHUTDOWN_S))

    def _wait_for_moment(self, case: Case, condition: Callable[[], bool]) -> None:
        self._wait(f"the moment of {case}", RECOVERY_S, condition, MOMENT_POLL_S)

    def _journal_grows_by(self, text: bytes) -> Callable[[], bool]:
        def newest() -> Path:
            return max(self.folder.glob("journal/after_step_*.jsonl"))  # older ones are compressed at any time

        file_before = newest()
        size_before = file_before.stat().st_size

        def look() -> bool:
            with (path := newest()).open("rb") as file:
                file.seek(size_before if path == file_before else 0)
                return text in file.read()

        return look

    def _evaluates(self) -> bool:
        folders = self.folder.glob("eval/step_*")
        return any(re.fullmatch(r"step_\d+", one.name) and not any(one.rglob(RESULTS_FILE)) for one in folders)

    def _restart_driver(self) -> None:
        """Kill the driver, and wait until its whole run is gone."""
        old = {pid for pid, _ in self._own()}
        for pid, _ in self.processes(PARTS["driver"]):
            os.kill(pid, signal.SIGKILL)
        self._wait("end of the killed run", STOP_S, lambda: not old & {pid for pid, _ in self._own()})

    def _end_with_a_fault(self) -> None:
        """Wait for the end of a shutdown, which may have failed, and start the run again."""
        assert self._parent is not None
        self._end_of(self._parent)
        self._verify()
        self._look_for_leaks()
        self._parent = None
        self.start()

    def _interrupt(self) -> int:
        assert self._parent is not None
        self._parent.send_signal(signal.SIGINT)
        return self._end_of(self._parent)

    def _command(self, *words: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "roll_flash", *words],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
            )

    def _end_of(self, process: subprocess.Popen[bytes], timeout_s: float = STOP_S) -> int:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BrokenError(f"no end within {timeout_s:g} s:\n{self._last_words()}") from None

    def _wait(self, what: str, timeout_s: float, condition: Callable[[], bool], poll_s: float = POLL_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._parent is not None and self._parent.poll() is not None:
                raise BrokenError(f"the run ended before {what}:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise BrokenError(f"no {what} within {timeout_s:g} s:\n{self._last_words()}")
            time.sleep(poll_s)

    def _verify(self) -> None:
        try:
            findings = verify_run(self.folder)
        except RollFlashError as error:
            raise BrokenError(str(error)) from None
        if wrong := [finding for finding in findings if not finding.ok]:
            raise BrokenError("; ".join(f"{finding.check}: {finding.detail}" for finding in wrong))

    def _look_for_orphans(self) -> None:
        """Nothing may outlive a part that was killed beside it."""
        deadline = time.monotonic() + ORPHAN_S
        while orphans := self._orphans():
            if time.monotonic() > deadline:
                raise BrokenError("without a parent: " + "; ".join(describe_process(pid) for pid in orphans))
            time.sleep(POLL_S)

    def _orphans(self) -> list[int]:
        """A watchdog of containers has left its controller on purpose, and ends with it."""
        assert self._parent is not None
        parents = {pid: _parent(pid) for pid, command in self._own() if not _watches_a_living_one(command)}
        return [pid for pid, parent in parents.items() if parent not in (*parents, self._parent.pid, None)]

    def _look_for_leaks(self) -> None:
        if leaks := self._session.leaks():
            raise BrokenError("left behind: " + "; ".join(leaks))

    def _books(self) -> dict[str, Any]:
        last = [row for row in read_metrics(self.folder) if STEP_S in row][-1]
        counts = {name.removeprefix("books/"): value for name, value in last.items() if name.startswith("books/")}
        books = check_counts(counts)
        if not books["balance"]:
            raise BrokenError(f"the books do not balance: {books}")
        return books

    def _starts(self) -> int:
        return self._log.read_text(errors="replace").count("starting it again in")

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])


def _watches_a_living_one(command: str) -> bool:
    return (
        "docker/watchdog.py" in command
        and (found := _OWNER.search(command)) is not None
        and Owner.parse(found[1]).lives()
    )


def _parent(pid: int) -> int | None:
    with suppress(OSError):  # it has just ended
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None
