"""`roll-flash serve-gateway`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from roll_flash.errors import ConfigError
from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.serving import RunningGateway

Handler = Callable[[argparse.Namespace], int]
Command = Callable[[str, Handler, str, str], argparse.ArgumentParser]


def add_gateway(command: Command) -> None:
    """`command` makes a command's parser from its name, handler, help line and usage."""
    text = "an OpenAI- and Anthropic-compatible endpoint that records tokens and takes rewards"
    usage = (
        "roll-flash serve-gateway (--model FOLDER|NAME|RUN | --endpoint URL --model NAME) [--port N] [--out DIR] "
        "[a.b=c ...] [options]"
    )
    parser = command("serve-gateway", _serve_gateway, text, usage)
    parser.set_defaults(sets_config=True)
    parser.add_argument("words", nargs="*", metavar="a.b=c", help="keys to set, as inference.engine=transformers")
    parser.add_argument("--model", metavar="M", help="a model folder, a model's name, or RUN[@step]")
    parser.add_argument("--endpoint", metavar="URL", help="pass through to an endpoint; records messages, not tokens")
    parser.add_argument("--endpoint-key-env", metavar="NAME", help="environment variable with that endpoint's key")
    parser.add_argument("--name", metavar="NAME", help="the model's name for agents")
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen on")
    parser.add_argument("--port", type=int, default=8321, metavar="N", help="0 lets the system choose")
    parser.add_argument("--url", metavar="URL", help="address that sessions are told, if not that of their opening")
    text = "environment variable with the key that opens sessions; without it one is made and printed"
    parser.add_argument("--api-key-env", metavar="NAME", help=text)
    parser.add_argument("--out", default="runs/gateway", metavar="DIR", help="where finished episodes are written")
    parser.add_argument("--verifier", metavar="FILE:FUNCTION", help="scores sessions whose reward is asked for")
    parser.add_argument("--idle-s", type=float, default=3600.0, metavar="S", help="give up sessions unused for so long")


def _serve_gateway(arguments: argparse.Namespace) -> int:
    import asyncio

    from roll_flash.serving import GatewayRequest, serve

    request = GatewayRequest(
        model=arguments.model,
        endpoint=arguments.endpoint,
        endpoint_key_env=arguments.endpoint_key_env,
        name=arguments.name,
        host=arguments.host,
        port=arguments.port,
        api_key_env=arguments.api_key_env,
        url=arguments.url,
        out=arguments.out,
        verifier=arguments.verifier,
        idle_s=arguments.idle_s,
        overrides=tuple(_only_overrides(arguments.words)),
    )
    if request.idle_s <= 0:
        raise ConfigError(f"--idle-s {request.idle_s:g}: must be more than 0")
    serving: list[RunningGateway] = []

    def announce(found: RunningGateway) -> None:
        serving.append(found)
        _announce(found, arguments.json, request.api_key_env is None)

    try:
        asyncio.run(serve(request, announce, _note))
    finally:
        for found in serving:
            _note(
                f"{found.routes.scored} episodes were scored, {found.routes.failed} not; they are in {found.episodes}"
            )
    return 0


def _only_overrides(words: Sequence[str]) -> Sequence[str]:
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word!r}: an override is written key=value; a model is given with --model")
    return words


def _announce(serving: RunningGateway, as_json: bool, is_made: bool) -> None:
    """`is_made`: the key was generated, so the user does not know it yet."""
    if as_json:
        found = {"url": serving.url, "model": serving.model, "episodes": str(serving.episodes)}
        say(json.dumps(found | ({"api_key": serving.api_key} if is_made else {})))
        return
    say(f"{serving.model} at {serving.url}/v1; open a session with POST {serving.url}/v1/sessions; Ctrl-C stops")
    if is_made:
        say(f"the key that opens sessions, made for this time (see --api-key-env): {serving.api_key}")
    say(f"finished episodes go into {serving.episodes}")


def _note(text: str) -> None:
    say(text, error=True)
