"""Starts a run's own Ray that gives out GPUs which are not there, places ranks and servers on it, and prints as JSON
what each process was given and sees. Argument: a folder for the servers' logs. `test_gpu_parts.py` runs it.

Ray does with made-up GPUs what it does with real ones: it only counts them. The servers are a stand-in for vLLM: they
answer its routes, and tell their environment in their log.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray

from roll_flash.cluster.nodes import living_nodes, with_gpu_memory
from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import Plan
from roll_flash.cluster.reservation import Reservation
from roll_flash.config.tree import Config, RayConfig, load_config
from roll_flash.errors import RollFlashError
from roll_flash.inference.servers.control import Launcher
from roll_flash.inference.servers.remote import RemoteServer
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.gpus import assigned_gpus, environment_of
from roll_flash.processes.ray import local_ray
from tests.cluster.test_plan import TREE

GPUS = ("4", "MIG-1", "6", "7")
SERVER = """
import http.server, json, os, sys
print(json.dumps({name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")}), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    do_POST = do_GET
    def log_message(self, *_):
        pass
class Server(http.server.ThreadingHTTPServer):
    allow_reuse_port = True
Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


NVML = """
from tests.fake_nvml import FakeGpu, FakeNvml
driver = FakeNvml(FakeGpu(slices=[FakeGpu("slice", 20, uuid="MIG-1")]), *(FakeGpu(memory_gib=n) for n in range(41, 48)))
def __getattr__(name):
    return getattr(driver, name)
"""


class Rank:
    def gpus(self) -> list[str]:
        return list(assigned_gpus())


async def places_of(config: Config) -> tuple[Reservation, Plan]:
    gpus = dict.fromkeys(GPUS, 0)
    async with asyncio.timeout(30):  # Ray frees what was given back a moment later
        while (nodes := await asyncio.to_thread(living_nodes))[0].free.get("GPU") != len(GPUS):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    places = Reservation(run_parts(config, nodes, gpu_servers=True), own_ray=True, own_gpus=gpus)
    await places.reserve()
    return places, places.plan


async def seen_by_servers(config: Config, places: Reservation, logs: Path) -> dict[str, Any]:
    launcher = Launcher(
        "stand-in", "float32", lambda _, host, port: [sys.executable, "-c", SERVER, host, str(port)], {}
    )
    found = {}
    for index in range(config.inference.servers):
        server = RemoteServer(index, launcher, config.inference, logs, "key", places)
        try:
            await server.start()
            log = await asyncio.to_thread(Path(server.log).read_text)
            found[f"server {index}"] = [list(server.gpus), json.loads(log.splitlines()[0])]
        finally:
            await server.close()
    return found


WHOLE = {"learner": {"ranks": 2}, "inference": {"tensor_parallel_size": 2}}
HALVES = {"learner": {"rank_resources": {"GPU": 0.5}}, "inference": {"server_resources": {"GPU": 0.5}}}


async def planned_and_seen(tree: dict[str, Any], logs: Path) -> dict[str, Any]:
    """The last rank starts first: what it gets does not depend on that."""
    config = load_config({**TREE, **tree})
    places, plan = await places_of(config)
    actor: Any = ray.remote(Rank)
    names = [row.part.name for row in reversed(plan.rows) if row.part.kind == "rank"]
    ranks = {name: actor.options(**(await places.place(name)).options).remote() for name in names}
    seen = {name: [await rank.gpus.remote(), None] for name, rank in ranks.items()}
    seen |= await seen_by_servers(config, places, logs)
    for rank in ranks.values():
        ray.kill(rank)
    await places.close()
    return {"planned": {row.part.name: list(row.gpus) for row in plan.rows if row.part.gpus}, "seen": seen}


async def none(logs: Path) -> dict[str, Any]:
    """A server that reserves no GPU sees none, although Ray hides none from processes without a reservation."""
    config = load_config({**TREE, "inference": {"server_resources": {"CPU": 1}}, "learner": {"device": "cpu"}})
    places = Reservation(run_parts(config, living_nodes()), own_ray=True)
    await places.reserve()
    seen = await seen_by_servers(config, places, logs)
    await places.close()
    return seen


async def rank_without_cuda() -> str:
    """What the learner says if its rank has a GPU reserved, and torch (here without CUDA) sees none."""
    config = load_config(TREE)
    places, _ = await places_of(config)
    learner = FsdpLearner(resolve_model("tiny"), config.learner, async_ratio=0.0)
    try:
        await learner.check_model(places)
        return "no error"
    except RollFlashError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        await learner.close()
        await places.close()


def gpu_memory() -> list[dict[str, int]]:
    """GiB of each GPU of each node, as a driver that joined this Ray gets to know it."""
    return [{gpu: size // 2**30 for gpu, size in node.gpus.items()} for node in with_gpu_memory(living_nodes())]


async def main(logs: Path) -> None:
    os.environ |= environment_of(GPUS)  # Ray takes its ids from it
    (logs / "pynvml.py").write_text(NVML)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(logs), os.environ.get("PYTHONPATH", "."), str(Path.cwd())])
    local_ray.own_gpus = lambda _: dict.fromkeys(GPUS, 0)
    async with local_ray.local_ray(RayConfig(num_cpus=16)):
        found: dict[str, Any] = {
            "memory": await asyncio.to_thread(gpu_memory),
            "whole": await planned_and_seen(WHOLE, logs / "whole"),
            "halves": await planned_and_seen(HALVES, logs / "halves"),
            "none": await none(logs / "none"),
            "rank without CUDA": await rank_without_cuda(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    for name in ("whole", "halves", "none"):
        Path(sys.argv[1], name).mkdir()
    asyncio.run(main(Path(sys.argv[1])))
