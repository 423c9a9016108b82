"""CPU time of one call of a model server: our HTTP client, aiohttp and httpx against the same mock server.

    python benchmarks/clients.py [--quick] [--json]

Each client asks for a turn of 64 tokens after a prompt of 512 and reads tokens, logprobs and versions from the answer;
the mock answers after 50 ms, or after a second with 10,000 requests in flight. Every case is a process of its own on
uvloop, as Ray's workers are. The mock's own time is not counted.

A second table shows what streaming costs our client: turns of 1,024 tokens in one piece, and in pieces of 256, 64, 16
and 4 tokens that arrive 5 ms apart.
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
from typing import cast

import uvloop

HERE = Path(__file__).parent
PROMPT = list(range(1, 513))
TURN = list(range(1, 65))
CLIENTS = ("ours", "aiohttp", "httpx")
LONG_TURN = 1024
PIECES = (0, 256, 64, 16, 4)
"""Tokens in a piece; 0 does not stream."""
PIECE_GAP_S = 0.005
Call = Callable[[], Awaitable[int]]


def body() -> dict[str, object]:
    parameters = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "detokenize": False}
    return {"request_id": "r", "token_ids": PROMPT, "sampling_params": parameters}


async def ours(url: str) -> Call:
    """The whole client: router, admission, deadline, decoding into arrays."""
    from roll_flash.engines.inference import ClientSpec
    from roll_flash.inference.client.token_client import open_client
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
    return run_beside(mock, ["--case", client, str(concurrent), str(calls)])


def run_beside(mock: list[str], case: list[str]) -> dict[str, float]:
    """Run this program with `case` and the address of the mock, while `mock` runs."""
    with subprocess.Popen(mock, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        command = [sys.executable, __file__, *case, "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        server.stdin.close()
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


class StreamingMock(asyncio.Protocol):
    """Answers every request with LONG_TURN tokens, in one piece or in pieces of `every`."""

    def __init__(self, every: int) -> None:
        self._pieces = [
            _piece(start, start + (every or LONG_TURN)) for start in range(0, LONG_TURN, every or LONG_TURN)
        ]
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), 0)
        if found and len(body) >= length:
            self._received = b""
            self._answering = asyncio.ensure_future(self._answer())

    async def _answer(self) -> None:
        if len(self._pieces) == 1:
            await asyncio.sleep(PIECE_GAP_S)
            head = (
                f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(self._pieces[0])}\r\n\r\n"
            )
            self._transport.write(head.encode() + self._pieces[0])
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for piece in self._pieces:
            await asyncio.sleep(PIECE_GAP_S)
            if self._transport.is_closing():
                return
            event = b"data: " + piece + b"\n\n"
            self._transport.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _piece(start: int, end: int) -> bytes:
    choice = {
        "index": 0,
        "token_ids": list(range(start, end)),
        "logprobs": {"content": [{"token_id": token, "logprob": -0.69314718} for token in range(start, end)]},
        "finish_reason": "length" if end == LONG_TURN else None,
        "weight_versions": [{"version": "3", "start": 0, "end": end}],
    }
    return json.dumps({"request_id": "mock", "choices": [choice]}, separators=(",", ":")).encode()


async def serve_pieces(every: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StreamingMock(every), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    end = asyncio.Event()
    loop.add_reader(sys.stdin, end.set)
    await end.wait()


async def measure_pieces(url: str, every: int) -> dict[str, float]:
    """64 lanes with 4 turns each, after one each that opens the connections."""
    from roll_flash.engines.inference import ClientSpec
    from roll_flash.inference.client.token_client import open_client
    from roll_flash.types import SamplingParams

    client = open_client(ClientSpec("vllm", (url,), "mock", 4096, stream_every=every or None))
    sampling = SamplingParams(max_new_tokens=LONG_TURN)

    async def lane(turns: int) -> None:
        for _ in range(turns):
            answer = await client.generate(PROMPT, sampling, request_id="r", timeout_s=300)
            assert len(answer.token_ids) == LONG_TURN

    await asyncio.gather(*(lane(1) for _ in range(64)))
    cpu = time.process_time()
    await asyncio.gather(*(lane(4) for _ in range(64)))
    milliseconds = 1e3 * (time.process_time() - cpu) / 256
    await client.close()
    return {"cpu_ms_per_turn": milliseconds, "cpu_us_per_token": 1e3 * milliseconds / LONG_TURN}


def run_pieces(every: int) -> dict[str, float]:
    return run_beside([sys.executable, __file__, "--serve", str(every)], ["--pieces", str(every)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 concurrent only")
    parser.add_argument("--json", action="store_true")
    for option, arguments in {"--case": 3, "--pieces": 1, "--serve": 1, "--url": 1}.items():
        parser.add_argument(option, nargs=arguments, help=argparse.SUPPRESS)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > soft else soft, hard))
    if options.case:
        client, concurrent, calls = options.case
        print(json.dumps(uvloop.run(measure(client, options.url[0], int(concurrent), int(calls)))))
    elif options.pieces:
        print(json.dumps(uvloop.run(measure_pieces(options.url[0], int(options.pieces[0])))))
    elif options.serve:
        uvloop.run(serve_pieces(int(options.serve[0])))
    else:
        compare(quick=options.quick, as_json=options.json)


def compare(*, quick: bool, as_json: bool) -> None:
    say = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    figures: dict[str, dict[str, float]] = {}
    for concurrent in (512,) if quick else (512, 10_000):
        for client in CLIENTS:
            if (client, concurrent) == ("httpx", 10_000):
                continue  # its cost grows with the connections: minutes for nothing new
            calls = 4 * concurrent if client == "httpx" else max(8 * 512, 2 * concurrent)
            row = figures[f"{client}_{concurrent}"] = run_case(client, concurrent, calls)
            say(
                f"{client:8} {concurrent:6} concurrent {row['cpu_ms_per_call']:8.3f} ms CPU per call "
                f"{row['calls_per_s']:8.0f} calls/s"
            )
    for every in PIECES:
        row = figures[f"pieces_of_{every}" if every else "one_piece"] = run_pieces(every)
        say(
            f"turn of {LONG_TURN} tokens {f'in pieces of {every}' if every else 'in one piece':16} "
            f"{row['cpu_ms_per_turn']:8.3f} ms CPU {row['cpu_us_per_token']:6.2f} us per token"
        )
    if as_json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
