"""Loads published weights from a safetensors file in shared memory into the running vLLM model.

Runs inside vLLM's worker processes. A file that does not match the model is rejected before the model changes. The new
weights are prepared beside the old ones during generation (`double_buffer.py`), with adapters merged on the device of
the model; in the pause they are only swapped or copied. What a model does not support of this is loaded layer by layer
during the pause, on GPUs from page-locked memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from roll_flash.weight_sync.copied_weights import refresh_copied_weights
from roll_flash.weight_sync.double_buffer import (
    PageLockedDoubleBuffer,
    UnknownModelError,
    WeightDoubleBuffer,
    repack_tied_heads,
)
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights

_log = logging.getLogger(__name__)


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Empty: each update names its file."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """Path of a safetensors file in the format of `published.py`."""
    tag: str = ""
    """Text that the file must contain; empty: not checked."""
    ready_pipe: str = ""
    """Path of a pipe. If set, the update only prepares the weights and keeps the pipe open until that is done."""


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Transfer engine for weights in shared memory.

    Between `start_weight_update` and `finish_weight_update` comes one `update_weights` that loads; before it,
    optionally, one with `ready_pipe` that only prepares the weights while generation continues.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        self._folder = ModelFolder(Path(self.model_config.model))
        self._tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        self._preparation: Preparation | None = None
        self._double_buffer = self._open_double_buffer()

    def start_weight_update(self) -> None:
        """Discard the leftovers of an abandoned update."""
        self._discard()

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Prepare or load the weights. Raises ValueError, with the model unchanged, on a name or shape mismatch."""
        if update_info.ready_pipe:
            self._begin_preparation(update_info)
            return
        preparation, self._preparation = self._preparation, None
        weights = self._prepare(update_info) if preparation is None else preparation.result()
        try:
            self._load(weights)
        finally:
            weights.close()

    def finish_weight_update(self) -> None:
        """Do nothing: the model is complete after `receive_weights`."""

    def shutdown(self) -> None:
        self._discard()

    def _begin_preparation(self, update: SharedMemoryUpdateInfo) -> None:
        self._discard()
        self._read(update).open().close()  # refuse now what does not fit
        if self._double_buffer is not None or self.device.type == "cuda":
            pipe = os.open(update.ready_pipe, os.O_WRONLY)
            self._preparation = Preparation(partial(self._prepare_beside, update), pipe)

    def _prepare_beside(self, update: SharedMemoryUpdateInfo) -> PublishedWeights:
        with _own_stream(self.device):
            return self._prepare(update)

    def _prepare(self, update: SharedMemoryUpdateInfo) -> PublishedWeights:
        """Do all that can be done before the pause; return the weights, open."""
        weights = self._read(update).open()
        try:
            if self._double_buffer is not None:
                self._double_buffer.prepare(weights)
            elif self.device.type == "cuda":
                weights.page_lock()
        except BaseException:
            weights.close()
            raise
        return weights

    def _read(self, update: SharedMemoryUpdateInfo) -> PublishedWeights:
        dtype: Any = self.model_config.dtype  # a name only before vLLM has read the config
        return PublishedWeights(
            update.path, self._folder, tied=self._tied, tag=update.tag, device=self.device, dtype=dtype
        )

    def _load(self, weights: PublishedWeights) -> None:
        if self._double_buffer is None:
            self._load_layer_by_layer(self.model, weights, weights.names)
            if self.device.type == "cpu":
                repack_tied_heads(self.model.modules())
        else:
            rest = self._double_buffer.left_over
            self._double_buffer.exchange()
            if rest.names:
                self._load_layer_by_layer(nn.ModuleList(rest.modules), weights, rest.names)
        refresh_copied_weights(self.model)

    def _load_layer_by_layer(self, part: nn.Module, weights: PublishedWeights, names: Iterable[str]) -> None:
        """Load `names`, which are all tensors of the modules in `part`: one loaded in part would be uninitialised in
        the rest."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model: Any = self.model
        with self.device:
            initialize_layerwise_reload(part)
            try:
                model.load_weights((name, weights.tensor(name)) for name in names)
            finally:
                finalize_layerwise_reload(part, self.model_config)

    def _discard(self) -> None:
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.give_up()
            if self._double_buffer is not None:
                self._double_buffer.discard()

    def _open_double_buffer(self) -> WeightDoubleBuffer | None:
        kinds: dict[str, type[WeightDoubleBuffer]] = {"cpu": WeightDoubleBuffer, "cuda": PageLockedDoubleBuffer}
        try:
            return kinds[self.device.type](self.model, self._folder) if self.device.type in kinds else None
        except UnknownModelError as error:
            _log.warning("new weights are loaded while generation is paused: %s", error)
            return None


class Preparation:
    """Runs `prepare` in a thread; closes the descriptor `ready_pipe` at its end or error."""

    def __init__(self, prepare: Callable[[], PublishedWeights], ready_pipe: int) -> None:
        self._done: Future[PublishedWeights] = Future()
        # A daemon thread, so that a stopping server does not wait for unused weights.
        threading.Thread(target=self._run, args=(prepare, ready_pipe), name="prepare-weights", daemon=True).start()

    def result(self) -> PublishedWeights:
        """Wait for the end of the preparation; return the weights, open. Raises its error, if any."""
        return self._done.result()

    def give_up(self) -> None:
        """Wait for the end of the preparation, and close its weights; ignore its error."""
        if self._done.exception() is None:
            self._done.result().close()

    def _run(self, prepare: Callable[[], PublishedWeights], ready_pipe: int) -> None:
        try:
            self._done.set_result(prepare())
        except Exception as error:
            self._done.set_exception(error)
        finally:
            os.close(ready_pipe)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Let a thread work on the device of the model, but not in the queue of the model's work."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
