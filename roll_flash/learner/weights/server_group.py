"""The group of the first rank and one server, over which weights are sent. A server that dies cannot hold up the rank.

NCCL waits for a peer without a limit, inside C, where no exception reaches it. So each group works in threads of its
own: whoever waits for one has a deadline, and at the deadline, or when the driver says that the server is gone, the
group is ended from outside, which makes NCCL give up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from torch import Tensor

from roll_flash.errors import InferenceError, first_line
from roll_flash.processes.background import DaemonThreads

GIVES_UP_WITHIN_S = 10.0
"""Time in seconds in which work ends after its group has ended. What does not is left behind, in its thread."""
ENQUEUE_S = 1.0

_THREADS = DaemonThreads()


class ServerGroup:
    """Sends weights to the workers of one server. Every method raises InferenceError after the group has ended."""

    def __init__(self, endpoint: str, open_group: Callable[[], NcclGroup]) -> None:
        """`open_group` waits for the workers of the server and returns the group with them."""
        self._endpoint = endpoint
        self._open_group = open_group
        self._group: NcclGroup | None = None
        self._ended: Future[None] = Future()
        self._ending = threading.Lock()

    def join(self, timeout_s: float) -> None:
        """Wait for the server to join."""
        self._within(timeout_s, self._open, "join the learner's group")

    def send(self, tensors: Iterable[tuple[str, Tensor]], produce: Callable[..., None], timeout_s: float) -> None:
        """Send tensors with vLLM's `produce`; they have arrived on return."""
        group = self._group
        if group is None:
            raise InferenceError(f"{self._endpoint} has not joined the learner's group")
        self._within(timeout_s, lambda: produce(iter(tensors), group), "take the weights")

    def end(self) -> None:
        """End the group, and with it what it is doing. Safe to call from any thread, and twice."""
        with self._ending:
            if self._ended.done():
                return
            self._ended.set_result(None)
        if self._group is not None:
            self._group.destroy()

    def _open(self) -> None:
        group = self._group = self._open_group()
        if self._ended.done():  # the server came too late
            group.destroy()

    def _within(self, timeout_s: float, work: Callable[[], None], what: str) -> None:
        done: Future[None] = _THREADS.submit(work)
        wait([done, self._ended], timeout_s, FIRST_COMPLETED)
        if not done.done():
            reason = "was given up" if self._ended.done() else f"did not {what} within {timeout_s:g} s"
            self.end()
            wait([done], GIVES_UP_WITHIN_S)
            raise InferenceError(f"{self._endpoint} {reason}")
        error = done.exception()
        if error is not None or self._ended.done():
            self.end()
            reason = f"could not {what}: {first_line(error)}" if error else "was given up"
            raise InferenceError(f"{self._endpoint} {reason}{_advice(error)}") from None


class NcclGroup:
    """A group of vLLM's NCCL communicators that another thread can end; this process has rank 0."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._enqueuing = threading.Lock()
        self._ended = False

    def broadcast(self, tensor: Tensor, src: int) -> None:
        with self._enqueuing:
            if self._ended:  # vLLM's communicator would send nothing, and say nothing
                raise InferenceError("the group has ended")
            self._communicator.broadcast(tensor, src=src)

    def destroy(self) -> None:
        """End the group. A broadcast that waits in another thread ends, with or without an error."""
        self._ended = True
        # NCCL forbids to end a communicator while an operation is added to it, except if that itself waits for a peer.
        entered = self._enqueuing.acquire(timeout=ENQUEUE_S)
        try:
            self._communicator.destroy()
        finally:
            if entered:
                self._enqueuing.release()


def _advice(error: BaseException | None) -> str:
    if "Duplicate GPU" not in str(error):
        return ""
    return "; the server and the learner's first rank share a GPU: set inference.weight_transfer=ipc, or shm"
