"""Send one small request to an endpoint before an evaluation, so that errors are reported early and once."""

from __future__ import annotations

from roll_flash.chat.openai_client import OpenAIChatClient, api_key_from
from roll_flash.config.evaluation import EvalConfig
from roll_flash.config.tree import Config
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.sandboxes import SandboxUnavailable
from roll_flash.types import SamplingParams

CHECK_TIMEOUT_S = 60.0
"""Long enough for a server that loads its model on the first request."""


async def check_endpoint(
    url: str, model: str, api_key_env: str | None, eval: EvalConfig, *, timeout_s: float = CHECK_TIMEOUT_S
) -> str | None:
    """Request one token. Return a warning for the user, such as that tokens cannot be counted, or None.

    Raises InferenceError if the endpoint is down, rejects the key or the model, or sends an invalid answer; ConfigError
    for a token or cost budget if the endpoint does not report usage.
    """
    client = OpenAIChatClient(url, model, api_key_from(api_key_env), max_attempts=2)
    try:
        reply = await client.chat(
            [{"role": "user", "content": "Hello"}],
            SamplingParams(temperature=0.0, max_new_tokens=1),
            timeout_s=timeout_s,
        )
    except TimeoutError:
        raise InferenceError(f"{client.url}: no answer to a request for one token within {timeout_s:g} s") from None
    finally:
        await client.close()
    if reply.prompt_tokens is not None and reply.completion_tokens is not None:
        return None
    silence = f"{client.url}: the endpoint does not tell how many tokens were used"
    if eval.max_tokens_total is not None or eval.max_cost is not None:
        raise ConfigError(f"{silence}: --max-tokens-total and --max-cost cannot be kept; use --max-minutes")
    return f"{silence}; tokens and cost will not be known"


def require_isolation(config: Config, isolation: str | None) -> None:
    """Check the `isolation` of the sandboxes (None if none is needed). Raises SandboxUnavailable if it is weak."""
    if isolation == "weak" and not config.sandbox.allow_weak:
        ids = ", ".join(env.id for env in config.envs)
        raise SandboxUnavailable(
            f"{ids} would run in a sandbox whose isolation is weak (`local`): start a Docker engine "
            "(`make engine`), or, for a model that you trust, add --allow-weak (sandbox.allow_weak=true)"
        )
