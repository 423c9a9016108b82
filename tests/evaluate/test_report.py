"""The page of an evaluation: all of it inside, and no word of a model ever becomes markup or runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from scripted_runner import ScriptedRunner, trajectory_of

from roll_flash.cli.main import main
from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import EnvConfig
from roll_flash.errors import ConfigError
from roll_flash.evaluation.comparison import compare_folders, estimate_difference
from roll_flash.evaluation.evaluation import evaluate
from roll_flash.evaluation.pages import transcript as page_transcript
from roll_flash.evaluation.pages.comparison import write_comparison
from roll_flash.evaluation.pages.transcript import _assistant_parts, episode_for_page
from roll_flash.evaluation.result import EvalResult
from roll_flash.monitor.episodes import episode_record
from roll_flash.monitor.json_lines import JsonLinesFile, read_lines
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams, Trajectory

ATTACKS = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]> \u2028 \u2029 &lt;b&gt; \" ' `",
    '<think>2 + 2</think>\n<tool_call>{"name": "add"}</tool_call>',
)
TOOLS = {"add": {"calls": 3, "errors": 1, "timeouts": 1, "seconds": 0.5}, "<b>x</b>": {"calls": 1}, "odd": "no counts"}


class Talkative(ScriptedRunner):
    """Its model, environment and failures say the most unpleasant things."""

    def _outcome(self, spec: EpisodeSpec) -> Trajectory | EpisodeFailure:
        outcome = self.script(spec)
        if isinstance(outcome, str):
            return EpisodeFailure(spec.episode_id, spec.group_id, spec.task, outcome, ATTACKS[0], 0, spec.attempt)
        said = [{"role": "system", "content": "rules"}, {"role": "user", "content": ATTACKS[0]}]
        for attack in ATTACKS:
            said += [{"role": "assistant", "content": attack}, {"role": "user", "content": attack}]
        return trajectory_of(spec, outcome, messages=tuple(said), info={"tools": TOOLS, "rewards": {ATTACKS[1]: 1}})


def run(folder: Path, script: Any, *, label: str = "test", attempts: int = 2, **changes: Any) -> EvalResult:
    plan = EvalConfig(tasks=4, attempts=attempts, seeds_from=changes.pop("seeds_from", 1000))
    env = changes.get("env") or EnvConfig(id="Maze-v0", kwargs=changes.pop("kwargs", {}))
    about = {"model": ATTACKS[1]}
    runner = Talkative(script)
    return asyncio.run(
        evaluate(
            runner,
            env=env,
            eval=plan,
            sampling=changes.get("sampling", SamplingParams()),
            max_concurrent=3,
            folder=folder,
            label=label,
            about=about,
        )
    )


class Elements(HTMLParser):
    """What a browser would make of a page: its elements, the content of scripts, and everything with an address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data


def assert_harmless(text: str) -> dict[str, Any]:
    """The page has our two scripts, no address, no handler; returns the data of its conversations."""
    elements = Elements(text)
    assert elements.tags.count("script") == 2
    assert not {"img", "iframe", "link", "base", "object", "embed", "form"} & set(elements.tags)
    assert (elements.addresses, elements.handlers) == ([], [])
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    data: dict[str, Any] = json.loads(elements.scripts[0])
    return data


def text_of(message: dict[str, Any]) -> str:
    return "".join(part["text"] for part in message["parts"])


def test_no_word_of_a_model_becomes_markup_and_none_is_lost(tmp_path: Path) -> None:
    run(tmp_path, lambda spec: "env_error" if spec.task.seed == 1003 else spec.replica == 1)
    data = assert_harmless((tmp_path / "report.html").read_text())
    assert len(data["episodes"]) == 8
    said = [message for message in data["episodes"][0]["messages"] if message["role"] == "assistant"]
    assert "document.title='owned'" in text_of(said[0])
    assert text_of(said[1]) == ATTACKS[1]
    assert text_of(data["episodes"][0]["messages"][1]) == ATTACKS[0]


def test_a_transcript_has_the_rewards_one_by_one_and_no_name_of_one_is_markup(tmp_path: Path) -> None:
    run(tmp_path, lambda spec: True, attempts=1)
    text = (tmp_path / "transcripts" / "seed_1001_attempt_0.md").read_text()
    assert f"Rewards one by one:\n\n```\n{json.dumps({ATTACKS[1]: 1})}\n```\n" in text


def test_the_page_has_scores_intervals_tools_and_every_task(tmp_path: Path) -> None:
    result = run(tmp_path, lambda spec: spec.replica == 1)
    page = (tmp_path / "report.html").read_text()
    assert str(result.success) in page
    for words in ("pass@2", "&lt;b&gt;x&lt;/b&gt;", "Maze-v0:1003", 'class="attempt bad"', 'class="attempt good"'):
        assert words in page
    assert result.tools["add"].calls == 8 * 3
    assert result.tools["add"].seconds_per_call == pytest.approx(0.5 / 3)
    assert "odd" not in result.tools
    assert result.to_dict()["tools"]["add"]["timeouts"] == 8
    assert result.to_dict()["timeouts"] == {"tools": 8}


