"""Every metric that a run can write is described, once, and the page is current."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from roll_flash.inference.client.metrics import Counts
from roll_flash.inference.servers.metrics import LOGGED
from roll_flash.monitor.metric_table import SHARE, TABLE, find_metric, page
from roll_flash.sandboxes.pool.stats import PoolStats
from roll_flash.stream import TrajectoryStream

ROOT = Path(__file__).parents[2]


def unknown(names: list[str]) -> list[str]:
    return [name for name in names if find_metric(name) is None]


def test_the_page_is_current() -> None:
    written = (ROOT / "docs/metrics.md").read_text()
    assert written == page(), "docs/metrics.md is old: python -m roll_flash.monitor.metric_table > docs/metrics.md"


def test_charts_of_the_dashboard_call_fractions_what_is_a_share() -> None:
    source = (ROOT / "roll_flash/dashboard/pages/js/overview.js").read_text()
    charts = re.findall(r'^  \["[^"]+", "([^"]+)", \[\["([^"]+)"', source, re.MULTILINE)
    assert len(charts) >= 8
    units = {name: metric.unit for _, name in charts if (metric := find_metric(name)) is not None}
    assert set(units) == {name for _, name in charts}
    assert [name for said, name in charts if said.startswith("fraction") != (units[name] == SHARE)] == []


def test_no_metric_is_described_twice() -> None:
    names = Counter(metric.name for metrics in TABLE.values() for metric in metrics)
    assert [name for name, count in names.items() if count > 1] == []
    plain = [name for name in names if "{" not in name]
    found = {name: [m.name for metrics in TABLE.values() for m in metrics if m.describes(name)] for name in plain}
    assert {name: others for name, others in found.items() if len(others) > 1} == {}


def test_what_parts_count_is_described() -> None:
    assert not unknown([f"sandbox/{name}" for name in PoolStats().as_metrics()])
    assert not unknown([f"stream/{name}" for name in TrajectoryStream().metrics()])
    assert not unknown([f"inference/{name}" for name in asdict(Counts())])
    assert not unknown([f"inference/server_{name}_0" for name in LOGGED.values()])


@pytest.mark.parametrize("name", ["rewards", "rho_p", "rho_pxx", "staleness_x", "bias/length_ratio", "reward2", "step"])
def test_what_is_no_metric_is_found_nowhere(name: str) -> None:
    assert find_metric(name) is None
