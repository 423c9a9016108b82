from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from roll_flash.learner.losses.policy import policy_loss
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.packing import tree_attention
from roll_flash.learner.packing.rows import (
    PackedRow,
    TrainSequence,
    attention_mask,
    common_prefix_length,
    pack,
)
from tests.learner.samples import make_group, prepare_group, sequences_of


def _sequence(tokens: list[int], first_policy: int = 1) -> TrainSequence:
    length = len(tokens)
    mask = np.arange(length) >= first_policy
    logprobs = np.linspace(-1, -2, length, dtype=np.float32)
    return TrainSequence(
        np.asarray(tokens, np.int32), mask, logprobs, np.zeros(length, np.int32), np.ones(length, np.float32)
    )


def _path(row: PackedRow, node: int) -> list[int]:
    """The tokens that a node attends to, in the order of their positions."""
    ancestors = np.flatnonzero(attention_mask(row.subtree_end)[node])
    assert row.position_ids[ancestors].tolist() == list(range(len(ancestors)))
    return row.token_ids[ancestors].tolist()


sequences = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12)


@given(sequences, st.integers(2, 40))
def test_every_policy_token_is_predicted_from_exactly_the_tokens_before_it(data: list[list[int]], limit: int) -> None:
    rows = pack([_sequence(tokens) for tokens in data], limit)
    seen = []
    for row in rows:
        paths: dict[int, list[tuple[int, int]]] = {}
        for source, target, sequence in zip(row.source, row.target, row.sequence_ids, strict=True):
            paths.setdefault(int(sequence), []).append((int(source), int(target)))
        for predictions in paths.values():
            last_source, last_target = predictions[-1]
            whole = [*_path(row, last_source), last_target]
            assert [_path(row, s) for s, _ in predictions] == [whole[: i + 1] for i in range(len(predictions))]
            assert [t for _, t in predictions] == whole[1:]
            seen.append(whole)
    assert sorted(seen) == sorted(data)
    assert all(row.num_tokens <= limit or len(set(row.sequence_ids)) == 1 for row in rows)
    assert sum(row.padded_tokens for row in rows) == sum(map(len, data))


@given(sequences)
def test_one_row_computes_every_distinct_prefix_once(data: list[list[int]]) -> None:
    (row,) = pack([_sequence(tokens) for tokens in data], 1000)
    prefixes = {tuple(tokens[: end + 1]) for tokens in data for end in range(len(tokens))}
    assert row.num_tokens == len(prefixes)


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=6))
def test_common_prefix_length_is_where_sequences_first_differ(first: list[int], second: list[int]) -> None:
    length = common_prefix_length(np.asarray(first, np.int32), np.asarray(second, np.int32))
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


def test_tokens_after_an_update_within_their_turn_are_found_in_any_tree() -> None:
    """Two replicas share a prompt; each has two turns. An update marks what follows in its turn, not the next turn."""
    mask = [False, True, True, True, False, True, True]
    replicas = []
    for tokens, versions in (
        ([1, 2, 3, 4, 5, 6, 7], [-1, 0, 1, 1, -1, 1, 1]),
        ([1, 2, 8, 4, 5, 6, 7], [-1, 0, 0, 0, -1, 0, 1]),
    ):
        plain = _sequence(tokens)
        replicas.append(replace(plain, policy_mask=np.array(mask), versions=np.array(versions, np.int32)))
    for limit in (7, 100):  # in a row each, in one tree
        found = {}
        for row in pack(replicas, limit):
            for number, member in enumerate(row.members):
                found[member] = row.after_updates()[row.sequence_ids == number].tolist()
        assert found == {0: [False, True, True, False, False], 1: [False, False, False, False, True]}


@pytest.mark.parametrize("limit", [30, 90, 1000])
def test_turns_are_the_unbroken_runs_of_each_sequence_in_any_tree(limit: int) -> None:
    prepared = [prepare_group(make_group(seed), 0, AdvantageConfig()) for seed in range(2)]
    data = [sequence for group in prepared for sequence in sequences_of(group)]
    first = data[0].policy_mask.copy()
    first[np.flatnonzero(first)[1]] = False  # a token without a log-probability within a turn
    data[0] = replace(data[0], policy_mask=first)
    for row in pack(data, limit):
        turns, seen = row.turn_ids(), set()
        for number, member in enumerate(row.members):
            mask = data[member].policy_mask
            runs = (np.cumsum(np.diff(mask.astype(np.int8), prepend=0) == 1) - 1)[mask]
            found = turns[row.sequence_ids == number]
            np.testing.assert_array_equal(found - found[0], runs)
            assert seen.isdisjoint(found.tolist())
            seen.update(found.tolist())
        assert seen == set(range(len(seen)))


