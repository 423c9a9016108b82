"""Sandboxes in hardened Docker containers, each with a resident agent on its attached stdin and stdout.

The agent comes into any image through one read-only volume per agent version and engine. Unlike a bind mount that works
with remote engines; unlike a derived image it leaves the user's image, and snapshots of it, as they are.
"""

from __future__ import annotations

import asyncio
import errno
import io
import subprocess
import sys
import tarfile
import time
import uuid
from pathlib import Path
from typing import Any

from roll_flash.sandboxes.agent_program import FOLDER, AgentProgram, agent_program
from roll_flash.sandboxes.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.connection import AgentConnection
from roll_flash.sandboxes.container_config import container_config, volume_name, volume_paths
from roll_flash.sandboxes.engine_address import EngineAddress
from roll_flash.sandboxes.engine_api import EngineApi
from roll_flash.sandboxes.engine_events import EngineEvents
from roll_flash.sandboxes.engine_isolation import EngineIsolation
from roll_flash.sandboxes.errors import SandboxFileError, SandboxSpecError, SandboxStartError, SandboxUnreachable
from roll_flash.sandboxes.identity import GROUP, LABEL, LABEL_OWNER, Owner, labels, new_user
from roll_flash.sandboxes.image_build import image_of
from roll_flash.sandboxes.multiplex import Demultiplexer
from roll_flash.sandboxes.protocol import Isolation, Sandbox
from roll_flash.sandboxes.reaper import remove_container, sweep
from roll_flash.sandboxes.spec import SandboxSpec

REMOVE_TIMEOUT_S = 30.0
WATCHDOG_TIMEOUT_S = 10.0
COMMIT_TIMEOUT_S = 120.0
VOLUMES_KNOWN_S = 10.0
"""How long an image name is taken for the same image."""
SNAPSHOTS = "roll-flash-snapshot"


class _NameTaken(SandboxStartError):
    """Another sandbox has the name, and the user that goes with it."""


