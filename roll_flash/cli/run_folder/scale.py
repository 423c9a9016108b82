"""`roll-flash scale`."""

from __future__ import annotations

from typing import Annotated

from roll_flash.cli.options import Json, RunName, Words, argument, option, show
from roll_flash.errors import ConfigError


def scale(
    run: RunName,
    words: Annotated[Words, argument("servers=N workers=N", "The wanted numbers.")] = None,
    timeout: Annotated[float, option("SECONDS", "How long to wait for new servers to start.")] = 900.0,
    as_json: Json = False,
) -> int:
    """Give a running run more or fewer servers and workers."""
    from roll_flash.run.run_dir import find_run
    from roll_flash.run.scale_request import ask_to_scale

    wanted = dict(_number(word) for word in words or [])
    if not wanted:
        raise ConfigError(
            "scale needs servers=N, workers=N or both, for example: roll-flash scale quickstart servers=2"
        )
    text = ask_to_scale(find_run(run), wanted.get("servers"), wanted.get("workers"), timeout)
    show({"run": run, "text": text}, text, as_json=as_json)
    return 0


def _number(word: str) -> tuple[str, int]:
    name, _, text = word.partition("=")
    if name not in ("servers", "workers") or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{word}: scale takes servers=N and workers=N, with N of at least 1")
    return name, int(text)
