"""Config of the learner: losses, advantages, off-policy corrections, optimizer.

docs/algorithms.md has the formulas, the sources and when to use which.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from roll_flash.config.fields import (
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    RayResources,
    Section,
)
from roll_flash.config.sections.data import DEMONSTRATION_COLUMNS, require_known_columns

BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

_CLIP = frozenset({"clip_low", "clip_high"})
_CORRECTION = frozenset({"correction", "correction_level", "correction_cap", "correction_floor"})
_TAPER = frozenset({"correction_cap", "correction_level"})
_REJECTION = frozenset({"sequence_floor", "sequence_cap", "sequence_rejects"})
"""Options of every loss, which `policy_loss` reads."""
_OF_ANY_LOSS = _REJECTION | {"second_moment"}
M2PO_LIMIT = 0.04
"""Second moment of M2PO, as in its paper (arXiv 2510.01161)."""
LOSS_PARAMETERS: dict[str, frozenset[str]] = {
    "decoupled_ppo": _CLIP | _CORRECTION | {"dual_clip"},
    "ppo": _CLIP | {"dual_clip"},
    "gspo": _CLIP | {"ratio_level"},
    "m2po": frozenset(),
    "cispo": _CLIP,
    "tis": _TAPER,
    "topr": _TAPER,
    "weighted_topr": _TAPER | {"positive_weight", "negative_weight"},
    "tis_topr": _TAPER | {"topr_share"},
    "reinforce": _CORRECTION,
    "sapo": frozenset({"positive_temperature", "negative_temperature"}),
}
"""Options that each loss reads; setting any other one is an error, so that no option is ignored."""
_NOT_READ_WITH: dict[str, frozenset[str]] = {
    "none": _CORRECTION - {"correction"},
    "tis": frozenset({"correction_floor"}),
    "mask": frozenset(),
}
"""Options that a correction does not read."""
ADVANTAGE_NAMES = ("grpo", "rloo", "reinforce++", "gigpo", "gae")


def is_own(name: str) -> bool:
    """True for a function of the user, `module:NAME` or `path/to/file.py:NAME`."""
    return ":" in name


def _known_or_own(known: Iterable[str]) -> AfterValidator:
    """Refuses a name that is neither known nor a reference to a function."""

    def validate(name: str) -> str:
        if name not in known and not is_own(name):
            near = difflib.get_close_matches(name, list(known), n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{name!r} is none of {', '.join(known)}; {meant}a function of yours is file.py:NAME")
        return name

    return AfterValidator(validate)


class LossConfig(Section):
    name: Annotated[str, _known_or_own(LOSS_PARAMETERS)] = "decoupled_ppo"
    """The policy loss: `decoupled_ppo`, `ppo`, `tis`, `cispo`, `topr`, `weighted_topr`, `tis_topr`, `gspo`, `m2po`,
    `reinforce`, `sapo`, or a function of yours, `file.py:NAME` or `module:NAME`; docs/algorithms.md says when to use
    which, and how to write one."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss function of yours."""
    clip_low: Probability | None = None
    """The ratio is clipped at 1 - clip_low. None: the default of the loss (0.2; cispo 1.0; gspo 3e-4)."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped at 1 + clip_high. None: the default of the loss (0.2; gspo 4e-4)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages (c of dual-clip PPO). None: no bound."""
    correction: Literal["none", "tis", "mask"] = "tis"
    """Use of the ratio of proximal to behaviour policy: ignore it, truncate it, or mask tokens out of bounds."""
    correction_level: Literal["token", "turn", "turn_mean", "sequence", "sequence_mean"] = "token"
    """Compute one ratio per token, or one per turn or sequence: the product over its tokens, or their geometric mean
    (`_mean`)."""
    ratio_level: Literal["turn_mean", "sequence_mean"] = "sequence_mean"
    """Geometric mean of the ratios over each sequence or over each turn (gspo)."""
    correction_cap: PositiveFloat | None = None
    """Upper bound of `tis` and of `mask`. None: the default of the loss (2.0; 1.0 in tis, topr, weighted_topr and
    tis_topr)."""
    correction_floor: NonNegativeFloat = 0.5
    """Lower bound of `mask`."""
    positive_weight: NonNegativeFloat = 1.0
    """Weight of samples that were better than expected (weighted_topr)."""
    negative_weight: NonNegativeFloat = 1.0
    """Weight of samples that were worse than expected (weighted_topr)."""
    topr_share: Probability = 0.1
    """Share of `topr` in the loss; the rest is `tis` (tis_topr)."""
    positive_temperature: PositiveFloat = 1.0
    """Steepness of the soft clip for samples that were better than expected (sapo)."""
    negative_temperature: PositiveFloat = 1.05
    """Steepness of the soft clip for samples that were worse than expected (sapo)."""
    sequence_floor: NonNegativeFloat | None = None
    """With any loss: leave out a sequence whose geometric mean of the ratio of proximal to behaviour policy is below.
    None: no bound."""
    sequence_cap: PositiveFloat | None = None
    """With any loss: leave out a sequence whose geometric mean of that ratio is above. None: no bound."""
    sequence_rejects: Literal["all", "negative"] = "all"
    """What these two bounds leave out of such a sequence: all, or only what has a negative advantage."""
    second_moment: PositiveFloat | None = None
    """With any loss that is proportional to the advantage: leave out the tokens whose ratio moves furthest away, until
    the mean square of the log-ratios of the others is at most this (M2PO). The log-probabilities at the start of the
    step are computed first, and training begins when the last group arrives. None: no limit; 0.04 in m2po."""

    @model_validator(mode="after")
    def _only_what_the_loss_reads(self) -> LossConfig:
        own = is_own(self.name)
        if self.params and not own:
            raise ValueError(f"params are for a function of yours; {self.name} has keys of its own, such as clip_low")
        if taken := sorted(_REJECTION & self.params.keys()):
            raise ValueError(f"params: {taken[0]} would not reach {self.name}; write it beside params")
        for key, field in type(self).model_fields.items():
            if key in ("name", "params", *_OF_ANY_LOSS) or getattr(self, key) == field.default:
                continue
            if own:
                raise ValueError(f"{key} is not read by {self.name}; write it into learner.loss.params")
            if key in LOSS_PARAMETERS[self.name]:
                if key in _NOT_READ_WITH[self.correction]:
                    raise ValueError(f"{key} is not read with correction={self.correction}; remove it")
                continue
            readers = [name for name, keys in LOSS_PARAMETERS.items() if key in keys]
            raise ValueError(f"{key} is not read by {self.name}, only by {', '.join(readers)}; remove it")
        cap = 2.0 if self.correction_cap is None else self.correction_cap
        if self.correction == "mask" and self.correction_floor > cap:
            raise ValueError("correction_floor is above correction_cap: every token would be dropped")
        if self.sequence_cap is not None and (self.sequence_floor or 0.0) > self.sequence_cap:
            raise ValueError("sequence_floor is above sequence_cap: every sequence would be left out")
        if self.sequence_rejects != "all" and not self._rejects:
            raise ValueError("sequence_rejects is not read without sequence_floor or sequence_cap; set one of them")
        return self

    @property
    def _rejects(self) -> bool:
        return self.sequence_floor is not None or self.sequence_cap is not None

    @property
    def second_moment_limit(self) -> float | None:
        """Limit of the second moment of a step's log-ratios; None if there is none."""
        return M2PO_LIMIT if self.second_moment is None and self.name == "m2po" else self.second_moment

    @property
    def reads_proximal(self) -> bool:
        """True if the loss depends on the proximal policy."""
        corrects = self.name == "reinforce" and self.correction != "none"
        return is_own(self.name) or self.name == "decoupled_ppo" or corrects or self._rejects

    def parameters(self) -> dict[str, Any]:
        """Keyword arguments of the loss function: the options that it reads, without those left at None."""
        keys = LOSS_PARAMETERS.get(self.name, frozenset()) | (_REJECTION if self._rejects else frozenset())
        found = {key: value for key, value in self.model_dump().items() if key in keys and value is not None}
        return found | self.params

    def off_policy_warning(self, async_ratio: float) -> str | None:
        """Return a one-line warning if this loss does not correct for data as old as `async_ratio`, else None."""
        if async_ratio <= 0 or is_own(self.name):
            return None
        advice = (
            "use learner.loss.name=decoupled_ppo with its correction, or tis_topr for data two or more versions old, "
            f"or scheduler.async_ratio=0 instead of {async_ratio:g}"
        )
        if "correction" in LOSS_PARAMETERS[self.name] and self.correction == "none":
            return f"learner.loss: {self.name} with correction=none takes old episodes as if they were fresh; {advice}"
        if self.name in ("ppo", "gspo") and async_ratio >= 1:
            return (
                f"learner.loss: the trust region of {self.name} lies around the policy that sampled, not the newest; "
                f"old episodes hold the policy back or lose their gradient; {advice}"
            )
        return None


