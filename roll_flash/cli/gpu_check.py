"""`roll-flash gpu-check`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

from roll_flash.cli.options import Json, Text, Words, argument, option, show, split_words
from roll_flash.terminal import say


def gpu_check(
    words: Annotated[Words, argument("RECIPE key=value", "A config, such as one of configs/gpu; keys to set.")] = None,
    output: Annotated[Text, option("DIR", "Where the report goes; by default gpu-check-DATE.")] = None,
    only: Annotated[
        Text, option("WORD,WORD", "Only checks of groups with one of these words in their name, such as ipc or run.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Try everything that uses a GPU, about ten minutes, and write a report. Without a GPU it rehearses on the CPU."""
    from roll_flash.gpu_check.groups import all_groups, groups_named
    from roll_flash.gpu_check.report import Report
    from roll_flash.gpu_check.runner import Runner, not_run
    from roll_flash.gpu_check.settings import create_folder, make_settings

    source, overrides = split_words(words)
    folder = Path(output or f"gpu-check-{datetime.now():%Y%m%d-%H%M%S}")
    settings = make_settings(folder, source, overrides)
    groups = all_groups(settings) if only is None else groups_named(only, all_groups(settings))
    create_folder(settings.output)
    kind = "no GPU can be used here: this is a REHEARSAL on the CPU" if settings.rehearsal else "about ten minutes"
    say(f"gpu-check: {kind}; the report goes to {folder}", error=True)
    report = Report(settings, only=only or "")
    try:
        for result in Runner(settings, lambda line: say(line, error=True)).run(groups):
            report.results.append(result)
    except KeyboardInterrupt as error:
        report.interrupted = True
        report.results += not_run(groups, report.results)
        error.add_note(f"the report so far is {folder / 'report.md'}")
        raise
    finally:
        page = report.write()
    show(report.as_dict(), f"\n{report.line()}\nreport: {page}", as_json=as_json)
    return 0 if report.is_ok else 1
