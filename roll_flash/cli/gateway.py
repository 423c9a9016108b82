"""`roll-flash serve-gateway` and `roll-flash serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from roll_flash.cli.options import Json, ModelName, Text, Words, argument, option, split_words
from roll_flash.errors import ConfigError
from roll_flash.terminal import outliving_readers, say

if TYPE_CHECKING:
    from roll_flash.serving import GatewayRequest, RunningGateway


def serve_gateway(
    context: typer.Context,
    words: Annotated[Words, argument("key=value", "Keys to set, as inference.engine=transformers.")] = None,
    model: ModelName = None,
    endpoint: Annotated[Text, option("URL", "Pass through to an endpoint; records messages, not tokens.")] = None,
    endpoint_key_env: Annotated[Text, option("NAME", "Environment variable with that endpoint's key.")] = None,
    name: Annotated[Text, option("NAME", "The model's name for agents.")] = None,
    host: Annotated[str, option("HOST", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("N", "0 lets the system choose.")] = 8321,
    url: Annotated[Text, option("URL", "Address that sessions are told, if not that of their opening.")] = None,
    api_key_env: Annotated[Text, option("NAME", "Variable with the key that opens sessions; else one is made.")] = None,
    out: Annotated[str, option("DIR", "Where finished episodes are written.")] = "runs/gateway",
    verifier: Annotated[Text, option("FILE:FUNCTION", "Scores sessions whose reward is asked for.")] = None,
    idle_s: Annotated[float, option("S", "Give up sessions unused for so long.")] = 3600.0,
    as_json: Json = False,
) -> int:
    """Serve an OpenAI and Anthropic API that records tokens.

    Give --model FOLDER, NAME or RUN to serve a model, or --endpoint URL and --model NAME to pass through to one.
    """
    from roll_flash.serving import GatewayRequest

    options = {name: value for name, value in context.params.items() if name not in ("words", "as_json")}
    request = GatewayRequest(**options, overrides=_overrides(words))
    if idle_s <= 0:
        raise ConfigError(f"--idle-s {idle_s:g}: must be more than 0")
    return _serve(request, as_json)


def serve(
    words: Annotated[Words, argument("key=value", "Keys to set, as learner.ranks=2.")] = None,
    model: ModelName = None,
    host: Annotated[str, option("HOST", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("N", "0 lets the system choose.")] = 8322,
    api_key_env: Annotated[Text, option("NAME", "Variable with the key, tml-...; else one is made.")] = None,
    out: Annotated[str, option("DIR", "Where checkpoints are written.")] = "runs/serve",
    as_json: Json = False,
) -> int:
    """Serve Tinker's training API, and the gateway's for agents.

    Clients of the package tinker train adapters of the model and sample from them; one client at a time trains.
    """
    from roll_flash.serving import GatewayRequest

    overrides = _overrides(words)
    request = GatewayRequest(
        model, host=host, port=port, api_key_env=api_key_env, out=out, overrides=overrides, trains=True
    )
    return _serve(request, as_json)


def _overrides(words: Words) -> tuple[str, ...]:
    source, overrides = split_words(words)
    if source is not None:
        raise ConfigError(f"{source!r}: an override is written key=value; a model is given with --model")
    return overrides


def _serve(request: GatewayRequest, as_json: bool) -> int:
    serving: list[RunningGateway] = []

    def announce(found: RunningGateway) -> None:
        serving.append(found)
        _announce(found, as_json, request.api_key_env is None)

    with outliving_readers():
        return _serve_until_stopped(request, announce, serving)


def _serve_until_stopped(
    request: GatewayRequest, announce: Callable[[RunningGateway], None], serving: list[RunningGateway]
) -> int:
    from roll_flash.serving import serve

    try:
        asyncio.run(serve(request, announce, _note))
    finally:
        for found in serving:
            if (training := found.training) is not None:
                futures = training.futures
                went = f"{futures.failed} failed, {futures.dropped_unread} results were given up unread"
                _note(f"{futures.started} requests of Tinker's clients; {went}")
            counts = f"{found.routes.scored} episodes were scored, {found.routes.failed} not"
            _note(f"{counts}; they are in {found.episodes}")
    return 0


def _announce(serving: RunningGateway, as_json: bool, is_made: bool) -> None:
    """`is_made`: the key was generated, so the user does not know it yet."""
    if as_json:
        found = {"url": serving.url, "model": serving.model, "episodes": str(serving.episodes)}
        say(json.dumps(found | ({"api_key": serving.api_key} if is_made else {})))
        return
    if serving.training is not None:
        say(f"for Tinker's clients: TINKER_BASE_URL={serving.url}, TINKER_API_KEY is the key below or of --api-key-env")
    say(f"{serving.model} at {serving.url}/v1; open a session with POST {serving.url}/v1/sessions; Ctrl-C stops")
    if is_made:
        say(f"the key that opens sessions, made for this time (see --api-key-env): {serving.api_key}")
    say(f"finished episodes go into {serving.episodes}")


def _note(text: str) -> None:
    say(text, error=True)
