"""Demonstrations for a warm start: conversations in which an environment's oracle solves training tasks."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roll_flash.envs.check import agents
from roll_flash.envs.check.play import PlayedEpisode, Player, messages_of
from roll_flash.errors import ConfigError, RunError
from roll_flash.processes.background import call_sync_or_async

NOTE_EVERY_S = 5.0


def write_demonstrations(
    path: Path,
    env_id: str,
    kwargs: Mapping[str, Any],
    *,
    seeds: int,
    provider: str,
    timeout_s: float,
    note: Callable[[str], None],
) -> list[str]:
    """Play the seeds 0 to `seeds` - 1, which are never held out, and write the episodes that were solved as JSON lines,
    for `warm_start.demonstrations`. Return why others were left out, a line for each.

    Raises ConfigError if the environment has no `oracle`, or the file exists or cannot be made, RunError if nothing was
    solved or the file cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists; name another file")
    try:  # before the tasks are played, which may take long
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; name another file") from None
    player = Player(env_id, kwargs, provider=provider, timeout_s=timeout_s, run=f"env-demonstrate-{os.getpid()}")
    lines, failures = asyncio.run(_play(player, env_id, seeds, note))
    if not lines:
        raise RunError(f"{env_id}: its oracle solved none of {seeds} tasks: {failures[0]}")
    try:
        path.write_text("".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    return failures


async def _play(player: Player, env_id: str, seeds: int, note: Callable[[str], None]) -> tuple[list[str], list[str]]:
    lines, failures, said_s = list[str](), list[str](), time.monotonic()
    async with player:
        env, _ = await player.open()
        await call_sync_or_async(env.close)
        if not callable(getattr(env.unwrapped, "oracle", None)):
            raise ConfigError(
                f"{env_id} has no oracle(), which returns the right action now (docs/environments.md); the best "
                "episodes of a run are demonstrations too: warm_start.demonstrations=runs/NAME"
            )
        for seed in range(seeds):
            played = await player.play(agents.oracle, seed)
            if why := _why_not(played):
                failures.append(f"seed {seed}: {why}")
            else:
                lines.append(json.dumps({"messages": messages_of(played)}))
            if time.monotonic() - said_s > NOTE_EVERY_S:
                note(f"{seed + 1} of {seeds} tasks played")
                said_s = time.monotonic()
    return lines, failures


def _why_not(played: PlayedEpisode) -> str:
    if played.error:
        return played.error
    is_solved = played.ended and played.success is not False and played.reward > 0
    return "" if is_solved else f"not solved, reward {played.reward:g}"
