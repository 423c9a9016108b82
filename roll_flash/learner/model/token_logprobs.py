"""Computes log-probabilities and entropies of chosen tokens without materialising the full logits of a row.

The output head is applied to chunks of hidden states. Probabilities are kept for the backward pass if they fit a
memory budget, otherwise recomputed.

Logits, probabilities and the gradient of the logits are float32 for every dtype of hidden states and head. In bfloat16
a logit near 20 has a precision of only 0.06, and 1 - p of a token with p > 0.99 is mostly rounding error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roll_flash.learner.model.exact_settings import LogitTransform

_CHUNK_BYTES = 8 << 20
"""Bytes of logits per chunk on CPU: small enough to stay in cache between the passes over them."""
_GPU_CHUNK_BYTES = 512 << 20
"""Bytes of logits per chunk on GPU: large enough for one matrix product to keep the GPU busy."""


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    source: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    form: LogitTransform | None = None,
    temperature: float = 1.0,
    keep_bytes: int = 512 << 20,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropies), float32 [M], natural log, of `target` [M] predicted from `hidden[source]`.

    `hidden` is [U, D]; `head` is the output head's weight [V, D], `bias` [V] its bias; `source` [M] must be sorted.
    Both results carry gradients; the entropy gradient costs nothing if no loss uses it. At most `keep_bytes` of
    probabilities are kept for the backward pass.
    """
    # Replicas that sampled the same token share a prediction. Their gradients are added before p - 1 is taken.
    pairs, which = torch.unique(source * head.shape[0] + target, return_inverse=True)
    rows, targets = pairs // head.shape[0], pairs % head.shape[0]
    form = form or LogitTransform()
    logprobs, entropies = _TokenLogprobs.apply(hidden, head, bias, rows, targets, form, temperature, keep_bytes)  # type: ignore[no-untyped-call]
    return logprobs[which], entropies[source]


class _TokenLogprobs(torch.autograd.Function):
    """Computes log-probabilities [P] of distinct (row, target) pairs and the entropy [U] of every row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        source: Tensor,
        target: Tensor,
        form: LogitTransform,
        temperature: float,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], head.shape[0]
        logprobs = torch.empty(target.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        keep = rows * vocabulary * 4 <= keep_bytes and any(ctx.needs_input_grad) and form.softcap is None
        kept: list[Tensor] = []
        project = _Projection(head, bias, form)
        for start, end, first, last in _chunks(rows, vocabulary, source):
            logits = _tempered(project(hidden[start:end]), temperature)
            logits.sub_(logits.amax(-1, keepdim=True))
            chosen = logits[source[first:last] - start, target[first:last]]
            probabilities = logits.exp()
            total = probabilities.sum(-1)
            # H = log Z - sum(p * logit) reuses the exponentials: no second pass over the head.
            log_total = total.log()
            entropies[start:end] = log_total - torch.einsum("uv,uv->u", probabilities, logits) / total
            logprobs[first:last] = chosen - log_total[source[first:last] - start]
            if keep:
                kept.append(probabilities.div_(total[:, None]))
        ctx.save_for_backward(hidden, head, bias, source, target, logprobs, entropies, *kept)
        ctx.form, ctx.temperature = form, temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, source, target, logprobs, entropies, *kept = ctx.saved_tensors
        gradient = torch.zeros_like(logprobs) if gradients[0] is None else gradients[0]
        project = _Projection(head, bias, ctx.form)
        hidden_gradient = torch.empty_like(hidden)
        head_gradient, bias_gradient = _zeros(head, ctx.needs_input_grad[1]), _zeros(bias, ctx.needs_input_grad[2])
        for index, (start, end, first, last) in enumerate(_chunks(hidden.shape[0], head.shape[0], source)):
            logits = None if kept else project(hidden[start:end])
            slope = None if logits is None else project.slope(logits)
            found = kept[index] if logits is None else _tempered(logits, ctx.temperature).softmax(-1)
            at = (source[first:last] - start, target[first:last])
            rise = None if gradients[1] is None else (gradients[1][start:end], entropies[start:end])
            descent = _logits_gradient(found, at, logprobs[first:last], gradient[first:last], rise)
            if (scale := ctx.form.scale / ctx.temperature) != 1.0:
                descent.mul_(scale)
            if slope is not None:
                descent.mul_(slope)
            if bias_gradient is not None:
                bias_gradient.add_(descent.sum(0))
            rounded = descent.to(hidden.dtype)
            torch.mm(rounded, head, out=hidden_gradient[start:end])
            if head_gradient is not None:
                _add_product(head_gradient, rounded.T, hidden[start:end])
        whole = [None if total is None else total.to(head.dtype) for total in (head_gradient, bias_gradient)]
        return (hidden_gradient, *whole, None, None, None, None, None)


def _logits_gradient(
    probabilities: Tensor,
    at: tuple[Tensor, Tensor],
    logprobs: Tensor,
    weights: Tensor,
    rise: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the gradient of sum(weights * logprobs) with respect to the logits [U, V]; overwrites `probabilities`.

    `at` holds the distinct (row, token) of each weight and log-probability; `rise` holds the gradient with respect to
    every row's entropy, and the entropy. All float32.
    """
    per_row = probabilities.new_zeros(probabilities.shape[0]).index_add_(0, at[0], weights)
    chosen = logprobs.exp()
    # 1 - p from the log-probability: direct subtraction loses precision if p is close to 1.
    values = -weights * torch.expm1(logprobs) - (per_row[at[0]] - weights) * chosen
    if rise is None:
        gradient = probabilities.mul_(-per_row[:, None])
    else:
        # dH / dlogit = -p (log p + H)
        steepness, entropies = rise
        own = torch.special.entr(probabilities).mul_(steepness[:, None])
        gradient = probabilities.mul_(-(per_row + steepness * entropies)[:, None]).add_(own)
        values = values - steepness[at[0]] * chosen * (logprobs + entropies[at[0]])
    return gradient.index_put_(at, values)