def _padded_loop(model: torch.nn.Module, data: list[TrainSequence]) -> torch.Tensor:
    """The reference: one plain transformers forward per sequence, full logits."""
    total = torch.zeros(())
    for sequence in data:
        tokens = torch.tensor(sequence.token_ids, dtype=torch.int64)
        logits = model(tokens[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        output = policy_loss(
            "decoupled_ppo",
            logprobs=logprobs[None],
            prox_logprobs=logprobs.detach()[None],
            behavior_logprobs=torch.tensor(sequence.behavior_logprobs[1:])[None],
            advantages=torch.tensor(sequence.advantages[1:])[None],
            mask=torch.tensor(sequence.policy_mask[1:])[None],
            normalizer=1.0,
        )
        total = total + output.loss
    return total


def _packed_loss(policy: PolicyModel, row: PackedRow) -> torch.Tensor:
    logprobs, _ = policy(row)
    return policy_loss(
        "decoupled_ppo",
        logprobs=logprobs,
        prox_logprobs=logprobs.detach(),
        behavior_logprobs=torch.tensor(row.behavior_logprobs),
        advantages=torch.tensor(row.advantages),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        sequence_ids=torch.tensor(row.sequence_ids),
        normalizer=1.0,
    ).loss


@pytest.mark.parametrize("max_tokens", [60, 150, 10_000])
def test_packing_gives_the_loss_and_gradients_of_a_loop_over_padded_sequences(
    tiny_model: Path, max_tokens: int
) -> None:
    data = []
    for seed, prompt, turn in ((0, 12, (3, 8)), (1, 40, (2, 70)), (2, 3, (1, 5))):
        data += sequences_of(
            prepare_group(make_group(seed, prompt=prompt, turn=turn, replicas=5), 0, AdvantageConfig())
        )
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = _padded_loop(reference, data)
    expected.backward()
    policy = load_policy_model(tiny_model)
    rows = pack(data, max_tokens)
    losses = []
    for row in rows:
        loss = _packed_loss(policy, row)
        loss.backward()
        losses.append(loss.item())
    assert sum(losses) == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    for (name, found), wanted in zip(policy.model.named_parameters(), reference.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        error = (found.grad - wanted.grad).norm() / wanted.grad.norm()
        assert error < 1e-5, f"{name}: relative gradient error {error}"


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(2, 4), min_size=2, max_size=150), min_size=1, max_size=6))
def test_log_probabilities_of_any_tree_are_those_of_each_sequence_alone(
    tiny_model: Path, data: list[list[int]]
) -> None:
    policy = load_policy_model(tiny_model)
    (row,) = pack([_sequence(tokens) for tokens in data], 10_000)
    with torch.no_grad():
        logprobs, entropies = policy(row)
        for index, tokens in enumerate(sorted(data)):
            (alone,) = pack([_sequence(tokens)], 10_000)
            expected, expected_entropies = policy(alone)
            chosen = torch.tensor(row.sequence_ids == index)
            torch.testing.assert_close(logprobs[chosen], expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(entropies[chosen], expected_entropies, atol=1e-4, rtol=1e-4)


def test_a_mask_of_the_models_own_is_never_ignored() -> None:
    """It holds what no short text shows: which few keys a token may choose, say."""
    made, tree = torch.zeros(1, 1, 3, 4), tree_attention.tree_layout(np.arange(3), np.full(3, 3), torch.device("cpu"))
    own = torch.zeros(1, 1, 3, 3)
    with pytest.raises(NotImplementedError, match="a mask of the model's own"):
        tree_attention.tree_attention(torch.nn.Module(), made, made, made, own, tree=tree)


@pytest.mark.parametrize("option", ["indices", "block_indices"])
def test_a_choice_of_keys_is_never_ignored(option: str) -> None:
    """Given as numbers instead of a mask, as to kernels: a text shorter than the choice shows nothing of it."""
    made, tree = torch.zeros(1, 1, 3, 4), tree_attention.tree_layout(np.arange(3), np.full(3, 3), torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=option):
        tree_attention.tree_attention(
            torch.nn.Module(), made, made, made, None, tree=tree, **{option: torch.zeros(1, 1, 3, 2)}
        )
