"""gloo in the place of NCCL, and nothing in that of CUDA's streams: the rest of a transfer is the code of both sides.

As a program, it forks a server for each line that it reads, and prints its process id. A server takes the versions that
files in its folder describe, one after the other, and writes what arrived beside them.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=60)


class GlooGroup:
    """`broadcast` of vLLM's communicator. gloo notices a peer that has died, but cannot be ended while one is silent:
    `end_peer` is called by `destroy` for that, and must kill it."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, end_peer: Any = lambda: None) -> None:
        store = dist.FileStore(unique_id.rstrip(b"\0").decode(), world_size)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)  # type: ignore[attr-defined]
        self._end_peer = end_peer

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._end_peer()


class NoStream:
    def synchronize(self) -> None:
        return None


def without_streams(monkeypatch: Any = None) -> None:
    """Let vLLM's packed transfers run on a CPU."""
    from vllm.distributed.weight_transfer import packed_tensor

    change = setattr if monkeypatch is None else monkeypatch.setattr
    change(packed_tensor, "_get_streams", lambda device, count: (NoStream(),) * count)
    change(torch.cuda, "stream", lambda stream: nullcontext())
    change(torch.cuda, "set_device", lambda device: None)
    change(torch.accelerator, "current_device_index", lambda: 0)


def serve(init_info: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    without_streams()
    unique_id = base64.b64decode(init_info["nccl_unique_id_b64"])
    group = GlooGroup(unique_id, init_info["rank_offset"], init_info["world_size"])
    for number in count():
        while not (asked := folder / f"{number}.json").exists():
            time.sleep(0.01)
        info = NCCLWeightTransferUpdateInfo(**json.loads(asked.read_text()))
        tensors = zip(info.shapes, (getattr(torch, name) for name in info.dtype_names), strict=True)
        found: dict[str, Tensor] = {}

        def load(part: list[tuple[str, Tensor]], found: dict[str, Tensor] = found) -> None:
            found.update((name, tensor.clone()) for name, tensor in part)

        packed_nccl_broadcast_consumer(
            iterator=iter(zip(info.names, tensors, strict=True)),
            group=group,
            src=0,
            post_unpack_func=load,
            buffer_size_bytes=init_info["packed_buffer_size_bytes"],
            num_buffers=init_info["packed_num_buffers"],
            device="cpu",
        )
        save_file(found, folder / "arriving")
        (folder / "arriving").rename(folder / f"{number}.safetensors")


def main() -> None:
    import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401  - once for all servers, as it takes long

    children = []
    for line in sys.stdin:
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            serve(asked["init_info"], Path(asked["folder"]))
        children.append(child)
        print(child, flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
