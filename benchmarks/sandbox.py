"""Sandboxes side by side: ours, `docker exec`, and SWE-ReX in a virtual environment of its own.

    python benchmarks/sandbox.py [--quick] [--json] [--provider docker|local]

Prints a table (to standard error with --json, which prints one object of figures on standard output) and, unless
--quick, writes results/sandbox.json and results/sandbox.md. SWE-ReX's server runs on this machine without a container,
which is in its favour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from machine import machine

from roll_flash.sandboxes import Sandbox, SandboxPool, SandboxSpec, list_sandboxes
from roll_flash.sandboxes.protocol import Provider
from roll_flash.sandboxes.providers import connect_provider

PEER_VERSION = "1.4.0"
RESULTS = Path(__file__).parent / "results"
RUN = f"benchmark-{os.getpid()}"

PEER_PROGRAM = """
import asyncio, json, statistics, sys, time
from swerex.deployment.local import LocalDeployment
from swerex.runtime.remote import RemoteRuntime
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
import socket, subprocess

async def main(count):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "swerex.server", "--auth-token", "t", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        runtime = RemoteRuntime(auth_token="t", host="http://127.0.0.1", port=port)
        await runtime.wait_until_alive(timeout=30)
        started = time.perf_counter() - began
        async def timed(call):
            began = time.perf_counter()
            await call()
            return (time.perf_counter() - began) * 1e3
        execs = [await timed(lambda: runtime.execute(Command(command=["/bin/true"]))) for _ in range(count)]
        await runtime.create_session(CreateBashSessionRequest())
        action = BashAction(command="x=$((x+1))")
        shells = [await timed(lambda: runtime.run_in_session(action)) for _ in range(count // 10)]
        began = time.perf_counter()
        await asyncio.gather(*(runtime.execute(Command(command=["/bin/true"])) for _ in range(count)))
        rate = count / (time.perf_counter() - began)
        quantiles = statistics.quantiles(execs, n=20)
        print(json.dumps({"start_s": started, "exec_p50_ms": statistics.median(execs), "exec_p95_ms": quantiles[18],
                          "shell_p50_ms": statistics.median(shells), "exec_per_s": rate}))
    finally:
        server.kill()
        server.wait()

asyncio.run(main(int(sys.argv[1])))
"""

BUSY_CONTROLLER = """
import asyncio, sys
from roll_flash.sandboxes import SandboxPool
async def main():
    async with SandboxPool(provider=sys.argv[1], size=0, run=sys.argv[2]) as pool:
        async def work():
            async with pool.lease() as sandbox:
                await sandbox.exec("sleep 600", timeout=600)
        tasks = [asyncio.ensure_future(work()) for _ in range(20)]
        while pool.stats().leased < 20:
            await asyncio.sleep(0.05)
        print("ready", flush=True)
        await asyncio.gather(*tasks)
asyncio.run(main())
"""


@dataclass(frozen=True)
class Figure:
    """One row of the table. `target` is an upper bound unless `at_least`."""

    name: str
    unit: str
    value: float
    target: float
    at_least: bool = False
    docker_exec: float | None = None
    swe_rex: float | None = None

    @property
    def reached(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


async def timed_ms(count: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        took.append((time.perf_counter() - began) * 1e3)
    return took


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[18]


async def open_one(provider: Provider) -> Sandbox:
    return await provider.open(SandboxSpec(), run=RUN, timeout_s=60)


async def round_trips(provider: Provider, count: int) -> dict[str, float]:
    sandbox = await open_one(provider)
    try:
        await timed_ms(20, lambda: sandbox.exec(["/bin/true"]))
        execs = await timed_ms(count, lambda: sandbox.exec(["/bin/true"]))
        async with sandbox.shell() as shell:
            await shell.run("x=0")
            shells = await timed_ms(count, lambda: shell.run("x=$((x+1))"))
            assert (await shell.run("echo $x")).stdout == f"{count}\n".encode()
        return {"exec_p50": statistics.median(execs), "exec_p95": p95(execs), "shell_p50": statistics.median(shells)}
    finally:
        await sandbox.close()


async def throughput(provider: Provider, sandboxes: int, each: int) -> float:
    opened = await asyncio.gather(*(open_one(provider) for _ in range(sandboxes)))
    try:
        began = time.perf_counter()
        await asyncio.gather(*(timed_ms(each, lambda box=box: box.exec(["/bin/true"])) for box in opened))
        return sandboxes * each / (time.perf_counter() - began)
    finally:
        await asyncio.gather(*(box.close() for box in opened))


async def lease_ms(provider: str, count: int) -> float:
    async with SandboxPool(provider=provider, size=4, run=RUN) as pool:
        await pool.start()
        took = []
        for _ in range(count):
            for _ in range(300):
                await asyncio.sleep(0.1)
                if pool.stats().ready >= 4:
                    break
            began = time.perf_counter()
            async with pool.lease() as sandbox:
                took.append((time.perf_counter() - began) * 1e3)
                assert (await sandbox.exec("true")).ok
        return statistics.median(took)


async def up_and_gone_s(provider: Provider, count: int) -> tuple[float, float]:
    began = time.perf_counter()
    opened = await asyncio.gather(*(open_one(provider) for _ in range(count)))
    up = time.perf_counter() - began
    began = time.perf_counter()
    await asyncio.gather(*(box.close() for box in opened))
    return up, time.perf_counter() - began


async def idle_mib(provider: Provider) -> float:
    sandbox = await open_one(provider)
    try:
        await asyncio.sleep(0.5)
        used = (await sandbox.stats()).memory_bytes
        return (used or 0) / 2**20
    finally:
        await sandbox.close()


async def flood(provider: Provider) -> tuple[float, float]:
    """Seconds for 1 GB with a 64 KiB cap, and how much the controller's peak memory grew (MiB)."""
    sandbox = await open_one(provider)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        result = await sandbox.exec("head -c 1000000000 /dev/zero", max_output=1 << 16, timeout=120)
        took = time.perf_counter() - began
        assert result.stdout_bytes == 1_000_000_000
        return took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    finally:
        await sandbox.close()


def left_after_kill(provider: str) -> int:
    """Containers 2 s after SIGKILL of a controller with 20 commands running."""
    command = [sys.executable, "-c", BUSY_CONTROLLER, provider, f"{RUN}-kill"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    time.sleep(2.0)
    return sum(entry.run == f"{RUN}-kill" for entry in list_sandboxes())


def docker_exec_ms(count: int) -> list[float]:
    image = "roll-flash-sandbox:latest"
    name = f"{RUN}-exec"
    start = ["docker", "run", "-d", "--rm", "--init", "--network", "none", "--name", name, image, "sleep", "600"]
    subprocess.run(start, check=True, capture_output=True)
    try:
        took = []
        for _ in range(count):
            began = time.perf_counter()
            subprocess.run(["docker", "exec", name, "/bin/true"], check=True)
            took.append((time.perf_counter() - began) * 1e3)
        return took
    finally:
        subprocess.run(["docker", "rm", "-f", name], check=True, capture_output=True)


def swe_rex(count: int) -> dict[str, float]:
    """SWE-ReX's figures; empty, with a line that says why, if it cannot be installed."""
    with tempfile.TemporaryDirectory(prefix="roll-flash-peer-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin/python")
        install = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            f"swe-rex=={PEER_VERSION}",
            "aiohttp",
        ]
        done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            run = [python, "-c", PEER_PROGRAM, str(count)]
            done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            print(f"SWE-ReX could not be measured: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return {}
        figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return figures


async def measure(name: str, quick: bool) -> list[Figure]:
    count = 200 if quick else 2000
    provider = await connect_provider(name)
    try:
        trips = await round_trips(provider, count)
        rate = await throughput(provider, 8 if quick else 32, 50 if quick else 200)
        up, gone = await up_and_gone_s(provider, 10 if quick else 50)
        flood_s, growth = await flood(provider)
        idle = await idle_mib(provider) if name == "docker" else 0.0
    finally:
        await provider.close()
    lease = await lease_ms(name, 5 if quick else 30)
    left = await asyncio.to_thread(left_after_kill, name)
    peer = {} if quick else await asyncio.to_thread(swe_rex, 300)
    execs = [] if quick or name != "docker" else await asyncio.to_thread(docker_exec_ms, 20)
    slow_exec = p95(execs) if execs else None
    return [
        Figure("exec round trip p50", "ms", trips["exec_p50"], 1.5, False, _median(execs), peer.get("exec_p50_ms")),
        Figure(
            "exec round trip p95",
            "ms",
            trips["exec_p95"],
            6,
            False,
            slow_exec,
            peer.get("exec_p95_ms"),
        ),
        Figure("stateful shell command p50", "ms", trips["shell_p50"], 2.5, False, None, peer.get("shell_p50_ms")),
        Figure(f"{8 if quick else 32} sandboxes in parallel", "exec/s", rate, 1000, True, None, peer.get("exec_per_s")),
        Figure("lease from a warm pool p50", "ms", lease, 5),
        Figure(f"{10 if quick else 50} hardened sandboxes up", "s", up, 3),
        Figure(f"{10 if quick else 50} hardened sandboxes gone", "s", gone, 2),
        Figure("idle container", "MiB", idle, 4),
        Figure("1 GB flood, 64 KiB cap", "s", flood_s, 1.5),
        Figure("controller memory growth in the flood", "MiB", growth, 4),
        Figure("left 2 s after kill -9 with 20 commands", "containers", left, 0),
        Figure("start of one", "s", up / (10 if quick else 50), 1.0, False, None, peer.get("start_s")),
    ]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def table(figures: list[Figure], provider: str) -> str:
    lines = [
        f"`{provider}` provider on {machine()}, load {os.getloadavg()[0]:.1f}.",
        "",
        "| figure | ours | target | reached | docker exec | SWE-ReX " + PEER_VERSION + " |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures:
        others = [f"{value:.3g}" if value is not None else "" for value in (row.docker_exec, row.swe_rex)]
        bound = f"{'≥' if row.at_least else '≤'} {row.target:g}"
        lines.append(
            f"| {row.name} | {row.value:.3g} {row.unit} | {bound} | {'yes' if row.reached else 'no'} | "
            f"{others[0]} | {others[1]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, without the peers; under a minute")
    parser.add_argument("--json", action="store_true", help="one object of figures on standard output")
    parser.add_argument("--provider", default="docker", choices=["docker", "local"])
    options = parser.parse_args()
    figures = asyncio.run(measure(options.provider, options.quick))
    text = table(figures, options.provider)
    print(text, file=sys.stderr if options.json else sys.stdout)
    summary = {
        row.name: {
            "value": row.value,
            "unit": row.unit,
            "target": row.target,
            "reached": row.reached,
            "docker_exec": row.docker_exec,
            "swe_rex": row.swe_rex,
        }
        for row in figures
    }
    if options.json:
        print(json.dumps(summary))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        stem = "sandbox" if options.provider == "docker" else f"sandbox_{options.provider}"
        (RESULTS / f"{stem}.json").write_text(json.dumps(summary, indent=1) + "\n")
        (RESULTS / f"{stem}.md").write_text("# Sandboxes\n\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
