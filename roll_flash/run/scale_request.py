"""Asks a running run for more or fewer servers and workers, through two files in its folder.

`roll-flash scale` writes the request, the driver answers it; both see the run's folder. A request is taken once, by the
process that holds the run's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roll_flash.checked_files import decode, open_checked, read_checked
from roll_flash.errors import ConfigError, RunError

REQUEST, ANSWER = ".scale.json", ".scaled.json"
ANSWER_POLL_S = 0.3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """The wanted numbers of parts; None leaves a number as it is."""

    id: str
    servers: int | None = None
    workers: int | None = None


def ask_to_scale(folder: Path, servers: int | None, workers: int | None, timeout_s: float) -> str:
    """Ask the run in `folder` and wait for its answer. Raises ConfigError if no such run is running, RunError if it
    cannot do it or does not answer in time."""
    if not _is_running(folder):
        raise ConfigError(f"{folder}: no run is running there; start one with roll-flash train, then scale it")
    request = ScaleRequest(secrets.token_hex(8), servers, workers)
    _write(folder / REQUEST, asdict(request))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = _read(folder / ANSWER)
        if answer is not None and answer.get("id") == request.id:
            if not answer["done"]:
                raise RunError(answer["text"])
            return str(answer["text"])
        if not _is_running(folder):
            raise RunError(f"{folder}: the run ended before it was scaled")
        time.sleep(ANSWER_POLL_S)
    (folder / REQUEST).unlink(missing_ok=True)
    raise RunError(f"{folder}: the run did not answer within {timeout_s:g} s; its log says why")


def take_request(folder: Path) -> ScaleRequest | None:
    """Return a request that waits, and remove it; None if there is none, or what is there is no request."""
    try:
        if (found := _read(folder / REQUEST)) is None:
            return None
        (folder / REQUEST).unlink(missing_ok=True)
        return ScaleRequest(**found)
    except (OSError, TypeError, ValueError) as error:  # no reason to end a run
        _log.warning("%s is removed, it cannot be read: %s", folder / REQUEST, error)
        with contextlib.suppress(OSError):
            (folder / REQUEST).unlink(missing_ok=True)
        return None


def answer_request(folder: Path, request: ScaleRequest, text: str, *, done: bool) -> None:
    """Answer a request. A disk that is full costs the answer, not the run."""
    try:
        _write(folder / ANSWER, {"id": request.id, "text": text, "done": done})
    except OSError as error:
        _log.warning("%s cannot be written: %s", folder / ANSWER, error)


def _is_running(folder: Path) -> bool:
    try:
        with open_checked(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _write(path: Path, value: object) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    new.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = decode(read_checked(path), dict[str, Any])
        return found
    except FileNotFoundError:
        return None
