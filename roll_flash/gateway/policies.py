"""The fixed policies of a run: models at endpoints that environments ask beside the policy in training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roll_flash.chat.openai_client import OpenAIChatClient
from roll_flash.config.sections.policies import PolicyConfig
from roll_flash.engines.inference import ChatEndpoint
from roll_flash.errors import InferenceError
from roll_flash.gateway.endpoint_backend import EndpointBackend
from roll_flash.gateway.server import GatewayServer
from roll_flash.gateway.sessions.session import Session, SessionSettings
from roll_flash.types import EpisodeSpec, SamplingParams

CHECK_TIMEOUT_S = 60.0
"""Long enough for an endpoint that loads its model on the first request."""


class FixedPolicies:
    """Belongs to one event loop."""

    def __init__(self, configs: Mapping[str, PolicyConfig]) -> None:
        """Raises ConfigError if the key of an endpoint is missing."""
        self._configs = configs
        self._clients = {name: OpenAIChatClient.at(_endpoint(config)) for name, config in configs.items()}
        self._backends = {name: EndpointBackend(client, name) for name, client in self._clients.items()}

    def open_sessions(self, gateway: GatewayServer, spec: EpisodeSpec, names: Iterable[str]) -> dict[str, Session]:
        """Open a session of an episode with each of these policies."""
        return {name: self._open_session(gateway, spec, name) for name in names}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _open_session(self, gateway: GatewayServer, spec: EpisodeSpec, name: str) -> Session:
        config = self._configs[name]
        sampling = SamplingParams(config.temperature, max_new_tokens=config.max_new_tokens, seed=spec.sampling.seed)
        number = -1 - list(self._configs).index(name)  # the roles of the policy in training are 0, 1, ...
        settings = SessionSettings(sampling.with_own_seed(number), config.max_calls)
        return gateway.open_session(settings, f"{spec.episode_id}-{name}", self._backends[name])


async def check_policies(configs: Mapping[str, PolicyConfig]) -> None:
    """Ask each policy for one token. Raises ConfigError without the key of one, InferenceError for one that does not
    answer."""
    for name, config in configs.items():
        client = OpenAIChatClient.at(_endpoint(config), max_attempts=2)
        try:
            await client.ask_for_one_token(CHECK_TIMEOUT_S)
        except InferenceError as error:
            raise InferenceError(f"policies.{name}: {error}") from None
        finally:
            await client.close()


def _endpoint(config: PolicyConfig) -> ChatEndpoint:
    return ChatEndpoint(config.base_url, config.model, config.api_key_env)
