"""Opens inference engines by name. Plug-ins register in the entry point group `roll_flash.inference_engines`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from roll_flash.config.tree import Config, InferenceConfig
from roll_flash.engines.inference import InferenceEngine
from roll_flash.engines.places import Places
from roll_flash.errors import ConfigError
from roll_flash.inference.servers.control import LOOPBACK
from roll_flash.models.shape import has_experts
from roll_flash.processes.ports import require_free_port

GROUP = "roll_flash.inference_engines"
BUILT_IN = ("transformers", "vllm")


def check_engine(config: InferenceConfig, model_folder: Path, *, trains: bool) -> None:
    """Check the config for errors that are detectable before `open_engine` and the start of its servers.

    Raises ConfigError; ModelError if the engine cannot serve the model here or, with `trains`, cannot load new weights
    for it; InferenceError if a port is in use.
    """
    if config.engine not in BUILT_IN:
        _plug_in(config.engine)
    elif config.engine == "vllm":
        from roll_flash.inference.vllm.server import check_vllm

        check_vllm(config, model_folder, trains=trains)
    if config.port:
        for index in range(config.servers):
            require_free_port(LOOPBACK, config.port + index, "set inference.port to another one, or to 0")


def computes_on_gpus(config: InferenceConfig) -> bool | None:
    """Return whether the servers of `config.engine` compute on GPUs, as installed here; None if that is not known.

    Raises InferenceError if vLLM is wanted, but not installed.
    """
    match config.engine:
        case "vllm":
            from roll_flash.inference.vllm.server import vllm_device

            return vllm_device() == "cuda"
        case "transformers":
            return False
    return None


def why_no_replay(config: Config, model_folder: Path) -> str | None:
    """Return why the learner does not replay the server's choice of experts; None if it does, "" if there is no choice
    to replay or nobody wants it.

    Raises ConfigError if `learner.routing_replay` is true and it is not possible.
    """
    wanted = config.learner.routing_replay
    if wanted is False:
        return ""
    if not has_experts(model_folder):
        if wanted is True:
            raise ConfigError("learner.routing_replay: the model has no experts; set it to auto")
        return ""
    if (reason := _why_no_experts_returned(config.inference)) is None:
        from roll_flash.models.routing import why_not_replayed  # imports torch, which takes seconds

        reason = why_not_replayed(model_folder)
    if reason is not None and wanted is True:
        raise ConfigError(f"learner.routing_replay: {reason}; set it to auto or false")
    return reason


def _why_no_experts_returned(config: InferenceConfig) -> str | None:
    match config.engine:
        case "vllm":
            from roll_flash.inference.vllm.server import why_no_experts_returned

            return why_no_experts_returned(config)
        case "transformers":
            return None
    return f"inference.engine {config.engine} is not known to return experts"


def open_engine(
    config: InferenceConfig,
    *,
    model_folder: Path,
    max_model_len: int,
    logs: Path,
    places: Places | None = None,
    returns_experts: bool = False,
) -> InferenceEngine:
    """Create the engine `config.engine` with `config.servers` servers, not started; server logs go into `logs`.

    `places`: where the servers run in a Ray cluster; None: they are child processes of this one. `returns_experts`:
    answers have the experts of each token (`why_no_replay` says if that is possible). A plug-in is called with the
    other arguments of this function. Raises ConfigError if the name is not registered.
    """
    model: dict[str, Any] = {"model_folder": model_folder, "max_model_len": max_model_len}
    match config.engine:
        case "vllm":
            from roll_flash.inference.vllm.server import vllm_launcher

            shares_gpu = places is not None and places.shares_gpus
            launcher = vllm_launcher(config, **model, shares_gpu=shares_gpu, returns_experts=returns_experts)
        case "transformers":
            from roll_flash.inference.transformers.launcher import transformers_launcher

            launcher = transformers_launcher(config, **model, returns_experts=returns_experts)
        case _:
            engine: InferenceEngine = _plug_in(config.engine).load()(config, **model, logs=logs, places=places)
            return engine
    from roll_flash.inference.servers.engine import ServerEngine

    return ServerEngine(launcher, config, **model, logs=logs, places=places)


def _plug_in(name: str) -> EntryPoint:
    plug_ins = {point.name: point for point in entry_points(group=GROUP)}
    if name not in plug_ins:
        known = ", ".join(sorted({*BUILT_IN, *plug_ins}))
        raise ConfigError(f"inference.engine: no engine is named {name!r}; known: {known}")
    return plug_ins[name]
