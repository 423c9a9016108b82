"""Memory of processes that run for days."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A block is mapped if the C library got it from the system for itself alone, and unmaps it when it is freed.
MAPPED = """
import contextlib, ctypes, sys
from roll_flash.processes.garbage import LARGE_BYTES, long_lived_process

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2

def is_mapped(size):
    before = libc.mallinfo2().hblks
    block = bytearray(size)
    return libc.mallinfo2().hblks == before + 1

bytearray(16 << 20)  # from now on the C library keeps blocks of up to 16 MiB
with long_lived_process() if sys.argv[1] == "long-lived" else contextlib.nullcontext():
    print([is_mapped(size) for size in (LARGE_BYTES, 1 << 18, 1 << 20)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(("kind", "mapped"), [("long-lived", "[True, True, True]"), ("usual", "[False, False, False]")])
def test_the_buffers_of_messages_go_back_to_the_system_when_they_are_freed(kind: str, mapped: str) -> None:
    command = [sys.executable, "-c", MAPPED, kind]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip() == mapped
