"""The specification of a sandbox. Frozen and hashable, so that a pool can keep warm sandboxes per spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from roll_flash.sandboxes.files.build_context import packed_files, read_build_folder
from roll_flash.sandboxes.network.allowlist import own_hosts, parse_entry

DEFAULT_IMAGE = "roll-flash-sandbox:latest"
PROXY_PORT = 3128
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
NO_PROXY_VARIABLES = ("NO_PROXY", "no_proxy")
_ID = "(0|[1-9][0-9]{0,8}|1[0-9]{9})"
"""Pattern of a user or group: below the users that sandboxes have of their own, and 0 in one way only."""


def _pairs(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


Env = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)]


def _context(value: Any) -> Any:
    return packed_files(value) if isinstance(value, Mapping) else value


Context = Annotated[bytes, BeforeValidator(_context)]
Files = Annotated[tuple[tuple[str, bytes], ...], BeforeValidator(_pairs)]


class SandboxSpec(BaseModel):
    """Limits, image and environment of one sandbox."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    image: str | None = None
    """Image name; None: the provider's default (docker: `roll-flash-sandbox:latest`, local: the machine's `/usr`)."""
    dockerfile: str | None = None
    """Text of a Dockerfile from which the image is built once; use it instead of `image`."""
    context: Context = b""
    """Build context for the Dockerfile: a tar archive, or a dict of path and content. `from_folder` packs it."""
    files: Files = ()
    """Files at the start: path (relative to `workdir`) and content; may be a dict."""
    tree: bytes = b""
    """Content of `workdir` and `/tmp` from `Sandbox.snapshot`."""
    memory_mb: Annotated[int, Field(ge=16)] = 256
    """Memory limit in MiB for everything inside, including tmpfs contents; there is no swap."""
    cpus: Annotated[float, Field(gt=0, le=1024)] = 1.0
    pids: Annotated[int, Field(ge=4, le=32768)] = 64
    """Maximum number of processes and threads at a time."""
    tmpfs_mb: Annotated[int, Field(ge=1)] | None = None
    """Size in MiB of `workdir` and of `/tmp`, each; None: a quarter of the memory, at most 64."""
    tmpfs_inodes: Annotated[int, Field(ge=64)] = 65536
    """Maximum number of files in `workdir` and in `/tmp`, each."""
    open_files: Annotated[int, Field(ge=16)] = 1024
    network: Literal["none", "internal", "allowlist"] = "none"
    """`none`: loopback only. `internal`: loopback shared with sandboxes opened by `Sandbox.beside` (docker only).
    `allowlist`: loopback, and a proxy on it that leads to the hosts in `allow`."""
    allow: tuple[str, ...] = ()
    """Allowed destinations with `network="allowlist"`: `host:port`, `*.host:port` for every subdomain, or an address
    or network instead of the name. A name leads only to public addresses and to addresses also listed here."""
    env: Env = ()
    """Environment variables of every command; may be a dict."""
    workdir: Annotated[str, Field(pattern=r"^/[^\x00:,]+$")] = "/sandbox"
    """Home and working directory: writable, empty at the start."""
    user: Annotated[str, Field(pattern=f"^{_ID}:{_ID}$")] | None = None
    """Numeric `user:group` for all processes inside. None: a user id that no other sandbox and no user of the machine
    has (group 1000), so that no per-user limit of the kernel is shared."""
    writable_root: bool = False
    """Make the image's files writable (in this sandbox only); changes are held in memory."""
    root_mb: Annotated[int, Field(ge=1)] | None = None
    """Limit in MiB for changed and added files with `writable_root`; None: half of the memory."""
    runtime: str | None = None
    """OCI runtime of the engine, such as `runsc` or `kata`; None: the engine's default (docker only)."""
    userns: Literal["engine", "required", "host"] = "engine"
    """User namespace of a container: `engine`: the engine's setting; `required`: refuse engines without
    `userns-remap`; `host`: none (docker only)."""

    @model_validator(mode="after")
    def _fits(self) -> SandboxSpec:
        if 2 * self.tmpfs_size_mb > self.memory_mb:
            raise ValueError(
                f"tmpfs_mb={self.tmpfs_size_mb} counts twice (workdir and /tmp) against memory_mb={self.memory_mb}; "
                "lower tmpfs_mb or raise memory_mb"
            )
        if self.root_mb is not None and not self.writable_root:
            raise ValueError("root_mb is for writable_root=True")
        if self.writable_root and self.root_size_mb > self.memory_mb:
            raise ValueError(f"root_mb={self.root_mb} is held in memory: raise memory_mb={self.memory_mb}")
        if self.image is not None and self.dockerfile is not None:
            raise ValueError("image and dockerfile: name one of the two")
        if self.context and self.dockerfile is None:
            raise ValueError("context is what a dockerfile may COPY: give the dockerfile too")
        if self.allow and self.network != "allowlist":
            raise ValueError('allow is for network="allowlist"')
        for entry in self.allow:
            parse_entry(entry)
        for name, value in self.env:
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env: {name!r} is not a usable variable name, or its value holds a NUL")
        return self

    @classmethod
    def from_folder(cls, folder: str | Path, **fields: Any) -> SandboxSpec:
        """Create a spec from the Dockerfile in `folder`, with the folder as build context; `fields`: other fields.

        Raises SandboxSpecError if the folder has no Dockerfile or is too large.
        """
        dockerfile, context = read_build_folder(Path(folder))
        return cls(dockerfile=dockerfile, context=context, **fields)

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """Environment variables of every command: those of the proxy, then `env`. Programs reach servers in the sandbox
        itself without the proxy, which would refuse them."""
        if self.network != "allowlist":
            return self.env
        proxy = dict.fromkeys(PROXY_VARIABLES, f"http://127.0.0.1:{PROXY_PORT}")
        direct = dict.fromkeys(NO_PROXY_VARIABLES, ",".join(own_hosts(self.allow)))
        return (*proxy.items(), *direct.items(), *self.env)

    @property
    def root_size_mb(self) -> int:
        return self.root_mb if self.root_mb is not None else max(1, self.memory_mb // 2)

    @property
    def tmpfs_size_mb(self) -> int:
        return self.tmpfs_mb if self.tmpfs_mb is not None else max(1, min(64, self.memory_mb // 4))
