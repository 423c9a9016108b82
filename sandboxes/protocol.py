"""The contracts of a sandbox and of a provider of sandboxes. `roll-flash sandbox check` tests a provider."""

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
    """One sandbox. After its end every method but `close` raises `SandboxDied`. Relative paths start at `workdir`.

    `stream`, `shell`, `forward` and `fresh` are used with `async with`.
    """

    @property
    def name(self) -> str: ...

    @property
    def provider(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def alive(self) -> bool:
        """False once the sandbox is known to have ended."""
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
        """Run a command (a `str` through `/bin/sh -c`) and wait for its end; a command that fails does not raise.

        Returns when the command's first process ends, even if a background child keeps the pipe open. After `timeout`
        seconds the whole process tree gets SIGTERM, and SIGKILL `grace` seconds later; the output so far is returned.
        At most `max_output` bytes of each stream are kept, half from the start and half from the end.
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
    ) -> AbstractAsyncContextManager[CommandStream]:
        """Run a command and read its output while it runs: `async with sandbox.stream(...) as stream`."""
        ...

    def shell(self, program: str = "/bin/sh") -> AbstractAsyncContextManager[Shell]:
        """Open a shell that keeps its state: `async with sandbox.shell() as shell: await shell.run("cd x")`."""
        ...

    def forward(self, port: int, host_port: int) -> AbstractAsyncContextManager[Forward]:
        """Forward one host port into the sandbox: `async with sandbox.forward(8000, 54321):`.

        Inside the block, 127.0.0.1:`port` in the sandbox leads to 127.0.0.1:`host_port` on the host and nowhere else;
        the sandbox still has no network. `port` is 1024 or more. Raises SandboxStartError if `port` is in use.
        """
        ...

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Return the content of a regular file. Raises SandboxFileError."""
        ...

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a regular file atomically; missing parent folders are created. Raises SandboxFileError."""
        ...

    async def put_tree(
        self, source: str | Path | bytes, path: str = ".", *, max_bytes: int = 1 << 28, max_entries: int = 20_000
    ) -> TreeReport:
        """Copy a folder of the host, or a tar or zip archive, into a directory. Raises SandboxFileError,
        SandboxHostError."""
        ...

    async def get_tree(
        self, path: str, destination: str | Path, *, max_bytes: int = 1 << 28, max_entries: int = 20_000
    ) -> TreeReport:
        """Copy a directory of the sandbox into a new folder of the host. Raises SandboxFileError, SandboxHostError."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a directory tree. Raises SandboxFileError."""
        ...

    async def kill_all(self) -> None:
        """Kill every process inside and return when none is left. Running calls return the result of a killed command.

        Starts no process, so it works with a full process table or a replaced shell. Raises SandboxBusy if a process
        does not die within 5 s: gigabytes of mapped memory take long to free.
        """
        ...

    async def snapshot(self) -> SandboxSpec:
        """Return a spec whose sandboxes start with the current files (`workdir`, `/tmp`, a writable root).

        Processes are not included. Raises SandboxFileError if the files are too many or too large.
        """
        ...

    async def beside(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Open another sandbox on the internal network of this one; it ends with this one. Default: the same spec.

        Both need `network="internal"` (the new one gets it). They share loopback, like containers of a Kubernetes pod:
        a server in one is reached from the other at localhost, so two servers need two ports. Nothing else is shared.
        Raises SandboxSpecError if the provider or spec does not support it, else SandboxError.
        """
        ...

    def fresh(self) -> AbstractAsyncContextManager[Sandbox]:
        """Open a new sandbox of the same spec for an `async with`: `async with sandbox.fresh() as untouched:`.

        For checks that must not trust the state of this sandbox. Raises SandboxError.
        """
        ...

    async def stats(self) -> SandboxStats:
        """Return current and total resource usage. Raises SandboxDied if the sandbox has ended."""
        ...

    async def reset(self) -> bool:
        """Restore the state of a new sandbox. False if that cannot be guaranteed; the caller must then close it."""
        ...

    async def ping(self, *, timeout: float = 10.0) -> None:
        """Check that the sandbox answers within `timeout` seconds. Raises SandboxError if not."""
        ...

    async def close(self, *, reason: str = "closed") -> None:
        """End the sandbox and everything in it. May be called more than once; never raises for an ended sandbox.

        Running and later calls raise SandboxDied with this `reason`.
        """
        ...


class Provider(Protocol):
    """Starts sandboxes. Plug-ins are entry points of the group `roll_flash.sandboxes`: name = "module:factory"."""

    name: str
    isolation: Isolation

    async def connect(self) -> None:
        """Prepare the provider. Raises SandboxUnavailable with instructions for the user."""
        ...

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> Sandbox:
        """Start a sandbox and wait until it answers. Leaves nothing behind on SandboxError or cancellation."""
        ...

    async def sweep(self) -> int:
        """Remove the leftovers of dead controllers and return their number. Raises SandboxError."""
        ...

    async def close(self) -> None:
        """Free the resources of the provider; each caller of `open` closes its own sandboxes."""
        ...


@runtime_checkable
class DescribesIsolation(Protocol):
    """A provider that can describe the isolation of its sandboxes."""

    def describe_isolation(self, spec: SandboxSpec) -> dict[str, str]:
        """Return isolation measures for sandboxes of `spec`, by name. Call `connect` first."""
        ...