class _Projection:
    """Maps hidden states [U, D] to logits [U, V], float32, before the temperature."""

    def __init__(self, head: Tensor, bias: Tensor | None, form: LogitTransform) -> None:
        # PyTorch on CPU has no bfloat16 matrix product with float32 output.
        self._head = head.float() if head.device.type == "cpu" else head
        self._bias = bias
        self._form = form

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = _product(hidden.to(self._head.dtype), self._head.T)
        if self._bias is not None:
            logits.add_(self._bias)
        if self._form.scale != 1.0:
            logits.mul_(self._form.scale)
        if self._form.softcap is not None:
            logits.div_(self._form.softcap).tanh_().mul_(self._form.softcap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of the softcap, given its output `logits`; None without a softcap."""
        if self._form.softcap is None:
            return None
        return 1 - (logits / self._form.softcap).square()


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Return the matrix product with float32 accumulation and output."""
    if first.dtype == torch.float32:
        return torch.mm(first, second)
    return torch.mm(first, second, out_dtype=torch.float32)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add the matrix product to `total` (float32) in place."""
    if total.device.type == "cpu":
        total.addmm_(first.float(), second.float())
    elif first.dtype == torch.float32:
        total.addmm_(first, second)
    else:
        torch.addmm(total, first, second, out_dtype=torch.float32, out=total)


def _zeros(parameter: Tensor | None, needed: bool) -> Tensor | None:
    """Return a float32 accumulator for a gradient over chunks (bfloat16 would lose precision), or None."""
    return None if parameter is None or not needed else torch.zeros_like(parameter, dtype=torch.float32)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(rows: int, vocabulary: int, source: Tensor) -> list[tuple[int, int, int, int]]:
    """Return (first hidden row, end row, first token, end token) of every chunk."""
    size = max(1, (_CHUNK_BYTES if source.device.type == "cpu" else _GPU_CHUNK_BYTES) // (4 * vocabulary))
    starts = torch.arange(0, rows + size, size, device=source.device).clamp(max=rows)
    tokens = torch.searchsorted(source, starts).tolist()
    bounds = starts.tolist()
    return [
        (start, end, first, last)
        for start, end, first, last in zip(bounds, bounds[1:], tokens, tokens[1:], strict=False)
        if end > start
    ]
