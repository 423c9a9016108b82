"""Chromium in a sandbox, asked in its debugging protocol through its standard input and output.

Nothing listens, and no driver is needed. Each message is JSON and ends with a zero byte
(https://chromedevtools.github.io/devtools-protocol). A browser serves one episode at a time. It stays for the next one
of its worker until it is RETIRE_S old or a call has failed, and ends with the worker's pool of sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

from roll_flash.envs.hosting.sandbox_lease import LazySandbox
from roll_flash.errors import EnvError
from roll_flash.sandboxes import Sandbox, SandboxError, SandboxSpec
from roll_flash.sandboxes.client.commands import CommandStream

BROWSER_IMAGE = "roll-flash-browser:latest"
"""Image of `make browser-image`."""
SPEC = SandboxSpec(image=BROWSER_IMAGE, memory_mb=512, cpus=1.0, pids=256)
RETIRE_S, LEASE_S = 1800.0, 7200.0
CALL_S = 30.0
"""Maximum seconds of one call; the machine may be busy."""
MAX_SAID_BYTES = 2000
_CHROMIUM = (
    "exec /usr/lib/chromium/chromium-headless-shell --remote-debugging-pipe --no-sandbox --no-zygote --disable-gpu "
    "--disable-dev-shm-usage --user-data-dir=/tmp/profile about:blank 3<&0 4>&1 </dev/null >/dev/null"
)
"""Without its own sandbox, which needs rights that nothing has in ours; ours takes its place."""
_CRASHES = ("Inspector.targetCrashed", "Inspector.detached")


class Browser:
    """One page of one Chromium. After an error, or a call that was cancelled, it can only be closed."""

    def __init__(self, kept: list[Browser] | None) -> None:
        self._kept = kept
        self._stack = contextlib.AsyncExitStack()
        self._stream: CommandStream
        self._is_usable = False
        self._began = time.monotonic()
        self._received, self._said = b"", b""
        self._number, self._session = 0, ""

    async def start(self, lazy: Sandbox, files: bytes) -> None:
        """Start Chromium with the files of a tar archive in its sandbox. Raises EnvError, SandboxError."""
        sandbox = lazy
        if isinstance(lazy, LazySandbox):  # the lease of an episode ends with it
            sandbox = await self._stack.enter_async_context(lazy.pool.lease(SPEC, timeout=LEASE_S))
        await sandbox.put_tree(files, "html")
        stream = sandbox.stream(_CHROMIUM, timeout=LEASE_S, stdin=True, grace=0.0)
        self._stream = await self._stack.enter_async_context(stream)
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = (await self.call("Target.attachToTarget", targetId=page, flatten=True))["sessionId"]
        await self.call("Inspector.enable")  # it tells of a crash of the page

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol. Raises EnvError, SandboxError."""
        self._number += 1
        self._is_usable = False
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        try:
            async with asyncio.timeout(CALL_S):
                await self._stream.send(json.dumps(message) + "\0")
                answer = await self._answer()
        except TimeoutError:
            raise EnvError(f"the browser did not answer {method} in {CALL_S:g} s") from None
        if "error" in answer:
            raise EnvError(f"the browser refused {method}: {answer['error'].get('message')}")
        self._is_usable = True
        return dict(answer["result"])

    async def load(self, url: str, script: str) -> None:
        """Load a page, and run a script when all of it is there. Raises EnvError, SandboxError."""
        failed = (await self.call("Page.navigate", url=url)).get("errorText")
        if failed:
            raise EnvError(f"the browser cannot load {url}: {failed}")
        await self.evaluate(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', () => done()))"
        )
        await self.call("HeapProfiler.collectGarbage")  # else pages of 2 MB each stay until the sandbox is full
        await self.evaluate(script)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript in the page; of a promise, when it is kept. Raises EnvError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if thrown := answer.get("exceptionDetails"):
            said = str(thrown.get("exception", {}).get("description") or thrown.get("text"))
            raise EnvError(f"the page raised: {' '.join(said.split())[:300]}")
        return answer["result"].get("value")

    async def click(self, x: float, y: float) -> None:
        """Click at a place, in pixels, as a mouse does."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            clicks = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **clicks)

    async def give_back(self) -> None:
        """Keep it for the next episode; close it if it is old or something was wrong with it."""
        if self._kept is not None and self._is_usable and time.monotonic() < self._began + RETIRE_S:
            self._kept.append(self)
        else:
            await self.close()

    async def answers(self) -> bool:
        """True if it still does; else it is closed."""
        with contextlib.suppress(EnvError, SandboxError):
            try:
                await self.call("Runtime.evaluate", expression="0")
            finally:
                if not self._is_usable:
                    await self.close()
        return self._is_usable

    async def close(self) -> None:
        self._is_usable = False
        await self._stack.aclose()

    async def _answer(self) -> dict[str, Any]:
        """Return the answer to the last call. Events, and answers to calls that were cancelled, are dropped."""
        while True:
            while b"\0" not in self._received:
                chunk = await self._stream.next()
                if chunk is None:
                    raise EnvError(f"the browser has ended; it said: {_last_line(self._said)}")
                if chunk.source == "stdout":
                    self._received += chunk.data
                else:
                    self._said = (self._said + chunk.data)[-MAX_SAID_BYTES:]
            text, _, self._received = self._received.partition(b"\0")
            message: dict[str, Any] = json.loads(text)
            if message.get("id") == self._number:
                return message
            if message.get("method") in _CRASHES:
                raise EnvError("the browser's page has crashed")


async def open_browser(sandbox: Sandbox, files: bytes) -> Browser:
    """Return the browser that an earlier episode of this worker left, or start one. Raises EnvError, SandboxError.

    `files`: a tar archive of the pages. A sandbox that is no lease of a pool has its browser for itself.
    """
    kept: list[Browser] | None = sandbox.pool.kept[BROWSER_IMAGE] if isinstance(sandbox, LazySandbox) else None
    while kept:
        earlier = kept.pop()
        if await earlier.answers():
            return earlier
    browser = Browser(kept)
    try:
        await browser.start(sandbox, files)
    except BaseException:
        await browser.close()
        raise
    return browser


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing")
