"""The catalogue of faults: what is hit, how, and at which moment of a run."""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from roll_flash.sandboxes import list_sandboxes
from roll_flash.sandboxes.owner import Owner
from tests.chaos.planted.sitecustomize import GARBAGE
from tests.chaos.surroundings import Surroundings

SERVERS = ("vllm.entrypoints.openai.api_server", "roll_flash.inference.transformers.server")
SERVER_GUARD, HOST = "roll_flash.processes.supervise", "ray::ServerHost"
PARTS = {
    "driver": ("-m roll_flash train",),
    "worker": ("ray::WorkerActor",),
    "learner": ("ray::RankActor",),
    "server": SERVERS,
    "host of a server": (HOST,),
    "guard of a server": (SERVER_GUARD,),
    "guard and host of a server": (SERVER_GUARD, HOST),
    "raylet": ("raylet/raylet ",),
    "control store": ("gcs/gcs_server ",),
    "guard of Ray": ("roll_flash.processes.ray.guard",),
    "guard of sandboxes": ("roll_flash/sandboxes/docker/watchdog.py",),
}
"""What the command lines of a part's processes contain."""
TOGETHER = "guard and host of a server"
"""All of its processes are hit at once; of other parts one."""
KILL, TERM, STOP, NO_FILES, NO_MEMORY = "kill -9", "SIGTERM", "SIGSTOP", "no file descriptors", "no memory"
PAUSE, FULL, READ_ONLY, SLOW, HANGS = "pause", "full", "read-only", "slow", "hangs"
CUT, LOSS, LATER, EARLIER, WRONG = "cut", "packet loss", "1 h later", "1 h earlier", "garbage"
LONGEST_S = {STOP: 60.0, SLOW: 20.0, LOSS: 20.0, HANGS: 10.0, CUT: 10.0, "engine": 30.0}
LONGEST_OTHER_S, SHORTEST_S = 5.0, 0.5
"""Bounds in seconds of faults that pass by themselves, by part or fault."""
LOSSES = (0.05, 0.2, 0.5)
HOUR_S = 3600
T = TypeVar("T")
APPEARS_S, STILL_THERE_S = 200.0, 1.0
"""Time for a part that is being started to appear; during a shutdown, after which none comes."""
POLL_S = 0.02

_MOST_PARTS = (
    "driver",
    "worker",
    "learner",
    "server",
    "host of a server",
    "raylet",
    "control store",
    "guard of sandboxes",
)
FAULTS = [
    *((part, KILL) for part in PARTS),
    *((part, STOP) for part in _MOST_PARTS),
    *((part, TERM) for part in _MOST_PARTS if part != "driver"),  # of a driver it means: stop
    *((part, fault) for fault in (NO_FILES, NO_MEMORY) for part in ("driver", "worker", "learner", "server")),
    ("sandbox", KILL),
    ("sandbox", PAUSE),
    ("disk", FULL),
    ("disk", READ_ONLY),
    ("disk", SLOW),
    ("disk", HANGS),
    ("network", CUT),
    ("network", LOSS),
    ("network to a server", CUT),
    ("answers", WRONG),
    ("clock", LATER),
    ("clock", EARLIER),
    ("engine", HANGS),
    ("engine", KILL),
]


class Moment(StrEnum):
    """When a fault comes. `UPDATE`: right after a step of the optimizer; `PUBLICATION`: right after the report of a
    step, while its weights go to the servers."""

    EPISODE = "episode"
    UPDATE = "optimizer step"
    PUBLICATION = "publication"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    START = "start"
    SHUTDOWN = "shutdown"


MOMENT_WEIGHTS = (8, 3, 3, 3, 3, 1, 1)
"""How often each is drawn: half of all at any time of an episode, few at a start or shutdown, which take long."""


@dataclass(frozen=True)
class Case:
    """One fault. `seed`: what of it is random (which process, for how long, how long after the moment began)."""

    part: str
    fault: str
    moment: Moment
    seed: int

    def __str__(self) -> str:
        return f"{self.part}:{self.fault}:{self.moment}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the output of `str`. Raises ValueError."""
        part, fault, moment, seed = text.split(":")
        if (part, fault) not in FAULTS:
            raise ValueError(f"{text}: there is no fault {part}:{fault}")
        return cls(part, fault, Moment(moment), int(seed))


