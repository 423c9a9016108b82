"""Losses and advantages of the user: the blocks of docs/algorithms.md, what is refused, and what a step does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import roll_flash
from roll_flash.config.tree import load_config
from roll_flash.config.user_code import load_function
from roll_flash.dashboard.fates import _rules
from roll_flash.errors import ConfigError, LearnerError
from roll_flash.learner.losses.policy import LOSSES, PolicyTokens, TokenLoss, policy_loss
from roll_flash.system.start_checks import _check_equal_rewards, _check_own_functions
from roll_flash.testing import check_advantage, check_loss
from tests.docs.pages import blocks_of
from tests.learner.in_process import assert_equal_weights
from tests.learner.samples import make_group
from tests.learner.test_steps import GROUPS, trained

DEFINITION, TEST = (block.text for block in blocks_of("docs/algorithms.md") if block.language == "python")
SETTINGS, *OTHER_SETTINGS = (block.text for block in blocks_of("docs/algorithms.md") if block.language == "yaml")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(DEFINITION)
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


def learner_of(tree: dict[str, Any]) -> Any:
    return load_config({"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}], **tree}).learner


def test_the_page_defines_grpo_and_tests_it(mine: Path) -> None:
    exec(TEST, {})
    config = learner_of(yaml.safe_load(SETTINGS))
    assert config.loss.parameters() == {"clip": 0.1}
    _check_own_functions(config)


@pytest.mark.parametrize("text", OTHER_SETTINGS)
def test_other_settings_of_the_page_are_a_config(text: str) -> None:
    """tests/stages/test_run_with_teacher.py trains with those of a teacher."""
    load_config({"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}], **yaml.safe_load(text)})


def test_a_step_with_the_pages_functions_is_that_of_the_built_in_ones(mine: Path, tiny_model: Path) -> None:
    built_in = {"loss": {"name": "ppo", "clip_low": 0.1, "clip_high": 0.1}}
    expected, _ = trained(tiny_model, [GROUPS[:2], GROUPS[2:]], minibatches=2, **built_in)
    found, result = trained(tiny_model, [GROUPS[:2], GROUPS[2:]], minibatches=2, **yaml.safe_load(SETTINGS)["learner"])
    assert_equal_weights(found, expected)
    assert result.metrics["optimizer_steps"] == 2


def test_figures_of_a_loss_are_metrics(tiny_model: Path, mine: Path) -> None:
    mine.write_text(
        "from roll_flash.learner.losses.policy import TokenLoss\n"
        "def loss(tokens):\n"
        "    return TokenLoss(-tokens.advantages * tokens.logprobs, {'half': tokens.advantages * 0 + 0.5})\n"
    )
    _, result = trained(tiny_model, [GROUPS], loss={"name": "mine.py:loss"})
    assert result.metrics["half"] == pytest.approx(0.5)


def test_a_figure_of_a_loss_does_not_replace_one_of_the_step(tiny_model: Path, mine: Path) -> None:
    mine.write_text(
        "from roll_flash.learner.losses.policy import TokenLoss\n"
        "def loss(tokens):\n"
        "    names = ('sequences', 'entropy')\n"
        "    return TokenLoss(-tokens.advantages * tokens.logprobs, {name: tokens.mask * 0.5 for name in names})\n"
    )
    _, result = trained(tiny_model, [GROUPS], loss={"name": "mine.py:loss"})
    assert result.metrics["sequences"] == sum(len(group.trajectories) for group in GROUPS)
    assert result.metrics["entropy"] > 0.5
    assert [result.metrics[f"loss/{name}"] for name in ("sequences", "entropy")] == pytest.approx([0.5, 0.5])


def test_a_figure_of_a_loss_may_be_missing_in_some_rows(tiny_model: Path, mine: Path) -> None:
    mine.write_text(
        "from roll_flash.learner.losses.policy import TokenLoss\n"
        "def loss(tokens):\n"
        "    good = tokens.advantages > 0\n"
        "    return TokenLoss(-tokens.advantages * tokens.logprobs, {'good_fraction': good} if good.any() else {})\n"
    )
    _, result = trained(tiny_model, [GROUPS], loss={"name": "mine.py:loss"}, micro_batch_tokens=1)
    assert 0 < result.metrics["good_fraction"] < 1


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_losses_of_the_project_pass(name: str) -> None:
    check_loss(LOSSES[name])


@pytest.mark.parametrize("level", ["turn", "turn_mean", "sequence", "sequence_mean"])
def test_means_over_a_turn_or_a_sequence_are_allowed(level: str) -> None:
    check_loss(LOSSES["tis"], correction_level=level)


def over_the_tensor(tokens: PolicyTokens) -> torch.Tensor:
    return -tokens.logprobs * (tokens.advantages - tokens.advantages.mean())


def over_the_masked_too(tokens: PolicyTokens) -> torch.Tensor:
    place = torch.arange(len(tokens.logprobs))
    first = torch.stack([place[tokens.sequence_ids == each].min() for each in tokens.sequence_ids])
    return -tokens.logprobs * tokens.advantages * (1 + (tokens.mask.sum() == len(place)) * (place == first))


def without_a_limit(tokens: PolicyTokens) -> torch.Tensor:
    return -((tokens.logprobs - tokens.behavior_logprobs) * 20).exp() * tokens.advantages


def by_runs_of_ids(tokens: PolicyTokens) -> torch.Tensor:
    """A mean over a sequence, right only where its tokens are next to each other."""
    _, counts = torch.unique_consecutive(tokens.sequence_ids, return_counts=True)
    runs = (tokens.logprobs - tokens.behavior_logprobs).split(counts.tolist())
    return -torch.cat([run.mean().expand_as(run) for run in runs]).exp() * tokens.advantages


def with_the_token_before(tokens: PolicyTokens) -> torch.Tensor:
    assert tokens.sequence_ids is not None
    gap = tokens.logprobs - tokens.behavior_logprobs
    same = torch.cat([torch.zeros(1, dtype=torch.bool), tokens.sequence_ids[1:] == tokens.sequence_ids[:-1]])
    return -(gap + torch.where(same, gap.roll(1), 0.0)).exp() * tokens.advantages


def by_the_size_of_advantages(tokens: PolicyTokens) -> torch.Tensor:
    return -tokens.ratio(tokens.behavior_logprobs) * tokens.advantages / tokens.advantages.abs()


def distance_to_the_proximal_policy(tokens: PolicyTokens) -> torch.Tensor:
    return ((tokens.logprobs - tokens.prox_logprobs) ** 2).sqrt() - tokens.logprobs * tokens.advantages


def finite_in_float64(tokens: PolicyTokens) -> torch.Tensor:
    ratio = (tokens.logprobs - tokens.behavior_logprobs).exp()
    return 0.01 * ratio**2 - ratio * tokens.advantages


def log_of_an_advantage(tokens: PolicyTokens) -> torch.Tensor:
    return -tokens.logprobs * tokens.advantages.log()


def without_gradient(tokens: PolicyTokens) -> TokenLoss:
    return TokenLoss(-tokens.logprobs.detach() * tokens.advantages, {})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (over_the_tensor, r"the loss of a sequence changes with the others in the tensor \(sequence 0 of 4\)"),
        (over_the_masked_too, "changes with what tokens.mask leaves out"),
        (without_a_limit, r"is not finite where .* differ by 100: use tokens.ratio\(\)"),
        (finite_in_float64, r"is not finite where .* differ by 100: use tokens.ratio\(\)"),
        (by_runs_of_ids, "the loss of a token changes where the tokens of a sequence are not next"),
        (with_the_token_before, "the loss of a token changes where the tokens of a sequence are not next"),
        (by_the_size_of_advantages, "is not finite where an advantage is 0"),
        (distance_to_the_proximal_policy, "is not finite where the proximal policy is the policy"),
        (log_of_an_advantage, "is not finite, on tokens with nothing unusual"),
        (without_gradient, "has no gradient"),
        (
            lambda tokens: -(tokens.logprobs * tokens.advantages).mean(),
            r"one loss per token, shape \[22\], not a tensor",
        ),
        (lambda tokens: 0.5, "one loss per token, .* not 'float'"),
        (lambda tokens: tokens.rewards, "raised AttributeError: 'PolicyTokens' object has no attribute 'rewards'"),
    ],
)
def test_a_loss_that_would_depend_on_the_split_is_refused(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(loss)


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda rewards: rewards / rewards.std(), r"must return 1 finite numbers for rewards \[1.0\]"),
        (lambda rewards: rewards.mean(), "must return 1 finite numbers"),
        (lambda rewards: rewards - rewards[0], "changes with the order of the others"),
        (lambda rewards: rewards[5], "raised IndexError"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_an_advantage_that_fails_for_some_groups_is_refused(advantage: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_advantage(advantage)


def test_an_advantage_that_fails_in_a_run_is_one_line(tiny_model: Path, mine: Path) -> None:
    mine.write_text("def advantage(rewards):\n    return rewards[:1]\n")
    with pytest.raises(LearnerError, match=r"learner.advantage mine.py:advantage must return 4 finite numbers"):
        trained(tiny_model, [GROUPS[:1]], advantage="mine.py:advantage")


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"loss": {"name": "decoupled_po"}}, "did you mean 'decoupled_ppo'"),
        ({"advantage": "rlo"}, "did you mean 'rloo'"),
        ({"loss": {"name": "tis", "params": {"clip": 1}}}, "params are for a function of yours"),
        ({"loss": {"name": "a.py:loss", "clip_low": 0.1}}, "clip_low is not read by a.py:loss; write it into"),
        ({"loss": {"name": "a.py:loss", "params": {"sequence_cap": 2}}}, "sequence_cap would not reach a.py:loss"),
        ({"advantage": "a.py:f", "normalize_advantage": "group"}, "use none or batch"),
    ],
)
def test_names_and_keys_that_do_not_fit_are_refused(learner: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learner_of({"learner": learner})


def test_the_start_check_names_key_and_function(mine: Path) -> None:
    mine.write_text("def loss(tokens):\n    return tokens.logprobs.sum()\ndef advantage(rewards):\n    return 1 / 0\n")
    with pytest.raises(ConfigError, match=r"learner.loss.name mine.py:loss: must return one loss per token"):
        _check_own_functions(learner_of({"learner": {"loss": {"name": "mine.py:loss"}}}))
    with pytest.raises(
        ConfigError, match=r"learner.advantage mine.py:advantage: it raised ZeroDivisionError: .* \(mine.py:4\), with"
    ):
        _check_own_functions(learner_of({"learner": {"advantage": "mine.py:advantage"}}))
    with pytest.raises(ConfigError, match=r"learner.loss.name 'mine.py:other': .*has no 'other'"):
        _check_own_functions(learner_of({"learner": {"loss": {"name": "mine.py:other"}}}))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "@roll_flash.loss\ndef mine(): ...",
            "mine.py:3: ConfigError: mine: a loss takes the tokens as its first argument",
        ),
        ("@roll_flash.advantage\ndef mine(*, rewards): ...", "an advantage takes the rewards as its first argument"),
        ("@roll_flash.stage\ndef mine(): ...", "a stage takes the trajectories as its first argument"),
        ("@roll_flash.stage\nclass mine: ...", "mine: a stage has a method `score`"),
        ("mine = roll_flash.loss(5)", "5: a loss is a function of the tokens"),
    ],
)
def test_a_decorator_names_the_line_of_what_cannot_be_called(mine: Path, code: str, message: str) -> None:
    mine.write_text(f"import roll_flash\n\n{code}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_function("mine.py:mine", "learner.loss.name")


def test_what_is_decorated_is_as_it_was(mine: Path) -> None:
    mine.write_text("import roll_flash\n\n@roll_flash.stage\nclass Kept:\n    def score(self, found): return [2.0]\n")
    kept = load_function("mine.py:Kept", "stages")
    assert kept.__name__ == "Kept"
    assert kept().score(["a"]) == [2.0]
    assert roll_flash.loss(check_loss) is check_loss
    assert roll_flash.advantage(check_advantage) is check_advantage


@pytest.mark.parametrize(("function", "learns"), [("rewards - rewards.mean()", False), ("rewards - 0.5", True)])
def test_groups_from_which_an_advantage_learns_are_not_dropped(mine: Path, function: str, learns: bool) -> None:
    mine.write_text(f"def advantage(rewards):\n    return {function}\n")
    settings = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}], "learner": {"advantage": "mine.py:advantage"}}
    config = load_config({**settings, "scheduler": {"drop_groups_without_signal": True}})
    if not learns:
        _check_equal_rewards(config)
        return
    with pytest.raises(ConfigError, match=r"from which learner.advantage=mine.py:advantage learns too"):
        _check_equal_rewards(config)


def test_the_dashboard_runs_no_function_of_a_run() -> None:
    assert _rules({"learner": {"advantage": "mine.py:advantage"}}) is None
    assert _rules({"learner": {"advantage": "rloo"}}) is not None
    assert _rules({"distill": {"teacher": {"model": "tiny"}}}) is None, "each token has an advantage of its own"


def test_a_function_without_a_name_can_be_given_to_policy_loss() -> None:
    values = torch.tensor([-1.0, -2.0])
    tensors = dict.fromkeys(("logprobs", "prox_logprobs", "behavior_logprobs"), values)
    output = policy_loss(
        lambda tokens: tokens.logprobs * 2, **tensors, advantages=torch.ones(2), mask=torch.tensor([True, False])
    )
    assert output.loss.item() == pytest.approx(-2.0)
    assert np.isfinite(output.loss.item())


def test_a_loss_that_learns_without_advantages_gets_groups_without_a_signal(mine: Path, tiny_model: Path) -> None:
    """Here the pull towards the sampler: its tokens count in the mean, so they must be computed."""
    mine.write_text(
        f"{DEFINITION}\n\ndef pulled(tokens):\n"
        "    return grpo_loss(tokens) + (tokens.logprobs - tokens.behavior_logprobs) ** 2\n"
    )
    groups = [[make_group(0), make_group(1, rewards=[1.0] * 4)]]
    computed = {}
    for name in ("grpo_loss", "pulled"):
        _, result = trained(tiny_model, groups, loss={"name": f"mine.py:{name}"})
        computed[name] = result.metrics["computed_policy_tokens"] / result.metrics["policy_tokens"]
    assert computed["grpo_loss"] < 1
    assert computed["pulled"] == 1