def test_calls_thinking_and_observations_are_folded_and_answers_are_not() -> None:
    parts = list(_assistant_parts("Well. <think>hm\nhm</think><sh>ls</sh>then <answer>42</answer> <b>unclosed"))
    assert [(part["kind"], part.get("title", ""), part["text"]) for part in parts] == [
        ("text", "", "Well."),
        ("folded", "thinking", "hm\nhm"),
        ("folded", "sh", "ls"),
        ("text", "", "then <answer>42</answer> <b>unclosed"),
    ]
    spec = EpisodeSpec("a:1:0", "a:1", 0, trajectory_task(), SamplingParams(), 3)
    said = (
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
    )
    messages = episode_for_page(episode_record(trajectory_of(spec, True, messages=said)))["messages"]
    assert [message["parts"][0]["kind"] for message in messages] == ["text", "text", "folded"]
    messages = episode_for_page(episode_record(trajectory_of(spec, True, messages=said[:2] + said)))["messages"]
    assert [bool(message["about"]) for message in messages] == [False, False, False, True, False], "first an example"


def trajectory_task() -> Any:
    from roll_flash.types import Task

    return Task("Maze-v0:1", "Maze-v0", 1)


def test_text_made_to_be_slow_is_not() -> None:
    began = time.monotonic()
    for text in ("<a>" * 7000, "<a1>" + "<" * 20_000, "".join(f"<t{number}>" for number in range(3000))):
        list(_assistant_parts(text))
    assert time.monotonic() - began < 20


def test_a_page_has_a_size_limit_and_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transcript, "MAX_PAGE_CHARACTERS", 1000)
    run(tmp_path, lambda spec: True)
    page = (tmp_path / "report.html").read_text()
    left_out = re.search(r"(\d+) conversations are left out", page)
    assert left_out is not None
    assert len(assert_harmless(page)["episodes"]) == 8 - int(left_out[1])
    long = page_transcript._shortened("x" * 50_000)
    assert len(long) < 21_000
    assert "30000 of 50000 characters left out" in long


def by_seed(*solved: int) -> Any:
    return lambda spec: spec.task.seed in solved


def test_two_evaluations_are_compared_task_by_task(tmp_path: Path) -> None:
    run(tmp_path / "a", by_seed(1000, 1001))
    run(tmp_path / "b", by_seed(1000, 1002, 1003))
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    assert (found.value_a, found.value_b, found.difference.value) == (0.5, 0.75, 0.25)
    assert [pair.task_id for pair in found.gained] == ["Maze-v0:1002", "Maze-v0:1003"]
    assert [pair.task_id for pair in found.lost] == ["Maze-v0:1001"]
    assert found.verdict == "no difference can be told"
    assert found.difference.low < 0 < found.difference.high
    assert found.to_dict()["common_tasks"] == 4
    page = write_comparison(found)
    assert page == tmp_path / "b" / "eval-diff.html"
    data = assert_harmless(page.read_text())
    assert len(data["episodes"]) == 16
    assert data["episodes"][0]["title"].startswith("A: ")


def test_pairing_sees_a_difference_that_two_intervals_would_not() -> None:
    """50 tasks, each 0.1 better, whose own values spread over [0, 1]: the differences have no spread at all."""
    estimate = estimate_difference([0.1] * 200)
    assert estimate.value == pytest.approx(0.1)
    assert estimate.low > 0
    few = estimate_difference([1.0, 1.0])
    assert few.low <= 0  # two tasks are no proof
    rounded = estimate_difference([1 - 2 / 3, 2 / 3 - 1 / 3, 1 / 3])
    assert rounded.low <= 0  # nor are three that each gained a third


def test_tasks_in_common_only_and_different_attempts_are_said(tmp_path: Path) -> None:
    run(tmp_path / "a", by_seed(1000), attempts=1)
    run(tmp_path / "b", by_seed(1002), seeds_from=1002, attempts=2)
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    assert len(found.pairs) == 2
    assert "A has up to 1 attempts at each task and B 2" in found.notes[0]
    assert "2 tasks of A have no counterpart" in found.table()


def test_tasks_of_the_same_name_in_a_different_environment_are_pointed_out(tmp_path: Path) -> None:
    run(tmp_path / "a", by_seed(1000), kwargs={"size": 3, "walls": 1})
    run(tmp_path / "b", by_seed(1000), kwargs={"size": 4, "walls": 1})
    (note,) = compare_folders(tmp_path / "a", tmp_path / "b").notes
    assert "A was made with size=3 and B with size=4" in note
    assert compare_folders(tmp_path / "a", tmp_path / "a").notes == ()


