"""The model as the learner calls it: a packed row in, log-probabilities of its policy tokens out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll_flash.errors import ModelError
from roll_flash.learner.model.activation_offload import offload_activations
from roll_flash.learner.model.token_logprobs import LogitForm, token_logprobs
from roll_flash.learner.packing import tree_attention
from roll_flash.learner.packing.rows import PackedRow


@dataclass(frozen=True, slots=True)
class ModelForm:
    """How a model is computed exactly: what `make_exact` finds out once, and every rank then takes over."""

    shares_prefixes: bool
    logit_form: LogitForm | None
    vocabulary: int


class PolicyModel(nn.Module):
    """Wraps an unchanged causal language model of transformers.

    Being the root of FSDP, it gathers embedding and output head for its whole forward pass, so that the head can be
    applied to chosen positions only.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.shares_prefixes = True
        """Rows may be prefix trees. Where not, each is one sequence, computed as transformers does."""
        self.logit_form: LogitForm | None = LogitForm()
        """How logits follow from hidden states and head. None: only the model knows, and makes all of them."""
        self.flex_attention = False
        """Attention by FlexAttention (GPU only; see `flex_tree.why_not`)."""
        self.offload_activations = False
        """Keep what checkpointing saves in host memory until the backward pass (GPU only)."""
        self._own_attention = model.config._attn_implementation
        for module in model.modules():
            _without_dropout(module)

    def train(self, mode: bool = True) -> PolicyModel:
        """Dropout and the noise of routers stay off, since samplers have none: only layers that are computed again in
        the backward pass hear of it."""
        super().train(False)
        self.training = mode
        for layer in self.layers:
            layer.training = mode and bool(getattr(layer, "gradient_checkpointing", False))
        return self

    def share_prefixes(self, share: bool) -> None:
        """Choose between attention over prefix trees and the model's own."""
        self.shares_prefixes = share
        self.model.set_attn_implementation(tree_attention.NAME if share else self._own_attention)

    @property
    def form(self) -> ModelForm:
        return ModelForm(self.shares_prefixes, self.logit_form, self.head.shape[0])

    def forward(self, row: PackedRow, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """(logprobs, entropies) [M], float32, of the row's policy tokens at `temperature` (default: the sampler's)."""
        temperature = self.temperature if temperature is None else temperature
        device = self.head.device
        nodes, source = torch.unique(torch.tensor(row.source, device=device), return_inverse=True)
        target = torch.tensor(row.target, device=device)
        with offload_activations() if self.offload_activations else nullcontext():
            if self.logit_form is None:
                logits = self._call(self.model, row).logits[0, nodes].float()
                return _from_logits(logits / temperature, source, target)
            hidden = self._call(self.model.base_model, row).last_hidden_state[0, nodes]
        head, bias, form = self.head, self.head_bias, self.logit_form
        return token_logprobs(hidden, head, source, target, bias=bias, form=form, temperature=temperature)

    def _call(self, module: Any, row: PackedRow) -> Any:
        device = self.head.device
        token_ids = torch.tensor(row.token_ids, device=device)[None]
        if not self.shares_prefixes:
            if len(row.members) > 1:
                raise ValueError(f"a row of {len(row.members)} sequences for a model that takes one at a time")
            reset_dynamic_rope(self.model)
            return module(input_ids=token_ids, use_cache=False)
        tree = tree_attention.tree_layout(row.position_ids, row.subtree_end, device, flex=self.flex_attention)
        position_ids = torch.tensor(row.position_ids, device=device)[None]
        return module(input_ids=token_ids, position_ids=position_ids, use_cache=False, tree=tree)

    @property
    def head(self) -> Tensor:
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def head_bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)
        return bias

    def tied_names(self) -> list[str]:
        """State names whose tensor another name, earlier in the state, already holds."""
        seen: set[int] = set()
        tied = []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                tied.append(name)
            seen.add(id(tensor))
        return tied

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers: what FSDP shards one by one."""
        return list(self.model.base_model.layers)  # type: ignore[arg-type]


def load_policy_model(folder: Path, temperature: float = 1.0, form: ModelForm | None = None) -> PolicyModel:
    """The model of a Hugging Face folder, float32, in training mode, without dropout.

    It computes what plain transformers does on a few texts, or sequence by sequence if it cannot with shared prefixes;
    with the `form` that was found out before, nothing is tried.
    Raises ModelError when the folder is missing or incomplete, or the model cannot be computed exactly.
    """
    from roll_flash.learner.model.exactness import make_exact

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: not a Hugging Face model folder (no config.json); check model.path")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot load this model: {_first_line(error)}") from error
    if not hasattr(model.base_model, "layers") or model.get_output_embeddings() is None:
        raise ModelError(f"{folder}: {type(model).__name__} is not a decoder-only language model with an output head")
    policy = PolicyModel(model, temperature)
    if form is None:
        make_exact(policy, folder)
    else:
        policy.share_prefixes(form.shares_prefixes)
        policy.logit_form = form.logit_form
    return policy.train()


def check_same_vocabulary(reference: ModelForm, policy: ModelForm, folder: Path) -> None:
    """Raises ModelError when the token ids of the two cannot mean the same."""
    theirs, ours = reference.vocabulary, policy.vocabulary
    if theirs != ours:
        raise ModelError(f"{folder}: a vocabulary of {theirs} tokens, the model has {ours}; set learner.kl.reference")


def reset_dynamic_rope(model: nn.Module) -> None:
    """Forget how long sequences were so far: dynamic RoPE keeps the frequencies of the longest."""
    for module in model.modules():
        for prefix, kind in rope_types(module).items():
            if "dynamic" in kind and hasattr(module, f"{prefix}original_inv_freq"):
                first, last = (module.get_buffer(f"{prefix}{name}") for name in ("original_inv_freq", "inv_freq"))
                module.register_buffer(f"{prefix}inv_freq", first.to(last.device), persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            # transformers 5 fails when it finds those of a kind of layer, instead of using them again
            if prefix and kind == "longrope":
                vars(module).pop(f"{prefix}long_inv_freq", None)


def rope_types(module: nn.Module) -> dict[str, str]:
    """Of a rotary embedding: its type, or that of each kind of layer under the prefix of its attributes. Empty for
    other modules."""
    found = getattr(module, "rope_type", None)
    if isinstance(found, dict):
        return {f"{layer_type}_": kind for layer_type, kind in found.items()}
    return {"": found} if isinstance(found, str) else {}


def _without_dropout(module: nn.Module) -> None:
    """Layers that are computed again are in training mode, and so would drop."""
    for name, value in vars(module).items():
        if (name == "p" and isinstance(module, nn.Dropout)) or ("dropout" in name and isinstance(value, float)):
            setattr(module, name, 0.0)


def _from_logits(logits: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    distribution = logits.log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution[source, target], entropies[source]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
