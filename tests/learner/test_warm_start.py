"""A warm start from what an earlier run played, or from conversations in a file."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from roll_flash.chat.rendered_conversation import Thinking
from roll_flash.config.sections.learner import WarmStartConfig
from roll_flash.config.tree import ModelConfig, load_config
from roll_flash.engines.learner import StepResult
from roll_flash.errors import ConfigError
from roll_flash.learner.demonstrations import check_demonstrations, open_demonstrations
from roll_flash.learner.losses.objective import Objective
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.warm_start import warm_start
from roll_flash.models.prepare import resolve_model
from roll_flash.models.tiny import CHAT_TEMPLATE
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.types import Trajectory
from roll_flash.watchdog.activity import Activities, watched
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


def load_demonstrations(
    settings: WarmStartConfig, folder: Path, max_length: int, thinking: Thinking = "keep"
) -> list[Trajectory]:
    model = ModelConfig(path=str(folder), max_length=max_length, thinking=thinking)
    check_demonstrations(settings, folder, model)
    found = open_demonstrations(settings, folder, model)
    return [sample for index in range(len(found)) for sample in found[index]]


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


def test_turns_of_a_base_model_end_as_its_template_says(tiny: Path, tmp_path: Path) -> None:
    """Its tokenizer's end is that of a document, and no turn ends with it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_end|>"]})
    tokenizer.save_pretrained(tmp_path / "base")
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": TALK}))
    (found,) = load_demonstrations(config(file), tmp_path / "base", 200)
    imitated = tokenizer.decode(found.token_ids[found.policy_mask], skip_special_tokens=False)
    assert imitated.replace(" ", "") == "aaa<|im_end|>bbbb<|im_end|>"


