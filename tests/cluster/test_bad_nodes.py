"""Nodes that lack what a run needs, with real Ray between them: one line with the node, before anything slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roll_flash
from tests.cluster.machines import ROOT, Machine, machines, why_not
from tests.cluster.test_many_machines import RUN_TIMEOUT_S, train

pytestmark = [pytest.mark.ray, pytest.mark.nightly]

WITHOUT_ENGINE = {"DOCKER_HOST": "unix:///tmp/no-engine.sock"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Machine, Machine, Machine]]:
    """A head, a node without this package, and one without a Docker engine."""
    if reason := why_not():
        pytest.skip(reason)
    with machines("head", "bare", "engineless") as (head, bare, engineless):
        head.join_ray(cpus=2, resources='{"servers": 1, "ranks": 1}')
        for package in {ROOT / "roll_flash", Path(roll_flash.__file__).parent}:
            status, output = bare.run("mount", "-t", "tmpfs", "nothing", str(package))
            assert status == 0, output
        bare.join_ray(head, resources='{"envs on bare": 1}')
        engineless.join_ray(head, resources='{"envs on engineless": 1}', **WITHOUT_ENGINE)
        yield head, bare, engineless


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("bare", "it needs the same packages as the driver, and this roll_flash"),
        ("engineless", "has no usable Docker engine: "),
    ],
)
def test_a_node_that_lacks_something_ends_the_start_with_one_line(
    cluster: tuple[Machine, Machine, Machine], node: str, says: str
) -> None:
    head, *_ = cluster
    settings: dict[str, Any] = {
        "rollout.worker_resources": f"{{CPU: 0.1, 'envs on {node}': 1}}",
        "sandbox.provider": "docker",
    }
    status, output = head.run(*train(head, **settings), timeout_s=RUN_TIMEOUT_S)
    assert status == 1, output
    (line,) = [line for line in output.splitlines() if f"node {node} (10.77.0." in line and "placement:" not in line]
    assert says in line, output
    assert "Traceback" not in output
    assert "lacks the model" not in output
    assert "starting servers" not in output
