"""Token and cost budget of an evaluation. Only counts: clocks and tasks are in `evaluation.py`."""

from __future__ import annotations

from roll_flash.config.sections.evaluation import EvalConfig

MILLION = 1e6
TASK_TOKENS = 500
"""Assumed tokens of a task's description before the first result."""


class Budget:
    """Count the usage of ended attempts, including failed ones, and decide if another attempt may start.

    Running attempts count with the mean of the ended ones, so that the limits hold for any concurrency (up to the
    variance of one attempt's usage). Before the first attempt ends, an attempt counts with its maximum turns and
    tokens, and one may start while any budget is left.
    """

    def __init__(
        self, config: EvalConfig, *, max_turns: int, max_new_tokens: int, used_by_others: tuple[int, int] = (0, 0)
    ) -> None:
        """`used_by_others`: (prompt, completion) tokens that other environments used from the same budget."""
        self._config = config
        self._used_by_others = used_by_others
        # Every turn reads the task and the output of all earlier turns.
        self._largest_prompt = max_turns * (TASK_TOKENS + max_new_tokens * (max_turns - 1) // 2)
        self._largest_completion = max_turns * max_new_tokens
        self._ended = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.unknown = 0
        """Attempts with unknown token counts."""

    def add(self, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """Count an ended attempt."""
        self._ended += 1
        self.unknown += prompt_tokens is None or completion_tokens is None
        self.prompt_tokens += prompt_tokens or 0
        self.completion_tokens += completion_tokens or 0

    @property
    def cost(self) -> float | None:
        return self._cost_of(self.prompt_tokens, self.completion_tokens)

    def refusal(self, in_flight: int) -> str | None:
        """Reason why no attempt may start in addition to `in_flight` others; None if it may."""
        config, own = self._config, self.prompt_tokens + self.completion_tokens
        used = own + sum(self._used_by_others)
        if config.max_tokens_total is not None:
            each = own / self._ended if self._ended else float(self._largest_prompt + self._largest_completion)
            if self._is_too_much(used, each, in_flight, config.max_tokens_total):
                return (
                    f"{used:,} of {config.max_tokens_total:,} tokens are used, an attempt takes about {each:,.0f}; "
                    "raise --max-tokens-total to go on"
                )
        if config.max_cost is not None and (cost := self.cost) is not None:
            spent = cost + (self._cost_of(*self._used_by_others) or 0.0)
            dearest = self._cost_of(self._largest_prompt, self._largest_completion) or 0.0
            each = cost / self._ended if self._ended else dearest
            if self._is_too_much(spent, each, in_flight, config.max_cost):
                return (
                    f"{spent:.4g} of {config.max_cost:g} is spent, an attempt costs about {each:.2g}; "
                    "raise --max-cost to go on"
                )
        return None

    def _cost_of(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Cost by the prices per million tokens; None if no price is known."""
        prompt, completion = self._config.price_prompt, self._config.price_completion
        if prompt is None and completion is None:
            return None
        return (prompt_tokens * (prompt or 0.0) + completion_tokens * (completion or 0.0)) / MILLION

    def _is_too_much(self, used: float, each: float, in_flight: int, limit: float) -> bool:
        if not self._ended and not in_flight:
            return used >= limit
        return used + (in_flight + 1) * each > limit
