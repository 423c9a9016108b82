"""`roll-flash eval` and `roll_flash.evaluate`: resolve a user's arguments into a config, a model and an evaluation."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from roll_flash.chat.openai_client import CHECK_TIMEOUT_S, OpenAIChatClient, api_key_from
from roll_flash.config.files import read_yaml
from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import Config, EnvConfig, load_config
from roll_flash.config.user_code import absolute, forget_changed_files
from roll_flash.engines.inference import ChatEndpoint
from roll_flash.errors import ConfigError
from roll_flash.evaluation.evaluation import (
    EpisodeRunner,
    Status,
    eval_sampling,
    evaluate_environments,
    evaluation_plan,
    is_complete,
)
from roll_flash.evaluation.result import EvalResult
from roll_flash.processes.background import FirstFailure, call_in_thread, first_failure
from roll_flash.processes.interrupt import Interrupts, run_to_end
from roll_flash.processes.terminal_logs import make_logs_printable
from roll_flash.run.origin import require_own
from roll_flash.run.run_dir import (
    find_model,
    find_run,
    in_use,
    locked_run,
    make_own_folder,
    require_owned_by_user,
    require_undamaged,
)
from roll_flash.run.trained_tasks import read_trained_tasks
from roll_flash.system.start_checks import Checked, check_parts, check_sandboxes, require_isolation
from roll_flash.terminal import say
from roll_flash.watchdog.watchdog import CLOSES_WITHIN_S, open_watchdog

T = TypeVar("T")

_OF_A_MODEL = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Ends of the names of files on which the answers of a model depend."""

EVAL_OPTIONS = (
    "tasks",
    "attempts",
    "temperature",
    "max_concurrent",
    "max_tokens_total",
    "max_cost",
    "max_minutes",
    "price_prompt",
    "price_completion",
)
"""Fields of `EvalRequest` that are keys of `eval` in a config."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Arguments of `roll-flash eval`; None if the user did not set one."""

    config: str | Config | None = None
    """A YAML file, a folder of task folders, or a loaded config."""
    env: str | None = None
    model: str | None = None
    """A model folder, `smollm2-135m`, `tiny`, a run (`NAME`, `NAME@step`, its folder), or with `endpoint` the model's
    name there."""
    tasks: int | None = None
    attempts: int | None = None
    endpoint: str | None = None
    api_key_env: str | None = None
    temperature: float | None = None
    max_concurrent: int | None = None
    max_tokens_total: int | None = None
    max_cost: float | None = None
    max_minutes: float | None = None
    price_prompt: float | None = None
    price_completion: float | None = None
    pass_at: str | None = None
    """Values of k for pass@k, separated by commas."""
    out: str | None = None
    allow_weak: bool = False
    trust: bool = False
    """Use the config of a run that was made elsewhere: it names code, which runs."""
    overrides: tuple[str, ...] = ()
    status: Status | None = None
    """Callback that shows the progress to the user."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """A resolved evaluation: complete config, model folder or name, and folder of the results."""

    config: Config
    model: str
    endpoint: str | None
    folder: Path
    about: Mapping[str, Any]
    trained: Collection[str] = ()
    """Hashes of the tasks that the model was trained on, if it comes from a run."""
    from_run: bool = False
    """The model is that of a run's checkpoint."""

    def label(self, env: EnvConfig) -> str:
        return f"{env.id} with {self.about['model']}"


def evaluate(
    config: str | Path | Config | None = None,
    *,
    env: str | None = None,
    model: str | Path | None = None,
    tasks: int | None = None,
    attempts: int | None = None,
    pass_at: Sequence[int] = (),
    endpoint: str | None = None,
    api_key_env: str | None = None,
    temperature: float | None = None,
    max_concurrent: int | None = None,
    max_tokens_total: int | None = None,
    max_cost: float | None = None,
    max_minutes: float | None = None,
    price_prompt: float | None = None,
    price_completion: float | None = None,
    out: str | Path | None = None,
    allow_weak: bool = False,
    trust: bool = False,
    overrides: Sequence[str] = (),
) -> EvalResult:
    """Evaluate a model on held-out tasks and return the scores, as `roll-flash eval` with the same options.

    `config` is a YAML file, a folder of task folders or a loaded config; with `model` a run, it may be left out. The
    same call again resumes. Works also where an event loop runs already, as in a notebook.

    Raises RollFlashError, or KeyboardInterrupt after Ctrl-C; the attempts that had ended are kept.
    """
    given = dict(locals())
    make_logs_printable()
    forget_changed_files()
    texts = {name: str(given[name]) for name in ("model", "out") if given[name] is not None}
    source = str(config) if isinstance(config, Path) else config
    ks = ",".join(str(k) for k in pass_at) or None
    words = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    request = EvalRequest(**{**given, **texts, "config": source, "pass_at": ks, "overrides": words})
    return run_to_end(run_evaluation(request))[0]


