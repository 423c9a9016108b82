"""Load-balancing loss of a mixture of experts, computed for each sequence.

The usual loss (Switch Transformer, arXiv 2101.03961, equations 4-6) multiplies two means over all tokens of a batch, so
that its value depends on how tokens are split into batches. For each sequence (as in DeepSeek-V3, arXiv 2412.19437,
equations 17-20) it is a sum over sequences, which is the same for any micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roll_flash.learner.packing.rows import PackedRow


def load_balancing_loss(router_logits: Sequence[Tensor], row: PackedRow, top_k: int) -> Tensor:
    """Return the sum over the row's sequences of their loss, each weighted like the policy tokens that it has.

    The loss of a sequence is that of transformers (`load_balancing_loss_func`) on its tokens before the last policy
    token: experts * sum over experts of (share of the choices) * (mean probability), over all tokens and layers. It is
    `top_k` if all experts are used alike. `router_logits`: [N, experts] for each layer with experts. The choices are
    those that the router makes now, not replayed ones: it is the router that the loss trains.
    """
    device, num_experts = router_logits[0].device, router_logits[0].shape[-1]
    tokens = torch.tensor(_tokens_of_sequences(row), device=device, dtype=torch.float32)
    chosen = torch.zeros(row.num_tokens, num_experts, device=device)
    probabilities = torch.zeros_like(chosen)
    for logits in router_logits:
        of_layer = logits.float().softmax(-1)
        chosen.scatter_add_(1, of_layer.detach().topk(top_k).indices, torch.ones_like(chosen))
        probabilities = probabilities + of_layer
    tokens = tokens / (tokens.sum(-1, keepdim=True) * len(router_logits))  # a mean over tokens and layers
    losses = num_experts * ((tokens @ chosen) * (tokens @ probabilities)).sum(-1)
    weights = np.bincount(row.sequence_ids, row.token_weights, len(row.members))
    return (losses * torch.tensor(weights, device=device, dtype=torch.float32)).sum()


def _tokens_of_sequences(row: PackedRow) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return [sequences, N]: true for the nodes of each sequence up to that which predicts its last policy token."""
    last = np.zeros(len(row.members), np.int64)
    np.maximum.at(last, row.sequence_ids, row.source)
    nodes = np.arange(row.num_tokens)
    return (nodes <= last[:, None]) & (last[:, None] < row.subtree_end)
