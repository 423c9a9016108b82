"""`roll-flash sandbox ls | reap | check`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.sandboxes import SandboxEntry, SandboxSpec

Handler = Callable[[argparse.Namespace], int]
Command = Callable[[str, Handler, str], argparse.ArgumentParser]


def add_sandbox(command: Command) -> None:
    """`command` makes an action's parser from its name, handler and help line."""
    for name, handler, text in (
        ("ls", _sandbox_ls, "what runs, and whose it is"),
        ("reap", _sandbox_reap, "remove what dead runs have left behind"),
    ):
        listing = command(name, handler, text)
        listing.add_argument("--engine", action="append", default=[], metavar="URL", help="instead of DOCKER_HOST's")
    checking = command("check", _sandbox_check, "run the conformance suite on a provider")
    checking.add_argument("--provider", default="auto", metavar="NAME", help="docker, local, a plug-in's name, or auto")
    checking.add_argument("--image", metavar="IMAGE", help="check sandboxes of this image")
    checking.add_argument("--runtime", metavar="NAME", help="check sandboxes of this OCI runtime of the engine")
    checking.add_argument("--userns", choices=("engine", "required", "host"), default="engine", help="user namespace")


def _sandbox_ls(arguments: argparse.Namespace) -> int:
    from roll_flash.sandboxes import list_sandboxes

    return _print_sandboxes(arguments, list_sandboxes(*arguments.engine), "no sandboxes")


def _sandbox_reap(arguments: argparse.Namespace) -> int:
    from roll_flash.sandboxes import reap

    return _print_sandboxes(arguments, reap(*arguments.engine), "nothing to remove")


def _sandbox_check(arguments: argparse.Namespace) -> int:
    from roll_flash.sandboxes.conformance import check_provider

    found = check_provider(arguments.provider, spec=_checked_spec(arguments))
    if arguments.json:
        _print_json({**dataclasses.asdict(found), "ok": found.ok})
        return 0 if found.ok else 1
    for check in found.checks:
        words = check.name.replace("_", " ")
        say(f"{'ok   ' if check.ok else 'FAIL '} {words}" + ("" if check.ok else f": {check.detail}"))
    for name, measure in found.measures.items():
        say(f"{name}: {measure}")
    failed = sum(not check.ok for check in found.checks)
    say(f"{found.provider} ({found.isolation} isolation): {len(found.checks) - failed} of {len(found.checks)} hold")
    return 0 if found.ok else 1


def _checked_spec(arguments: argparse.Namespace) -> SandboxSpec:
    from roll_flash.sandboxes import SandboxSpec

    return SandboxSpec(image=arguments.image, runtime=arguments.runtime, userns=arguments.userns)


def _print_sandboxes(arguments: argparse.Namespace, found: Sequence[SandboxEntry], none: str) -> int:
    if arguments.json:
        _print_json([dataclasses.asdict(item) for item in found])
        return 0
    for item in found:
        state = "leaked" if item.leaked else item.state
        beside = f"  beside {item.network}" if item.network not in ("", item.name) else ""
        say(f"{item.name}  {state}  {item.age_s:.0f} s old  run {item.run or '-'}  owner {item.owner or '-'}{beside}")
    if not found:
        say(none)
    return 0


def _print_json(value: Any) -> None:
    say(json.dumps(value, indent=2, default=str))