async def run_evaluation(request: EvalRequest) -> tuple[EvalResult, Path]:
    """Run the missing attempts; return the result and its folder. Starts nothing if the evaluation is already complete.

    Evaluates each environment of the config, those after the first into subfolders of the folder of the first. Raises
    ConfigError before anything is started, else RollFlashError.
    """
    plan = plan_evaluation(request)
    require_owned_by_user(plan.folder)
    if is_complete(plan.config, plan.folder, label=plan.label, about=plan.about):
        say(f"nothing to play: {plan.folder} has all attempts; --out OTHER plays them anew", error=True)
        return await _scored(plan, None), plan.folder
    work = partial(_scored, plan, status=request.status)
    return await run_with_model(plan, work, api_key_env=request.api_key_env), plan.folder


async def run_with_model(
    plan: EvalPlan, work: Callable[[EpisodeRunner], Coroutine[Any, Any, T]], *, api_key_env: str | None
) -> T:
    """Check the plan, start what plays episodes with its model, and await `work` with it; logs go into the plan's
    folder. Raises ConfigError before anything is started, else RollFlashError."""
    serves = plan.endpoint is None
    if plan.from_run:
        await call_in_thread(lambda: require_undamaged(Path(plan.model)))
    checked = await call_in_thread(lambda: check_parts(plan.config, trains=False, serves=serves))
    require_isolation(plan.config, await check_sandboxes(plan.config, checked.sandboxes))
    make_own_folder(plan.folder, "--out")
    if plan.endpoint is not None:
        warning = await check_endpoint(plan.endpoint, plan.model, api_key_env, plan.config.eval)
        if warning:
            say(f"roll-flash: {warning}", error=True)
    else:
        say(f"starting servers and workers ({plan.config.usual_start}); logs in {plan.folder}", error=True)
    for line in checked.fit.notes() if checked.fit else ():
        say(line, error=True)
    with locked_run(plan.folder), in_use(Path(plan.model)), first_failure() as failure:
        watching = open_watchdog(
            plan.config.name,
            plan.folder / "logs",
            _note,
            held_at_most_s=plan.config.stall_timeout_s,
            closes_within_s=CLOSES_WITHIN_S,
        )
        async with Interrupts(_note) as interrupts, watching as watchdog:
            # In a thread: it imports Ray.
            opening = await call_in_thread(lambda: _open_runner(plan, checked, api_key_env, failure))
            async with opening as runner:
                try:
                    return await interrupts.run_until_stopped(work(runner), failure=failure)
                finally:
                    watchdog.close_begins()


async def check_endpoint(
    url: str, model: str, api_key_env: str | None, eval: EvalConfig, *, timeout_s: float = CHECK_TIMEOUT_S
) -> str | None:
    """Request one token, so that errors are reported early and once; return a warning for the user or None.

    Raises InferenceError if the endpoint is down, rejects the key or the model, or sends an invalid answer; ConfigError
    for a token or cost budget if the endpoint does not report usage.
    """
    client = OpenAIChatClient(url, model, api_key_from(api_key_env), max_attempts=2)
    try:
        reply = await client.ask_for_one_token(timeout_s)
    finally:
        await client.close()
    if reply.prompt_tokens is not None and reply.completion_tokens is not None:
        return None
    silence = f"{client.url}: the endpoint does not tell how many tokens were used"
    if eval.max_tokens_total is not None or eval.max_cost is not None:
        raise ConfigError(f"{silence}: --max-tokens-total and --max-cost cannot be kept; use --max-minutes")
    return f"{silence}; tokens and cost will not be known"


def _note(text: str) -> None:
    say(text, error=True)


