"""`roll-flash replay`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from roll_flash.cli.options import ModelName, Text, Trust, argument, flag, option


def replay(
    context: typer.Context,
    run: Annotated[str, argument("RUN", "A run's name or folder.")],
    episode: Annotated[str, argument("EPISODE", "The id of an episode, as in the logs.")],
    at_turn: Annotated[int | None, option("N", "Play turns 0 to N-1 again and go on with turn N.")] = None,
    fork: Annotated[int | None, option("K", "Times that a model goes on; 1 by default, 0 for none.")] = None,
    model: ModelName = None,
    endpoint: Annotated[Text, option("URL", "An OpenAI-compatible endpoint that serves the model.")] = None,
    api_key_env: Annotated[Text, option("NAME", "Environment variable that holds the endpoint's key.")] = None,
    interactive: Annotated[bool, flag("--interactive", "Go on by hand: a shell in the sandbox, or actions.")] = False,
    out: Annotated[Text, option("DIR", "Where forks are written; by default in the run's replays/.")] = None,
    allow_weak: Annotated[bool, flag("--allow-weak", "Run without Docker too, in the weaker local sandbox.")] = False,
    trust: Trust = False,
) -> int:
    """Play a recorded episode again, up to a turn, and go on from there.

    Without --at-turn all of its turns are played and compared with the recording. Forks go on with the run's newest
    checkpoint, or with --model: RUN@STEP is the one of a step.
    """
    from roll_flash.replay.replay import ReplayRequest, run_replay

    return 0 if asyncio.run(run_replay(ReplayRequest(**context.params))) else 1
