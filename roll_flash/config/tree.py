"""The config tree of a run.

A run is a YAML file, composed (`base: other.yaml`, relative to the file) and overridden by dotted `key=value` pairs.
Unknown keys are errors with a suggestion. `load_config` returns the resolved tree; the output of `Config.to_yaml` can
be run again unchanged. Importing this module imports neither torch nor ray nor vllm.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from roll_flash.config.evaluation import EvalConfig
from roll_flash.config.fields import (
    KeywordArguments,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    NumberOrAuto,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)
from roll_flash.config.files import apply_override, read_yaml
from roll_flash.config.learner import KlConfig, LearnerConfig, LoraConfig, LossConfig, WarmStartConfig
from roll_flash.config.stages import Stages
from roll_flash.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "Config",
    "EnvConfig",
    "EvalConfig",
    "InferenceConfig",
    "KlConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "MonitorConfig",
    "RayConfig",
    "RolloutConfig",
    "SandboxConfig",
    "Section",
    "WarmStartConfig",
    "WeightsConfig",
    "load_config",
]

STALL_MARGIN_S = 60.0
"""Extra seconds of the stall timeout, for the delay until a busy machine reports the end of an episode."""


class ModelConfig(Section):
    path: LocalPath
    """A Hugging Face model folder on this machine, or a name that `make model` knows (`smollm2-135m`, `tiny`)."""
    max_length: PositiveInt = 1024
    """Maximum tokens of an episode, prompts and observations included."""


class EnvConfig(Section):
    id: str
    """A gymnasium id, optionally with a module: `my_pkg.envs:Maze-v0`."""
    kwargs: KeywordArguments = Field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`."""
    max_turns: PositiveInt = 8
    """Maximum model calls per episode."""
    train_seeds: tuple[NonNegativeInt, NonNegativeInt] = (0, 1_000_000)
    """Half-open range of seeds for training tasks."""
    weight: PositiveFloat = 1.0
    """Share of the training tasks, relative to the weights of `extra_envs`."""
    levels: tuple[KeywordArguments, ...] = ()
    """Curriculum: each level is a set of keyword arguments merged over `kwargs`. Training prefers the levels with the
    most signal now (success neither 0 nor 1); evaluation uses `kwargs` alone."""

    @model_validator(mode="after")
    def _seeds(self) -> EnvConfig:
        if self.train_seeds[0] >= self.train_seeds[1]:
            raise ValueError("train_seeds must be [first, end) with first < end")
        return self

    @model_validator(mode="after")
    def _levels(self) -> EnvConfig:
        if any(level in self.levels[:index] for index, level in enumerate(self.levels)):
            raise ValueError("levels: two of them are the same")
        return self

    @property
    def variants(self) -> list[dict[str, Any]]:
        """Keyword arguments of each level, or those of the environment if it has no levels."""
        return [{**self.kwargs, **level} for level in self.levels or ({},)]


class SandboxConfig(Section):
    provider: str = "auto"
    """`docker`; `local` (bubblewrap, weaker); a plug-in of `roll_flash.sandboxes`; `auto` uses docker if an engine
    answers and prints a note if not."""
    engines: tuple[str, ...] = ()
    """Docker engines that are used as one (`unix:///path`, `tcp://host:2375`, `tcp://host:2376?certificates=FOLDER`).
    Empty: the one of DOCKER_HOST, or of this machine."""
    allow_weak: bool = False
    """Allow `roll-flash eval` to use a sandbox with weak isolation (`local`); training only warns."""
    image: str = "roll-flash-sandbox:latest"
    """Docker image of environments that name none."""
    pool_size: NonNegativeInt = 8
    """Number of started, idle sandboxes in the pool."""
    max_parallel_starts: PositiveInt = 8
    """Maximum concurrent sandbox starts per engine."""
    reuse: bool = False
    """Reset and check a sandbox after its episode and reuse it, instead of starting a fresh one per episode."""
    memory_mb: PositiveInt = 256
    cpus: PositiveFloat = 1.0
    pids: PositiveInt = 64
    start_timeout_s: PositiveFloat = 30.0

    @model_validator(mode="after")
    def _known_provider(self) -> SandboxConfig:
        known = ["auto", "docker", "local", *(point.name for point in entry_points(group="roll_flash.sandboxes"))]
        if self.provider not in known:
            raise ValueError(f"sandbox.provider: {self.provider!r} is none of {', '.join(known)}")
        if self.engines and self.provider not in ("auto", "docker"):
            raise ValueError(f"sandbox.engines are for provider docker, not {self.provider}")
        if len(set(self.engines)) != len(self.engines):
            raise ValueError("sandbox.engines: one is named twice")
        return self


