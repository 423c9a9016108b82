"""What the gateway adds to a call of the model, and whether it keeps up with 512 sessions.

    python benchmarks/gateway.py [--quick] [--json]

Agents of several turns ask a gateway in a process of its own (with its sessions, records and episodes file), which asks
the mock token server; each call sends the whole conversation so far, as agents do: a system prompt of 400 words, then
what was said. The overhead of a call is its time less the median of the same client asking the mock directly, at the
same concurrency and between the same calls. With 512 sessions the mock answers after two seconds: some 250 calls
a second arrive. `cpu_ms_per_call` is the gateway's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
ADMIN = {"Authorization": "Bearer benchmark"}
ANSWER = "The next thing to do is to look at the file that the error names, and then to run the tests once more. " * 2
SYSTEM = " ".join(f"Rule {number}: look before you leap, and say what you did." for number in range(36))
NEWS = "The tests printed: 3 passed, 1 failed in 0.42 s. What now?"
CASES = ((1, 6, 0.05), (16, 6, 0.05), (128, 4, 0.5), (512, 4, 2.0))
"""Sessions, turns, seconds that the mock takes."""


@dataclass
class Measured:
    """Seconds of each call, and what was answered wrong."""

    calls_s: list[float] = field(default_factory=list)
    direct_s: list[float] = field(default_factory=list)
    errors: int = 0


def tokenizer() -> Any:
    from roll_flash.chat.tokenizer import load_tokenizer
    from roll_flash.models.prepare import resolve_model

    return load_tokenizer(resolve_model(MODEL))


async def serve(endpoint: str, folder: Path) -> None:
    """The gateway's process: prints its port, and its CPU time per call when its standard input is closed."""
    from roll_flash.engines.inference import ClientSpec
    from roll_flash.gateway.server import GatewayServer
    from roll_flash.gateway.sessions.routes import SessionRoutes
    from roll_flash.gateway.token_backend import TokenBackend
    from roll_flash.inference.client.token_client import open_client
    from roll_flash.monitor.episodes import EpisodesWriter

    words = tokenizer()
    client = open_client(ClientSpec("vllm", (endpoint,), MODEL, 16384), words)
    backend = TokenBackend(client, words, model=MODEL, max_length=16384)
    gateway = GatewayServer(backend, call_timeout_s=120.0, admin_key=ADMIN["Authorization"].split()[1])
    with EpisodesWriter(folder) as episodes:
        SessionRoutes(gateway, episodes, verifier=None, idle_s=3600.0)
        print(await gateway.start(), flush=True)
        began = _cpu_s()
        end = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, end.set)
        await end.wait()
        used_s = _cpu_s() - began
        await gateway.close()
        await client.close()
    calls = gateway.metrics()["gateway_calls"]
    failed = gateway.metrics()["gateway_failed"] + gateway.metrics()["gateway_refused"]
    print(json.dumps({"cpu_ms_per_call": 1e3 * used_s / calls, "calls": calls, "failed": failed}))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def play(http: aiohttp.ClientSession, gateway: str, mock: str, turns: int, found: Measured) -> None:
    """One session: opened, played, scored. Before each call of the gateway the mock is asked directly."""
    async with http.post(f"{gateway}/v1/sessions", json={}, headers=ADMIN) as response:
        session = await response.json()
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for _ in range(turns):
        messages.append({"role": "user", "content": NEWS})
        body = {"model": MODEL, "messages": messages, "max_tokens": 256}
        began = time.perf_counter()
        async with http.post(f"{mock}/v1/chat/completions", json=body) as response:
            await response.read()
        found.direct_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        async with http.post(f"{gateway}/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
        found.calls_s.append(time.perf_counter() - began)
        if response.status != 200 or answer["choices"][0]["message"]["content"] != ANSWER.strip():
            found.errors += 1
            return
        messages.append(answer["choices"][0]["message"])
    async with http.post(f"{gateway}/v1/reward", json={"reward": 1.0}, headers=headers) as response:
        scored = await response.json()
    found.errors += (scored.get("turns"), scored.get("samples")) != (turns, 1)


async def agents(gateway: str, mock: str, sessions: int, turns: int) -> Measured:
    found = Measured()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as http:
        await play(http, gateway, mock, 1, Measured())
        async with asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(play(http, gateway, mock, turns, found))
                await asyncio.sleep(0.004)  # agents do not all begin in the same instant
    return found


def run_case(sessions: int, turns: int, latency_s: float) -> dict[str, float]:
    token_ids = [*tokenizer().encode(ANSWER.strip(), add_special_tokens=False), 2]
    listed = ",".join(str(token) for token in token_ids)
    python = [sys.executable]
    mock_command = [*python, str(HERE / "mock_token_server.py"), "--latency-s", str(latency_s), "--text", ANSWER]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*mock_command, "--token-ids", listed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as mock,
    ):
        mock_url = f"http://127.0.0.1:{_first_line(mock)}"
        served = [*python, __file__, "--serve", mock_url, "--folder", folder]
        with subprocess.Popen(served, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gateway:
            url = f"http://127.0.0.1:{_first_line(gateway)}"
            began = time.perf_counter()
            found = uvloop.run(agents(url, mock_url, sessions, turns))
            took_s = time.perf_counter() - began
            told = json.loads(gateway.communicate("", timeout=60)[0])
        mock.communicate("", timeout=60)
        recorded = sum(1 for _ in (Path(folder) / "step_000000.jsonl").open()) - 1
    direct_s = statistics.median(found.direct_s)
    overhead_ms = sorted(1e3 * (call_s - direct_s) for call_s in found.calls_s)
    return {
        "overhead_p50_ms": statistics.median(overhead_ms),
        "overhead_p95_ms": overhead_ms[int(0.95 * len(overhead_ms))],
        "cpu_ms_per_call": told["cpu_ms_per_call"],
        "calls_per_s": len(found.calls_s) / took_s,
        "calls": float(len(found.calls_s)),
        "sessions_recorded": float(recorded),
        "errors": float(found.errors + told["failed"]),
        "load_average": os.getloadavg()[0],
    }


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def compare(*, quick: bool, as_json: bool) -> None:
    figures = {}
    for sessions, turns, latency_s in CASES[1::2] if quick else CASES:
        figures[f"sessions_{sessions}"] = run_case(sessions, turns, latency_s)
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    print("| sessions | overhead p50 | p95 | CPU of the gateway per call | calls/s | recorded | errors |")
    print("|---|---|---|---|---|---|---|")
    for name, row in figures.items():
        sessions = name.removeprefix("sessions_")
        print(
            f"| {sessions} | {row['overhead_p50_ms']:.2f} ms | {row['overhead_p95_ms']:.2f} ms "
            f"| {row['cpu_ms_per_call']:.2f} ms | {row['calls_per_s']:.0f} "
            f"| {row['sessions_recorded']:.0f} of {sessions} | {row['errors']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 and 512 sessions only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.folder))
    else:
        compare(quick=options.quick, as_json=options.json)


if __name__ == "__main__":
    main()
