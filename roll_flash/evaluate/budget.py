"""What an evaluation may use: tokens and money. A pure account; clocks and tasks live in `evaluation.py`."""

from __future__ import annotations

from dataclasses import dataclass

from roll_flash.config.evaluation import EvalConfig

MILLION = 1e6
TASK_TOKENS = 500
"""Of a task's description, before anything is known of it."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens, in any currency; None where there is none."""

    prompt: float | None = None
    completion: float | None = None

    @classmethod
    def of(cls, config: EvalConfig) -> Prices:
        return cls(config.price_prompt, config.price_completion)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """None where no price is known."""
        if self.prompt is None and self.completion is None:
            return None
        return (prompt_tokens * (self.prompt or 0.0) + completion_tokens * (self.completion or 0.0)) / MILLION


class Budget:
    """Counts what ended attempts used, failed ones too, and says whether another may start.

    Attempts in flight are counted at the mean of those that ended, so that the limits hold however many run at once
    (to within the spread of one attempt's use). Before anything is known, an attempt counts as one that takes every
    turn and every token it may, and one is let through while anything is left.
    """

    def __init__(
        self, config: EvalConfig, *, max_turns: int, max_new_tokens: int, elsewhere: tuple[int, int] = (0, 0)
    ) -> None:
        """`elsewhere` are the tokens, read and written, that other environments took from the same budget."""
        self._config = config
        self._elsewhere = elsewhere
        self._prices = Prices.of(config)
        # Every turn reads what all turns before it wrote, and the task.
        self._largest_prompt = max_turns * (TASK_TOKENS + max_new_tokens * (max_turns - 1) // 2)
        self._largest_completion = max_turns * max_new_tokens
        self._ended = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.unknown = 0
        """Attempts whose tokens are not known."""

    def add(self, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """An attempt ended."""
        self._ended += 1
        self.unknown += prompt_tokens is None or completion_tokens is None
        self.prompt_tokens += prompt_tokens or 0
        self.completion_tokens += completion_tokens or 0

    @property
    def cost(self) -> float | None:
        return self._prices.cost(self.prompt_tokens, self.completion_tokens)

    def refusal(self, in_flight: int) -> str | None:
        """Why no further attempt may start beside `in_flight` others; None if it may."""
        config, own = self._config, self.prompt_tokens + self.completion_tokens
        used = own + sum(self._elsewhere)
        if config.max_tokens_total is not None:
            each = own / self._ended if self._ended else float(self._largest_prompt + self._largest_completion)
            if self._is_too_much(used, each, in_flight, config.max_tokens_total):
                return (
                    f"{used:,} of {config.max_tokens_total:,} tokens are used, an attempt takes about {each:,.0f}; "
                    "raise --max-tokens-total to go on"
                )
        if config.max_cost is not None and (cost := self.cost) is not None:
            spent = cost + (self._prices.cost(*self._elsewhere) or 0.0)
            dearest = self._prices.cost(self._largest_prompt, self._largest_completion) or 0.0
            each = cost / self._ended if self._ended else dearest
            if self._is_too_much(spent, each, in_flight, config.max_cost):
                return (
                    f"{spent:.4g} of {config.max_cost:g} is spent, an attempt costs about {each:.2g}; "
                    "raise --max-cost to go on"
                )
        return None

    def _is_too_much(self, used: float, each: float, in_flight: int, limit: float) -> bool:
        if not self._ended and not in_flight:
            return used >= limit
        return used + (in_flight + 1) * each > limit