class RolloutConfig(Section):
    groups_per_step: PositiveInt = 8
    """Groups (tasks) per optimizer step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Replicas of one task, each a separate episode."""
    extra_groups: NonNegativeInt = 0
    """Groups in flight beyond the number that the async ratio needs: redundancy against stragglers."""
    extra_replicas: NonNegativeInt = 0
    """Episodes of a group beyond `group_size`; the first `group_size` that finish complete the group."""
    surplus: Literal["keep", "cancel"] = "keep"
    """Surplus of the redundancy: `cancel` stops it at once, `keep` uses it while it is fresh."""
    scheduling: Literal["queue", "batch"] = "queue"
    """`queue`: a free slot takes the next episode; `batch`: all episodes of a step start together and end together."""
    replicate: bool = True
    """Schedule each replica of a group separately; `false` starts them together."""
    fair: bool = False
    """Train groups in the order of submission, so that the trained groups have the distribution of the submitted
    ones."""
    drop_groups_without_signal: bool = False
    """Drop groups whose replicas all got the same reward and play others (at most 4 x groups_per_step per step)."""
    on_failure: Literal["smaller", "refill"] = "smaller"
    """Action when an episode failed after all retries: train the smaller group, or play another replica."""
    max_concurrent: PositiveInt = 64
    """Maximum concurrent episodes, over all workers."""
    workers: PositiveInt = 1
    """Number of Ray actors that host the per-environment async workers."""
    worker_threads: PositiveInt = 32
    """Maximum concurrent calls of blocking environments in one worker."""
    placement: Literal["pack", "spread"] = "pack"
    """Ray placement of the workers: on the driver's node while it has the resources, or spread over all nodes."""
    worker_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Ray resources per worker, such as `{CPU: 1, sandboxes: 1}`. A worker mostly waits: none by default."""
    heartbeat_timeout_s: PositiveFloat = 30.0
    """A worker without a heartbeat for this many seconds is replaced, and its episodes are restarted."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature, at least 0.01: vLLM raises lower values to that, and log-probabilities would belong to
    another distribution."""
    max_new_tokens: PositiveInt = 64
    """Maximum tokens the model may generate per turn."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, in addition to the model's end-of-turn token."""
    generate_timeout_s: PositiveFloat = 120.0
    step_timeout_s: PositiveFloat = 60.0
    """Timeout in seconds of `reset` and of each `step`."""
    episode_timeout_s: PositiveFloat = 600.0
    retries: NonNegativeInt = 1
    """Maximum retries of a failed episode; after that its group continues without it."""
    max_failures_in_a_row: PositiveInt = 64
    """Maximum consecutive failed episodes, and maximum consecutive groups that lost too many replicas; then the run
    stops and reports why."""
    max_requeues: NonNegativeInt = 3
    """Maximum replays of one task by `on_stale: requeue`; after that it is dropped and counted."""
    max_steps_without_signal: PositiveInt = 4
    """With `drop_groups_without_signal`: maximum consecutive steps in which every group had equal rewards; then the run
    stops and reports it."""

    @model_validator(mode="after")
    def _redundancy(self) -> RolloutConfig:
        redundant = self.groups_per_step * self.extra_replicas
        redundant += self.extra_groups * (self.group_size + self.extra_replicas)
        if redundant and redundant >= self.max_concurrent:
            raise ValueError(
                f"extra_groups and extra_replicas make {redundant} redundant episodes, which alone fill "
                f"max_concurrent={self.max_concurrent}; lower them or raise max_concurrent"
            )
        if self.fair and redundant:
            raise ValueError("fair trains every group in order: set extra_groups and extra_replicas to 0")
        if not self.replicate and self.group_size + self.extra_replicas > self.max_concurrent:
            raise ValueError("replicate: false starts a whole group at once: max_concurrent must hold its replicas")
        return self


class StreamConfig(Section):
    shards: NonNegativeInt = 0
    """Ray actors, spread over the nodes, that hold trajectories between rollout and learner; 0: the driver holds
    them."""
    capacity_rows: PositiveInt = 4096
    """Maximum trajectories in the stream; while it is full, producers wait."""
    capacity_mb: PositiveInt = 1024
    """Maximum MB of trajectories in the stream."""


