"""Parses a server's answer to `/metrics` (Prometheus text, vLLM's names)."""

from __future__ import annotations

import re

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


def kv_cache_tokens(text: str) -> int | None:
    """Return the capacity of the KV cache in tokens; None if the server does not report it."""
    for name, labels, _ in _SAMPLE.findall(text):
        if name == "vllm:cache_config_info":
            settings = dict(_LABEL.findall(labels))
            blocks, block_size = settings.get("num_gpu_blocks", ""), settings.get("block_size", "")
            if blocks.isdigit() and block_size.isdigit():
                return int(blocks) * int(block_size)
    return None


def logged_figures(text: str) -> dict[str, float]:
    """Return the metrics in LOGGED under their short names, summed over labels."""
    figures: dict[str, float] = {}
    for name, _, value in _SAMPLE.findall(text):
        if name in LOGGED:
            figures[LOGGED[name]] = figures.get(LOGGED[name], 0.0) + float(value)
    return figures
