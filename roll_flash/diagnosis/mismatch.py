"""Sampler and learner disagree about fresh tokens: which of the usual causes explains it.

Fresh tokens were sampled with the weights that train on them, and so was their turn before them: both should give them
the same log-probability. Two questions tell the causes apart:

- Does the parity probe see it? The probe compares log-probabilities of fixed texts at temperature 1, without sampling,
  prefix cache or chat template. It sees other weights and other precision.
- Was it there in the first step, before any update of the weights? What comes only with updates has to do with them.

| probe sees it | from the first step | cause |
|---|---|---|
| yes | yes | precision (dtype, quantisation) |
| yes | no | wrong weights: updates do not arrive as they were sent |
| no | no | stale prefix cache: new requests build on keys and values of old weights |
| no | yes | temperature, if the two differ in how random they are; else other prompts: template drift |
"""

from __future__ import annotations

import math

import numpy as np

from roll_flash.diagnosis.findings import Evidence, Finding
from roll_flash.diagnosis.run_view import RunView, Steps

HIGH_MISMATCH = 0.01
"""Divergence of fresh tokens in nats per token (k3). bfloat16 servers have 1e-4 to 5e-3, float32 below 1e-8."""
WINDOW = 10
KNOWN = 2
"""Steps of the window that must have had fresh tokens: where turns are long and steps short, few have any."""
PROBE_SEES = 0.3
"""The probe's mean difference, as a share of the mean difference of fresh tokens, from which it explains them."""
FROM_START = 0.3
"""Mismatch of the first step, as a share of the recent one, from which it was there from the start, if it is not high
by itself: it may grow with the policy."""
ENTROPY_GAP = 0.1
"""Relative difference of entropies. The same distribution has the same up to noise of the sample; a temperature that is
10 % off changes it by more than this where the model is unsure."""
_CAUSES = {
    "mismatch-dtype": (
        "servers and learner compute with different precision",
        "Give both the same dtype and no quantisation (inference.dtype, inference.extra_args)",
    ),
    "mismatch-weights": (
        "servers do not have the weights that were sent to them",
        "Look at weights/parity: from which step on does it rise? Start the servers again (resume the run), and set "
        "weights.parity_threshold back to its default, which ends such a run at once",
    ),
    "mismatch-stale-cache": (
        "servers reuse keys and values of earlier weights",
        "Let servers clear their prefix cache after each update (/reset_prefix_cache), or switch it off "
        "(inference.extra_args={enable_prefix_caching: false}); with long turns set weights.in_flight=abort_resume",
    ),
    "mismatch-temperature": (
        "servers sample at another temperature than the learner assumes",
        "Compare the temperature of the requests (rollout.temperature, an agent's own) with that of the learner; top_p "
        "and top_k must be off",
    ),
    "mismatch-template": (
        "servers were given other prompts than the learner trains on",
        "Compare the prompt of a turn in episodes/ with what the server received: chat template, system prompt, "
        "special tokens",
    ),
}


def mismatch(view: RunView) -> Finding | None:
    """See the module."""
    recent = view.recent.last(WINDOW)
    divergence = recent.mean("mismatch_kl_k3")
    if not divergence > HIGH_MISMATCH or np.isfinite(recent["mismatch_kl_k3"]).sum() < KNOWN:
        return None
    name = _cause(view, recent)
    what, remedy = _CAUSES[name]
    found = {
        "divergence of fresh tokens": divergence,
        "difference of log-probabilities of fresh tokens": recent.mean("mismatch_gap_mean"),
        "the same of the probe's texts": recent.mean("weights/parity_mean"),
        "entropy of the learner": recent.mean("entropy"),
        "entropy of the sampler": recent.mean("behavior_entropy"),
    }
    start = _first(view)
    evidence = [Evidence("divergence of fresh tokens", start.mean("mismatch_kl_k3"), *start.span)]
    evidence += [Evidence(label, value, *recent.span) for label, value in found.items()]
    return Finding(
        name,
        "error",
        f"sampler and learner disagree about tokens of the same weights ({divergence:.3g} nats per token): {what}",
        tuple(each for each in evidence if math.isfinite(each.value)),
        remedy,
    )


def _cause(view: RunView, recent: Steps) -> str:
    divergence, gap = recent.mean("mismatch_kl_k3"), recent.mean("mismatch_gap_mean")
    is_seen = recent.mean("weights/parity_mean") >= PROBE_SEES * gap
    is_from_start = _first(view).mean("mismatch_kl_k3") >= min(HIGH_MISMATCH, FROM_START * divergence)
    if is_seen:
        return "mismatch-dtype" if is_from_start else "mismatch-weights"
    if not is_from_start:
        return "mismatch-stale-cache"
    steps = view.start  # later the policies may have become so sure that both entropies are next to nothing
    learner, sampler = steps.mean("entropy"), steps.mean("behavior_entropy")
    return "mismatch-temperature" if abs(learner - sampler) > ENTROPY_GAP * sampler else "mismatch-template"


def _first(view: RunView) -> Steps:
    """The first step that trained on fresh tokens."""
    known = np.flatnonzero(np.isfinite(view.start["mismatch_kl_k3"]))
    return view.start.head(int(known[0]) + 1).last(1) if known.size else view.recent.last(1)
