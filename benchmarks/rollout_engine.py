"""The rollout engine under load: what benchmarks/rollout.py measures in the column `ours`.

`Rollout`, `Scheduler`, `WorkerFleet` on Ray, the client, the conversation with SmolLM2's tokenizer, and the log of
episodes are those of a training run. Only the token servers are mocks, and the learner takes no time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rollout_env import TURNS

from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.tree import Config, RayConfig, load_config
from roll_flash.engines.inference import ClientSpec
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.processes.ray.local_ray import local_ray
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.rollout import Rollout
from roll_flash.scheduling.tasks import SeedTasks
from roll_flash.stream import TrajectoryStream
from roll_flash.system.system import open_fleet, worker_settings

HERE = Path(__file__).parent
GROUP_SIZE = 8
MODEL = "smollm2-135m"
ANSWER = "I open the second door, because the draught says it leads out."


@dataclass(frozen=True)
class Load:
    """One measurement: `steps` batches of `concurrent` episodes after a first one that warms up."""

    concurrent: int
    steps: int
    workers: int
    worker_threads: int = 32
    env_id: str = "rollout_env:FourTurns-v0"


@dataclass(frozen=True)
class Measured:
    """What one load cost. CPU is in ms per turn, memory in MiB; `peer` columns have no worker and no Ray."""

    concurrent: int
    rollouts: int
    seconds: float
    rollouts_per_s: float
    cpu_ms_per_turn: float
    driver_cpu_ms_per_turn: float = 0.0
    workers_cpu_ms_per_turn: float = 0.0
    ray_cpu_ms_per_turn: float = 0.0
    mock_cpu_ms_per_turn: float = 0.0
    resident_mib: float = 0.0
    ray_resident_mib: float = 0.0
    lost: int = 0
    """Episodes that failed, were cancelled or dropped; a load that loses any is no measurement of equal work."""
    machine_load: float = field(default_factory=lambda: os.getloadavg()[0])

    @classmethod
    def of(
        cls,
        concurrent: int,
        rollouts: int,
        seconds: float,
        cpu_s: Mapping[str, float],
        resident_mib: tuple[float, float],
        lost: int,
    ) -> Measured:
        """From the CPU seconds of each role (`Processes.cpu_s`) over the `seconds`, and our and Ray's memory."""
        ms = {role: 1e3 * spent / (rollouts * TURNS) for role, spent in cpu_s.items()}
        return cls(
            concurrent=concurrent,
            rollouts=rollouts,
            seconds=seconds,
            rollouts_per_s=rollouts / seconds,
            cpu_ms_per_turn=ms["driver"] + ms["workers"],
            driver_cpu_ms_per_turn=ms["driver"],
            workers_cpu_ms_per_turn=ms["workers"],
            ray_cpu_ms_per_turn=ms["ray"],
            mock_cpu_ms_per_turn=ms["mock"],
            resident_mib=resident_mib[0],
            ray_resident_mib=resident_mib[1],
            lost=lost,
        )


@contextmanager
def mock_servers(
    count: int, latency_s: float, token_ids: Sequence[int], slots: int = 0
) -> Iterator[list[tuple[str, int]]]:
    """Processes of `mock_token_server.py`: URL and process id of each."""
    command = [sys.executable, str(HERE / "mock_token_server.py"), "--latency-s", str(latency_s), "--text", ANSWER]
    command += ["--slots", str(slots), "--token-ids", ",".join(map(str, token_ids))]
    with ExitStack() as stack:
        servers = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.stdin.close)
            servers.append((f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid))
        yield servers


def answer_token_ids() -> list[int]:
    """What the mock says, in tokens, with the end of turn that the model would sample."""
    tokenizer = load_tokenizer(resolve_model(MODEL))
    return [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]