class WarmStartConfig(Section):
    demonstrations: LocalPath
    """A run folder or its `episodes` folder; or rows, as `envs.data.path`: `.jsonl`, `.csv`, `.parquet`, a folder or a
    hub's id of `datasets`. A row has `messages` with assistant turns, or a `prompt` and an `answer`; `tools` are those
    that its `tool_calls` name."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns of rows where they differ from ours, such as `{prompt: question, answer: solution}`. Ours
    are `messages`, or `prompt` and `answer`, and `tools`."""
    subset: str | None = None
    """Configuration of a data set on a hub."""
    split: str = "train"
    """Split of a hub's data set or of a saved folder."""
    steps: PositiveInt = 20
    """Number of supervised steps; they do not count as steps of the run."""
    batch_size: PositiveInt = 16
    """Demonstrations per supervised step."""
    learning_rate: PositiveFloat | None = None
    """Learning rate. None: `learner.learning_rate`."""
    best: PositiveInt = 1024
    """Maximum episodes from a run, those with the highest rewards. Of a data set, all rows are drawn."""
    min_reward: float | None = None
    """Leave out episodes of a run with a lower reward."""

    @model_validator(mode="after")
    def _columns(self) -> WarmStartConfig:
        require_known_columns(self.columns, DEMONSTRATION_COLUMNS, "columns")
        return self


