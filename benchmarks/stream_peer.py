"""TransferQueue measured in a virtual environment of its own; `stream.py` installs it and runs this file there.

    python stream_peer.py ROWS TOKENS BATCH

Prints one JSON object. It imports nothing of this project. TransferQueue runs as it comes: two storage units, ZeroMQ.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
logging.disable(logging.CRITICAL)

FIELDS = ["token_ids", "logprobs", "versions", "policy_mask"]


def trajectory(tokens: int) -> Any:
    import torch
    from tensordict import TensorDict

    fields = {
        "token_ids": torch.arange(tokens, dtype=torch.int32)[None],
        "logprobs": torch.randn(1, tokens),
        "versions": torch.zeros(1, tokens, dtype=torch.int32),
        "policy_mask": torch.ones(1, tokens, dtype=torch.bool),
    }
    return TensorDict(fields, batch_size=1)


def put_one_after_the_other(client: Any, rows: list[Any], partition: str) -> float:
    began = time.perf_counter()
    for row in rows:
        client.put(row, partition_id=partition)
    return len(rows) / (time.perf_counter() - began)


async def put_side_by_side(client: Any, rows: list[Any], partition: str, writers: int = 16) -> float:
    """The asynchronous client with many puts under way at once."""
    limit = asyncio.Semaphore(writers)

    async def put(row: Any) -> None:
        async with limit:
            await client.async_put(row, partition_id=partition)

    began = time.perf_counter()
    await asyncio.gather(*(put(row) for row in rows))
    return len(rows) / (time.perf_counter() - began)


def get_all(client: Any, rows: int, batch: int, partition: str) -> float:
    began = time.perf_counter()
    for _ in range(rows // batch):
        meta = client.get_meta(
            data_fields=FIELDS, batch_size=batch, partition_id=partition, mode="fetch", task_name=f"learner-{batch}"
        )
        data = client.get_data(meta)
        assert data.batch_size[0] == batch
    return rows // batch * batch / (time.perf_counter() - began)


def starved_put_s(client: Any, tokens: int, puts: int) -> list[float]:
    """Seconds of a put while one request of another task waits for more rows than there are; each time anew."""
    took = []
    for number in range(puts):
        partition = f"starved {number}"
        client.put(trajectory(tokens), partition_id=partition)

        def starve(partition: str = partition) -> None:
            try:
                client.get_meta(
                    data_fields=FIELDS, batch_size=10_000, partition_id=partition, mode="fetch", task_name="starved"
                )
            except Exception as error:  # its own time-out
                print(f"the starved consumer gave up: {type(error).__name__}", file=sys.stderr)

        consumer = threading.Thread(target=starve, daemon=True)
        consumer.start()
        time.sleep(0.5)
        began = time.perf_counter()
        client.put(trajectory(tokens), partition_id=partition)
        took.append(time.perf_counter() - began)
        consumer.join(timeout=30)
    return took


def main() -> None:
    rows, tokens, batch, repeats = (int(argument) for argument in sys.argv[1:5])
    import ray
    import transfer_queue as tq

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    tq.init()
    client = tq.get_client()
    put_one_after_the_other(client, [trajectory(tokens) for _ in range(20)], "warm up")
    made = [trajectory(tokens) for _ in range(rows)]
    figures: dict[str, list[float]] = {}
    for repeat in range(repeats):
        partition = f"timed {repeat}"
        figures.setdefault("put_per_s", []).append(put_one_after_the_other(client, made, partition))
        figures.setdefault("get_one_per_s", []).append(get_all(client, rows, 1, partition))
        figures.setdefault("get_batch_per_s", []).append(get_all(client, rows, batch, partition))
        try:
            rate = asyncio.run(put_side_by_side(client, made, f"side by side {repeat}"))
            figures.setdefault("put_side_by_side_per_s", []).append(rate)
        except Exception as error:
            print(f"the asynchronous client failed: {type(error).__name__}: {error}", file=sys.stderr)
    figures["starved_put_s"] = starved_put_s(client, tokens, 3)
    print(json.dumps(figures), flush=True)
    # Its threads and the starved request would hold up an orderly end; Ray's processes end with this one.
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