async def _scored(plan: EvalPlan, runner: EpisodeRunner | None, status: Status | None = None) -> EvalResult:
    return await evaluate_environments(
        runner,
        plan.config,
        plan.folder,
        label=plan.label,
        max_concurrent=plan.config.eval.max_concurrent or plan.config.rollout.max_concurrent,
        about=plan.about,
        status=status,
        trained=plan.trained,
    )


def _open_runner(
    plan: EvalPlan, checked: Checked, api_key_env: str | None, failure: FirstFailure
) -> AbstractAsyncContextManager[EpisodeRunner]:
    from roll_flash.system.system import open_rollout

    logs = plan.folder / "logs"
    if plan.endpoint is not None:
        endpoint = ChatEndpoint(plan.endpoint, plan.model, api_key_from(api_key_env))
        return open_rollout(plan.config, checked, failure, endpoint=endpoint, logs=logs)
    return open_rollout(plan.config, checked, failure, logs=logs)


def plan_evaluation(request: EvalRequest) -> EvalPlan:
    """Resolve everything that the request leaves open. Raises ConfigError; starts and writes nothing."""
    endpoint = _endpoint(request)
    model, about, run_config = _model(request)
    config = _config(request, model, run_config)
    model = model or config.model.path
    about = {"model": model, **about, **_settings(config, endpoint)}
    folder = Path(request.out).expanduser() if request.out else _default_folder(config, about)
    trained = read_trained_tasks(run_config.parent / "logs") if run_config is not None else ()
    return EvalPlan(config, model, endpoint, folder, about, trained, from_run=run_config is not None)


def _endpoint(request: EvalRequest) -> str | None:
    if request.endpoint is None:
        if request.api_key_env:
            raise ConfigError("--api-key-env is for an --endpoint; give one, for example http://localhost:8000/v1")
        return None
    if not re.match(r"https?://[^/]", request.endpoint):
        raise ConfigError(f"--endpoint {request.endpoint}: must look like http://host:port/v1")
    if not request.model:
        raise ConfigError("--endpoint needs --model NAME: the model's name at that endpoint")
    api_key_from(request.api_key_env)
    return request.endpoint


def _model(request: EvalRequest) -> tuple[str | None, dict[str, Any], Path | None]:
    """Return the model's path, metadata about it, and the config of the run it comes from."""
    if request.model is None:
        return None, {}, None
    if request.endpoint is not None:
        return request.model, {"model": request.model, "endpoint": request.endpoint}, None
    folder = Path(request.model).expanduser()
    if (folder / "config.json").is_file():
        return str(folder), {"model": str(folder)}, None
    if _names_a_run(request.model):
        checkpoint = find_model(request.model)
        run = checkpoint.folder.parent.parent
        return str(checkpoint.hf), {"model": f"{run.resolve().name}@{checkpoint.step}"}, run / "config.yaml"
    return request.model, {"model": request.model}, None


def _names_a_run(name: str) -> bool:
    """True if `name` is a run. A model's name wins over an equal run name; use `NAME@step` or `runs/NAME` for the
    run."""
    from roll_flash.models.prepare import RECIPES

    if name in RECIPES:
        return False
    try:
        find_run(name.partition("@")[0])
    except ConfigError:
        if "@" in name:
            raise
        return False
    return True


def _config(request: EvalRequest, model: str | None, run_config: Path | None) -> Config:
    """Load CONFIG, or only --env, or the config of the model's run; then apply the options."""
    overrides = [*request.overrides, *_options(request)]
    source: str | Path | dict[str, Any] | Config
    if isinstance(request.config, Config):
        source = request.config
    elif request.config is not None and (Path(request.config).expanduser() / "config.yaml").is_file():
        raise ConfigError(f"{request.config}: is a run; evaluate its model with --model {request.config}")
    elif request.config is not None and Path(request.config).expanduser().is_dir():
        tree = _task_folders(request, request.config, model)
        its_model = {**_of_its_model(run_config).get("model", {}), **tree["model"]}
        return load_config({**tree, "model": its_model}, overrides)
    elif request.config is not None:
        source = request.config
        if request.env is not None and "envs" not in read_yaml(Path(source).expanduser()):
            overrides.insert(0, f"envs={json.dumps([{'id': request.env}])}")
    elif run_config is not None and (request.env is None or _has_environment(load_config(run_config), request.env)):
        require_own(run_config.parent, trusted=request.trust)
        source = run_config
    elif request.env is None:
        raise ConfigError("nothing to evaluate on: give a CONFIG file, --env ID, or a run's --model")
    elif model is None:
        raise ConfigError("nothing to evaluate: --env needs --model FOLDER, NAME or RUN")
    else:
        source = {**_of_its_model(run_config), "name": "eval", "envs": [{"id": request.env}]}
    if model is not None:
        overrides = ["model.revision=null", *overrides, f"model.path={json.dumps(model)}"]
    config = load_config(source, overrides)
    return config if request.env is None else _with_one_environment(config, request.env)


