"""Runs groups of checks, each in a process of its own, which may crash or hang without taking the others with it.

Invariants: every check of every group gets one result; no process of a group remains when its last result is there; a
check that runs longer than its deadline is ended with its process, and the rest of its group goes on in a new one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import roll_flash
from roll_flash.gpu_check.check import Check, Group, Result
from roll_flash.gpu_check.settings import Settings
from roll_flash.processes.gpus import VISIBLE, visible_gpus
from roll_flash.processes.nvml import read_driver
from roll_flash.processes.supervise import GuardedProcess

START_S = 120.0
"""Maximum time in seconds from the start of a process to its first check."""
CLOSE_S = 90.0
"""Maximum time in seconds in which a group stops what it has opened."""
STILL_EVERY_S = 20.0
"""Interval in seconds of the lines that say what is still waited for."""
POLL_S = 0.1
LOG_LINES = 25

Say = Callable[[str], None]


class Runner:
    def __init__(self, settings: Settings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._began = time.monotonic()
        self._work = settings.output / "logs"
        self._work.mkdir(exist_ok=True)
        self._environment = _environment(settings.output)

    def run(self, groups: Sequence[Group]) -> Iterator[Result]:
        """Yield a result for each check, in order, as soon as it is there."""
        for group in groups:
            for result in self._group(group):
                self._report(result)
                earlier = {**self._settings.earlier, result.name: result.figures}
                self._settings = replace(self._settings, earlier=earlier)
                yield result

    def _group(self, group: Group) -> Iterator[Result]:
        if group.not_possible:
            yield from (_result(group, check, "not possible", group.not_possible) for check in group.rows)
            return
        has_opened, left = False, list(group.checks)
        while left:
            process = _Process(replace(group, checks=tuple(left)), self._settings, self._environment, self)
            for result in process.results():
                if group.opens is not None and result.name == group.opens.name:
                    if has_opened and result.status == "passed":  # it was opened again after a crash
                        continue
                    yield result if not has_opened else replace(result, name=f"{result.name}, again")
                    if result.status != "passed":
                        reason = f"needs: {group.opens.name}"
                        yield from (_result(group, check, "not possible", reason) for check in left)
                        return
                    has_opened = True
                else:
                    left = left[1:] if left and left[0].name == result.name else left
                    yield result

    def note(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:6.0f} s  {text}")

    def _report(self, result: Result) -> None:
        about = [f"{result.seconds:.1f} s" if result.seconds else "", result.text, *result.slow]
        self.note(f"{result.status.upper():<12}  {result.name}: {'; '.join(filter(None, about)) or 'done'}")


class _Process:
    """One process that runs a group's checks, followed by the events that it writes."""

    def __init__(self, group: Group, settings: Settings, environment: dict[str, str], runner: Runner) -> None:
        self._group = group
        self._runner = runner
        work = settings.output / "logs"
        name = re.sub(r"\W+", "-", group.name)
        self._log = work / f"{name}.log"
        self._events = work / f"{name}-{time.time_ns()}.jsonl"
        self._job = self._events.with_suffix(".json")
        self._job.write_text(json.dumps({"settings": settings.to_json(), "group": asdict(group)}))
        self._events.touch()
        self._environment = environment | _limited(group.gpus)
        self._checks = {check.name: check for check in group.rows}
        self._current: Result | None = None
        self._is_closing = False
        self._doing = "starting"
        self._since = self._said = time.monotonic()
        self._limit_s = START_S

    def results(self) -> Iterator[Result]:
        command = [sys.executable, "-m", "roll_flash.gpu_check.child", str(self._job), str(self._events)]
        process = GuardedProcess(command, env=self._environment, log=self._log)
        try:
            with self._events.open() as events:
                yield from self._follow(process, events)
        finally:
            process.stop()
            self._job.unlink()
            self._events.unlink()

    def _follow(self, process: GuardedProcess, events: TextIO) -> Iterator[Result]:
        part = ""
        while True:
            code = process.returncode
            while line := events.readline():
                part += line
                if part.endswith("\n"):
                    if (result := self._take(json.loads(part))) is not None:
                        yield result
                    part = ""
            late = time.monotonic() - self._since > self._limit_s
            if code is not None or late:
                yield from self._at_end(code)
                return
            self._say_what_for()
            time.sleep(POLL_S)

    def _take(self, event: dict[str, Any]) -> Result | None:
        match event["kind"]:
            case "begin":
                check = self._checks[event["name"]]
                self._current = _result(self._group, check, "passed", "")
                self._begin(check.name, check.deadline_s)
            case "closing":
                self._is_closing = True
                self._begin(event["text"], CLOSE_S)
            case "note":
                self._doing = str(event["text"])
                self._tell()
            case "end":
                return self._end(event["status"], event["text"], event["seconds"])
            case _ if self._current is not None:
                _add(self._current, event)
        return None

    def _begin(self, what: str, limit_s: float) -> None:
        self._doing, self._since, self._limit_s = what, time.monotonic(), limit_s
        self._tell()

    def _tell(self) -> None:
        self._said = time.monotonic()
        if self._doing:
            self._runner.note(f"{'...':<12}  {self._doing}")

    def _say_what_for(self) -> None:
        now = time.monotonic()
        if now - self._said > STILL_EVERY_S:
            self._said = now
            text = f"still: {self._doing} ({now - self._since:.0f} s of at most {self._limit_s:.0f})"
            self._runner.note(f"{'...':<12}  {text}")

    def _end(self, status: str, text: str, seconds: float) -> Result:
        result, self._current = self._current, None
        assert result is not None, "a check ends after it has begun"
        result.seconds = seconds
        result.status = "slow" if status == "passed" and result.slow else status  # type: ignore[assignment]
        result.text = "; ".join(filter(None, [text, result.text]))
        if result.status == "failed":
            result.log = _tail(self._log)
        self._doing, self._since, self._limit_s = "going on", time.monotonic(), START_S
        return result

    def _at_end(self, code: int | None) -> Iterator[Result]:
        """Say what the end of the process means, for the check that ran then."""
        why = _cause(code) if code is not None else f"did not end within {self._limit_s:g} s, last: {self._doing}"
        if self._current is not None:
            yield self._end("failed", why, round(time.monotonic() - self._since, 2))
        elif self._is_closing and code != 0:
            yield self._lost(f"{self._group.name}: end", "What was started ends in order.", why)
        elif not self._is_closing and code != 0:
            first = self._group.rows[0]
            yield self._lost(first.name, first.why, why)

    def _lost(self, name: str, why: str, text: str) -> Result:
        return Result(name, self._group.name, why, "failed", text, log=_tail(self._log))