class KlConfig(Section):
    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence from a frozen reference in the loss or the reward; 0 loads no reference."""
    in_reward: bool = False
    """Subtract the divergence from the reward of an episode, before advantages are computed, instead of adding it to
    the loss: `coefficient` times the sum of log mu - log reference over its policy tokens (k1), where mu is the policy
    that sampled."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of the divergence from a sampled token. k1 and k2 have the gradient of the reverse KL."""
    reference: LocalPath | None = None
    """Model folder of the reference. None: the model that the run starts from."""

    @model_validator(mode="after")
    def _a_reward_of_its_own(self) -> KlConfig:
        if self.in_reward and not self.coefficient:
            raise ValueError("in_reward has no effect with coefficient=0; set coefficient")
        if self.in_reward and self.estimator == "k3":
            raise ValueError("estimator=k3 is not read with in_reward, where the divergence is k1; remove one of them")
        return self

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and not self.in_reward


class OverlongConfig(Section):
    filter: bool = False
    """Do not train on episodes that were cut: they ended at `model.max_length`, or their last turn at its token limit.
    Their rewards still count in the advantages of their group."""
    max_tokens: PositiveInt | None = None
    """Sampled tokens of an episode from which on the whole penalty is subtracted from its reward. None: no penalty."""
    buffer_tokens: PositiveInt | None = None
    """Tokens below `max_tokens` over which the penalty rises linearly from 0."""
    penalty: PositiveFloat = 1.0
    """The whole penalty, in units of the reward."""

    @model_validator(mode="after")
    def _a_whole_penalty(self) -> OverlongConfig:
        if (self.max_tokens is None) != (self.buffer_tokens is None):
            raise ValueError("max_tokens and buffer_tokens belong together: set both or none")
        if self.max_tokens is None and self.penalty != 1.0:
            raise ValueError("penalty is not read without max_tokens and buffer_tokens; set them")
        if (self.buffer_tokens or 0) > (self.max_tokens or 0):
            raise ValueError("buffer_tokens is above max_tokens: every episode would be penalised")
        return self


class AdaptiveEntropyConfig(Section):
    target: PositiveFloat | None = None
    """Entropy of the policy in nats per token, below which `entropy_bonus` applies and rises. None: it is constant."""
    step: PositiveFloat = 0.005
    """Change of the bonus after each step."""
    highest: PositiveFloat = 1.0
    """Largest bonus."""

    @model_validator(mode="after")
    def _with_a_target(self) -> AdaptiveEntropyConfig:
        if self.target is None and (self.step, self.highest) != (0.005, 1.0):
            raise ValueError("step and highest are not read without target; set it")
        return self


