"""`roll-flash sandbox ls | reap | check`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from roll_flash.cli.options import Json, Provider, Text, example, option, show
from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.sandboxes import SandboxEntry
    from roll_flash.sandboxes.conformance import CheckResult

app = typer.Typer()
Engines = Annotated[list[str] | None, option("URL", "Instead of DOCKER_HOST's; may be repeated.")]


@app.command(epilog=example("sandbox ls"))
def ls(engine: Engines = None, as_json: Json = False) -> int:
    """List what runs, and whose it is."""
    from roll_flash.sandboxes import list_sandboxes

    _say_if_no_engine_answers(engine)
    return _show_sandboxes(list_sandboxes(*engine or ()), "no sandboxes", as_json)


@app.command(epilog=example("sandbox reap"))
def reap(engine: Engines = None, as_json: Json = False) -> int:
    """Remove what dead runs have left behind."""
    from roll_flash.sandboxes import reap

    _say_if_no_engine_answers(engine)
    return _show_sandboxes(reap(*engine or ()), "nothing to remove", as_json)


@app.command(epilog=example("sandbox check"))
def check(
    provider: Provider = "auto",
    image: Annotated[Text, option("IMAGE", "Check sandboxes of this image.")] = None,
    runtime: Annotated[Text, option("NAME", "Check sandboxes of this OCI runtime of the engine.")] = None,
    userns: Annotated[Literal["engine", "required", "host"], typer.Option(help="User namespace.")] = "engine",
    as_json: Json = False,
) -> int:
    """Run the conformance suite on a provider."""
    from roll_flash.sandboxes import SandboxSpec
    from roll_flash.sandboxes.conformance import check_provider

    found = check_provider(provider, spec=SandboxSpec(image=image, runtime=runtime, userns=userns))
    lines = [f"{'ok  ' if item.ok else 'FAIL'}  {_check_text(item)}" for item in found.checks]
    lines += [f"{name}: {measure}" for name, measure in found.measures.items()]
    held = sum(item.ok for item in found.checks)
    lines.append(f"{found.provider} ({found.isolation} isolation): {held} of {len(found.checks)} hold")
    show({**dataclasses.asdict(found), "ok": found.ok}, "\n".join(lines), as_json=as_json)
    return 0 if found.ok else 1


def _check_text(check: CheckResult) -> str:
    return check.name.replace("_", " ") + ("" if check.ok else f": {check.detail}")


def _say_if_no_engine_answers(chosen: Sequence[str] | None) -> None:
    """Without `--engine` the rest is listed where no engine answers; but "no sandboxes" would not be true."""
    from roll_flash.sandboxes import SandboxUnavailable
    from roll_flash.sandboxes.docker.api import open_engine

    async def ask() -> None:
        async with open_engine():
            pass

    try:
        if not chosen:
            asyncio.run(ask())
    except SandboxUnavailable as error:
        say(f"containers were not looked for: {error}", error=True)


def _show_sandboxes(found: Sequence[SandboxEntry], none: str, as_json: bool) -> int:
    lines = [_line(item) for item in found] or [none]
    show([dataclasses.asdict(item) for item in found], "\n".join(lines), as_json=as_json)
    return 0


def _line(item: SandboxEntry) -> str:
    state = "leaked" if item.leaked else item.state
    beside = f"  beside {item.network}" if item.network not in ("", item.name) else ""
    return f"{item.name}  {state}  {item.age_s:.0f} s old  run {item.run or '-'}  owner {item.owner or '-'}{beside}"