def _result(group: Group, check: Check, status: Any, text: str) -> Result:
    return Result(check.name, group.name, check.why, status, text)


def not_run(groups: Sequence[Group], results: Sequence[Result]) -> list[Result]:
    """Return results for the checks that have none, because the user has interrupted."""
    done = {(result.group, result.name) for result in results}
    left = [(group, check) for group in groups for check in group.rows if (group.name, check.name) not in done]
    return [_result(group, check, "not run", "interrupted") for group, check in left]


def _add(result: Result, event: dict[str, Any]) -> None:
    match event["kind"]:
        case "figures":
            result.figures |= event["figures"]
        case "slow":
            result.slow.append(event["text"])
        case "fits":
            result.fits.append(event["text"])
        case "remark":
            result.text = "; ".join(filter(None, [result.text, event["text"]]))


def _cause(code: int) -> str:
    return f"its process crashed: {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join([line for line in lines if line.strip()][-LOG_LINES:])


def _limited(gpus: int | None) -> dict[str, str]:
    """Return the environment in which a process sees only the first `gpus`."""
    ids = list(visible_gpus(read_driver()))
    return {} if gpus is None or len(ids) <= gpus else {VISIBLE: ",".join(ids[:gpus])}


def _environment(output: Path) -> dict[str, str]:
    """Return the environment of the checks: they find this package, and vLLM finds our plug-in, also where the package
    is not installed but only a folder on the path."""
    root = Path(roll_flash.__file__).resolve().parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        metadata.distribution("roll-flash")
    except metadata.PackageNotFoundError:
        paths.insert(0, str(_write_metadata(root, output / "python")))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _write_metadata(root: Path, folder: Path) -> Path:
    """Write what an installation would record of our entry points."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    made = folder / f"roll_flash-{roll_flash.__version__}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: roll-flash\nVersion: {roll_flash.__version__}\n")
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (made / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
    return folder
