"""Log of the gateway's HTTP server, without a traceback per malformed request.

Any client that reaches the port could send endless malformed requests, and a traceback shows their content, also keys.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError


class HttpLog(logging.LoggerAdapter[logging.Logger]):
    """Call `on_malformed` for a request that is not HTTP, and log everything else."""

    def __init__(self, on_malformed: Callable[[], None]) -> None:
        super().__init__(logging.getLogger(__name__), {})
        self._on_malformed = on_malformed

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        if error is True:
            error = sys.exc_info()[1]
        if isinstance(error, HttpProcessingError):
            self._on_malformed()
        else:
            super().log(level, msg, *args, **kwargs)
