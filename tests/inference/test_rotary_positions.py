"""vLLM's rotary positions on a CPU, as latent attention asks for them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm


def test_parts_of_heads_are_rotated_as_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each head of 128 numbers the last 64 have a position, and a key of one head lies beside other numbers."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    from roll_flash.inference.vllm.patches import patch_rotary_positions

    if not current_platform.is_cpu():
        pytest.skip("the installed vLLM is not built for CPUs")
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    patch_rotary_positions()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(64, 64, 128, 10000.0, False, torch.float32)
    torch.manual_seed(0)
    heads, beside = torch.randn(7, 4, 128), torch.randn(7, 576)
    query, key = heads[..., 64:], beside[:, 512:].unsqueeze(1)
    positions = torch.arange(7)
    angles = positions[:, None] / 10000 ** (torch.arange(0, 64, 2) / 64)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    expected = []
    for part in (query, key):
        even, odd = part[..., ::2], part[..., 1::2]
        expected.append(torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2))
    found = rotary.forward_cpu(positions, query, key)
    torch.testing.assert_close(list(found), expected, atol=1e-5, rtol=1e-5)
