"""`roll-flash check-models`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from roll_flash.cli.options import Json, Text, argument, option, show
from roll_flash.errors import ConfigError
from roll_flash.terminal import say


def check_models(
    models: Annotated[
        list[str] | None, argument("MODEL", "Model folders, or architectures of docs/models.md; none: all of these.")
    ] = None,
    write: Annotated[Text, option("PAGE", "Replace the table of a page, such as docs/models.md.")] = None,
    as_json: Json = False,
) -> int:
    """Compare the learner with plain transformers: log-probabilities and gradients of models, in float32."""
    from roll_flash.model_check.check import compare
    from roll_flash.model_check.report import comparison_table, line, write_table

    if write and models:
        raise ConfigError("--write needs all architectures: leave out the names")
    results, wrong = [], []
    for result, is_exact in compare(models or []):
        say(f"{'' if is_exact else 'WRONG: '}{line(result)}", error=as_json)
        results.append(result)
        wrong += [] if is_exact else [result.name]
    if write:
        write_table(Path(write), "architectures", comparison_table(results))
    summary = f"{len(results) - len(wrong)} of {len(results)} are exact"
    summary += f"; not: {', '.join(wrong)}" if wrong else ""
    show([result.as_dict() for result in results], summary, as_json=as_json)
    return 1 if wrong else 0
