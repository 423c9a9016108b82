"""`roll-flash serve-gateway` and `serve`: resolve arguments into a model, a server and a folder of episodes."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from roll_flash.chat.openai_client import CHECK_TIMEOUT_S, OpenAIChatClient, api_key_from
from roll_flash.config.addresses import MAX_PORT
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError
from roll_flash.gateway.backend import Backend
from roll_flash.gateway.server import GatewayServer
from roll_flash.gateway.sessions.routes import SessionRoutes
from roll_flash.gateway.sessions.verifier import Verifier
from roll_flash.learner.open import check_learner
from roll_flash.models.context_length import check_context_length, within_context
from roll_flash.models.folder import check_chat_template
from roll_flash.models.hub import is_hub_id
from roll_flash.models.prepare import RECIPES, is_model, resolve_model
from roll_flash.monitor.episode_files.steps import step_file
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.processes.background import background_task, first_failure
from roll_flash.processes.interrupt import Interrupts
from roll_flash.processes.ports import require_free_port
from roll_flash.run.run_dir import find_model, in_use, make_own_folder

if TYPE_CHECKING:
    from roll_flash.tinker.routes import TinkerRoutes
    from roll_flash.tinker.servers import Servers

TINKER_KEY = "tml-"
"""Beginning of every key that Tinker's clients take."""


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """Arguments of `roll-flash serve-gateway`."""

    model: str | None
    """A model folder, `smollm2-135m`, `tiny`, a run (`NAME`, `NAME@step`), or the model's name at `endpoint`."""
    endpoint: str | None = None
    endpoint_key_env: str | None = None
    name: str | None = None
    """Model name that agents send; default: the last part of `model`."""
    host: str = "127.0.0.1"
    port: int = 8321
    api_key_env: str | None = None
    """Environment variable with the key that opens sessions; None generates a key."""
    url: str | None = None
    """URL that sessions get, if agents reach the gateway at another address than the client that opens the session."""
    out: str = "runs/gateway"
    verifier: str | None = None
    idle_s: float = 3600.0
    overrides: tuple[str, ...] = ()
    trains: bool = False
    """Also serve Tinker's training API, with the same key."""


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A running gateway."""

    url: str
    api_key: str = field(repr=False)
    """Key that opens sessions."""
    model: str
    episodes: Path
    routes: SessionRoutes
    training: TinkerRoutes | None = None


async def serve(
    request: GatewayRequest, announce: Callable[[RunningGateway], None], note: Callable[[str], None]
) -> None:
    """Serve until cancelled. Raises ConfigError before anything is started, else RollFlashError."""
    with first_failure() as failure:
        async with Interrupts(note) as interrupts, open_gateway(request, note) as serving:
            announce(serving)
            await interrupts.run_until_stopped(asyncio.Event().wait(), failure=failure)


@asynccontextmanager
async def open_gateway(request: GatewayRequest, note: Callable[[str], None]) -> AsyncIterator[RunningGateway]:
    """Run a gateway; sessions still open at the end are cancelled and written as failures."""
    prefix = TINKER_KEY if request.trains else "rf-"
    admin_key = api_key_from(request.api_key_env) or f"{prefix}{secrets.token_urlsafe(24)}"
    if request.trains and not admin_key.startswith(TINKER_KEY):
        raise ConfigError(
            f"--api-key-env {request.api_key_env}: Tinker's clients take only keys that begin {TINKER_KEY}"
        )
    if not 0 <= request.port <= MAX_PORT:
        raise ConfigError(f"--port {request.port}: a port is a number from 0 to {MAX_PORT}")
    if request.url is not None and not re.match(r"https?://[^/]", request.url):
        raise ConfigError(f"--url {request.url}: must look like http://host:port")
    verifier = Verifier(request.verifier) if request.verifier else None
    config = _config(request)
    if request.trains:
        check_learner(config)
    folder = _out_folder(request)
    if request.port:
        require_free_port(request.host, request.port, "choose another with --port")  # check before a model is started
    async with AsyncExitStack() as stack:
        servers: Servers | None = None
        if request.endpoint is not None:
            backend = await _open_endpoint(request, stack, note)
        else:
            stack.enter_context(in_use(Path(config.model.path)))
            backend, servers = await _open_servers(request, config, folder, stack, note)
        episodes = stack.enter_context(EpisodesWriter(folder))
        timeout_s = config.rollout.generate_timeout_s
        gateway = GatewayServer(backend, call_timeout_s=timeout_s, admin_key=admin_key)
        url = request.url.rstrip("/").removesuffix("/v1") if request.url else None
        routes = SessionRoutes(gateway, episodes, verifier=verifier, idle_s=request.idle_s, url=url)
        stack.push_async_callback(gateway.close)
        stack.push_async_callback(routes.close)
        training = None
        if request.trains and servers is not None:
            training = await _open_training(request, gateway, servers, folder, stack)
        try:
            port = await gateway.start(request.host, request.port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{request.host}:{request.port}: {reason}; choose another with --port") from None
        await stack.enter_async_context(background_task(routes.sweep(), "the sweep over unused sessions"))
        url = url or _address(request.host, port)
        yield RunningGateway(url, admin_key, backend.model, step_file(folder, 0), routes, training)


def _address(host: str, port: int) -> str:
    """Return the address at which this machine reaches a server that listens on `host`, also on all addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:  # a request for 0.0.0.0 has that as its host, and is refused like one of a web page
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://{address}:{port}" if address.version == 4 else f"http://[{address}]:{port}"


