"""Checks log-probabilities on this device: of the output head against float64, of the whole model against float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from roll_flash.gpu_check.check import Bench, require
from roll_flash.gpu_check.machine import fastest_s
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.model.token_logprobs import token_logprobs
from roll_flash.learner.packing.rows import pack
from roll_flash.learner.packing.sequences import text_sequence
from roll_flash.weight_sync.parity import BFLOAT16_THRESHOLD, compare
from roll_flash.weight_sync.parity import check as check_parity

PROBABILITIES = (0.01, 0.5, 0.9, 0.99, 0.999, 0.9999)
LOGPROB_TOLERANCE = 1e-3
"""Maximum error of a log-probability. A logit of 20 rounded to bfloat16 is off by up to 0.06."""
GRADIENT_TOLERANCE = 0.02
"""Maximum error of a row's gradient relative to its norm, in bfloat16. At p = 0.999 a p that was rounded before 1 - p
is off by a factor of 4."""
SPREAD = 3.0
"""Standard deviation of the logits before a token is made likely."""
TEXTS, TEXT_TOKENS = 4, 256

HeadLogprobs = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`token_logprobs`: (hidden [U, D], head [V, D], source [M], target [M]) -> (logprobs [M], entropies)."""


def head(bench: Bench, rows: int = 192, function: HeadLogprobs = token_logprobs) -> None:
    """Compare log-probabilities and gradients in bfloat16 with float64, for tokens of given probabilities."""
    device = torch.device("cpu" if bench.settings.rehearsal else "cuda")
    hidden, weight, target = make_tokens(bench, rows, device)
    source = torch.arange(rows, device=device)
    leaf = hidden.clone().requires_grad_()
    found, _ = function(leaf, weight, source, target)
    found.sum().backward()
    gradient = leaf.grad
    assert gradient is not None
    expected, expected_gradient = _in_float64(hidden, weight, target)
    off = (found.detach().double() - expected).abs()
    gradient_off = (gradient.double() - expected_gradient).norm(dim=1) / expected_gradient.norm(dim=1)
    likely = expected.exp()
    bench.measured(
        largest_error_of_a_logprob=float(off.max()),
        largest_error_of_a_gradient=float(gradient_off.max()),
        probabilities=[float(f"{value:.5g}") for value in likely[: len(PROBABILITIES)].tolist()],
    )
    worst = int(off.argmax())
    require(
        bool((off <= LOGPROB_TOLERANCE).all()),
        f"a log-probability is off by {float(off.max()):.3g} at p = {float(likely[worst]):.5f}, more than "
        f"{LOGPROB_TOLERANCE:g}",
    )
    worst = int(gradient_off.argmax())
    require(
        bool((gradient_off <= GRADIENT_TOLERANCE).all()),
        f"the gradient of a log-probability is off by {float(gradient_off.max()):.1%} at p = "
        f"{float(likely[worst]):.5f}, more than {GRADIENT_TOLERANCE:.0%}",
    )
    if device.type == "cuda":
        with torch.no_grad():
            seconds = fastest_s(lambda: function(hidden, weight, source, target), device)
        bench.measured(head_tokens_per_s=rows / seconds)


def make_tokens(bench: Bench, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [rows, D] and a head [V, D] in bfloat16, and targets [rows] with PROBABILITIES in turn."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(bench.settings.model_folder).get_text_config()
    size, vocabulary = config.hidden_size, config.vocab_size
    generator = torch.Generator(device)
    generator.manual_seed(0)
    weight = torch.randn(vocabulary, size, device=device, generator=generator) * SPREAD / size**0.5
    hidden = torch.randn(rows, size, device=device, generator=generator)
    target = torch.randint(0, vocabulary, (rows,), device=device, generator=generator)
    wanted = torch.tensor([PROBABILITIES[row % len(PROBABILITIES)] for row in range(rows)], device=device)
    own = weight[target]
    for _ in range(4):  # what is added for the target changes the other logits a little too
        logits = hidden @ weight.T
        chosen = logits.gather(1, target[:, None])[:, 0]
        others = logits.scatter(1, target[:, None], -torch.inf).logsumexp(1)
        missing = torch.logit(wanted) + others - chosen
        hidden = hidden + (missing / own.square().sum(1))[:, None] * own
    return hidden.bfloat16(), weight.bfloat16(), target


def _in_float64(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf, exact = hidden.double().requires_grad_(), weight.double()
    logprobs = torch.cat(
        [
            (part @ exact.T).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            for part, chosen in zip(leaf.split(16), target.split(16), strict=True)
        ]
    )
    logprobs.sum().backward()
    assert leaf.grad is not None
    return logprobs.detach(), leaf.grad


def whole_model(bench: Bench) -> None:
    """Compare the learner's model in bfloat16 with itself in float32: servers can be no nearer."""
    device = torch.device("cpu" if bench.settings.rehearsal else "cuda")
    bench.note("loading the model, and comparing packed rows with plain transformers (usually 10-60 s)")
    policy = load_policy_model(bench.settings.model_folder)
    vocabulary = policy.head.shape[0]
    policy = policy.to(device)
    policy.flex_attention = device.type == "cuda"
    exact = _text_logprobs(policy, vocabulary)
    for parameter in policy.parameters():
        parameter.data = parameter.data.bfloat16()  # not `.to`, which would round the rotary frequencies too
    rounded = _text_logprobs(policy, vocabulary)
    difference = compare([exact], [[rounded]])
    bench.measured(
        mean_difference=difference.mean,
        difference_percentile=difference.percentile,
        largest_difference=difference.largest,
        tokens=difference.tokens,
    )
    check_parity(difference, BFLOAT16_THRESHOLD)


def _text_logprobs(policy: PolicyModel, vocabulary: int) -> np.ndarray:
    random = np.random.default_rng(0)
    start = random.integers(3, vocabulary, TEXT_TOKENS // 4).tolist()
    left = TEXT_TOKENS - len(start)
    texts = [[*start, *random.integers(3, vocabulary, left).tolist()] for _ in range(TEXTS)]
    row_tokens = TEXTS * TEXT_TOKENS if policy.shares_prefixes else 1
    found = []
    with torch.no_grad():
        for row in pack([text_sequence(text) for text in texts], row_tokens):
            logprobs, _ = policy(row, 1.0)
            found.append(logprobs.float().cpu().numpy())
    return np.concatenate(found)
