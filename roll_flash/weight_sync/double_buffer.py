"""Double-buffers the weights of a vLLM model: prepares new weights during generation, then swaps them in.

A thread loads new tensors into twin modules while the model generates, so that little is left for the pause. The twins
use the metadata that vLLM records for its own layerwise reload, and the model's own `load_weights` fills them, so that
fused, renamed and split tensors are identical to those of vLLM.

On CPU vLLM packs the weights of its linear layers for oneDNN, which takes several times as long as copying: the twins
are packed too, and the exchange only swaps references. The few other weights, such as those of norms, are copied:
other objects than their module may refer to them, as mixers of mamba do to those of their convolution. On a GPU
captured CUDA graphs read the weights at their addresses, and vLLM leaves no room for second ones: the twins lie in
page-locked memory of the host, and the exchange is one copy.

Experts of a mixture, which vLLM prepares in many ways, have no twins: they are left to vLLM's reload in the pause, if
they have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from roll_flash.weight_sync.page_locked import page_locked_like
from roll_flash.weight_sync.published import TIED_HEAD, ModelFolder, PublishedWeights

PACKED = "cpu_linear"


class UnknownModelError(Exception):
    """The model does not support twin modules: it is quantised, or loads weights in a custom way."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What a module loads from a checkpoint: names of tensors there, and of its parameters that they fill."""

    names: frozenset[str]
    parameters: frozenset[str]


@dataclass(frozen=True, slots=True)
class LeftOver:
    """Modules without twins whose weights have changed, and the names of all their tensors in the checkpoint."""

    modules: tuple[nn.Module, ...] = ()
    names: tuple[str, ...] = ()


class WeightDoubleBuffer:
    """Second weight buffer. Call `prepare` (in a thread while the model generates), then `exchange` or `discard`."""

    def __init__(self, model: nn.Module, folder: ModelFolder) -> None:
        """Raises UnknownModelError if the model does not support twin modules."""
        self._model = model
        found = _find_modules(model, folder)
        self._experts = {module: loads for module, loads in found.items() if _holds_experts(module)}
        self._loads = {module: loads for module, loads in found.items() if module not in self._experts}
        _refuse_derived_weights(model, self._experts)
        self._tied_to = _tied_modules(model, self._loads)
        self._differing: set[str] = set()
        """Names of the tensors that currently differ from those in the model folder."""
        self._ready: list[tuple[nn.Module, nn.Module]] = []
        self._changed: set[str] = set()
        self.left_over = LeftOver()
        """What `exchange` will not have exchanged."""

    @torch.no_grad()
    def prepare(self, weights: PublishedWeights) -> None:
        """Load the tensors that differ between the model and `weights`."""
        self.discard()
        self._changed = set(weights.changed)
        wanted = self._changed | self._differing
        modules = [module for module, loads in self._loads.items() if not wanted.isdisjoint(loads.names)]
        twin_model = ModelTwin(self._model)
        for module in modules:
            self._allocate(twin_model.twins[module], module)
        names = set().union(*(self._loads[module].names for module in modules))
        twin_model.root.load_weights((name, weights.tensor(name)) for name in weights.names if name in names)  # type: ignore[operator]
        for module in modules:
            self._complete(module, twin_model)
        experts = {m: loads.names for m, loads in self._experts.items() if not wanted.isdisjoint(loads.names)}
        left_names = set().union(*experts.values())
        self.left_over = LeftOver(tuple(experts), tuple(name for name in weights.names if name in left_names))

    def exchange(self) -> None:
        """Swap the prepared weights into the model."""
        for module, twin in self._ready:
            for name in self._parameters_of(module):
                live, new = module._parameters[name], twin._parameters[name]
                assert live is not None
                assert new is not None
                if name == "weight" and _method(module) is not None and new.ndim == 2:
                    module._parameters[name] = new
                else:
                    live.data.copy_(new)
            if hasattr(twin, PACKED):
                setattr(module, PACKED, getattr(twin, PACKED))
        self._end_exchange()

    def discard(self) -> None:
        self._ready = []
        self._changed = set()
        self.left_over = LeftOver()

    def _end_exchange(self) -> None:
        self._differing = self._changed
        self.discard()

    def _parameters_of(self, module: nn.Module) -> frozenset[str]:
        """Names of the parameters to exchange; a module that loads nothing has only the weight that it is tied to."""
        loads = self._loads.get(module)
        return frozenset({"weight"}) if loads is None else loads.parameters

    def _allocate(self, twin: nn.Module, module: nn.Module) -> None:
        """Allocate the parameters of one twin, in checkpoint layout; until then they are on device `meta`."""
        parameters: dict[str, Any] = twin._parameters
        with get_layerwise_info(module).restore_device:
            for name in self._loads[module].parameters:
                parameters[name] = materialize_meta_tensor(parameters[name])

    def _complete(self, module: nn.Module, twin_model: ModelTwin) -> None:
        twin = twin_model.twins[module]
        _pack(twin)
        self._ready.append((module, twin))
        for follower in self._tied_to.get(module, ()):
            twin_follower = twin_model.twins[follower]
            twin_follower._parameters["weight"] = twin._parameters["weight"]
            _pack(twin_follower)
            self._ready.append((follower, twin_follower))


