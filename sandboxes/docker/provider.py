"""Sandboxes in hardened Docker containers, each with a resident agent on its attached stdin and stdout.

A read-only volume, one per agent version and engine, brings the agent into any image. Unlike a bind mount, it works
with remote engines; unlike a derived image, it leaves the user's image and its snapshots unchanged.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from roll_flash.sandboxes.client.agent_program import AGENT, agent_program
from roll_flash.sandboxes.client.agent_sandbox import AgentSandbox
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.files import paused
from roll_flash.sandboxes.client.frames import Demultiplexer
from roll_flash.sandboxes.docker.agent_volume import fill, filler_config, make_volume, volume_name
from roll_flash.sandboxes.docker.api import EngineAddress, EngineApi
from roll_flash.sandboxes.docker.container_config import container_config, volume_paths
from roll_flash.sandboxes.docker.etc_files import (
    HOSTS,
    HOSTS_PATH,
    NOT_SEEN,
    PATH,
    files_of_etc,
    read_users,
    with_user,
)
from roll_flash.sandboxes.docker.events import EngineEvents
from roll_flash.sandboxes.docker.guard import IMAGE, Guard
from roll_flash.sandboxes.docker.isolation import EngineIsolation
from roll_flash.sandboxes.docker.reaper import list_entries, remove_container, remove_leaked, sweep
from roll_flash.sandboxes.errors import (
    SandboxError,
    SandboxFileError,
    SandboxSpecError,
    SandboxStartError,
    SandboxUnreachable,
)
from roll_flash.sandboxes.images.build import image_of, one_at_a_time
from roll_flash.sandboxes.images.stored_images import SNAPSHOTS, inspect_image, remove_image
from roll_flash.sandboxes.owner import GROUP, LABEL_OWNER, Owner, labels, new_user
from roll_flash.sandboxes.protocol import Isolation, Sandbox
from roll_flash.sandboxes.scratch import own_folders
from roll_flash.sandboxes.spec import SandboxSpec

INIT_ENDED = "cannot start a container that has stopped"
"""What runc says then, which was seen once, between many other starts and ends of containers."""
REMOVE_TIMEOUT_S = 30.0
COMMIT_TIMEOUT_S = 120.0
PRUNE_EVERY_S = 3600.0
"""Seconds between prunings of unused builds, which need a request per build."""
VOLUMES_KNOWN_S = 10.0
"""Seconds for which the volumes of an image are cached by its name."""

_log = logging.getLogger("roll_flash.sandboxes")


class _NameTaken(SandboxStartError):
    """Another sandbox has this name and its user id."""


class _InitEnded(SandboxStartError):
    """The first process of a container ended before the engine let it run the agent."""


class _FilesNotSeen(SandboxStartError):
    """The engine does not see this machine's files."""


