"""Sandboxes for untrusted code: hardened, fast to lease, never leaked. They work without any training."""

from roll_flash.sandboxes.client.commands import CommandStream
from roll_flash.sandboxes.client.shell import Shell
from roll_flash.sandboxes.conformance import CheckReport, check_provider
from roll_flash.sandboxes.docker.reaper import SandboxEntry, list_sandboxes, reap
from roll_flash.sandboxes.errors import (
    SandboxBusy,
    SandboxDied,
    SandboxDiskFull,
    SandboxError,
    SandboxFileError,
    SandboxHostError,
    SandboxImageError,
    SandboxImageMissing,
    SandboxPermissionDenied,
    SandboxSpecError,
    SandboxStartError,
    SandboxUnavailable,
    SandboxUnreachable,
)
from roll_flash.sandboxes.files.trees import TreeReport
from roll_flash.sandboxes.pool.sandbox_pool import SandboxPool
from roll_flash.sandboxes.pool.stats import PoolStats
from roll_flash.sandboxes.protocol import Provider, Sandbox
from roll_flash.sandboxes.providers import open_sandbox
from roll_flash.sandboxes.result import ExecResult, Histogram, OutputChunk, SandboxStats
from roll_flash.sandboxes.spec import SandboxSpec

__all__ = [
    "CheckReport",
    "CommandStream",
    "ExecResult",
    "Histogram",
    "OutputChunk",
    "PoolStats",
    "Provider",
    "Sandbox",
    "SandboxBusy",
    "SandboxDied",
    "SandboxDiskFull",
    "SandboxEntry",
    "SandboxError",
    "SandboxFileError",
    "SandboxHostError",
    "SandboxImageError",
    "SandboxImageMissing",
    "SandboxPermissionDenied",
    "SandboxPool",
    "SandboxSpec",
    "SandboxSpecError",
    "SandboxStartError",
    "SandboxStats",
    "SandboxUnavailable",
    "SandboxUnreachable",
    "Shell",
    "TreeReport",
    "check_provider",
    "list_sandboxes",
    "open_sandbox",
    "reap",
]