def test_of_a_prompt_with_examples_only_the_answer_is_imitated(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "shots.jsonl"
    file.write_text(json.dumps({"prompt": TALK[:-1], "answer": TALK[-1]["content"]}))
    (found,) = load_demonstrations(config(file), tiny, 200)
    ((whole, imitated),) = decoded(tiny, [found])
    assert imitated.replace(" ", "") == "bbbb<|im_end|>"
    assert whole == AutoTokenizer.from_pretrained(tiny).apply_chat_template(TALK, tokenize=False).rstrip("\n")


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ('{"messages": ', "line 1"),
        ('{"talk": []}', "line 1: no column 'messages', nor 'prompt' and 'answer'; it has 'talk'"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n5', "line 2: a row"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: an assistant message must come after"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: an assistant message must come after"),
        ("", "there is no row in it"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(tiny: Path, tmp_path: Path, lines: str, complaint: str) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=complaint):
        load_demonstrations(config(file), tiny, 200)


@pytest.mark.parametrize(
    ("of_a_run", "options", "says"),
    [
        (False, {"min_reward": 1.0}, "warm_start.min_reward is for episodes of a run; .* has rows"),
        (True, {"columns": {"prompt": "question"}}, "warm_start.columns is for rows, and .* has episodes of a run"),
        (True, {"split": "test"}, "warm_start.split is for rows"),
    ],
)
def test_a_key_that_the_demonstrations_do_not_have_is_refused(
    tiny: Path, tmp_path: Path, of_a_run: bool, options: dict[str, Any], says: str
) -> None:
    """The failed conversations of an evaluation's file were imitated with the others."""
    file = tmp_path / "episodes.jsonl"
    file.write_text(json.dumps({"messages": TALK, "reward": 0.0}))
    source = write_run(tmp_path / "run", tiny, {"good": 1.0}) if of_a_run else file
    with pytest.raises(ConfigError, match=says):
        load_demonstrations(config(source, **options), tiny, 200)


def decoded(tiny: Path, samples: list[Trajectory]) -> list[tuple[str, str]]:
    """Return all tokens of each sample and those that are imitated, as text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    return [(tokenizer.decode(one.token_ids), tokenizer.decode(one.token_ids[one.policy_mask])) for one in samples]


def model_with(tmp_path: Path, tiny: Path, template: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_rows_of_a_csv_with_names_of_their_own_are_imitated(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "sums.csv"
    file.write_text("question,solution\n1+1?,2\n2+2?,4\n")
    columns = {"prompt": "question", "answer": "solution"}
    found = load_demonstrations(config(file, columns=columns), tiny, 100)
    assert [said for _, said in decoded(tiny, found)] == ["2<|im_end|>", "4<|im_end|>"]


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TOOL_TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '\n<call>' + call['function']['name'] + ' ' + (call['function']['arguments'] | tojson) + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_tool_calls_are_imitated_in_the_form_that_the_model_writes(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": TOOL_TALK, "tools": [TOOL]}) + "\n")
    folder = model_with(tmp_path, tiny, TOOL_TEMPLATE)
    ((whole, said),) = decoded(folder, load_demonstrations(config(file), folder, 500))
    assert said == '<call>add {"a": 1}</call><|im_end|>It is 2.<|im_end|>'
    assert '"name": "add"' in whole.partition("<|im_start|>user")[0]
    ((whole, said),) = decoded(tiny, load_demonstrations(config(file), tiny, 1000))
    assert said.startswith('<tool_call>\n{"name": "add"'), "a template without tools: as an episode would have it"
    assert "add" in whole.partition("<|im_start|>user")[0]


@pytest.mark.parametrize(
    ("answer", "imitated"),
    [
        ("<think>\nhm\n</think>\n\n4", "hm\n</think>\n\n4<|im_end|>"),
        ("hm\n</think>\n\n4", "hm\n</think>\n\n4<|im_end|>"),
        ("4", "\n</think>\n\n4<|im_end|>"),
    ],
)
def test_a_thought_that_the_header_opens_is_opened_once(tiny: Path, tmp_path: Path, answer: str, imitated: str) -> None:
    template = CHAT_TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    folder = model_with(tmp_path, tiny, template)
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"prompt": "2+2?", "answer": answer}) + "\n")
    ((whole, said),) = decoded(folder, load_demonstrations(config(file), folder, 500))
    assert said == imitated
    assert whole.count("<think>") == 1


def test_with_strip_each_turn_is_imitated_without_earlier_thinking(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    thoughtful = [
        message | ({"reasoning_content": f"hm {n}"} if message["role"] == "assistant" else {})
        for n, message in enumerate(TALK)
    ]
    file.write_text(json.dumps({"messages": thoughtful}) + "\n")
    first, second = decoded(tiny, load_demonstrations(config(file), tiny, 500, "strip"))
    assert first[1] == "<think>\nhm 2\n</think>\n\naaa<|im_end|>"
    assert second[1] == "<think>\nhm 4\n</think>\n\nbbbb<|im_end|>"
    assert "hm 2" not in second[0]
    assert "aaa<|im_end|>" in second[0]


def test_a_million_rows_are_not_kept_in_memory(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x" * 1000, "answer": str(n)}) + "\n" for n in range(20_000)))
    model = ModelConfig(path=str(tiny), max_length=1100)
    tracemalloc.start()
    found = open_demonstrations(config(file), tiny, model)
    for index in range(0, len(found), 1000):
        assert found[index]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < file.stat().st_size / 4


def test_a_misspelt_column_of_demonstrations_is_one_line_on_either_side(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="columns: there is no 'tolls'; did you mean 'tools'"):
        config(tmp_path, columns={"tolls": "functions"})
    file = tmp_path / "talks.jsonl"
    file.write_text(talk(3))
    with pytest.raises(
        ConfigError, match=r"line 1: no column 'functoins', which columns\.tools names; it has 'messages'"
    ):
        load_demonstrations(config(file, columns={"tools": "functoins"}), tiny, 200)


def talk(count: int) -> str:
    messages = [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a" * count}]
    return json.dumps({"messages": messages}) + "\n"


def test_rows_that_are_too_long_are_counted_when_the_run_starts_and_when_they_are_left_out(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(talk(3) * 20 + talk(300) * 2)
    assert len(load_demonstrations(config(file), tiny, 200)) == 20
    assert "2 of 22 rows have more than model.max_length=200 tokens and are not imitated" in capsys.readouterr().err

    async def use(learner: FsdpLearner) -> dict[str, float]:
        settings, model = config(file, steps=2, batch_size=20), ModelConfig(path="tiny", max_length=200)
        return await warm_start(learner, settings, model_folder=tiny, model=model, seed=0, report=lambda line: None)

    figures = in_process(tiny, use)
    assert figures["warm_start/demonstrations"] == 22
    assert 2 <= figures["warm_start/too_long"] <= 4


def test_a_late_row_that_no_template_can_show_is_one_line_when_the_run_starts(tiny: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.content == 'b' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    folder = model_with(tmp_path, tiny, template + CHAT_TEMPLATE)
    file = tmp_path / "talks.jsonl"
    file.write_text(talk(3) * 20 + talk(3).replace("say a", "b"))
    with pytest.raises(ConfigError, match=r"talks\.jsonl, line 21"):
        load_demonstrations(config(file), folder, 200)


def test_what_cannot_be_imitated_is_refused_with_a_reason(tiny: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tiny, {"good": 1.0})
    with pytest.raises(ConfigError, match=r"warm_start\.demonstrations: data .*nowhere\.jsonl: no such file"):
        load_demonstrations(config(tmp_path / "nowhere.jsonl"), tiny, 100)
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
    model = ModelConfig(path="tiny", max_length=100)
    said: list[str] = []

    async def use(learner: FsdpLearner) -> dict[str, float]:
        activities, real = Activities(), learner.sft_step

        async def seen(*given: Any, **options: Any) -> StepResult:
            assert activities.is_doing("the warm start")
            return await real(*given, **options)

        learner.sft_step = seen  # type: ignore[method-assign]
        with watched(activities):
            figures = await warm_start(learner, settings, model_folder=tiny, model=model, seed=0, report=said.append)
        assert not activities.is_doing("the warm start")
        assert learner.version == 0
        return figures

    figures = in_process(tiny, use)
    assert figures["warm_start/last_loss"] < 0.3 * figures["warm_start/first_loss"]
    assert figures["warm_start/demonstrations"] == 2
    assert said[-1].startswith("warm start: step 12 of 12")


def test_a_warm_start_computes_on_all_cores_and_later_steps_on_their_threads(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers and environments rest meanwhile: with one thread it took twice as long on two cores."""
    demonstrations = [played(AutoTokenizer.from_pretrained(tiny), "good", 1.0, "episode")]
    threads, real = list[int](), Objective.add_gradient

    def seen(*given: Any) -> Any:
        threads.append(torch.get_num_threads())
        return real(*given)

    async def use(learner: FsdpLearner) -> None:
        await learner.sft_step(demonstrations, counts=False)
        await learner.sft_step(demonstrations)

    monkeypatch.setattr(Objective, "add_gradient", seen)
    monkeypatch.setattr("roll_flash.learner.ranks.device.usable_cores", lambda: 3)
    in_process(tiny, use)
    assert threads == [3, 1]


def test_the_config_has_a_section_for_it() -> None:
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}], "warm_start": {"demonstrations": "runs/earlier"}}
    loaded = load_config(tree, ["warm_start.steps=3"]).warm_start
    assert loaded is not None
    assert (loaded.demonstrations, loaded.steps) == ("runs/earlier", 3)
    with pytest.raises(ConfigError, match=r"did you mean 'warm_start\.batch_size'"):
        load_config(tree, ["warm_start.batchsize=3"])
