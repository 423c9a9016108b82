"""Finds an episode in what a run has written: its log, its evaluations, and replays of its episodes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_flash.checked_files import decode, lines_of
from roll_flash.errors import ConfigError
from roll_flash.monitor.episode_files.steps import open_step, removed_line, step_files
from roll_flash.monitor.json_lines import is_intact

REPLAYS = "replays"
"""Folder of a run with the episodes that `roll-flash replay` has played."""
_EPISODE = re.compile(rb'"episode_id":"([^"\\]+)"')
_HEAD_BYTES = 400
"""The id is in the first bytes of a line, which may have megabytes."""
SUGGESTIONS = 3


def find_episode(run: Path, episode_id: str) -> dict[str, Any]:
    """Return the record of an episode: its newest trajectory, else its newest failure.

    Raises ConfigError, with similar ids, if there is none; also for a damaged line.
    """
    wanted, known = episode_id.encode("utf-8", "replace"), set[bytes]()
    failure: dict[str, Any] | None = None
    for path in _logs(run):
        found = list(_records(path, wanted, known))
        if whole := [record for record in found if record.get("kind") == "trajectory"]:
            return whole[-1]
        failure = failure or (found[-1] if found else None)
    if failure is None:
        names = sorted(name.decode(errors="replace") for name in known)
        gone = removed_line(run / "episodes")
        raise ConfigError(f"{run}: {_unknown(episode_id, names)}{gone and '; '}{gone}")
    return failure


def _logs(run: Path) -> list[Path]:
    """Files with episodes, the newest of each kind first."""
    patterns = (f"{REPLAYS}/*/step_*.jsonl", "eval/**/episodes.jsonl")
    others = [path for pattern in patterns for path in sorted(run.glob(pattern), reverse=True)]
    return [*reversed(step_files(run / "episodes")), *others]


def _records(path: Path, wanted: bytes, known: set[bytes]) -> Iterator[dict[str, Any]]:
    with open_step(path) as file:
        for number, line in enumerate(lines_of(file), start=1):
            found = _EPISODE.search(line, 0, _HEAD_BYTES)
            if found is None or not line.endswith(b"\n"):  # the last line may be on its way
                continue
            known.add(found[1])
            if found[1] == wanted:
                yield _decoded(line, f"{path}, line {number}")


def _decoded(line: bytes, place: str) -> dict[str, Any]:
    try:
        if line.startswith(b'{"crc32"') and not is_intact(line):  # evaluations have no checksums
            raise ValueError("its checksum is wrong")
        return decode(line, dict[str, Any])
    except ValueError as error:
        raise ConfigError(f"{place}: the episode is damaged ({error})") from None


def _unknown(episode_id: str, known: list[str]) -> str:
    if not known:
        return "no episode has ended yet"
    near = [name for name in known if name.startswith(f"{episode_id}-")] or difflib.get_close_matches(
        episode_id, known, n=SUGGESTIONS
    )
    hint = f"did you mean {', '.join(near[:SUGGESTIONS])}?" if near else f"its {len(known):,} ids are like {known[0]}"
    return f"no episode {episode_id}; {hint}"
