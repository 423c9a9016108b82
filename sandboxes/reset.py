"""Make a used sandbox as good as new, and make sure that it is. Whoever is in doubt closes it instead."""

from __future__ import annotations

from roll_flash.sandboxes.connection import AgentConnection
from roll_flash.sandboxes.errors import SandboxError, SandboxFileError
from roll_flash.sandboxes.files import list_tree, remove
from roll_flash.sandboxes.protocol import Sandbox
from roll_flash.sandboxes.result import ExecResult
from roll_flash.sandboxes.snapshot import populate

WRITABLE = ("/tmp", "/dev/shm", "/dev/mqueue")
REMAINS = (
    "for entry in /proc/[0-9]*; do case ${entry#/proc/} in 1|$$) ;; *) echo $entry;; esac; done; "
    "tail -q -n +2 /proc/sysvipc/shm /proc/sysvipc/msg /proc/sysvipc/sem"
)


async def reset(sandbox: Sandbox, connection: AgentConnection) -> bool:
    """Kill every process, empty every writable place, then look. False: close it.

    A sandbox with a writable root or a way out, or whose image lacks a shell, is never taken again.
    """
    if sandbox.spec.writable_root or sandbox.spec.network != "none":
        return False
    try:
        await sandbox.kill_all()
        for folder in (sandbox.spec.workdir, *WRITABLE):
            if not await _emptied(connection, folder):
                return False
        left: ExecResult = await sandbox.exec(REMAINS, timeout=5)
    except SandboxError:
        return False
    if left.exit_code != 0 or left.stdout.strip():
        return False
    await populate(connection, sandbox.spec)
    return sandbox.alive


async def _emptied(connection: AgentConnection, folder: str) -> bool:
    try:
        await remove(connection, folder + "/")
        return not await list_tree(connection, folder, 1)
    except SandboxFileError as error:
        return error.errno == 2
