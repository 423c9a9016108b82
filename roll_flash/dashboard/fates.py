"""What became of each group of a run: trained, with its advantages, or dropped; from the journal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roll_flash.checked_files import CONTENT_ERRORS, decode, lines_of
from roll_flash.config.sections.learner import LearnerConfig, is_own
from roll_flash.learner.losses.token_advantages import AdvantageConfig, turn_advantages
from roll_flash.monitor.episode_files.steps import content_of, open_step
from roll_flash.monitor.episodes import DROPPED_FILE
from roll_flash.run.journal import FORMAT, journal_files
from roll_flash.types import FinishedEpisode, Task

_TRAINED, _BEGIN = b'"event":"trained"', b'"event":"begin"'
_HEAD_BYTES = 64
"""The event is the first key of a line, after its checksum."""


class Fates:
    """Grows with the journal. `refresh` reads what is new; it begins again if a file shrank, as `--resume` does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clear()

    def _clear(self) -> None:
        self._read: dict[Path, int] = {}
        self._trained: dict[str, int] = {}
        self._dropped: dict[str, str] = {}
        self._steps: dict[int, tuple[Path, int, int]] = {}
        self.newer = 0
        """Format of a journal that a newer version wrote; 0 if there is none."""

    def refresh(self) -> None:
        """Read what was written since the last call. Raises OSError."""
        files = [*journal_files(self._folder / "journal").values(), self._folder / "episodes" / DROPPED_FILE]
        sizes = {path: size for path in files if (size := _content_bytes(path)) is not None}
        if any(sizes.get(path, -1) < read for path, read in self._read.items()):
            self._clear()
        for path, size in sizes.items():
            if size > self._read.get(path, 0):
                self._read_file(path)

    def _read_file(self, path: Path) -> None:
        with open_step(path) as file:
            place = self._read.get(path, 0)
            file.seek(place)
            for line in lines_of(file):
                if not line.endswith(b"\n"):
                    break
                self._take(path, place, line)
                place += len(line)
        self._read[path] = place

    def _take(self, path: Path, place: int, line: bytes) -> None:
        is_dropped = path.name == DROPPED_FILE
        if not (is_dropped or _TRAINED in line[:_HEAD_BYTES] or _BEGIN in line[:_HEAD_BYTES]):
            return
        try:
            event = decode(line)
            if is_dropped:
                self._dropped[event["group_id"]] = str(event["reason"])
            elif event["event"] == "begin":
                self.newer = event["format"] if event["format"] > FORMAT else self.newer
            else:
                self._steps[event["version"]] = path, place, len(line)
                self._trained |= {group: event["version"] for batch in event["batches"] for group, _ in batch}
        except CONTENT_ERRORS:
            return  # a damaged line; `roll-flash verify` finds it

    def of_group(self, group_id: str) -> dict[str, Any]:
        """Return `trained`: the step that trained a group, counted from 1; `dropped`: why none did."""
        return {"trained": self._trained.get(group_id), "dropped": self._dropped.get(group_id)}

    def advantages(self, group_id: str, config: Any) -> dict[str, float]:
        """Return the advantage of each episode of a trained group, by its id, computed by the learner's own
        function from the rewards in the journal. Empty if it was not trained, if each turn or token has an
        advantage of its own, if roles are compared with each other, if the function is the user's, if the learner
        changed the rewards by what the journal does not have, or if it refused trajectories of the step."""
        event = self._event(group_id)
        refused = any(name.startswith("dropped_") for name in event.get("metrics", {}))  # not said which: not compared
        if (rules := _rules(config)) is None or refused:
            return {}
        groups = _groups_of(event)
        if not rules.needs_whole_batch:
            groups = [group for group in groups if group[0] == group_id]
        found = turn_advantages([[_finished(*member) for member in members] for _, members in groups], rules)
        return {
            episode: values[0]
            for (name, members), advantages in zip(groups, found, strict=True)
            for (episode, _), values in zip(members, advantages, strict=True)
            if name == group_id
        }

    def rewards(self, group_id: str) -> dict[str, float]:
        """Return the reward with which each episode of a group was trained, after stages; empty if it was not."""
        groups = _groups_of(self._event(group_id))
        return dict(next((members for name, members in groups if name == group_id), ()))

    def _event(self, group_id: str) -> Mapping[str, Any]:
        """Return what the journal has of the step that trained a group; nothing if none did."""
        if (step := self._trained.get(group_id)) is None:
            return {}
        path, offset, length = self._steps[step]
        with open_step(path) as file:
            file.seek(offset)
            event: dict[str, Any] = decode(file.read(length))
        return event


def _groups_of(event: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return the groups of a step with the ids and rewards of their episodes."""
    return [(name, members) for batch in event.get("batches", ()) for name, members in batch]


def _content_bytes(path: Path) -> int | None:
    """Return the bytes of a file, compressed since or not; None if there is none."""
    with suppress(FileNotFoundError):
        return content_of(path).bytes
    return None


def _rules(config: Any) -> AdvantageConfig | None:
    tree = config if isinstance(config, Mapping) else {}
    given = tree.get("learner", {})
    if tree.get("distill"):
        return None
    try:
        learner = LearnerConfig.model_validate(given)
    except ValidationError:  # of another version
        return None
    of_episodes = learner.advantage not in ("gigpo", "gae") and learner.role_baseline == "role"
    if not of_episodes or is_own(learner.advantage) or learner.shapes_rewards:
        return None  # no code of a run is executed; the journal has the rewards of one role
    return AdvantageConfig.of(learner)


def _finished(episode_id: str, reward: float) -> FinishedEpisode:
    """Return an episode that has only what an advantage depends on."""
    return FinishedEpisode(episode_id, "", Task("", "", 0), reward, None, 0.0, 0.0, 0, (), 0)
