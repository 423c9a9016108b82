"""Checks that end in each possible way, for processes that the runner starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from roll_flash.gpu_check.check import Bench, NotPossibleError, require


def passes(bench: Bench, value: int = 1) -> None:
    bench.measured(value=value)
    bench.slow("a slow one")


def fails(bench: Bench) -> None:
    bench.measured(before=1)
    require(False, "two and two are five")


def raises(bench: Bench) -> None:
    raise ZeroDivisionError("by the way")


def cannot(bench: Bench) -> None:
    raise NotPossibleError("no such thing here")


def crashes(bench: Bench) -> None:
    bench.measured(reached=7)
    print("the last words in the log", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(bench: Bench) -> None:
    os._exit(0)


def hangs(bench: Bench) -> None:
    bench.note("waiting for nothing")
    time.sleep(600)


@asynccontextmanager
async def opened(bench: Bench) -> AsyncIterator[str]:
    yield "the subject"


@asynccontextmanager
async def not_opened(bench: Bench) -> AsyncIterator[str]:
    raise ConnectionError("nobody there")
    yield ""


@asynccontextmanager
async def does_not_close(bench: Bench) -> AsyncIterator[str]:
    yield "the subject"
    raise ConnectionError("cannot be stopped")


async def sees(bench: Bench, subject: str) -> None:
    require(subject == "the subject", subject)
    bench.measured(process=os.getpid())


async def crashes_with(bench: Bench, subject: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
