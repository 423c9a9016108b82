"""The section `eval` of a config: held-out tasks, attempts, budget."""

from __future__ import annotations

from pydantic import model_validator

from roll_flash.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class EvalConfig(Section):
    tasks: PositiveInt = 64
    attempts: PositiveInt = 1
    """Episodes per task (k)."""
    seeds_from: NonNegativeInt = 1_000_000_000
    """Held-out tasks are seeds from here on; they must not lie among the training seeds."""
    temperature: NonNegativeFloat = 0.0
    before_and_after: bool = True
    """Evaluate the model before the first and after the last step."""
    every: NonNegativeInt = 0
    """Evaluate each time so many steps are done, while training goes on; 0 never does. An evaluation that is due while
    one still runs is skipped and counted."""
    max_concurrent: PositiveInt | None = None
    """Episodes in flight. None: `rollout.max_concurrent`, and a quarter of it while training goes on."""
    retries: NonNegativeInt = 1
    """How often an attempt is started again that failed for want of infrastructure (server, sandbox, worker)."""
    max_failures_in_a_row: PositiveInt = 64
    """Attempts that may fail one after another before the evaluation stops and says why."""
    pass_at: tuple[PositiveInt, ...] = ()
    """The k of pass@k that are reported; empty: the powers of two up to `attempts`, and `attempts` itself."""
    max_tokens_total: PositiveInt | None = None
    """Tokens, prompts included, that the whole evaluation may use; it stops before, and more can be allowed later."""
    max_cost: PositiveFloat | None = None
    """The same in the currency of the prices."""
    max_minutes: PositiveFloat | None = None
    """Minutes that one call may take; what is in flight then is given up and played again at the next."""
    price_prompt: NonNegativeFloat | None = None
    """Price of a million prompt tokens. Prices are not part of what is evaluated: they may change."""
    price_completion: NonNegativeFloat | None = None
    """Price of a million tokens that the model writes."""

    @model_validator(mode="after")
    def _prices(self) -> EvalConfig:
        if self.max_cost is not None and self.price_prompt is None and self.price_completion is None:
            raise ValueError("max_cost needs price_prompt or price_completion (per million tokens)")
        return self
