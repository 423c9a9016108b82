"""Engine `transformers`: our own small server, for tiny models and fast tests.

It implements the same routes as vLLM, so that client, supervision and publication use the same code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from roll_flash.config.tree import InferenceConfig
from roll_flash.inference.servers.control import Launcher


def transformers_launcher(
    config: InferenceConfig, *, model_folder: Path, max_model_len: int, returns_experts: bool
) -> Launcher:
    """Launcher of processes of plain transformers, float32 on CPU."""

    def command(_: int, host: str, port: int) -> list[str]:
        module = "roll_flash.inference.transformers.server"
        options = ["experts"] if returns_experts else []
        return [sys.executable, "-m", module, str(model_folder), host, str(port), str(max_model_len), *options]

    environment = {"OMP_NUM_THREADS": str(config.threads)}
    return Launcher("transformers", "float32", command, environment, returns_experts=returns_experts)
