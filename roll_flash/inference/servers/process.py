"""One inference server as a child process: start, wait for its health, stop."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from pathlib import Path

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.inference.servers.control import LOOPBACK, Launcher, ServerControl
from roll_flash.inference.servers.metrics import kv_cache_tokens
from roll_flash.inference.servers.prepare import prepare_weights
from roll_flash.models.prepare import COMPILED_VARIABLE, compiled_folder
from roll_flash.processes.gpus import environment_of
from roll_flash.processes.keys import KEY_VARIABLE
from roll_flash.processes.ports import free_port, keep_port, require_silent_port
from roll_flash.processes.supervise import GuardedProcess
from roll_flash.sandboxes.scratch import make_short_folder
from roll_flash.watchdog.stacks import PART_VARIABLE

PORT_FREED_S = 30.0
"""For whatever took the port of a server that must be started again."""
CAUSE_CHARACTERS = 400
HEALTH_POLL_S = 0.2
ENDED_POLL_S = 0.2

_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception|Killed)\b: *\S.*")
_NO_CAUSE = ("Engine core initialization failed", "EngineDeadError")


class ServerProcess(ServerControl):
    """A child process of this one. `start` can be called again after it has died; the endpoint stays the same."""

    def __init__(
        self,
        index: int,
        launcher: Launcher,
        config: InferenceConfig,
        logs: Path,
        key: str,
        host: str = LOOPBACK,
        gpus: tuple[str, ...] | None = None,
    ) -> None:
        """`host`: address of this machine at which the server listens. `gpus`: the only ones that it sees; None: all
        that this process sees."""
        super().__init__(index, launcher, key)
        self.gpus = gpus or ()
        # vLLM's --device-ids would do, but not for MIG slices, whose UUIDs vLLM takes for numbers of GPUs.
        self._gpu_environment = {} if gpus is None else environment_of(gpus)
        self.log: Path = logs / f"{launcher.name}-{index}.log"
        self.port = config.port + index if config.port else free_port(host)
        self._host = host
        self._kept_port: socket.socket | None = None
        self._config = config
        self._process: GuardedProcess | None = None
        self._endpoint = f"http://{host}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def guard(self) -> int:
        if self._process is None:
            raise InferenceError(f"{self.name} was not started")
        return self._process.pid

    async def start(self) -> None:
        self.starts += 1
        self._reach(self._endpoint)
        await self._wait_for_port(PORT_FREED_S if self.starts > 1 else 0.0)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log_start = self.log.stat().st_size if self.log.exists() else 0
        scratch = make_short_folder("server")
        self._process = GuardedProcess(
            self._launcher.command(self.index, self._host, self.port),
            env=self._environment(scratch),
            log=self.log,
            scratch=scratch,
        )
        await self._wait_until_healthy(log_start)
        self.joined = False
        if not self._launcher.joins_learner:
            await self.post("/init_weight_transfer_engine", {"init_info": {}})
        await self.post("/update_weight_version", {"new_version": "0"})
        self.version = 0
        self.kv_cache_tokens = kv_cache_tokens(await self.metrics_text())

    async def prepare(self, weights: StagedWeights) -> None:
        await prepare_weights(self, weights)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        while self.is_running:  # noqa: ASYNC110 - the kernel sets no event here
            await asyncio.sleep(ENDED_POLL_S)

    async def stop(self) -> None:
        """Stop the process and all its child processes."""
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
            self._process = None

    async def close(self) -> None:
        await super().close()
        if self._kept_port is not None:
            self._kept_port.close()
            self._kept_port = None

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Return our environment, with TMPDIR set to `scratch`, which is removed after the server. Not with the key of
        servers of the user: ours have the run's."""
        return {
            **{name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"},
            "TMPDIR": str(scratch),
            COMPILED_VARIABLE: str(compiled_folder()),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **self._gpu_environment,
            **self._launcher.environment,
            KEY_VARIABLE: self._key,
            PART_VARIABLE: f"server {self.index}",
        }

    async def _wait_for_port(self, patience_s: float) -> None:
        """Keep the port. Raises InferenceError when something else has it: a process that is slow to die, somebody's
        connection."""
        advice = "set inference.port to another one, or to 0" if self._config.port else "start again"
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if self._kept_port is None:
                    self._kept_port = keep_port(self._host, self.port, advice)
                else:
                    await asyncio.to_thread(require_silent_port, self._host, self.port, advice)
                return
            except InferenceError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(HEALTH_POLL_S)

    async def _wait_until_healthy(self, log_start: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._config.start_timeout_s
        while not await self.is_healthy():
            if self._process.returncode is not None:
                cause = _cause(self.log, log_start)
                raise InferenceError(
                    f"{self.name} did not start (exit {self._process.returncode}): {cause}; log: {self.log}"
                )
            if time.monotonic() > deadline:
                raise InferenceError(
                    f"{self.name} was not healthy after {self._config.start_timeout_s:g} s "
                    f"(inference.start_timeout_s): {_cause(self.log, log_start)}; log: {self.log}"
                )
            await asyncio.sleep(HEALTH_POLL_S)


def _cause(log: Path, start: int) -> str:
    """Return the cause of a failure from the log: the last error that names a cause, else the last line."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [(found.group(), number) for number, line in enumerate(lines) if (found := _ERROR_LINE.search(line))]
    causes = [error for error in errors if not any(text in error[0] for text in _NO_CAUSE)] or errors
    if not causes:
        return lines[-1][:CAUSE_CHARACTERS] if lines else "its log is empty"
    text, number = causes[-1]
    # pydantic puts the cause on the next line.
    more = lines[number + 1 : number + 2] if "validation error" in text else []
    return " ".join([text, *more])[:CAUSE_CHARACTERS]
