"""The placement plan: pure, so any cluster can be tried."""

from __future__ import annotations

import time
from typing import Any

import pytest

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Part, RunParts, run_parts
from roll_flash.cluster.plan import Plan, make_plan, ports_text
from roll_flash.cluster.plan_checks import sandbox_load
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError, PlacementError
from roll_flash.processes.ports import connection_ports, server_ports
from roll_flash.sandboxes import SandboxSpec

KERNEL_PORTS = ports_text([connection_ports()])
TREE: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}]}


def node(number: int, **resources: float) -> Node:
    return Node(f"id-{number}", f"10.0.0.{number}", f"node-{number}", resources, resources)


def parts(kind: Any, count: int, **resources: float) -> tuple[Part, ...]:
    return tuple(Part(f"{kind} {index}", kind, resources) for index in range(count))


def wanted(*groups: tuple[Part, ...], placement: Any = "pack") -> RunParts:
    return RunParts(
        tuple(part for group in groups for part in group), dict.fromkeys(("rank", "server", "worker"), placement)
    )


def places(plan: Plan) -> list[str]:
    return [row.node.name for row in plan.rows]


def test_pack_fills_one_node_after_another_and_spread_takes_turns() -> None:
    nodes = [node(1, CPU=2), node(2, CPU=4), node(3, CPU=1)]
    servers = parts("server", 5, CPU=1)
    assert places(make_plan(wanted(servers), nodes)) == ["node-1", "node-1", *["node-2"] * 3]
    spread = make_plan(wanted(servers, placement="spread"), nodes)
    assert places(spread) == ["node-1", "node-2", "node-3", "node-1", "node-2"]


