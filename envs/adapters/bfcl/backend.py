"""Runs an item's tool classes and checker in the sandbox, in a server that keeps their state for the episode.

A call that hangs or takes too much memory ends the server; a new one starts and repeats the successful calls. The
ground-truth calls enter the sandbox only with the last request, after the model has finished.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import io
import json
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.envs.adapters.bfcl.items import ENVIRONMENT, BfclItem, package_folder
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.errors import EnvError
from roll_flash.sandboxes import Sandbox, SandboxSpec

START_TIMEOUT_S = 60.0
EPISODE_TIMEOUT_FACTOR = 2
"""Time limit of all calls of an episode together, in multiples of the timeout of one call."""
CHECK_TIMEOUT_S = 20.0
"""Timeout in seconds of a check with the model's calls, which took less, and of one without; both fit into a step."""
CHECKER_ENDED = "multi_turn:checker_ended"
"""Own error type: the checker gives no verdict, because the calls take too much memory or nest too deeply."""
MEMORY_MB = 256
STDERR_CHARACTERS = 2000
_SERVER, _BUNDLE = "bfcl_server.py", "bfcl.zip"
_CHECKER_MODULES = (
    "constants/executable_backend_config",
    "eval_checker/multi_turn_eval/multi_turn_checker",
    "eval_checker/multi_turn_eval/multi_turn_utils",
)
_CLASS_FOLDER = "eval_checker/multi_turn_eval/func_source_code"
_CLASS_MODULES = (
    "gorilla_file_system",
    "long_context",
    "math_api",
    "message_api",
    "posting_api",
    "ticket_api",
    "trading_bot",
    "travel_booking",
    "vehicle_control",
)
_LACKING_IN_A_MINIMAL_PYTHON = ("colorsys", "decimal", "_pydecimal", "json", "numbers")
"""Modules of the standard library that the classes need and Debian's python3-minimal lacks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of bfcl-eval's checker. `error_type` is one of the checker's names; empty if valid."""

    valid: bool
    error_type: str = ""
    error_message: str = ""


class ServerEndedError(Exception):
    """The server timed out or ended; the message says which."""


class BfclBackend:
    """Tool classes of one item. The server starts with the first call."""

    def __init__(self, sandbox: Sandbox, item: BfclItem, call_timeout_s: float) -> None:
        self._sandbox = sandbox
        self._item = item
        self._call_timeout_s = call_timeout_s
        self._left_s = EPISODE_TIMEOUT_FACTOR * call_timeout_s
        """Seconds left for further calls, and for servers started after the first. Limited because the checker, and a
        restart after a hang, repeat all calls: after many calls that end their server a step would exceed its time."""
        self._is_first = True
        self._done: list[str] = []
        self._server: _Server | None = None

    async def start(self) -> None:
        """Start the server if it is not running and time is left, as the next call does. Raises as `run`."""
        if self._left_s <= 0 or self._server is not None:
            return
        began, is_first, self._is_first = time.monotonic(), self._is_first, False
        try:
            await self._running()
        finally:
            self._left_s -= 0.0 if is_first else time.monotonic() - began

    async def run(self, source: str) -> str:
        """Return the result of one call, as text. Raises ServerEndedError for a call that hangs or ends the server,
        SandboxError and EnvError."""
        await self.start()
        if self._left_s <= 0 or (server := self._server) is None:
            raise ServerEndedError("was not run: the calls before it took all the time of the episode")
        began = time.monotonic()
        try:
            results = await server.ask({"calls": [source]}, min(self._call_timeout_s, self._left_s))
        except ServerEndedError:
            await self.close()
            raise
        finally:
            self._left_s -= time.monotonic() - began
        self._done.append(source)
        return str(results["results"][0])

    async def check(self, turns: Sequence[Sequence[Sequence[str]]]) -> Verdict:
        """Return the verdict on all calls of the model, by turn and step. Without a verdict the calls are wrong if the
        checker has a verdict on the ground truth; else raises EnvError."""
        self._done = []  # the checker makes all calls itself
        try:
            return await self._ask_checker(turns)
        except ServerEndedError as error:
            why = f"bfcl-eval's checker {error}"
        try:
            await self._ask_checker([[calls] for calls in self._item.ground_truth])
        except ServerEndedError as error:
            raise EnvError(f"{ENVIRONMENT}: {self._item.item_id}: bfcl-eval's checker {error}") from None
        return Verdict(False, CHECKER_ENDED, why)

    async def _ask_checker(self, turns: Sequence[Sequence[Sequence[str]]]) -> Verdict:
        """Send the calls to the checker. Raises ServerEndedError."""
        server = await self._running()
        try:
            said = await server.ask({"check": turns, "ground_truth": self._item.ground_truth}, CHECK_TIMEOUT_S)
        finally:
            await self.close()
        return Verdict(bool(said["valid"]), said["error_type"], said["error_message"])

    async def close(self) -> None:
        """Stop the server; may be called more than once."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _running(self) -> _Server:
        if self._server is None:
            item = self._item
            first = {
                "id": item.item_id,
                "initial_config": item.initial_config,
                "involved_classes": item.involved_classes,
                "long_context": item.is_long_context,
            }
            self._server = server = _Server()
            try:
                await server.start(self._sandbox, first)
            except ServerEndedError as error:
                await self.close()
                raise EnvError(f"{ENVIRONMENT}: the tool classes do not start in the sandbox: it {error}") from None
            if self._done:
                await self._repeat_calls(server)
        return self._server

    async def _repeat_calls(self, server: _Server) -> None:
        """Repeat the successful calls on a new server. If it ends because of them, no further call of the episode can
        be run; that is the model's doing. Raises ServerEndedError."""
        try:
            await server.ask({"again": self._done}, min(START_TIMEOUT_S, self._left_s))
        except ServerEndedError as error:
            self._left_s = 0.0
            await self.close()
            raise ServerEndedError(f"was not run: when the calls before it were repeated, the server {error}") from None