@dataclass
class Processes:
    """The processes of one run by their role. CPU times are in seconds since they began."""

    workers: list[psutil.Process]
    ray: list[psutil.Process]
    mocks: list[psutil.Process]

    @classmethod
    def find(cls, mock_pids: Sequence[int]) -> Processes:
        mocks = [psutil.Process(pid) for pid in mock_pids]
        others = [process for process in psutil.Process().children(recursive=True) if process not in mocks]
        workers = [process for process in others if _is_worker(process)]
        return cls(workers, [process for process in others if process not in workers], mocks)

    def cpu_s(self) -> dict[str, float]:
        driver = psutil.Process().cpu_times()
        return {
            "driver": driver.user + driver.system,
            "workers": sum(map(_cpu_s, self.workers)),
            "ray": sum(map(_cpu_s, self.ray)),
            "mock": sum(map(_cpu_s, self.mocks)),
        }

    def resident_mib(self) -> tuple[float, float]:
        """Of driver and workers, and of Ray's own; pages that processes share are counted once."""
        ours = [psutil.Process(), *self.workers]
        return sum(map(_resident_mib, ours)), sum(map(_resident_mib, self.ray))


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any("WorkerActor" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _resident_mib(process: psutil.Process) -> float:
    try:
        return process.memory_full_info().pss / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def make_config(load: Load) -> Config:
    return load_config(
        {
            "model": {"path": MODEL, "max_length": 1024},
            "envs": [{"id": load.env_id, "max_turns": TURNS}],
            "scheduler": {
                # Two steps of slack, so that no episode goes stale and all work that is done is counted.
                "async_ratio": 2,
                "groups_per_step": max(1, load.concurrent // GROUP_SIZE),
                "group_size": GROUP_SIZE,
            },
            "rollout": {
                "max_concurrent": load.concurrent,
                "workers": load.workers,
                "worker_threads": load.worker_threads,
                "max_new_tokens": 64,
            },
        }
    )


async def measure(load: Load, servers: Sequence[tuple[str, int]]) -> Measured:
    """Start everything, play, stop everything."""
    config = make_config(load)
    spec = ClientSpec("vllm", tuple(url for url, _ in servers), MODEL, config.model.max_length)
    settings = worker_settings(config, spec, resolve_model(MODEL), needs_sandbox=False)
    with tempfile.TemporaryDirectory(prefix="roll-flash-rollout-") as folder:
        async with local_ray(RayConfig()):
            fleet = open_fleet(config, settings)
            try:
                await fleet.start()
                processes = Processes.find([pid for _, pid in servers])
                with EpisodesWriter(Path(folder)) as episodes:
                    return await _play(config, load, fleet, episodes, processes, [url for url, _ in servers])
            finally:
                await fleet.close()


async def _play(
    config: Config,
    load: Load,
    fleet: WorkerFleet,
    episodes: EpisodesWriter,
    processes: Processes,
    urls: Sequence[str],
) -> Measured:
    env = config.envs[0]
    tasks = SeedTasks(env.id, env.kwargs, env.train_seeds, config.seed)
    async with Rollout(config, fleet, tasks, episodes, TrajectoryStream()) as rollout:
        await _step(rollout, 0, urls)
        before, began, first = processes.cpu_s(), time.perf_counter(), rollout.books()["produced"]
        for version in range(1, load.steps + 1):
            await _step(rollout, version, urls)
        seconds, after, books = time.perf_counter() - began, processes.cpu_s(), rollout.books()
        memory = processes.resident_mib()  # all slots are taken: the next step is under way
    rollouts = books["produced"] - first
    accounted = ("produced", "trained", "waiting")
    lost = sum(count for name, count in books.items() if name not in accounted)
    spent = {role: after[role] - before[role] for role in after}
    return Measured.of(load.concurrent, rollouts, seconds, spent, memory, lost)


async def _step(rollout: Rollout, version: int, urls: Sequence[str]) -> None:
    """One step of a learner that takes no time, and the publication of its weights."""
    async for _ in rollout.groups_for_step():
        pass
    await rollout.version_advanced(version + 1)
    await asyncio.to_thread(_label, urls, version + 1)
    rollout.published(version + 1)


def _label(urls: Sequence[str], version: int) -> None:
    body = json.dumps({"new_version": version}).encode()
    for url in urls:
        urllib.request.urlopen(f"{url}/update_weight_version", data=body, timeout=30).close()


def main() -> None:
    """One load, for a profiler: python benchmarks/rollout_engine.py CONCURRENT STEPS WORKERS [ENV_ID]."""
    concurrent, steps, workers = map(int, sys.argv[1:4])
    load = Load(concurrent, steps, workers, env_id=(sys.argv[4:5] or [Load.env_id])[0])
    print(f"driver {os.getpid()}", file=sys.stderr)
    with mock_servers(1 if concurrent < 4096 else 2, 0.05, answer_token_ids()) as servers:
        print(asyncio.run(measure(load, servers)))


if __name__ == "__main__":
    main()
