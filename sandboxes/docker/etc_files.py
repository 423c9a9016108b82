"""Files of /etc: a user name for the sandbox's user id, which whoami, git, ssh and node's os.userInfo() look up.

/etc/passwd is that of the image plus one line. It lies on this machine while a container starts and is mounted
read-only; so containers of remote engines, or of engines with user namespaces, have no such name. The same holds for
/etc/hosts, in which programs look up `localhost`: an engine writes none for a container without a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.files.tree_model import decoded, encoded
from roll_flash.sandboxes.owner import DOCKER_USERS, GROUP
from roll_flash.sandboxes.scratch import scratch_folder

PATH = "/etc/passwd"
NOT_SEEN = "bind source path does not exist"
"""Error text of an engine that cannot see this machine's files."""
HOSTS_PATH, HOSTS = "/etc/hosts", "127.0.0.1 localhost sandbox\n"
MAX_BYTES = 1 << 18
"""Maximum size of /etc/passwd: in a snapshot the model controls the file, and it is held in memory."""
MAX_DIGITS = 20
"""Digits from which on a number is no user's. Python refuses to convert thousands of them."""


async def read_users(engine: EngineApi, container: str) -> str | None:
    """Return the /etc/passwd of a container's image; "" if missing, None if it is no regular file or too large."""
    told = await engine.stat(container, PATH)
    if told is None:
        return ""
    if told["size"] > MAX_BYTES:
        return None
    found = await engine.read_file(container, PATH)
    return decoded(found[1]) if found is not None else None


@contextmanager
def files_of_etc(contents: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Write files for a sandbox; they must exist until the container has started. `contents`: by the path there.

    Yields each one's path here by its path there.
    """
    if not contents:
        yield {}
        return
    with scratch_folder("users") as folder:
        written = {}
        for target, content in contents.items():
            path = folder / target.rpartition("/")[2]
            path.write_bytes(encoded(content))
            path.chmod(0o444)
            written[target] = str(path)
        yield written


def with_user(users: str, number: int, home: str) -> str:
    """Add the sandbox's user to `users`, and drop users of earlier sandboxes, which snapshots contain."""
    kept = [line for line in users.split("\n") if line and not _is_sandbox(line)]
    return "\n".join([f"sandbox:x:{number}:{GROUP}::{home}:/bin/sh", *kept, ""])


def _is_sandbox(line: str) -> bool:
    fields = line.split(":")
    return len(fields) > 2 and fields[2].isdecimal() and len(fields[2]) < MAX_DIGITS and int(fields[2]) in DOCKER_USERS