class PageLockedDoubleBuffer(WeightDoubleBuffer):
    """The form for GPUs. Takes as much memory of the host as this process has of the model on its GPU, for ever."""

    def __init__(self, model: nn.Module, folder: ModelFolder) -> None:
        super().__init__(model, folder)
        self._memory: dict[tuple[nn.Module, str], Tensor] = {}
        for module, loads in self._loads.items():
            recorded, _ = get_layerwise_info(module).restore_metadata
            for name in loads.parameters:
                live: Any = module._parameters[name]
                if name in recorded and _layout(recorded[name]) != _layout(live):
                    raise UnknownModelError(f"vLLM keeps the {name} of a {type(module).__name__} in another layout")

    def prepare(self, weights: PublishedWeights) -> None:
        super().prepare(weights)
        if self.left_over.names:
            weights.page_lock()

    def exchange(self) -> None:
        """Copy the prepared weights into the model; they are there on return."""
        for module, twin in self._ready:
            for name in self._loads[module].parameters:
                live: Any = module._parameters[name]
                live.data.copy_(twin._parameters[name], non_blocking=True)
        torch.cuda.synchronize()
        self._end_exchange()

    def _allocate(self, twin: nn.Module, module: nn.Module) -> None:
        parameters: dict[str, Any] = twin._parameters
        for name in self._loads[module].parameters:
            described, key = parameters[name], (module, name)
            if key not in self._memory:
                self._memory[key] = page_locked_like(described)
            tensor: Any = self._memory[key].detach()
            # As vLLM materialises a tensor that it has only described.
            tensor.__class__, tensor.__dict__ = described.__class__, described.__dict__.copy()
            parameters[name] = tensor

    def _complete(self, module: nn.Module, twin_model: ModelTwin) -> None:
        # A tied head has the same tensor, at the same address.
        self._ready.append((module, twin_model.twins[module]))


class ModelTwin:
    """A copy of a model with separate tensors per module; all else is shared. It can load weights but not run."""

    def __init__(self, model: nn.Module) -> None:
        self.twins: dict[nn.Module, nn.Module] = {}
        self.root = self._make_twin(model)

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


def _method(module: nn.Module) -> Any:
    """Return what prepares the weights of a module after they are loaded; None for norms and the like."""
    return getattr(module, "quant_method", None)


def _pack(twin: nn.Module) -> None:
    if (method := _method(twin)) is not None:
        method.process_weights_after_loading(twin)


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _holds_experts(module: nn.Module) -> bool:
    return isinstance(_method(module), FusedMoEMethodBase)


def _find_modules(model: nn.Module, folder: ModelFolder) -> dict[nn.Module, Loads]:
    """Find what each module loads, recorded while the model loads tensors without data."""
    twin_model = ModelTwin(model)
    found: dict[nn.Module, tuple[set[str], set[str]]] = {}
    current = ""

    def recorder(module: nn.Module, parameter: str) -> Callable[..., bool]:
        def record(*_: Any, **__: Any) -> bool:
            names, parameters = found.setdefault(module, (set(), set()))
            names.add(current)
            parameters.add(parameter)
            return True

        return record

    for module, twin in twin_model.twins.items():
        for name, parameter in twin._parameters.items():
            if parameter is not None:
                parameter.weight_loader = recorder(module, name)  # type: ignore[attr-defined]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal current
        for name, shape in folder.shapes.items():
            current = name
            yield name, torch.empty(shape, device="meta")

    twin_model.root.load_weights(tensors())  # type: ignore[operator]
    lost = folder.shapes.keys() - set().union(*(names for names, _ in found.values())) - {TIED_HEAD}
    if lost:
        raise UnknownModelError(f"{type(model).__name__} loads {sorted(lost)[0]} in a way of its own")
    known = UnquantizedLinearMethod | UnquantizedEmbeddingMethod | FusedMoEMethodBase
    for method in map(_method, found):
        if method is not None and not isinstance(method, known):
            raise UnknownModelError(f"its layers are prepared by {type(method).__name__}")
    return {module: Loads(frozenset(names), frozenset(parameters)) for module, (names, parameters) in found.items()}


def _refuse_derived_weights(model: nn.Module, experts: Mapping[nn.Module, Loads]) -> None:
    """Raises UnknownModelError if vLLM has made weights of others after it loaded them, as in latent attention:
    exchanging the others would not change these."""
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    for module in model.modules():
        sinks = getattr(getattr(module, "impl", None), "sinks", None)
        if sinks is not None and sinks.data_ptr() not in addresses:
            raise UnknownModelError(f"a {type(module).__name__} keeps a copy of its sinks")
        recorded, _ = get_layerwise_info(module).restore_metadata
        made = {name for name, tensor in module._parameters.items() if tensor is not None}
        made -= recorded.keys() | SKIP_TENSORS
        if made and module not in experts:
            raise UnknownModelError(f"a {type(module).__name__} derives {sorted(made)[0]} from other weights")


def _tied_modules(model: nn.Module, loads: Mapping[nn.Module, Loads]) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """Map each module to the modules that use the same weight."""
    tied: dict[nn.Module, tuple[nn.Module, ...]] = {}
    for module in loads:
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        others = (other for other in model.modules() if other is not module)
        tied[module] = tuple(other for other in others if other._parameters.get("weight") is weight)
    return tied
