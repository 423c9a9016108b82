"""Reset a used sandbox to its initial state and verify the result. In doubt the sandbox must be closed."""

from __future__ import annotations

from errno import ENOENT

from roll_flash.sandboxes.client.agent_program import AGENT
from roll_flash.sandboxes.client.commands import Command, run_command
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.files import kill_all, list_tree, remove
from roll_flash.sandboxes.errors import SandboxError, SandboxFileError
from roll_flash.sandboxes.files.snapshot import populate
from roll_flash.sandboxes.owner import FOREIGN_AGE_S
from roll_flash.sandboxes.result import ExecResult
from roll_flash.sandboxes.spec import SandboxSpec

WRITABLE = ("/tmp", "/dev/shm", "/dev/mqueue")
TERMINALS = ("/dev/pts", "/dev/pts/ptmx")
"""They belong to the user of a local sandbox, who may change their modes and times, but add nothing."""
DEVICES = "/dev"
"""What it holds belongs to root, but whoever may write to a device or link may set its times to now."""
MAX_AGE_S = FOREIGN_AGE_S / 2
"""Age in seconds from which a sandbox is not reused. Controllers on other machines, which cannot see whether its own
lives, take it for a leftover after twice that."""
TIMEOUT_S = 5.0
MAX_OUTPUT_BYTES = 1 << 16
LEFTOVERS_COMMAND = (
    "for entry in /proc/[0-9]*; do case ${entry#/proc/} in 1|$$) ;; *) echo $entry;; esac; done; "
    "tail -q -n +2 /proc/sysvipc/shm /proc/sysvipc/msg /proc/sysvipc/sem && "
    "for table in /proc/net/tcp /proc/net/tcp6 /proc/net/unix; do test ! -e $table || tail -n +2 $table; done"
)
"""Shell line that prints remaining processes, System V IPC objects, connections (a closed one holds its port for a
minute) and unix sockets: one that was sent through itself has no process, but holds everything that was sent with it
(files, ports, names) until the kernel's next garbage collection."""


def is_reusable(spec: SandboxSpec) -> bool:
    """False for a sandbox with a writable root or a network: it is never reused."""
    return not spec.writable_root and spec.network == "none"


async def describe_folders(connection: AgentConnection, spec: SandboxSpec, *words: str) -> bytes:
    """Return a line per writable folder, and of the terminals: mode, flags, owner; empty on failure.

    Raises SandboxError.
    """
    told = await _run(connection, spec, [AGENT, "--folders", *words, *_folders(spec), *TERMINALS])
    return told.stdout if told.exit_code == 0 else b""


async def reset(connection: AgentConnection, spec: SandboxSpec, folders: bytes) -> bool:
    """Kill every process, empty the writable folders, restore their modes and times, then check. False: close it.

    `folders`: the output of `describe_folders` for the new sandbox. An image without a shell is never reused.
    """
    if not is_reusable(spec) or not folders:
        return False
    try:
        await kill_all(connection)
        await describe_folders(connection, spec, *_restoring(spec, folders))
        for folder in _folders(spec):
            if not await _emptied(connection, folder):
                return False
        left = await _run(connection, spec, LEFTOVERS_COMMAND)
        if left.exit_code != 0 or left.stdout.strip() or await describe_folders(connection, spec) != folders:
            return False
        await populate(connection, spec)
    except SandboxError:
        return False
    return connection.usable


def _folders(spec: SandboxSpec) -> tuple[str, ...]:
    return (spec.workdir, *WRITABLE)


async def _run(connection: AgentConnection, spec: SandboxSpec, command: str | list[str]) -> ExecResult:
    return await run_command(connection, spec, Command(command, TIMEOUT_S, max_output=MAX_OUTPUT_BYTES), None)


def _restoring(spec: SandboxSpec, folders: bytes) -> list[str]:
    words: list[str] = []
    for path, line in zip((*_folders(spec), *TERMINALS), folders.decode().splitlines(), strict=True):
        mode, flags, *_ = line.split(" ")
        if mode.isdigit():  # else the folder does not exist
            words += ["--restore", mode, flags, path]
    return [*words, "--touch", DEVICES]


async def _emptied(connection: AgentConnection, folder: str) -> bool:
    try:
        await remove(connection, folder + "/")
        return not await list_tree(connection, folder, 1)
    except SandboxFileError as error:
        return error.errno == ENOENT
