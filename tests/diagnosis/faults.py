"""A fault of the engine `transformers` that no config has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

from roll_flash.inference.transformers import server
from roll_flash.inference.transformers.model import Request


class StaleCacheRequest(Request):
    """A prefix cache that no update clears: prompts that were seen before go on with their first keys and values."""

    cached: ClassVar[dict[tuple[int, ...], Any]] = {}

    def step(self, version: str) -> None:
        prompt, is_first = tuple(self.prompt), self.made == 0
        if is_first and prompt in self.cached:
            self._cache = copy.deepcopy(self.cached[prompt])
            self._cache.crop(len(prompt) - 1)
            self._next_input = [prompt[-1]]
        super().step(version)
        if is_first and prompt not in self.cached:
            self.cached[prompt] = copy.deepcopy(self._cache)


@contextmanager
def stale_prefix_cache() -> Iterator[None]:
    """Servers that are opened in the block have it."""
    StaleCacheRequest.cached.clear()
    with patch.object(server, "Request", StaleCacheRequest):
        yield
