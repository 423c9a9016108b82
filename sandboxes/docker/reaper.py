"""Find and remove leftovers of dead controllers (sandboxes, images of snapshots, scratch folders) and old builds.

Touches only objects with our label or name.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.sandboxes.docker.api import EngineApi, open_engine
from roll_flash.sandboxes.errors import SandboxUnavailable
from roll_flash.sandboxes.images.stored_images import SNAPSHOTS, list_images, prune_builds, remove_image
from roll_flash.sandboxes.local.cgroup import LeakedCgroup, leaked_cgroups, sweep_cgroups
from roll_flash.sandboxes.owner import (
    LABEL,
    LABEL_CREATED,
    LABEL_NETWORK,
    LABEL_OWNER,
    LABEL_RUN,
    Owner,
)
from roll_flash.sandboxes.scratch import ScratchFolder, scratch_folders, sweep_folders

Action = Callable[[EngineApi], Awaitable[list["SandboxEntry"]]]


@dataclass(frozen=True, slots=True)
class SandboxEntry:
    """One sandbox in an engine's list, or a leftover of a sandbox."""

    name: str
    run: str
    owner: str
    age_s: float
    state: str
    leaked: bool
    """True if its owner is dead, or unknown and old; or if the engine was killed while it removed it (state `dead`)."""
    network: str = ""
    """With `network="internal"`: the sandbox that owns its network."""
    engine: str = ""
    kind: str = "container"
    """`container`, `snapshot` (an image), `build` (an image; only in results of `reap`), `folder` or `local` (a leaked
    sandbox of the local provider)."""


def list_sandboxes(*hosts: str) -> list[SandboxEntry]:
    """List every labelled container and snapshot of the engines, and on this machine this user's scratch folders and
    the leaked sandboxes of the local provider.

    Default engine: DOCKER_HOST, skipped if it does not answer. Raises SandboxUnavailable if an engine in `hosts` does
    not answer.
    """
    entries = asyncio.run(_with_engines(hosts, list_entries))
    return [*entries, *map(_folder_entry, scratch_folders()), *map(_local_entry, leaked_cgroups())]


def reap(*hosts: str) -> list[SandboxEntry]:
    """Remove leaked entries and unused builds, and return them.

    Raises SandboxUnavailable like `list_sandboxes`.
    """
    entries = asyncio.run(_with_engines(hosts, sweep))
    return [*entries, *map(_folder_entry, sweep_folders()), *map(_local_entry, sweep_cgroups())]


async def _with_engines(hosts: Sequence[str], action: Action) -> list[SandboxEntry]:
    found = await asyncio.gather(*(_with_engine(host, action) for host in hosts or (None,)))
    return [entry for entries in found for entry in entries]


async def _with_engine(host: str | None, action: Action) -> list[SandboxEntry]:
    try:
        async with open_engine(host) as engine:
            return await action(engine)
    except SandboxUnavailable:
        if host is not None:
            raise
        return []


async def list_entries(engine: EngineApi) -> list[SandboxEntry]:
    """List containers and snapshots of all owners."""
    query = {"all": "1", "filters": json.dumps({"label": [f"{LABEL}=1"]})}
    listed = await engine.json("GET", "/containers/json", query=query)
    containers = [item for item in listed if item["State"] != "dead" or await _exists(engine, item["Id"])]
    images = await list_images(engine, SNAPSHOTS, f"{LABEL}=1")
    return [
        *(_entry(item, engine.address.host) for item in containers),
        *(_entry(item, engine.address.host, name) for item in images for name in item["RepoTags"]),
    ]


async def _exists(engine: EngineApi, container: str) -> bool:
    """False for a container that the engine lists as dead after its removal, until the engine starts again."""
    answer = await engine.call("GET", f"/containers/{container}/json", accept=(404,))
    return answer.status_code != 404


async def sweep(engine: EngineApi) -> list[SandboxEntry]:
    """Remove leftovers of dead owners and unused builds on this engine."""
    removed = await remove_leaked(engine)
    return removed + [
        SandboxEntry(name, "", "", round(unused_s, 1), "unused", True, engine=engine.address.host, kind="build")
        for name, unused_s in await prune_builds(engine)
    ]


async def remove_leaked(engine: EngineApi) -> list[SandboxEntry]:
    """Remove leftovers of dead owners on this engine."""
    leaked = [entry for entry in await list_entries(engine) if entry.leaked]
    removed = await _remove(engine, [entry for entry in leaked if entry.kind == "container"])
    snapshots = [entry for entry in leaked if entry.kind == "snapshot"]
    return removed + [entry for entry in snapshots if await remove_image(engine, entry.name)]


async def _remove(engine: EngineApi, containers: Sequence[SandboxEntry]) -> list[SandboxEntry]:
    """Remove containers, and return them without those that another process is removing."""
    limit = asyncio.Semaphore(8)

    async def remove(entry: SandboxEntry) -> bool:
        async with limit:
            return await remove_container(engine, entry.name, has_run=entry.state != "created")

    removed = await asyncio.gather(*map(remove, containers))
    return [entry for entry, is_removed in zip(containers, removed, strict=True) if is_removed]


async def remove_container(engine: EngineApi, name: str, *, has_run: bool = True) -> bool:
    """Remove a container. False if another process is removing it. Raises SandboxUnreachable."""
    if not has_run:
        # If removed before it ran, an attached container keeps its connection in the engine forever.
        await engine.call("POST", f"/containers/{name}/start", accept=(400, 404, 409, 500))
    query = {"force": "1", "v": "1"}
    answer = await engine.call("DELETE", f"/containers/{name}", query=query, accept=(404, 409))
    return answer.status_code != 409


def _entry(item: dict[str, Any], engine: str, image: str | None = None) -> SandboxEntry:
    """Return the entry of a container, or of the snapshot named `image`."""
    marks = item.get("Labels") or {}
    age_s = max(0.0, time.time() - float(marks.get(LABEL_CREATED) or item.get("Created") or 0))
    name = str(item["Names"][0]).lstrip("/") if item.get("Names") else str(item["Id"])
    return SandboxEntry(
        name=image or name,
        run=marks.get(LABEL_RUN, ""),
        owner=marks.get(LABEL_OWNER, ""),
        age_s=round(age_s, 1),
        state=str(item.get("State", "")) if image is None else "snapshot",
        leaked=item.get("State") == "dead" or _is_leaked(marks, age_s),
        network=marks.get(LABEL_NETWORK, ""),
        engine=engine,
        kind="container" if image is None else "snapshot",
    )


def _folder_entry(folder: ScratchFolder) -> SandboxEntry:
    age_s = round(folder.age_s, 1)
    return SandboxEntry(str(folder.path), "", folder.owner, age_s, "folder", folder.leaked, kind="folder")


def _local_entry(group: LeakedCgroup) -> SandboxEntry:
    return SandboxEntry(group.sandbox, "", str(group.owner), round(group.age_s, 1), "local", True, kind="local")


def _is_leaked(marks: dict[str, str], age_s: float) -> bool:
    try:
        return Owner.parse(marks.get(LABEL_OWNER, "")).is_gone(age_s)
    except ValueError:
        return False