class LoraConfig(Section):
    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last part of the names of the linear layers that get an adapter."""
    publish: Literal["adapters", "merged"] = "adapters"
    """Weights sent to the servers: only the adapters (a few MB), which servers merge into the weights they started
    with; or all weights, merged by the learner, for an inference engine that cannot merge."""


class CriticConfig(Section):
    kind: Literal["head", "model"] = "head"
    """`head`: a linear function of the policy's last hidden state; `model`: a second model with all weights of its own,
    which starts as the model of the run (with `lora`, frozen with adapters of its own). No server gets either."""
    level: Literal["token", "turn"] = "token"
    """`token`: a value and an advantage for each sampled token; `turn`: one for each turn, whose tokens share it."""
    discount: Probability = 1.0
    """Discount (gamma) of what comes after a sampled token, or after a turn with `level: turn`. Tokens of the
    environment do not count."""
    gae_lambda: Probability = 1.0
    """Weight of longer estimates (lambda): 1 compares the whole return with the value, 0 looks one token or turn
    ahead."""
    learning_rate: PositiveFloat | None = None
    """Learning rate of the critic, the same in all steps. None: 1e-4 for a head, `learner.learning_rate` for a
    model."""
    clip: PositiveFloat | None = 0.5
    """A value that is further than this from that at the start of the step gets no gradient that moves it on. It acts
    only with several `minibatches`. None: no limit."""
    detach: bool = True
    """The loss of the values does not reach the weights of the policy (head)."""
    coefficient: PositiveFloat | None = None
    """Weight of the loss of the values in the gradient of the policy's weights, with `detach: false`. None: 0.1."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the run that train the critic only."""

    @model_validator(mode="after")
    def _only_what_is_read(self) -> CriticConfig:
        if self.kind == "model" and not self.detach:
            raise ValueError("detach is not read with kind=model: such a critic shares no weights; remove it")
        if self.coefficient is not None and self.detach:
            raise ValueError("coefficient is not read with detach=true; set detach to false or remove it")
        return self


OFFLOAD_ON_CPU = (
    "activation_offload is of no use on a CPU, whose activations are in host memory already; set it to false"
)


