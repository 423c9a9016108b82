"""Immutable data passed between components: tasks, turns, trajectories, groups.

This module has no logic. Arrays are numpy, so that a trajectory crosses process borders without extra copies. `version`
always means the number of training steps behind a published set of weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
"""One chat message: `{"role": "system" | "user" | "assistant" | "tool", "content": str, ...}`."""

FinishReason = Literal["stop", "length", "abort"]
EpisodeEnd = Literal["terminated", "truncated", "max_turns", "context_limit"]
ENDS_OF_THE_RUN: tuple[EpisodeEnd, ...] = ("max_turns", "context_limit")
"""Ends of episodes that the run ended, and not the environment: the reward of the last turn has the final score in
it."""
FailureCause = Literal[
    "env_error",
    "env_timeout",
    "generate_error",
    "generate_timeout",
    "episode_timeout",
    "sandbox_error",
    "bad_reward",
    "prompt_too_long",
    "worker_died",
    "internal_error",
    "cancelled",
]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one turn. `temperature == 0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    """Strings that end a turn; the string itself is kept."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn, beside those that the files of the model name; the token itself is kept."""
    seed: int | None = None

    def with_own_seed(self, number: int) -> SamplingParams:
        """Return the parameters of the attempt, role or request `number` of several. With one seed for all of them a
        server would draw the same random numbers each time; neighbouring seeds would be those of another evaluation."""
        if self.seed is None:
            return self
        digest = blake2b(f"{self.seed},{number}".encode(), digest_size=4).digest()
        return replace(self, seed=int.from_bytes(digest) >> 1)


