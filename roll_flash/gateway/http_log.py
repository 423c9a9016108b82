"""What the HTTP server under a gateway logs: not a traceback for each request that is none.

Whoever reaches the port may send such requests without end, and a traceback shows what was sent, its key too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from aiohttp.http_exceptions import HttpProcessingError

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class HttpLog(_Adapter):
    """Calls `on_malformed` for a request that is no HTTP, and logs all else."""

    def __init__(self, on_malformed: Callable[[], None]) -> None:
        super().__init__(logging.getLogger(__name__), {})
        self._on_malformed = on_malformed

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        if error is True:
            error = sys.exc_info()[1]
        if isinstance(error, HttpProcessingError):
            self._on_malformed()
        else:
            super().log(level, msg, *args, **kwargs)
