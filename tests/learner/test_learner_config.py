"""The words of the config: nothing is ignored, every example of the documentation loads, defaults correct."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from roll_flash.config.sections.learner import ADVANTAGE_NAMES, LOSS_PARAMETERS, LearnerConfig, LossConfig
from roll_flash.config.tree import load_config
from roll_flash.errors import ConfigError
from roll_flash.learner.losses.policy import LOSSES
from roll_flash.learner.losses.token_advantages import AdvantageConfig, turn_advantages
from roll_flash.scheduling.tasks import make_task
from roll_flash.types import FinishedEpisode, FinishedGroup

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"
EXAMPLES = re.findall(r"^\| [^|]+ \| `([a-z_.]+=[^`|]+)` \|$", DOCUMENT.read_text(), re.MULTILINE)
SMALLEST: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}
TEACHER = "distill.teacher.base_url=http://localhost:8000/v1"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_documentation_loads_and_corrects_for_the_age_it_allows(example: str) -> None:
    config = load_config(SMALLEST, example.split())
    assert config.learner.loss.off_policy_warning(config.scheduler.highest_async_ratio) is None


def test_the_documentation_names_every_loss_correction_and_advantage() -> None:
    text = DOCUMENT.read_text()
    assert len(EXAMPLES) >= 20
    words = [*get_args(LossConfig.model_fields["name"].annotation), "none", "tis", "mask"]
    words += [*get_args(LearnerConfig.model_fields["advantage"].annotation), "k1", "k2", "k3"]
    assert [word for word in words if f"| `{word}`" not in text] == []
    used = " ".join(EXAMPLES)
    names = set(LOSS_PARAMETERS) - {"decoupled_ppo"}
    assert [name for name in names if f"learner.loss.name={name}" not in used] == []


@pytest.mark.parametrize("name", list(LOSS_PARAMETERS))
def test_the_config_offers_exactly_what_a_loss_function_takes(name: str) -> None:
    assert set(inspect.signature(LOSSES[name]).parameters) - {"tokens"} == LOSS_PARAMETERS[name]
    assert set(LossConfig(name=name).parameters()) <= LOSS_PARAMETERS[name]


def test_every_loss_has_a_name_in_the_config() -> None:
    assert set(LOSSES) - set(LOSS_PARAMETERS) == {"supervised"}
    assert set(LOSS_PARAMETERS) <= set(LOSSES)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("learner.loss.name=ppo learner.loss.correction=mask", "correction is not read by ppo, only by decoupled_ppo"),
        ("learner.loss.positive_weight=2", "positive_weight is not read by decoupled_ppo, only by weighted_topr"),
        ("learner.loss.name=tis learner.loss.clip_low=0.1", "clip_low is not read by tis"),
        ("learner.loss.correction=mask learner.loss.correction_floor=3", "correction_floor is above correction_cap"),
        ("learner.loss.correction_floor=0.3", "correction_floor is not read with correction=tis"),
        ("learner.loss.correction=none learner.loss.correction_cap=3", "correction_cap is not read with"),
        (
            "learner.loss.name=reinforce learner.loss.correction=none learner.loss.correction_level=turn",
            "correction_level is not read with correction=none",
        ),
        ("learner.advantage=reinforce++ learner.normalize_advantage=group", r"reinforce\+\+ has no group"),
        ("learner.advantage=gigpo learner.normalize_advantage=batch", "gigpo has no batch"),
        ("learner.turn_weight=2", "not read by grpo, only by gigpo"),
        ("learner.loss.ratio_level=turn_mean", "ratio_level is not read by decoupled_ppo, only by gspo"),
        ("learner.loss.sequence_rejects=negative", "not read without sequence_floor or sequence_cap"),
        ("learner.loss.second_moment=0", "learner.loss.second_moment"),
        ("learner.loss_normalization=constant", "loss_length and loss_normalization=constant belong together"),
        ("learner.loss_length=64", "belong together"),
        ("learner.overlong.max_tokens=64", "max_tokens and buffer_tokens belong together"),
        ("learner.overlong.penalty=2", "penalty is not read without"),
        ("learner.overlong.max_tokens=64 learner.overlong.buffer_tokens=65", "buffer_tokens is above max_tokens"),
        ("learner.kl.in_reward=true", "in_reward has no effect with coefficient=0"),
        (f"{TEACHER} learner.kl.in_reward=true learner.kl.coefficient=1", "distill.reward_weight=0 does not look at"),
        (
            f"{TEACHER} learner.overlong.max_tokens=64 learner.overlong.buffer_tokens=8",
            "distill.reward_weight=0 does not look at",
        ),
        ("learner.kl.in_reward=true learner.kl.coefficient=1 learner.kl.estimator=k3", "estimator=k3 is not read"),
        ("learner.proximal_decay=0.9 learner.loss.name=gspo", "proximal_decay is not read by gspo"),
        (
            "learner.proximal_decay=0.9 learner.loss.name=reinforce learner.loss.correction=none",
            "proximal_decay is not read by reinforce; use decoupled_ppo, or reinforce with a correction",
        ),
        ("learner.proximal_decay=0.9 learner.loss.second_moment=1", "a moment is that of the start of the step"),
        ("learner.adaptive_entropy.step=1", "step and highest are not read without target"),
        (
            "learner.entropy_bonus=2 learner.adaptive_entropy.target=1",
            "entropy_bonus is above adaptive_entropy.highest",
        ),
        ("learner.minibatches=0", "learner.minibatches"),
        ("learner.kl.estimator=k4", "learner.kl.estimator"),
        ("learner.lora.rank=-1", "learner.lora.rank"),
    ],
)
def test_what_would_be_ignored_or_contradicts_itself_is_an_error(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(SMALLEST, override.split())


@pytest.mark.parametrize(
    "override",
    [
        "learner.loss.name=tis learner.loss.correction_cap=0.4",
        "learner.loss.correction_cap=0.4",
        "learner.proximal_decay=0.9 learner.loss.name=ppo learner.loss.sequence_cap=2",
        f"{TEACHER} distill.reward_weight=1 learner.kl.in_reward=true learner.kl.coefficient=1",
    ],
)
def test_what_is_read_is_not_refused(override: str) -> None:
    assert load_config(SMALLEST, override.split())


def test_what_was_resolved_can_be_run_again_with_another_loss() -> None:
    import yaml

    saved = yaml.safe_load(load_config(SMALLEST).to_yaml())
    for name in LOSS_PARAMETERS:
        assert load_config(saved, [f"learner.loss.name={name}"]).learner.loss.name == name


@pytest.mark.parametrize(
    ("loss", "async_ratio", "warns"),
    [
        ({}, 8, False),
        ({"correction": "mask"}, 8, False),
        ({"correction": "none"}, 1, True),
        ({"correction": "none"}, 0, False),
        ({"name": "reinforce"}, 1, False),
        ({"name": "reinforce", "correction": "none"}, 0.5, True),
        ({"name": "ppo"}, 0, False),
        ({"name": "ppo"}, 4, True),
        ({"name": "gspo"}, 1, True),
        ({"name": "m2po"}, 8, False),
        *(({"name": name}, 8, False) for name in ("tis", "cispo", "topr", "weighted_topr", "tis_topr")),
    ],
)
def test_a_loss_that_does_not_correct_for_old_data_says_so(
    loss: dict[str, Any], async_ratio: float, warns: bool
) -> None:
    warning = LossConfig(**loss).off_policy_warning(async_ratio)
    assert (warning is not None) == warns
    assert warning is None or "\n" not in warning


def episode(reward: float, turns: tuple[float, ...], roles: tuple[tuple[str, float, int], ...] = ()) -> FinishedEpisode:
    own_turns = tuple((3, of_turn, state) for state, of_turn in enumerate(turns))
    task = make_task("Maze-v0", 1, {})
    return FinishedEpisode("g-r0", "g", task, reward, None, 0.0, 1.0, 2, ((0, 6),), 6, own_turns=own_turns, roles=roles)


@pytest.mark.parametrize(
    "override",
    [*(f"learner.advantage={name}" for name in ADVANTAGE_NAMES if name != "gae"), "learner.role_baseline=group"],
)
def test_no_group_from_which_something_is_learned_can_be_dropped_as_one_without_signal(override: str) -> None:
    roles = (("a", 1.0, 1), ("b", -1.0, 1)) if "role" in override else ()
    equal = [episode(1.0, (1.0, 0.0), roles), episode(1.0, (0.0, 1.0), roles)]
    mixed = [episode(0.0, (0.0, 0.0), roles), episode(1.0, (0.0, 1.0), roles)]
    assert not FinishedGroup("g", equal[0].task, tuple(equal)).has_signal
    of_equal, _ = turn_advantages([equal, mixed], AdvantageConfig.of(load_config(SMALLEST, [override]).learner))
    dropping = [override, "scheduler.drop_groups_without_signal=true"]
    if any(value for values in of_equal for value in values):
        with pytest.raises(ConfigError, match=f"equal rewards, from which {re.escape(override)} learns too"):
            load_config(SMALLEST, dropping)
    else:
        load_config(SMALLEST, dropping)