class _Server:
    """Connection to the program in the sandbox: requests and answers are single lines of JSON."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._stream: Any = None
        self._received = bytearray()
        self._stderr = ""

    async def start(self, sandbox: Sandbox, first: Mapping[str, Any]) -> None:
        command = ("python3", "-I", "-B", _SERVER, _BUNDLE)
        self._stream = await self._stack.enter_async_context(sandbox.stream(command, timeout=None, stdin=True))
        await self.ask(first, START_TIMEOUT_S)

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        scope = asyncio.timeout(timeout_s)
        try:
            async with scope:
                await self._stream.send(json.dumps(request) + "\n")
                return json.loads(await self._read_line())
        except TimeoutError:
            if not scope.expired():
                raise
            raise ServerEndedError(f"took longer than {timeout_s:.3g} s and was given up") from None

    async def _read_line(self) -> bytes:
        while b"\n" not in self._received:
            chunk = await self._stream.next()
            if chunk is None:
                reason = self._stderr.strip().rpartition("\n")[2] or "no reason given; too little memory?"
                raise ServerEndedError(f"ended: {reason}")
            if chunk.source == "stdout":
                self._received += chunk.data
            else:
                self._stderr = (self._stderr + chunk.data.decode(errors="replace"))[-STDERR_CHARACTERS:]
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line

    async def close(self) -> None:
        await self._stack.aclose()


@functools.cache
def backend_spec() -> SandboxSpec:
    """Return the spec of a sandbox with the server and its modules. Raises ConfigError if a package is missing."""
    server = Path(__file__).with_name("server.py").read_bytes()
    return SandboxSpec(memory_mb=MEMORY_MB, files=tuple(sorted({_SERVER: server, _BUNDLE: _bundle()}.items())))


def _bundle() -> bytes:
    """Return a zip archive that Python imports from; deterministic, because its bytes identify the spec."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_modules()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _modules() -> Iterator[tuple[str, bytes]]:
    root = package_folder()
    for name in (*_CHECKER_MODULES, *(f"{_CLASS_FOLDER}/{module}" for module in _CLASS_MODULES)):
        yield f"bfcl_eval/{name}.py", (root / f"{name}.py").read_bytes()
    packages = {"bfcl_eval", *(f"bfcl_eval/{path}" for path in ("constants", "eval_checker", _CLASS_FOLDER))}
    for folder in (*packages, "bfcl_eval/eval_checker/multi_turn_eval"):
        yield f"{folder}/__init__.py", b""
    mpmath = Path(import_optional("mpmath", package="mpmath", needed_by=ENVIRONMENT).__file__).parent
    yield from _tree("lib/mpmath", mpmath)
    for name in _LACKING_IN_A_MINIMAL_PYTHON:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin)
        if source.name == "__init__.py":
            yield from _tree(f"lib/{name}", source.parent)
        else:
            yield f"lib/{name}.py", source.read_bytes()


def _tree(name: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder)
        if "tests" not in inner.parts:
            yield f"{name}/{inner.as_posix()}", path.read_bytes()
