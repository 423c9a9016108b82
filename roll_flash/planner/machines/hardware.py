"""The machines of a plan: published figures of a GPU, how many there are, and what they cost. See configs/hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from roll_flash.cluster.nodes import Node
from roll_flash.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from roll_flash.config.files import read_yaml
from roll_flash.config.mistakes import explain_all
from roll_flash.errors import ConfigError
from roll_flash.planner.machines.memory import GIB

Share = Annotated[float, Field(gt=0, le=1)]
USABLE_SHARE = 0.97
"""Of the published memory: drivers and error correction keep the rest (an 80 GB H100 has 79.6 GiB, an A10 22.5 of
24)."""


OBJECT_STORE_SHARE, OBJECT_STORE_BYTES = 0.3, 200e9
"""What Ray sets apart of a machine's memory for its object store: this share, at most so many bytes."""


class GpuFigures(Section):
    name: str
    """Product name."""
    source: str
    """Where the figures were published."""
    memory_gib: PositiveFloat
    """Memory as published; makers write GB for what is nearly GiB."""
    bf16_tflops: PositiveFloat
    """Dense bfloat16 matrix products with float32 accumulation, without sparsity."""
    hbm_gb_s: PositiveFloat
    """Bandwidth of its memory in GB/s."""
    nvlink_gb_s: NonNegativeFloat = 0.0
    """Bandwidth to the other GPUs of its node in GB/s, both directions together; 0: PCIe only."""
    pcie_gb_s: PositiveFloat
    """Bandwidth to the host in GB/s, both directions together."""
    network_gb_s: PositiveFloat = 1.25
    """Bandwidth of its share of the network to other machines in GB/s, one direction; the default is that of 10 Gbit/s
    Ethernet."""


class Episodes(Section):
    """What episodes are assumed to be like where no run was measured."""

    answer_share: Share = 0.5
    """Mean length of a turn, as a share of rollout.max_new_tokens."""
    turn_share: Share = 0.75
    """Mean number of turns, as a share of max_turns."""
    prompt_tokens: PositiveInt = 256
    """Tokens before the first turn."""
    observation_tokens: PositiveInt = 64
    """Tokens between two turns."""
    step_s: NonNegativeFloat = 0.5
    """Mean time in seconds of an environment step."""
    spread: NonNegativeFloat = 0.6
    """Standard deviation of the logarithm of lengths and times."""
    correlation: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Correlation of durations within a group."""


class Hardware(Section):
    gpu: GpuFigures
    nodes: PositiveInt = 1
    """Number of machines."""
    gpus_per_node: PositiveInt = 1
    """GPUs of each machine."""
    cpus_per_node: PositiveInt = 16
    """CPU cores of each machine."""
    host_memory_gib: PositiveFloat | None = None
    """Memory of each machine beside its GPUs; None: not known, so not checked."""
    price_per_hour: PositiveFloat | None = None
    """Price of all machines for an hour, in your currency; None: no cost is printed."""
    matmul_share: Share = 0.4
    """Share of the published bf16_tflops that learner and prefill reach."""
    bandwidth_share: Share = 0.6
    """Share of the published bandwidths that is reached."""
    episodes: Episodes = Episodes()
    """Assumptions about episodes, used only without a measured run."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def gpu_bytes(self) -> int:
        """Memory of one GPU that programs can use."""
        return int(USABLE_SHARE * self.gpu.memory_gib * GIB)

    def as_nodes(self) -> list[Node]:
        """Return its machines for `make_plan`, as if they were nodes of a cluster that nobody uses."""
        gpus = {str(number): self.gpu_bytes for number in range(self.gpus_per_node)}
        resources = {"CPU": float(self.cpus_per_node), "GPU": float(len(gpus))}
        if self.host_memory_gib:
            memory = self.host_memory_gib * GIB
            resources["memory"] = memory - min(OBJECT_STORE_SHARE * memory, OBJECT_STORE_BYTES)
        return [
            Node(f"node-{number}", f"10.0.0.{number}", f"node-{number}", resources, resources, gpus)
            for number in range(1, self.nodes + 1)
        ]


def load_hardware(file: str | Path) -> Hardware:
    """Read a hardware file; `base: other.yaml` builds on another one. Raises ConfigError."""
    try:
        return Hardware.model_validate(read_yaml(Path(file)))
    except ValidationError as error:
        lines = explain_all(error.errors(), Hardware)
        raise ConfigError("\n".join(f"{file}: {line}" for line in lines)) from None
