"""Firewalls between the nodes of a plan are found before anything slow starts, in one line with node and remedy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from roll_flash.cluster import preparation, reachability
from roll_flash.cluster.nodes import Node
from roll_flash.cluster.other_nodes import ThisNode
from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import Row, make_plan
from roll_flash.cluster.reachability import ANY_PORT, FREE_SERVER_PORT, MAX_TARGETS, Link, needed_links, shared_out
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import PlacementError
from roll_flash.processes.ports import connection_ports, server_ports

LOCALHOST = "127.0.0.1"


def config(**sections: Any) -> Config:
    resources = {
        "learner": {"rank_resources": {"CPU": 1, "ranks": 1}},
        "inference": {"server_resources": {"CPU": 1, "servers": 1}},
        "rollout": {"worker_resources": {"CPU": 1, "envs": 1}},
    }
    tree: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}]}
    for name, section in resources.items():
        tree[name] = {**section, **sections.get(name, {})}
    return load_config(tree)


def node(name: str, **resources: float) -> Node:
    amounts = {"CPU": 8.0, **resources}
    return Node(name, LOCALHOST, name, amounts, amounts)


def rows(run: Config, *nodes: Node) -> Sequence[Row]:
    return make_plan(run_parts(run, nodes), nodes).rows


def links(run: Config, *nodes: Node) -> dict[str, tuple[tuple[int, ...], set[str]]]:
    found = needed_links(run, rows(run, *nodes), "driver")
    assert len({link.target.name for link in found}) == len(found)
    return {link.target.name: (link.ports, set(link.sources)) for link in found}


def test_workers_and_the_driver_ask_servers_on_other_nodes() -> None:
    run = config(inference={"servers": 3})
    both, servers = node("both", ranks=1, envs=1, servers=1), node("servers", servers=2)
    free = (FREE_SERVER_PORT,)
    assert links(run, both, servers) == {"both": (free, {"driver"}), "servers": (free, {"both", "driver"})}
    fixed = config(inference={"servers": 3, "port": 25000})
    assert links(fixed, both, servers)["servers"] == ((25001, 25002), {"both", "driver"})


def test_ranks_reach_each_other_and_a_single_node_needs_nothing() -> None:
    run = config(learner={"ranks": 3, "placement": "spread"})
    one, two = node("one", ranks=2, envs=1), node("two", ranks=2)
    driver = replace(node("driver", servers=1), node_id="driver")
    found = links(run, driver, one, two)
    assert found == {
        "one": ((ANY_PORT,), {"two"}),
        "two": ((ANY_PORT,), {"one"}),
        "driver": ((FREE_SERVER_PORT,), {"one"}),
    }
    assert links(config(), node("driver", ranks=1, envs=1, servers=1)) == {}


def test_nccl_connects_the_first_rank_and_servers_in_both_directions() -> None:
    run = config(inference={"weight_transfer": "nccl"}, learner={"device": "auto"})
    found = needed_links(run, rows(run, node("driver", ranks=1, envs=1), node("servers", servers=1)), "driver")
    pairs = {(link.target.name, link.ports, *link.sources) for link in found}
    assert pairs == {
        ("servers", (FREE_SERVER_PORT,), "driver"),
        ("servers", (ANY_PORT,), "driver"),
        ("driver", (ANY_PORT,), "servers"),
    }


def test_of_many_nodes_each_tries_a_few_and_together_all() -> None:
    targets = [node(f"server {number}") for number in range(200)]
    sources = frozenset(f"worker {number}" for number in range(8))
    tried = shared_out([Link(target, (1,), sources, "") for target in targets])
    assert tried.keys() == sources
    assert {len(its) for its in tried.values()} == {MAX_TARGETS}
    assert len({link.target.name for its in tried.values() for link in its}) == 200


class TestTrying:
    """The nodes here are all this machine, and a closed port stands for a firewall."""

    @pytest.fixture
    def closed_port(self) -> int:
        with socket.create_server((LOCALHOST, 0)) as listening:
            return int(listening.getsockname()[1])

    def test_listening_needs_nobody_who_accepts_and_ends(self) -> None:
        this = ThisNode()

        async def tries() -> list[list[str]]:
            found = await this.ask("listen", LOCALHOST, (ANY_PORT, FREE_SERVER_PORT))
            assert found[0] in connection_ports()
            assert found[1] in server_ports() or not server_ports()
            targets = [(LOCALHOST, port) for port in found]
            open_now = await this.ask("unreachable", targets * 20)
            this.close()
            return [open_now, await this.ask("unreachable", targets)]

        assert asyncio.run(tries()) == [[""] * 40, ["Connection refused"] * 2]

    def test_who_has_the_port_already_answers(self) -> None:
        with socket.create_server((LOCALHOST, 0)) as listening:
            port = listening.getsockname()[1]
            assert reachability.listen(LOCALHOST, [port]) == ([], (port,))

    def test_an_address_that_is_not_of_the_node_is_one_line(self) -> None:
        with pytest.raises(PlacementError, match=r"^the driver's node cannot listen at the address 192\.0\.2\.1 .*"):
            asyncio.run(ThisNode().ask("listen", "192.0.2.1", (ANY_PORT,)))

    def test_a_dropped_packet_is_waited_for_a_few_seconds_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reachability, "CONNECT_TIMEOUT_S", 0.2)
        full = socket.socket()
        full.bind((LOCALHOST, 0))
        full.listen(0)  # its queue takes one connection; the kernel drops the packets of others
        with full, socket.create_connection(full.getsockname()):
            assert asyncio.run(reachability.unreachable([full.getsockname()])) == ["no answer within 0.2 s"]

    @pytest.mark.parametrize(
        ("kind", "remedy"),
        [
            ("server", "; model servers listen there at 25000; open them in the firewall for the run's other nodes"),
            ("rank", f"; ranks use any of the ports {connection_ports().start}-{connection_ports().stop - 1}; open"),
        ],
    )
    def test_a_closed_port_ends_the_start_before_anything_is_sent(
        self, kind: str, remedy: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nodes whose listening is lost: what they say they listen at is closed."""
        done: list[str] = []

        class Elsewhere(ThisNode):
            def __init__(self, its_node: Node, kinds: Any) -> None:
                super().__init__()
                self.node_id, self.label, self.kinds = its_node.node_id, f"node {its_node.name}", kinds

            async def ask(self, method: str, *arguments: Any, timeout_s: float = 0) -> Any:
                done.append(method)
                return (closed_port,) if method == "listen" else await super().ask(method, *arguments)

        run = config(inference={"port": 25000}) if kind == "server" else config(learner={"ranks": 2})
        nodes = [node("envs", envs=1), node("one", ranks=1), node("two", ranks=1), node("far", servers=1)]
        its = [row for row in rows(run, *nodes, node("three", ranks=1)) if row.part.kind in (kind, "worker")]
        monkeypatch.setattr(preparation, "OtherNode", Elsewhere)
        monkeypatch.setattr(preparation.ray.util, "get_node_ip_address", lambda: LOCALHOST)
        monkeypatch.setattr(preparation.ray, "get_runtime_context", lambda: Driver())
        prepared = preparation.NodePreparation(run, None, (), lambda note: None)
        with pytest.raises(PlacementError) as caught:
            asyncio.run(prepared.prepare(its))
        said = str(caught.value)
        assert f"at port {closed_port} (Connection refused){remedy}" in said
        assert said.startswith("node far (127.0.0.1) cannot be reached from " if kind == "server" else "node ")
        assert "\n" not in said
        assert "compare" not in done


class Driver:
    def get_node_id(self) -> str:
        return "driver"