@dataclass(frozen=True)  # without slots: with both it would be pickled field by field in Python, one for each episode
class Task:
    """Task of an episode: an environment, a seed and keyword arguments for `gymnasium.make`."""

    task_id: str
    env_id: str
    seed: int
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    max_turns: int | None = None
    """Maximum model calls; None is the run's default."""
    level: str = ""
    """Name in the metrics, shared by tasks that differ only in seed or row; empty: that of `env_id` and `kwargs`."""
    source: str = ""
    """Which part of a mixture or curriculum drew it: an index, or indices joined by `/`; only that part learns its
    score."""
    prefix: str = ""
    """Recorded turns with which each of its episodes begins, as context that is not trained (`Prefix.encode` in
    `roll_flash.rollout.episodes.prefix`); empty: none."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; `Task(**tree)` restores it."""
        return {
            "task_id": self.task_id,
            "env_id": self.env_id,
            "seed": self.seed,
            "kwargs": dict(self.kwargs),
            "max_turns": self.max_turns,
            "level": self.level,
            "source": self.source,
            "prefix": self.prefix,
        }


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One replica of one task, ready to be run by a worker."""

    episode_id: str
    group_id: str
    replica: int
    task: Task
    sampling: SamplingParams
    max_turns: int
    attempt: int = 0
    played: tuple[bytes, ...] = ()
    """Turns that it had finished before it was interrupted (`roll_flash.rollout.turns`)."""

    def failed(self, cause: FailureCause, message: str, turn: int = 0) -> EpisodeFailure:
        """Return its failure in this turn."""
        return EpisodeFailure(self.episode_id, self.group_id, self.task, cause, message, turn, self.attempt)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call and the environment step after it. Its tokens are the trajectory's `token_ids[start:end]`; 0:0 if
    they are not there (`model.thinking: strip`)."""

    start: int
    end: int
    action: str
    observation: str
    """Answer of the environment; empty for the last turn of an episode."""
    reward: float
    finish_reason: FinishReason
    generate_s: float
    step_s: float
    prompt_tokens: int | None = None
    """Prompt tokens of this turn; None if the endpoint does not report them."""
    completion_tokens: int | None = None
    """Tokens the model generated; None if the endpoint does not report them."""
    started_s: float | None = None
    """Unix time at which the model was asked; None in logs of older versions."""
    server: str = ""
    """Server that answered; empty if it is not ours, or not known."""
    in_prefix: bool = False
    """True if it was played from a recording (`Task.prefix`): no policy tokens, and no time of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """An extra sample of an episode: its agent rewrote its history, went back, or asked for several answers; or later
    turns were served without earlier thinking (then it has no `turns` and `messages`: the trajectory has all of them).

    Fields as in `Trajectory`. Tokens shared with another sample of the episode are context here: each sampled token is
    a policy token in exactly one sample.
    """

    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    prompt_length: int
    routed_experts: NDArray[np.int16] | None = None
    role: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """A finished episode, as token ids. All arrays have shape [T].

    Invariants: `policy_mask` is true exactly on the spans of `turns` that are not `in_prefix`; `logprobs` (natural log,
    under the sampling distribution at sampling time) and `versions` are meaningful there, and 0.0 and -1 elsewhere.
    """

    episode_id: str
    group_id: str
    task: Task
    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    reward: float
    success: bool | None
    """`info["success"]` of the environment, None if it did not set it."""
    end: EpisodeEnd
    prompt_length: int
    """Number of tokens before the first policy token, which the replicas of a group share."""
    started_s: float
    """Unix time."""
    finished_s: float
    info: Mapping[str, Any] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()
    """Extra samples of the same episode, trained with its advantage, or with that of their role."""
    routed_experts: NDArray[np.int16] | None = None
    """[T, layers, k]: experts that the server used for each token; -1 for tokens that it did not compute, such as the
    last one. None if routing is not replayed."""
    role: str = ""
    """Role that the policy plays in this sample, of an environment with several (self-play); its turns have the reward
    of this role."""

    @property
    def samples(self) -> tuple[Trajectory | Branch, ...]:
        """All token sequences of the episode, the main one first."""
        return (self, *self.branches)

    @property
    def policy_tokens(self) -> int:
        """Number of policy tokens in all samples."""
        return sum(int(sample.policy_mask.sum()) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """An episode without a trajectory. Data, not an exception: it is counted by cause and never ends the run."""

    episode_id: str
    group_id: str
    task: Task
    cause: FailureCause
    message: str
    turn: int
    attempt: int
    prompt_tokens: int = 0
    """Prompt tokens of the turns before the failure, as far as known."""
    completion_tokens: int = 0
    started_s: float | None = None
    """Unix time, as `finished_s`; both None if its worker died."""
    finished_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The finished replicas of one task; advantages are computed over a group."""

    group_id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    failures: tuple[EpisodeFailure, ...] = ()

    @property
    def policy_tokens(self) -> int:
        return sum(trajectory.policy_tokens for trajectory in self.trajectories)


@dataclass(slots=True, eq=False)
class StoredTrajectory:
    """Place of a trajectory in Ray's object store: item `index` of three lists, by their object references."""

    index: int
    tokens: Any
    """Arrays, for the learner."""
    texts: Any = None
    """All the rest, for stages and evaluations."""
    lines: Any = None
    """Lines of the episode log; None as soon as it is written, to free the memory."""


