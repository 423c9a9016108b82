"""What a sandbox and a provider of sandboxes must do. `roll-flash sandbox check` tells whether one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from roll_flash.sandboxes.result import ExecResult, SandboxStats
from roll_flash.sandboxes.spec import SandboxSpec

if TYPE_CHECKING:
    from roll_flash.sandboxes.client.commands import CommandStream
    from roll_flash.sandboxes.client.forward import Forward
    from roll_flash.sandboxes.client.shell import Shell
    from roll_flash.sandboxes.files.trees import TreeReport

Isolation = Literal["strong", "weak"]


@runtime_checkable
class Sandbox(Protocol):
    """One sandbox. Every method but `close` raises `SandboxDied` once it is gone; relative paths start at `workdir`."""

    name: str
    provider: str
    isolation: Isolation
    spec: SandboxSpec

    @property
    def alive(self) -> bool:
        """False once the sandbox is known to be gone."""
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 60.0,
        stdin: bytes | str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int = 1 << 17,
        merge_stderr: bool = False,
        grace: float = 0.2,
    ) -> ExecResult:
        """Run a command (a `str` through `/bin/sh -c`) and wait for its end; its failure is a result.

        It returns when the command's first process ends, even if a background child keeps the pipe. After `timeout`
        seconds its whole process tree gets SIGTERM and `grace` seconds later SIGKILL; the output so far is returned.
        Of each stream at most `max_output` bytes are kept, half from the start and half from the end.
        """
        ...

    def stream(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 3600.0,
        stdin: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        merge_stderr: bool = False,
        grace: float = 0.2,
    ) -> CommandStream:
        """A command whose output is read while it runs: `async with sandbox.stream(...) as stream`."""
        ...

    def shell(self, program: str = "/bin/sh") -> Shell:
        """A shell that keeps its state: `async with sandbox.shell() as shell: await shell.run("cd x")`."""
        ...

    def forward(self, port: int, host_port: int) -> Forward:
        """One port of this machine inside: `async with sandbox.forward(8000, 54321):`.

        While it is entered, 127.0.0.1:`port` in the sandbox leads to 127.0.0.1:`host_port` here, and to nothing else;
        the sandbox still has no network. Raises SandboxStartError if the port inside is taken. `port` is 1024 or more.
        """
        ...

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """A regular file's content. Raises SandboxFileError."""
        ...

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a regular file: whole or not at all; folders on the way are made. Raises SandboxFileError."""
        ...

    async def put_tree(
        self, source: str | Path | bytes, path: str = ".", *, max_bytes: int = 1 << 28, max_entries: int = 20_000
    ) -> TreeReport:
        """Copy a folder of this machine, or a tar or zip archive, into a directory. Raises SandboxFileError."""
        ...

    async def get_tree(
        self, path: str, destination: str | Path, *, max_bytes: int = 1 << 28, max_entries: int = 20_000
    ) -> TreeReport:
        """Copy a directory out into a new folder. Raises SandboxFileError."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a tree. Raises SandboxFileError."""
        ...

    async def kill_all(self) -> None:
        """Kill every process inside; when it returns none is left. Calls under way see their command killed.

        No process is started for it, so that neither a full process table nor a replaced shell is in its way. Raises
        SandboxFileError if one does not die within 5 s.
        """
        ...

    async def snapshot(self) -> SandboxSpec:
        """A spec whose sandboxes start with the files as they are here now (`workdir`, `/tmp`, a writable root).

        Processes are not part of it. Raises SandboxFileError if the files are too many or too large.
        """
        ...

    async def beside(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Another sandbox on this one's internal network, which ends with this one; `spec` None is this one's own.

        Both need `network="internal"` (the new one gets it). They share loopback, like containers of a Kubernetes pod:
        a server in one is reached from the other at localhost, so two servers need two ports. Nothing else is shared.
        Raises SandboxSpecError where that cannot be had, else SandboxError.
        """
        ...

    def fresh(self) -> AbstractAsyncContextManager[Sandbox]:
        """A new sandbox of the same spec: `async with sandbox.fresh() as untouched:`, which ends it.

        For checks that must not trust what is left in this one. Raises SandboxError.
        """
        ...

    async def stats(self) -> SandboxStats:
        """What it uses now and has used; raises SandboxDied if it is gone."""
        ...

    async def reset(self) -> bool:
        """Make it as good as new. False: that cannot be promised, close it."""
        ...

    async def ping(self, *, timeout: float = 10.0) -> None:
        """Raises a SandboxError if the sandbox does not answer."""
        ...

    async def close(self, *, reason: str = "closed") -> None:
        """End the sandbox and everything in it; may be called more than once, never raises for one that is gone.

        Calls that are under way or come later raise SandboxDied with this `reason`.
        """
        ...


class Provider(Protocol):
    """Starts sandboxes. Plug-ins are entry points of the group `roll_flash.sandboxes`: name = "module:factory"."""

    name: str
    isolation: Isolation

    async def connect(self) -> None:
        """Make ready. Raises SandboxUnavailable with what to do."""
        ...

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        """Start a sandbox that answers. Raises SandboxError; leaves nothing behind then or when cancelled."""
        ...

    async def sweep(self) -> int:
        """Remove what controllers that are dead have left behind; how many that were. Raises SandboxError."""
        ...

    async def close(self) -> None:
        """Free what the provider itself holds; the sandboxes are closed by whoever opened them."""
        ...


@runtime_checkable
class DescribesIsolation(Protocol):
    """A provider that can tell how its sandboxes are separated from the machine."""

    def describe_isolation(self, spec: SandboxSpec) -> dict[str, str]:
        """A measure's name and what it is for sandboxes of `spec`; known after `connect`."""
        ...
