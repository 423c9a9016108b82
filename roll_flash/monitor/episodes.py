"""Episodes as JSON lines: all data of every episode, readable with `pandas.read_json(lines=True)`.

One record is one ended episode: `kind` is `trajectory` or `failure`. Both kinds have the same columns; columns that do
not apply are null (or an empty list). A resumed run reads trajectories back (`find_trajectories`), so each line has its
checksum, `crc32`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from roll_flash.checked_files import MAX_LINE_BYTES, Count, decode, lines_of
from roll_flash.monitor.episode_files.steps import (
    decompress_step,
    open_step,
    open_steps,
    removed_line,
    step_file,
    was_removed,
)
from roll_flash.monitor.json_lines import JsonLinesFile, encode, is_intact, read_records, with_checksum
from roll_flash.types import Branch, EpisodeEnd, EpisodeFailure, Task, Trajectory, Turn

logger = logging.getLogger(__name__)

Outcome = Trajectory | EpisodeFailure
MAX_RECORD_BYTES = MAX_LINE_BYTES - (1 << 10)
"""Maximum bytes of a record, without what is put before it."""
TEXT_COLUMNS = ("message", "turns", "messages", "info", "branches")
SHORT_TEXTS = (1 << 16, 1 << 12, 1 << 8)
"""Characters of each text of a record that would be longer; the first of these with which it is not."""
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Version = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
_BACKTICKS = re.compile(r"`{3,}+")
_GROUP = re.compile(rb'"group_id":"g(\d{1,18})"')
_EPISODE = re.compile(rb'"episode_id":"([^"\\]+)"')
_OWN_COLUMNS = ("episode_id", "group_id", "reward", "success", "end", "started_s", "finished_s", "info")
DROPPED_FILE = "dropped.jsonl"
TURN_COLUMNS = tuple(field.name for field in fields(Turn))
BRANCH_COLUMNS = tuple(field.name for field in fields(Branch) if field.name != "turns")


def episode_record(outcome: Outcome, worker: str | None = None) -> dict[str, Any]:
    """Columns of one episode, played by `worker`. Arrays stay numpy arrays of shape [T] until they are written."""
    ids = {"episode_id": outcome.episode_id, "group_id": outcome.group_id, "worker": worker}
    common = {**ids, **_task_columns(outcome.task)}
    if isinstance(outcome, EpisodeFailure):
        return {"kind": "failure", **common, **_failure_columns(outcome)}
    return {"kind": "trajectory", **common, **_trajectory_columns(outcome)}


def episode_line(outcome: Outcome, worker: str | None = None) -> bytes:
    """Encode the record of an episode. If it is longer than a line that is read again, as an agent may make it, its
    texts are cut: nobody could read what comes after it, and the run could not be resumed."""
    record = episode_record(outcome, worker)
    line = encode(record).encode()
    for most in SHORT_TEXTS:
        if len(line) <= MAX_RECORD_BYTES:
            break
        line = encode(record | {name: _with_short_texts(record[name], most) for name in TEXT_COLUMNS}).encode()
    return line


def is_readable(line: bytes) -> bool:
    """Return False for a line of `episode_line` that is still too long to be read again, and warn of it."""
    if len(line) > MAX_RECORD_BYTES:
        logger.warning("an episode is not in the log: without its long texts it has %d MiB", len(line) >> 20)
    return len(line) <= MAX_RECORD_BYTES


def _with_short_texts(value: Any, most: int) -> Any:
    match value:
        case str():
            return value if len(value) <= most else f"{value[:most]} [... {len(value) - most} characters left out]"
        case Mapping():
            return {name: _with_short_texts(each, most) for name, each in value.items()}
        case list() | tuple():
            return [_with_short_texts(each, most) for each in value]
    return value


def _task_columns(task: Task) -> dict[str, Any]:
    return {"task_id": task.task_id, "env_id": task.env_id, "seed": task.seed, "env_kwargs": dict(task.kwargs)}


def _trajectory_columns(trajectory: Trajectory) -> dict[str, Any]:
    calls = [turn for sample in trajectory.samples for turn in sample.turns]
    return {
        "reward": trajectory.reward,
        "success": trajectory.success,
        "end": trajectory.end,
        "cause": None,
        "message": None,
        "failed_turn": None,
        "attempt": None,
        "started_s": trajectory.started_s,
        "finished_s": trajectory.finished_s,
        "prompt_length": trajectory.prompt_length,
        "policy_tokens": trajectory.policy_tokens,
        "prompt_tokens": _total([turn.prompt_tokens for turn in calls]),
        "completion_tokens": _total([turn.completion_tokens for turn in calls]),
        "turns": [{name: getattr(turn, name) for name in TURN_COLUMNS} for turn in trajectory.turns],
        "messages": list(trajectory.messages),
        "token_ids": trajectory.token_ids,
        "policy_mask": trajectory.policy_mask,
        "logprobs": trajectory.logprobs,
        "versions": trajectory.versions,
        "info": dict(trajectory.info),
        "role": trajectory.role,
        "branches": [_branch_columns(branch) for branch in trajectory.branches],
    }


def _branch_columns(branch: Branch) -> dict[str, Any]:
    turns = [{name: getattr(turn, name) for name in TURN_COLUMNS} for turn in branch.turns]
    return {**{name: getattr(branch, name) for name in BRANCH_COLUMNS}, "turns": turns}


def _total(counts: Sequence[int | None]) -> int | None:
    """Sum; None if any count is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _failure_columns(failure: EpisodeFailure) -> dict[str, Any]:
    return {
        "reward": None,
        "success": None,
        "end": None,
        "cause": failure.cause,
        "message": failure.message,
        "failed_turn": failure.turn,
        "attempt": failure.attempt,
        "started_s": failure.started_s,
        "finished_s": failure.finished_s,
        "prompt_length": None,
        "policy_tokens": 0,
        "prompt_tokens": failure.prompt_tokens,
        "completion_tokens": failure.completion_tokens,
        "turns": [],
        "messages": [],
        "token_ids": [],
        "policy_mask": [],
        "logprobs": [],
        "versions": [],
        "info": {},
        "role": "",
        "branches": [],
    }


