"""The fixed policies of a run: models at endpoints that environments ask beside the policy in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from roll_flash.chat.openai_client import CHECK_TIMEOUT_S, OpenAIChatClient, api_key_from
from roll_flash.config.sections.policies import PolicyConfig
from roll_flash.engines.inference import ChatEndpoint
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.gateway.endpoint_backend import EndpointBackend
from roll_flash.gateway.server import GatewayServer
from roll_flash.gateway.sessions.session import Session, SessionSettings
from roll_flash.types import EpisodeSpec, SamplingParams


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """What the worker's gateway needs to ask one. Picklable."""

    endpoint: ChatEndpoint
    temperature: float
    max_new_tokens: int
    max_calls: int
    """Maximum calls in one episode."""


def fixed_policies(configs: Mapping[str, PolicyConfig]) -> dict[str, FixedPolicy]:
    """Raises ConfigError if the key of an endpoint is not set."""
    return {
        name: FixedPolicy(
            ChatEndpoint(config.base_url, config.model, api_key_from(config.api_key_env)),
            config.temperature,
            config.max_new_tokens,
            config.max_calls,
        )
        for name, config in configs.items()
    }


async def check_policies(policies: Mapping[str, FixedPolicy], note: Callable[[str], None]) -> None:
    """Ask each policy for one token; `note` is told before. Raises InferenceError for one that does not answer."""
    for name, policy in policies.items():
        note(f"asking the fixed policy {name} for one token (usually 1-5 s, at most {CHECK_TIMEOUT_S:g} s)")
        client = OpenAIChatClient.at(policy.endpoint, max_attempts=2)
        try:
            await client.ask_for_one_token(CHECK_TIMEOUT_S)
        except InferenceError as error:
            raise InferenceError(f"policies.{name}: {error}") from None
        finally:
            await client.close()


class PolicySessions:
    """Opens the sessions with fixed policies in a gateway. Belongs to one event loop."""

    def __init__(self, policies: Mapping[str, FixedPolicy]) -> None:
        self._policies = policies
        self._clients = {name: OpenAIChatClient.at(policy.endpoint) for name, policy in policies.items()}
        self._backends = {name: EndpointBackend(client, name) for name, client in self._clients.items()}

    def open(self, gateway: GatewayServer, spec: EpisodeSpec, names: Iterable[str]) -> dict[str, Session]:
        """Open a session of an episode with each of these policies. Raises ConfigError, with none opened, for one that
        the run does not have: a task source may name environments that the start has not seen."""
        names = tuple(names)
        if unknown := [name for name in names if name not in self._policies]:
            raise ConfigError(f"the environment asks the policy {unknown[0]!r}, which the config does not name")
        return {name: self._open(gateway, spec, name, -1 - place) for place, name in enumerate(names)}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _open(self, gateway: GatewayServer, spec: EpisodeSpec, name: str, number: int) -> Session:
        """`number`: of its random numbers; the roles of the policy in training have 0, 1, ..."""
        policy, seed = self._policies[name], spec.sampling.with_own_seed(number).seed
        sampling = SamplingParams(policy.temperature, max_new_tokens=policy.max_new_tokens, seed=seed)
        settings = SessionSettings(sampling, policy.max_calls)
        return gateway.open_session(settings, f"{spec.episode_id}-{name}", self._backends[name])
