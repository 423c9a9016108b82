"""Rules about episodes: levels that always fail, what the model writes, what environments answer."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from roll_flash.diagnosis.findings import Evidence, Finding, quoted
from roll_flash.diagnosis.run_view import Episode, RunView

LEVEL_EPISODES = 48
"""A level with a success rate of 10 % fails 48 times in a row once in 150 times."""
FAILED_EPISODES = 16
OTHERS_SUCCESS = 0.1
FAILING_SHARE = 0.9
HOT_SHARE = 0.5
"""Share of the time of all episodes that one level takes."""
HOT_FACTOR = 4.0
"""Its mean time over that of the other levels."""
CUT_SHARE = 0.3
CUT_EPISODES = 32
WHOLE_EPISODES = 8
"""Episodes without a cut answer, at least: the mean reward of two or three is chance."""
CUT_LOSS = 0.5
"""Mean reward of cut episodes as a share of that of the others (both above the smallest reward)."""
RISE_ERRORS = 2.0
"""Standard errors by which the mean reward of the later half of the episodes is above that of the earlier half."""
REPEATED = 0.5
"""Share of a text that repeats itself: prose and code have less than 0.3, loops nearly 1."""
REPEATING_EPISODES = 0.2
SAME_ANSWER = 0.5
SAME_BEFORE = 0.1
"""Share of the first episodes up to which the answer was rare: a trick is found, not known."""
FIRST = 5
"""Steps, at most a third of the run, whose episodes are the first ones: a trick may be everywhere soon after them."""
SAME_TASKS = 16
WINS = 0.95
"""Share of its episodes in which the answer wins: one that is right for some tasks only is a guess."""
LIES = 5
LYING_SHARE = 0.03
MAJORITY = 2
"""Replicas that must have got the usual answer, at least, and more than all others together."""


def level_always_fails(view: RunView) -> Finding | None:
    """An environment or level has no success and always the same reward, or no trajectory, while others succeed.

    A level without success whose rewards differ is hard, but teaches something.
    """
    levels = _by_level(view.episodes)
    for level, members in levels.items():
        broken = [each for each in members if each.reward is None]
        if len(broken) >= FAILED_EPISODES and len(broken) >= FAILING_SHARE * len(members):
            return _failing(level, members, f"{len(broken)} of {len(members)} episodes have no reward", broken)
    scored = {level: [each for each in members if each.reward is not None] for level, members in levels.items()}
    rates = {level: _success_rate(members) for level, members in scored.items() if members}
    for level, rate in rates.items():
        best = max((other for name, other in rates.items() if name != level), default=0.0)
        is_mute = len({each.reward for each in scored[level]}) == 1
        if rate == 0 and is_mute and best >= OTHERS_SUCCESS and len(scored[level]) >= LEVEL_EPISODES:
            what = f"none of {len(scored[level])} episodes succeeded, while another level has {best:.0%}"
            return _failing(level, scored[level], what, scored[level])
    return None


def _failing(level: str, members: Sequence[Episode], what: str, failed: Sequence[Episode]) -> Finding:
    first, last = _span(members)
    causes = Counter(each.cause for each in failed if each.cause)
    because = f" ({', '.join(f'{cause} {number}' for cause, number in causes.most_common(3))})" if causes else ""
    return Finding(
        "level-always-fails",
        "error",
        f"{quoted(level)}: {what}{because}",
        (Evidence("episodes of the level", len(members), first, last), Evidence("failed", len(failed), first, last)),
        "Play it once by hand (`roll-flash envs check ID`): either it cannot be solved, or it is broken. Give it "
        "easier tasks, a smaller weight, or leave it out",
    )


def level_hot(view: RunView) -> Finding | None:
    """One environment or level takes most of the time, because its episodes are far longer than those of others."""
    levels = _by_level(each for each in view.episodes if each.reward is not None)
    total = sum(each.seconds for each in view.episodes if each.reward is not None)
    for level, members in levels.items():
        others = [each.seconds for name, group in levels.items() if name != level for each in group]
        taken = sum(each.seconds for each in members)
        if len(members) < FAILED_EPISODES or len(others) < FAILED_EPISODES or taken < HOT_SHARE * total:
            continue
        mean, usual = taken / len(members), sum(others) / len(others)
        if mean >= HOT_FACTOR * usual:
            first, last = _span(members)
            return Finding(
                "level-hot",
                "warning",
                f"{quoted(level)} takes {taken / total:.0%} of the time of all episodes: {mean:.2g} s each, others "
                f"{usual:.2g} s",
                (
                    Evidence("seconds per episode of the level", mean, first, last),
                    Evidence("seconds per episode of others", usual, first, last),
                    Evidence("share of all time", taken / total, first, last),
                ),
                "Make its steps faster, limit its turns (envs.N.max_turns), lower its envs.N.weight, or play more "
                "episodes at once (rollout.max_concurrent)",
            )
    return None


def clipped_answers(view: RunView) -> Finding | None:
    """Many answers are cut at the largest number of tokens, and those earn far less than the others."""
    if view.settings.is_replaced:
        return None
    read = [(each.reward, each.texts) for each in view.episodes if each.texts is not None and each.reward is not None]
    cut = [reward for reward, texts in read if texts.is_cut]
    whole = [reward for reward, texts in read if not texts.is_cut]
    if len(read) < CUT_EPISODES or len(cut) < CUT_SHARE * len(read) or len(whole) < WHOLE_EPISODES:
        return None
    least = min(reward for reward, _ in read)
    mean_cut, mean_whole = sum(cut) / len(cut), sum(whole) / len(whole)
    if mean_cut - least > CUT_LOSS * (mean_whole - least) or mean_whole <= least:
        return None
    if _rises([reward for reward, _ in read]):
        return None  # the model is learning to be brief
    span = _span(view.episodes)
    return Finding(
        "clipped-answers",
        "error",
        f"{len(cut) / len(read):.0%} of the episodes have an answer that was cut at {view.settings.max_new_tokens} "
        f"tokens; they earn {mean_cut:.3g}, the others {mean_whole:.3g}",
        (
            Evidence("share of episodes with a cut answer", len(cut) / len(read), *span),
            Evidence("mean reward of cut episodes", mean_cut, *span),
            Evidence("mean reward of the others", mean_whole, *span),
        ),
        "Raise rollout.max_new_tokens (and model.max_length), or ask for shorter answers",
    )


def _rises(rewards: Sequence[float]) -> bool:
    """True if the mean of the later half is higher by more than noise."""
    halves = np.array_split(np.asarray(rewards), 2)
    noise = math.sqrt(sum(half.var() / half.size for half in halves))
    return bool(halves[1].mean() - halves[0].mean() > RISE_ERRORS * noise)


def repeated_text(view: RunView) -> Finding | None:
    """Long answers repeat themselves."""
    read = [each.texts for each in view.episodes if each.texts is not None]
    loops = sum(texts.repeated >= REPEATED for texts in read)
    if len(read) < CUT_EPISODES or loops < REPEATING_EPISODES * len(read):
        return None
    span = _span(view.episodes)
    return Finding(
        "repeated-text",
        "warning",
        f"{loops / len(read):.0%} of the episodes have a long text that repeats itself",
        (Evidence("episodes that repeat themselves", loops, *span), Evidence("episodes", len(read), *span)),
        "Read them; check that nothing pays for length, and how is sampled (rollout.temperature, options of servers); "
        "lower learner.learning_rate or set learner.kl.coefficient, and go on from a checkpoint before it",
    )


def same_answer_wins(view: RunView) -> Finding | None:
    """One and the same answer wins on many different tasks: the check can be satisfied without doing the task."""
    if view.settings.is_replaced:
        return None
    played = [each for each in view.episodes if each.texts is not None and each.reward is not None]
    if not played:
        return None
    best = max(each.reward for each in played if each.reward is not None)
    worst = min(each.reward for each in (*played, *view.first_episodes) if each.reward is not None)
    winners = [each for each in played if each.reward == best]
    if best == worst or len(winners) < CUT_EPISODES:
        return None
    (answer, number), *_ = Counter(each.texts.answer for each in winners if each.texts).most_common(1)
    tasks = {each.task_id for each in winners if each.texts and each.texts.answer == answer}
    tried = sum(each.texts is not None and each.texts.answer == answer for each in played)
    first = [
        each for each in view.first_episodes if each.step < min(FIRST, view.last_step / 3) and each.texts is not None
    ]
    before = [each.texts is not None and each.texts.answer == answer for each in first]
    if number < SAME_ANSWER * len(winners) or len(tasks) < SAME_TASKS or number < WINS * tried:
        return None
    if sum(before) > SAME_BEFORE * len(before):
        return None
    span = _span(view.episodes)
    return Finding(
        "same-answer-wins",
        "error",
        f"the answer {quoted(answer)} earns the highest reward ({best:.3g}) in {len(tasks)} different tasks",
        (
            Evidence("episodes that win with it", number, *span),
            Evidence("episodes that win", len(winners), *span),
            Evidence("share of the first episodes with it", sum(before) / max(1, len(before)), *_span(first)),
        ),
        "Read one of them: the check pays for a trick. Make the check depend on the task, then begin again or go on "
        "from a checkpoint before it",
    )


def inconsistent_answers(view: RunView) -> Finding | None:
    """The same actions in the same task got another answer than usual: a tool or an environment is unreliable.

    Answers that are all different (a clock, random names) are no sign of it, so there must be a usual one.
    """
    cells: dict[int, Counter[int]] = defaultdict(Counter)
    for state, answer in chain.from_iterable(each.texts.answers for each in view.episodes if each.texts is not None):
        cells[state][answer] += 1
    compared = wrong = 0
    for answers in cells.values():
        total, usual = sum(answers.values()), max(answers.values())
        if usual >= MAJORITY and usual > total - usual:
            compared += total
            wrong += total - usual
    if wrong < LIES or wrong < LYING_SHARE * compared:
        return None
    span = _span(view.episodes)
    return Finding(
        "inconsistent-answers",
        "error",
        f"{wrong} of {compared} answers of environments or tools differ from those that other replicas got for the "
        "same actions in the same task",
        (Evidence("answers that differ", wrong, *span), Evidence("answers that were compared", compared, *span)),
        "Compare the observations of the replicas of one group in episodes/. A tool must answer the same call alike; "
        "register an environment that cannot with gymnasium's nondeterministic=True",
    )


def _by_level(episodes: Iterable[Episode]) -> dict[str, list[Episode]]:
    levels: dict[str, list[Episode]] = {}
    for each in episodes:
        levels.setdefault(each.level, []).append(each)
    return levels


def _success_rate(members: Sequence[Episode]) -> float:
    """Share of successes; where none is reported, 0 if all earned the same nothing, else 1."""
    known = [each.success for each in members if each.success is not None]
    if known:
        return sum(known) / len(known)
    return float(any(each.reward for each in members))


def _span(episodes: Sequence[Episode]) -> tuple[int, int]:
    """First and last step whose episodes these are, counted from 1 as in metrics.jsonl."""
    return (min(each.step for each in episodes) + 1, max(each.step for each in episodes) + 1) if episodes else (0, 0)
