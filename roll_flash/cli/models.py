"""`roll-flash check-models`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roll_flash.cli.options import Json, Text, argument, flag, option, show
from roll_flash.errors import ConfigError
from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.model_check.comparison import Comparison
    from roll_flash.model_check.publication import Published


def check_models(
    models: Annotated[
        list[str] | None, argument("MODEL", "Model folders, or architectures of docs/models.md; none: all of these.")
    ] = None,
    vllm: Annotated[bool, flag("--vllm", "Publish changed weights to a vLLM server instead, and compare it.")] = False,
    write: Annotated[Text, option("PAGE", "Replace the table of a page, such as docs/models.md.")] = None,
    as_json: Json = False,
) -> int:
    """Compare the learner with plain transformers: log-probabilities and gradients of models, in float32."""
    from roll_flash.model_check.check import compare, publish
    from roll_flash.model_check.report import write_table

    if write and models:
        raise ConfigError("--write needs all architectures: leave out the names")
    results: list[Comparison | Published] = []
    for result in publish(models or []) if vllm else compare(models or []):
        say(f"{'' if result.is_ok else 'WRONG: '}{result.line()}", error=as_json)
        results.append(result)
    if write:
        write_table(Path(write), results)
    wrong = [result.name for result in results if not result.is_ok]
    summary = f"{len(results) - len(wrong)} of {len(results)} are exact"
    summary += f"; not: {', '.join(wrong)}" if wrong else ""
    show([result.as_dict() for result in results], summary, as_json=as_json)
    return 1 if wrong else 0
