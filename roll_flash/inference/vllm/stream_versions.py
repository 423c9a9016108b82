"""vLLM's streamed answers, with the weight versions of the tokens in every piece.

vLLM keeps the version of each token, but tells it with the last piece of a stream only. When a server dies in the
middle, the tokens that it sent before would have no version and could not be kept. Where a vLLM is built differently
nothing is changed here: clients then begin such a turn again.
"""

from __future__ import annotations

import logging
from typing import Any

METHOD = "_new_completion_output"
MARK = "tells_versions_early"

_log = logging.getLogger(__name__)


def tell_versions_early() -> None:
    """Safe to call more than once."""
    from vllm.v1.engine.output_processor import RequestState

    original = getattr(RequestState, METHOD, None)
    if original is None or not hasattr(RequestState, "_weight_version_spans"):
        _log.warning("this vLLM tells no weight versions while it streams: turns of a dead server begin again")
        return
    if getattr(original, MARK, False):
        return

    def with_versions(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = original(self, *arguments, **keywords)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    setattr(with_versions, MARK, True)
    setattr(RequestState, METHOD, with_versions)
