"""Isolation features of an engine, from its own answer to /info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_flash.sandboxes.errors import SandboxSpecError
from roll_flash.sandboxes.owner import DOCKER_USERS, REMAPPED_USERS
from roll_flash.sandboxes.spec import SandboxSpec


@dataclass(frozen=True, slots=True)
class EngineIsolation:
    default_runtime: str
    runtimes: tuple[str, ...]
    user_namespaces: bool
    """True if user ids inside map to other ids on the machine (`userns-remap`, or a rootless engine)."""
    rootless: bool
    seccomp: bool
    cgroup_version: str

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> EngineIsolation:
        """`info`: the engine's answer to /info."""
        options = [str(option).split(",")[0] for option in info.get("SecurityOptions") or ()]
        rootless = "name=rootless" in options
        return cls(
            default_runtime=str(info.get("DefaultRuntime") or "runc"),
            runtimes=tuple(sorted(info.get("Runtimes") or {})),
            user_namespaces=rootless or "name=userns" in options,
            rootless=rootless,
            seccomp="name=seccomp" in options,
            cgroup_version=str(info.get("CgroupVersion") or "1"),
        )

    def check(self, spec: SandboxSpec) -> None:
        """Raise SandboxSpecError if this engine lacks a feature that `spec` requires."""
        if spec.runtime is not None and spec.runtime not in self.runtimes:
            raise SandboxSpecError(
                f"runtime={spec.runtime!r}: the engine has {', '.join(self.runtimes)}; "
                "install it and name it in the engine's daemon.json (`runtimes`)"
            )
        if spec.userns == "required" and not self.user_namespaces:
            raise SandboxSpecError(
                'userns="required": the engine has no user namespaces; start it with userns-remap, or rootless'
            )
        if spec.userns == "host" and self.rootless:
            raise SandboxSpecError('userns="host": a rootless engine cannot go without a user namespace')

    def users(self, spec: SandboxSpec) -> range:
        """Return the range of user ids for sandboxes whose spec has no `user`."""
        return REMAPPED_USERS if self.user_namespaces and spec.userns != "host" else DOCKER_USERS

    def describe(self, spec: SandboxSpec) -> dict[str, str]:
        remapped = self.user_namespaces and spec.userns != "host"
        return {
            "runtime": spec.runtime or self.default_runtime,
            "user namespace": "yes" if remapped else "no",
            "user": "of its own"
            if spec.user is None
            else f"{spec.user} of the {'namespace' if remapped else 'machine'}",
            "seccomp": "the engine's and the agent's" if self.seccomp else "the agent's",
            "rootless engine": "yes" if self.rootless else "no",
            "cgroup": f"v{self.cgroup_version}",
            "disk": "nothing is written to it",
        }
