"""Does a placement plan fit into the memory of its GPUs and hosts? By `memory.py` and `host_memory.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Part
from roll_flash.cluster.plan import Plan, Row
from roll_flash.config.tree import Config
from roll_flash.errors import ModelError, PlacementError
from roll_flash.models.shape import ModelShape, read_shape
from roll_flash.planner.machines.host_memory import host_memory
from roll_flash.planner.machines.memory import (
    FIRST_RANK,
    GIB,
    MemoryUse,
    cache_bytes,
    cache_bytes_per_token,
    rank_memory,
    server_memory,
)

RANK_ADVICE = (
    "more learner.ranks, learner.gradient_checkpointing=true, fewer learner.micro_batch_tokens, or adapters "
    "(learner.lora.rank) need less"
)
SERVER_ADVICE = "a larger inference.tensor_parallel_size, or a smaller model.max_length, needs less"
NOT_CHECKED = "not checked"
SHARED_ADVICE = "a smaller inference.kv_cache_gib needs less, or give rank and server a GPU each"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU of a plan, or several that are used alike."""

    parts: tuple[Part, ...]
    """The parts that use it, a rank before a server."""
    memory: int
    """Its bytes."""
    uses: tuple[MemoryUse, ...]
    """For each part; that of a server with its key-value cache."""

    @property
    def total(self) -> int:
        return sum(use.total for use in self.uses)


def gpu_uses(config: Config, shape: ModelShape, plan: Plan) -> list[GpuUse]:
    """Return each GPU whose memory is known with what uses it."""
    on_gpu: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in plan.rows:
        for gpu in _gpus_of(row):
            on_gpu[row.node.node_id, gpu].append(row)
    return [_gpu_use(config, shape, rows, rows[0].node.gpus[gpu]) for (_, gpu), rows in on_gpu.items()]


def _gpus_of(row: Row) -> Iterator[str]:
    """The ids of a part's GPUs; if only Ray knows them, and the part has them for itself, GPUs with least memory."""
    known = row.node.gpus
    if row.gpus:
        yield from (gpu for gpu in row.gpus if gpu in known)
    elif known and row.part.gpus >= 1:
        yield min(known, key=lambda gpu: known[gpu])


def _gpu_use(config: Config, shape: ModelShape, rows: list[Row], memory: int) -> GpuUse:
    parts = tuple(dict.fromkeys(row.part.kind for row in rows))
    shares = len(parts) > 1
    uses = []
    for kind in parts:
        if kind == "rank":
            is_first = any(row.part.name == FIRST_RANK for row in rows)
            uses.append(rank_memory(config, shape, is_first=is_first))
        else:
            own = server_memory(config, shape)
            cache = max(0, cache_bytes(config, shape, memory, shares_gpu=shares))
            uses.append(MemoryUse({**own.parts, "key-value cache": cache}))
    first_of_kind = {row.part.kind: row.part for row in reversed(rows)}
    return GpuUse(tuple(first_of_kind[kind] for kind in parts), memory, tuple(uses))


@dataclass(frozen=True, slots=True)
class HostUse:
    """The host of one node of a plan."""

    node: Node
    use: MemoryUse

    @property
    def memory(self) -> int:
        """Bytes that Ray has there beside its object store; 0 if they are not known."""
        return int(self.node.total.get("memory", 0))


def host_uses(config: Config, shape: ModelShape, plan: Plan) -> list[HostUse]:
    """Return each node with what its host needs."""
    on_node: dict[str, list[Row]] = defaultdict(list)
    for row in plan.rows:
        on_node[row.node.node_id].append(row)
    trains = any(row.part.kind == "rank" for row in plan.rows)
    return [
        HostUse(rows[0].node, host_memory(config, shape, [row.part for row in rows], trains=trains))
        for rows in on_node.values()
    ]


def check_gpu_memory(config: Config, plan: Plan) -> list[str]:
    """Return how the plan of a run uses its GPUs and their hosts, in lines; none without GPUs. Raises PlacementError if
    it cannot fit.

    A model whose size is unknown is not checked, and the line says so.
    """
    if not plan.uses_gpus:
        return []
    try:
        shape = read_shape(config.model.path, config.model.revision)
    except ModelError as error:
        return [f"{NOT_CHECKED}: {error}"]
    return [*require_memory(config, shape, plan), *_unknown(plan)]


