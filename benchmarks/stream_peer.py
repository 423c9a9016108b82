"""TransferQueue measured in a virtual environment of its own; `stream.py` installs it and runs this file there.

    python stream_peer.py ROWS TOKENS BATCH

Prints the rows per second of one repetition for each line on standard input, after one that warms up. It imports
nothing of this project. TransferQueue runs as it comes: two storage units, ZeroMQ. One process puts the rows in
batches; then two processes, one consumer, fetch their columns.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
logging.disable(logging.CRITICAL)

FIELDS = ["token_ids", "logprobs", "versions", "policy_mask"]


def trajectories(rows: int, tokens: int) -> Any:
    import torch
    from tensordict import TensorDict

    fields = {
        "token_ids": torch.arange(tokens, dtype=torch.int32).repeat(rows, 1),
        "logprobs": torch.randn(rows, tokens),
        "versions": torch.zeros(rows, tokens, dtype=torch.int32),
        "policy_mask": torch.ones(rows, tokens, dtype=torch.bool),
    }
    return TensorDict(fields, batch_size=rows)


class Writer:
    def __init__(self, tokens: int, batch: int) -> None:
        import transfer_queue as tq

        tq.init()  # joins the controller that is there
        self._client: Any = tq.get_client()
        self._rows = trajectories(batch, tokens)
        self._batch = batch

    def put(self, rows: int, partition: str) -> None:
        for _ in range(rows // self._batch):
            self._client.put(self._rows, partition_id=partition)


class Reader:
    def __init__(self, batch: int) -> None:
        import transfer_queue as tq

        tq.init()  # joins the controller that is there
        self._client: Any = tq.get_client()
        self._batch = batch

    def get(self, rows: int, partition: str) -> None:
        for _ in range(rows // self._batch):
            meta = self._client.get_meta(
                data_fields=FIELDS, batch_size=self._batch, partition_id=partition, mode="fetch", task_name="learner"
            )
            data = self._client.get_data(meta)
            assert data.batch_size[0] == self._batch


def main() -> None:
    rows, tokens, batch = (int(argument) for argument in sys.argv[1:4])
    import ray
    import transfer_queue as tq

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    tq.init()
    actor: Any = ray.remote(num_cpus=0)
    writer = actor(Writer).remote(tokens, batch)
    readers = [actor(Reader).remote(batch) for _ in range(2)]
    each = rows // 2 // batch * batch

    def rows_per_s(partition: str) -> float:
        began = time.perf_counter()
        ray.get(writer.put.remote(2 * each, partition))  # first: a reader that waits would delay each put by seconds
        ray.get([reader.get.remote(each, partition) for reader in readers])
        return 2 * each / (time.perf_counter() - began)

    rows_per_s("warm")
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        print(rows_per_s(f"timed {number}"), flush=True)
    # Its threads would hold up an orderly end; Ray's processes end with this one.
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
