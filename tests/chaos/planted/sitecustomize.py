"""Planted faults: a clock that is wrong, and answers of the engine for tiny models that are garbage.

Python imports this at its start if this folder is in PYTHONPATH. Environment variables name the file with the seconds
that `time.time` is wrong by (a double), and the file that names, while it exists, the kind of garbage.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SERVER = "roll_flash.inference.transformers.server"
GARBAGE: Mapping[str, Callable[[bytes], tuple[int, bytes]]] = {
    "an error": lambda body: (500, b"busy"),
    "nothing": lambda body: (200, b""),
    "half": lambda body: (200, body[: len(body) // 2]),
    "a page": lambda body: (200, b"<html><body>" + b"please wait " * 1000 + b"</body></html>"),
    "no choices": lambda body: (200, b'{"choices": []}'),
    "no numbers": lambda body: (200, re.sub(rb'"logprob": [^}]+', b'"logprob": NaN', body)),
    "too few logprobs": lambda body: (200, re.sub(rb'"content": \[\{[^}]*\},? ?', b'"content": [', body)),
}

if "ROLL_FLASH_CHAOS_CLOCK" in os.environ:
    with open(os.environ["ROLL_FLASH_CHAOS_CLOCK"], "rb") as file:
        OFFSET_S = mmap.mmap(file.fileno(), struct.calcsize("d"), access=mmap.ACCESS_READ)
    right_time = time.time

    def wrong_time() -> float:
        return right_time() + float(struct.unpack("d", OFFSET_S)[0])

    time.time = wrong_time

if SERVER in sys.orig_argv and "ROLL_FLASH_CHAOS_GARBAGE" in os.environ:
    from aiohttp import web

    FILE = Path(os.environ["ROLL_FLASH_CHAOS_GARBAGE"])

    def kind_now() -> str:
        try:
            return FILE.read_text()
        except FileNotFoundError:
            return ""

    @web.middleware
    async def answer_garbage(
        request: web.Request, handler: Callable[[web.Request], web.StreamResponse]
    ) -> web.StreamResponse:
        response = await handler(request)  # type: ignore[misc]
        kind = kind_now()
        if request.method != "POST" or not kind or not isinstance(response, web.Response):
            return response
        status, body = GARBAGE[kind](bytes(response.body or b""))
        return web.Response(status=status, body=body, content_type="application/json")

    class PlantedApplication(web.Application):
        def __init__(self, *, middlewares: tuple[object, ...] | list[object] = (), **options: object) -> None:
            super().__init__(middlewares=[answer_garbage, *middlewares], **options)  # type: ignore[arg-type]

    web.Application = PlantedApplication  # type: ignore[misc]
