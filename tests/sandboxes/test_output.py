"""Whatever the cap and the amount, the first and the last bytes are the right ones."""

from __future__ import annotations

import asyncio
import time

import pytest
from abuse import within

from roll_flash.sandboxes import Sandbox

CAPS = (1, 2, 3, 7, 100, 1000, 65_536)


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 99, 100, 101, 151, 65_537, 300_001])
def test_head_and_tail_are_exact(provider: str, size: int) -> None:
    content = bytes(33 + index * 7 % 89 for index in range(size))

    async def read(sandbox: Sandbox) -> None:
        await sandbox.write("content", content)
        for cap in CAPS:
            result = await sandbox.exec(["cat", "content"], max_output=cap)
            assert result.stdout_bytes == size
            assert result.truncated is (size > cap)
            if size <= cap:
                assert result.stdout == content
                continue
            head, _, rest = result.stdout.partition(b"\n[... ")
            notice, _, tail = rest.partition(b" ...]\n")
            assert (head, tail) == (content[: cap // 2], content[size - (cap - cap // 2) :])
            assert notice == f"{size - cap} bytes left out".encode()

    within(provider, read)


def test_output_byte_by_byte_comes_in_few_pieces_and_whole(provider: str) -> None:
    """A piece of one byte takes the controller as long as a full one: a sandbox could hold up all others."""
    size = 100_000

    async def read(sandbox: Sandbox) -> None:
        began = time.monotonic()
        async with sandbox.stream(f"dd if=/dev/zero bs=1 count={size} 2>&-", timeout=60) as stream:
            pieces = [len(chunk.data) async for chunk in stream]
        assert sum(pieces) == size
        assert len(pieces) < 300 + 4_400 * (time.monotonic() - began)

    within(provider, read)


def test_what_is_still_being_sent_to_a_command_is_given_up_with_it(provider: str) -> None:
    async def send(sandbox: Sandbox) -> None:
        async with sandbox.stream("sleep 60", stdin=True, timeout=60) as stream:
            sending = asyncio.ensure_future(stream.send(b"x" * 1_000_000))
            await asyncio.wait({sending}, timeout=0.5)
            assert not sending.done()
        async with asyncio.timeout(5):
            await sending

    within(provider, send)
