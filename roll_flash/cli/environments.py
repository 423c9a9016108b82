"""`roll-flash envs list | check | demonstrate`."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roll_flash.cli.options import (
    Json,
    Provider,
    Words,
    argument,
    example,
    flag,
    option,
    show,
    standard_output_for_json,
)
from roll_flash.terminal import say

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """A registered environment, with the first line of its documentation."""

    id: str
    entry_point: str
    about: str


@app.command("list", epilog=example("envs list"))
def list_(
    everything: Annotated[bool, flag("--all", "Gymnasium's own environments too.")] = False, as_json: Json = False
) -> int:
    """List ids that `envs` of a config takes."""
    found = list_environments(everything=everything)
    width = max((len(env.id) for env in found), default=0)
    lines = [f"{env.id:<{width}}  {env.about}" for env in found]
    show([dataclasses.asdict(env) for env in found], "\n".join(lines), as_json=as_json)
    return 0


@app.command(epilog=example("envs check guess.py:Guess-v0 --seeds 8"))
def check(
    env_id: Annotated[str, argument("ID|CONFIG", "A registered id, module:ID, path/to/file.py:ID, or a YAML file.")],
    settings: Annotated[Words, argument("key=value", "Arguments of the environment, or keys of the config.")] = None,
    seeds: Annotated[int, option("N", "Tasks that each agent plays.")] = 4,
    timeout: Annotated[
        float, option("S", "Seconds that a reset or a step may take, as rollout.step_timeout_s.")
    ] = 60.0,
    provider: Provider = "auto",
    as_json: Json = False,
) -> int:
    """Play an environment to find out if it is fit to train on.

    With a config, play all of its environments and look through the rows of its data sets.
    """
    from roll_flash.config.files import apply_override
    from roll_flash.envs.check.checks import check_environment

    with standard_output_for_json(as_json):
        if env_id.endswith((".yaml", ".yml")):
            from roll_flash.envs.check.configs import check_config

            found = check_config(env_id, settings or (), provider=provider, seeds=seeds, timeout_s=timeout)
        else:
            kwargs: dict[str, Any] = {}
            for word in settings or ():
                kwargs = apply_override(kwargs, word)
            found = [check_environment(env_id, kwargs, provider=provider, seeds=seeds, timeout_s=timeout)]
    ok = all(report.ok for report in found)
    values = [{**dataclasses.asdict(report), "ok": report.ok} for report in found]
    text = "\n\n".join(report.as_table() for report in found)
    show(values[0] if len(values) == 1 else {"reports": values, "ok": ok}, text, as_json=as_json)
    return 0 if ok else 1


@app.command(epilog=example("envs demonstrate Maze-v0 -o solved.jsonl"))
def demonstrate(
    env_id: Annotated[str, argument("ID", "A registered id, module:ID, or path/to/file.py:ID, with an oracle().")],
    output: Annotated[Path, option("FILE", "A new file of JSON lines.", "-o", "--output")],
    settings: Annotated[Words, argument("key=value", "Arguments of the environment.")] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Tasks to play: the seeds 0 to N - 1.", min=1)] = 200,
    timeout: Annotated[float, option("S", "Seconds that a reset or a step may take.")] = 60.0,
    provider: Provider = "auto",
    as_json: Json = False,
) -> int:
    """Write demonstrations for warm_start: training tasks that the environment's oracle solves."""
    from roll_flash.config.files import apply_override
    from roll_flash.envs.check.demonstrations import write_demonstrations

    kwargs: dict[str, Any] = {}
    for word in settings or ():
        kwargs = apply_override(kwargs, word)
    with standard_output_for_json(as_json):
        left_out = write_demonstrations(
            output, env_id, kwargs, seeds=seeds, provider=provider, timeout_s=timeout, note=say
        )
    text = f"{output}: {seeds - len(left_out)} demonstrations"
    why = f"; {len(left_out)} left out, the first: {left_out[0]}" if left_out else ""
    value = {"file": str(output), "demonstrations": seeds - len(left_out), "left_out": left_out}
    show(value, f"{text}{why}\nuse them:  warm_start.demonstrations={output}", as_json=as_json)
    return 0


def list_environments(*, everything: bool) -> list[EnvironmentEntry]:
    """Environments of this package and of plug-ins, by id; with `everything` also those of gymnasium."""
    import gymnasium

    from roll_flash.envs.registration import load_plugins

    load_plugins()  # plug-ins that fail to load are logged as warnings
    specs = [spec for spec in gymnasium.registry.values() if everything or not _is_gymnasiums_own(spec)]
    return [
        EnvironmentEntry(spec.id, _entry_point(spec), "" if _is_gymnasiums_own(spec) else _about(spec))
        for spec in sorted(specs, key=lambda spec: spec.id)
    ]


def _entry_point(spec: EnvSpec) -> str:
    target: Any = spec.entry_point if spec.entry_point is not None else spec.vector_entry_point
    if callable(target):
        return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__name__)}"
    return str(target)


def _is_gymnasiums_own(spec: EnvSpec) -> bool:
    """True for environments registered by `import gymnasium`; some of them need packages that the user must install."""
    return _entry_point(spec).partition(".")[0] in ("gymnasium", "shimmy") or spec.namespace in ("phys2d", "tabular")


def _about(spec: EnvSpec) -> str:
    from gymnasium.envs.registration import load_env_creator

    if spec.entry_point is None:
        return ""
    try:
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    except (ImportError, AttributeError) as error:
        return f"(cannot be imported: {error})"
    return _first_line(creator, spec.id)


def _first_line(creator: Any, env_id: str) -> str:
    """First line of the module's docstring if that introduces the environment (`Maze-v0: ...`), else of the class's."""
    module = inspect.getdoc(inspect.getmodule(creator)) or ""
    text = module.removeprefix(f"{env_id}:") if module.startswith(f"{env_id}:") else inspect.getdoc(creator) or ""
    return text.strip().partition("\n")[0]
