"""Config of fixed policies that environments ask beside the one in training; docs/self-play.md says how."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from roll_flash.config.fields import NonNegativeFloat, PositiveInt, Section

TRAINED = "policy"
"""Name under which agents ask for the policy in training."""


class PolicyConfig(Section):
    base_url: str
    """URL of its OpenAI-compatible endpoint, such as `http://host:port/v1` of `roll-flash serve-gateway`."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Environment variable with the key for the endpoint. Agents and sandboxes do not get it."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature, also in evaluations."""
    max_new_tokens: PositiveInt = 512
    """Maximum tokens of an answer."""
    max_calls: PositiveInt = 64
    """Maximum calls in one episode."""


def _named(policies: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
    if TRAINED in policies:
        raise ValueError(f"{TRAINED!r} is the name of the policy in training; choose another one")
    return policies


Policies = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], PolicyConfig],
    AfterValidator(_named),
]