def test_kinds_of_parts_go_to_the_nodes_that_have_their_resources() -> None:
    nodes = [node(1, CPU=1), node(2, CPU=8, GPU=2), node(3, CPU=8, sandboxes=4)]
    plan = make_plan(
        wanted(parts("rank", 1, CPU=1, GPU=1), parts("server", 1, CPU=1, GPU=1), parts("worker", 4, sandboxes=1)), nodes
    )
    assert places(plan) == ["node-2", "node-2", *["node-3"] * 4]
    assert plan.lines() == [
        "part        node               CPUs    GPUs  other",
        "rank 0      node-2 (10.0.0.2)  1       0",
        "server 0    node-2 (10.0.0.2)  1       1",
        "worker 0-3  node-3 (10.0.0.3)  0 each        1 sandboxes each",
    ]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "there is no node"),
        ([node(1, CPU=2)], "of 1 node(s), node-1 has the most left: 0 CPU"),
        ([node(1, CPU=0.5), node(2, CPU=1)], "of 2 node(s), node-1 has the most left: 0.5 CPU"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_keys_to_change(nodes: list[Node], message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make_plan(wanted(parts("server", 3, CPU=1)), nodes)
    assert message in str(caught.value)
    assert "inference.servers or inference.server_resources" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_laptop_has_room_for_a_small_run_and_not_for_eight_servers() -> None:
    laptop = [node(1, CPU=8)]
    make_plan(run_parts(load_config(TREE), laptop), laptop)
    many = load_config({**TREE, "inference": {"servers": 8}})
    with pytest.raises(PlacementError, match="server 7 of 8"):
        make_plan(run_parts(many, laptop), laptop)


def config(**sections: Any) -> Config:
    return load_config({**TREE, **sections})


def gpus_of(run: Config, nodes: list[Node], **how: Any) -> dict[str, tuple[float, tuple[str, ...]]]:
    """For each part, how many GPUs it reserves and which."""
    plan = make_plan(run_parts(run, nodes, **how), nodes)
    return {row.part.name: (row.part.gpus, row.gpus) for row in plan.rows if row.part.kind != "worker"}


class TestGpus:
    """A node here is made up; `tests/cluster/test_gpu_parts.py` has a real Ray."""

    def test_every_part_has_whole_ones(self) -> None:
        run = config(learner={"ranks": 2}, inference={"servers": 3})
        assert gpus_of(run, [node(1, CPU=8, GPU=8)]) == {
            "rank 0": (1, ("0",)),
            "rank 1": (1, ("1",)),
            "server 0": (1, ("2",)),
            "server 1": (1, ("3",)),
            "server 2": (1, ("4",)),
        }

    def test_a_single_one_is_shared_by_one_rank_and_one_server(self) -> None:
        one_gpu = [node(1, CPU=8, GPU=1)]
        assert gpus_of(config(), one_gpu) == {"rank 0": (0.5, ("0",)), "server 0": (0.5, ("0",))}
        assert make_plan(run_parts(config(), one_gpu), one_gpu).shares_gpus

    def test_alone_a_server_or_rank_has_it_for_itself(self) -> None:
        one_gpu = [node(1, CPU=8, GPU=1)]
        assert gpus_of(config(), one_gpu, trains=False) == {"server 0": (1, ("0",))}
        on_cpu = config(learner={"device": "cpu"})
        assert gpus_of(on_cpu, one_gpu)["server 0"] == (1, ("0",))
        assert gpus_of(config(), one_gpu, gpu_servers=False) == {"rank 0": (1, ("0",)), "server 0": (0, ())}
        assert not make_plan(run_parts(on_cpu, one_gpu), one_gpu).shares_gpus

    def test_two_nodes_with_one_each_share_none(self) -> None:
        nodes = [node(1, CPU=8, GPU=1), node(2, CPU=8, GPU=1)]
        assert gpus_of(config(), nodes) == {"rank 0": (1, ("0",)), "server 0": (1, ("0",))}

    def test_a_server_has_as_many_of_one_node_as_it_is_split_over(self) -> None:
        run = config(learner={"ranks": 2}, inference={"servers": 2, "tensor_parallel_size": 2})
        found = gpus_of(run, [node(1, CPU=16, GPU=8)])
        assert [found["server 0"], found["server 1"]] == [(2, ("2", "3")), (2, ("4", "5"))]
        one_each = [node(number, CPU=8, GPU=1) for number in range(6)]
        with pytest.raises(PlacementError, match=r"server 0 of 2 needs 2 CPU, 2 GPU, and no node has that free"):
            gpus_of(run, one_each)

    def test_ids_are_those_of_the_machine(self) -> None:
        there = {"CPU": 8.0, "GPU": 3.0}
        slices = dict.fromkeys(("MIG-b", "MIG-a", "4"), 20 * 2**30)
        here = [Node("id", "127.0.0.1", "here", there, there, slices)]
        run = config(inference={"servers": 2})
        assert gpus_of(run, here) == {
            "rank 0": (1, ("MIG-b",)),
            "server 0": (1, ("MIG-a",)),
            "server 1": (1, ("4",)),
        }

    def test_of_a_node_that_another_run_uses_too_only_ray_knows_which_are_free(self) -> None:
        there = [Node("id", "10.0.0.1", "node-1", {"CPU": 8.0, "GPU": 8.0}, {"CPU": 4.0, "GPU": 4.0})]
        assert gpus_of(config(), there) == {"rank 0": (1, ()), "server 0": (1, ())}
        lines = make_plan(run_parts(config(), there), there).lines()
        assert "1 (which, Ray chooses)" in lines[1]

    def test_the_table_shows_them(self) -> None:
        eight = {"CPU": 64.0, "GPU": 8.0, "memory": 256.0 * 2**30}
        here = [Node("id", "10.0.0.1", "node-1", eight, eight, {str(number): 80 * 2**30 for number in range(8)})]
        run = config(
            learner={"ranks": 4, "rank_resources": {"CPU": 2, "GPU": 1, "memory": 32 * 2**30}},
            inference={"servers": 2, "tensor_parallel_size": 2, "port": 25000},
        )
        assert make_plan(run_parts(run, here), here).lines() == [
            "part        node               CPUs    GPUs          GPU memory    memory       ports",
            f"rank 0-3    node-1 (10.0.0.1)  2 each  0-3           80 GiB each   32 GiB each  {KERNEL_PORTS}",
            "server 0-1  node-1 (10.0.0.1)  2 each  4-7 (2 each)  160 GiB each               25000-25001",
            "worker 0    node-1 (10.0.0.1)  0.1",
        ]

    def test_the_table_shows_a_shared_one(self) -> None:
        one = {"CPU": 8.0, "GPU": 1.0}
        here = [Node("", "127.0.0.1", "here", one, one, {"MIG-1": 24 * 2**30})]
        assert make_plan(run_parts(config(), here), here).lines() == [
            "part      node              CPUs  GPUs          GPU memory     ports",
            "rank 0    here (127.0.0.1)  1     0.5 of MIG-1  24 GiB shared",
            f"server 0  here (127.0.0.1)  1     0.5 of MIG-1  24 GiB shared  {ports_text([server_ports()])}",
            "worker 0  here (127.0.0.1)  0.1",
        ]

    @pytest.mark.parametrize(
        ("sections", "says"),
        [
            (
                {"inference": {"servers": 4, "tensor_parallel_size": 2}},
                "the run needs 9 GPU(s) (1 rank(s) of 1 and 4 server(s) of 2), and there are 8; lower learner.ranks, "
                "inference.servers or inference.tensor_parallel_size, or add nodes",
            ),
            (
                {"learner": {"ranks": 8}},
                "the run needs 9 GPU(s) (8 rank(s) of 1 and 1 server(s) of 1), and there are 8; lower learner.ranks or "
                "inference.servers, or add nodes",
            ),
            (
                {"learner": {"ranks": 8}, "inference": {"servers": 2, "tensor_parallel_size": 4}},
                "the run needs 16 GPU(s) (8 rank(s) of 1 and 2 server(s) of 4), and there are 8; lower learner.ranks, "
                "inference.servers or inference.tensor_parallel_size, or add nodes",
            ),
        ],
    )
    def test_more_than_there_are_is_one_line(self, sections: Any, says: str) -> None:
        with pytest.raises(PlacementError) as caught:
            gpus_of(config(**sections), [node(1, CPU=64, GPU=8)])
        assert str(caught.value) == says

    def test_ranks_and_servers_do_not_share_two(self) -> None:
        """Ray would put both ranks on the first GPU, where NCCL refuses to work."""
        with pytest.raises(PlacementError, match=r"needs 4 GPU\(s\) \(2 rank\(s\) of 1 and 2 server\(s\) of 1\)"):
            gpus_of(config(learner={"ranks": 2}, inference={"servers": 2}), [node(1, CPU=8, GPU=2)])

    def test_those_that_another_run_has_are_not_counted(self) -> None:
        there = [Node("id", "10.0.0.1", "node-1", {"CPU": 8.0, "GPU": 8.0}, {"CPU": 4.0, "GPU": 1.0})]
        with pytest.raises(PlacementError, match=r"needs 2 GPU.*there are 8, 1 of them free"):
            gpus_of(config(), there)

    def test_what_must_compute_on_one_is_not_planned_on_a_cpu(self) -> None:
        cpus = [node(1, CPU=8)]
        with pytest.raises(PlacementError, match=r"needs 1 GPU\(s\) \(1 rank\(s\) of 1\), and there is none.*doctor"):
            gpus_of(config(learner={"device": "cuda"}), cpus)
        with pytest.raises(PlacementError, match=r"needs 1 GPU\(s\) \(1 server\(s\) of 1\), and there is none"):
            gpus_of(config(), cpus, gpu_servers=True)
        assert gpus_of(config(), cpus) == {"rank 0": (0, ()), "server 0": (0, ())}

    def test_a_server_that_reserves_none_where_vllm_computes_on_them_is_refused(self) -> None:
        run = config(inference={"server_resources": {"CPU": 1, "servers": 1}})
        with pytest.raises(PlacementError, match=r"inference.server_resources has no GPU.*add GPU: 1"):
            gpus_of(run, [node(1, CPU=8, GPU=2, servers=1)], gpu_servers=True)

    @pytest.mark.parametrize(
        ("sections", "says"),
        [
            ({"learner": {"device": "cpu", "rank_resources": {"GPU": 1}}}, "rank_resources has GPU, but device is cpu"),
            ({"learner": {"device": "cuda", "rank_resources": {"CPU": 1}}}, "rank_resources has no GPU"),
            ({"learner": {"ranks": 2, "rank_resources": {"GPU": 0.5}}}, "each rank computes on one GPU of its own"),
            ({"learner": {"rank_resources": {"GPU": 2}}}, "each rank computes on one GPU of its own"),
            ({"inference": {"server_resources": {"GPU": 4}}}, "GPU: 4 is not tensor_parallel_size=1"),
            (
                {"inference": {"tensor_parallel_size": 2, "server_resources": {"GPU": 0.5}}},
                "GPU: 0.5 is not tensor_parallel_size=2",
            ),
            ({"inference": {"tensor_parallel_size": 2, "server_resources": {"CPU": 1}}}, "add GPU: 2"),
            ({"inference": {"tensor_parallel_size": 2, "engine": "transformers"}}, "is for the engine vllm"),
        ],
    )
    def test_reservations_that_contradict_the_rest_are_refused_when_the_config_is_read(
        self, sections: Any, says: str
    ) -> None:
        with pytest.raises(ConfigError, match=says):
            config(**sections)

    def test_halves_that_the_config_asks_for_are_shared(self) -> None:
        half = {"CPU": 1, "GPU": 0.5}
        run = config(learner={"rank_resources": half}, inference={"server_resources": half})
        assert gpus_of(run, [node(1, CPU=8, GPU=2)]) == {"rank 0": (0.5, ("0",)), "server 0": (0.5, ("0",))}


class TestSandboxes:
    """Two workers with up to 8 sandboxes each at a time, on one node of 16 CPUs."""

    RUN = config(rollout={"max_concurrent": 15, "workers": 2})
    SPECS = (SandboxSpec(cpus=0.5, memory_mb=1024), SandboxSpec(cpus=1, memory_mb=512))

    def load(self, *specs: SandboxSpec, gib: float) -> list[str]:
        there = node(1, CPU=16, memory=gib * 2**30)
        return sandbox_load(self.RUN, make_plan(run_parts(self.RUN, [there]), [there]), specs)

    def test_what_they_may_use_together_is_shown(self) -> None:
        assert self.load(*self.SPECS, gib=16) == ["16 sandboxes on node-1 may use 16 CPUs and 16 GiB"]
        assert self.load(gib=16) == [], "no environment needs one"

    def test_more_than_their_node_has_is_a_warning_with_the_keys_to_change(self) -> None:
        (line,) = self.load(*self.SPECS, gib=12)
        assert line.startswith(
            "warning: 16 sandboxes on node-1 may use 16 CPUs and 16 GiB, and it has 16 CPUs and 12 GiB"
        )
        assert "rollout.max_concurrent, sandbox.cpus or sandbox.memory_mb" in line
        assert self.load(SandboxSpec(cpus=2), gib=16)[0].startswith("warning: ")


def test_a_thousand_nodes_are_planned_at_once() -> None:
    """A bound far above what it takes (a quarter of a second on one core): the plan must not be quadratic."""
    nodes = [node(number, CPU=64, GPU=8) for number in range(1000)]
    run = wanted(
        parts("rank", 2000, CPU=1, GPU=1),
        parts("server", 6000, CPU=1, GPU=1),
        parts("worker", 16000, CPU=0.1),
        placement="spread",
    )
    began = time.process_time()
    assert len(make_plan(run, nodes).rows) == 24_000
    assert time.process_time() - began < 20
