"""A driver that cannot join its cluster says why in one line, within seconds. Real clusters, one with a token."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from roll_flash.processes.ray.joining import CHECK_LIMIT_S
from tests.cluster.machines import Machine, machines, why_not

pytestmark = [pytest.mark.ray]

JOIN = """
import asyncio, sys, time
import ray
from roll_flash.config.tree import RayConfig
from roll_flash.errors import RollFlashError
from roll_flash.processes.ray.local_ray import local_ray

async def join():
    async with local_ray(RayConfig(address=sys.argv[1])):
        return ray.cluster_resources()["CPU"]

began = time.monotonic()
try:
    print("joined", asyncio.run(join()))
except RollFlashError as error:
    print(error)
    sys.exit(error.exit_code)
finally:
    print(f"{time.monotonic() - began:.1f}")
"""
"""Prints the outcome in one line, and the seconds in a second."""
SET_VERSION = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
client.internal_kv_put(b"CLUSTER_METADATA", sys.argv[2].encode(), True, namespace=b"cluster")
"""
CPUS = 3
NO_TOKEN = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}
ON_ANOTHER_PORT = "with socket.create_server(('', 7000)): signal.pause()"


@dataclass(frozen=True)
class Network:
    head: Machine
    """Head node of a cluster that requires a token."""
    open_head: Machine
    """Head node of a cluster without tokens."""
    bare: Machine
    """No Ray here."""

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with machines("head", "open", "bare") as (head, open_head, bare), ThreadPoolExecutor() as threads:
        starts = (threads.submit(head.join_ray, cpus=CPUS), threads.submit(open_head.join_ray, cpus=CPUS, **NO_TOKEN))
        for start in starts:
            start.result()
        yield Network(head, open_head, bare)


def join(machine: Machine, address: str, **environment: str) -> str:
    """Outcome of joining from there: one line, in time. The home folder is empty, so that it has no token."""
    status, output = machine.run(sys.executable, "-c", JOIN, address, **{"HOME": "/tmp", **environment})
    *lines, took_s = output.splitlines()
    assert len(lines) == 1, output
    assert (status == 0) == lines[0].startswith("joined"), output
    assert status == 0 or float(took_s) < CHECK_LIMIT_S + 2, output  # two for a busy machine
    return lines[0]


def test_a_driver_on_a_node_with_the_token_joins(network: Network) -> None:
    assert join(network.head, network.address) == f"joined {CPUS:.1f}"


def test_auto_without_ray_on_this_machine(network: Network) -> None:
    line = join(network.bare, "auto")
    assert line.startswith("no Ray runs on this machine, so there is no cluster to join (ray.address: auto)")
    assert "`ray start --address=HEAD:6379`" in line


def test_ray_client_in_the_environment(network: Network) -> None:
    line = join(network.head, "auto", RAY_ADDRESS="ray://head:10001")
    assert line.startswith("RAY_ADDRESS: ray://head:10001 is an address for Ray Client")


def test_a_machine_that_is_no_node_of_the_cluster(network: Network) -> None:
    line = join(network.bare, network.address)
    assert line.startswith(
        f"cannot join the Ray cluster at {network.address} (ray.address): this machine is not a node"
    )
    assert f"`ray start --address={network.address}`" in line
    line = join(network.open_head, network.address)
    assert "not a node of the cluster (its Ray belongs to another cluster)" in line


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nowhere.invalid:6379", "the name nowhere.invalid does not resolve"),
        (
            "10.77.0.1:6380",
            "nothing listens there; start the head node with `ray start --head --port=6379`, or give "
            "the address that it printed; if that is 127.0.0.1, start it with --node-ip-address=10.77.0.1",
        ),
        ("127.0.1.1:6380", "nothing listens there; here 127.0.1.1 means this machine itself"),
        ("10.77.0.99:6379", "10.77.0.99 cannot be reached"),
    ],
)
def test_nothing_at_the_address(network: Network, address: str, says: str) -> None:
    assert f"at {address} (ray.address): {says}" in join(network.bare, address)


def test_a_firewall_that_swallows_packets(network: Network) -> None:
    network.bare.run("ip", "neigh", "add", "10.77.0.98", "lladdr", "02:00:00:00:00:01", "dev", "eth0")  # no such card
    assert "10.77.0.98 cannot be reached (no answer within 5 s)" in join(network.bare, "10.77.0.98:6379")


def test_a_port_that_is_not_that_of_the_head(network: Network) -> None:
    service = network.bare.start(sys.executable, "-c", f"import signal, socket\n{ON_ANOTHER_PORT}")
    time.sleep(1)
    line = join(network.bare, f"{network.bare.address}:7000")
    network.bare.run("pkill", "-f", "create_server")
    service.communicate(timeout=10)
    assert "no answer of a cluster's head within 10 s; give the port of `ray start --head --port=6379`" in line
    assert "does not answer as the head of a Ray cluster" in join(network.head, f"{network.head.address}:10001")


def test_tokens(network: Network) -> None:
    wrong = "0" * 64
    line = join(network.head, network.address, RAY_AUTH_TOKEN=wrong)
    assert "the token in RAY_AUTH_TOKEN is not the cluster's; put the token that `ray get-auth-token` prints" in line
    line = join(network.head, network.address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="")
    assert "RAY_AUTH_MODE is token, but there is no token here; put the token" in line
    line = join(network.head, "auto", **NO_TOKEN)
    assert f"at {network.address} (ray.address: auto): the cluster requires a token, and there is none here" in line
    line = join(network.head, network.address, RAY_AUTH_MODE="disabled")
    assert "the cluster requires a token, and the one in RAY_AUTH_TOKEN is not sent; set RAY_AUTH_MODE=token" in line


def test_a_cluster_without_tokens(network: Network) -> None:
    address = f"{network.open_head.address}:6379"
    line = join(network.open_head, address)
    assert "the cluster has no token authentication, but this command has (RAY_AUTH_MODE=token)" in line
    assert join(network.open_head, address, **NO_TOKEN) == f"joined {CPUS:.1f}"


def test_another_version_on_the_cluster(network: Network) -> None:
    """Its versions are what the cluster's store says."""
    address = f"{network.open_head.address}:6379"

    def set_version(ray: str, python: str) -> None:
        text = f'{{"ray_version": "{ray}", "python_version": "{python}", "ray_init_cluster": false}}'
        status, output = network.open_head.run(sys.executable, "-c", SET_VERSION, address, text, **NO_TOKEN)
        assert status == 0, output

    import ray

    here = ".".join(str(part) for part in sys.version_info[:3])
    set_version("2.9.0", "3.10.1")
    line = join(network.open_head, address, **NO_TOKEN)
    set_version(ray.__version__, here)
    assert f"the cluster has Ray 2.9.0 and Python 3.10.1, but here are Ray {ray.__version__} and Python {here};" in line


def test_a_node_whose_ray_hangs(network: Network) -> None:
    head = network.open_head
    head.run("pkill", "-STOP", "raylet")
    line = join(head, "auto", **NO_TOKEN)
    assert "the Ray of this machine (raylet at 10.77.0.2:" in line
    assert "does not answer (" in line
    head.run("pkill", "-STOP", "gcs_server")
    line = join(head, "auto", **NO_TOKEN)
    assert "no answer of a cluster's head within 10 s" in line
