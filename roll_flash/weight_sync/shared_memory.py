"""Loads published weights from a safetensors file in shared memory into the running vLLM model.

Runs inside vLLM's worker process. A file that does not match the model is rejected before the model changes. On CPU
the new weights are prepared beside the old ones during generation and swapped in a pause of milliseconds
(`double_buffer.py`); if the model does not support this, they are loaded layer by layer during the pause.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from roll_flash.weight_sync.double_buffer import Preparation, UnknownModelError, WeightDoubleBuffer, repack_tied_heads
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
        elif self._double_buffer is None:
            self._load_layer_by_layer(update_info)
        else:
            self._exchange(self._double_buffer, update_info)

    def finish_weight_update(self) -> None:
        """Do nothing: the model is complete after `receive_weights`."""

    def shutdown(self) -> None:
        self._discard()

    def _read(self, update: SharedMemoryUpdateInfo) -> PublishedWeights:
        return PublishedWeights(update.path, self._folder, tied=self._tied, tag=update.tag)

    def _begin_preparation(self, update: SharedMemoryUpdateInfo) -> None:
        self._discard()
        self._refuse_misfits(update)
        if self._double_buffer is not None:
            pipe = os.open(update.ready_pipe, os.O_WRONLY)
            self._preparation = Preparation(self._double_buffer, self._read(update), pipe)

    def _exchange(self, double_buffer: WeightDoubleBuffer, update: SharedMemoryUpdateInfo) -> None:
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.result()
        else:
            with self._read(update) as weights:
                double_buffer.prepare(weights)
        double_buffer.exchange()

    def _refuse_misfits(self, update: SharedMemoryUpdateInfo) -> None:
        self._read(update).__enter__().__exit__(None, None, None)

    def _discard(self) -> None:
        preparation, self._preparation = self._preparation, None
        if preparation is not None and self._double_buffer is not None:
            preparation.wait()
            self._double_buffer.discard()

    def _open_double_buffer(self) -> WeightDoubleBuffer | None:
        if self.device.type != "cpu":
            return None
        try:
            return WeightDoubleBuffer(self.model, self._folder)
        except UnknownModelError as error:
            _log.warning("new weights are loaded while generation is paused: %s", error)
            return None

    def _load_layer_by_layer(self, update: SharedMemoryUpdateInfo) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model: Any = self.model
        with self._read(update) as weights, self.device:
            initialize_layerwise_reload(model)
            try:
                # Load all tensors: a partly loaded layer would be uninitialised in the rest.
                model.load_weights((name, weights.tensor(name)) for name in weights.names)
            finally:
                finalize_layerwise_reload(model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(model.modules())