class InferenceConfig(Section):
    engine: str = "vllm"
    """`vllm`, `transformers` (in-process, tiny models), or a plug-in of `roll_flash.inference_engines`."""
    servers: PositiveInt = 1
    threads: PositiveInt = 1
    """CPU threads of each server (CPU only)."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of the key-value cache in GiB (CPU only)."""
    gpu_memory_utilization: Probability = 0.5
    max_num_seqs: PositiveInt = 64
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: float32 on CPU, bfloat16 on GPU."""
    port: NonNegativeInt = 0
    """First port of the servers; 0: the system chooses."""
    start_timeout_s: PositiveFloat = 300.0
    health_timeout_s: PositiveFloat = 30.0
    """A server that does not answer for this many seconds gets no requests; other servers continue its requests. After
    three times as long it is killed and restarted."""
    stream_every: PositiveInt = 64
    """Turns that may be longer than this are streamed in chunks of this many tokens, so that if a server dies, another
    one continues the request from its last chunk. Small values cost CPU time per chunk."""
    admission_ratio: NonNegativeFloat = 2.0
    """Maximum outstanding tokens per server, as a multiple of its key-value cache; further requests wait in the
    workers. Above 1 because turns rarely use their maximum and replicas share their prompt; 0: no limit."""
    weight_transfer: Literal["shm", "nccl", "ipc"] = "shm"
    """Transport of new weights to vLLM: `shm` shared memory (same machine), `nccl` learner ranks on any machine, `ipc`
    learner ranks on the same GPU."""
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Additional command-line options of the server."""


class WeightsConfig(Section):
    in_flight: Literal["keep", "abort_resume"] = "keep"
    """Requests in flight during a weight update: `keep` pauses them and continues with their old keys and values;
    `abort_resume` aborts them and resends their tokens, so that the new weights recompute the prefix (for servers that
    cannot pause requests, or if every token must see only the new weights; costs a prefill per request)."""
    parity_threshold: PositiveFloat | None = None
    """Maximum difference between log-probabilities of server and learner at the 99th percentile of the parity probe's
    tokens; the mean difference may be at most a fifth of it. None: 1e-3 in float32, 0.25 in bfloat16."""
    parity_text: str = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46."
    """Text that the probe's texts (1,000 tokens in total) begin with. All texts are compared once when a run starts or
    resumes; two of them, in turn, after every weight update."""
    publish_timeout_s: PositiveFloat = 300.0
    """Timeout in seconds for all servers together; must be long enough to restart a server meanwhile."""


class CheckpointConfig(Section):
    every_minutes: NonNegativeFloat = 10.0
    """Minutes between checkpoints, which are written while training continues; 0: none by time. The first is written
    after the first step, so that a folder without write access shows early. The end, Ctrl-C, SIGTERM, SIGHUP and every
    error that leaves the learner intact also write one; with both keys 0, only these."""
    every: NonNegativeInt = 0
    """Steps between checkpoints, in addition to those by time; 0: none by steps."""
    keep: PositiveInt = 1
    """Number of newest checkpoints to keep. An old one is removed only after a newer one is complete."""


class MonitorConfig(Section):
    tensorboard: bool = True
    stall_timeout_s: PositiveFloat | None = None
    """Maximum seconds in which no episode ends; after that the run stops and names what it waits for. None:
    `rollout.episode_timeout_s` + `rollout.step_timeout_s` (to close it) + 60, so that slow episodes end by
    themselves."""


class RayConfig(Section):
    address: str | None = None
    """None starts Ray on this machine; `auto` or `host:port` joins a cluster."""
    num_cpus: PositiveInt | None = None


