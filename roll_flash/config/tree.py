"""The config tree of a run.

A run is a YAML file, composed (`base: other.yaml`, relative to the file; mappings are merged, lists replaced) and
overridden by dotted `key=value` pairs (`envs.0.max_turns=3` for the first entry of a list).
Unknown keys are errors with a suggestion. `load_config` returns the resolved tree; the output of `Config.to_yaml` can
be run again unchanged. Importing this module imports neither torch nor ray nor vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, FiniteFloat, ValidationError, model_validator

from roll_flash.config.addresses import MAX_PORT, ClusterAddress
from roll_flash.config.fields import (
    KeywordArguments,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RayResources,
    Section,
)
from roll_flash.config.files import apply_override, composed, read_yaml
from roll_flash.config.mistakes import explain_all
from roll_flash.config.moved import moved_text
from roll_flash.config.sections.data import COLUMNS, Data, Rewards, distinct_names, require_known_columns
from roll_flash.config.sections.distill import TEACHER, DistillConfig
from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.sections.learner import LearnerConfig, WarmStartConfig
from roll_flash.config.sections.policies import Policies
from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.config.sections.stages import Stages
from roll_flash.errors import ConfigError, KeysError

STALL_MARGIN_S = 60.0
"""Extra seconds of the stall timeout, for the delay until a busy machine reports the end of an episode."""

ALL_TRAIN_SEEDS = (0, 1_000_000)
DATASET_ENV = "Dataset-v0"


class ModelConfig(Section):
    path: LocalPath
    """A Hugging Face model folder on this machine; `ORG/NAME` of a model on a hub, which is downloaded once; a GGUF
    file; a folder with a LoRA adapter, which is added to its model; or a name that `make model` knows
    (`smollm2-135m`, `tiny`)."""
    revision: str | None = None
    """Branch, tag or commit of a model on a hub. None: the main branch, or what of it was downloaded before."""
    max_length: PositiveInt = 1024
    """Maximum tokens of an episode, prompts and observations included."""
    thinking: Literal["keep", "strip"] = "keep"
    """What later turns of a conversation see of the model's earlier thinking. `keep`: all of it, so that an episode is
    one sample. `strip`: each turn's prompt is rendered anew by the chat template, which gets earlier thinking as
    `reasoning_content` and usually leaves it out, as chat servers do; an episode is then several samples."""
    chat_template_kwargs: KeywordArguments = Field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`. For models served here; an endpoint renders
    its own prompts."""


class TaskSourceConfig(Section):
    entry_point: str
    """`file.py:NAME` or `module:NAME`: a class or a function that is called with the entry of `envs` and `kwargs`, and
    gives a `roll_flash.TaskSource`. `fork_points`: states within the episodes of another run."""
    kwargs: KeywordArguments = Field(default_factory=dict)
    """Keyword arguments of the task source; those of `fork_points` are `{run: NAME}`, and `trust: true` for a run
    that was made elsewhere."""


