"""Runs a task's tests in a sandbox: kills its processes, writes the tests, runs them, and reads their verdict."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roll_flash.chat.model_text import cut_middle, decimal_number
from roll_flash.checked_files import open_checked, read_checked
from roll_flash.envs.adapters.task_folders.format import FolderTask
from roll_flash.errors import EnvError
from roll_flash.processes.background import call_in_thread
from roll_flash.sandboxes import Sandbox
from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.files.tree_model import decoded, encoded
from roll_flash.sandboxes.scratch import make_scratch_folder
from roll_flash.types import bounded

VERIFIER_LOGS = "/logs/verifier"
REWARD_TEXT, REWARD_JSON = f"{VERIFIER_LOGS}/reward.txt", f"{VERIFIER_LOGS}/reward.json"
MAX_REWARD_BYTES = 1 << 16
SHOWN_CHARACTERS = 4000
ENVIRONMENT = {"PYTHONNOUSERSITE": "1"}
"""Keeps modules that the model planted in its home out of the tests' Python."""
EMPTY_ARCHIVE = b"PK\5\6" + bytes(18)
_SUMMARY = re.compile(r"^=+ short test summary info =+$(.*)", re.MULTILINE | re.DOTALL)
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\b", re.MULTILINE)


class NoVerdictError(Exception):
    """The tests gave no verdict. `output` is the text that they printed."""

    def __init__(self, message: str, output: str = "", *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.output, self.timed_out = output, timed_out


@dataclass(frozen=True, slots=True)
class Verdict:
    reward: float
    output: str
    """Output of the tests, without its middle if it is long."""


async def make_folders(sandbox: Sandbox, task: FolderTask) -> None:
    """Make the folders that a task expects, in a sandbox that no model command has touched. Raises EnvError."""
    command = f"mkdir -p {shlex.quote(task.workdir)} /logs/agent {VERIFIER_LOGS}"
    result = await sandbox.exec(command, timeout=60.0, cwd="/")
    if not result.ok:
        said = result.stderr_text.strip()[:200] or f"exit code {result.exit_code}"
        raise EnvError(f"task {task.folder}: `{command}` failed in its sandbox: {said}")


async def put_files(sandbox: Sandbox, places: Mapping[Path, str]) -> None:
    """Copy files into the sandbox. Raises SandboxFileError."""
    for source, target in places.items():
        if source.is_dir():
            await sandbox.put_tree(source, target)
        else:
            await sandbox.write(target, await call_in_thread(partial(read_checked, source)), mode=0o755)


async def copy_out(sandbox: Sandbox, paths: Sequence[str], target: Sandbox) -> None:
    """Replace files and folders of one sandbox by those of another, or by nothing. Raises NoVerdictError, EnvError."""
    try:
        await sandbox.kill_all()
        for path in paths:
            await _copy(sandbox, path, target)
    except SandboxFileError as error:
        raise NoVerdictError(f"what is to be tested cannot be copied: {error}") from None


async def _copy(sandbox: Sandbox, path: str, target: Sandbox) -> None:
    scratch = make_scratch_folder("artifacts")
    try:
        await _copy_through(scratch / "work", scratch / "image", sandbox, path, target)
    finally:  # in a thread: 20,000 folders take a second
        await call_in_thread(lambda: shutil.rmtree(scratch, ignore_errors=True))


async def _copy_through(work: Path, image: Path, sandbox: Sandbox, path: str, target: Sandbox) -> None:
    of_image = await _copy_of_image(target, path, image)
    try:
        left_out = (await sandbox.get_tree(path, work)).left_out
    except SandboxFileError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        content = await sandbox.read(path) if error.errno == errno.ENOTDIR else None
        await target.remove(path)
        if content is not None:
            await target.write(path, content, mode=0o755)
        return
    gone = [""] if of_image is None else await call_in_thread(lambda: _gone(image, of_image, work, set(left_out)))
    for name in gone:
        await target.remove(f"{path.rstrip('/')}/{name}".rstrip("/"))
    await target.put_tree(work, path)


async def _copy_of_image(target: Sandbox, path: str, image: Path) -> list[str] | None:
    """Copy what the image has at `path` to `image`. Return what was left out, None if there is no folder.

    Raises EnvError for a folder over the limits: no work in it could be copied, whatever a model did.
    """
    try:
        return (await target.get_tree(path, image)).left_out
    except SandboxFileError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise EnvError(f"artifacts: {path} of the image cannot be copied, name less of it: {error}") from None


def _gone(image: Path, of_image: Sequence[str], work: Path, left_out: Set[str]) -> list[str]:
    """Return the members of an image's folder that are to be removed before a model's is written over it: all but
    folders and files that are folders and files there too.

    `of_image`, `left_out`: members of both that were not copied, such as links out of the folder. Those of the model's
    folder stay as the image has them: through such a link the tests would read their own files.
    """

    def is_kept(name: str) -> bool:
        kind = _kind(image / name)
        return name in left_out or (kind in (stat.S_IFDIR, stat.S_IFREG) and kind == _kind(work / name))

    left_out = {_on_disk(name) for name in left_out}
    gone = [name for name in map(_on_disk, of_image) if not is_kept(name)]
    for folder, folders, files in os.walk(image):
        names = {member: str((Path(folder) / member).relative_to(image)) for member in (*folders, *files)}
        gone += [name for name in names.values() if not is_kept(name)]
        folders[:] = [member for member in folders if is_kept(names[member])]
    return [decoded(os.fsencode(name)) for name in gone]


def _on_disk(name: str) -> str:
    """Return a name of a sandbox as this machine's locale has it."""
    return os.fsdecode(encoded(name))


def _kind(path: Path) -> int | None:
    try:
        return stat.S_IFMT(path.lstat().st_mode)
    except OSError:
        return None


async def run_tests(sandbox: Sandbox, task: FolderTask, reward_key: str) -> Verdict:
    """Run the tests. Processes from before or of the tests cannot change the verdict. Raises NoVerdictError."""
    try:
        await sandbox.kill_all()
        for place in (VERIFIER_LOGS, *{place.rpartition("/")[0] or place for place in task.tests.values()}):
            await sandbox.remove(place)
        await sandbox.put_tree(EMPTY_ARCHIVE, VERIFIER_LOGS)
        await put_files(sandbox, task.tests)
    except SandboxFileError as error:
        raise NoVerdictError(f"its tests cannot be put into the sandbox: {error}") from None
    result = await sandbox.exec(
        task.test_command,
        timeout=task.test_timeout_s,
        cwd=task.workdir,
        env={**ENVIRONMENT, **task.test_env},
        max_output=1 << 20,
        merge_stderr=True,
    )
    output = cut_middle(result.stdout_text, SHOWN_CHARACTERS)
    try:
        await sandbox.kill_all()
    except SandboxFileError as error:
        raise NoVerdictError(f"what its tests started does not end: {error}", output) from None
    if result.timed_out:
        raise NoVerdictError(f"its tests took longer than {task.test_timeout_s:g} s", output, timed_out=True)
    try:
        if task.verdict == "pytest":
            return Verdict(pytest_verdict(result.stdout_text), output)
        return Verdict(await _of_reward_file(sandbox, reward_key), output)
    except ValueError as error:
        raise NoVerdictError(f"{error}{_why_not_started(task, result.exit_code)}", output) from None


def _why_not_started(task: FolderTask, exit_code: int) -> str:
    """Return what the first line of tests/test.sh may have to do with it, for the exit codes of what cannot be started:
    the shell calls the script itself "not found" where the program of that line is missing."""
    script = next((path for path in (folder / "test.sh" for folder in task.tests) if path.is_file()), None)
    if exit_code not in (126, 127) or script is None:
        return ""
    with open_checked(script) as file:
        first = file.readline(100).decode(errors="replace").removesuffix("\n")
    if first.endswith("\r"):
        return "; the lines of tests/test.sh end as on Windows (CRLF), save it with LF"
    return f"; exit code {exit_code}: is {first!r}, the first line of tests/test.sh, a program of the image?"


def pytest_verdict(output: str) -> float:
    """Return 1 if every test passed, by terminal-bench's rules. Raises ValueError."""
    summary = _SUMMARY.findall(output)
    outcomes = _OUTCOME.findall(summary[-1]) if summary else []
    if not outcomes:
        raise ValueError("its tests printed no pytest summary (they must run `pytest -rA`)")
    return float(all(outcome in ("PASSED", "XFAIL", "SKIPPED") for outcome in outcomes) and "PASSED" in outcomes)


async def _of_reward_file(sandbox: Sandbox, reward_key: str) -> float:
    """Return the reward from its file, within MAX_REWARD: a larger one, as for work that is wrong by far, would be no
    sample. Raises ValueError if it is not a finite number."""
    for path, number in ((REWARD_TEXT, reward_of_text), (REWARD_JSON, lambda text: reward_of_json(text, reward_key))):
        try:
            text = (await sandbox.read(path, max_bytes=MAX_REWARD_BYTES)).decode(errors="replace")
        except SandboxFileError:
            continue
        try:
            return bounded(number(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None
    raise ValueError(f"its tests wrote neither {REWARD_TEXT} nor {REWARD_JSON}")


def reward_of_text(text: str) -> float:
    """Return the reward in the text. Raises ValueError for all but a plain decimal number."""
    value = decimal_number(text.strip())
    if value is None or not math.isfinite(value):
        raise ValueError(f"{text.strip()[:60]!r} is no finite number")
    return value


def reward_of_json(text: str, key: str) -> float:
    """Return the number under `key`, or the only number. Raises ValueError, RecursionError."""
    numbers: Any = json.loads(text)
    if not isinstance(numbers, dict) or not numbers:
        raise ValueError("it must be an object of numbers")
    if key not in numbers and len(numbers) > 1:
        raise ValueError(f"it has no {key!r} but {', '.join(numbers)[:200]}; choose one by reward_key")
    found = numbers.get(key, next(iter(numbers.values())))
    if not isinstance(found, bool | int | float) or abs(found) > sys.float_info.max or found != found:
        raise ValueError(f"{str(found)[:60]!r} is no finite number")
    return float(found)
