"""Adapters alone, a few KB here, reach real servers, which then are exactly the adapted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from roll_flash.config.sections.learner import LoraConfig
from roll_flash.engines.inference import StagedWeights
from roll_flash.learner.model import lora
from roll_flash.learner.weights.staged import WeightStage, whole_tensors
from roll_flash.models.prepare import resolve_model
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights

from .conftest import Served

TOLERANCE = 1e-3
PROBE = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46."


def adapted_model(*, targets: tuple[str, ...] = ("q_proj", "down_proj"), seed: int = 0) -> Any:
    """The tiny model with adapters that clearly change it."""
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    lora.adapt(model, LoraConfig(rank=4, targets=targets))
    generator = torch.Generator().manual_seed(seed)
    for layer in lora.adapters(model).values():
        layer.lora_b.data = torch.randn(layer.lora_b.shape, generator=generator) * 0.05
    return model


def stage(model: Any, *, changed_only: bool = True) -> WeightStage:
    return WeightStage(model, ["lm_head.weight"], torch.float32, "test", changed_only=changed_only)


def take_over(served: Served, model: Any) -> None:
    """The model here to compare with becomes `model`, its adapters merged."""
    served.model.load_state_dict(dict(whole_tensors(model)), strict=False)


def difference(served: Served) -> float:
    probe = served.encode(PROBE)
    [score] = served.run(served.engine.score(probe))
    return float(np.abs(score - served.logprobs(probe)).max())


def publish(served: Served, model: Any, *, changed_only: bool = True) -> StagedWeights:
    staging = stage(model, changed_only=changed_only)
    served.version += 1
    try:
        weights = staging.stage(served.version)
        [update] = served.run(served.engine.publish(weights))
    finally:
        staging.close()
    assert update.version == served.version
    take_over(served, model)
    return weights


def test_adapters_alone_make_the_server_the_adapted_model(served: Served) -> None:
    weights = publish(served, adapted_model())
    assert weights.num_bytes < weights.model_bytes / 10
    assert difference(served) < TOLERANCE


def test_what_an_earlier_version_changed_and_this_one_did_not_is_as_in_the_model_folder(served: Served) -> None:
    publish(served, adapted_model(seed=1), changed_only=False)
    assert difference(served) < TOLERANCE
    publish(served, adapted_model(targets=("v_proj",), seed=2))
    assert difference(served) < TOLERANCE


def test_merged_by_the_server_is_merged_by_the_learner_to_the_last_bit() -> None:
    model = adapted_model()
    small, whole = stage(model), stage(model, changed_only=False)
    try:
        with PublishedWeights(small.stage(1).path, ModelFolder(resolve_model("tiny")), tied=True) as weights:
            expected = load_file(whole.stage(1).path)
            assert set(weights.names) - {"lm_head.weight"} == set(expected)
            for name, tensor in expected.items():
                assert torch.equal(weights.tensor(name), tensor), name
    finally:
        small.close()
        whole.close()


def test_factors_that_do_not_fit_are_refused_and_the_server_goes_on(served: Served, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    name = "model.layers.0.self_attn.q_proj"
    save_file(
        {f"{name}.lora_a": torch.zeros(2, 3), f"{name}.lora_b": torch.zeros(3, 2)},
        bad,
        metadata={"rest": "model_folder", "lora_scale": "1.0"},
    )
    before = difference(served)
    with pytest.raises(Exception, match="update_weights answered HTTP"):
        served.run(served.engine.publish(StagedWeights(99, str(bad), 1)))
    assert difference(served) == pytest.approx(before, abs=1e-5)
