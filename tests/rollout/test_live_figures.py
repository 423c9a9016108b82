"""The figures of the live view are those of the parts; a whole run shows them in `tests/test_training_runs.py`."""

from __future__ import annotations

from roll_flash.system.live_figures import servers_of


def test_figures_are_sorted_by_server() -> None:
    figures = {
        **{"deaths": 1.0, "up_0": 1.0, "requests_running_0": 3.0, "kv_cache_usage_0": 0.5, "kv_cache_tokens_0": 9.0},
        **{"up_1": 0.0, "up_2": 1.0, "requests_running_2": 0.0},
    }
    assert servers_of(figures) == [
        {"up": 1.0, "requests_running": 3.0, "kv_cache_usage": 0.5},
        {"up": 0.0},
        {"up": 1.0, "requests_running": 0.0},
    ]
    assert servers_of({}) == []