def read_cases(file: Path) -> list[Case]:
    """Read one case per line; `#` begins a comment."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [Case.parse(line) for line in lines if line]


def is_possible(part: str, places: Collection[str]) -> bool:
    """True if there is something to hit: a process, or one of the places (`Surroundings.has`)."""
    return part in PARTS or part.partition(" ")[0] in places


def draw_cases(seed: int, count: int, places: Collection[str]) -> list[Case]:
    """Draw possible cases: each kind once before any comes again."""
    draw = random.Random(seed)
    kinds = [(part, fault) for part, fault in FAULTS if is_possible(part, places)]
    found: list[Case] = []
    while len(found) < count:
        draw.shuffle(kinds)
        for part, fault in kinds:
            (moment,) = draw.choices(list(Moment), weights=MOMENT_WEIGHTS)
            found.append(Case(part, fault, moment, draw.randrange(10**6)))
    return found[:count]


class Run(Protocol):
    """What a fault needs of the run that it hits."""

    surroundings: Surroundings

    def processes(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """Process ids and command lines of those whose command line contains one of `names`."""


def inject(case: Case, run: Run, longest_s: float) -> None:
    """Let a fault happen, and wait until it is over, at most `longest_s`. Raises TimeoutError if there is nothing that
    it could hit."""
    draw = random.Random(case.seed)
    if case.part in PARTS:
        _hit_processes(case, run, draw, longest_s)
    elif case.part == "sandbox":
        _hit_sandbox(case, run, draw, longest_s)
    else:
        with _broken(case, run, draw):
            time.sleep(_duration(case.part if case.part in LONGEST_S else case.fault, draw, longest_s))


def _duration(kind: str, draw: random.Random, longest_s: float) -> float:
    """Draw log-uniformly: as many faults last from 1 to 5 s as from 5 to 25 s, and a minute still comes."""
    longest_s = min(longest_s, LONGEST_S.get(kind, LONGEST_OTHER_S))
    return math.exp(draw.uniform(math.log(SHORTEST_S), math.log(longest_s)))


def _hit_processes(case: Case, run: Run, draw: random.Random, longest_s: float) -> None:
    found = _wait_for(lambda: run.processes(PARTS[case.part]), case)
    pids = [pid for pid, _ in found] if case.part == TOGETHER else [draw.choice(sorted(found))[0]]
    if case.fault in (KILL, TERM):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if case.fault == KILL else signal.SIGTERM)
        return
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError), LASTING[case.fault](pid):
            time.sleep(_duration(case.fault, draw, longest_s))


def _hit_sandbox(case: Case, run: Run, draw: random.Random, longest_s: float) -> None:
    def of_this_run() -> list[str]:
        workers = {pid for pid, _ in run.processes(PARTS["worker"])}
        return [one.name for one in list_sandboxes() if one.kind == "container" and _owner_pid(one.owner) in workers]

    name = draw.choice(sorted(_wait_for(of_this_run, case)))
    if case.fault == KILL:
        _docker("kill", name)
        return
    _docker("pause", name)
    time.sleep(_duration(PAUSE, draw, longest_s))
    _docker("unpause", name)


def _docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=False, capture_output=True, timeout=60)  # it may have ended meanwhile


def _owner_pid(owner: str) -> int | None:
    try:
        return Owner.parse(owner).pid
    except ValueError:
        return None


def _broken(case: Case, run: Run, draw: random.Random) -> AbstractContextManager[None]:
    place = run.surroundings
    match case.part, case.fault:
        case "disk", fault:
            kinds = {FULL: place.full_disk, READ_ONLY: place.read_only_disk, SLOW: place.slow_disk}
            return kinds.get(fault, place.hanging_disk)()
        case "network", fault:
            share = str(draw.choice(LOSSES))
            lost = ("-m", "statistic", "--mode", "random", "--probability", share)
            return place.packets_dropped(*(lost if fault == LOSS else ()))
        case "network to a server", _:
            _, command = draw.choice(sorted(_wait_for(lambda: run.processes(SERVERS), case)))
            return place.packets_dropped("-p", "tcp", "--dport", _port(command))
        case "clock", fault:
            return place.clock_set(HOUR_S if fault == LATER else -HOUR_S)
        case "answers", _:
            return place.garbage_answers(draw.choice(sorted(GARBAGE)))
        case "engine", fault:
            return place.hanging_engine() if fault == HANGS else place.dead_engine()
    raise AssertionError(f"no such fault: {case}")


def _port(command: str) -> str:
    words = command.split()
    if "--port" in words:
        return words[words.index("--port") + 1]
    return words[words.index(SERVERS[1]) + 3]  # MODEL_FOLDER HOST PORT


def _wait_for(look: Callable[[], list[T]], case: Case) -> list[T]:
    timeout_s = STILL_THERE_S if case.moment is Moment.SHUTDOWN else APPEARS_S
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing to hit within {timeout_s:g} s")
        time.sleep(POLL_S)
    return found


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def limited(pid: int, kind: int, most: int) -> Iterator[None]:
    """Lower a resource limit of a process for a while."""
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, (soft, hard))


def no_more_files(pid: int) -> AbstractContextManager[None]:
    """A process can open nothing: no file, no socket."""
    return limited(pid, resource.RLIMIT_NOFILE, 1)


def no_more_memory(pid: int) -> AbstractContextManager[None]:
    """A process gets no more memory from the kernel than it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return limited(pid, resource.RLIMIT_AS, pages * resource.getpagesize())


LASTING: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    STOP: suspended,
    NO_FILES: no_more_files,
    NO_MEMORY: no_more_memory,
}
