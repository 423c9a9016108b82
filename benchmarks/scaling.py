"""What more servers, workers and nodes bring, and what many of them cost: writes results/scaling.json and .md.

    python benchmarks/scaling.py [--quick] [--only PART ...] [--output FOLDER]

Servers and workers: mocks with a fixed latency, so that the cores of this machine are not what limits. Weights and
runs: three machines of namespaces with real Ray between them (root only); the links count the bytes. Plan: a made-up
cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from machine import machine  # noqa: E402
from rollout_engine import Load, answer_token_ids, measure, mock_servers  # noqa: E402

from roll_flash.cluster.nodes import Node  # noqa: E402
from roll_flash.cluster.parts import Part, RunParts  # noqa: E402
from roll_flash.cluster.plan import make_plan  # noqa: E402
from roll_flash.cluster.reservation import Reservation  # noqa: E402
from roll_flash.config.tree import RayConfig, load_config  # noqa: E402
from roll_flash.engines.inference import StagedWeights  # noqa: E402
from roll_flash.processes.ray.local_ray import local_ray  # noqa: E402
from roll_flash.rollout.fleet import POLL_S  # noqa: E402
from roll_flash.weight_sync.mirrors import Mirrors  # noqa: E402
from tests.cluster.machines import machines, why_not  # noqa: E402
from tests.cluster.test_many_machines import (  # noqa: E402
    RUN_TIMEOUT_S,
    asks,
    end,
    failed,
    rows,
    train,
    wait_for,
)
from tests.cluster.test_many_machines import steps as done_steps  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SLOTS, LATENCY_S = 8, 0.25
SERVERS_PER_NODE = 2
PARTS = 200
MODEL_BYTES = 513 * 2**20
LINK = "1gbit"
LORA_SHARE = 0.04
"""Part of the weights that a change like LoRA's touches: the 18.7 of 513 MiB of SmolLM2-135M's adapters, rounded up."""
STEPS, QUICK_STEPS = 6, 1


def servers(steps: int) -> dict[str, float]:
    """Rollouts per second with one and two servers that serve SLOTS requests at a time, LATENCY_S each."""
    found = {}
    for count in (1, 2):
        with mock_servers(count, LATENCY_S, answer_token_ids(), SLOTS) as urls:
            found[str(count)] = asyncio.run(measure(Load(64, steps, 1), urls)).rollouts_per_s
    return found


def workers(steps: int) -> dict[str, float]:
    """Rollouts per second with one and four workers of SLOTS threads each, for an environment that blocks them."""
    found = {}
    for count in (1, 4):
        load = Load(64, steps, count, worker_threads=SLOTS, env_id="rollout_env:FourTurnsSlow-v0")
        with mock_servers(1, 0.01, answer_token_ids()) as urls:
            found[str(count)] = asyncio.run(measure(load, urls)).rollouts_per_s
    return found


def weights(repetitions: int, rate: str | None) -> dict[str, Any]:
    """Most bytes that leave one node, and seconds until SERVERS_PER_NODE servers of each node have read the weights: to
    one server of one other node and to all of two, whole and with few blocks changed, in turns. As in a run, mirrors
    are there already."""
    command = [sys.executable, __file__, "--weights-from-here", str(repetitions)]
    with machines("head", "one", "two", rate=rate) as (head, one, two):
        head.join_ray(cpus=1)
        for node in (one, two):
            node.join_ray(head, cpus=1)
        status, output = head.run(*command, timeout_s=900)
        assert status == 0, output
        return dict(json.loads(output.splitlines()[-1]))


class Reader:
    """In place of a server: it copies the weights out of shared memory."""

    def read(self, weights: StagedWeights) -> int:
        return len(Path(weights.path).read_bytes())

    def sent(self) -> int:
        return _sent()


async def _weights_from_here(repetitions: int) -> dict[str, Any]:
    """Run on the node with the weights: bring them to the other nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address="auto", logging_level="error", log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
    memory = os.memfd_create("weights")
    os.truncate(memory, MODEL_BYTES)
    version = 0

    def change(share: float) -> StagedWeights:
        """Change a `share` of the content, in its middle."""
        nonlocal version
        version += 1
        size = int(share * MODEL_BYTES)
        os.pwrite(memory, os.urandom(size), (MODEL_BYTES - size) // 2)
        return StagedWeights(version, f"/proc/{os.getpid()}/fd/{memory}", MODEL_BYTES, node_id=here)

    def at(node_id: str) -> Any:
        actor: Any = ray.remote(Reader)
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return actor.options(num_cpus=0, scheduling_strategy=there).remote()

    readers = {node_id: [at(node_id) for _ in range(SERVERS_PER_NODE)] for node_id in others}
    mirrors = Mirrors(here)

    async def sent_by_all() -> list[int]:
        return [_sent(), *await asyncio.gather(*(readers[node][0].sent.remote() for node in others))]

    async def timed(share: float, targets: list[str], servers: int) -> tuple[float, int]:
        staged, before, began = change(share), await sent_by_all(), time.perf_counter()
        found = await mirrors.bring(staged, targets)
        asked = [each.read.remote(found[node]) for node in targets for each in readers[node][:servers]]
        assert set(await asyncio.gather(*asked)) == {MODEL_BYTES}, found
        seconds = time.perf_counter() - began
        return seconds, max(after - earlier for after, earlier in zip(await sent_by_all(), before, strict=True))

    cases: dict[str, tuple[float, list[str], int]] = {
        "whole, one server": (1.0, others[:1], 1),
        "whole, two nodes": (1.0, others, SERVERS_PER_NODE),
        "few blocks, two nodes": (LORA_SHARE, others, SERVERS_PER_NODE),
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
    try:
        for repetition in range(repetitions + 1):
            for name, case in cases.items():
                measured = await timed(*case)
                if repetition:  # the first one starts what a run starts once
                    found[name].append(measured)
    finally:
        await mirrors.close()
    return {
        name: {
            "seconds": [seconds for seconds, _ in several],
            "sent_mib": statistics.median(sent for _, sent in several) / 2**20,
        }
        for name, several in found.items()
    }


def _sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def plan(nodes: int = 1000) -> dict[str, float]:
    """Plan a run over a made-up cluster, and what its driver and links have to do for a million environments."""
    resources = {"CPU": 64.0, "GPU": 8.0}
    cluster = [Node(f"{i}", f"10.0.{i // 250}.{i % 250}", f"node-{i}", resources, resources) for i in range(nodes)]
    parts = [Part(f"rank {i}", "rank", {"CPU": 1.0, "GPU": 1.0}) for i in range(2 * nodes)]
    parts += [Part(f"server {i}", "server", {"CPU": 1.0, "GPU": 1.0}) for i in range(6 * nodes)]
    parts += [Part(f"worker {i}", "worker", {"CPU": 1.0}) for i in range(16 * nodes)]
    wanted = RunParts(tuple(parts), {"rank": "spread", "server": "spread", "worker": "spread"})
    began = time.perf_counter()
    made = make_plan(wanted, cluster)
    return {"nodes": nodes, "parts": len(made.rows), "seconds": time.perf_counter() - began}


def reservation(parts: int = PARTS) -> dict[str, Any]:
    """Seconds to reserve a place for each part in a real Ray on this machine, and for all parts to ask for theirs."""
    names = [f"worker {number}" for number in range(parts)]
    wanted = RunParts(tuple(Part(name, "worker", {"CPU": 1.0}) for name in names), {"worker": "pack"})

    async def timed() -> dict[str, Any]:
        async with local_ray(RayConfig(num_cpus=parts)):
            places = Reservation(wanted, own_ray=True)
            began = time.perf_counter()
            await places.reserve()
            reserved = time.perf_counter()
            await asyncio.gather(*(places.place(name) for name in names))
            asked = time.perf_counter()
            await places.close()
        return {"parts": parts, "reserve_s": reserved - began, "place_s": asked - reserved}

    return asyncio.run(timed())


def run_over_machines(steps: int) -> dict[str, Any]:
    """Seconds of a whole run whose ranks, server and workers are on two other machines, and its largest parity."""
    with machines("head", "envs", "gpus") as (head, envs, gpus):
        head.join_ray(cpus=1)
        envs.join_ray(head, resources='{"envs": 2, "ranks": 1}')
        gpus.join_ray(head, resources='{"servers": 1, "ranks": 1}')
        settings = {"learner.ranks": 2, "learner.threads": 1, "rollout.workers": 2, "steps": steps}
        began = time.perf_counter()
        status, output = head.run(*train(head, **settings), timeout_s=RUN_TIMEOUT_S)
        seconds = time.perf_counter() - began
        assert status == 0, output
        parity = max(row["weights/parity"] for row in rows(head) if "weights/parity" in row)
    return {"steps": steps, "seconds": seconds, "parity": parity}


def lost_node(steps: int) -> dict[str, Any]:
    """One of two machines with a server and a worker each loses its power for `steps` steps, and comes back."""
    with machines("head", "one", "two") as (head, one, two):
        head.join_ray(cpus=2, resources='{"ranks": 1}')
        for each in (one, two):
            each.join_ray(head, resources='{"envs": 1, "servers": 1}')
        settings = {"rollout.workers": 2, "inference.servers": 2, "inference.health_timeout_s": 5, "steps": 1000}
        run = head.start(*train(head, **settings))
        wait_for(lambda: done_steps(head) >= 1, run, "step")
        two.power_off()
        before = done_steps(head)
        wait_for(lambda: done_steps(head) >= before + steps, run, "steps with one machine")
        two.power_on()
        two.join_ray(head, resources='{"envs": 1, "servers": 1}')
        began = time.perf_counter()
        first: dict[str, float] = {}

        def used() -> bool:
            for part, pairs in {"worker": [(two, one), (two, two)], "server": [(one, two), (two, two)]}.items():
                if part not in first and any(asks(*pair) for pair in pairs):
                    first[part] = time.perf_counter() - began
            return len(first) == 2

        wait_for(used, run, "use of the machine that came back")
        end(run, head)
        episodes = sum(failed(head).values())
    in_flight = load_config(ROOT / "configs/ci.yaml").rollout.max_concurrent
    return {"episodes": episodes, "in_flight": in_flight, "worker_s": first["worker"], "server_s": first["server"]}


ROW_BYTES, TURNS_PER_EPISODE, TURN_S = 19_500, 4, 10.0
PUBLISH_EVERY_S = 60.0
ENVIRONMENTS_PER_WORKER = 64
CALLS_PER_S, LINK_BYTES_PER_S = 1_600, 1.25e9


def load_of(environments: int) -> dict[str, float]:
    """What a run with so many environments asks of the driver and of each link, by counting.

    Calls: each worker is polled at most every POLL_S and gets one submit with each poll; that of a learner's rank is
    nothing beside. Rows: one per episode. Weights: a 7 B model in bfloat16, once to each node, of eight GPUs each.
    """
    workers = max(1, environments // ENVIRONMENTS_PER_WORKER)
    nodes = max(1, workers // 16)
    episodes_per_s = environments / (TURNS_PER_EPISODE * TURN_S)
    return {
        "environments": environments,
        "workers": workers,
        "nodes": nodes,
        "calls_per_s": 2 * workers / POLL_S,
        "rows_per_s": episodes_per_s,
        "row_mb_per_s_and_node": episodes_per_s * ROW_BYTES / nodes / 1e6,
        "weight_mb_per_s_and_node": 14e9 / PUBLISH_EVERY_S / 1e6,
    }


def as_page(result: dict[str, Any]) -> str:
    two, four = (result[name] for name in ("servers", "workers"))
    lines = [
        "# Scaling",
        "",
        f"{result['machine']}, load {result['load']:.1f} at the start. `python benchmarks/scaling.py` makes this page.",
        "",
        "| figure | measured | target |",
        "|---|---|---|",
        f"| 2 servers against 1 (mocks: {SLOTS} requests at a time, {LATENCY_S} s each) | {two['2']:.1f} against "
        f"{two['1']:.1f} rollouts/s: {two['2'] / two['1']:.2f} x | >= 1.9 x |",
        f"| 4 workers against 1 (steps that block one of {SLOTS} threads) | {four['4']:.1f} against {four['1']:.1f} "
        f"rollouts/s: {four['4'] / four['1']:.2f} x | >= 3.8 x |",
    ]
    for part, links in {"weights": "links as fast as the processors", "weights over links": f"links of {LINK}"}.items():
        if part not in result:
            continue
        one, both, few = (
            result[part][key] for key in ("whole, one server", "whole, two nodes", "few blocks, two nodes")
        )
        mib = MODEL_BYTES / 2**20
        ratios = [many / single for single, many in zip(one["seconds"], both["seconds"], strict=True)]
        medians = [statistics.median(each["seconds"]) for each in (one, both, few)]
        lines += [
            f"| {mib:.0f} MiB of weights to {2 * SERVERS_PER_NODE} servers on 2 other nodes against 1, {links} | "
            f"{medians[1]:.2f} s against {medians[0]:.2f} s (shortest {min(both['seconds']):.2f} and "
            f"{min(one['seconds']):.2f} s): {statistics.median(ratios):.2f} x, the median of pairs | <= 1.3 x |",
            f"| most sent by one node, {links} | {both['sent_mib']:.0f} MiB | {mib:.0f} MiB: each link once |",
            f"| with {LORA_SHARE:.0%} of the content changed, {links} | {few['sent_mib']:.0f} MiB, "
            f"{medians[2]:.2f} s | <= 10 % of the bytes |",
        ]
    if run := result.get("run"):
        lost = result["lost node"]
        lines += [
            f"| a run of {run['steps']} steps over 3 machines (head; environments + rank; server + rank), tiny model | "
            f"{run['seconds']:.0f} s; parity {run['parity']:.1e} | <= 180 s; <= 1e-4 |",
            f"| one of two machines with server and worker loses its power: episodes lost | {lost['episodes']} | <= "
            f"{lost['in_flight']}, the turns in flight |",
            f"| seconds from the end of `ray start` there until it plays, and until its server is asked | "
            f"{lost['worker_s']:.0f} and {lost['server_s']:.0f} | <= 30 |",
        ]
    planned, reserved = result["plan"], result["reservation"]
    lines += [
        f"| places for {reserved['parts']} parts: reserved, looked up by each part | {reserved['reserve_s']:.2f} s, "
        f"{reserved['place_s']:.2f} s | |",
        f"| plan of {planned['nodes']:,} nodes and {planned['parts']:,} parts | {planned['seconds']:.2f} s | <= 2 s |",
        "",
        "Weights: three machines of network namespaces, whose copies all share these cores: without a limit the times",
        f"are those of processors, not of networks; with {LINK} in each direction of a link (`tc`), of both. Each",
        "mirror serves all servers of its node and passes the weights on to the next node; a server is a process that",
        "copies the weights out of shared memory. The two runs use servers of `inference.engine: transformers`.",
        "",
        "## Up to a million environments, by counting",
        "",
        f"A worker plays {ENVIRONMENTS_PER_WORKER} environments, a node has 16 workers; a turn takes {TURN_S:g} s, an "
        f"episode {TURNS_PER_EPISODE} turns and {ROW_BYTES / 1e3:g} KB; 14 GB of weights every {PUBLISH_EVERY_S:g} s.",
        "",
        f"| environments | workers | nodes | control calls/s (one driver: {CALLS_PER_S:,}) | rows/s "
        f"| rows MB/s and node | weights MB/s and node (10 Gbit/s: {LINK_BYTES_PER_S / 1e6:,.0f}) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["counted"]:
        lines.append(
            f"| {row['environments']:,} | {row['workers']:,} | {row['nodes']:,} | {row['calls_per_s']:,.0f} | "
            f"{row['rows_per_s']:,.0f} | {row['row_mb_per_s_and_node']:.2f} | {row['weight_mb_per_s_and_node']:.0f} |"
        )
    most = next((row for row in reversed(result["counted"]) if row["calls_per_s"] <= CALLS_PER_S), None)
    if most is not None:
        lines += ["", f"One driver's calls are enough for {most['environments']:,} environments in this count."]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only show that it runs; write nothing")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="measure these again; the page keeps its other figures"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--weights-from-here", type=int, metavar="REPETITIONS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.weights_from_here:
        print(json.dumps(asyncio.run(_weights_from_here(options.weights_from_here))))
        return
    steps, repetitions = (QUICK_STEPS, 1) if options.quick else (STEPS, 5)
    result: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0]}
    parts: dict[str, Callable[[], Any]] = {
        "servers": lambda: servers(steps),
        "workers": lambda: workers(steps),
        "weights": lambda: weights(repetitions, None),
        "weights over links": lambda: weights(repetitions, LINK),
        "run": lambda: run_over_machines(steps),
        "lost node": lambda: lost_node(steps),
        "plan": plan,
        "reservation": reservation,
        "counted": lambda: [load_of(10**power) for power in range(3, 7)],
    }
    if reason := why_not():
        print(f"no weights and runs between nodes: {reason}", file=sys.stderr)
        for name in ("weights", "weights over links", "run", "lost node"):
            del parts[name]
    if options.only:
        if unknown := set(options.only) - set(parts):
            parser.error(f"there is no part {sorted(unknown)[0]!r}; there are {', '.join(parts)}")
        result = {**json.loads((RESULTS / "scaling.json").read_text()), **result}
        parts = {name: parts[name] for name in options.only}
    for name, part in parts.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        result[name] = part()
    page = as_page(result)
    print(page)
    if not options.quick:
        (options.output / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "scaling.md").write_text(page)


if __name__ == "__main__":
    main()
