"""Choose a provider by name and open one sandbox."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import entry_points

from roll_flash.sandboxes.docker.engines import EngineSet
from roll_flash.sandboxes.docker.provider import DockerProvider
from roll_flash.sandboxes.errors import SandboxUnavailable
from roll_flash.sandboxes.local.provider import LocalProvider
from roll_flash.sandboxes.protocol import Provider, Sandbox
from roll_flash.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec

ENTRY_POINTS = "roll_flash.sandboxes"
START_TIMEOUT_S = 30.0
DEFAULT_PARALLEL_STARTS = 8

_log = logging.getLogger("roll_flash.sandboxes")


def provider_names() -> list[str]:
    return ["docker", "local", *sorted(point.name for point in entry_points(group=ENTRY_POINTS))]


def make_provider(
    name: str, *, engines: Sequence[str] = (), max_parallel_starts: int = DEFAULT_PARALLEL_STARTS
) -> Provider:
    """Create the provider `docker`, `docker:tcp://host:2375`, `local` or a plug-in.

    `engines`: addresses of several engines that `docker` uses as one. Raises SandboxUnavailable for an unknown name.
    """
    if name == "docker" and engines:
        return EngineSet(engines, max_parallel_starts=max_parallel_starts)
    if engines:
        raise SandboxUnavailable(f"engines are for the docker provider, not for {name!r}")
    if name == "docker" or name.startswith("docker:"):
        return DockerProvider(name[len("docker:") :] or None, max_parallel_starts=max_parallel_starts)
    if name == "local":
        return LocalProvider(max_parallel_starts=max_parallel_starts)
    for point in entry_points(group=ENTRY_POINTS, name=name):
        plugged: Provider = point.load()()
        return plugged
    raise SandboxUnavailable(f"no sandbox provider is called {name!r}; there are: auto, {', '.join(provider_names())}")


async def connect_provider(
    name: str,
    *,
    spec: SandboxSpec | None = None,
    engines: Sequence[str] = (),
    max_parallel_starts: int = DEFAULT_PARALLEL_STARTS,
) -> Provider:
    """Create and connect a provider. `auto` is docker if an engine has the image of `spec`, else local with a warning.

    `auto` does not check for a custom image, because `local` could not replace it. Raises SandboxUnavailable.
    """
    if name != "auto":
        provider = make_provider(name, engines=engines, max_parallel_starts=max_parallel_starts)
        try:
            await provider.connect()
        except BaseException:
            await provider.close()
            raise
        return provider
    try:
        docker = await connect_provider("docker", engines=engines, max_parallel_starts=max_parallel_starts)
        await _require_image(docker, spec or SandboxSpec())
        return docker
    except SandboxUnavailable as no_docker:
        try:
            provider = await connect_provider("local", max_parallel_starts=max_parallel_starts)
        except SandboxUnavailable as no_local:
            raise SandboxUnavailable(f"no sandbox can be used: {no_docker}; {no_local}") from None
        _log.warning("using the local sandbox (bubblewrap, weaker isolation than docker): %s", no_docker)
        return provider


async def _require_image(provider: Provider, spec: SandboxSpec) -> None:
    """Close the provider and raise SandboxUnavailable if `spec` needs the default image and no engine has it."""
    if spec.dockerfile is not None or spec.image not in (None, DEFAULT_IMAGE):
        return
    assert isinstance(provider, DockerProvider | EngineSet)
    try:
        if not await provider.has_image(DEFAULT_IMAGE):
            raise SandboxUnavailable(
                f"the engine has no image {DEFAULT_IMAGE}; to build it: "
                "python -m roll_flash.sandboxes.images.default_image"
            )
    except BaseException:
        await provider.close()
        raise


@asynccontextmanager
async def open_sandbox(
    spec: SandboxSpec | None = None,
    *,
    provider: str | Provider = "auto",
    run: str = "",
) -> AsyncIterator[Sandbox]:
    """Open one sandbox for the duration of an `async with`. Raises SandboxError if it cannot be started.

    For many sandboxes, in sequence or in parallel, a SandboxPool is faster.
    """
    connected = await connect_provider(provider, spec=spec) if isinstance(provider, str) else provider
    try:
        sandbox = await connected.open(spec or SandboxSpec(), run=run, timeout_s=START_TIMEOUT_S)
        try:
            yield sandbox
        finally:
            await sandbox.close()
    finally:
        if isinstance(provider, str):
            await connected.close()
