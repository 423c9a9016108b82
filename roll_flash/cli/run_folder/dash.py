"""`roll-flash dash`."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from roll_flash.cli.options import Words, argument, option
from roll_flash.terminal import say


def dash(
    runs: Annotated[
        Words, argument("[RUN]...", "Names or folders of runs and evaluations, or folders with several; default: runs.")
    ] = None,
    port: Annotated[int, option("PORT", "Port on 127.0.0.1; 0 is any free one.")] = 7007,
) -> int:
    """Show runs and evaluations in the browser, live: charts, timeline, every episode.

    Only this machine can reach it, with the printed address; from another: ssh -L 7007:127.0.0.1:7007 MACHINE.
    """
    from roll_flash.dashboard.folders import Sources
    from roll_flash.dashboard.guard import address, new_token
    from roll_flash.dashboard.server import bind, make_app, make_server

    sources, token = Sources(runs or []), new_token()
    with bind(port) as bound:
        say(f"{sources.roots}: {address(bound.getsockname()[1], token)}")
        say("Open it in a browser on this machine; Ctrl-C ends the dashboard.")
        with suppress(KeyboardInterrupt):
            make_server(make_app(sources, token)).run(sockets=[bound])
    return 0
