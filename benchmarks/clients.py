"""CPU time of one call of a model server: our HTTP client, aiohttp and httpx against the same mock server.

    python benchmarks/clients.py [--quick] [--json]

Each client asks for a turn of 64 tokens after a prompt of 512 and reads tokens, logprobs and versions from the answer;
the mock answers after 50 ms, or after a second with 10,000 requests in flight. Every case is a process of its own on
uvloop, as Ray's workers are. The mock's own time is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

HERE = Path(__file__).parent
PROMPT = list(range(1, 513))
TURN = list(range(1, 65))
CLIENTS = ("ours", "aiohttp", "httpx")
SLOW = {("httpx", 10_000), ("httpx", 512)}
"""Where a few calls show it: the pool of httpx looks at every connection for every request."""

Call = Callable[[], Awaitable[int]]


def body() -> dict[str, object]:
    parameters = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "detokenize": False}
    return {"request_id": "r", "token_ids": PROMPT, "sampling_params": parameters}


async def ours(url: str) -> Call:
    """The whole client: router, admission, deadline, decoding into arrays."""
    from roll_flash.inference.client import open_client
    from roll_flash.inference.engine import ClientSpec
    from roll_flash.types import SamplingParams

    client = open_client(ClientSpec("vllm", (url,), "mock", 4096))
    sampling = SamplingParams(max_new_tokens=64)

    async def call() -> int:
        answer = await client.generate(PROMPT, sampling, request_id="r", session="s", timeout_s=600)
        return len(answer.token_ids)

    return call


async def aiohttp(url: str) -> Call:
    import aiohttp

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))

    async def call() -> int:
        async with session.post(f"{url}/inference/v1/generate", data=json.dumps(body()).encode()) as response:
            return _tokens(await response.read())

    return call


async def httpx(url: str) -> Call:
    import httpx

    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None)

    async def call() -> int:
        return _tokens((await client.post(f"{url}/inference/v1/generate", json=body())).content)

    return call


def _tokens(content: bytes) -> int:
    choice = json.loads(content)["choices"][0]
    return len([entry["logprob"] for entry in choice["logprobs"]["content"]])


async def measure(client: str, url: str, concurrent: int, calls: int) -> dict[str, float]:
    """`concurrent` tasks make `calls` calls in all, after one each that opens the connections."""
    call = await {"ours": ours, "aiohttp": aiohttp, "httpx": httpx}[client](url)
    await asyncio.gather(*(call() for _ in range(concurrent)))
    left = calls

    async def one() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            assert await call() == len(TURN)

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrent)))
    seconds = time.perf_counter() - wall
    return {"cpu_ms_per_call": 1e3 * (time.process_time() - cpu) / calls, "calls_per_s": calls / seconds}


def run_case(client: str, concurrent: int, calls: int) -> dict[str, float]:
    latency_s = "0.05" if concurrent < 4096 else "1"
    mock = [sys.executable, str(HERE / "mock_token_server.py"), "--latency-s", latency_s, "--text", "x", "--token-ids"]
    mock.append(",".join(map(str, TURN)))
    with subprocess.Popen(mock, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        case = [sys.executable, __file__, "--case", client, url, str(concurrent), str(calls)]
        done = subprocess.run(case, capture_output=True, text=True, timeout=300, check=True)
        server.stdin.close()
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 concurrent only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > soft else soft, hard))
    if options.case:
        client, url, concurrent, calls = options.case
        print(json.dumps(uvloop.run(measure(client, url, int(concurrent), int(calls)))))
        return
    figures: dict[str, dict[str, float]] = {}
    for concurrent in (512,) if options.quick else (512, 10_000):
        for client in CLIENTS:
            if (client, concurrent) == ("httpx", 10_000):
                continue  # opening the connections alone takes minutes
            calls = 4 * concurrent if (client, concurrent) in SLOW else max(8 * 512, 2 * concurrent)
            figures[f"{client}_{concurrent}"] = run_case(client, concurrent, calls)
            if not options.json:
                row = figures[f"{client}_{concurrent}"]
                print(
                    f"{client:8} {concurrent:6} concurrent {row['cpu_ms_per_call']:8.3f} ms CPU per call "
                    f"{row['calls_per_s']:8.0f} calls/s",
                    flush=True,
                )
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