class Config(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    runs: LocalPath = "runs"
    """Folder that holds the run folders."""
    seed: NonNegativeInt = 0
    steps: PositiveInt = 20
    model: ModelConfig
    env: EnvConfig
    extra_envs: tuple[EnvConfig, ...] = ()
    """Additional training environments, mixed with `env` by their weights; each is also evaluated."""
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    async_ratio: NumberOrAuto = 1.0
    """A token may be trained at version v only if it was sampled at version >= v - async_ratio; 0 is synchronous.
    `auto` adapts it within `async_ratio_bounds` from the measurements of each step."""
    async_ratio_bounds: tuple[NonNegativeInt, NonNegativeInt] = (0, 4)
    """Minimum and maximum of `async_ratio: auto`."""
    on_stale: Literal["evict", "requeue", "wait"] = "evict"
    """Action for groups that became too stale to train: `evict` drops them, `requeue` also plays their tasks again (at
    most `rollout.max_requeues` times each), `wait` lets no step finish without them."""
    stream: StreamConfig = StreamConfig()
    """The trajectory stream between rollout and learner."""
    stages: Stages = ()
    """Stages that score trajectories in the stream: judges, reward models, your own classes."""
    inference: InferenceConfig = InferenceConfig()
    learner: LearnerConfig = LearnerConfig()
    warm_start: WarmStartConfig | None = None
    """Imitate demonstrations (supervised) before reinforcement learning begins."""
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    eval: EvalConfig = EvalConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _held_out(self) -> Config:
        for env in self.envs:
            first, end = env.train_seeds
            if first < self.eval.seeds_from + self.eval.tasks and self.eval.seeds_from < end:
                raise ValueError(
                    f"eval.seeds_from: the held-out seeds overlap train_seeds of {env.id}; choose a range outside it"
                )
        return self

    @model_validator(mode="after")
    def _different_environments(self) -> Config:
        described = [(env.id, env.kwargs) for env in self.envs]
        if any(env in described[:index] for index, env in enumerate(described)):
            raise ValueError("extra_envs: an environment is named twice with the same kwargs; give it more weight")
        return self

    @model_validator(mode="after")
    def _bounds(self) -> Config:
        if self.async_ratio_bounds[0] > self.async_ratio_bounds[1]:
            raise ValueError("async_ratio_bounds must be [smallest, largest]")
        return self

    @property
    def envs(self) -> tuple[EnvConfig, ...]:
        """All training environments; the first is the main environment of the run."""
        return (self.env, *self.extra_envs)

    @property
    def highest_async_ratio(self) -> float:
        """Upper bound of the staleness of any trained token."""
        return self.async_ratio_bounds[1] if self.async_ratio == "auto" else self.async_ratio

    @property
    def stall_timeout_s(self) -> float:
        """Maximum seconds in which no episode ends before the run stops."""
        chosen, rollout = self.monitor.stall_timeout_s, self.rollout
        return rollout.episode_timeout_s + rollout.step_timeout_s + STALL_MARGIN_S if chosen is None else chosen

    @property
    def usual_start(self) -> str:
        """Typical start time of servers, learner and workers, as text for the user."""
        return "usually 60-180 s, most of it vLLM's" if self.inference.engine == "vllm" else "usually 20-40 s"

    @property
    def usual_start_of_servers(self) -> str:
        return "usually 40-100 s" if self.inference.engine == "vllm" else "usually 5-20 s"

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @property
    def run_folder(self) -> Path:
        return Path(self.runs) / self.name


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read, compose, override and validate a config. Raises ConfigError with one line per mistake."""
    tree = dict(source) if isinstance(source, Mapping) else read_yaml(Path(source))
    for override in overrides:
        apply_override(tree, override)
    label = "config" if isinstance(source, Mapping) else str(source)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{label}: {_explain(item)}" for item in error.errors())) from None


def _explain(item: Mapping[str, Any]) -> str:
    location = [str(part) for part in item["loc"]]
    where = ".".join(location)
    match item["type"]:
        case "extra_forbidden":
            return f"unknown key {where!r}{_suggest(location)}"
        case "missing":
            return f"{where!r} is required"
        case "value_error":
            reason = str(item["ctx"]["error"])
            return f"{where}: {reason}" if where else reason
    shown = repr(item["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}, not {shown}"


def _suggest(location: list[str]) -> str:
    section: type[BaseModel] = Config
    for part in location[:-1]:
        if part.isdigit():  # index in a list of sections
            continue
        child = _section_type(section, part)
        if child is None:
            return ""
        section = child
    wrong = location[-1]
    near = difflib.get_close_matches(wrong, list(section.model_fields), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join([*location[:-1], near[0]])!r}?"
    elsewhere = [full for full in _all_keys(Config) if full.rsplit(".", 1)[-1] == wrong]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    return f"; known keys here: {', '.join(section.model_fields)}"


def _section_type(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    info = section.model_fields.get(name)
    if info is None:
        return None
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name in section.model_fields:
        child = _section_type(section, name)
        keys.extend(_all_keys(child, f"{prefix}{name}.") if child else [prefix + name])
    return keys