class DockerProvider:
    """Provider for one engine; call `connect` first. At most `max_parallel_starts` sandboxes start in parallel."""

    name = "docker"
    isolation: Isolation = "strong"

    def __init__(self, host: str | None = None, *, max_parallel_starts: int = 8) -> None:
        self.engine = EngineApi(EngineAddress.from_environment(host))
        self._starts = asyncio.Semaphore(max_parallel_starts)
        self._agent: bytes | None = None
        self._volume_lock = asyncio.Lock()
        self._volume_is_good = False
        self._events = EngineEvents(self.engine, f"{LABEL_OWNER}={Owner.current()}")
        self._watching: asyncio.Task[None] | None = None
        self._guard = Guard(SNAPSHOTS, own_folders())
        self._guarding: asyncio.Future[None] | None = None
        self._snapshots: list[str] = []
        self._requested: set[str] = set()
        self._live: set[str] = set()
        self._prune_at = 0.0
        self._machine_memory_mb = 0
        self._processor = ""
        self._engine_isolation = EngineIsolation.of({})
        self._volumes: dict[str, tuple[float, list[str]]] = {}
        """By image: time of the request for its declared volumes, and their paths."""
        self._users: dict[str, str | None] = {}
        """Result of `read_users` for each image."""
        self._sees_files = self.engine.address.socket_path is not None

    @property
    def live(self) -> int:
        """Number of open sandboxes."""
        return len(self._live)

    async def connect(self) -> None:
        """Connect to the engine, start the guard and watch events. Raises SandboxUnavailable."""
        await self.engine.connect()
        info = await self.engine.json("GET", "/info")
        self._machine_memory_mb = int(info.get("MemTotal", 0)) >> 20
        self._processor = str(info.get("Architecture", ""))
        self._engine_isolation = EngineIsolation.of(info)
        if self._watching is None:
            address = self.engine.address
            words = (address.host, self.engine.version, address.certificates or "")
            self._guarding = asyncio.ensure_future(asyncio.to_thread(self._guard.start, *words))
            await asyncio.shield(self._guarding)
            self._watching = asyncio.create_task(self._events.watch(), name="engine events")

    async def has_image(self, image: str) -> bool:
        return await inspect_image(self.engine, image) is not None

    def describe_isolation(self, spec: SandboxSpec) -> dict[str, str]:
        return self._engine_isolation.describe(spec)

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        if self._machine_memory_mb and spec.memory_mb > self._machine_memory_mb:
            raise SandboxSpecError(
                f"memory_mb={spec.memory_mb}: the machine has {self._machine_memory_mb} MiB; ask for less"
            )
        return await self._open(spec, run, timeout_s, None)

    async def _open(self, spec: SandboxSpec, run: str, timeout_s: float, network_container: str | None) -> Sandbox:
        """Open a sandbox; `network_container`: container whose internal network it joins; None: none."""
        self._engine_isolation.check(spec)
        has_ended = False
        while True:
            try:
                return await self._open_named(spec, run, timeout_s, network_container)
            except _NameTaken:
                continue
            except _InitEnded as error:
                if has_ended:
                    raise
                has_ended = True
                _log.warning("%s; trying once more", error)
            except _FilesNotSeen:
                self._sees_files = False
                _log.warning(
                    "the Docker engine at %s does not see this machine's files: sandboxes have no name for their user "
                    "there, and without a writable root none for localhost",
                    self.engine.address.host,
                )

    async def _open_named(
        self, spec: SandboxSpec, run: str, timeout_s: float, network_container: str | None
    ) -> Sandbox:
        """Open a sandbox under a random name. Raises _NameTaken, _InitEnded, _FilesNotSeen."""
        async with self._starts:
            image = await image_of(self.engine, spec)
            volumes = volume_paths(await self._declared_volumes(image), spec)
            agent_volume = volume_name(await self._provide_agent(image))
            name, number = new_user(self._engine_isolation.users(spec))
            self._events.forget(name)
            user = spec.user or f"{number}:{GROUP}"
            connection = AgentConnection(name)
            connection.explain = lambda: self._events.death_reason(name)
            sandbox = AgentSandbox(
                name=name,
                provider=self.name,
                isolation=self.isolation,
                spec=spec,
                connection=connection,
                end=lambda: self.remove(name),
                commit=lambda: self._commit(connection, run, spec),
                open_beside=lambda wanted: self._open(wanted, run, timeout_s, network_container or name),
                open_fresh=lambda: self._open(spec, run, timeout_s, None),
                reusable=not volumes and not user.startswith("0:"),
            )
            network = (network_container or name) if spec.network == "internal" else ""
            marks = labels(run, network)
            with files_of_etc(self._contents_of_etc(spec, image, number)) as files:
                body = container_config(
                    spec, image, agent_volume, marks, network_container, user=user, volumes=volumes, files=files
                )
                await self._start(sandbox, connection, body, timeout_s)
        self._live.add(name)
        return sandbox

    async def _start(
        self, sandbox: AgentSandbox, connection: AgentConnection, body: dict[str, Any], timeout_s: float
    ) -> None:
        """Create, attach and start the container, and prepare the sandbox.

        Raises _NameTaken, _InitEnded, _FilesNotSeen.
        """
        name = sandbox.name
        creating = asyncio.ensure_future(self._create(name, body))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(creating)
                await self.engine.attach(name, connection)
                try:
                    await self.engine.call("POST", f"/containers/{name}/start")
                except SandboxStartError as error:
                    raise _InitEnded(str(error)) if INIT_ENDED in str(error) else error from None
                await connection.ready(timeout_s)
                await sandbox.prepare()
        except TimeoutError:
            self._volume_is_good = False
            answered = creating.done()
            await asyncio.shield(self._discard(name, connection, creating))
            if not answered:
                host = self.engine.address.host
                raise SandboxUnreachable(f"the Docker engine at {host} did not answer within {timeout_s:g} s") from None
            raise SandboxStartError(f"sandbox {name} did not start within {timeout_s:g} s") from None
        except BaseException:
            self._volume_is_good = False  # it may have been removed or damaged
            await asyncio.shield(self._discard(name, connection, creating))
            raise

    def _contents_of_etc(self, spec: SandboxSpec, image: str, number: int) -> dict[str, str]:
        """Return the files of a sandbox that replace those of the image, by path. A writable root gets its /etc/hosts
        from the agent, in an internal network all get it from the engine."""
        contents: dict[str, str] = {}
        if not self._sees_files or self._engine_isolation.user_namespaces:
            return contents
        if spec.user is None and (users := self._users[image]) is not None:
            contents[PATH] = with_user(users, number, spec.workdir)
        if not spec.writable_root and spec.network != "internal":
            contents[HOSTS_PATH] = HOSTS
        return contents

    async def _declared_volumes(self, image: str) -> list[str]:
        """Return the image's volumes, cached: the request takes 1/20 of a start. Raises SandboxImageMissing."""
        asked, volumes = self._volumes.get(image, (float("-inf"), []))
        if time.monotonic() - asked < VOLUMES_KNOWN_S:
            return volumes
        found = await self.engine.json("GET", f"/images/{image}/json")
        volumes = list((found.get("Config") or {}).get("Volumes") or {})
        self._volumes[image] = (time.monotonic(), volumes)
        return volumes

    async def _create(self, name: str, body: dict[str, Any]) -> None:
        """Create the container. Raises _NameTaken, _FilesNotSeen."""
        with self._requesting(name, body["Image"]):
            try:
                answer = await self.engine.call(
                    "POST", "/containers/create", query={"name": name}, body=body, accept=(409,)
                )
            except SandboxStartError as error:
                raise _FilesNotSeen(str(error)) if NOT_SEEN in str(error) else error from None
        if answer.status_code == 409:
            raise _NameTaken(f"the engine has a container named {name}")

    @contextmanager
    def _requesting(self, name: str, image: str = IMAGE) -> Iterator[None]:
        """Report a request to the guard: if the engine creates the object later, the guard and `sweep` remove it."""
        self._guard.request_sent(name, image)
        self._requested.add(name)
        try:
            yield
        except SandboxUnreachable:
            raise
        except SandboxError:
            self._guard.request_done(name)
            raise
        else:
            self._guard.request_done(name)
        finally:
            self._requested.discard(name)

    async def _discard(self, name: str, connection: AgentConnection, creating: asyncio.Future[None]) -> None:
        """Remove a container after its creation ends: the engine would finish the creation after an early removal."""
        connection.lost(SandboxStartError(f"sandbox {name} was given up before it was ready"))
        await asyncio.wait({creating})
        if creating.exception() is None:
            await self.remove(name, has_run=False)

    async def _commit(self, connection: AgentConnection, run: str, spec: SandboxSpec) -> str:
        """Commit a container's writable root as an image, kept until this provider is closed."""
        name = connection.name
        async with paused(connection):
            keeping = asyncio.ensure_future(self._keep_root(name, spec))
            try:
                await asyncio.shield(keeping)
            finally:  # if cancelled: its program goes on in the sandbox, whose processes must stand still for it
                await asyncio.gather(keeping, return_exceptions=True)
        image = f"{SNAPSHOTS}:{name}-{uuid.uuid4().hex[:8]}"
        repository, _, tag = image.partition(":")
        query = {"container": name, "repo": repository, "tag": tag}
        body = {"Labels": labels(run)}
        with self._requesting(image):
            await self.engine.call("POST", "/commit", query=query, body=body, timeout_s=COMMIT_TIMEOUT_S)
        self._snapshots.append(image)
        return image

    async def _keep_root(self, name: str, spec: SandboxSpec) -> None:
        """Write the root's changes from memory to the path that the engine commits. Raises SandboxFileError."""
        command = [AGENT, "--keep-root", str(spec.root_size_mb << 20)]
        body = {"Cmd": command, "User": "0:0", "AttachStderr": True, "AttachStdout": True}
        made = await self.engine.json("POST", f"/containers/{name}/exec", body=body)
        path = f"/exec/{made['Id']}"
        said = await self.engine.call("POST", f"{path}/start", body={"Detach": False}, timeout_s=COMMIT_TIMEOUT_S)
        ended = await self.engine.json("GET", f"{path}/json")
        if ended["ExitCode"] != 0:
            why = b"".join(piece for _, piece in Demultiplexer().feed(said.content)).decode(errors="replace").strip()
            raise SandboxFileError(f"sandbox {name}: its root could not be kept: {why[:300]}", errno.EIO)

    async def remove(self, name: str, *, has_run: bool = True) -> None:
        """Remove a container and wait until it is removed; no error if it is missing. Raises SandboxUnreachable."""
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
        """Remove leftovers of dead controllers, and objects of this provider whose creation was never answered."""
        for entry in await list_entries(self.engine):
            if entry.name in self._guard.pending and entry.name not in self._requested:
                if entry.kind == "snapshot":
                    await remove_image(self.engine, entry.name)
                else:
                    await self.remove(entry.name, has_run=False)
                self._guard.request_done(entry.name)
        if time.monotonic() < self._prune_at:
            return len(await remove_leaked(self.engine))
        self._prune_at = time.monotonic() + PRUNE_EVERY_S
        return len(await sweep(self.engine))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        try:
            for image in reversed(self._snapshots):  # forks of forks first
                await remove_image(self.engine, image)
        finally:
            if self._guarding is not None:
                await asyncio.wait({self._guarding})
            await asyncio.to_thread(self._guard.stop)
            await self.engine.close()

    async def _provide_agent(self, image: str) -> bytes:
        """Return the agent after checking the engine's agent volume, once and again after a failed start.

        Fills the volume if necessary, and reads the users of each image once.
        """
        async with self._volume_lock:
            if self._agent is None:
                self._agent = await asyncio.to_thread(agent_program, self._processor)
            if not self._volume_is_good or image not in self._users:
                async with one_at_a_time("agent"):
                    await self._fill_volume(self._agent, image)
                self._volume_is_good = True
            return self._agent

    async def _fill_volume(self, agent: bytes, image: str) -> None:
        name = f"roll-flash-filler-{uuid.uuid4().hex[:12]}"
        body = filler_config(image, await make_volume(self.engine, agent))
        creating = asyncio.ensure_future(self._create(name, body))
        try:
            await asyncio.shield(creating)
            if await fill(self.engine, name, agent):
                _log.debug("the volume %s has been filled", volume_name(agent))
            self._users[image] = await read_users(self.engine, name)
        finally:
            await asyncio.shield(self._remove_filler(name, creating))

    async def _remove_filler(self, name: str, creating: asyncio.Future[None]) -> None:
        await asyncio.wait({creating})
        if creating.exception() is None:
            await self.remove(name)