class EpisodesWriter:
    """Write `step_000012.jsonl` files into a folder, one line per episode; keep one file open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step: int | None = None
        self._file: JsonLinesFile | None = None
        self._dropped: JsonLinesFile | None = None

    def write(self, step: int, outcome: Outcome) -> None:
        """Append one episode to the file of `step`."""
        self.write_line(step, episode_line(outcome))

    def write_line(self, step: int, line: bytes) -> None:
        """Append an episode that is encoded already, by `episode_line`."""
        if is_readable(line):
            self._open(step).write_line(with_checksum(b'{"step":%d,' % step + line[1:]))

    def sync(self) -> None:
        """Wait until the disk has all episodes that were written."""
        if self._file is not None:
            self._file.sync()

    def write_dropped(self, step: int, group: Mapping[str, Any]) -> None:
        """Append a group that no step will train, with the reason, to `dropped.jsonl` next to the episodes."""
        if self._dropped is None:
            self._dropped = JsonLinesFile(self._folder / DROPPED_FILE)
        self._dropped.write({"step": step, **group})

    def close(self) -> None:
        if self._dropped is not None:
            self._dropped.close()
            self._dropped = None
        self._close_step()

    def _close_step(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
        self._file = self._step = None

    def __enter__(self) -> EpisodesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, step: int) -> JsonLinesFile:
        if self._file is None or step != self._step:
            self._close_step()
            path = step_file(self._folder, step)
            decompress_step(path)
            self._file, self._step = JsonLinesFile(path), step
        return self._file


def next_group_number(folder: Path, step: int) -> int:
    """One more than the highest group number written at `step` or dropped at any step; 0 without any. The run may have
    continued long after the checkpoint of `step`."""
    numbers = [-1]
    for path in (step_file(folder, step), folder / DROPPED_FILE):
        with suppress(FileNotFoundError), open_step(path) as file:
            numbers += [int(found[1]) for line in lines_of(file) if (found := _GROUP.search(line))]
    return max(numbers) + 1


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """Records of one file, or of all `step_*.jsonl` files of a folder (a run's `episodes/`) in order of steps.

    Raises ValueError, with file and line, for a damaged line that is not the last one.
    """
    if path.is_dir():
        return [record for file, lines in open_steps(path) for record in read_records(lines, file)]
    if was_removed(path):
        raise FileNotFoundError(f"{path}: {removed_line(path.parent)}")
    try:
        with open_step(path) as lines:
            return list(read_records(lines, path))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file or folder of episodes") from None


def find_trajectories(folder: Path, tasks: Mapping[str, Task]) -> dict[str, Trajectory]:
    """Read trajectories from a run's `episodes/`, newest files first; `tasks`: that of each wanted episode, by its id.
    Those that are missing or damaged are left out. Raises OSError for a file that cannot be read."""
    found: dict[str, Trajectory] = {}
    for _, lines in open_steps(folder, newest_first=True):
        if len(found) == len(tasks):
            break
        here: dict[str, bytes] = {}  # played again after the log was damaged: the last one counts
        for line in lines:
            name = _EPISODE.search(line, 0, 400)
            episode_id = name[1].decode(errors="replace") if name else ""
            if episode_id in tasks and b'"kind":"trajectory"' in line[:80] and is_intact(line):
                here[episode_id] = line
        for episode_id in here.keys() - found.keys():
            with suppress(ValueError):
                found[episode_id] = trajectory_of(here[episode_id], tasks[episode_id])
    return found


class _LoggedSample(msgspec.Struct, kw_only=True):
    """The columns of a token sequence that a resumed run reads."""

    token_ids: list[_TokenId]
    policy_mask: list[Literal[0, 1]]
    logprobs: list[float | None]
    versions: list[_Version]
    turns: list[Turn]
    messages: list[dict[str, Any]]
    prompt_length: Count
    role: str = ""


class _LoggedTrajectory(_LoggedSample):
    """The columns of a trajectory."""

    episode_id: str
    group_id: str
    reward: float
    success: bool | None
    end: EpisodeEnd
    started_s: float
    finished_s: float
    info: dict[str, Any]
    branches: list[_LoggedSample]


def trajectory_of(line: bytes, task: Task) -> Trajectory:
    """Undo `episode_record`, bit by bit: numbers in the file read as the same float32. Raises ValueError for a line
    that is no record of a trajectory."""
    record = decode(line, _LoggedTrajectory)
    own = {name: getattr(record, name) for name in _OWN_COLUMNS}
    branches = tuple(Branch(**_sample_of(each)) for each in record.branches)
    return Trajectory(task=task, **own, **_sample_of(record), branches=branches)


def _sample_of(record: _LoggedSample) -> dict[str, Any]:
    length = len(record.token_ids)
    if not length == len(record.policy_mask) == len(record.logprobs) == len(record.versions) >= record.prompt_length:
        raise ValueError("its columns differ in length")
    if any(not 0 <= turn.start <= turn.end <= length for turn in record.turns):
        raise ValueError("a turn lies outside of its tokens")
    return {
        "token_ids": np.array(record.token_ids, np.int32),
        "policy_mask": np.array(record.policy_mask, np.bool_),
        "logprobs": np.array([math.nan if each is None else each for each in record.logprobs], np.float32),
        "versions": np.array(record.versions, np.int32),
        "turns": tuple(record.turns),
        "messages": tuple(record.messages),
        "prompt_length": record.prompt_length,
        "role": record.role,
    }


def transcript(record: Mapping[str, Any]) -> str:
    """Render a record as Markdown for a reader: its outcome, then the conversation."""
    if record["kind"] == "failure":
        ending = f"**Failed** ({record['cause']}, turn {record['failed_turn']}): {record['message']}"
    else:
        success = {True: "yes", False: "no", None: "not reported"}[record["success"]]
        ending = f"**Ended** ({record['end']}): reward {record['reward']}, success {success}"
        rewards = record["info"].get("rewards")
        if isinstance(rewards, Mapping) and rewards:
            ending += f"\n\nRewards one by one:\n\n{_fenced(json.dumps(rewards, default=str))}"
    title = f"# {record['task_id']}, episode {record['episode_id']}"
    said = [f"## {m.get('role', '?')}\n\n{_fenced(str(m.get('content') or ''))}" for m in record["messages"]]
    return "\n\n".join([title, ending, *said]) + "\n"


def _fenced(text: str) -> str:
    longest = max((len(run) for run in _BACKTICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def task_hash(record: Mapping[str, Any]) -> str:
    """Task hash of an episode record."""
    return hash_of_task(record["env_id"], record["messages"], len(record["turns"]), record["info"])


def own_answers(messages: Sequence[Mapping[str, Any]], turns: int) -> list[int]:
    """Return the places of the messages that the model wrote in its `turns`. Earlier ones of the assistant are of the
    task: examples, or a conversation that goes on."""
    places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return places[-turns:] if 0 < turns <= len(places) else places


def is_of_an_agent(info: Mapping[str, Any]) -> bool:
    """True for the info of an episode whose agent has a loop of its own: it has the figures of the gateway."""
    return "gateway" in info


def hash_of_task(env_id: str, messages: Sequence[Mapping[str, Any]], turns: int, info: Mapping[str, Any]) -> str:
    """Return a hash that is equal for tasks which show the model the same messages before its first turn. A name,
    `info["task"]`, tells apart those that begin alike. It takes the place of the messages only if these are of an agent
    with a loop of its own: in the info of others, it may as well be the name of many tasks."""
    own = own_answers(messages, turns)
    shown: Any = messages[: own[0] if own else None]
    if "task" in info:
        shown = info["task"] if is_of_an_agent(info) else [info["task"], shown]
    text = json.dumps([env_id, shown], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
