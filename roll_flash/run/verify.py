"""Check a run by what it has written: journal, episodes, metrics and checkpoints must tell the same story.

It shares no code with what wrote them but the readers of the files. Works also while the run trains.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from roll_flash.checked_files import as_a_run_writes, decode
from roll_flash.errors import RunError
from roll_flash.monitor.episode_files.steps import open_steps, removed_before, removed_line
from roll_flash.monitor.json_lines import is_intact
from roll_flash.monitor.metrics import STEP_S, read_metrics
from roll_flash.run.journal import Damage, Event, read_journal
from roll_flash.run.run_dir import list_checkpoints
from roll_flash.scheduling.group_queues import group_id_of

SHOWN = 3
"""Number of ids in a message."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check, in words."""

    check: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Logged:
    """What the log has of a trajectory with an intact line. `versions`: lowest and highest of its policy tokens."""

    versions: tuple[int, int]
    went_back: bool
    """A server answered a turn with older weights than an earlier turn."""


@dataclass(slots=True)
class Log:
    """What the files of episodes have. `failed`: the last attempt of episodes that failed; `damaged`: whole lines."""

    trajectories: dict[str, Logged] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    damaged: int = 0


class _Turn(msgspec.Struct):
    """Columns of a line that are read."""

    start: int
    end: int
    server: str | None = None


class _Sample(msgspec.Struct):
    policy_mask: list[int]
    versions: list[int]
    turns: list[_Turn]

    def __post_init__(self) -> None:
        if len(self.policy_mask) != len(self.versions):
            raise ValueError("its columns differ in length")

    def own_versions(self) -> Iterator[int]:
        """Versions of the policy's tokens."""
        return itertools.compress(self.versions, self.policy_mask)

    def last_version(self, turn: _Turn) -> int | None:
        """Version of the last of the policy's tokens in a turn: those before may be of another server, which died in
        the turn."""
        places = range(min(turn.end, len(self.versions)) - 1, turn.start - 1, -1)
        return next((self.versions[place] for place in places if self.policy_mask[place]), None)


class _Line(_Sample):
    kind: str
    episode_id: str
    branches: list[_Sample]
    attempt: int | None = None


