"""A mock of a token server: answers every request with the same tokens, a fixed time after it came, or after a slot was
free for it (`--slots`).

It speaks the HTTP of our servers (`/inference/v1/generate`, `/update_weight_version`) and of OpenAI-compatible ones
(`/v1/chat/completions`), straight on an asyncio protocol, so that it costs less than what is measured against it.

    python benchmarks/mock_token_server.py --latency-s 0.05 --text "Four." --token-ids 1,2,3

prints the port it listens on, and ends when its standard input is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import cast

import uvloop

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
BACKLOG = 16384


class Answers:
    """The bytes that go out, made once for each version."""

    def __init__(self, text: str, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 64, "completion_tokens": len(token_ids), "total_tokens": 64 + len(token_ids)}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        chat = {"id": "mock", "object": "chat.completion", "created": 0, "model": "mock", "choices": [choice]}
        self.chat = _response(chat | {"usage": usage})
        self.nothing = _response({})
        self.label("0")

    def label(self, version: str) -> None:
        """From now on tokens are said to be sampled with the weights of `version`."""
        count = len(self._token_ids)
        content = [
            {"token_id": token, "logprob": -0.6931471824645996 / (1 + place % 7), "rank": 1, "top_logprobs": []}
            for place, token in enumerate(self._token_ids)
        ]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": self._token_ids,
            "weight_versions": [{"version": version, "start": 0, "end": count}],
            "logprobs": {"content": content},
        }
        self.tokens = _response({"request_id": "mock", "choices": [choice]})


class Slots:
    """Requests that are served at the same time, each for `latency_s`; others wait for a free slot. 0: no limit."""

    def __init__(self, slots: int, latency_s: float) -> None:
        self._free = slots or math.inf
        self._latency_s = latency_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._loop = asyncio.get_running_loop()

    def after_latency(self, answer: Callable[[], None]) -> None:
        if self._free < 1:
            self._waiting.append(answer)
            return
        self._free -= 1
        self._loop.call_later(self._latency_s, self._end, answer)

    def _end(self, answer: Callable[[], None]) -> None:
        answer()
        self._free += 1
        if self._waiting:
            self.after_latency(self._waiting.popleft())


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, answers: Answers, slots: Slots) -> None:
        self._answers = answers
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        self._received = received = self._received + data if self._received else data
        head_end = received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = CONTENT_LENGTH.search(received, 0, head_end)
        body_end = head_end + 4 + (int(length[1]) if length else 0)
        if len(received) < body_end:
            return
        self._received = received[body_end:]
        self._take(received[:head_end], received[head_end + 4 : body_end])

    def _take(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"POST /update_weight_version"):
            self._answers.label(str(json.loads(body)["new_version"]))
            self._transport.write(self._answers.nothing)
        elif head.startswith(b"POST /v1/chat/completions"):
            self._slots.after_latency(self._answer_chat)
        else:
            self._slots.after_latency(self._answer_tokens)

    def _answer_chat(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._answers.chat)

    def _answer_tokens(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._answers.tokens)


def _response(content: object) -> bytes:
    body = json.dumps(content, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve(answers: Answers, slots: int, latency_s: float) -> None:
    loop, limit = asyncio.get_running_loop(), Slots(slots, latency_s)
    server = await loop.create_server(lambda: Connection(answers, limit), "127.0.0.1", 0, backlog=BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    end = asyncio.Event()
    loop.add_reader(sys.stdin, end.set)
    await end.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--slots", type=int, default=0, help="requests served at a time; 0: any number")
    parser.add_argument("--text", required=True)
    parser.add_argument("--token-ids", required=True, help="separated by commas")
    options = parser.parse_args()
    token_ids = [int(token) for token in options.token_ids.split(",")]
    uvloop.run(serve(Answers(options.text, token_ids), options.slots, options.latency_s))


if __name__ == "__main__":
    main()
