"""Volume with the agent program on an engine: one volume per content; every controller verifies it before use.

The engine cannot replace a file atomically, and other sandboxes may be starting from it. So the content goes into a
file with a unique name, and the complete file is then hard-linked as `agent`; an interrupted transfer changes no file
in use. Running sandboxes keep the old file when it is replaced.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import uuid

from roll_flash.sandboxes.client.agent_program import AGENT, FOLDER
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.errors import SandboxStartError
from roll_flash.sandboxes.owner import LABEL, labels

MODE = 0o111
"""Not readable: the kernel then protects processes of this program (a relay has the sandbox's user) from their first
instruction on. Code inside could open the descriptors of a readable one before it protects itself. The same for the
folder: all sandboxes have it, so by locks on it, or by watching it (inotify), they could talk to each other."""


def volume_name(agent: bytes) -> str:
    return f"roll-flash-agent-{hashlib.sha256(agent).hexdigest()[:16]}"


async def make_volume(engine: EngineApi, agent: bytes) -> str:
    """Create the agent's volume if it does not exist, and return its name."""
    volume = volume_name(agent)
    await engine.call("POST", "/volumes/create", body={"Name": volume, "Labels": {LABEL: "agent"}})
    return volume


def filler_config(image: str, volume: str) -> dict[str, object]:
    """Return the config of a container that never runs and gives read and write access to the volume."""
    mount = {"Type": "volume", "Source": volume, "Target": FOLDER, "VolumeOptions": {"NoCopy": True}}
    host = {"Mounts": [mount], "NetworkMode": "none"}
    return {"Image": image, "Cmd": ["/none"], "Labels": labels("agent"), "HostConfig": host}


async def fill(engine: EngineApi, filler: str, agent: bytes) -> bool:
    """Ensure that the volume holds the complete agent; True if it was written. Raises SandboxStartError."""
    if await _is_good(engine, filler, agent):
        return False
    await engine.call("PUT", f"/containers/{filler}/archive", query={"path": "/"}, content=_archive(agent))
    if not await _is_good(engine, filler, agent):
        raise SandboxStartError(
            f"the volume {volume_name(agent)} does not keep the agent that is written to it; is the engine's disk full?"
        )
    return True


async def _is_good(engine: EngineApi, filler: str, agent: bytes) -> bool:
    folder = await engine.stat(filler, FOLDER)
    has_mode = folder is not None and folder["mode"] & 0o777 == MODE
    return has_mode and await engine.read_file(filler, AGENT) == (MODE, agent)


def _archive(agent: bytes) -> bytes:
    whole = tarfile.TarInfo(f"{AGENT[1:]}-{uuid.uuid4().hex[:12]}")
    whole.size, whole.mode = len(agent), MODE
    name = tarfile.TarInfo(AGENT[1:])
    name.type, name.linkname, name.mode = tarfile.LNKTYPE, whole.name, MODE
    folder = tarfile.TarInfo(FOLDER[1:])
    folder.type, folder.mode = tarfile.DIRTYPE, MODE
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(folder)
        archive.addfile(whole, io.BytesIO(agent))
        archive.addfile(name)
    return packed.getvalue()
