"""Real sandboxes for the tests. What an engine would be needed for is skipped without one, and fails in CI."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import Any

import pytest
from abuse import close_providers

from roll_flash.sandboxes import SandboxUnavailable
from roll_flash.sandboxes.local.cgroup import can_limit
from roll_flash.sandboxes.providers import connect_provider

Run = Callable[[Callable[[], Awaitable[Any]]], Any]


@cache
def why_unusable(provider: str) -> str | None:
    async def probe() -> None:
        connected = await connect_provider(provider)
        await connected.close()

    try:
        asyncio.run(probe())
    except SandboxUnavailable as error:
        return str(error)
    return None


def need(provider: str) -> None:
    why = why_unusable(provider)
    if why and os.environ.get("CI") == "true":
        pytest.fail(f"CI must be able to run this: {why}")
    if why:
        pytest.skip(why)


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.docker), "local"])
def provider(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _providers() -> Iterator[None]:
    yield
    close_providers()


@pytest.fixture
def limited(provider: str) -> str:
    """A provider that holds sandboxes to their limits: docker, and local where control groups can be made."""
    if provider == "local" and not can_limit():
        pytest.skip("this user may not make control groups, local sandboxes have no limits")
    return provider


@pytest.fixture
def docker() -> str:
    need("docker")
    return "docker"
