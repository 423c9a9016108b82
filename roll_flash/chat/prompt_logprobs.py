"""Log-probabilities of given tokens: what vLLM is asked, and how its answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.stream.episodes import NO_LOGPROB

GENERATE_PATH = "/inference/v1/generate"
"""vLLM's route for token ids in and token ids out, which the servers of a run have."""
MAX_LOGPROB = 1e-2
"""Maximum accepted logprob: 0 plus rounding error."""


def score_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request to GENERATE_PATH. A server must sample one token."""
    parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": list(token_ids), "sampling_params": parameters}


def read_prompt_logprobs(answer: Any, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the log-probabilities [T - 1] of `token_ids[1:]`, each given its prefix; -9999 for minus infinity, as vLLM
    writes it.

    `answer`: the object with `prompt_logprobs`, which is an answer of GENERATE_PATH or a choice of a completion. Raises
    ValueError for one of another shape or about other tokens, and for numbers that are no log-probabilities.
    """
    try:
        positions = answer["prompt_logprobs"][1:]
        found = [position[str(token)]["logprob"] for position, token in zip(positions, token_ids[1:], strict=True)]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"no log-probabilities of the prompt in the answer: {str(error)[:200]!r}") from None
    for value in found:
        if type(value) not in (int, float) or not value <= MAX_LOGPROB:  # NaN is not
            raise ValueError(f"{str(value)[:80]} in the place of a log-probability")
    return np.array([max(value, NO_LOGPROB) for value in found], np.float32)
