"""Convert an ended session to the trajectory that a run keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from roll_flash.gateway.sessions.session import Session
from roll_flash.types import Branch, EpisodeEnd, Task, Trajectory


def finished_episode(
    session: Session, *, group_id: str, task: Task, reward: float, info: Mapping[str, Any]
) -> Trajectory:
    """The sample with the most policy tokens is the trajectory, the others its branches; its last turn has the reward.

    `success` comes from `info["success"]`. Raises ValueError for a session that recorded nothing.
    """
    samples = session.history.samples()
    if not samples:
        raise ValueError("nothing was recorded")
    own, *branches = samples
    turns = (*own.turns[:-1], replace(own.turns[-1], reward=reward))
    success = info.get("success")
    return Trajectory(
        episode_id=session.session_id,
        group_id=group_id,
        task=task,
        token_ids=own.token_ids,
        policy_mask=own.policy_mask,
        logprobs=own.logprobs,
        versions=own.versions,
        turns=turns,
        messages=own.messages,
        reward=reward,
        success=None if success is None else bool(success),
        end=_end(session),
        prompt_length=own.prompt_length,
        started_s=session.started_s,
        finished_s=session.history.clock.now_s(),
        info={**info, "gateway": session_figures(session)},
        branches=tuple(branches),
        routed_experts=own.routed_experts,
    )


def join_roles(of_roles: Mapping[str, Trajectory]) -> Trajectory:
    """Join what the roles of an episode played: the first role's sample is the trajectory, all others its branches. It
    has the first role's reward, and ends as the first role that did not end by itself."""
    first, *_ = of_roles.values()
    own, *branches = (
        Branch(**{**{entry.name: getattr(sample, entry.name) for entry in fields(Branch)}, "role": role})
        for role, played in of_roles.items()
        for sample in played.samples
    )
    figures = Counter[str]()
    for played in of_roles.values():
        figures.update(played.info["gateway"])
    ends = [played.end for played in of_roles.values() if played.end != "terminated"]
    return replace(
        first,
        role=own.role,
        branches=tuple(branches),
        end=ends[0] if ends else first.end,
        started_s=min(played.started_s for played in of_roles.values()),
        info={**first.info, "gateway": dict(figures)},
    )


def session_figures(session: Session) -> dict[str, int]:
    """Counts of a session so far."""
    history = session.history
    return {
        "calls": session.calls,
        "answers": len(history.records),
        "forks": history.forks,
        "rewrites": history.rewrites,
    }


def _end(session: Session) -> EpisodeEnd:
    if session.reached_max_calls:
        return "max_turns"
    return "context_limit" if session.context_was_full else "terminated"
