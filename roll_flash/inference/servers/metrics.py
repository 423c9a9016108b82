"""Parses a server's answer to `/metrics` (Prometheus text, vLLM's names)."""

from __future__ import annotations

import re
from statistics import fmean

_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{([^}]*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
LOGGED = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
}
SHARES = frozenset({"kv_cache_usage"})


def kv_cache_tokens(text: str) -> int | None:
    """Return the capacity of the KV caches of all engines of a server in tokens; None if it does not report it."""
    tokens = 0
    for name, labels, _ in _SAMPLE.findall(text):
        if name == "vllm:cache_config_info":
            settings = dict(_LABEL.findall(labels))
            blocks, block_size = settings.get("num_gpu_blocks", ""), settings.get("block_size", "")
            if blocks.isdigit() and block_size.isdigit():
                tokens += int(blocks) * int(block_size)
    return tokens or None


def logged_figures(text: str) -> dict[str, float]:
    """Return the metrics in LOGGED under their short names, summed over labels (shares are averaged), and the capacity
    of the KV caches if it is reported."""
    found: dict[str, list[float]] = {}
    for name, _, value in _SAMPLE.findall(text):
        if name in LOGGED:
            found.setdefault(LOGGED[name], []).append(float(value))
    figures = {name: fmean(values) if name in SHARES else sum(values) for name, values in found.items()}
    capacity = kv_cache_tokens(text)
    return figures if capacity is None else figures | {"kv_cache_tokens": float(capacity)}
