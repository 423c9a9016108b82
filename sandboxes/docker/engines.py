"""Several Docker engines as one provider: each sandbox starts on the engine with the fewest sandboxes.

A failed engine is paused for a back-off that doubles with each failure. If every other engine fails too, it is tried
at once, so that a start fails only after every engine was tried. Parallel starts are limited per engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from roll_flash.sandboxes.docker.provider import DockerProvider
from roll_flash.sandboxes.errors import (
    SandboxDiskFull,
    SandboxError,
    SandboxImageMissing,
    SandboxSpecError,
    SandboxStartError,
    SandboxUnavailable,
    SandboxUnreachable,
)
from roll_flash.sandboxes.protocol import Isolation, Sandbox
from roll_flash.sandboxes.spec import SandboxSpec

INITIAL_BACKOFF_S = 5.0
MAX_BACKOFF_S = 300.0
ENGINE_ERRORS = (SandboxUnavailable, SandboxUnreachable, SandboxDiskFull)
"""Errors of the engine itself: it is paused."""
SPEC_OR_IMAGE_ERRORS = (SandboxImageMissing, SandboxSpecError)
"""Errors that another engine may not have: a missing image, not enough memory."""
DOUBTFUL_ERRORS = (SandboxStartError,)
"""Errors of the spec or of the engine: it is paused if another engine starts the same spec."""

_log = logging.getLogger("roll_flash.sandboxes")


class _EngineHandle:
    """One engine of a set."""

    def __init__(self, host: str, max_parallel_starts: int) -> None:
        self.host = host
        self.provider = DockerProvider(host, max_parallel_starts=max_parallel_starts)
        self.connected = False
        self.opening = 0
        self.failures = 0
        self.paused_until = 0.0
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        async with self._connecting:
            if not self.connected:
                await self.provider.connect()
                self.connected = True

    @property
    def load(self) -> int:
        return self.opening + self.provider.live

    def back_off(self, error: SandboxError) -> None:
        """Pause the engine, for longer each time. Of starts that fail side by side only the first counts."""
        if time.monotonic() < self.paused_until:
            return
        wait_s = min(MAX_BACKOFF_S, INITIAL_BACKOFF_S * 2**self.failures)
        self.failures += 1
        self.paused_until = time.monotonic() + wait_s
        _log.warning("the engine at %s is paused for %g s: %s", self.host, wait_s, error)

    def reset_backoff(self) -> None:
        self.failures, self.paused_until = 0, 0.0


class EngineSet:
    name = "docker"
    isolation: Isolation = "strong"

    def __init__(self, hosts: Sequence[str], *, max_parallel_starts: int = 8) -> None:
        """`hosts`: addresses for `EngineAddress.from_environment`. Raises SandboxUnavailable for an invalid one."""
        if not hosts or len(set(hosts)) != len(hosts):
            raise SandboxUnavailable("engines: name at least one Docker engine, and each once")
        self._members = [_EngineHandle(host, max_parallel_starts) for host in hosts]

    async def connect(self) -> None:
        """Connect to all engines; pause those that fail. Raises SandboxUnavailable if no engine answers."""
        outcomes = await asyncio.gather(*(member.connect() for member in self._members), return_exceptions=True)
        failed: list[str] = []
        for member, outcome in zip(self._members, outcomes, strict=True):
            if isinstance(outcome, SandboxError):
                member.back_off(outcome)
                failed.append(str(outcome))
            elif outcome is not None:
                raise outcome
        if len(failed) == len(self._members):
            raise SandboxUnavailable(f"none of the engines can be used: {'; '.join(failed)}")

    async def has_image(self, image: str) -> bool:
        """True if at least one connected engine has the image."""
        answers = (member.provider.has_image(image) for member in self._members if member.connected)
        return any(await asyncio.gather(*answers))

    def describe_isolation(self, spec: SandboxSpec) -> dict[str, str]:
        """Return the isolation measures of the connected engines; different values are joined by commas."""
        found = [member.provider.describe_isolation(spec) for member in self._members if member.connected]
        return {name: ", ".join(dict.fromkeys(one[name] for one in found)) for name in (found[0] if found else ())}

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        tried: list[_EngineHandle] = []
        refusals: list[SandboxError] = []
        doubtful: list[tuple[_EngineHandle, SandboxError]] = []
        while (member := self._next(tried)) is not None:
            tried.append(member)
            member.opening += 1
            try:
                await member.connect()
                sandbox = await member.provider.open(spec, run=run, timeout_s=timeout_s)
            except ENGINE_ERRORS as error:
                member.back_off(error)
                refusals.append(error)
            except SPEC_OR_IMAGE_ERRORS as error:
                refusals.append(error)
            except DOUBTFUL_ERRORS as error:
                refusals.append(error)
                doubtful.append((member, error))
            else:
                member.reset_backoff()
                for other, why in doubtful:
                    other.back_off(why)
                return sandbox
            finally:
                member.opening -= 1
        if len(refusals) == 1 or all(isinstance(error, SPEC_OR_IMAGE_ERRORS) for error in refusals):
            raise refusals[-1]
        are_away = all(isinstance(error, SandboxUnreachable) for error in refusals)
        kind = SandboxUnreachable if are_away else SandboxStartError
        raise kind(f"no engine could start a sandbox: {'; '.join(map(str, refusals))}")

    def _next(self, tried: Sequence[_EngineHandle]) -> _EngineHandle | None:
        """Return the least loaded engine that is not paused; if all are, the one whose pause ends first."""
        left = [member for member in self._members if member not in tried]
        now = time.monotonic()
        fit = [member for member in left if member.paused_until <= now]
        if fit:
            return min(fit, key=lambda member: member.load)
        return min(left, key=lambda member: member.paused_until, default=None)

    async def sweep(self) -> int:
        removed = 0
        for member in self._members:
            if not member.connected or member.paused_until > time.monotonic():
                continue
            try:
                removed += await member.provider.sweep()
            except SandboxError as error:
                member.back_off(error)
        return removed

    async def close(self) -> None:
        outcomes = await asyncio.gather(*(member.provider.close() for member in self._members), return_exceptions=True)
        for member, outcome in zip(self._members, outcomes, strict=True):
            if isinstance(outcome, SandboxError):
                _log.warning("closing the engine at %s: %s", member.host, outcome)
            elif outcome is not None:
                raise outcome
