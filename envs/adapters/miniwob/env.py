"""MiniWoB-v0: the small web pages of MiniWoB++ (package miniwob), in a real Chromium in a sandbox.

Tasks: Shi et al. 2017 and arXiv 1802.08802. Optional: `pip install miniwob`, and the image of `make browser-image`.
"""

from __future__ import annotations

import asyncio
import difflib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from roll_flash.envs.adapters.miniwob.browser import SPEC, Browser, open_browser
from roll_flash.envs.adapters.miniwob.elements import Action, Element, read_action, read_elements
from roll_flash.envs.adapters.miniwob.gold import GOLD, texts_to_type
from roll_flash.envs.adapters.miniwob.pages import SCRIPT, pages_archive, url_of
from roll_flash.envs.base import SandboxEnv, StepResult
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.errors import ConfigError, EnvError
from roll_flash.monitor.limits import usable_cores

ID = "MiniWoB-v0"
TASKS = tuple(GOLD)
HOW = "Reply with one action and nothing else: `click N`, or `type N TEXT`. N is the number behind an element."
SEARCHED_AT_ONCE = 32
"""Seeds of a page that are tried in one call for held-out problems."""
MAX_IN_VAIN = 8
"""Calls in a row that found no other problem, after which the page has none."""


class MiniWoB(SandboxEnv):
    """Arguments: `task`, one of TASKS or a list of them; each seed is a problem of one of the list, in turn.

    The model sees the task and the elements of the page, and clicks or types. The reward is 1 if all is right, else 0:
    the page's own is above 0 for a part, and falls with the time. The page's limit of 10 s does not end an episode.
    """

    sandbox_spec = SPEC

    def __init__(self, task: str | Sequence[str] = TASKS) -> None:
        self._tasks = (task,) if isinstance(task, str) else tuple(task)
        for name in self._tasks or ("",):
            if name not in GOLD:
                near = difflib.get_close_matches(name, TASKS, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(TASKS)}"
                raise ConfigError(f"{ID}: there is no task {name!r}{hint}")
        self._files = pages_archive(ID)
        self._browser: Browser | None = None
        self._name, self._said = "", ""
        self._elements: Sequence[Element] = ()

    @property
    def valid_actions(self) -> tuple[str, ...]:
        """Each click, and each text of the task typed into each field."""
        texts = texts_to_type(self._said)
        typed = [f"type {e.number} {text}" for e in self._elements if e.kind == "field" for text in texts]
        return (*(f"click {e.number}" for e in self._elements if e.kind != "text"), *typed)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        drawn = random.randrange(HELD_OUT_SEEDS) if seed is None else seed
        is_held_out = drawn >= HELD_OUT_SEEDS
        number, place = divmod(drawn - HELD_OUT_SEEDS if is_held_out else drawn, len(self._tasks))
        self._name = self._tasks[place]
        await self.close()
        async with _resets():
            self._browser = await open_browser(self.sandbox, self._files)
            await self._open_page()
            call = await self._held_out(number) if is_held_out else f"beginTraining({number})"
            state = await self._browser.evaluate(f"rollFlash.{call}")
        self._said = str(state["task"])
        return f"{self._said}\n{HOW}\n\n{self._shown(state)}", {"page": self._name}

    async def step(self, action: str) -> StepResult:
        browser = self._open_browser
        chosen = read_action(action, self._elements)
        if isinstance(chosen, Action) and not await self._act(browser, chosen):
            chosen = f"Element {chosen.number} is no longer there."
        state = await browser.evaluate("rollFlash.shown()")
        is_over = bool(state["done"])
        won = is_over and float(state["reward"]) >= 1.0
        before, shown = self._elements, self._shown(state)
        if isinstance(chosen, str):
            shown = f"{chosen}\n{shown}"
        elif before == self._elements:
            shown = f"Nothing has changed.\n{shown}"
        info = {"valid": isinstance(chosen, Action)} | ({"success": won} if is_over else {})
        return "" if is_over else shown, float(won), is_over, False, info

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return the result of an episode that the run ended before the page did."""
        return 0.0, {"success": False}

    def oracle(self) -> str:
        """Return an action that leads to the goal from here. Raises EnvError if none is known."""
        try:
            return GOLD[self._name](self._said, self._elements)
        except LookupError:
            raise EnvError(f"{ID}: no way to solve {self._name} is known from here") from None

    async def close(self) -> None:
        browser, self._browser = self._browser, None
        if browser is not None:
            await browser.give_back()

    @property
    def _open_browser(self) -> Browser:
        if self._browser is None:
            raise EnvError(f"{ID}: reset() comes first")
        return self._browser

    async def _open_page(self) -> None:
        await self._open_browser.load(url_of(self._name, SPEC), SCRIPT)

    async def _act(self, browser: Browser, action: Action) -> bool:
        """Do the action; False if its element has gone since the page was shown."""
        place = await browser.evaluate(f"rollFlash.placeOf({action.number})")
        if place is None:
            return False
        if place:  # else it is done
            await browser.click(*place)
        if action.text is not None:
            await browser.evaluate("rollFlash.selectAll()")
            await browser.call("Input.insertText", text=action.text)
        return True

    async def _held_out(self, number: int) -> str:
        """Return the call that begins the page's held-out problem with this number, found by trying seeds in order."""
        known = _held_out[self._name]
        while len(known.seeds) <= number and known.in_vain < MAX_IN_VAIN:
            first = known.tried
            found = await self._open_browser.evaluate(f"rollFlash.findHeldOut({first}, {SEARCHED_AT_ONCE})")
            await self._open_page()
            if known.tried == first:  # else another episode has found the same meanwhile
                known.add(found)
        seed = known.seeds[number % len(known.seeds)] if known.seeds else number
        return f"beginHeldOut({seed})"

    def _shown(self, state: Mapping[str, Any]) -> str:
        self._elements = read_elements(state["elements"])
        return "\n".join(map(str, self._elements))


class _HeldOut:
    """Seeds of the held-out problems of a page: each another problem, as long as the page has more."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.tried = self.in_vain = 0
        self._hashes: set[int] = set()

    def add(self, found: Sequence[tuple[int, int]]) -> None:
        self.tried += SEARCHED_AT_ONCE
        self.in_vain += 1
        for number, hash_of_problem in found:
            if hash_of_problem not in self._hashes:
                self._hashes.add(hash_of_problem)
                self.in_vain = 0
                self.seeds.append(number)


def _resets() -> asyncio.Semaphore:
    """Return this event loop's semaphore: a reset keeps a core busy, and too many at once would all miss deadlines."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(max(2, usable_cores())))


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_held_out: defaultdict[str, _HeldOut] = defaultdict(_HeldOut)