class DockerProvider:
    """`connect` first. Several sandboxes may be opened at once; at most `max_parallel_starts` start side by side."""

    name = "docker"
    isolation: Isolation = "strong"

    def __init__(self, host: str | None = None, *, max_parallel_starts: int = 8) -> None:
        self.engine = EngineApi(EngineAddress.from_environment(host))
        self._starts = asyncio.Semaphore(max_parallel_starts)
        self._agent: AgentProgram | None = None
        self._volume_lock = asyncio.Lock()
        self._events = EngineEvents(self.engine, f"{LABEL_OWNER}={Owner.current()}")
        self._watching: asyncio.Task[None] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._snapshots: list[str] = []
        self._live: set[str] = set()
        self._machine_memory_mb = 0
        self._processor = ""
        self._engine_isolation = EngineIsolation.of({})
        self._volumes: dict[str, tuple[float, list[str]]] = {}
        """When each image was asked for the volumes that it declares, and which they are."""

    @property
    def live(self) -> int:
        """Sandboxes that were opened and not closed yet."""
        return len(self._live)

    async def connect(self) -> None:
        """Raises SandboxUnavailable."""
        await self.engine.connect()
        info = await self.engine.json("GET", "/info")
        self._machine_memory_mb = int(info.get("MemTotal", 0)) >> 20
        self._processor = str(info.get("Architecture", ""))
        self._engine_isolation = EngineIsolation.of(info)
        if self._watching is None:
            self._watching = asyncio.create_task(self._events.watch(), name="engine events")
            self._watchdog = await asyncio.to_thread(self._start_watchdog)

    def describe_isolation(self, spec: SandboxSpec) -> dict[str, str]:
        return self._engine_isolation.describe(spec)

    def _start_watchdog(self) -> subprocess.Popen[bytes]:
        label = f"{LABEL_OWNER}={Owner.current()}"
        program = str(Path(__file__).with_name("watchdog.py"))
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", program, self.engine.address.host, self.engine.version, label),
                self.engine.address.certificates or "",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        if self._machine_memory_mb and spec.memory_mb > self._machine_memory_mb:
            raise SandboxSpecError(
                f"memory_mb={spec.memory_mb}: the machine has {self._machine_memory_mb} MiB; ask for less"
            )
        return await self._open(spec, run, timeout_s, None)

    async def _open(self, spec: SandboxSpec, run: str, timeout_s: float, joins: str | None) -> Sandbox:
        """`joins`: the container whose internal network it is on."""
        self._engine_isolation.check(spec)
        while True:
            try:
                return await self._open_named(spec, run, timeout_s, joins)
            except _NameTaken:
                continue

    async def _open_named(self, spec: SandboxSpec, run: str, timeout_s: float, joins: str | None) -> Sandbox:
        """Raises _NameTaken."""
        async with self._starts:
            image = await image_of(self.engine, spec)
            volumes = volume_paths(await self._declared_volumes(image), spec)
            await self._provide_agent(image)
            name, number = new_user(self._engine_isolation.users(spec))
            self._events.forget(name)
            user = spec.user or f"{number}:{GROUP}"
            connection = AgentConnection(name)
            connection.explain = lambda: self._events.why(name)
            sandbox = AgentSandbox(
                name=name,
                provider=self.name,
                isolation=self.isolation,
                spec=spec,
                connection=connection,
                end=lambda: self.remove(name),
                commit=lambda: self._commit(name, spec),
                open_beside=lambda wanted: self._open(wanted, run, timeout_s, joins or name),
                reusable=not volumes and not user.startswith("0:"),
            )
            assert self._agent is not None
            network = (joins or name) if spec.network == "internal" else ""
            body = container_config(
                spec, image, self._agent, labels(run, None, network), joins, user=user, volumes=volumes
            )
            creating = asyncio.ensure_future(self._create(name, body))
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(creating)
                    await self.engine.attach(name, connection)
                    await self.engine.call("POST", f"/containers/{name}/start")
                    await connection.ready(timeout_s)
                    await sandbox.prepare()
            except TimeoutError:
                answered = creating.done()
                await self._discard(name, connection, creating)
                if not answered:
                    host = self.engine.address.host
                    raise SandboxUnreachable(
                        f"the Docker engine at {host} did not answer within {timeout_s:g} s"
                    ) from None
                raise SandboxStartError(f"sandbox {name} did not start within {timeout_s:g} s") from None
            except BaseException:
                await asyncio.shield(self._discard(name, connection, creating))
                raise
        self._live.add(name)
        return sandbox

    async def _declared_volumes(self, image: str) -> list[str]:
        """Asked once for starts that follow each other: it is a twentieth of one. Raises SandboxImageMissing."""
        asked, volumes = self._volumes.get(image, (float("-inf"), []))
        if time.monotonic() - asked < VOLUMES_KNOWN_S:
            return volumes
        found = await self.engine.json("GET", f"/images/{image}/json")
        volumes = list((found.get("Config") or {}).get("Volumes") or {})
        self._volumes[image] = (time.monotonic(), volumes)
        return volumes

    async def _create(self, name: str, body: dict[str, Any]) -> None:
        """Raises _NameTaken."""
        answer = await self.engine.call("POST", "/containers/create", query={"name": name}, body=body, accept=(409,))
        if answer.status_code == 409:
            raise _NameTaken(f"the engine has a container named {name}")

    async def _discard(self, name: str, connection: AgentConnection, creating: asyncio.Future[None]) -> None:
        """The engine finishes a creation even if nobody waits for it: removing too early would leave the container."""
        connection.lost(SandboxStartError(f"sandbox {name} was given up before it was ready"))
        await asyncio.wait({creating})
        if creating.exception() is None:
            await self.remove(name, has_run=False)

    async def _commit(self, name: str, spec: SandboxSpec) -> str:
        """Keep a container's writable root as an image until this provider is closed."""
        await self._keep_root(name, spec)
        tag = f"{name}-{uuid.uuid4().hex[:8]}"
        query = {"container": name, "repo": SNAPSHOTS, "tag": tag}
        await self.engine.call("POST", "/commit", query=query, body={}, timeout_s=COMMIT_TIMEOUT_S)
        self._snapshots.append(f"{SNAPSHOTS}:{tag}")
        return self._snapshots[-1]

    async def _keep_root(self, name: str, spec: SandboxSpec) -> None:
        """Have the changes, which are in memory, written where the engine looks for them. Raises SandboxFileError."""
        assert self._agent is not None
        command = [*self._agent.command, "--keep-root", str(spec.root_size_mb << 20)]
        body = {"Cmd": command, "User": "0:0", "AttachStderr": True, "AttachStdout": True}
        made = await self.engine.json("POST", f"/containers/{name}/exec", body=body)
        path = f"/exec/{made['Id']}"
        said = await self.engine.call("POST", f"{path}/start", body={"Detach": False}, timeout_s=COMMIT_TIMEOUT_S)
        ended = await self.engine.json("GET", f"{path}/json")
        if ended["ExitCode"] != 0:
            why = b"".join(piece for _, piece in Demultiplexer().feed(said.content)).decode(errors="replace").strip()
            raise SandboxFileError(f"sandbox {name}: its root could not be kept: {why[:300]}", errno.EIO)

    async def remove(self, name: str, *, has_run: bool = True) -> None:
        """Gone when this returns; fine if it already was. Raises SandboxUnreachable."""
        self._live.discard(name)
        if await remove_container(self.engine, name, has_run=has_run):
            return
        await self.engine.call(
            "POST",
            f"/containers/{name}/wait",
            query={"condition": "removed"},
            accept=(404,),
            timeout_s=REMOVE_TIMEOUT_S,
        )

    async def sweep(self) -> int:
        return len(await sweep(self.engine))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for image in self._snapshots:
            await self.engine.call("DELETE", f"/images/{image}", query={"force": "1"}, accept=(404, 409))
        if self._watchdog is not None:
            watchdog, self._watchdog = self._watchdog, None
            await asyncio.to_thread(watchdog.communicate, b"q", WATCHDOG_TIMEOUT_S)
        await self.engine.close()

    async def _provide_agent(self, image: str) -> None:
        """Fill the engine's agent volume, once per provider; what another process fills in meanwhile is the same."""
        async with self._volume_lock:
            if self._agent is not None:
                return
            agent = await asyncio.to_thread(agent_program, self._processor)
            name = f"roll-flash-filler-{uuid.uuid4().hex[:12]}"
            volume = volume_name(agent)
            await self.engine.call("POST", "/volumes/create", body={"Name": volume, "Labels": {LABEL: "agent"}})
            mount = {"Type": "volume", "Source": volume, "Target": FOLDER, "VolumeOptions": {"NoCopy": True}}
            body = {
                "Image": image,
                "Cmd": ["/none"],
                "Labels": labels("agent", None),
                "HostConfig": {"Mounts": [mount], "NetworkMode": "none"},
            }
            try:
                await self.engine.call("POST", "/containers/create", query={"name": name}, body=body)
                found = await self.engine.call(
                    "HEAD", f"/containers/{name}/archive", query={"path": f"{FOLDER}/agent"}, accept=(404,)
                )
                if found.status_code == 404:
                    await self.engine.call(
                        "PUT", f"/containers/{name}/archive", query={"path": FOLDER}, content=_agent_archive(agent)
                    )
            finally:
                await asyncio.shield(self.remove(name))
            self._agent = agent


def _agent_archive(agent: AgentProgram) -> bytes:
    content = agent.content
    member = tarfile.TarInfo("agent")
    member.size, member.mode = len(content), 0o755
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
