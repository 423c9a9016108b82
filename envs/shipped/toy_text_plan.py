"""The best policy of a small gymnasium environment that tells its transitions (`P`, as its toy-text ones do)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""`P[state][action]` is a list of (probability, next state, reward, is over)."""

DISCOUNT = 0.99
"""Below 1, so that of two ways to a reward the shorter is better."""


def transitions_of(env: Any) -> Transitions | None:
    """None for an environment that does not tell them."""
    found = getattr(env.unwrapped, "P", None)
    return found if isinstance(found, Mapping) and found else None


def best_actions(transitions: Transitions, *, tolerance: float = 1e-9) -> dict[int, int]:
    """By value iteration."""
    values = dict.fromkeys(transitions, 0.0)
    while True:
        change = 0.0
        for state, actions in transitions.items():
            best = max(_value(outcomes, values) for outcomes in actions.values())
            change = max(change, abs(best - values[state]))
            values[state] = best
        if change < tolerance:
            break
    return {
        state: max(actions, key=lambda action: _value(actions[action], values))
        for state, actions in transitions.items()
    }


def _value(outcomes: Sequence[tuple[float, int, float, bool]], values: Mapping[int, float]) -> float:
    return sum(
        float(probability) * (float(reward) + (0.0 if is_over else DISCOUNT * values[int(state)]))
        for probability, state, reward, is_over in outcomes
    )


def likely_path(
    transitions: Transitions, state: int, policy: Mapping[int, int], longest: int
) -> tuple[list[int], float]:
    """The policy's actions from `state` to the end, as far as the most likely outcomes go, and their reward."""
    path: list[int] = []
    total = 0.0
    while len(path) < longest:
        action = policy[state]
        _, state, reward, is_over = max(transitions[state][action], key=lambda outcome: outcome[0])
        state = int(state)
        path.append(action)
        total += float(reward)
        if is_over:
            break
    return path, total
