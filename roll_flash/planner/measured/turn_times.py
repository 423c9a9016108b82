"""How long a turn of the model takes, measured: a linear model of the turns that a run has recorded.

A turn of n tokens in a batch of B sequences, while prompts with P tokens outside of the prefix cache are read, takes

    request_s + (n (token_s + B sequence_s) + P prompt_token_s) (1 + slowdown x share of the turn with a busy learner)

B is the mean number of sequences at the server during the turn. The coefficients are those >= 0 with the least squares.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roll_flash.planner.measured.recording import RecordedEpisode, RecordedTurn, Span, overlap_share

Floats = NDArray[np.float64]
CACHE_BLOCK = 16
MIN_TURNS_EACH = 30
"""Turns with an idle, and with a busy learner, that are needed to measure how much they differ."""
SLOWDOWNS = np.linspace(0.0, 2.0, 41)
ROUNDS = 4
MOST_DEVIATIONS = 4.0
"""Turns whose error is more than so many times the median error do not count."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    request_s: float
    token_s: float
    sequence_s: float
    prompt_token_s: float
    slowdown: float
    """Extra time while the learner works, as a share; 0 also if that could not be measured."""
    knows_slowdown: bool


def fit_turn_times(
    episodes: Sequence[RecordedEpisode], servers: int, learner_spans: Sequence[Span], *, has_prefix_cache: bool
) -> TurnTimes:
    """Fit the model to all turns of `episodes`, which `servers` servers share evenly.

    A request is in a batch only after `request_s`, so that is found first, in a few rounds.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    unread = _unread_tokens(episodes) if has_prefix_cache else np.array([turn.prompt for turn in turns], np.float64)
    found = _fit(turns, unread, servers, learner_spans, None)
    for _ in range(ROUNDS):
        found = _fit(turns, unread, servers, learner_spans, found)
    return found


def _fit(
    turns: Sequence[RecordedTurn],
    unread: Floats,
    servers: int,
    learner_spans: Sequence[Span],
    before: TurnTimes | None,
) -> TurnTimes:
    """Fit once more, with what was found before."""
    request_s = before.request_s if before else 0.0
    alone = before.token_s / before.sequence_s if before and before.sequence_s else 0.0
    seconds = np.array([turn.generate_s for turn in turns])
    tokens = np.array([turn.tokens for turn in turns], np.float64)
    ends = np.array([turn.started_s for turn in turns]) + seconds
    starts = ends - np.maximum(seconds - request_s, seconds / 10)
    batch = _batches(starts, ends, servers, alone)
    read = _tokens_read(starts, ends, unread, servers)
    columns = np.stack([np.ones_like(tokens), tokens, tokens * batch, read], axis=1)
    busy = np.array(overlap_share(list(zip(starts, ends, strict=True)), learner_spans))
    knows = min(int((busy < 0.2).sum()), int((busy > 0.8).sum())) >= MIN_TURNS_EACH
    usual = np.ones(len(turns), np.bool_) if before is None else _is_usual(columns, busy, seconds, before)
    fits = []
    for slowdown in SLOWDOWNS if knows else SLOWDOWNS[:1]:
        slowed = _slowed(columns, busy, slowdown)
        found = _least_squares(slowed[usual], seconds[usual])
        errors = slowed @ found - seconds
        fits.append((float((errors[usual] ** 2).sum()), float(slowdown), found))
    _, slowdown, found = min(fits, key=lambda fit: fit[0])
    request_s, token_s, sequence_s, prompt_token_s = map(float, found)
    return TurnTimes(request_s, token_s, sequence_s, prompt_token_s, slowdown, knows)


def _slowed(columns: Floats, busy: Floats, slowdown: float) -> Floats:
    slowed: Floats = columns * np.where(np.arange(columns.shape[1]) == 0, 1.0, (1 + slowdown * busy)[:, None])
    return slowed


def _is_usual(columns: Floats, busy: Floats, seconds: Floats, fit: TurnTimes) -> NDArray[np.bool_]:
    """True for turns that were not held up by something else, such as a pause for new weights."""
    found = np.array([fit.request_s, fit.token_s, fit.sequence_s, fit.prompt_token_s])
    errors = np.abs(_slowed(columns, busy, fit.slowdown) @ found - seconds)
    usual: NDArray[np.bool_] = errors <= max(1e-9, MOST_DEVIATIONS * float(np.median(errors)))
    return usual


def _batches(starts: Floats, ends: Floats, servers: int, alone: float) -> Floats:
    """Return for each turn the mean number of sequences at its server.

    A batch of B gives each sequence 1 / (alone + B) of its rate, so means are taken of that, over the time of the turn.
    """
    times = np.concatenate([starts, ends])
    change = np.concatenate([np.ones_like(starts), -np.ones_like(ends)])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(change[order])
    rates = 1 / (alone + np.maximum(1.0, running[:-1] / servers))
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * rates)])
    inside = np.interp(ends, times, area) - np.interp(starts, times, area)
    batches: Floats = np.maximum(1.0, np.maximum(ends - starts, 1e-9) / np.maximum(inside, 1e-12) - alone)
    return batches


def _tokens_read(starts: Floats, ends: Floats, unread: Floats, servers: int) -> Floats:
    """Return for each turn the tokens of prompts that were read at its server meanwhile, with its own."""
    order = np.argsort(starts, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(unread[order])])
    first, last = (np.searchsorted(starts[order], edge, "left") for edge in (starts, ends))
    read: Floats = unread + np.maximum(0.0, total[last] - total[first] - unread) / servers
    return read


def _unread_tokens(episodes: Sequence[RecordedEpisode]) -> Floats:
    """Return for each turn the tokens of its prompt that were not in the prefix cache, as far as is known: an episode
    finds its own turns there, and its group's prompt, of the version with which the turn was sampled."""
    seen: set[tuple[str, int]] = set()
    order = sorted(
        ((turn.started_s, episode, place) for episode in episodes for place, turn in enumerate(episode.turns)),
        key=lambda item: item[0],
    )
    unread: dict[tuple[int, int], float] = {}
    for _, episode, place in order:
        turn, before = episode.turns[place], episode.turns[place - 1] if place else None
        known = 0
        if before is not None and before.first_version == before.last_version == turn.first_version:
            known = before.prompt + before.tokens
        elif (episode.group_id, turn.first_version) in seen:
            known = episode.turns[0].prompt
        seen.add((episode.group_id, turn.first_version))
        unread[id(episode), place] = turn.prompt - min(known, turn.prompt - 1) // CACHE_BLOCK * CACHE_BLOCK
    return np.array([unread[id(episode), place] for episode in episodes for place in range(len(episode.turns))])


def _least_squares(columns: Floats, values: Floats) -> Floats:
    """Return the coefficients >= 0 with the least squares, by trying each choice of those that are not 0."""
    best, least = np.zeros(columns.shape[1]), float((values**2).sum())
    for count in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), count):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, values, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((part @ found - values) ** 2).sum())
            if error < least:
                least, best = error, np.zeros(columns.shape[1])
                best[list(chosen)] = found
    return best


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (seconds of a call, seconds per unit of size), both >= 0."""
    columns = np.stack([np.ones(len(sizes)), np.array(sizes, np.float64)], axis=1)
    constant, slope = _least_squares(columns, np.array(seconds, np.float64))
    return float(constant), float(slope)
