"""A recorded run, and a real browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

from written_run import RecordedRun

PATIENCE_MS = 60_000.0
"""Other work on this machine may make a page slow."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    """A run of three steps that goes on."""
    recorded = RecordedRun(tmp_path / "runs")
    for _ in range(3):
        recorded.step()
    recorded.checkpoint()
    yield recorded
    recorded.close()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """For one file of tests: as long as Playwright runs, no test of this process can call `asyncio.run`."""
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--disable-dev-shm-usage", "--disable-gpu", *sandbox]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A new page. The test fails if its scripts do, if it asks another host, or if its policy has to stop something."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda message: _note_error(problems, message))
    page.on("request", lambda request: _note_host(problems, request.url))
    yield page
    context.close()
    assert not problems


def _note_error(problems: list[str], message: ConsoleMessage) -> None:
    is_refusal = "/api/" in message.location["url"]  # which the page shows
    if message.type == "error" and not is_refusal:
        problems.append(message.text)


def _note_host(problems: list[str], url: str) -> None:
    if not url.startswith(("http://127.0.0.1:", "data:", "blob:")):
        problems.append(f"asked {url}")
