"""Config of on-policy distillation: a teacher that scores each sampled token; docs/algorithms.md has the method."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll_flash.config.fields import (
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)

HINT = "{hint}"
TEACHER = "teacher"
"""Name of the stage that asks the teacher, and of the column that it writes."""


class TeacherConfig(Section):
    model: LocalPath | None = None
    """A model as in `model.path`, such as the folder `model/` of a finished run. The run starts `servers` for it on the
    driver's node, with the engine and the settings of `inference`; on CPUs only."""
    servers: PositiveInt = 1
    """Number of servers that are started for `model`."""
    base_url: str | None = None
    """URL of a running vLLM server instead, such as `http://host:8000/v1`; others return no `prompt_logprobs`."""
    served_name: str | None = None
    """Name of the model at `base_url`. None: its first one."""
    api_key_env: str | None = None
    """Environment variable with the key for `base_url`."""
    own_servers: bool = False
    """The teacher is the policy itself with a `hint`: the run's own servers, with their newest weights. For the first
    weights name `model.path` as `model`."""

    @model_validator(mode="after")
    def _one_teacher(self) -> TeacherConfig:
        named = [self.model is not None, self.base_url is not None, self.own_servers]
        if sum(named) != 1:
            raise ValueError("name one teacher: model, base_url, or own_servers=true")
        if self.base_url is None and (self.served_name or self.api_key_env):
            raise ValueError("served_name and api_key_env are read only with base_url; remove them")
        if self.model is None and self.servers > 1:
            raise ValueError("servers is read only with model; remove it")
        return self


class HintConfig(Section):
    key: str
    """Key of the hint in the episode's `info`, or else in the keyword arguments of its task (a column of `data`)."""
    text: str = HINT
    """What is added to the message; `{hint}` stands for the hint."""
    message: Literal["system", "user"] = "user"
    """It is added to the end of the user's first message, or of the system message, which is made if there is none."""
    max_tokens: PositiveInt = 256
    """Room for it in the context of servers that the run starts, beyond `model.max_length`."""

    @model_validator(mode="after")
    def _shows_the_hint(self) -> HintConfig:
        if HINT not in self.text:
            raise ValueError(f"text must contain {HINT}")
        return self


class DistillConfig(Section):
    teacher: TeacherConfig
    """The model whose log-probabilities are learned from. Its tokenizer must be that of `model.path`."""
    weight: PositiveFloat = 1.0
    """Factor of log pi_teacher - log mu of a token in its advantage; mu is the policy that sampled it."""
    reward_weight: NonNegativeFloat = 0.0
    """Factor of the advantage that comes from the reward; 0: the teacher alone."""
    discount: Probability = 0.0
    """A token also gets the terms of later tokens of its sample, discounted by this per token; published is 0."""
    hint: HintConfig | None = None
    """Text of the task that only the teacher sees (self-distillation). None: it sees what the policy sees."""
    workers: PositiveInt = 8
    """Maximum concurrent requests to the teacher."""
    timeout_s: PositiveFloat = 120.0
    """Timeout in seconds of the scoring of one trajectory, retries of its requests included."""
    retries: NonNegativeInt = 1
    """Maximum further attempts at a trajectory; then it is dropped and counted."""
    max_failures_in_a_row: PositiveInt = 8
    """Maximum consecutive trajectories that fail after all attempts; then the run stops and reports why."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> DistillConfig:
        if self.teacher.own_servers and self.hint is None:
            raise ValueError("teacher.own_servers needs a hint: without one the teacher is the policy itself")
        return self

    @property
    def room(self) -> int:
        """Tokens beyond `model.max_length` in the context of a teacher: the hint, and one token that it must sample."""
        return 1 + (0 if self.hint is None else self.hint.max_tokens)