class LearnerConfig(Section):
    engine: str = "fsdp"
    """`fsdp`, or a plug-in of `roll_flash.learner_engines`."""
    ranks: PositiveInt = 1
    """Processes that share the training of each step."""
    shard_size: PositiveInt | None = None
    """Number of ranks that share one copy of weights, gradients and optimizer (hybrid sharding). None: all. With fewer,
    such as the GPUs of a node, layers are gathered only among these; memory per rank is that of `shard_size` ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs if the cluster has any, else the CPU."""
    threads: PositiveInt = 1
    """CPU threads of each rank (CPU only). A warm start takes all cores, as nothing else runs."""
    placement: Literal["pack", "spread"] = "pack"
    """Placement of the ranks: `pack` fills one node after another, the driver's first; `spread` uses all in turn."""
    rank_resources: RayResources | None = None
    """Ray resources that each rank reserves, such as `{GPU: 1, learner: 1}`. None: as many CPUs as `threads`; where the
    cluster has GPUs, one CPU and one GPU, or half of it if a cluster with a single GPU has one rank and one server."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate of AdamW."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises linearly to `learning_rate`."""
    decay: Literal["none", "linear", "cosine", "wsd"] = "none"
    """How the learning rate falls from the end of the warm-up to the last step of the run: not at all, linearly, as
    half a cosine, or linearly in the last fifth only (warm-up, stable, decay)."""
    final_learning_rate: NonNegativeFloat = 0.0
    """What the learning rate falls to with `decay`."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices. Norms and biases have none."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of AdamW's two moments; each is below 1."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of the gradient of a step; a larger one is scaled down to it."""
    advantage: Annotated[str, _known_or_own(ADVANTAGE_NAMES)] = "grpo"
    """Estimator of the advantages within a group: `grpo`, `rloo`, `reinforce++`, `gigpo` (docs/algorithms.md has the
    formulas), or a function of yours, `file.py:NAME` or `module:NAME`; or `gae`, from the values of a `critic`, without
    a comparison in the group."""
    normalize_advantage: Literal["group", "batch", "none"] | None = None
    """Divisor of advantages: `group` the standard deviation of the group's rewards; `batch` that of all advantages of
    the step (computed when its last group arrives); `none` 1. None: group for grpo and gigpo, batch for reinforce++ and
    gae, none for rloo and a function of yours. `none` with grpo is Dr. GRPO; `batch` with gae also subtracts the mean
    over the tokens of the step."""
    turn_weight: NonNegativeFloat = 1.0
    """Weight of the turn advantage relative to the episode advantage (gigpo)."""
    turn_discount: Probability = 0.95
    """Discount of a reward per turn before it (gigpo)."""
    role_baseline: Literal["role", "group"] = "role"
    """In environments with several roles (self-play), compare a reward with those of the same role in the group, or
    (`group`) of all roles."""
    critic: CriticConfig = CriticConfig()
    """Values for `advantage: gae`."""
    loss: LossConfig = LossConfig()
    """The policy loss and its options."""
    loss_normalization: Literal["tokens", "sequences", "constant"] = "tokens"
    """Average the loss over all policy tokens of a step, or over its sequences: each the mean over its tokens, or
    (`constant`, as in Dr. GRPO) their sum divided by `loss_length`."""
    loss_length: PositiveInt | None = None
    """Divisor of a sequence's loss with `loss_normalization: constant`, such as the largest number of sampled
    tokens."""
    overlong: OverlongConfig = OverlongConfig()
    """What is done about episodes that are too long."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which is added to the objective."""
    adaptive_entropy: AdaptiveEntropyConfig = AdaptiveEntropyConfig()
    """Change `entropy_bonus`, which is the first value then, so that the entropy stays near a target."""
    kl: KlConfig = KlConfig()
    """KL divergence from a frozen reference, added to the loss or subtracted from rewards."""
    routing_replay: bool | Literal["auto"] = "auto"
    """In the learner each token uses the experts that the server used for it (mixtures of experts). `auto`: where
    servers return them; docs/models.md says where that is. false: the learner chooses anew, and rounding makes some
    choices differ."""
    router_aux_loss: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture of experts, which pushes the router to use all experts alike. 0:
    not computed; docs/algorithms.md says why."""
    minibatches: PositiveInt = 1
    """Optimizer steps per batch. With more than one, the log-probabilities at the start of the step are computed first,
    and training begins when the last group arrives."""
    proximal_decay: BelowOne | None = None
    """Decay per optimizer step of the average of weights that is the proximal policy (PPO-EWMA). The average is a
    second copy of the trained weights, and each step has a forward pass with it more. None: the proximal policy is that
    of the start of the step."""
    lora: LoraConfig = LoraConfig()
    """Train low-rank adapters and freeze the model's own weights."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer and recompute the rest in the backward pass: less memory, more time."""
    activation_offload: bool = False
    """Keep these inputs in host memory until the backward pass (GPU only, needs `gradient_checkpointing`)."""
    compile: bool = False
    """Compile the layers with torch.compile. The first passes are slow, and the later gain depends on model and
    machine: measure it. Needs a C++ compiler on a CPU, Triton on a GPU."""
    gradient_sync: Literal["row", "step"] = "row"
    """Synchronization of gradients between ranks: `row` after each row, each rank keeps only its shard; `step` once per
    step, which communicates less but keeps the gradient of all weights on every rank."""
    micro_batch_tokens: PositiveInt = 2048
    """Maximum tokens per forward pass, shared prefixes counted once; a larger group is split. Memory grows with it:
    about 1.6 MB per token for a model of 135 M parameters in float32."""
    log_logprobs: bool = False
    """Write the learner's log-probability of each computed token to `logs/learner_logprobs/`, for the last 64 steps:
    about 11 bytes a token. The dashboard then colours tokens by the difference of sampler and learner."""
    max_skipped_steps: NonNegativeInt = 3
    """Maximum consecutive updates skipped because the gradient is not finite; after that the run stops."""
    start_timeout_s: PositiveFloat = 300.0
    """Timeout in seconds of the start of the learner."""
    step_timeout_s: PositiveFloat = 1800.0
    """Timeout in seconds of each call of the learner's ranks, such as a micro-batch or the update of a step."""

    @model_validator(mode="after")
    def _gpus_of_a_rank(self) -> LearnerConfig:
        reserved = (self.rank_resources or {}).get("GPU")
        if self.device == "cpu" and reserved is not None:
            raise ValueError("rank_resources has GPU, but device is cpu; remove one of them")
        if self.device == "cuda" and self.rank_resources is not None and reserved is None:
            raise ValueError("rank_resources has no GPU, but device is cuda; add GPU: 1")
        if self.engine == "fsdp" and reserved is not None and (reserved > 1 or (reserved < 1 and self.ranks > 1)):
            raise ValueError(f"rank_resources: GPU: {reserved:g} must be 1: each rank computes on one GPU of its own")
        return self

    @model_validator(mode="after")
    def _whole_copies(self) -> LearnerConfig:
        if self.shard_size is not None and self.ranks % self.shard_size:
            raise ValueError(
                f"shard_size={self.shard_size} does not divide ranks={self.ranks}: each copy needs as many"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> LearnerConfig:
        if is_own(self.advantage) and self.normalize_advantage == "group":
            raise ValueError(f"normalize_advantage: {self.advantage} divides by what it wants to; use none or batch")
        if (self.advantage, self.normalize_advantage) in (
            ("reinforce++", "group"),
            ("gigpo", "batch"),
            ("gae", "group"),
        ):
            raise ValueError(f"normalize_advantage: {self.advantage} has no {self.normalize_advantage} normalisation")
        if self.final_learning_rate and self.decay == "none":
            raise ValueError("final_learning_rate is not read with decay=none; choose linear, cosine or wsd")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError("final_learning_rate is above learning_rate: decay lowers it")
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError("activation_offload moves what gradient_checkpointing keeps; set that to true too")
        if self.activation_offload and self.device == "cpu":
            raise ValueError(OFFLOAD_ON_CPU)
        if self.advantage != "gigpo" and (self.turn_weight, self.turn_discount) != (1.0, 0.95):
            raise ValueError(f"turn_weight and turn_discount are not read by {self.advantage}, only by gigpo")
        if self.advantage in ("gigpo", "gae") and self.role_baseline != "role":
            raise ValueError(f"role_baseline is not read by {self.advantage}; remove it")
        if (self.loss_normalization == "constant") != (self.loss_length is not None):
            raise ValueError("loss_length and loss_normalization=constant belong together: set both or none")
        if self.entropy_bonus > self.adaptive_entropy.highest and self.adaptive_entropy.target is not None:
            raise ValueError("entropy_bonus is above adaptive_entropy.highest; lower it")
        if self.proximal_decay is not None and not self.loss.reads_proximal:
            raise ValueError(
                f"proximal_decay is not read by {self.loss.name}; use decoupled_ppo, or reinforce with a correction"
            )
        if self.proximal_decay is not None and self.loss.second_moment_limit is not None:
            raise ValueError("proximal_decay and loss.second_moment: a moment is that of the start of the step")
        if self.proximal_decay is not None and self.has_critic:
            raise ValueError("proximal_decay and advantage=gae: values are those of the start of the step")
        if not self.has_critic and self.critic != CriticConfig():
            raise ValueError(f"critic is not read by advantage={self.advantage}, only by gae")
        return self

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True if advantages of replicas that all earned the same may differ from 0: they are compared with others than
        these, or turn by turn."""
        return self.advantage in ("reinforce++", "gigpo", "gae") or self.role_baseline == "group"

    @property
    def keeps_groups(self) -> bool:
        """True if groups wait, with their log-probabilities (and values) at the start of the step, until its last one
        arrives."""
        needs_proximal = self.loss.second_moment_limit is not None or self.proximal_decay is not None
        return self.minibatches > 1 or needs_proximal or self.has_critic

    @property
    def shapes_rewards(self) -> bool:
        """True if advantages are computed of other rewards than those of the episodes."""
        return self.kl.in_reward or self.overlong.max_tokens is not None

    @property
    def regularises(self) -> bool:
        """True if tokens with an advantage of 0 have a gradient too."""
        has_entropy = self.entropy_bonus > 0 or self.adaptive_entropy.target is not None
        return has_entropy or self.kl.in_loss or self.router_aux_loss > 0

    @property
    def computes_silent_groups(self) -> bool:
        """True if groups in which all episodes earned the same may have a gradient too."""
        return self.regularises or self.shapes_rewards or self.has_critic
