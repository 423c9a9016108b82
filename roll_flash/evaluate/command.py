"""`roll-flash eval`: from what a user says to a Config, a model and an evaluation."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.config import Config, load_config
from roll_flash.errors import ConfigError
from roll_flash.evaluate.evaluation import EpisodeRunner, eval_sampling, evaluate, evaluation_plan, is_complete
from roll_flash.evaluate.isolation import require_isolation
from roll_flash.evaluate.result import EvalResult
from roll_flash.inference.openai_client import api_key_from
from roll_flash.run_dir import find_checkpoint, find_run


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The arguments of `roll-flash eval`; None is what the user left out."""

    config: str | None = None
    env: str | None = None
    model: str | None = None
    """A model folder, a name of `roll_flash.models`, a run (`NAME`, `NAME@step`, its folder), or with an endpoint the
    model's name there."""
    tasks: int | None = None
    attempts: int | None = None
    endpoint: str | None = None
    api_key_env: str | None = None
    temperature: float | None = None
    max_concurrent: int | None = None
    out: str | None = None
    allow_weak: bool = False
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What will be run: a whole config, the model folder or name, and where the results go."""

    config: Config
    model: str
    endpoint: str | None
    folder: Path
    about: Mapping[str, Any]


async def run_evaluation(request: EvalRequest) -> tuple[EvalResult, Path]:
    """Run what is missing; returns the result and its folder. Nothing is started for one that is already complete.

    Raises ConfigError before anything is started, else RollFlashError.
    """
    plan = plan_evaluation(request)
    config, sampling = plan.config, eval_sampling(plan.config)
    label = f"{config.env.id} with {plan.about['model']}"

    async def scored_by(runner: EpisodeRunner | None) -> EvalResult:
        return await evaluate(
            runner,
            env=config.env,
            eval=config.eval,
            sampling=sampling,
            max_concurrent=config.rollout.max_concurrent,
            folder=plan.folder,
            label=label,
            about=plan.about,
        )

    if is_complete(plan.folder, config.env, config.eval, sampling, label, plan.about):
        return await scored_by(None), plan.folder
    await require_isolation(plan.config)
    async with _open_runner(plan, request.api_key_env) as runner:
        return await scored_by(runner), plan.folder


def _open_runner(plan: EvalPlan, api_key_env: str | None) -> AbstractAsyncContextManager[EpisodeRunner]:
    from roll_flash.models import resolve_model
    from roll_flash.rollout.worker import ChatEndpoint
    from roll_flash.system import open_rollout

    logs = plan.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if plan.endpoint is not None:
        return open_rollout(plan.config, None, endpoint=ChatEndpoint(plan.endpoint, plan.model, api_key_env), logs=logs)
    return open_rollout(plan.config, resolve_model(plan.model), logs=logs)


def plan_evaluation(request: EvalRequest) -> EvalPlan:
    """Settle all that the request leaves open. Raises ConfigError; starts and writes nothing."""
    endpoint = _endpoint(request)
    model, about, run_config = _model(request)
    config = _config(request, model, run_config)
    model = model or config.model.path
    about = {"model": model, **about}
    folder = Path(request.out).expanduser() if request.out else _default_folder(config, about)
    return EvalPlan(config, model, endpoint, folder, about)


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
    """The model's path, what to note about it, and the config of the run it comes from."""
    if request.model is None:
        return None, {}, None
    if request.endpoint is not None:
        return request.model, {"model": request.model, "endpoint": request.endpoint}, None
    folder = Path(request.model).expanduser()
    if (folder / "config.json").is_file():
        return str(folder), {"model": str(folder), **_weights(folder)}, None
    if _names_a_run(request.model):
        checkpoint = find_checkpoint(request.model)
        run = checkpoint.folder.parent.parent
        if not (checkpoint.hf / "config.json").is_file():
            raise ConfigError(f"{checkpoint.folder}: the checkpoint has no model folder hf/; evaluate another step")
        about = {"model": f"{run.name}@{checkpoint.step}", **_weights(checkpoint.hf)}
        return str(checkpoint.hf), about, run / "config.yaml"
    return request.model, {"model": request.model}, None


def _names_a_run(name: str) -> bool:
    """A model's own name wins over a run that is called the same; that run is reached as `NAME@step` or `runs/NAME`."""
    from roll_flash.models import RECIPES

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
    """CONFIG, or --env alone, or the config of the run that the model comes from; then the options on top."""
    overrides = list(request.overrides)
    for key, value in (
        ("eval.tasks", request.tasks),
        ("eval.attempts", request.attempts),
        ("eval.temperature", request.temperature),
        ("rollout.max_concurrent", request.max_concurrent),
    ):
        if value is not None:
            overrides.append(f"{key}={value}")
    if request.allow_weak:
        overrides.append("sandbox.allow_weak=true")
    source: str | Path | dict[str, Any]
    if request.config is not None:
        source = request.config
    elif run_config is not None and (request.env is None or load_config(run_config).env.id == request.env):
        source = run_config
    elif request.env is None:
        raise ConfigError("nothing to evaluate on: give a CONFIG file, --env ID, or a run's --model")
    elif model is None:
        raise ConfigError("nothing to evaluate: --env needs --model FOLDER, NAME or RUN")
    else:
        source = {"name": "eval", "model": {"path": model}, "env": {"id": request.env}}
    if request.env is not None and not isinstance(source, dict):
        overrides.append(f"env.id={json.dumps(request.env)}")
    if model is not None and not isinstance(source, dict):
        overrides.append(f"model.path={json.dumps(model)}")
    return load_config(source, overrides)


def _default_folder(config: Config, about: Mapping[str, Any]) -> Path:
    """One folder for each plan, so that the same command resumes and a different one never mixes with it."""
    plan = evaluation_plan(config.env, config.eval, eval_sampling(config), about)
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return Path(config.runs) / "eval" / "-".join([_slug(config.env.id), _slug(str(about["model"])), digest])


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.@]+", "-", text).strip("-.")[-60:]


def _weights(folder: Path) -> dict[str, str]:
    """A fingerprint of a model folder, so that results of weights that were replaced since are not taken for its."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
    described = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {"weights": hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]}


def report(result: EvalResult, folder: Path) -> str:
    """What is printed when an evaluation is done."""
    lines = (
        result.table(),
        f"  results in {folder} (results.json, episodes.jsonl, transcripts/)",
    )
    return "\n".join(lines)
