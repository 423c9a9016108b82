"""A warm start from what an earlier run played, or from conversations in a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from roll_flash.config.learner import WarmStartConfig
from roll_flash.config.tree import load_config
from roll_flash.errors import ConfigError
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.warm_start import load_demonstrations, warm_start
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.types import Trajectory
from tests.learner.in_process import in_process
from tests.learner.samples import make_trajectory

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "say a"},
    {"role": "assistant", "content": "aaa"},
    {"role": "user", "content": "say b"},
    {"role": "assistant", "content": "bbbb"},
]


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_model("tiny")


def played(tokenizer: Any, answer: str, reward: float, name: str) -> Trajectory:
    prompt = tokenizer("<|im_start|>user\nsay<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    sampled = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    mask = [False] * len(prompt) + [True] * len(sampled)
    trajectory = make_trajectory(prompt + sampled, mask, reward=reward, name=name)
    return dataclasses.replace(trajectory, turns=(dataclasses.replace(trajectory.turns[0], action=answer),))


def write_run(folder: Path, tiny: Path, rewards: dict[str, float]) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    with EpisodesWriter(folder / "episodes") as writer:
        (folder / "episodes").mkdir(parents=True)
        for step, (answer, reward) in enumerate(rewards.items()):
            writer.write(step, played(tokenizer, answer, reward, f"episode-{answer}"))
    return folder


def config(source: Path, **settings: Any) -> WarmStartConfig:
    return WarmStartConfig(demonstrations=str(source), **settings)


def test_the_best_episodes_of_a_run_are_taken_with_the_tokens_that_were_sampled(tiny: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny, {"bad": 0.0, "good": 1.0, "fair": 0.5})
    found = load_demonstrations(config(run, best=2), tiny, 100)
    assert [trajectory.episode_id for trajectory in found] == ["episode-good", "episode-fair"]
    assert len(load_demonstrations(config(run / "episodes", min_reward=0.9), tiny, 100)) == 1
    expected = played(AutoTokenizer.from_pretrained(tiny), "good", 1.0, "x")
    np.testing.assert_array_equal(found[0].token_ids, expected.token_ids)
    np.testing.assert_array_equal(found[0].policy_mask, expected.policy_mask)


def test_episodes_that_are_too_long_take_no_place_of_the_best(tiny: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny, {"long " * 40: 1.0, "good": 0.9, "fair": 0.5})
    found = load_demonstrations(config(run, best=2), tiny, 100)
    assert [trajectory.episode_id for trajectory in found] == ["episode-good", "episode-fair"]


def test_of_conversations_the_assistants_turns_and_their_ends_are_imitated(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n\n")
    (found,) = load_demonstrations(config(file), tiny, 200)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    imitated = tokenizer.decode(found.token_ids[found.policy_mask], skip_special_tokens=False)
    assert imitated.replace(" ", "") == "aaa<|im_end|>bbbb<|im_end|>"
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False).rstrip("\n")
    assert tokenizer.decode(found.token_ids, skip_special_tokens=False) == rendered


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ('{"messages": ', "line 1"),
        ('{"talk": []}', "line 1: 'messages'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: an assistant message must come after"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: an assistant message must come after"),
        ("", "nothing to imitate"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(tiny: Path, tmp_path: Path, lines: str, complaint: str) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=complaint):
        load_demonstrations(config(file), tiny, 200)


def test_what_cannot_be_imitated_is_refused_with_a_reason(tiny: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny, {"good": 1.0})
    with pytest.raises(ConfigError, match="neither a folder nor a file"):
        load_demonstrations(config(tmp_path / "nowhere"), tiny, 100)
    with pytest.raises(ConfigError, match="reward of at least 2"):
        load_demonstrations(config(run, min_reward=2.0), tiny, 100)
    with pytest.raises(ConfigError, match="within 3 tokens"):
        load_demonstrations(config(run), tiny, 3)
    path = next((run / "episodes").glob("*.jsonl"))
    path.write_text(
        path.read_text().replace('"action": "good"', '"action": "gone"').replace('"action":"good"', '"action":"gone"')
    )
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_demonstrations(config(run), tiny, 100)


def test_a_warm_start_learns_and_leaves_the_version_at_zero(tiny: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny, {"good": 1.0, "fair": 0.5})
    settings = config(run, steps=12, batch_size=3, learning_rate=3e-3)
    said: list[str] = []

    async def use(learner: FsdpLearner) -> dict[str, float]:
        figures = await warm_start(learner, settings, model_folder=tiny, max_length=100, seed=0, report=said.append)
        assert learner.version == 0
        return figures

    figures = in_process(tiny, use)
    assert figures["warm_start/last_loss"] < 0.3 * figures["warm_start/first_loss"]
    assert figures["warm_start/demonstrations"] == 2
    assert said[-1].startswith("warm start: step 12 of 12")


def test_the_config_has_a_section_for_it() -> None:
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}], "warm_start": {"demonstrations": "runs/earlier"}}
    loaded = load_config(tree, ["warm_start.steps=3"]).warm_start
    assert loaded is not None
    assert (loaded.demonstrations, loaded.steps) == ("runs/earlier", 3)
    with pytest.raises(ConfigError, match=r"did you mean 'warm_start\.batch_size'"):
        load_config(tree, ["warm_start.batchsize=3"])
