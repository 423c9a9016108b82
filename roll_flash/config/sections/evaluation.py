"""The config section `eval`: held-out tasks, attempts, budget."""

from __future__ import annotations

from pydantic import model_validator

from roll_flash.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class EvalConfig(Section):
    tasks: PositiveInt = 64
    """Number of held-out tasks, per environment."""
    attempts: PositiveInt = 1
    """Episodes per task (k)."""
    seeds_from: NonNegativeInt = 1_000_000_000
    """First seed of the held-out tasks; the held-out seeds must not overlap the training seeds."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    before_and_after: bool = True
    """Evaluate the model before the first and after the last step."""
    every: NonNegativeInt = 0
    """Evaluate after every N steps while training continues; 0 disables it. An evaluation that becomes due while
    another one runs is skipped and counted."""
    max_concurrent: PositiveInt | None = None
    """Maximum concurrent episodes. None: `rollout.max_concurrent`, and a quarter of it during training."""
    retries: NonNegativeInt = 1
    """Maximum retries of an attempt that failed because of infrastructure (server, sandbox, worker)."""
    max_failures_in_a_row: PositiveInt = 64
    """Maximum consecutive failed attempts; after that the evaluation stops and reports why."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values of k for which pass@k is reported. Empty: the powers of two up to `attempts`, and `attempts` itself."""
    max_tokens_total: PositiveInt | None = None
    """Maximum tokens of the whole evaluation, prompts included; it stops before that. You can raise it later."""
    max_cost: PositiveFloat | None = None
    """Maximum cost of the whole evaluation, in the currency of the prices."""
    max_minutes: PositiveFloat | None = None
    """Maximum minutes of one call; episodes still running then are abandoned and played again by the next call."""
    price_prompt: NonNegativeFloat | None = None
    """Price per million prompt tokens. Changing a price does not make it a different evaluation."""
    price_completion: NonNegativeFloat | None = None
    """Price per million tokens that the model generates."""

    @model_validator(mode="after")
    def _prices(self) -> EvalConfig:
        if self.max_cost is not None and self.price_prompt is None and self.price_completion is None:
            raise ValueError("max_cost needs price_prompt or price_completion (per million tokens)")
        return self

    @model_validator(mode="after")
    def _enough_attempts(self) -> EvalConfig:
        if self.pass_at and max(self.pass_at) > self.attempts:
            raise ValueError(
                f"pass_at: pass@{max(self.pass_at)} needs as many attempts, but attempts is {self.attempts}"
            )
        return self
