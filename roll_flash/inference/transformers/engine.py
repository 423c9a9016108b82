"""Engine `transformers`: our own small server, for tiny models and fast tests.

It implements the same routes as vLLM, so that client, supervision and publication use the same code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.places import Places
from roll_flash.inference.servers.control import Launcher
from roll_flash.inference.servers.engine import ServerEngine


class TransformersEngine(ServerEngine):
    """`InferenceEngine` with `config.servers` processes of plain transformers, float32 on CPU."""

    def __init__(
        self,
        config: InferenceConfig,
        *,
        model_folder: Path,
        max_model_len: int,
        logs: Path,
        places: Places | None = None,
        returns_experts: bool = False,
    ) -> None:
        def command(_: int, host: str, port: int) -> list[str]:
            module = "roll_flash.inference.transformers.server"
            options = ["experts"] if returns_experts else []
            return [sys.executable, "-m", module, str(model_folder), host, str(port), str(max_model_len), *options]

        environment = {"OMP_NUM_THREADS": str(config.threads)}
        launcher = Launcher("transformers", "float32", command, environment, returns_experts=returns_experts)
        super().__init__(
            launcher, config, model_folder=model_folder, max_model_len=max_model_len, logs=logs, places=places
        )
