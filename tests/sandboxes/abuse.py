"""How the abuse tests run an attack: in a sandbox of its own, which must be alive afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from roll_flash.sandboxes import ExecResult, Sandbox, SandboxSpec
from roll_flash.sandboxes.client.agent_program import compile_static
from roll_flash.sandboxes.protocol import Provider
from roll_flash.sandboxes.providers import connect_provider

_runner = asyncio.Runner()
_providers: dict[str, Provider] = {}
SOURCE = Path(__file__).with_name("attack.c")


@cache
def attack_program() -> bytes:
    with TemporaryDirectory() as folder:  # other processes of the tests compile it too
        compile_static("x86_64", [SOURCE], Path(folder, "attack"))
        return Path(folder, "attack").read_bytes()


def within(
    provider: str,
    action: Callable[[Sandbox], Awaitable[Any]],
    spec: SandboxSpec | None = None,
    *,
    must_live: bool = True,
) -> Any:
    """Run `action` on a fresh sandbox; afterwards the sandbox must still serve commands and files."""

    async def run() -> Any:
        if provider not in _providers:
            _providers[provider] = await connect_provider(provider)
        sandbox = await _providers[provider].open(spec or SandboxSpec(), run="abuse", timeout_s=30)
        try:
            result = await action(sandbox)
            if must_live:
                assert (await sandbox.exec("echo still here", timeout=10)).stdout == b"still here\n"
            return result
        finally:
            await sandbox.close()

    attack_program()  # compiled before the time begins
    return _runner.run(asyncio.wait_for(run(), 100))


def close_providers() -> None:
    """At the end of the session; one provider of each kind serves all attacks."""

    async def close() -> None:
        for connected in _providers.values():
            await connected.close()

    _runner.run(close())
    _runner.close()


def shell(provider: str, line: str, spec: SandboxSpec | None = None, *, timeout: float = 20.0) -> ExecResult:
    async def action(sandbox: Sandbox) -> ExecResult:
        return await sandbox.exec(line, timeout=timeout)

    result: ExecResult = within(provider, action, spec)
    return result


def attempt(provider: str, *words: str, spec: SandboxSpec | None = None, timeout: float = 20.0) -> ExecResult:
    """Run one attempt of attack.c."""

    async def action(sandbox: Sandbox) -> ExecResult:
        await sandbox.write("/tmp/attack", attack_program(), mode=0o755)
        return await sandbox.exec(["/tmp/attack", *words], timeout=timeout)

    result: ExecResult = within(provider, action, spec)
    return result
