"""Check a run by what it has written: journal, episodes, metrics and checkpoints must tell the same story.

It shares no code with what wrote them but the readers of the files. Works also while the run trains.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    logged, damaged = _read_log(folder / "episodes")
    begin = _Begin.of(events)
    removed = _ended_before(begin, events, removed_before(folder / "episodes"))
    return [
        _journal(events, damage, begin, folder / "episodes"),
        _groups(begin, events, trained),
        _trained_once(begin, events, trained),
        _in_the_log(trained, logged, damaged, folder / "episodes", removed),
        _staleness(trained, logged),
        _versions_of_servers(logged),
        _steps(trained, {step: row for step, row in rows.items() if step > begin.step}, checkpoints),
    ]


def _members(step: Event) -> Iterator[tuple[str, str]]:
    """Yield (group id, episode id) of everything that a step was trained on."""
    for batch in step["batches"]:
        for group_id, rows in batch:
            for episode_id, _ in rows:
                yield group_id, episode_id


def _journal(events: Sequence[Event], damage: Damage | None, begin: _Begin, episodes: Path) -> Finding:
    if damage is not None:
        return Finding("journal", False, damage.message)
    detail = f"{len(events):,} events, each intact"
    if begin.step > removed_before(episodes):
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


def _trained_once(begin: _Begin, events: Iterable[Event], trained: Iterable[Event]) -> Finding:
    """Every trained episode ended, became part of its group, and was trained once."""
    kept = {(event["group"], event["episode"]) for event in events if event["event"] == "ended" and event["kept"]}
    kept |= {(group, episode) for group, episodes in begin.groups.items() for episode in episodes}
    times = Counter(member for step in trained for member in _members(step))
    wrong = [episode for (group, episode), count in times.items() if count != 1 or (group, episode) not in kept]
    return _finding("episodes", wrong, f"{len(times)} trained, each once", "trained twice, or never ended")


def _ended_before(begin: _Begin, events: Iterable[Event], step: int) -> set[str]:
    """Return the episodes that are, or may be, in the files of steps before `step`."""
    version, found = begin.step, {episode for episodes in begin.groups.values() for episode in episodes}
    for event in events:
        if event["event"] == "trained":
            version = event["version"]
        elif event["event"] == "ended" and version < step:
            found.add(event["episode"])
    return found


def _in_the_log(
    trained: Iterable[Event], logged: Mapping[str, Logged], damaged: int, episodes: Path, removed: Collection[str]
) -> Finding:
    names = [episode for step in trained for _, episode in _members(step)]
    missing = [name for name in names if name not in logged]
    wrong = [name for name in missing if name not in removed]
    good = f"{len(names) - len(missing)} trained episodes are on disk, intact"
    if damaged:
        good += f"; {damaged} damaged lines are of none of them"
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
    names = ", ".join(sorted(wrong)[:SHOWN]) + (" ..." if len(wrong) > SHOWN else "")
    return Finding(check, not wrong, f"{len(wrong)} {bad}: {names}" if wrong else good)


def _read_log(folder: Path) -> tuple[dict[str, Logged], int]:
    """Return the trajectories with intact lines, and the number of whole lines that are damaged."""
    found: dict[str, Logged] = {}
    damaged = 0
    for _, lines in open_steps(folder):
        for line in lines:
            if not is_intact(line):
                damaged += line.endswith(b"\n")
            elif b'"kind":"trajectory"' in line[:80]:
                record = decode(line)  # one that was cut short is there twice: the last counts
                found[record["episode_id"]] = Logged(_versions(record), any(map(_went_back, _samples(record))))
    return found, damaged


def _versions(record: Mapping[str, Any]) -> tuple[int, int]:
    own = [
        v for each in _samples(record) for v, mine in zip(each["versions"], each["policy_mask"], strict=True) if mine
    ]
    return min(own, default=0), max(own, default=0)


def _samples(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [record, *record["branches"]]


def _went_back(sample: Mapping[str, Any]) -> bool:
    """Compare the last tokens of turns: those before may be of another server, which died in the turn."""
    newest: dict[str, int] = {}
    for turn in sample["turns"]:
        span = slice(turn["start"], turn["end"])
        own = [v for v, mine in zip(sample["versions"][span], sample["policy_mask"][span], strict=True) if mine]
        if own and (server := turn.get("server")):
            if own[-1] < newest.get(server, own[-1]):
                return True
            newest[server] = own[-1]
    return False