async def _open_endpoint(request: GatewayRequest, stack: AsyncExitStack, note: Callable[[str], None]) -> Backend:
    """Raises InferenceError if the endpoint is down, rejects the key or the model, or sends an invalid answer."""
    from roll_flash.gateway.endpoint_backend import EndpointBackend

    assert request.endpoint is not None
    assert request.model is not None
    key = api_key_from(request.endpoint_key_env)
    note(f"asking {request.endpoint} for one token (usually 1-5 s, at most {CHECK_TIMEOUT_S:g} s)")
    asking = OpenAIChatClient(request.endpoint, request.model, key, max_attempts=2)
    try:
        await asking.ask_for_one_token(CHECK_TIMEOUT_S)
    finally:
        await asking.close()
    chat = OpenAIChatClient(request.endpoint, request.model, key)
    stack.push_async_callback(chat.close)
    return EndpointBackend(chat, request.name)


async def _open_servers(
    request: GatewayRequest, config: Config, folder: Path, stack: AsyncExitStack, note: Callable[[str], None]
) -> tuple[Backend, Servers]:
    assert request.model is not None
    from roll_flash.chat.tokenizer import load_tokenizer
    from roll_flash.gateway.token_backend import TokenBackend
    from roll_flash.inference.client.token_client import open_client
    from roll_flash.inference.open import check_engine, open_engine
    from roll_flash.tinker.servers import Servers

    model_folder = resolve_model(config.model.path, config.model.revision)
    check_chat_template(model_folder)
    config = _within_context(config, model_folder, request.overrides)
    check_engine(config.inference, model_folder, trains=request.trains)
    logs = folder / "logs"
    tokenizer = await asyncio.to_thread(load_tokenizer, model_folder, config.model.chat_template_kwargs)
    name = request.name or re.split(r"[/\\]", request.model.rstrip("/"))[-1]
    length = config.model.max_length
    if request.trains:  # learners run in Ray; it must start before the engine, which keeps weights there, and end after
        from roll_flash.processes.ray.local_ray import local_ray

        await stack.enter_async_context(local_ray(config.ray))
    engine = open_engine(config.inference, model_folder=model_folder, max_model_len=length, logs=logs)
    stack.push_async_callback(engine.close)
    note(f"starting {config.inference.engine} with {model_folder}; its log is in {logs}")
    await engine.start()
    client = open_client(engine.client_spec(), tokenizer)
    stack.push_async_callback(client.close)
    backend = TokenBackend(client, tokenizer, model=name, max_length=length, thinking=config.model.thinking)
    return backend, Servers.of(config, model_folder, engine, client, tokenizer)


def _within_context(config: Config, model_folder: Path, overrides: Sequence[str]) -> Config:
    """Return the config with a length that the model can read. Raises ModelError if another one was asked for."""
    if any(word.startswith(("model=", "model.max_length=")) for word in overrides):
        check_context_length(model_folder, config.model.max_length)
        return config
    length = within_context(model_folder, config.model.max_length)
    return config.model_copy(update={"model": config.model.model_copy(update={"max_length": length})})


async def _open_training(
    request: GatewayRequest, gateway: GatewayServer, servers: Servers, folder: Path, stack: AsyncExitStack
) -> TinkerRoutes:
    """Add the routes of Tinker's API."""
    from roll_flash.tinker.routes import TinkerRoutes

    names = {gateway.backend.model, str(request.model), str(servers.folder)}
    training = TinkerRoutes(gateway, servers, frozenset(names), folder / "checkpoints")
    stack.push_async_callback(training.close)
    await stack.enter_async_context(background_task(training.sweep(), "the sweep over silent clients"))
    return training


def _config(request: GatewayRequest) -> Config:
    """Load the config, of the run if the model is one; only `inference.*`, `model.*` and
    `rollout.generate_timeout_s` matter."""
    if request.model is None:
        raise ConfigError("nothing to serve: give --model FOLDER, NAME or RUN, or --endpoint URL with --model NAME")
    if request.endpoint is not None:
        if not re.match(r"https?://[^/]", request.endpoint):
            raise ConfigError(f"--endpoint {request.endpoint}: must look like http://host:port/v1")
        return load_config(_tree(request.model), request.overrides)
    if request.endpoint_key_env:
        raise ConfigError("--endpoint-key-env is for an --endpoint; give one, for example http://localhost:8000/v1")
    if is_model(request.model):
        return load_config(_tree(request.model), request.overrides)
    try:
        checkpoint = find_model(request.model)
    except ConfigError as error:
        if is_hub_id(request.model):
            return load_config(_tree(request.model), request.overrides)
        known = ", ".join(RECIPES)
        message = f"--model {request.model}: no model folder and none of {known}; as a run, {error}"
        raise ConfigError(message) from None
    run_config = checkpoint.folder.parent.parent / "config.yaml"
    model = [f"model.path={json.dumps(str(checkpoint.hf))}", "model.revision=null"]
    return load_config(run_config, [*model, *request.overrides])


def _tree(model: str) -> dict[str, object]:
    return {
        "name": "gateway",
        "model": {"path": model, "max_length": 4096},
        "envs": [{"id": "agents"}],
        "rollout": {"max_new_tokens": 1},  # an agent says how many it wants, so `max_length` may be small
    }


def _out_folder(request: GatewayRequest) -> Path:
    """Create the output folder if needed. Raises ConfigError if it is not writable."""
    folder = Path(request.out).expanduser()
    make_own_folder(folder, "--out")
    return folder
