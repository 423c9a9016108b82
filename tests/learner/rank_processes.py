"""Ranks in processes of their own, without Ray: forked from a process that has imported torch and transformers once."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from typing import Any

from torch.multiprocessing.spawn import start_processes

PRELOADED = ["tests.learner.test_load_shards", "tests.learner.test_hybrid_sharding"]
"""An import of torch and transformers takes a core for six seconds."""


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], *, ranks: int) -> None:
    """Call `function(rank, *arguments)` in each of `ranks` processes; raise the first error of one."""
    set_forkserver_preload(PRELOADED)
    start_processes(function, arguments, nprocs=ranks, start_method="forkserver")