def _unknown(plan: Plan) -> list[str]:
    """Return a line if GPUs are not checked because their memory is not known."""
    rows = [row for row in plan.rows if row.part.gpus and not any(True for _ in _gpus_of(row))]
    nodes = ", ".join(sorted({row.node.name for row in rows}))
    why = "Ray tells neither which GPUs parts get there nor, without NVIDIA's driver, how large they are"
    return [f"{NOT_CHECKED} for {len(rows)} part(s) on {nodes}: {why}"] if rows else []


def require_memory(config: Config, shape: ModelShape, plan: Plan) -> list[str]:
    """Return one line for each way in which GPUs and hosts are used. Raises PlacementError for the first that cannot
    fit."""
    on_gpus, on_hosts = gpu_uses(config, shape, plan), host_uses(config, shape, plan)
    for use in on_gpus:
        _require(config, shape, use)
    for host in on_hosts:
        _require_host(host)
    lines = [f"{line}, {count} GPU(s)" for line, count in Counter(map(_line, on_gpus)).items()]
    return lines + [f"{line}, {count} node(s)" for line, count in Counter(map(_host_line, on_hosts)).items()]


def _require_host(host: HostUse) -> None:
    if 0 < host.memory < host.use.total:
        raise PlacementError(
            f"node {host.node.name}: about {host.use.text()} on the host, and Ray has {host.memory / GIB:.1f} GiB; "
            "more memory, ranks on more nodes (learner.placement=spread), or adapters (learner.lora.rank) help"
        )


def _host_line(host: HostUse) -> str:
    of = f" of {host.memory / GIB:.1f} GiB" if host.memory else ""
    return f"host {host.use.text()}{of}"


def _require(config: Config, shape: ModelShape, use: GpuUse) -> None:
    names = " and ".join(part.name for part in use.parts)
    if use.total > use.memory:
        advice = SHARED_ADVICE if len(use.parts) > 1 else ""
        advice = advice or (_rank_advice(config, use) if use.parts[0].kind == "rank" else SERVER_ADVICE)
        raise PlacementError(
            f"{names}: about {' + '.join(part.text() for part in use.uses)} on a GPU with {use.memory / GIB:.1f} GiB; "
            f"{advice}"
        )
    for part, memory in zip(use.parts, use.uses, strict=True):
        cache = memory.parts.get("key-value cache")
        needed = config.model.max_length * cache_bytes_per_token(config, shape)
        if part.kind == "server" and cache is not None and cache < needed:
            key = "inference.kv_cache_gib" if len(use.parts) > 1 else "inference.gpu_memory_utilization"
            raise PlacementError(
                f"{part.name}: a key-value cache of {cache / GIB:.1f} GiB is left beside about {memory.named()} (GiB), "
                f"and one episode of model.max_length={config.model.max_length} needs {needed / GIB:.1f} GiB; raise "
                f"{key}, or {SERVER_ADVICE}"
            )


def _rank_advice(config: Config, use: GpuUse) -> str:
    """More ranks and smaller micro-batches do not help where one row is too long: it is computed as a whole."""
    learner, tokens, parts = config.learner, config.model.max_length, use.uses[0].parts
    if use.total - parts.get("staged weights", 0) <= use.memory:
        return "inference.weight_transfer=shm keeps no copy of the weights on the GPU"
    if tokens < learner.micro_batch_tokens or use.total - parts["activations"] > use.memory:
        return RANK_ADVICE
    keys = "gradient_checkpointing", "activation_offload"
    better = next((f"learner.{key}=true or " for key in keys if not getattr(learner, key)), "")
    return f"a row of model.max_length={tokens} tokens is not split over GPUs: {better}a smaller model.max_length helps"


def _line(use: GpuUse) -> str:
    parts = " + ".join(f"{part.kind} {memory.text()}" for part, memory in zip(use.parts, use.uses, strict=True))
    return f"{parts} of {use.memory / GIB:.1f} GiB"