class _Rules(msgspec.Struct):
    """The event `opened`."""

    group_size: int
    replicas: int
    retries: int
    again: list[str]


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where the journal begins: after the checkpoint of `step`, with these groups and their ended episodes."""

    step: int
    groups: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Begin:
        step = events[0].get("step", 0)
        return cls(step, next((event["open"] for event in events if event["event"] == "state"), {}) if step else {})


def verify_run(folder: Path) -> list[Finding]:
    """Return what holds and what does not. Raises RunError for a run without a journal, or with foreign content."""
    with as_a_run_writes(folder):
        return _verified(folder)


def _verified(folder: Path) -> list[Finding]:
    rows = {row["step"]: row for row in read_metrics(folder) if STEP_S in row}  # first: a run may be going on
    checkpoints = [checkpoint.step for checkpoint in list_checkpoints(folder)]
    events, damage = read_journal(folder / "journal")
    if not events:
        reason = damage.message if damage else f"{folder}: has no journal to verify; only training runs write one"
        raise RunError(reason)
    trained = [event for event in events if event["event"] == "trained"]
    log = _read_log(folder / "episodes")
    begin = _Begin.of(events)
    first = removed_before(folder / "episodes")
    return [
        _journal(events, damage, begin, first),
        _groups(begin, events, trained),
        _Fates(begin, log, first).follow(events),
        _in_the_log(trained, log, folder / "episodes", _ended_before(begin, events, first)),
        _staleness(trained, log.trajectories),
        _versions_of_servers(log.trajectories),
        _steps(trained, {step: row for step, row in rows.items() if step > begin.step}, checkpoints),
    ]


def _members(step: Event) -> Iterator[tuple[str, str]]:
    """Yield (group id, episode id) of everything that a step was trained on."""
    for batch in step["batches"]:
        for group_id, rows in batch:
            for episode_id, _ in rows:
                yield group_id, episode_id


def _journal(events: Sequence[Event], damage: Damage | None, begin: _Begin, first: int) -> Finding:
    if damage is not None:
        return Finding("journal", False, damage.message)
    detail = f"{len(events):,} events, each intact"
    if begin.step > first:
        return Finding("journal", False, f"{detail}; those before step {begin.step} are missing")
    gone = f"; those before step {begin.step} were removed with their episodes" if begin.step else ""
    return Finding("journal", True, detail + gone)


def _groups(begin: _Begin, events: Iterable[Event], trained: Iterable[Event]) -> Finding:
    """Every admitted group leaves once, trained or dropped, or is still open."""
    admitted = Counter(group_id_of(event["number"]) for event in events if event["event"] == "admitted")
    admitted.update(begin.groups.keys())
    dropped = Counter(event["group"] for event in events if event["event"] == "dropped")
    taken = Counter(name for step in trained for name in [*{g for g, _ in _members(step)}, *step["without_rows"]])
    left = dropped + taken
    wrong = [name for name in admitted | left if admitted[name] != 1 or left[name] > 1]
    counts = (
        f"{len(admitted)} admitted = {len(taken)} trained + {len(dropped)} dropped + {len(admitted) - len(left)} open"
    )
    return _finding("groups", wrong, counts, "admitted more than once, or not at all, or left more than once")


class _Fates:
    """Follows each episode through the journal: it ends once, and what became part of its group is then trained or
    dropped for a reason, or still waits."""

    def __init__(self, begin: _Begin, log: Log, first: int) -> None:
        """`first`: the oldest step of which the log has all episodes."""
        self._log, self._first = log, first
        self._open = {group: set(episodes) for group, episodes in begin.groups.items()}
        """Episodes that wait, by group; those groups that have left are not in it."""
        self._ended = {episode for episodes in begin.groups.values() for episode in episodes}
        self._counts = Counter[str]()
        self._dropped = Counter[str]()
        self._wrong: list[str] = []
        self._without_end: list[str] = []
        self._rules: _Rules | None = None
        """None in a journal of an older version, which does not say either what was played again."""
        self._version = begin.step
        self._groups = set(begin.groups)
        self._admitted_at: dict[str, int] = {}
        """Version at the admission of groups that have not left, unless it was before the journal."""

    def follow(self, events: Iterable[Event]) -> Finding:
        for event in events:
            match event["event"]:
                case "opened":
                    self._begin_again(event)
                case "admitted":
                    group = group_id_of(event["number"])
                    self._open[group], self._admitted_at[group] = set(), self._version
                    self._groups.add(group)
                case "ended":
                    self._end(event)
                case "dropped":
                    self._drop(event)
                case "trained":
                    self._train(event)
        if len(self._without_end) > self._log.damaged:  # a damaged line may be of one that failed
            self._wrong += [f"{name} neither ended nor failed" for name in self._without_end]
        return Finding("episodes", not self._wrong, _first_of(self._wrong, "; ") if self._wrong else self._balance())

    def _begin_again(self, event: Event) -> None:
        self._rules = msgspec.convert(event, _Rules)
        for name in self._rules.again:
            self._ended.discard(name)
            self._open.get(name.rpartition("-r")[0], set()).discard(name)

    def _end(self, event: Event) -> None:
        name, group = event["episode"], event["group"]
        if name in self._ended and self._rules is not None:
            self._wrong.append(f"{name} ended twice")
        self._ended.add(name)
        if not event["kept"]:
            self._counts["surplus"] += 1
        elif group in self._open:
            self._open[group].add(name)
        else:
            self._wrong.append(f"{name} became part of {group}, which had left")

    def _drop(self, event: Event) -> None:
        kept = self._open.pop(event["group"], set())
        self._dropped[event["reason"]] += len(kept)
        if event["reason"] == "too_few_trajectories":
            self._look_for_missing(event["group"], kept)

    def _train(self, step: Event) -> None:
        self._version = step["version"]
        lost = step.get("lost")
        rows: dict[str, list[str]] = {name: [] for name in step["without_rows"]}
        for group, name in _members(step):
            rows.setdefault(group, []).append(name)
        for group, names in rows.items():
            kept = self._open.pop(group, set())
            times = Counter(names)
            self._wrong += [f"{name} is trained twice" for name, count in times.items() if count > 1]
            self._wrong += [f"{name} is trained, and had not ended or was not waiting" for name in times.keys() - kept]
            self._counts["trained"] += len(times.keys() & kept)
            for name in kept - times.keys():
                if lost is not None and name not in lost:
                    self._wrong.append(f"{name} of {group} was neither trained nor dropped")
                self._dropped["not recorded" if lost is None else lost.get(name, "")] += 1
            self._look_for_missing(group, kept)

    def _look_for_missing(self, group: str, kept: Collection[str]) -> None:
        """Each replica of a group that is complete with too few trajectories has ended or failed."""
        rules, version = self._rules, self._admitted_at.pop(group, -1)
        if rules is None or len(kept) >= rules.group_size or version < self._first:
            return
        for replica in range(rules.replicas):
            if len(self._without_end) > self._log.damaged + SHOWN:  # enough is known
                return
            name = f"{group}-r{replica}"
            if name not in self._ended and not self._has_failed(name):
                self._without_end.append(name)

    def _has_failed(self, name: str) -> bool:
        return self._log.failed.get(name, -1) >= (0 if self._rules is None else self._rules.retries)

    def _balance(self) -> str:
        waiting = sum(map(len, self._open.values()))
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self._dropped.items()) if count)
        dropped = f"{self._dropped.total()} dropped" + (f" ({reasons})" if reasons else "")
        ended = self._counts["trained"] + self._dropped.total() + self._counts["surplus"] + waiting
        failed = sum(
            self._has_failed(name) and name not in self._ended and name.rpartition("-r")[0] in self._groups
            for name in self._log.failed
        )
        return (
            f"{ended} ended once = {self._counts['trained']} trained + {dropped} + {self._counts['surplus']} surplus + "
            f"{waiting} waiting; {failed} failed"
        )


def _ended_before(begin: _Begin, events: Iterable[Event], step: int) -> set[str]:
    """Return the episodes that are, or may be, in the files of steps before `step`."""
    version, found = begin.step, {episode for episodes in begin.groups.values() for episode in episodes}
    for event in events:
        if event["event"] == "trained":
            version = event["version"]
        elif event["event"] == "ended" and version < step:
            found.add(event["episode"])
    return found


def _in_the_log(trained: Iterable[Event], log: Log, episodes: Path, removed: Collection[str]) -> Finding:
    names = [episode for step in trained for _, episode in _members(step)]
    missing = [name for name in names if name not in log.trajectories]
    wrong = [name for name in missing if name not in removed]
    good = f"{len(names) - len(missing)} trained episodes are on disk, intact"
    if log.damaged:
        good += f"; {log.damaged} damaged lines are of none of them"
    if len(missing) > len(wrong):
        good += f"; {len(missing) - len(wrong)} are not checked: {removed_line(episodes)}"
    return _finding("log", wrong, good, "missing or damaged")


def _staleness(trained: Iterable[Event], logged: Mapping[str, Logged]) -> Finding:
    """Every token was sampled by weights that its step may train: of version v - 1 - async_ratio to v - 1. Groups that
    began before the ratio was lowered keep the old bound."""
    wrong, oldest, async_ratio = [], 0, 0.0
    for step in trained:
        version, async_ratio = step["version"] - 1, max(async_ratio, step["async_ratio"])
        for _, episode in _members(step):
            if (found := logged.get(episode)) is not None:
                oldest = max(oldest, version - found.versions[0])
                if found.versions[0] < version - async_ratio or found.versions[1] > version:
                    wrong.append(episode)
    counts = f"at most {oldest} (async_ratio {async_ratio:g})"
    return _finding(
        "staleness", wrong, counts, f"trained beyond async_ratio {async_ratio:g}, or before they were sampled"
    )


def _versions_of_servers(logged: Mapping[str, Logged]) -> Finding:
    """Within an episode, whose turns follow each other, no server goes back to older weights."""
    wrong = [name for name, found in logged.items() if found.went_back]
    good = f"in {len(logged)} episodes no server went back"
    return _finding("versions", wrong, good, "have a turn of older weights than an earlier turn of the same server")


def _steps(trained: list[Event], rows: Mapping[int, Mapping[str, Any]], checkpoints: list[int]) -> Finding:
    """Steps follow each other; metrics and checkpoints speak of the same ones, with the same number of episodes."""
    versions = [step["version"] for step in trained]
    sizes = {step["version"]: sum(1 for _ in _members(step)) for step in trained}
    wrong = [f"step {one} is followed by {two}" for one, two in itertools.pairwise(versions) if two != one + 1]
    wrong += [f"step {step} has no line in the journal" for step in rows if step not in sizes]
    wrong += [
        f"step {step} has {rows[step]['episodes']:g} episodes in metrics.jsonl and {size} in the journal"
        for step, size in sizes.items()
        if step in rows and rows[step]["episodes"] != size
    ]
    last = max(versions, default=0)
    wrong += [f"checkpoint {step} is newer" for step in checkpoints if step > last]
    detail = f"{len(versions)} in the journal, {len(rows)} in metrics.jsonl"
    return Finding("steps", not wrong, "; ".join(wrong[:SHOWN]) or detail)


def _finding(check: str, wrong: list[str], good: str, bad: str) -> Finding:
    return Finding(check, not wrong, f"{len(wrong)} {bad}: {_first_of(sorted(wrong))}" if wrong else good)


def _first_of(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")


def _read_log(folder: Path) -> Log:
    """Read all intact lines."""
    log = Log()
    for _, lines in open_steps(folder):
        for line in lines:
            if not is_intact(line):
                log.damaged += line.endswith(b"\n")
                continue
            record = decode(line, _Line)
            if record.kind == "failure":
                log.failed[record.episode_id] = record.attempt or 0
            else:  # one that was cut short is there twice: the last counts
                samples: list[_Sample] = [record, *record.branches]
                own = [version for sample in samples for version in sample.own_versions()]
                versions = min(own, default=0), max(own, default=0)
                log.trajectories[record.episode_id] = Logged(versions, any(map(_went_back, samples)))
    return log


def _went_back(sample: _Sample) -> bool:
    newest: dict[str, int] = {}
    for turn in sample.turns:
        if turn.server and (version := sample.last_version(turn)) is not None:
            if version < newest.get(turn.server, version):
                return True
            newest[turn.server] = version
    return False
