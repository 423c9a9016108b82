"""Double-buffers the weights of a vLLM model on CPU: prepares new weights during generation, then swaps them in.

vLLM packs the weights of its linear layers for oneDNN at load time, so that new weights cannot be copied into place.
Packing takes several times as long as copying. A thread therefore loads and packs new tensors into twin modules while
the model generates; the exchange only swaps references.

The twins use the metadata that vLLM records for its own layerwise reload, and the model's own `load_weights` fills
them, so that fused and renamed tensors are identical to those of vLLM.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from roll_flash.weight_sync.published import TIED_HEAD, ModelFolder, PublishedWeights

PACKED = "cpu_linear"


class UnknownModelError(Exception):
    """The model does not support twin modules: it is quantised, or loads weights in a custom way."""


class WeightDoubleBuffer:
    """Second weight buffer. Call `prepare` (in a thread while the model generates), then `exchange` or `discard`."""

    def __init__(self, model: nn.Module, folder: ModelFolder) -> None:
        """Raises UnknownModelError if the model does not support twin modules."""
        self._model = model
        self._names_of = _find_modules(model, folder)
        self._tied_to = _tied_modules(model, self._names_of)
        self._differing: set[str] = set()
        """Names of the tensors that currently differ from those in the model folder."""
        self._ready: list[tuple[nn.Module, nn.Module]] = []
        self._changed: set[str] = set()

    @torch.no_grad()
    def prepare(self, weights: PublishedWeights) -> None:
        """Load and pack the tensors that differ between the model and `weights`."""
        self.discard()
        self._changed = set(weights.changed)
        wanted = self._changed | self._differing
        modules = [module for module, names in self._names_of.items() if not wanted.isdisjoint(names)]
        twin_model = ModelTwin(self._model)
        for module in modules:
            twin_model.materialize(module)
        names = [name for name in weights.names if any(name in self._names_of[module] for module in modules)]
        twin_model.root.load_weights((name, weights.tensor(name)) for name in names)  # type: ignore[operator]
        for module in modules:
            twin = twin_model.twins[module]
            _pack(twin)
            self._ready.append((module, twin))
            for follower in self._tied_to.get(module, ()):
                twin_follower = twin_model.twins[follower]
                twin_follower._parameters["weight"] = twin._parameters["weight"]
                _pack(twin_follower)
                self._ready.append((follower, twin_follower))

    def exchange(self) -> None:
        """Swap the prepared weights into the model."""
        for module, twin in self._ready:
            module._parameters.update(twin._parameters)
            if hasattr(twin, PACKED):
                setattr(module, PACKED, getattr(twin, PACKED))
        self._differing = self._changed
        self.discard()

    def discard(self) -> None:
        self._ready = []
        self._changed = set()


class Preparation:
    """Runs `WeightDoubleBuffer.prepare` in a thread; closes the descriptor `ready_pipe` at its end or error."""

    def __init__(self, double_buffer: WeightDoubleBuffer, weights: PublishedWeights, ready_pipe: int) -> None:
        self._done: Future[None] = Future()
        # A daemon thread, so that a stopping server does not wait for unused weights.
        thread = threading.Thread(
            target=self._run, args=(double_buffer, weights, ready_pipe), name="prepare-weights", daemon=True
        )
        thread.start()

    def result(self) -> None:
        """Wait for the end of the preparation. Raises its error, if any."""
        self._done.result()

    def wait(self) -> None:
        """Wait for the end of the preparation; ignore its error."""
        self._done.exception()

    def _run(self, double_buffer: WeightDoubleBuffer, weights: PublishedWeights, ready_pipe: int) -> None:
        try:
            with weights:
                double_buffer.prepare(weights)
        except Exception as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
        finally:
            os.close(ready_pipe)


class ModelTwin:
    """A copy of a model with separate tensors per module; all else is shared. It can load weights but not run."""

    def __init__(self, model: nn.Module) -> None:
        self.twins: dict[nn.Module, nn.Module] = {}
        self.root = self._make_twin(model)

    def materialize(self, module: nn.Module) -> None:
        """Allocate the parameters of one module, in checkpoint layout; until then they are on device `meta`."""
        parameters: dict[str, Any] = self.twins[module]._parameters
        with get_layerwise_info(module).restore_device:
            for name, parameter in parameters.items():
                if parameter is not None:
                    parameters[name] = materialize_meta_tensor(parameter)

    def _make_twin(self, module: nn.Module) -> nn.Module:
        if module in self.twins:
            return self.twins[module]
        twin: nn.Module = object.__new__(type(module))
        twin.__dict__ = dict(module.__dict__)
        for members in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            twin.__dict__[members] = module.__dict__[members].copy()
        self.twins[module] = twin
        # Copy the metadata that vLLM recorded before packing, and the biases, which vLLM does not pack.
        recorded, _ = get_layerwise_info(module).restore_metadata
        parameters: dict[str, Any] = twin._parameters
        for name, parameter in {**parameters, **recorded}.items():
            if parameter is not None:
                parameters[name] = restore_layer_refs(to_meta_tensor(parameter), twin)
        for name, child in module._modules.items():
            if child is not None:
                twin._modules[name] = self._make_twin(child)
        return twin


def repack_tied_heads(modules: Iterable[nn.Module]) -> None:
    """Repack the output head of a tied embedding (vLLM on CPU).

    vLLM computes logits with a packed copy of the embedding. A reload replaces the embedding but not the copy, so that
    logprobs silently come from an older head (off by up to 1.0 after one update).
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in modules:
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, PACKED):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _pack(twin: nn.Module) -> None:
    method = getattr(twin, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(twin)


def _find_modules(model: nn.Module, folder: ModelFolder) -> dict[nn.Module, frozenset[str]]:
    """Map each module to its checkpoint tensors, recorded while the model loads tensors without data."""
    twin_model = ModelTwin(model)
    found: dict[nn.Module, set[str]] = {}
    current = ""

    def recorder(module: nn.Module) -> Callable[..., None]:
        return lambda *_, **__: found.setdefault(module, set()).add(current)

    for module, twin in twin_model.twins.items():
        for parameter in twin._parameters.values():
            if parameter is not None:
                parameter.weight_loader = recorder(module)  # type: ignore[attr-defined]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal current
        for name, shape in folder.shapes.items():
            current = name
            yield name, torch.empty(shape, device="meta")

    twin_model.root.load_weights(tensors())  # type: ignore[operator]
    lost = folder.shapes.keys() - set().union(*found.values()) - {TIED_HEAD}
    if lost:
        raise UnknownModelError(f"{type(model).__name__} loads {sorted(lost)[0]} in a way of its own")
    for module in found:
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            raise UnknownModelError(f"its layers are prepared by {type(method).__name__}")
    return {module: frozenset(names) for module, names in found.items()}


def _tied_modules(
    model: nn.Module, names_of: dict[nn.Module, frozenset[str]]
) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """Map each module to the modules that use its weight and load no tensor themselves."""
    tied: dict[nn.Module, tuple[nn.Module, ...]] = {}
    for module in names_of:
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        others = (other for other in model.modules() if other is not module and other not in names_of)
        tied[module] = tuple(other for other in others if other._parameters.get("weight") is weight)
    return tied
