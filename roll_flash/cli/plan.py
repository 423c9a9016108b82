"""`roll-flash plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from roll_flash.cli.options import Json, Text, Words, argument, flag, option, show, split_words
from roll_flash.errors import ConfigError


def plan(
    words: Annotated[Words, argument("CONFIG key=value", "A YAML file; keys to set, such as steps=5.")] = None,
    run: Annotated[
        Text, option("RUN", "Measure speeds and episodes in this run, a name or a folder.", "--from")
    ] = None,
    hardware: Annotated[Text, option("FILE", "Machines, their figures and price, as in configs/hardware.")] = None,
    gantt: Annotated[Text, option("FILE.png", "Draw the first steps as predicted.")] = None,
    only_predict: Annotated[bool, flag("--no-search", "Do not look for better settings.")] = False,
    as_json: Json = False,
) -> int:
    """Predict a run without starting it, and find better settings.

    Speed, idle times, staleness, memory and cost: from the speeds of an earlier run, or from published figures.
    """
    from roll_flash.config.tree import load_config
    from roll_flash.monitor.plot import SUFFIXES
    from roll_flash.planner.machines.hardware import load_hardware
    from roll_flash.planner.plan import plan_run
    from roll_flash.planner.report import report
    from roll_flash.run.run_dir import find_run

    source, overrides = split_words(words)
    if source is None:
        raise ConfigError("plan needs a CONFIG file, for example: roll-flash plan configs/quickstart.yaml --from RUN")
    if gantt is not None and Path(gantt).suffix not in SUFFIXES:
        raise ConfigError(f"--gantt {gantt}: give a file that ends with {' or '.join(SUFFIXES)}")
    config = load_config(source, overrides)
    measured = find_run(run, config.runs) if run is not None else None
    machines = load_hardware(hardware) if hardware is not None else None
    made = plan_run(config, run=measured, hardware=machines, searches=not only_predict)
    if gantt is not None:
        made.draw(Path(gantt))
    show(made.as_dict(), report(made), as_json=as_json)
    return 0
