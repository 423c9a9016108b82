"""`roll-flash plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from roll_flash.cli.options import Json, Text, argument, flag, option, runs_like, show

OF_A_SEED = ("name", "seed", "runs")
"""Keys of a config in which the seeds of one setting differ."""


def plot(
    runs: Annotated[list[str], argument("RUN...", "Names or folders of runs.", runs_like)],
    out: Annotated[
        Text, option("FILE", "A .png or .svg file; by default plots/reward.png of a single run.", "-o", "--out")
    ] = None,
    dark: Annotated[bool, flag("--dark", "Light lines on a dark ground.")] = False,
    as_json: Json = False,
) -> int:
    """Draw learning, staleness and utilization of runs.

    Runs that differ only in their seed are one line: their mean, with a band from the lowest to the highest.
    """
    from yaml import YAMLError

    from roll_flash.checked_files import CONTENT_ERRORS, make_way
    from roll_flash.errors import ConfigError, first_line
    from roll_flash.monitor.plot import plot_settings
    from roll_flash.run.run_dir import find_run

    folders = [find_run(run) for run in runs]
    if out is None and len(folders) > 1:
        raise ConfigError("plot of several runs needs a file: -o FILE.png")
    path = Path(out).expanduser() if out is not None else folders[0] / "plots" / "reward.png"
    try:
        settings = group_by_setting(folders)
        if out is None:
            if path.parent.is_symlink():
                path.parent.unlink()
            path.parent.mkdir(exist_ok=True)
            make_way(path)
        plot_settings(settings, path, dark=dark)
    except (OSError, YAMLError, *CONTENT_ERRORS) as error:
        message = f"config.yaml or metrics.jsonl of {' or '.join(runs)} is not as a run writes it: {first_line(error)}"
        raise ConfigError(message) from error
    value = {"file": str(path), "settings": {name: [str(each) for each in runs] for name, runs in settings.items()}}
    show(value, str(path), as_json=as_json)
    return 0


def group_by_setting(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Run folders by setting, which has the name of its first run."""
    from roll_flash.checked_files import load_yaml, read_checked

    found: list[tuple[dict[str, Any], list[Path]]] = []
    for folder in folders:
        config = load_yaml(read_checked(folder / "config.yaml"))
        setting = {key: value for key, value in config.items() if key not in OF_A_SEED}
        same = next((runs for other, runs in found if other == setting), None)
        if same is None:
            found.append((setting, [folder]))
        else:
            same.append(folder)
    names = [runs[0].resolve().name for _, runs in found]
    return {
        name if names.count(name) == 1 else str(runs[0]): runs for name, (_, runs) in zip(names, found, strict=True)
    }
