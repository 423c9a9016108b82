"""Images that an engine keeps for sandboxes: snapshots, removed with their owner, and builds, removed when unused.

A build has no owner: its name is the hash of its inputs, so every controller can reuse it. The time of its last use is
stored in the engine as the time when the image was last tagged, so all controllers of an engine see the same time.
A build that is unused for BUILD_AGE_S is removed.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import Any

from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.errors import SandboxError
from roll_flash.sandboxes.owner import LABEL

IMAGE_NAME = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9_.:@+\[\]-]*(/[A-Za-z0-9][A-Za-z0-9_.:@+-]*)*")
"""All else would ask for something else in a path of the engine's API: `../events?x=` for events without end."""
SNAPSHOTS = "roll-flash-snapshot"
BUILDS = "roll-flash-build"
BUILD_LABEL = f"{LABEL}=image"
BUILD_AGE_S = 7 * 86400.0
NOTE_EVERY_S = 3600.0
"""Resolution in seconds of the time of last use."""


async def inspect_image(engine: EngineApi, name: str) -> dict[str, Any] | None:
    """Return the engine's description of an image; None if it has no image with this name, or if that is no name."""
    if not IMAGE_NAME.fullmatch(name):
        return None
    answer = await engine.call("GET", f"/images/{name}/json", accept=(404,))
    return None if answer.status_code == 404 else dict(answer.json())


async def list_images(engine: EngineApi, repository: str, label: str) -> list[dict[str, Any]]:
    """Return the engine's image entries that have a name."""
    query = {"filters": json.dumps({"reference": [repository], "label": [label]})}
    return [image for image in await engine.json("GET", "/images/json", query=query) if image.get("RepoTags")]


async def remove_image(engine: EngineApi, name: str) -> bool:
    """Remove an image. False if it is missing or a container uses it.

    Not by force: if a container runs, that removes only the name, and nobody finds the image any more.
    """
    return (await engine.call("DELETE", f"/images/{name}", accept=(404, 409))).status_code == 200


async def use_build(engine: EngineApi, name: str) -> bool:
    """True if the engine has this build; records the current time as its last use."""
    age_s = await _unused_s(engine, name)
    if age_s is not None and age_s > NOTE_EVERY_S:
        repository, _, tag = name.partition(":")
        query = {"repo": repository, "tag": tag}
        answer = await engine.call("POST", f"/images/{name}/tag", query=query, accept=(404,))
        return answer.status_code != 404
    return age_s is not None


async def prune_builds(engine: EngineApi, older_than_s: float = BUILD_AGE_S) -> list[tuple[str, float]]:
    """Remove builds unused for `older_than_s` seconds; return their names and the seconds without use."""
    removed = []
    for image in await list_images(engine, BUILDS, BUILD_LABEL):
        for name in image["RepoTags"]:
            age_s = await _unused_s(engine, name)
            if age_s is not None and age_s > older_than_s and await remove_image(engine, name):
                removed.append((name, age_s))
    return removed


async def _unused_s(engine: EngineApi, name: str) -> float | None:
    """Return the seconds since the last use of an image; None if it does not exist. Raises SandboxError."""
    described = await inspect_image(engine, name)
    if described is None:
        return None
    times = (str(described.get("Metadata", {}).get("LastTagTime", "")), str(described.get("Created", "")))
    known = [moment for moment in map(_seconds, times) if moment > 0]
    if not known:
        raise SandboxError(f"the engine does not tell how old its image {name} is")
    return max(0.0, time.time() - max(known))


def _seconds(moment: str) -> float:
    """Convert an engine's timestamp (nanoseconds, zone) to seconds since 1970; 0 if it is invalid."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError):
        return 0.0