def test_settings_that_make_a_difference_of_their_own_are_pointed_out(tmp_path: Path) -> None:
    """Another reward, temperature or limit was compared without a word."""
    run(tmp_path / "a", by_seed(1000))
    sampling = SamplingParams(temperature=0.5, max_new_tokens=8, seed=3)
    run(tmp_path / "b", by_seed(1001), sampling=sampling, env=EnvConfig(id="Maze-v0", max_turns=2))
    notes = compare_folders(tmp_path / "a", tmp_path / "b").notes
    assert [note.partition(":")[0] for note in notes] == [
        "A was made with max_turns 8 and B with 2",
        "A was made with sampling.max_new_tokens 64 and B with 8",
        "A was made with sampling.temperature 1.0 and B with 0.5",
    ]


def test_rows_and_rewards_that_differ_are_pointed_out(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    for name, answer, reward in (("a", "2", "exact"), ("b", "3", "number")):
        rows = tmp_path / name / "test.jsonl"
        rows.parent.mkdir()
        rows.write_text(json.dumps({"prompt": "1 + 1?", "answer": answer}) + '\n{"prompt": "Else?", "answer": "4"}\n')
        data = {"path": str(train), "held_out": str(rows)}
        env = EnvConfig.model_validate({"id": "Dataset-v0", "data": data, "reward": reward})
        run(tmp_path / name, lambda spec: True, env=env)
    notes = compare_folders(tmp_path / "a", tmp_path / "b").notes
    assert notes[0].startswith("A was made with reward [{'function': 'exact'")
    assert notes[-1].startswith("1 tasks have other arguments (answer) in A and B, such as train/held_out/0:")


def test_further_environments_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for folder in ("", "env_1", "env_2", "env_10"):
            run(tmp_path / name / folder, by_seed(1000))
    (note,) = compare_folders(tmp_path / "a", tmp_path / "b").notes
    places = f"eval-diff {tmp_path}/a/env_1 {tmp_path}/b/env_1, and so on to env_10"
    assert note == f"these are the first environments only; for the others: {places}"


def test_what_cannot_be_compared_is_one_clear_error(tmp_path: Path) -> None:
    run(tmp_path / "a", by_seed())
    run(tmp_path / "other", by_seed(), seeds_from=5000)
    run(tmp_path / "failed", lambda spec: "env_error")
    with pytest.raises(ConfigError, match="have no scored tasks in common"):
        compare_folders(tmp_path / "a", tmp_path / "other")
    with pytest.raises(ConfigError, match="none of its attempts was scored"):
        compare_folders(tmp_path / "a", tmp_path / "failed")
    with pytest.raises(ConfigError, match="no evaluation there"):
        compare_folders(tmp_path / "a", tmp_path / "nothing")
    found = compare_folders(tmp_path / "a", tmp_path / "a")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_comparison(found, tmp_path / "no" / "folder.html")


def test_a_comparison_can_be_read_by_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", by_seed(1000))
    run(tmp_path / "b", by_seed(1001))
    page = tmp_path / "page.html"
    arguments = ["eval-diff", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(page), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gained"], found["lost"]) == (["Maze-v0:1001"], ["Maze-v0:1000"])
    assert found["page"] == str(page)
    assert page.is_file()
    assert main(["eval-diff", str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2
    assert "no evaluation there" in capsys.readouterr().err


def test_a_page_never_replaces_what_a_link_in_a_folder_of_somebody_else_leads_to(tmp_path: Path) -> None:
    run(tmp_path / "a", by_seed(1000))
    ours, page = tmp_path / "ours", tmp_path / "a" / "eval-diff.html"
    ours.write_text("ours")
    page.symlink_to(ours)
    found = compare_folders(tmp_path / "a", tmp_path / "a")
    assert "Conversations" in write_comparison(found).read_text()
    page.unlink()
    os.mkfifo(page)
    assert "Conversations" in write_comparison(found).read_text()
    assert ours.read_text() == "ours"


@pytest.mark.parametrize(
    ("column", "value"),
    [("success", ...), ("turns", [1]), ("turns", [{}]), ("messages", [[]]), ("messages", ...), ("reward", None)],
)
def test_records_of_another_shape_are_one_line(
    column: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", by_seed(1000))
    file = tmp_path / "a" / "episodes.jsonl"
    records = list(read_lines(file))
    for record in records:
        record[column] = value
        if value is ...:
            del record[column]
    file.unlink()
    with closing(JsonLinesFile(file)) as written:
        for record in records:
            written.write(record)
    assert main(["eval-diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 1
    said = capsys.readouterr().err
    assert "its files are not as a run writes them" in said
    assert len(said.splitlines()) == 1