class EnvConfig(Section):
    id: str
    """A gymnasium id, optionally with a module: `my_pkg.envs:Maze-v0`."""
    kwargs: KeywordArguments = Field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`."""
    max_turns: PositiveInt = 8
    """Maximum model calls per episode."""
    train_seeds: tuple[NonNegativeInt, NonNegativeInt] = ALL_TRAIN_SEEDS
    """Half-open range of seeds for training tasks."""
    task_source: TaskSourceConfig | None = None
    """Training and held-out tasks of your own, such as the rows of a data set, instead of seeds."""
    data: Data = None
    """Rows of a data set as tasks: a path, or a mapping with the keys below. With the id `Dataset-v0` a row is a prompt
    and an answer; for other environments its columns are keyword arguments, merged over `kwargs`."""
    reward: Rewards = ()
    """What an answer to a row of `data` earns (`Dataset-v0` only): a function or a list of them, which are added up:
    `exact`, `number`, `math`, `regex`, `json_schema`, `python_tests`, `file.py:NAME`."""
    success_above: FiniteFloat | None = None
    """An episode whose environment reports no `info["success"]` counts as a success if its reward is above this. None:
    only rewards are reported then. Entries with one id have the same."""
    weight: PositiveFloat = 1.0
    """Share of the training tasks, relative to the weights of the other environments."""
    levels: tuple[KeywordArguments, ...] = ()
    """Curriculum: each level is a set of keyword arguments merged over `kwargs`. Training prefers the levels with the
    most signal now (success neither 0 nor 1); evaluation uses `kwargs` alone."""

    @model_validator(mode="after")
    def _seeds(self) -> EnvConfig:
        if self.train_seeds[0] >= self.train_seeds[1]:
            raise ValueError("train_seeds must be [first, end) with first < end")
        if self.task_source is not None and self.train_seeds != ALL_TRAIN_SEEDS:
            raise ValueError("train_seeds have no effect beside a task_source, which chooses the tasks; remove one")
        return self

    @model_validator(mode="after")
    def _rows(self) -> EnvConfig:
        is_dataset = self.id == DATASET_ENV
        if is_dataset and self.data is None:
            raise ValueError(f"{DATASET_ENV} needs rows: data: my.jsonl")
        if is_dataset and not self.reward:
            raise ValueError(f"{DATASET_ENV} needs a reward, such as reward: exact")
        if self.reward and not is_dataset:
            raise ValueError(f"reward is for {DATASET_ENV}; {self.id} gives rewards of its own, so remove it")
        if self.data is not None and is_dataset:
            require_known_columns(self.data.columns, COLUMNS, "data.columns")
        if self.data is not None and (self.task_source is not None or self.levels):
            raise ValueError("data chooses the tasks; remove task_source and levels")
        if self.data is not None and self.train_seeds != ALL_TRAIN_SEEDS:
            raise ValueError("train_seeds have no effect beside data, whose rows are the tasks; remove them")
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


def _at_least_one(envs: tuple[EnvConfig, ...]) -> tuple[EnvConfig, ...]:
    if not envs:
        raise ValueError("at least one environment is needed")
    return envs


def _with_distinct_data(envs: tuple[EnvConfig, ...]) -> tuple[EnvConfig, ...]:
    with_data = [(index, env.data) for index, env in enumerate(envs) if env.data is not None]
    named = list(envs)
    for (index, data), name in zip(with_data, distinct_names([data for _, data in with_data]), strict=True):
        if name != data.label:
            named[index] = envs[index].model_copy(update={"data": data.model_copy(update={"name": name})})
    return tuple(named)


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
    """Memory limit of a sandbox in MB."""
    cpus: PositiveFloat = 1.0
    """CPU limit of a sandbox, in cores."""
    pids: PositiveInt = 64
    """Maximum processes in a sandbox."""
    start_timeout_s: PositiveFloat = 30.0
    """Timeout in seconds of the start of a sandbox."""

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
    max_concurrent: PositiveInt = 64
    """Maximum concurrent episodes, over all workers."""
    workers: PositiveInt = 1
    """Number of Ray actors that host the per-environment async workers."""
    worker_threads: PositiveInt = 32
    """Maximum concurrent calls of blocking environments in one worker."""
    placement: Literal["pack", "spread"] = "pack"
    """Placement of the workers: `pack` fills one node after another, the driver's first; `spread` uses all in turn."""
    worker_resources: RayResources = Field(default={"CPU": 0.1})
    """Ray resources that each worker reserves, such as `{CPU: 1, envs: 1}`. A worker mostly waits."""
    heartbeat_timeout_s: PositiveFloat = 30.0
    """A worker without a heartbeat for this many seconds is replaced, and its episodes are restarted."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature, at least 0.01: vLLM raises lower values to that, and log-probabilities would belong to
    another distribution."""
    max_new_tokens: PositiveInt = 64
    """Maximum tokens the model may generate per turn."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a turn, in addition to the model's end-of-turn token."""
    generate_timeout_s: PositiveFloat = 120.0
    """Timeout in seconds of one model call."""
    step_timeout_s: PositiveFloat = 60.0
    """Timeout in seconds of `reset` and of each `step`."""
    episode_timeout_s: PositiveFloat = 600.0
    """Timeout in seconds of a whole episode."""
    retries: NonNegativeInt = 1
    """Maximum retries of a failed episode; after that its group continues without it."""


class InferenceConfig(Section):
    engine: str = "vllm"
    """`vllm`, `transformers` (small servers for tiny models), or a plug-in of `roll_flash.inference_engines`."""
    servers: PositiveInt = 1
    """Number of servers; each holds the whole model."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one node over which each server splits the model (`vllm` on GPUs only)."""
    threads: PositiveInt = 1
    """CPU threads of each server (CPU only)."""
    placement: Literal["pack", "spread"] = "pack"
    """Placement of the servers: `pack` fills one node after another, the driver's first; `spread` uses all in turn."""
    server_resources: RayResources | None = None
    """Ray resources that each server reserves, such as `{GPU: 1, servers: 1}`. None: as many CPUs as `threads`; on GPUs
    `tensor_parallel_size` GPUs and as many CPUs, or half a GPU if a cluster with a single one has one rank and one
    server."""
    kv_cache_gib: PositiveFloat = 1.0
    """Size of the key-value cache in GiB on a CPU, and on a GPU that a server shares with the learner."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of a GPU's memory that a server uses if it has the GPU for itself; the rest is for the buffers of weight
    updates."""
    max_num_seqs: PositiveInt = 64
    """Maximum requests that a server computes at the same time; further ones wait in it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: float32 on CPU, bfloat16 on GPU."""
    port: NonNegativeInt = 0
    """First port of the servers; 0: the system chooses."""
    start_timeout_s: PositiveFloat = 300.0
    """Timeout in seconds of the start of the servers."""
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
    """Additional command-line options of the server (`vllm` only), such as `{enforce_eager: true}`."""

    @model_validator(mode="after")
    def _gpus_of_a_server(self) -> InferenceConfig:
        split, reserved = self.tensor_parallel_size, (self.server_resources or {}).get("GPU")
        if split > 1 and self.engine == "transformers":
            raise ValueError(f"tensor_parallel_size={split} is for the engine vllm; set it to 1")
        if split > 1 and self.server_resources is not None and reserved is None:
            raise ValueError(f"server_resources has no GPU for tensor_parallel_size={split}; add GPU: {split}")
        if reserved is not None and reserved != split and not (split == 1 and reserved < 1):
            raise ValueError(
                f"server_resources: GPU: {reserved:g} is not tensor_parallel_size={split}; set both to the GPUs of one "
                "server (or GPU to a fraction, for several parts on one GPU)"
            )
        return self

    @model_validator(mode="after")
    def _only_vllm_has(self) -> InferenceConfig:
        if self.engine == "transformers" and self.dtype == "bfloat16":
            raise ValueError("dtype: the engine transformers computes in float32; use vllm for bfloat16")
        if self.engine == "transformers" and self.extra_args:
            raise ValueError("extra_args are for the engine vllm; transformers has no options; remove them")
        if self.engine == "transformers" and self.weight_transfer != "shm":
            raise ValueError(f"weight_transfer={self.weight_transfer} is for the engine vllm; set it to shm")
        return self

    @model_validator(mode="after")
    def _ports(self) -> InferenceConfig:
        last = self.port + self.servers - 1
        if self.port and last > MAX_PORT:
            raise ValueError(f"port={self.port}: {self.servers} server(s) need ports up to {last}, above {MAX_PORT}")
        return self


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
    """Number of newest checkpoints to keep. An old one is removed only after a newer one is complete. `--resume` takes
    the one before if the newest is damaged, so 2 are safer than 1."""
    keep_every: NonNegativeInt = 0
    """Also keep checkpoints whose step is a multiple of this; 0: none. Set `every` to a divisor of it, so that these
    steps have one."""
    copy_to: str | None = None
    """Folder at any URL that fsspec knows, such as `s3://bucket/runs`; `s3` needs `pip install s3fs`, `gs` gcsfs. Each
    checkpoint that is complete on the disk is copied to NAME/step_N there in the background, read back and compared;
    `keep` and `keep_every` hold there too. `roll-flash checkpoints get` brings it back."""


class MonitorConfig(Section):
    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    compress_episodes: bool = True
    """Compress the file of a finished step in `episodes/`, and of a finished part of `journal/`, while training
    continues (gzip, `step_N.jsonl.gz`); files of less than 64 KiB stay as they are. All commands read both; `zcat` and
    `pandas.read_json` do too."""
    episodes_gib: PositiveFloat | None = None
    """Maximum size of `episodes/` and `journal/` in GiB: when they have more, episodes of the oldest steps are removed,
    and the part of the journal that tells of these only, but never what `--resume` needs, since the checkpoints of
    `checkpoint.keep`. `roll-flash verify` then checks the steps that are left. None: all stay."""
    stall_timeout_s: PositiveFloat | None = None
    """Maximum seconds in which no episode ends; after that the run stops and names what it waits for. None:
    `rollout.episode_timeout_s` + `rollout.step_timeout_s` (to close it) + 60, so that slow episodes end by
    themselves."""
    export: tuple[Literal["wandb", "mlflow", "prometheus", "otel"], ...] = ()
    """Other systems that get the metrics, each through its own library (docs/exporters.md): Weights & Biases, MLflow,
    Prometheus, OpenTelemetry. Their keys and addresses come from the variables of their libraries."""
    export_project: Annotated[str, Field(min_length=1)] = "roll-flash"
    """Project in Weights & Biases, experiment in MLflow. The run has its `name` there."""
    export_offline: bool = False
    """Weights & Biases and MLflow only write to the run folder (`wandb/`, `mlflow.db`), and nothing is sent."""
    prometheus_port: Annotated[int, Field(ge=1, le=MAX_PORT)] = 9464
    """Port of `/metrics` on the loopback address of the driver's machine. It asks for no key: other users of this
    machine can read it."""


class RayConfig(Section):
    address: ClusterAddress | None = None
    """None starts Ray on this machine. `auto` or `host:port` (of the head node) joins a cluster that this machine is a
    node of."""
    num_cpus: PositiveInt | None = None
    """CPUs of a Ray that is started on this machine. None: four per core, as the parts of a small run share cores."""

    @model_validator(mode="after")
    def _own_cpus(self) -> RayConfig:
        if self.address is not None and self.num_cpus is not None:
            raise ValueError("num_cpus is for a Ray that is started on this machine; remove it or address")
        return self


class Config(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = "run"
    """Name of the run and of its folder."""
    runs: LocalPath = "runs"
    """Folder that holds the run folders."""
    seed: NonNegativeInt = 0
    """Seed of the task order, of the learner and of the sampling in evaluations."""
    steps: PositiveInt = 20
    """Training steps; each publishes one version of the weights."""
    model: ModelConfig
    """The model that is trained, and the length of its episodes."""
    envs: Annotated[tuple[EnvConfig, ...], AfterValidator(_at_least_one), AfterValidator(_with_distinct_data)]
    """Training environments, mixed by their weights; each is also evaluated. Results of the first have no prefix, those
    of the others the prefix `env_N/`, with their index N in this list."""
    sandbox: SandboxConfig = SandboxConfig()
    """Sandboxes of environments that need one."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Which episodes start, how old their tokens may be, and which groups are trained."""
    rollout: RolloutConfig = RolloutConfig()
    """How episodes are played: workers, slots, sampling, timeouts, retries."""
    stages: Stages = ()
    """Stages that score trajectories in the stream: judges, reward models, your own classes."""
    distill: DistillConfig | None = None
    """On-policy distillation: a teacher scores each sampled token; docs/algorithms.md says when to use it."""
    policies: Policies = Field(default_factory=dict)
    """Fixed policies that environments ask by name through the gateway, such as opponents and simulated users;
    docs/self-play.md has an example."""
    inference: InferenceConfig = InferenceConfig()
    """The inference engine and its servers."""
    learner: LearnerConfig = LearnerConfig()
    """Loss, advantages, optimizer and memory of the learner."""
    warm_start: WarmStartConfig | None = None
    """Imitate demonstrations (supervised) before reinforcement learning begins."""
    weights: WeightsConfig = WeightsConfig()
    """Publication of new weights to the servers, and the check that servers and learner agree."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written, and how many are kept."""
    monitor: MonitorConfig = MonitorConfig()
    """What is written about a run, and when a run that makes no progress stops."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out tasks, during training and by `roll-flash eval`."""
    ray: RayConfig = RayConfig()
    """The Ray cluster that the run starts or joins."""

    @model_validator(mode="after")
    def _held_out(self) -> Config:
        for env in self.envs:
            if env.task_source is not None or env.data is not None:
                continue
            first, end = env.train_seeds
            if first < self.eval.seeds_from + self.eval.tasks and self.eval.seeds_from < end:
                raise ValueError(
                    f"eval.seeds_from: the held-out seeds overlap train_seeds of {env.id}; choose a range outside it"
                )
        return self

    @model_validator(mode="after")
    def _different_environments(self) -> Config:
        described = [(env.id, env.kwargs, env.data, env.task_source) for env in self.envs]
        if any(env in described[:index] for index, env in enumerate(described)):
            raise ValueError("envs: an environment is named twice with the same kwargs; give it more weight")
        above: dict[str, float | None] = {}
        for env in self.envs:
            if above.setdefault(env.id, env.success_above) != env.success_above:
                raise ValueError(f"envs: success_above is one for all entries with the id {env.id}; give them the same")
        return self

    @model_validator(mode="after")
    def _turns_are_in_one_sample(self) -> Config:
        if self.model.thinking == "strip" and self.learner.advantage == "gigpo":
            raise ValueError(
                "learner.advantage=gigpo compares turns of one sample, and with model.thinking=strip they are in "
                "several; use another advantage, or model.thinking=keep"
            )
        return self

    @model_validator(mode="after")
    def _an_answer_fits(self) -> Config:
        longest, answer = self.model.max_length, self.rollout.max_new_tokens
        if answer >= longest:
            raise ValueError(
                f"rollout.max_new_tokens={answer} leaves no room for a prompt in model.max_length={longest}; "
                "lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _enough_slots(self) -> Config:
        scheduler, slots = self.scheduler, self.rollout.max_concurrent
        if (redundant := scheduler.redundant_episodes) and redundant >= slots:
            raise ValueError(
                f"scheduler.extra_groups and scheduler.extra_replicas make {redundant} redundant episodes, which alone "
                f"fill rollout.max_concurrent={slots}; lower them or raise rollout.max_concurrent"
            )
        replicas = scheduler.replicas
        if not scheduler.replicate and replicas > slots:
            raise ValueError(
                f"scheduler.replicate=false starts the {replicas} replicas of a group at once; "
                f"rollout.max_concurrent={slots} must be at least that"
            )
        return self

    @model_validator(mode="after")
    def _a_group_for_each_minibatch(self) -> Config:
        parts, groups = self.learner.minibatches, self.scheduler.groups_per_step
        if parts > groups:
            raise ValueError(
                f"learner.minibatches={parts} is more than scheduler.groups_per_step={groups}; a group is never split"
            )
        return self

    @model_validator(mode="after")
    def _groups_suit_the_advantage(self) -> Config:
        advantage, scheduler = self.learner.advantage, self.scheduler
        if scheduler.group_size == 1 and not self.learner.has_critic:
            raise ValueError(
                f"scheduler.group_size=1: learner.advantage={advantage} compares the replicas of a task; raise it, or "
                "use learner.advantage=gae"
            )
        across = "learner.role_baseline=group" if self.learner.role_baseline == "group" else f"learner.{advantage=!s}"
        if scheduler.drop_groups_without_signal and self.learner.learns_from_equal_rewards:
            raise ValueError(
                f"scheduler.drop_groups_without_signal drops groups of equal rewards, from which {across} learns too; "
                "set it to false"
            )
        return self

    @model_validator(mode="after")
    def _rewards_before_stages(self) -> Config:
        if (self.stages or self.distill) and self.scheduler.drop_groups_without_signal:
            raise ValueError(
                "scheduler.drop_groups_without_signal looks at rewards before stages have changed them, or a teacher "
                "has judged the tokens; set it to false or remove stages and distill"
            )
        return self

    @model_validator(mode="after")
    def _teacher_can_score(self) -> Config:
        if self.distill is None:
            return self
        if self.rollout.temperature != 1.0:
            raise ValueError(
                "distill compares with the teacher's distribution at temperature 1; set rollout.temperature=1.0 "
                f"instead of {self.rollout.temperature:g}"
            )
        if self.learner.has_critic:
            raise ValueError(
                "distill adds to the advantages of a group, and learner.advantage=gae computes its own from values; "
                "choose another advantage, or remove distill"
            )
        if self.learner.shapes_rewards and not self.distill.reward_weight:
            raise ValueError(
                "learner.kl.in_reward and learner.overlong.max_tokens change rewards, which distill.reward_weight=0 "
                "does not look at; raise it, or remove them"
            )
        if self.distill.hint is not None and self.model.thinking == "strip":
            raise ValueError("distill.hint needs model.thinking=keep: with strip an episode has several prompts")
        if any(stage.name == TEACHER for stage in self.stages):
            raise ValueError(f"stages: with distill the name {TEACHER} is taken; choose another one")
        return self

    @model_validator(mode="after")
    def _weights_can_be_sent(self) -> Config:
        transfer, learner = self.inference.weight_transfer, self.learner
        if transfer != "shm" and learner.engine == "fsdp" and learner.device == "cpu":
            raise ValueError(
                f"inference.weight_transfer={transfer} needs GPUs, but learner.device is cpu; set it to shm"
            )
        return self

    @property
    def served_length(self) -> int:
        """Most tokens of a request to the run's servers: an episode, and what they need beyond it as a teacher."""
        distill = self.distill
        return self.model.max_length + (distill.room if distill is not None and distill.teacher.own_servers else 0)

    @property
    def stall_timeout_s(self) -> float:
        """Maximum seconds in which no episode ends before the run stops."""
        chosen, rollout = self.monitor.stall_timeout_s, self.rollout
        return rollout.episode_timeout_s + rollout.step_timeout_s + STALL_MARGIN_S if chosen is None else chosen

    @property
    def usual_start(self) -> str:
        """Typical start time of servers, learner and workers, as text for the user."""
        return "usually 20-100 s, most of it vLLM's" if self.inference.engine == "vllm" else "usually 10-40 s"

    @property
    def usual_start_s(self) -> float:
        """Seconds of a start on a busy machine."""
        return 180.0 if self.inference.engine == "vllm" else 40.0

    @property
    def usual_start_of_servers(self) -> str:
        return "usually 10-60 s" if self.inference.engine == "vllm" else "usually 5-20 s"

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @property
    def run_folder(self) -> Path:
        return Path(self.runs) / self.name


def load_config(source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """Read, compose, override and validate a config: a YAML file, a mapping of the same keys, or a config that is
    loaded already. Raises ConfigError with one line per mistake."""
    label = str(source) if isinstance(source, str | Path) else "config"
    if isinstance(source, Config):
        source = source.model_dump(mode="json")
    tree = composed(source, Path()) if isinstance(source, Mapping) else read_yaml(Path(source).expanduser())
    overrides = [overrides] if isinstance(overrides, str) else overrides
    _refuse_moved(overrides)
    for override in overrides:
        tree = apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise KeysError("\n".join(f"{label}: {line}" for line in explain_all(error.errors(), Config))) from None


def _refuse_moved(overrides: Sequence[str]) -> None:
    moved = [(override, moved_text(override.partition("=")[0])) for override in overrides]
    if lines := [f"{override!r}: {text}" for override, text in moved if text is not None]:
        raise ConfigError("\n".join(lines))