def _of_its_model(run_config: Path | None) -> dict[str, Any]:
    """Return what the config of a model's run says of each answer, whatever the environment: its length, thinking and
    end. It names no code, so the run may have been made elsewhere."""
    if run_config is None:
        return {}
    run = load_config(run_config)
    return {
        "model": run.model.model_dump(mode="json", exclude={"path", "revision"}),
        "rollout": run.rollout.model_dump(mode="json", include={"max_new_tokens", "stop"}),
    }


def _has_environment(config: Config, env_id: str) -> bool:
    return any(absolute(env.id) == absolute(env_id) for env in config.envs)


def _with_one_environment(config: Config, env_id: str) -> Config:
    """Keep the environment `env_id` of the config; if it has none, its first one with another id."""
    first = config.envs[0].model_copy(update={"id": env_id, "task_source": None, "data": None, "reward": ()})
    named = (env for env in config.envs if absolute(env.id) == absolute(env_id))
    return config.model_copy(update={"envs": (next(named, first),)})


def _task_folders(request: EvalRequest, folder: str, model: str | None) -> dict[str, Any]:
    from roll_flash.evaluation.task_folder_config import task_folder_config

    if request.env is not None:
        raise ConfigError(f"{folder} is a folder of tasks and --env an environment; give one of them")
    if model is None:
        raise ConfigError("nothing to evaluate: a folder of tasks needs --model FOLDER, NAME or RUN")
    return task_folder_config(folder, model, at_endpoint=request.endpoint is not None)


def _options(request: EvalRequest) -> list[str]:
    """Convert command-line options to overrides of the config."""
    found = [f"eval.{name}={value}" for name in EVAL_OPTIONS if (value := getattr(request, name)) is not None]
    if request.pass_at is not None:
        if not re.fullmatch(r"\d+(,\d+)*", request.pass_at):
            raise ConfigError(f"--pass-at {request.pass_at}: numbers separated by commas, such as 1,4")
        found.append(f"eval.pass_at=[{request.pass_at}]")
    if request.allow_weak:
        found.append("sandbox.allow_weak=true")
    return found


def _settings(config: Config, endpoint: str | None) -> dict[str, Any]:
    """Return what else the scores depend on, as far as it differs from the defaults: what the model sees, the weights
    of a folder, who else plays, and sandboxes."""
    own = {"revision", "max_length", "thinking", "chat_template_kwargs"} if endpoint is None else {"max_length"}
    seen = config.model.model_dump(mode="json", include=own, exclude_defaults=True)
    weights = _weights(Path(config.model.path)) if endpoint is None else {}
    boxes = {"image", "memory_mb", "cpus", "pids"}
    others = config.model_dump(mode="json", include={"policies": True, "sandbox": boxes}, exclude_defaults=True)
    return {**weights, **seen, **{name: values for name, values in others.items() if values}}


def _default_folder(config: Config, about: Mapping[str, Any]) -> Path:
    """Return one folder per plan, so that the same command resumes and a different command never mixes with it."""
    plan = evaluation_plan(config.envs[0], config.eval, eval_sampling(config), about)
    if others := config.envs[1:]:
        plan["other_envs"] = [evaluation_plan(env, config.eval, eval_sampling(config), about) for env in others]
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return Path(config.runs) / "eval" / "-".join([_slug(config.envs[0].id), _slug(str(about["model"])), digest])


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.@]+", "-", text).strip("-.")[-60:]


def _weights(model: Path) -> dict[str, str]:
    """Fingerprint of the folder of a model or an adapter, or of a GGUF file, so that results of replaced weights,
    tokenizers and chat templates are not reused; empty for a name."""
    files = [model] if model.is_file() else sorted(model.iterdir()) if model.is_dir() else []
    files = [path for path in files if path.suffix in _OF_A_MODEL]
    if not files:
        return {}
    described = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {"weights": hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]}
