"""Turns options of vLLM into its command line, so that values of a YAML file arrive as they are written there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roll_flash.errors import ConfigError

JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})
"""Options that take a list as JSON. The others take its items as words."""
REPEATED = frozenset({"middleware"})
"""Options that are given once for each item."""
COMMA_LISTS = frozenset({"disable_access_log_for_endpoints"})

_SERVERS = "set inference.servers instead: each server is started, updated and restarted alone"
_SPLIT = "the GPUs of a server are those of inference.tensor_parallel_size, on one node"
_REFUSED = {
    "model": "it is model.path",
    "max_model_len": "it is model.max_length",
    "dtype": "it is inference.dtype",
    "port": "it is inference.port",
    "host": "the run chooses the address",
    "max_num_seqs": "it is inference.max_num_seqs",
    "gpu_memory_utilization": "it is inference.gpu_memory_utilization",
    "weight_transfer_config": "it is inference.weight_transfer",
    "tensor_parallel_size": "it is inference.tensor_parallel_size",
    "tp": "it is inference.tensor_parallel_size",
    "device_ids": "the plan of the run gives each server its GPUs",
    "data_parallel_size": _SERVERS,
    "dp": _SERVERS,
    "pipeline_parallel_size": _SPLIT,
    "pp": _SPLIT,
    "prefill_context_parallel_size": _SPLIT,
    "nnodes": _SPLIT,
}


def check_extra_args(extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that the run sets, or that would give a server other GPUs than it reserves."""
    for key in extra:
        if (reason := _REFUSED.get(option_name(key))) is not None:
            raise ConfigError(f"inference.extra_args.{key}: {reason}; remove it from extra_args")


def command_line(options: Mapping[str, Any], extra: Mapping[str, Any]) -> list[str]:
    """Return the arguments of vLLM's server; `extra` replaces `options` of the same name."""
    merged = {**options, **{option_name(key): value for key, value in extra.items()}}
    return [word for key, value in merged.items() for word in _words(key, value)]


def option_name(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _words(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return [flag.replace("--", "--no-", 1)]
    if not isinstance(value, list) or key in JSON_LISTS:
        return [flag, _text(value)]
    if key in REPEATED:
        return [word for item in value for word in (flag, _text(item))]
    if key in COMMA_LISTS:
        return [flag, ",".join(map(_text, value))]
    return [flag, *map(_text, value)]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
