"""Patch for vLLM's streamed answers: sends the weight versions of the tokens in every piece.

vLLM keeps the version of each token, but sends it only with the last piece of a stream. If a server dies before, the
tokens already sent would have no version and could not be kept. If the installed vLLM has other internals, nothing is
patched: clients then start such a turn again.
"""

from __future__ import annotations

import logging
from typing import Any

METHOD = "_new_completion_output"
MARK = "tells_versions_early"

_log = logging.getLogger(__name__)


def patch_streamed_versions() -> None:
    """Install the patch. Safe to call more than once."""
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
