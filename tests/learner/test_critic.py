"""A critic: against recursions and loops written otherwise, over ranks, through checkpoints, and what it learns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.model_check.architectures import write_model
from roll_flash.config.tree import load_config
from roll_flash.engines.learner import StepResult
from roll_flash.errors import ConfigError, ModelError
from roll_flash.learner.losses.critic import gae, value_loss, whitened, with_advantages
from roll_flash.learner.losses.records import value_metrics
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.rows import TrainSequence, pack
from roll_flash.learner.packing.sequences import split_minibatches
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.ranks.optimizer import trained_parts
from roll_flash.stream.blocks import TokenArrays
from roll_flash.types import Branch, Group, Trajectory, Turn
from tests.learner.critic_loop import estimate, plain_critic_loop
from tests.learner.in_process import assert_equal_weights, assert_same_weights, in_process, weights_of
from tests.learner.samples import make_group, prepare_group, replace_trajectory, sequences_of
from tests.learner.test_fsdp import with_learner

GAE = AdvantageConfig(advantage="gae", scale="batch", keep_without_signal=True)
SETTINGS: dict[str, Any] = {"advantage": "gae", "critic": {"learning_rate": 1e-3}}
Weights = dict[str, torch.Tensor]


def rewarded(group: Group, seed: int = 0) -> Group:
    """The group with a reward for each turn, and one of a stage in the first episode."""
    random = np.random.default_rng(seed)
    members = []
    for number, trajectory in enumerate(group.trajectories):
        turns = tuple(replace(turn, reward=float(random.normal())) for turn in trajectory.turns)
        reward = sum(turn.reward for turn in turns) + (0.5 if number == 0 else 0.0)
        members.append(replace(trajectory, turns=turns, reward=reward))
    return replace(group, trajectories=tuple(members))


def single(seed: int, **options: Any) -> Group:
    return rewarded(make_group(seed, replicas=1, prompt=20, turn=(3, 12), **options), seed)


GROUPS = [rewarded(make_group(seed, prompt=20, turn=(3, 12)), seed) for seed in range(3)] + [single(9)]


def predicted(trajectory: Trajectory, seed: int, *, by_turn: bool = False) -> TrainSequence:
    """The sequence of an episode as ranks have it after `keep`, with random values, garbage where there are none."""
    group = replace(make_group(0), trajectories=(trajectory,))
    (planned,) = prepare_group(group, 0, GAE).planned
    (sequence,) = planned.sequences(TokenArrays.of(trajectory), by_turn=by_turn)
    assert sequence.value_places is not None
    random = np.random.default_rng(seed).normal(size=len(trajectory.token_ids)).astype(np.float32)
    values = np.where(sequence.policy_mask, random[sequence.value_places], np.nan).astype(np.float32)
    return replace(sequence, values=values)


def value_head(learner: FsdpLearner) -> torch.Tensor:
    handle: Any = learner._ranks[0]
    model = handle._rank._critic or handle._rank._policy
    weight = model.value_weight.detach()
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()


async def step(learner: FsdpLearner, *batches: Sequence[Group]) -> StepResult:
    for batch in batches:
        await learner.accumulate(batch)
    return await learner.finish_step()


def test_the_estimate_is_the_sum_of_its_definition() -> None:
    random = np.random.default_rng(0)
    rewards, values = random.normal(size=(2, 9))
    for discount, weight in ((1.0, 1.0), (0.9, 0.95), (0.99, 0.0), (0.0, 0.5)):
        following = [*values[1:], 0.0]
        errors = [rewards[k] + discount * following[k] - values[k] for k in range(9)]
        expected = [sum((discount * weight) ** (k - t) * errors[k] for k in range(t, 9)) for t in range(9)]
        np.testing.assert_allclose(gae(rewards, values, discount, weight), expected, atol=1e-12)
    to_go = rewards[::-1].cumsum()[::-1]
    np.testing.assert_allclose(gae(rewards, values), to_go - values, atol=1e-12)


@pytest.mark.parametrize("by_turn", [False, True])
@pytest.mark.parametrize(("discount", "weight"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
def test_advantages_skip_what_the_environment_says(by_turn: bool, discount: float, weight: float) -> None:
    """Against a recursion over all tokens with a mask, in float64, with rewards of turns and of a stage."""
    for seed in range(8):
        trajectory = rewarded(make_group(seed, turn=(1, 9)), seed).trajectories[seed % 4]
        sequence = predicted(trajectory, seed, by_turn=by_turn)
        found = with_advantages(sequence, discount, weight)
        mask = trajectory.policy_mask
        assert found.values is not None
        assert found.returns is not None
        values = torch.tensor(found.values[mask], dtype=torch.float64)
        advantages, returns, _ = estimate(trajectory, values, by_turn, discount, weight)
        np.testing.assert_allclose(found.advantages[mask], advantages, atol=1e-6)
        np.testing.assert_allclose(found.returns[mask], returns, atol=1e-6)
        assert not found.advantages[~mask].any()


def test_the_length_of_observations_changes_no_advantage() -> None:
    trajectory = rewarded(make_group(3)).trajectories[1]
    first, second = trajectory.turns
    gap = slice(first.end, second.start)

    def longer(array: np.ndarray, by: int) -> np.ndarray:
        return np.insert(array, second.start, np.resize(array[gap], by))

    names = ("token_ids", "policy_mask", "logprobs", "versions")
    moved = replace(second, start=second.start + 50, end=second.end + 50)
    arrays: dict[str, Any] = {name: longer(getattr(trajectory, name), 50) for name in names}
    wide = replace(trajectory, turns=(first, moved), **arrays)
    short, long = predicted(trajectory, 0), predicted(wide, 0)
    assert short.values is not None
    assert long.values is not None
    long.values[long.policy_mask] = short.values[short.policy_mask]
    found = [with_advantages(each, 0.9, 0.9) for each in (short, long)]
    np.testing.assert_array_equal(*(each.advantages[each.policy_mask] for each in found))


def test_a_reward_is_at_the_last_trained_token_of_its_turn_and_none_is_lost() -> None:
    group = make_group(0)
    (one,) = (group.trajectories[0],)
    first, second = one.turns
    before = Turn(0, 2, "", "", 7.0, "stop", 0.0, 0.0, in_prefix=True)
    elsewhere = Turn(0, 0, "", "", 2.0, "stop", 0.0, 0.0)
    turns = (before, replace(first, reward=1.0), elsewhere, replace(second, reward=4.0))
    logprobs = one.logprobs.copy()
    logprobs[first.end - 1] = -9999.0
    episode = replace(one, turns=turns, reward=15.0, logprobs=logprobs)
    (sequence,) = sequences_of(prepare_group(replace(group, trajectories=(episode,)), 0, GAE))
    assert sequence.rewards is not None
    found = {int(place): sequence.rewards[place] for place in np.flatnonzero(sequence.rewards)}
    # What came before the first decision is left out; the last turn has what a stage added.
    assert found == {first.end - 2: 1.0 + 2.0, second.end - 1: 4.0 + 1.0}


def test_a_branch_ends_with_the_reward_of_the_episode() -> None:
    group = rewarded(make_group(0))
    main, other = group.trajectories[1:3]
    names = ("token_ids", "policy_mask", "logprobs", "versions", "prompt_length")
    branch = Branch(**{name: getattr(other, name) for name in names}, turns=(), messages=())
    episode = replace(main, branches=(branch,))
    sequences = sequences_of(prepare_group(replace(group, trajectories=(episode,)), 0, GAE))
    totals = [each.rewards.sum() for each in sequences if each.rewards is not None]
    assert totals == pytest.approx([main.reward, main.reward])
    assert sequences[1].rewards is not None
    assert np.flatnonzero(sequences[1].rewards).tolist() == [other.turns[-1].end - 1]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_step_however_it_is_split() -> None:
    sequences = [
        with_advantages(predicted(trajectory, number), 1.0, 0.95)
        for number, trajectory in enumerate(each for group in GROUPS for each in group.trajectories)
    ]
    parts = [sequences[:5], sequences[5:], []]
    sums = np.zeros(3)
    for part in parts:
        whitened(part, lambda numbers: sums.__iadd__(list(numbers)).tolist())
    found = [each for part in parts for each in whitened(part, lambda numbers: sums.tolist())]
    whole = whitened(sequences, list)
    for one, two in zip(found, whole, strict=True):
        np.testing.assert_allclose(one.advantages, two.advantages, atol=1e-6)
    tokens = np.concatenate([each.advantages[each.policy_mask] for each in whole])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_the_loss_of_values_and_its_gradient_are_those_of_verl(clip: float | None) -> None:
    torch.manual_seed(0)
    old, returns = torch.randn(2, 200, dtype=torch.float64)
    values = (old + torch.randn(200, dtype=torch.float64)).requires_grad_()
    losses, acted = value_loss(values, old_values=old, returns=returns, clip=clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    for v, o, r, loss, slope, clipped in zip(
        *(tensor.tolist() for tensor in (values, old, returns, losses, gradient, acted)), strict=True
    ):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        assert loss == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, abs=1e-12)
        assert clipped == ((near - r) ** 2 > (v - r) ** 2)
        assert slope == pytest.approx(0.0 if clipped else v - r, abs=1e-12)
    assert bool(acted.any()) == (clip is not None)


def test_explained_variance_is_1_for_perfect_values_and_0_for_a_constant() -> None:
    returns = np.array([1.0, 2.0, 4.0], np.float32)
    assert value_metrics(returns, returns)["value_explained_variance"] == 1
    assert value_metrics(np.full(3, 9.0, np.float32), returns)["value_explained_variance"] == 0
    assert value_metrics(-returns, returns)["value_explained_variance"] == pytest.approx(-3)
    assert "value_explained_variance" not in value_metrics(returns, np.ones(3, np.float32))


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"critic": {"discount": 0.97, "gae_lambda": 0.9}}, {"discount": 0.97, "gae_lambda": 0.9}),
    ({"critic": {"level": "turn", "gae_lambda": 0.5}}, {"by_turn": True, "gae_lambda": 0.5}),
    ({"critic": {"detach": False, "clip": 0.001}}, {"detach": False, "clip": 0.001}),
    ({"critic": {"kind": "model", "level": "turn"}}, {"own_model": True, "by_turn": True}),
    ({"normalize_advantage": "none"}, {"whiten": False}),
]


@pytest.mark.parametrize(("changes", "plain"), OPTIONS)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_is_what_a_plain_loop_does(
    tiny_model: Path, changes: dict[str, Any], plain: dict[str, Any], minibatches: int
) -> None:
    """Groups of four and of one, in micro-batches that the plain loop does not know."""

    async def use(learner: FsdpLearner) -> tuple[Weights, torch.Tensor, StepResult]:
        await step(learner, GROUPS[:2], GROUPS[2:])
        result = await step(learner, [GROUPS[3]], GROUPS[:3])
        return await weights_of(learner), value_head(learner), result

    critic = SETTINGS["critic"] | changes.get("critic", {})
    settings = SETTINGS | changes | {"critic": critic, "minibatches": minibatches, "micro_batch_tokens": 120}
    found, head, result = in_process(tiny_model, use, **settings)
    by_id = {group.group_id: group for group in GROUPS}
    tokens = {name: group.policy_tokens for name, group in by_id.items()}
    steps = [
        [[by_id[name] for name in part] for part in split_minibatches(tokens, minibatches, (0, version))]
        for version in range(2)
    ]
    weights, expected = plain_critic_loop(tiny_model, steps, **plain)
    assert_same_weights(found, weights)
    assert_same_weights({"head": head}, {"head": expected})
    assert float(head.abs().max()) > 5e-4
    assert result.metrics["value_grad_norm"] > 0
    assert result.metrics["groups_without_signal"] == 0
    assert (result.metrics["value_clip_fraction"] > 0) == (minibatches == 2 and critic.get("clip") == 0.001)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("critic", "gradient_sync"), [({"level": "turn", "detach": False}, "step"), ({"kind": "model"}, "row")]
)
def test_ranks_and_rows_do_not_change_the_step(
    tiny_model: Path, tmp_path: Path, critic: dict[str, Any], gradient_sync: str
) -> None:
    """Ranks without a row, an abandoned step and a supervised one included; the checkpoint is read by one rank."""
    settings = SETTINGS | {"critic": SETTINGS["critic"] | critic, "minibatches": 2}

    async def use(learner: FsdpLearner) -> tuple[Weights, dict[str, float]]:
        await learner.accumulate(GROUPS[3:])
        await learner.abandon_step()
        await learner.sft_step(GROUPS[0].trajectories[:1], counts=False)
        for group in GROUPS:
            await learner.accumulate([group])
        await learner.finish_step()
        result = await step(learner, GROUPS[2:])
        await (await learner.begin_save(tmp_path / f"{learner._config.ranks}"))
        return await weights_of(learner), result.metrics

    split: dict[str, Any] = {"ranks": 2, "gradient_sync": gradient_sync, "micro_batch_tokens": 90}
    found, metrics = with_learner(tiny_model, use, **split, **settings)
    expected, whole = in_process(tiny_model, use, **settings)
    assert_same_weights(found, expected)
    for name in ("value_loss", "value_explained_variance", "value_mean", "return_mean", "value_grad_norm"):
        assert metrics[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-4)

    async def head_of(learner: FsdpLearner) -> list[torch.Tensor]:
        heads = []
        for ranks in (1, 2):
            await learner.load(tmp_path / f"{ranks}")
            heads.append(value_head(learner))
        return heads

    one, two = in_process(tiny_model, head_of, **settings)
    assert_same_weights({"head": one}, {"head": two})


@pytest.mark.parametrize("changes", [{}, {"critic": {"kind": "model"}}, {"lora": {"rank": 2, "targets": ["q_proj"]}}])
def test_a_resumed_run_takes_the_very_same_next_step(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    async def state(learner: FsdpLearner) -> Weights:
        return await weights_of(learner) | {"head": value_head(learner)}

    async def write(learner: FsdpLearner) -> Weights:
        await step(learner, GROUPS[:2])
        await (await learner.begin_save(tmp_path / "state"))
        await step(learner, GROUPS[2:])
        return await state(learner)

    async def read(learner: FsdpLearner) -> Weights:
        await learner.load(tmp_path / "state")
        await step(learner, GROUPS[2:])
        return await state(learner)

    settings = {"advantage": "gae", **changes}
    expected = in_process(tiny_model, write, **settings)
    assert_equal_weights(in_process(tiny_model, read, **settings), expected)


def test_warmup_steps_train_the_critic_and_leave_the_policy_and_its_momentum_alone(tiny_model: Path) -> None:
    async def use(learner: FsdpLearner) -> tuple[list[Weights], list[torch.Tensor], int]:
        weights, heads = [await weights_of(learner)], [value_head(learner)]
        for _ in range(3):
            await step(learner, GROUPS[:2])
            weights.append(await weights_of(learner))
            heads.append(value_head(learner))
        rank: Any = learner._ranks[0]
        taken = rank._rank._optimizer.state[next(iter(rank._rank._policy.model.parameters()))]["step"]
        return weights, heads, int(taken)

    settings = SETTINGS | {"critic": {"warmup_steps": 2, "detach": False, "learning_rate": 1e-3}}
    weights, heads, taken = in_process(tiny_model, use, **settings)
    assert_equal_weights(weights[0], weights[2])
    assert any(not torch.equal(tensor, weights[3][name]) for name, tensor in weights[2].items())
    assert taken == 1, "the optimizer of the policy took its first step"
    for before, after in itertools.pairwise(heads):
        assert not torch.equal(before, after)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_supervised_steps_leave_the_critic_and_its_moments_alone(tiny_model: Path, kind: str) -> None:
    async def use(learner: FsdpLearner) -> set[float]:
        handle: Any = learner._ranks[0]
        rank = handle._rank
        before = deepcopy(rank._critic.state_dict()) if kind == "model" else {}
        await learner.sft_step(GROUPS[0].trajectories, counts=False)
        for name, tensor in before.items():
            assert torch.equal(tensor.full_tensor(), rank._critic.state_dict()[name].full_tensor()), name
        _, of_critic = trained_parts(rank._policy, rank._critic)
        return {float(rank._optimizer.state[parameter]["step"]) for parameter in of_critic}

    settings = SETTINGS | {"critic": {"kind": kind, "learning_rate": 1e-2}, "weight_decay": 0.5}
    assert in_process(tiny_model, use, **settings) == {0}


@pytest.mark.parametrize("kind", ["head", "model"])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_values_are_learned(tiny_model: Path, kind: str, level: str) -> None:
    """The reward is known from any token: episodes of large token ids earn 1, of small ones 0."""
    groups = []
    for seed in range(12):
        group = make_group(seed, replicas=2, turn=(2, 5), vocabulary=64, rewards=[float(seed % 2)] * 2)
        members = (replace(each, token_ids=each.token_ids + 62 * (seed % 2)) for each in group.trajectories)
        groups.append(replace(group, trajectories=tuple(members)))

    async def use(learner: FsdpLearner) -> list[dict[str, float]]:
        return [(await step(learner, groups)).metrics for _ in range(25)]

    rate = {"head": 1e-2, "model": 3e-3}[kind]
    settings: dict[str, Any] = {"critic": {"kind": kind, "level": level, "learning_rate": rate}, "learning_rate": 1e-9}
    metrics = in_process(tiny_model, use, async_ratio=1000, **(SETTINGS | settings))
    assert metrics[0]["value_explained_variance"] == 0, "all values are 0 at first"
    assert metrics[-1]["value_explained_variance"] > 0.5
    assert metrics[-1]["value_loss"] < 0.4 * metrics[0]["value_loss"]


def test_servers_and_exports_get_nothing_of_a_critic(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    async def use(learner: FsdpLearner) -> set[str]:
        await step(learner, GROUPS)
        await (await learner.begin_export(tmp_path / "hf"))
        return set(await weights_of(learner))

    stored = set(load_file(tiny_model / "model.safetensors"))
    for critic in ({}, {"kind": "model"}):
        assert in_process(tiny_model, use, advantage="gae", critic=critic) == stored
        assert set(load_file(tmp_path / "hf" / "model.safetensors")) == stored


def test_groups_with_equal_rewards_are_trained_too(tiny_model: Path) -> None:
    silent = make_group(5, rewards=[1.0] * 4)
    result = in_process(tiny_model, lambda learner: step(learner, [silent]), **SETTINGS)
    assert result.metrics["computed_policy_tokens"] == silent.policy_tokens
    assert result.metrics["return_mean"] == pytest.approx(1.0)


def test_shared_prefixes_share_their_values_and_each_turn_reads_its_first() -> None:
    sequences = [predicted(each, 0, by_turn=True) for each in GROUPS[0].trajectories]
    (row,) = pack(sequences, 4096)
    assert row.value_source is not None
    assert set(row.value_source) <= set(row.source)
    for number, member in enumerate(row.members):
        own = row.sequence_ids == number
        turns = GROUPS[0].trajectories[member].turns
        places = row.position_ids[row.value_source[own]]
        assert places.tolist() == [turn.start - 1 for turn in turns for _ in range(turn.end - turn.start)]


def test_a_model_without_a_known_head_needs_a_critic_of_its_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_flash.learner.model.exactness.find_logit_transform", lambda *_: None)
    with pytest.raises(ModelError, match=r"set learner\.critic\.kind=model"):
        in_process(tiny_model, lambda learner: step(learner, GROUPS), **SETTINGS)
    settings = SETTINGS | {"critic": {"kind": "model"}}
    assert in_process(tiny_model, lambda learner: step(learner, GROUPS), **settings).version == 1


def test_a_critic_of_a_mixture_of_experts_chooses_its_own_experts(tmp_path: Path) -> None:
    """The policy replays those of the server."""
    folder = write_model("qwen3_moe", tmp_path)
    group = GROUPS[0]
    for number, one in enumerate(group.trajectories):
        experts = np.zeros((len(one.token_ids), 2, 2), np.int16)
        experts[..., 1] = 1
        group = replace_trajectory(group, number, replace(one, routed_experts=experts))
    for kind in ("head", "model"):
        settings = SETTINGS | {"critic": {"kind": kind}}
        assert in_process(folder, lambda learner: step(learner, [group]), **settings).metrics["value_grad_norm"] > 0


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("learner.critic.kind=model", "critic is not read by advantage=grpo, only by gae"),
        ("learner.advantage=gae learner.normalize_advantage=group", "gae has no group"),
        ("learner.advantage=gae learner.critic.coefficient=1", "coefficient is not read with detach=true"),
        ("learner.advantage=gae learner.critic.kind=model learner.critic.detach=false", "not read with kind=model"),
        ("learner.advantage=gae learner.critic.gae_lambda=2", r"learner\.critic\.gae_lambda"),
        ("learner.advantage=gae learner.proximal_decay=0.9", "proximal_decay and advantage=gae"),
        ("scheduler.group_size=1", "advantage=grpo compares the replicas of a task"),
        ("learner.advantage=gae scheduler.drop_groups_without_signal=true", "drops groups of equal rewards"),
        ("learner.advantage=gae gamma=0.9", r"learner\.critic\.discount"),
    ],
)
def test_what_would_be_ignored_or_contradicts_itself_is_an_error(override: str, complaint: str) -> None:
    smallest = {"model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}
    with pytest.raises(ConfigError, match=complaint):
        load_config(smallest, override.split())
    assert load_config(smallest, ["learner.advantage=gae", "scheduler.group_size=1"]).scheduler.replicas == 1
