"""`roll-flash train`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

from roll_flash.cli.options import Json, Words, argument, flag, show, split_words, standard_output_for_json
from roll_flash.errors import ConfigError, RollFlashError
from roll_flash.terminal import outliving_readers

if TYPE_CHECKING:
    from roll_flash.config.tree import Config

Resume = Annotated[bool, flag("--resume", "Continue the run of this name from its newest checkpoint.")]
KeepAlive = Annotated[bool, flag("--keep-alive", "Start the run again when it is killed or ends with an error.")]
DryRun = Annotated[bool, flag("--dry-run", "Check everything that can be checked, and stop.")]


def train(
    words: Annotated[Words, argument("CONFIG key=value", "A YAML file; keys to set, such as steps=5.")] = None,
    resume: Resume = False,
    keep_alive: KeepAlive = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Run a training job; Ctrl-C stops it with a checkpoint."""
    from roll_flash.config.tree import load_config

    source, overrides = split_words(words)
    if source is None:
        raise ConfigError("train needs a CONFIG file, for example: roll-flash train configs/quickstart.yaml")
    config = load_config(source, overrides)
    if dry_run:
        return _dry_run(config, resume, as_json)
    if keep_alive:
        with outliving_readers():
            return _keep_alive(config, [*(words or []), *(["--json"] if as_json else [])], resume)
    from roll_flash.summary import closing_text
    from roll_flash.trainer import train as run

    try:
        with outliving_readers(), standard_output_for_json(as_json):
            summary = run(config, resume=resume)
    except (KeyboardInterrupt, RollFlashError) as error:
        _say_how_to_go_on(error, config)
        raise
    show(summary, closing_text(summary), as_json=as_json)
    return 0


def _keep_alive(config: Config, words: list[str], resume: bool) -> int:
    from roll_flash.monitor.metrics import newest_step
    from roll_flash.processes.keep_alive import keep_alive, own_command

    folder, starts = config.run_folder, itertools.count()

    def command() -> list[str]:
        goes_on = next(starts) > 0 and (folder / "config.yaml").is_file()
        return own_command(["train", *words, *(["--resume"] if resume or goes_on else [])])

    return keep_alive(command, lambda: newest_step(folder))


def _dry_run(config: Config, resume: bool, as_json: bool) -> int:
    """Print the resolved config, which can be run as is, with the passed checks as comments."""
    from roll_flash.cli.dry_run import dry_run

    with standard_output_for_json(as_json):
        checks = dry_run(config, resume=resume)
    text = "\n".join([*(f"# {check}" for check in checks), config.to_yaml().rstrip()])
    show({"checks": checks, "config": config.model_dump(mode="json")}, text, as_json=as_json)
    return 0


def _say_how_to_go_on(error: KeyboardInterrupt | RollFlashError, config: Config) -> None:
    from roll_flash.run.run_dir import list_checkpoints

    folder, found = config.run_folder, list_checkpoints(config.run_folder)
    if isinstance(error, KeyboardInterrupt) and not found:
        error.add_note("no checkpoint was written yet" + (f"; the run folder is {folder}" if folder.exists() else ""))
    elif found and not isinstance(error, ConfigError):
        step = found[-1].step
        error.add_note(f"a checkpoint of step {step} is in {folder}; go on with the same command and --resume")
