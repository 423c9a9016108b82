"""The agent's program on an engine: one volume for each content, looked at by every controller before it is used.

The engine cannot replace a file at one stroke, and others may be starting from it. So the content goes into a file with
a name of its own, and only when that is whole it becomes `agent`, as a second name of the same file; a transfer that is
cut short changes nothing that anybody runs. Sandboxes that run from a file that was replaced keep the one they have.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import uuid

import httpx

from roll_flash.sandboxes.client.agent_program import FOLDER, AgentProgram
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.docker.container_config import volume_name
from roll_flash.sandboxes.errors import SandboxStartError
from roll_flash.sandboxes.identity import LABEL, labels

MODE = 0o755


async def make_volume(engine: EngineApi, agent: AgentProgram) -> str:
    """Fine if it is there."""
    volume = volume_name(agent)
    await engine.call("POST", "/volumes/create", body={"Name": volume, "Labels": {LABEL: "agent"}})
    return volume


def filler_config(image: str, volume: str) -> dict[str, object]:
    """A container that never runs, through which the volume is read and written."""
    mount = {"Type": "volume", "Source": volume, "Target": FOLDER, "VolumeOptions": {"NoCopy": True}}
    host = {"Mounts": [mount], "NetworkMode": "none"}
    return {"Image": image, "Cmd": ["/none"], "Labels": labels("agent", None), "HostConfig": host}


async def fill(engine: EngineApi, filler: str, agent: AgentProgram) -> bool:
    """Have the volume hold the agent, whole; whether it had to be written. Raises SandboxStartError."""
    if await _holds(engine, filler, agent):
        return False
    query, path = {"path": FOLDER}, f"/containers/{filler}/archive"
    await engine.call("PUT", path, query=query, content=_archive(agent))
    if not await _holds(engine, filler, agent):
        raise SandboxStartError(
            f"the volume {volume_name(agent)} does not keep the agent that is written to it; is the engine's disk full?"
        )
    return True


async def _holds(engine: EngineApi, filler: str, agent: AgentProgram) -> bool:
    path, query = f"/containers/{filler}/archive", {"path": f"{FOLDER}/agent"}
    found: httpx.Response = await engine.call("GET", path, query=query, accept=(404,))
    if found.status_code == 404:
        return False
    try:
        with tarfile.open(fileobj=io.BytesIO(found.content)) as archive:
            member = archive.next()
            content = archive.extractfile(member) if member is not None and member.isreg() else None
            if member is None or content is None or member.mode & MODE != MODE:
                return False
            return hashlib.sha256(content.read()).digest() == hashlib.sha256(agent.content).digest()
    except (tarfile.TarError, EOFError):
        return False


def _archive(agent: AgentProgram) -> bytes:
    whole = tarfile.TarInfo(f"agent-{uuid.uuid4().hex[:12]}")
    whole.size, whole.mode = len(agent.content), MODE
    name = tarfile.TarInfo("agent")
    name.type, name.linkname, name.mode = tarfile.LNKTYPE, whole.name, MODE
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(whole, io.BytesIO(agent.content))
        archive.addfile(name)
    return packed.getvalue()
