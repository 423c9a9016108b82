"""The watchdog on a real event loop, with rules that are tested elsewhere made impatient."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from roll_flash.watchdog import activity as rules
from roll_flash.watchdog import watchdog as module
from roll_flash.watchdog.activity import doing
from roll_flash.watchdog.watchdog import KEPT_FILES, open_watchdog


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SHORTEST_S": 0.2, "FIRST_LINE_S": 0.3}.items():
        monkeypatch.setattr(rules, name, seconds)
    monkeypatch.setattr(module, "EVERY_S", 0.05)


async def until(said: list[str], text: str) -> None:
    async with asyncio.timeout(60):
        while not any(text in line for line in said):  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.05)


async def never() -> Mapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_standstill_is_one_line_and_a_file_with_stacks_tasks_and_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STATE_WITHIN_S", 0.2)
    said: list[str] = []

    async def hangs_in_this_task() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        async with open_watchdog("run", tmp_path, said.append, held_at_most_s=600, closes_within_s=600) as watchdog:
            task = asyncio.create_task(hangs_in_this_task(), name="a task that hangs")
            watchdog.state = never
            with doing("the learner", "micro-batch", then="the run ends after 300 s"):
                await until(said, "the learner")
            await until(said, "the learner goes on")
            task.cancel()

    asyncio.run(run())
    line = next(line for line in said if line.startswith("watchdog: the learner stands still: micro-batch since "))
    line, _, file = line.rpartition("; stacks: ")
    assert line.endswith("; the run ends after 300 s")
    text = Path(file).read_text()
    assert "asyncio task a task that hangs: hangs_in_this_task" in text
    assert "not known: TimeoutError" in text, "a part that does not answer delays no report"
    assert "in _watch_loop" in text, "stacks of threads"
    assert "the learner: micro-batch since" in text


def test_an_event_loop_that_is_held_up_is_named_with_the_line_that_holds_it(tmp_path: Path) -> None:
    said: list[str] = []

    def holds_up_the_loop() -> None:
        deadline = time.monotonic() + 60
        while not any("holds_up_the_loop" in line for line in said) and time.monotonic() < deadline:
            time.sleep(0.05)

    async def run() -> None:
        async with open_watchdog("run", tmp_path, said.append, held_at_most_s=600, closes_within_s=600):
            await asyncio.sleep(0.2)
            holds_up_the_loop()
            await until(said, "the driver's event loop goes on")

    asyncio.run(run())
    line = next(line for line in said if "holds_up_the_loop (test_watchdog.py:" in line)
    assert line.startswith("watchdog: the driver's event loop stands still: it is held up since ")
    assert "holds_up_the_loop" in Path(line.rpartition("; stacks: ")[2]).read_text()


def test_a_folder_that_is_gone_or_full_keeps_nobody_from_the_line_and_ends_no_run(tmp_path: Path) -> None:
    said: list[str] = []

    async def run() -> None:
        async with open_watchdog("run", tmp_path / "gone", said.append, held_at_most_s=600, closes_within_s=600):
            with doing("the learner", "micro-batch"):
                await until(said, "the learner stands still")
            await until(said, "the learner goes on")

    asyncio.run(run())
    assert any("no stacks can be written" in line for line in said)


ENDS = """
import asyncio, sys, time
from pathlib import Path
from roll_flash.watchdog.watchdog import open_watchdog

async def run():
    async with open_watchdog("run", Path(sys.argv[1]), print, held_at_most_s=3, closes_within_s=3) as watchdog:
        if sys.argv[2] == "closes":
            watchdog.close_begins()
            await asyncio.Event().wait()
        time.sleep(600)

asyncio.run(run())
"""


@pytest.mark.parametrize(
    ("how", "why"),
    [("closes", "the run did not close within 3 s"), ("held", "the driver's event loop was held up for 3 s in run (")],
)
def test_a_process_that_nothing_else_can_end_is_ended_with_a_line(how: str, why: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-uc", ENDS, str(tmp_path), how], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert why in done.stdout
    assert "`--resume` goes on from the journal" in done.stdout


def test_the_number_of_files_is_bounded_and_numbers_go_on_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 60.0)

    async def run() -> None:
        async with open_watchdog("run", tmp_path, print, held_at_most_s=600, closes_within_s=600) as watchdog:
            for _ in range(KEPT_FILES + 3):
                watchdog._next_file().touch()

    asyncio.run(run())
    asyncio.run(run())
    numbers = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.iterdir())
    assert numbers == list(range(KEPT_FILES + 7, 2 * KEPT_FILES + 7))


def test_every_part_that_can_stand_still_is_explained_to_operators() -> None:
    root = Path(__file__).parents[2]
    sources = "\n".join(path.read_text() for path in (root / "roll_flash").rglob("*.py"))
    parts = set(re.findall(r'\bdoing\(\s*f?"([^"{]+?) ?["{]', sources)) | {module.EVENT_LOOP, module.CLOSING}
    assert len(parts) >= 10
    explained = (root / "docs/operations.md").read_text()
    assert [part for part in parts if f"`{part} " not in explained] == []