@dataclass(slots=True, eq=False)
class FinishedEpisode:
    """What the controller knows of a trajectory: its metadata, and where its data is.

    Not to be changed; not frozen, because the driver reads one for each trajectory and frozen ones take long to pickle.
    """

    episode_id: str
    group_id: str
    task: Task
    reward: float
    success: bool | None
    started_s: float
    """Unix time."""
    finished_s: float
    prompt_length: int
    versions: tuple[tuple[int, int], ...]
    """Pairs of (version, number of policy tokens sampled with it) over all samples, oldest first."""
    policy_tokens: int
    """Number of policy tokens in all samples."""
    tokens: int = 0
    """Number of tokens of all samples together."""
    packed_tokens: int = 0
    """Number of tokens that are computed when shared prefixes of its samples are computed once."""
    trained_tokens: int = 0
    """Number of policy tokens with a log-probability from the sampler."""
    samples: int = 1
    turns: int = 0
    """Number of turns of all samples together."""
    own_turns: tuple[tuple[int, float, int], ...] = ()
    """(policy tokens, reward, hash of the state in which it began) of each turn of the first sample."""
    fault: str | None = None
    """Reason why it cannot be trained on."""
    cut: bool = False
    """True if it ended at the longest context, or its last turn at the token limit of a turn."""
    ended_by_run: bool = False
    """True for ENDS_OF_THE_RUN."""
    task_hash: str = ""
    """Equal for tasks that show the model the same (`roll_flash.monitor.episodes.task_hash`)."""
    rewards: tuple[tuple[str, float], ...] = ()
    """Name and unweighted value of each reward function, as `info["rewards"]` has them at the end."""
    roles: tuple[tuple[str, float, int], ...] = ()
    """(role, what the environment paid it, turns) of each sample, the first one paid `reward`; empty without roles."""
    teacher_log_ratios: NDArray[np.float32] | None = None
    """log pi_teacher - log mu of the policy tokens of all samples, one after another, within +-MAX_TEACHER_LOG_RATIO;
    None without a teacher (`distill`), and before it has scored the trajectory."""
    data: Trajectory | StoredTrajectory | None = None
    """None in simulations."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest policy token in any sample, used for the staleness bound. Without tokens it is the
        largest number: the learner counts and drops such a trajectory."""
        return self.versions[0][0] if self.versions else sys.maxsize

    @property
    def role_rewards(self) -> dict[str, float]:
        """Reward of each role; without roles that of the episode, under an empty name. What stages and penalties added
        to `reward` since counts for each role."""
        if not self.roles:
            return {"": self.reward}
        added = self.reward - self.roles[0][1]
        return {role: paid + added for role, paid, _ in self.roles}


@dataclass(frozen=True, slots=True, eq=False)
class FinishedGroup:
    """Like `Group`, as the controller knows it."""

    group_id: str
    task: Task
    trajectories: tuple[FinishedEpisode, ...]
    failures: tuple[EpisodeFailure, ...] = ()

    @property
    def has_signal(self) -> bool:
        """True if rewards of a role differ within the group, or a teacher has scored it; if not, every advantage is
        zero (DAPO, arXiv 2503.14476)."""
        rewards: dict[str, set[float]] = {}
        for trajectory in self.trajectories:
            for role, reward in trajectory.role_rewards.items():
                rewards.setdefault(role, set()).add(reward)
        has_teacher = any(trajectory.teacher_log_ratios is not None for trajectory in self.trajectories)
        return has_teacher or any(len(found) > 1 for found in rewards.values())

    @property
    def packed_tokens(self) -> int:
        """Number of tokens that are computed for all trajectories in one row: the common prompt is computed once."""
        prompts = sum(trajectory.prompt_length for trajectory in self.trajectories)
        longest = max(trajectory.prompt_length for trajectory in self.trajectories)
        return sum(trajectory.packed_tokens for trajectory in self.trajectories) - prompts + longest


MIN_GROUP_SIZE = 2
"""Minimum number of trajectories in a group whose advantages compare replicas; with a critic, a group may have one."""
MAX_TEACHER_LOG_RATIO = 20.0
"""Limit of the log-ratio of teacher and sampler of a token, as the losses limit theirs: a teacher's minus infinity, or
-9999, is this far away too."""
MAX_REWARD = 1e6
"""Maximum absolute reward. Advantages need squares of rewards, whose sums must stay exact enough in float32."""


def as_reward(value: Any, what: str = "the reward") -> float:
    """Convert `value` to a trainable number. Raises ValueError that names `what` for anything else."""
    if isinstance(value, str | bytes | bytearray):
        raise ValueError(f"{what} is the text {value[:60]!r}, not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of float
        number = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"{what} is a {type(value).__name__}, not a number") from None
    if not math.isfinite(number) or abs(number) > MAX_REWARD:
        raise ValueError(f"{what} is {number:g}, not a finite number of at most {MAX_REWARD:g}; scale it")
    return number


def bounded(reward: float) -> float:
    """Limit a reward to what can be trained: a larger one, as for an answer wrong by a billion, is no sample."""
    return reward if math.isnan(reward) else max(-MAX_REWARD, min(MAX_REWARD, reward))
