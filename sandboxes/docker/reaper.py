"""Find and remove what belongs to controllers that are gone: sandboxes, snapshots' images, scratch folders; old builds.

Touches only what carries our label or name.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.sandboxes.docker.address import EngineAddress
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.errors import SandboxUnavailable
from roll_flash.sandboxes.identity import (
    LABEL,
    LABEL_CREATED,
    LABEL_DEADLINE,
    LABEL_NETWORK,
    LABEL_OWNER,
    LABEL_RUN,
    Owner,
)
from roll_flash.sandboxes.images.kept import SNAPSHOTS, list_images, prune_builds, remove_image
from roll_flash.sandboxes.scratch import ScratchFolder, scratch_folders, sweep_folders

Action = Callable[[EngineApi], Awaitable[list["SandboxEntry"]]]
FOREIGN_AGE_S = 86400.0
"""A sandbox of another machine's process without a deadline counts as left behind after so long."""


@dataclass(frozen=True, slots=True)
class SandboxEntry:
    """One sandbox as its engine lists it, or what a sandbox left."""

    name: str
    run: str
    owner: str
    age_s: float
    state: str
    leaked: bool
    """Its owner is dead, or its deadline has passed."""
    network: str = ""
    """With `network="internal"` the sandbox whose network it is on."""
    engine: str = ""
    kind: str = "container"
    """`container`, `snapshot` (an image), `build` (an image; listed when it is removed), `folder`."""


def list_sandboxes(*hosts: str) -> list[SandboxEntry]:
    """Every labelled container and snapshot of the engines, and the scratch folders of this user here.

    The engine is DOCKER_HOST's by default, with none of either if that does not answer. Raises SandboxUnavailable for
    an engine that was named.
    """
    return [*asyncio.run(_with_engines(hosts, list_entries)), *map(_folder_entry, scratch_folders())]


def reap(*hosts: str) -> list[SandboxEntry]:
    """Remove the leaked ones, and builds that nobody uses any more, and return them.

    Raises SandboxUnavailable as `list_sandboxes`.
    """
    return [*asyncio.run(_with_engines(hosts, sweep)), *map(_folder_entry, sweep_folders())]


async def _with_engines(hosts: Sequence[str], action: Action) -> list[SandboxEntry]:
    found = await asyncio.gather(*(_with_engine(host, action) for host in hosts or (None,)))
    return [entry for entries in found for entry in entries]


async def _with_engine(host: str | None, action: Action) -> list[SandboxEntry]:
    engine = EngineApi(EngineAddress.from_environment(host))
    try:
        await engine.connect()
        return await action(engine)
    except SandboxUnavailable:
        if host is not None:
            raise
        return []
    finally:
        await engine.close()


async def list_entries(engine: EngineApi) -> list[SandboxEntry]:
    """Containers and snapshots of all owners."""
    query = {"all": "1", "filters": json.dumps({"label": [f"{LABEL}=1"]})}
    containers = await engine.json("GET", "/containers/json", query=query)
    images = await list_images(engine, SNAPSHOTS, f"{LABEL}=1")
    return [
        *(_entry(item, engine.address.host) for item in containers),
        *(_entry(item, engine.address.host, name) for item in images for name in item["RepoTags"]),
    ]


async def labelled(engine: EngineApi, label: str | None) -> list[str]:
    """Ids of the containers, in whatever state, that carry a label; None is all of the engine's."""
    query = {"all": "1", **({"filters": json.dumps({"label": [label]})} if label else {})}
    return [str(item["Id"]) for item in await engine.json("GET", "/containers/json", query=query)]


async def sweep(engine: EngineApi) -> list[SandboxEntry]:
    """Remove what dead owners left behind on this engine, and the builds that nobody uses any more."""
    removed = await remove_leaked(engine)
    return removed + [
        SandboxEntry(name, "", "", round(unused_s, 1), "unused", True, engine=engine.address.host, kind="build")
        for name, unused_s in await prune_builds(engine)
    ]


async def remove_leaked(engine: EngineApi) -> list[SandboxEntry]:
    """Remove what dead owners left behind on this engine."""
    leaked = [entry for entry in await list_entries(engine) if entry.leaked]
    containers = [entry for entry in leaked if entry.kind == "container"]
    await _remove(engine, containers)
    snapshots = [entry for entry in leaked if entry.kind == "snapshot"]
    return containers + [entry for entry in snapshots if await remove_image(engine, entry.name, force=True)]


async def _remove(engine: EngineApi, entries: Sequence[SandboxEntry]) -> None:
    limit = asyncio.Semaphore(8)

    async def remove(entry: SandboxEntry) -> None:
        async with limit:
            await remove_container(engine, entry.name, has_run=entry.state != "created")

    await asyncio.gather(*(remove(entry) for entry in entries))


async def remove_container(engine: EngineApi, name: str, *, has_run: bool = True) -> bool:
    """False: somebody else is removing it just now. Raises SandboxUnreachable."""
    if not has_run:
        # Removed without having run, an attached container keeps its connection in the engine for ever.
        await engine.call("POST", f"/containers/{name}/start", accept=(400, 404, 409, 500))
    query = {"force": "1", "v": "1"}
    answer = await engine.call("DELETE", f"/containers/{name}", query=query, accept=(404, 409))
    return answer.status_code != 409


def _entry(item: dict[str, Any], engine: str, image: str | None = None) -> SandboxEntry:
    """Of a container; with `image`, of the snapshot of that name."""
    marks = item.get("Labels") or {}
    age_s = max(0.0, time.time() - float(marks.get(LABEL_CREATED) or item.get("Created") or 0))
    name = str(item["Names"][0]).lstrip("/") if item.get("Names") else str(item["Id"])
    return SandboxEntry(
        name=image or name,
        run=marks.get(LABEL_RUN, ""),
        owner=marks.get(LABEL_OWNER, ""),
        age_s=round(age_s, 1),
        state=str(item.get("State", "")) if image is None else "snapshot",
        leaked=_is_leaked(marks, age_s),
        network=marks.get(LABEL_NETWORK, ""),
        engine=engine,
        kind="container" if image is None else "snapshot",
    )


def _folder_entry(folder: ScratchFolder) -> SandboxEntry:
    age_s = round(folder.age_s, 1)
    return SandboxEntry(str(folder.path), "", folder.owner, age_s, "folder", folder.leaked, kind="folder")


def _is_leaked(marks: dict[str, str], age_s: float) -> bool:
    deadline = marks.get(LABEL_DEADLINE)
    if deadline and time.time() > float(deadline):
        return True
    try:
        lives = Owner.parse(marks.get(LABEL_OWNER, "")).lives()
    except ValueError:
        return False
    return not lives if lives is not None else (not deadline and age_s > FOREIGN_AGE_S)
