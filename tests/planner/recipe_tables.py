"""Writes the memory tables in the comments of recipes: `python tests/planner/recipe_tables.py`.

A recipe is a config whose first comment names its machines: `# For 1 node of 512 GiB with 8 x h100-sxm-80gb.`, a file
of configs/hardware beside its folder. The table stands below that comment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import Plan, make_plan
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError
from roll_flash.models.shape import read_shape
from roll_flash.planner.machines.hardware import Hardware, load_hardware
from roll_flash.planner.machines.memory import GIB
from roll_flash.planner.machines.memory_check import GpuUse, gpu_uses, host_uses, require_memory

_MACHINES = re.compile(r"^# For (\d+) nodes? of (\d+) GiB with (\d+) x ([a-z0-9.-]+)\.$", re.MULTILINE)
TITLE = "# Memory of a GPU, and of a host, in GiB, by arithmetic (docs/plan.md); not yet run on a GPU:"


def recipes(folder: Path) -> Iterator[Path]:
    """Yield the recipes of a folder."""
    yield from (path for path in sorted(folder.glob("*.yaml")) if _MACHINES.search(path.read_text()))


def machines_of(recipe: Path) -> Hardware:
    """Return the machines that a recipe is for. Raises ConfigError."""
    found = _MACHINES.search(recipe.read_text())
    if found is None:
        raise ConfigError(f"{recipe}: no comment such as `# For 1 node of 512 GiB with 8 x h100-sxm-80gb.`; add one")
    hardware = load_hardware(recipe.parent.parent / "hardware" / f"{found[4]}.yaml")
    sizes = {"nodes": int(found[1]), "host_memory_gib": float(found[2]), "gpus_per_node": int(found[3])}
    return hardware.model_copy(update=sizes)


def plan_recipe(config: Config, hardware: Hardware) -> Plan:
    """Place a recipe on its machines. Raises PlacementError if they have too few GPUs or too little memory."""
    nodes = hardware.as_nodes()
    plan = make_plan(run_parts(config, nodes, gpu_servers=True), nodes)
    require_memory(config, read_shape(config.model.path, config.model.revision), plan)
    return plan


def with_table(recipe: Path) -> str:
    """Return the text of a recipe with its table as it should be."""
    config, hardware = load_config(recipe), machines_of(recipe)
    plan = plan_recipe(config, hardware)
    table = [TITLE, *_table(config, plan)]
    lines = recipe.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if _MACHINES.match(line)) + 1
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("#"))
    return "\n".join([*lines[:start], *table, *lines[end:]]) + "\n"


def _table(config: Config, plan: Plan) -> list[str]:
    """Return a row for each kind of part and of host, and one for both parts together where they share a GPU."""
    shape = read_shape(config.model.path, config.model.revision)
    on_gpus = Counter(row for use in gpu_uses(config, shape, plan) for row in _rows(use))
    on_hosts = Counter(
        ("host", f"{host.use.total / GIB:.1f} of {host.memory / GIB:.1f}", host.use.named())
        for host in host_uses(config, shape, plan)
    )
    rows = [_counted(row, count, "GPU") for row, count in on_gpus.items()]
    rows += [_counted(row, count, "node") for row, count in on_hosts.items()]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join(["# ", *map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def _counted(row: tuple[str, str, str], count: int, what: str) -> tuple[str, str, str, str]:
    name, memory, parts = row
    return name, f"{count} {what}{'s' * (count > 1)}", memory, parts


def _rows(use: GpuUse) -> Iterator[tuple[str, str, str]]:
    of = f"of {use.memory / GIB:.1f}"
    for part, memory in zip(use.parts, use.uses, strict=True):
        yield part.kind, f"{memory.total / GIB:.1f} {of}", memory.named()
    if len(use.parts) > 1:
        yield "both", f"{use.total / GIB:.1f} {of}", ""


def main() -> None:
    for recipe in recipes(Path("configs/gpu")):
        recipe.write_text(with_table(recipe))


if __name__ == "__main__":
    main()
