"""Inference engines by name. Others come as plug-ins of the entry point group `roll_flash.inference_engines`."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from roll_flash.config import InferenceConfig
from roll_flash.errors import ConfigError
from roll_flash.inference.engine import InferenceEngine

GROUP = "roll_flash.inference_engines"
BUILT_IN = ("transformers", "vllm")


def open_engine(config: InferenceConfig, *, model_folder: Path, max_model_len: int, logs: Path) -> InferenceEngine:
    """The engine `config.engine` over `config.servers` servers, not started yet; server logs go into `logs`.

    A plug-in is called with the same arguments as this function. Raises ConfigError for a name nobody registered.
    """
    arguments: dict[str, Any] = {"model_folder": model_folder, "max_model_len": max_model_len, "logs": logs}
    match config.engine:
        case "vllm":
            from roll_flash.inference.vllm_server import VllmEngine

            return VllmEngine(config, **arguments)
        case "transformers":
            from roll_flash.inference.transformers_engine import TransformersEngine

            return TransformersEngine(config, **arguments)
    plug_ins = {point.name: point for point in entry_points(group=GROUP)}
    if config.engine not in plug_ins:
        known = ", ".join(sorted({*BUILT_IN, *plug_ins}))
        raise ConfigError(f"inference.engine: no engine is named {config.engine!r}; known: {known}")
    engine: InferenceEngine = plug_ins[config.engine].load()(config, **arguments)
    return engine
