"""Wraps a language model for the learner: takes a packed row, returns log-probabilities of its policy tokens."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from roll_flash.errors import ModelError, first_line
from roll_flash.learner.model.activation_offload import offload_activations
from roll_flash.learner.model.exact_settings import ExactSettings, LogitTransform
from roll_flash.learner.model.token_logprobs import token_logprobs
from roll_flash.learner.model.weight_files import WeightFiles, compute_buffers, one_at_a_time
from roll_flash.learner.packing import tree_attention
from roll_flash.learner.packing.rows import PackedRow
from roll_flash.models.folder import require_all_tensors
from roll_flash.models.routing import Routing
from roll_flash.models.shape import decoder_layers

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "top_k")
_LOG = logging.getLogger(__name__)


class PolicyModel(nn.Module):
    """Wraps an unchanged causal language model of transformers.

    As the FSDP root it gathers embedding and output head for its whole forward pass, so that the head can be applied
    to chosen positions only.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.shares_prefixes = True
        """If true, rows may be prefix trees; else each row is one sequence, computed with the model's own attention."""
        self.alone_because: str | None = None
        """Why prefixes are not shared, if `choose_exact_mode` found a reason."""
        self.logit_transform: LogitTransform | None = LogitTransform()
        """Function from hidden states and head to logits. None: unknown; the model computes all logits of the row."""
        self.flex_attention = False
        """Use FlexAttention (GPU only; see `flex_tree.unsupported_reason`)."""
        self.offload_activations = False
        """Keep activations saved by checkpointing in host memory until the backward pass (GPU only)."""
        self.router_logits: tuple[Tensor, ...] | None = None
        """Of the last row, [N, experts] per layer with experts; None unless `keep_router_logits` was called."""
        self.values: Tensor | None = None
        """Of the last row, float32 [M]; None unless `add_value_head` was called."""
        self.detaches_values = True
        """Gradients of values do not reach the hidden states."""
        self.register_parameter("value_weight", None)
        self.value_weight: nn.Parameter | None
        self._keeps_router_logits = False
        self._routing: Routing | None = None
        """Set by the first row whose experts are given."""
        self._own_attention: Any = model.config._attn_implementation
        for module in model.modules():
            _without_dropout(module)
        for layer in self.layers:
            if isinstance(vars(layer).get("config"), PreTrainedConfig):  # falcon's layers read their rates there
                layer.config = copy(layer.config)
                _without_dropout(layer.config)

    def train(self, mode: bool = True) -> PolicyModel:
        """Set training mode only on layers with gradient checkpointing: samplers have no dropout or router noise."""
        super().train(False)
        self.training = mode
        for layer in self.layers:
            layer.training = mode and bool(getattr(layer, "gradient_checkpointing", False))
        return self

    def share_prefixes(self, share: bool) -> None:
        """Choose attention over prefix trees (true) or the model's own attention (false)."""
        self.shares_prefixes = share
        self.model.set_attn_implementation(tree_attention.NAME if share else self._own_attention)

    def keep_router_logits(self) -> None:
        """Keep the logits of all routers in each forward pass. Raises ModelError if the model has no load-balancing
        loss in transformers: it may return logits, but other functions than softmax turn them into probabilities."""
        has_loss = hasattr(sys.modules[type(self.model).__module__], "load_balancing_loss_func")
        if not has_loss or "router_logits" not in (self.model._can_record_outputs or {}):
            raise ModelError(
                f"learner.router_aux_loss: {type(self.model).__name__} has no load-balancing loss; set it to 0"
            )
        self._keeps_router_logits = True

    def add_value_head(self, *, detach: bool) -> None:
        """Add a linear function of the last hidden state, the value of the text so far; 0 at first. Call it before the
        model is sharded."""
        self.value_weight = nn.Parameter(torch.zeros(self.head.shape[1]))
        self.detaches_values = detach

    @property
    def form(self) -> ExactSettings:
        return ExactSettings(self.shares_prefixes, self.logit_transform, self.head.shape[0])

    def apply_form(self, form: ExactSettings) -> None:
        self.share_prefixes(form.shares_prefixes)
        self.logit_transform = form.logit_transform

    def forward(self, row: PackedRow, temperature: float | None = None) -> tuple[Tensor, ...]:
        """Return (logprobs, entropies) [M], float32, of the policy tokens. `temperature` None: the sampler's."""
        temperature = self.temperature if temperature is None else temperature
        device = self.head.device
        nodes, source = torch.unique(torch.tensor(row.source, device=device), return_inverse=True)
        target = torch.tensor(row.target, device=device)
        with offload_activations() if self.offload_activations else nullcontext():
            whole = self.logit_transform is None
            output = self._call(self.model if whole else self.model.base_model, row)
            self.router_logits = output.router_logits if self._keeps_router_logits else None
            if whole:
                return _from_logits(output.logits[0, nodes].float() / temperature, source, target)
            hidden = output.last_hidden_state[0, nodes]
        head, bias, form = self.head, self.head_bias, self.logit_transform
        found = token_logprobs(hidden, head, source, target, bias=bias, form=form, temperature=temperature)
        if self.value_weight is None:
            return found
        self.values = self._read_values(hidden, nodes, row)
        # The sum gives the head a gradient in each pass: FSDP reduces only gradients that every rank has.
        return found[0] + 0.0 * self.values.sum(), found[1]

    def _read_values(self, hidden: Tensor, nodes: Tensor, row: PackedRow) -> Tensor:
        """Return the values [M] from the hidden states [U, D] of `nodes` [U]."""
        assert self.value_weight is not None
        places = torch.tensor(row.source if row.value_source is None else row.value_source, device=nodes.device)
        hidden = hidden.detach() if self.detaches_values else hidden
        return (hidden.float() @ self.value_weight.float())[torch.searchsorted(nodes, places)]

    def _call(self, module: Any, row: PackedRow) -> Any:
        device = self.head.device
        self._steer_routing(row)
        more = {"output_router_logits": True} if self._keeps_router_logits else {}
        token_ids = torch.tensor(row.token_ids, device=device)[None]
        if not self.shares_prefixes:
            if len(row.members) > 1:
                raise ValueError(f"a row of {len(row.members)} sequences for a model that takes one at a time")
            reset_dynamic_rope(self.model)
            return module(input_ids=token_ids, use_cache=False, **more)
        tree = tree_attention.tree_layout(row.position_ids, row.subtree_end, device, flex=self.flex_attention)
        position_ids = torch.tensor(row.position_ids, device=device)[None]
        return module(input_ids=token_ids, position_ids=position_ids, use_cache=False, tree=tree, **more)

    def _steer_routing(self, row: PackedRow) -> None:
        experts = row.routed_experts
        if experts is None and self._routing is None:
            return
        if self._routing is None:
            self._routing = Routing(self.model)
        self._routing.replay(None if experts is None else torch.tensor(experts, device=self.head.device))

    @property
    def experts_per_token(self) -> int:
        """Experts that a token uses in a layer, by the name that its architecture gives the number."""
        config: Any = self.model.config.get_text_config()
        return int(next(n for key in EXPERTS_PER_TOKEN if (n := getattr(config, key, None))))

    @property
    def head(self) -> Tensor:
        weight = getattr(self.model.get_output_embeddings(), "weight", None)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def head_bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)
        return bias

    def tied_names(self) -> list[str]:
        """Return state names whose tensor already appears under an earlier name in the state."""
        seen: set[int] = set()
        tied = []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                tied.append(name)
            seen.add(id(tensor))
        return tied

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, which FSDP shards one by one."""
        return decoder_layers(self.model)


class CriticModel(PolicyModel):
    """A model with a value head that computes values only."""

    def forward(self, row: PackedRow, temperature: float | None = None) -> tuple[Tensor, ...]:
        """Return the values [M], float32, of the policy tokens."""
        nodes = torch.unique(torch.tensor(row.source, device=self.head.device))
        with offload_activations() if self.offload_activations else nullcontext():
            hidden = self._call(self.model.base_model, row).last_hidden_state[0, nodes]
        return (self._read_values(hidden, nodes, row),)


def load_policy_model(
    folder: Path,
    temperature: float = 1.0,
    form: ExactSettings | None = None,
    kind: type[PolicyModel] = PolicyModel,
) -> PolicyModel:
    """Load a whole model from a Hugging Face folder: float32, training mode, no dropout.

    Without `form`, `choose_exact_mode` tests the model on a few texts and disables prefix sharing if needed; a `form`
    from an earlier load skips the test.
    Raises ModelError if the folder is missing or incomplete, or the model cannot be computed exactly.
    """
    from roll_flash.learner.model.exactness import choose_exact_mode

    policy = kind(_transformers_model(folder), temperature)
    if form is None:
        choose_exact_mode(policy, folder)
    else:
        policy.apply_form(form)
    return policy.train()


@contextmanager
def open_policy_model(
    folder: Path, form: ExactSettings, temperature: float = 1.0, kind: type[PolicyModel] = PolicyModel
) -> Iterator[tuple[PolicyModel, WeightFiles | None]]:
    """Yield a model on the meta device, with its buffers but without weights, and the files that hold these; None, and
    a whole model in host memory, if the files cannot be read tensor by tensor: a line in the log says why. Only one
    process of a machine then is inside the block, so it must not wait for others.

    Raises ModelError if the folder is missing or incomplete.
    """
    model = _transformers_model(folder, on_meta=True)
    with WeightFiles(folder) as files:
        reason = files.why_not_by_shards(model)
        if reason is None and (unknown := compute_buffers(model)):
            reason = f"transformers computes {unknown[0]} only when it loads the model"
        if reason is None:
            policy = kind(model, temperature)
            policy.apply_form(form)
            yield policy.train(), files
            return
    _LOG.warning("%s: every rank in turn loads the whole model before it keeps its shard: %s", folder, reason)
    del model
    with one_at_a_time():
        yield load_policy_model(folder, temperature, form, kind), None


def check_weight_files(folder: Path) -> None:
    """Raises ModelError if a tensor of the model is missing or has another shape. Reads no weights."""
    model = _transformers_model(folder, on_meta=True)
    with WeightFiles(folder) as files:
        files.why_not_by_shards(model)


def _transformers_model(folder: Path, *, on_meta: bool = False) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: not a Hugging Face model folder (no config.json); check model.path")
    place = {"device_map": "meta"} if on_meta else {}
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **place
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot load this model: {first_line(error)}") from error
    model: PreTrainedModel = found[0]
    require_all_tensors(folder, model, found[1]["missing_keys"])
    if not decoder_layers(model) or model.get_output_embeddings() is None:
        raise ModelError(f"{folder}: {type(model).__name__} is not a decoder-only language model with an output head")
    return model


def check_same_vocabulary(reference: ExactSettings, policy: ExactSettings, folder: Path) -> None:
    """Raises ModelError if the vocabulary sizes differ, because then token ids have different meanings."""
    theirs, ours = reference.vocabulary, policy.vocabulary
    if theirs != ours:
        raise ModelError(f"{folder}: a vocabulary of {theirs} tokens, the model has {ours}; set learner.kl.reference")


def reset_dynamic_rope(model: nn.Module) -> None:
    """Reset dynamic RoPE, which otherwise keeps the frequencies of the longest sequence so far."""
    for module in model.modules():
        for prefix, kind in rope_types(module).items():
            if "dynamic" in kind and hasattr(module, f"{prefix}original_inv_freq"):
                first, last = (module.get_buffer(f"{prefix}{name}") for name in ("original_inv_freq", "inv_freq"))
                module.register_buffer(f"{prefix}inv_freq", first.to(last.device), persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            # transformers 5 fails if these per-layer-type frequencies already exist
            if prefix and kind == "longrope":
                vars(module).pop(f"{prefix}long_inv_freq", None)


def rope_types(module: nn.Module) -> dict[str, str]:
    """Return the RoPE types of a rotary embedding by attribute prefix (one per layer type, or ""); else empty."""
    found = getattr(module, "rope_type", None)
    if isinstance(found, dict):
        return {f"{layer_type}_": kind for layer_type, kind in found.items()}
    return {"": found} if isinstance(found, str) else {}


def _without_dropout(module: object) -> None:
    """Set all dropout rates to 0, because checkpointed layers run in training mode."""
    for name, value in vars(module).items():
        if (name == "p" and isinstance(module, nn.Dropout)) or ("dropout" in name and isinstance(value, float)):
            setattr(module, name, 0.0)


def _from_logits(logits: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    distribution = logits.log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution[source, target], entropies[source]
