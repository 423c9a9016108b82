"""A name for a sandbox's user: whoami, git, ssh and node's os.userInfo() look it up in /etc/passwd.

The image's own list stays, with one line more. It is a file of this machine while a container starts, and bound into it
read-only; so an engine elsewhere, or one with user namespaces, does without.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.identity import DOCKER_USERS, GROUP
from roll_flash.sandboxes.scratch import scratch_folder

PATH = "/etc/passwd"
NOT_SEEN = "bind source path does not exist"
"""What an engine says that cannot see this machine's files."""
MOST_BYTES = 1 << 18
"""A fork's list is a model's work, and is held in memory."""


async def read_users(engine: EngineApi, container: str) -> str | None:
    """What a container's image has at /etc/passwd: nothing is "", and None what is no plain file or is too large."""
    where, query = f"/containers/{container}/archive", {"path": PATH}
    head = await engine.call("HEAD", where, query=query, accept=(404,))
    if head.status_code == 404:
        return ""
    if json.loads(base64.b64decode(head.headers["X-Docker-Container-Path-Stat"]))["size"] > MOST_BYTES:
        return None
    found = await engine.call("GET", where, query=query)
    with tarfile.open(fileobj=io.BytesIO(found.content)) as archive:
        member = archive.next()
        content = archive.extractfile(member) if member is not None and member.isreg() else None
        return content.read().decode(errors="surrogateescape") if content is not None else None


@contextmanager
def passwd_file(users: str, number: int, home: str) -> Iterator[str]:
    """A file with `users` and the sandbox's own; it must be there until the container has started."""
    with scratch_folder("users") as folder:
        path = folder / "passwd"
        path.write_text(with_user(users, number, home), errors="surrogateescape")
        path.chmod(0o444)
        yield str(path)


def with_user(users: str, number: int, home: str) -> str:
    """Without those of earlier sandboxes, which snapshots bring along."""
    kept = [line for line in users.splitlines() if line and not _is_sandbox(line)]
    return "\n".join([f"sandbox:x:{number}:{GROUP}::{home}:/bin/sh", *kept, ""])


def _is_sandbox(line: str) -> bool:
    fields = line.split(":")
    return len(fields) > 2 and fields[2].isdecimal() and int(fields[2]) in DOCKER_USERS
