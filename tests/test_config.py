"""The config tree: composed, overridden, checked with one useful line per mistake, and saved so that it runs again."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import roll_flash
from roll_flash.config.fields import Section
from roll_flash.config.mistakes import all_keys, find_key
from roll_flash.config.moved import MOVED, SYNONYMS
from roll_flash.config.reference import reference
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError
from roll_flash.run.run_dir import RunDir

SMALLEST: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}


def write(path: Path, tree: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def errors_of(tree: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(tree, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


# Composition


def test_a_model_and_an_environment_are_enough() -> None:
    config = load_config(SMALLEST)
    assert config.scheduler.async_ratio == 1.0
    assert (config.learner.loss.name, config.learner.loss.correction) == ("decoupled_ppo", "tis")
    assert config.run_folder == Path("runs") / "run"


def test_a_file_builds_on_its_base_key_by_key(tmp_path: Path) -> None:
    base = {**SMALLEST, "steps": 5, "scheduler": {"group_size": 4, "groups_per_step": 2}}
    write(tmp_path / "bases" / "root.yaml", base)
    write(tmp_path / "bases" / "middle.yaml", {"base": "root.yaml", "scheduler": {"group_size": 6}})
    top = write(tmp_path / "top.yaml", {"base": "bases/middle.yaml", "steps": 7})
    config = load_config(top)
    assert (config.steps, config.scheduler.group_size, config.scheduler.groups_per_step) == (7, 6, 2)


def test_a_list_or_value_replaces_that_of_the_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", {**SMALLEST, "rollout": {"stop": ["a", "b"]}})
    top = write(tmp_path / "top.yaml", {"base": "base.yaml", "rollout": {"stop": ["c"]}, "envs": [{"id": "Other-v0"}]})
    config = load_config(top)
    assert config.rollout.stop == ("c",)
    assert [env.id for env in config.envs] == ["Other-v0"]


def test_a_base_that_leads_back_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", {"base": "b.yaml"})
    write(tmp_path / "b.yaml", {"base": "a.yaml"})
    assert "`base` leads back" in errors_of(tmp_path / "a.yaml")
    assert "`base` leads back" in errors_of(write(tmp_path / "self.yaml", {"base": "self.yaml"}))


def test_a_mapping_and_a_loaded_config_are_composed_and_overridden_like_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sweep in a script does it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "base.yaml", {**SMALLEST, "scheduler": {"group_size": 4}})
    tree = {"base": "base.yaml", "steps": 7}
    config = load_config(tree, ["scheduler.groups_per_step=2"])
    assert (config.steps, config.scheduler.group_size, config.scheduler.groups_per_step) == (7, 4, 2)
    assert tree == {"base": "base.yaml", "steps": 7}
    seeds = [load_config(config, [f"seed={seed}", f"name=of-{seed}"]) for seed in (1, 2)]
    assert [(each.seed, each.name, each.steps) for each in seeds] == [(1, "of-1", 7), (2, "of-2", 7)]
    assert load_config(config) == config
    assert load_config({"base": "~/base.yaml"}) == load_config("~/base.yaml") == load_config("base.yaml")
    with pytest.raises(ConfigError, match=r"^config: unknown key 'sed'"):
        load_config(config, ["sed=1"])


def test_several_bases_are_told_the_way_out(tmp_path: Path) -> None:
    top = write(tmp_path / "top.yaml", {"base": ["a.yaml", "b.yaml"]})
    assert "top.yaml: base is one file, not ['a.yaml', 'b.yaml']; for more, let that file" in errors_of(top)


def test_one_base_may_be_reached_on_two_ways(tmp_path: Path) -> None:
    write(tmp_path / "root.yaml", SMALLEST)
    write(tmp_path / "one.yaml", {"base": "root.yaml"})
    assert load_config(write(tmp_path / "two.yaml", {"base": "one.yaml"})).envs[0].id == "Maze-v0"


def test_a_missing_file_is_named_with_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "quickstart.yaml", SMALLEST)
    message = errors_of(tmp_path / "quickstrat.yaml")
    assert "no such config file" in message
    assert "quickstart.yaml?" in message
    assert "nothing.yaml" in errors_of(write(tmp_path / "top.yaml", {"base": "nothing.yaml"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "not valid YAML"),
        ("name: 2020-99-99", "not valid YAML"),
        (f"steps: {'9' * 5001}", "not valid YAML"),
        (f"a: {'[' * 5000}{']' * 5000}", "not valid YAML"),
        ("- 1\n- 2\n", "a mapping of keys to values, not a list"),
        ("just words", "a mapping of keys to values, not a str"),
        ("", "'model' is required"),
    ],
)
def test_a_file_that_is_no_config_is_one_line_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "broken.yaml", text)
    message = errors_of(path)
    assert words in message
    assert all(line.startswith(str(path)) for line in message.splitlines())


def test_a_key_that_is_written_twice_is_named_with_its_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.yaml", "steps: 5\nmodel:\n  path: a\n  max_length: 9\n  path: b\nsteps: 5\n")
    assert errors_of(path) == f"{path}: the key 'path' is written twice, in lines 3 and 5; remove one of them"
    path.write_text("steps: 5\nname: a\nsteps: 6\n")
    assert errors_of(path) == f"{path}: the key 'steps' is written twice, in lines 1 and 3; remove one of them"
    write(tmp_path / "top.yaml", {"base": "twice.yaml", "steps": 7})
    assert f"{path}: the key 'steps' is written twice" in errors_of(tmp_path / "top.yaml")


def test_a_key_may_override_the_same_key_of_what_it_merges(tmp_path: Path) -> None:
    text = """
model: {path: tiny}
envs:
  - &easy {id: A-v0, max_turns: 3, kwargs: {size: 3}}
  - &hard {<<: *easy, kwargs: {size: 5}}
  - {<<: *hard, max_turns: 6, id: B-v0}
"""
    envs = load_config(write(tmp_path / "merged.yaml", text)).envs
    assert [(env.id, env.max_turns, env.kwargs) for env in envs] == [
        ("A-v0", 3, {"size": 3}),
        ("A-v0", 3, {"size": 5}),
        ("B-v0", 6, {"size": 5}),
    ]


def test_the_name_of_a_run_is_no_config_and_its_config_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "mine" / "config.yaml", SMALLEST)
    assert errors_of("mine") == "mine: no such config file; did you mean runs/mine/config.yaml?"


@pytest.mark.parametrize(
    ("file", "words"),
    [("my.jsonl", "is no config but data; .*: envs.0.data=.*my.jsonl"), ("shop.py", "envs.0.id=.*shop.py:NAME")],
)
def test_what_is_no_config_says_how_a_config_names_it(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / file)


def test_a_folder_or_a_binary_file_is_no_config(tmp_path: Path) -> None:
    assert "cannot be read" in errors_of(tmp_path)
    (tmp_path / "config.yaml").touch()
    assert errors_of(tmp_path).endswith(f"; did you mean {tmp_path}/config.yaml?")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "cannot be read" in errors_of(tmp_path / "binary.yaml")


# Overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("steps=3", ("steps",), 3),
        ("scheduler.group_size=4", ("scheduler", "group_size"), 4),
        ("learner.learning_rate=1e-5", ("learner", "learning_rate"), 1e-5),
        ("learner.loss.dual_clip=null", ("learner", "loss", "dual_clip"), None),
        ("rollout.stop=[</a>, x=y]", ("rollout", "stop"), ("</a>", "x=y")),
        ("envs.0.kwargs.size=5", ("envs", 0, "kwargs"), {"size": 5}),
        ("envs.0.kwargs={size: 5, slip: 1e-3}", ("envs", 0, "kwargs"), {"size": 5, "slip": "1e-3"}),
        ("envs.0.kwargs.slip=1e-3", ("envs", 0, "kwargs"), {"slip": 0.001}),
        ('model.path="1e5"', ("model", "path"), "1e5"),
        ("envs.0.id=my_pkg.envs:Maze-v0", ("envs", 0, "id"), "my_pkg.envs:Maze-v0"),
        ("envs.0.max_turns=3", ("envs", 0, "max_turns"), 3),
        ("envs.0.train_seeds.1=9", ("envs", 0, "train_seeds"), (5, 9)),
        ("envs=[{id: A-v0}, {id: B-v0}]", ("envs", 1, "id"), "B-v0"),
        ("envs.0={id: A-v0}", ("envs", 0, "train_seeds"), (0, 1_000_000)),
        ("checkpoint.keep=5", ("checkpoint", "keep"), 5),
        ("monitor.tensorboard=false", ("monitor", "tensorboard"), False),
        ("name=second", ("name",), "second"),
    ],
)
def test_an_override_sets_one_key(override: str, key: tuple[str | int, ...], value: Any) -> None:
    found: Any = load_config({**SMALLEST, "envs": [{"id": "Maze-v0", "train_seeds": [5, 7]}]}, [override])
    for part in key:
        found = found[part] if isinstance(part, int) else getattr(found, part)
    assert found == value


def test_the_last_override_wins_and_the_source_stays_as_it_was() -> None:
    source = {**SMALLEST, "scheduler": {"group_size": 3}}
    before = copy.deepcopy(source)
    config = load_config(source, ["scheduler.group_size=4", "scheduler.group_size=5", "envs.0.kwargs.size=2"])
    assert config.scheduler.group_size == 5
    assert source == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps", "written key=value"),
        ("=3", "written key=value"),
        ("steps=[1", "not valid YAML"),
        ("steps.more=3", "steps"),
        ("model.path.more=3", "model.path is a value, not a section"),
        ("envs.0.id.more=3", "envs.0.id is a value, not a section"),
        ("envs.1.id=B-v0", "envs is a list and has 1 entry, counted from 0; '1' is none of them"),
        ("envs.-1.id=B-v0", "envs is a list and has 1 entry"),
        ("envs.id=B-v0", "envs is a list and has 1 entry, counted from 0; 'id' is none of them"),
        ("stages.0.name=judge", "stages is a list and has 0 entries"),
        ("envs.0.kwargs={a: 1, a: 2}", "the key 'a' is written twice, in line 1; remove one of them"),
    ],
)
def test_an_override_that_cannot_be_meant_is_explained(override: str, words: str) -> None:
    assert words in errors_of({**SMALLEST, "steps": 1}, override)


# Mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepz=3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("policies.user.modle=m", "unknown key 'policies.user.modle'; did you mean 'policies.user.model'?"),
        ("policies.User.model=m", "policies.User: a name has only a-z, 0-9 and _, and begins with a letter"),
        ("scheduler.groupsize=3", "unknown key 'scheduler.groupsize'; did you mean 'scheduler.group_size'?"),
        ("learner.loss.clip_hihg=0.2", "did you mean 'learner.loss.clip_high'?"),
        ("group_size=3", "did you mean 'scheduler.group_size'?"),
        ("max_turns=3", "did you mean 'envs.0.max_turns'?"),
        ("envs.0.kwarks={}", "unknown key 'envs.0.kwarks'; did you mean 'envs.0.kwargs'?"),
        ("learner.lr=1e-5", "unknown key 'learner.lr'; did you mean 'learner.learning_rate'?"),
        ("num_generations=4", "did you mean 'scheduler.group_size'?"),
        ("rollout.gpu_memory_utilization=0.5", "did you mean 'inference.gpu_memory_utilization'?"),
        ("checkpoint.evry=3", "did you mean 'checkpoint.every'?"),
        ("monitor.qqqqqq=1", "known keys here: tensorboard, compress_episodes, episodes_gib"),
    ],
)
def test_an_unknown_key_comes_with_the_one_that_was_meant(override: str, words: str) -> None:
    assert words in errors_of(SMALLEST, override)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("scheduler.group_size=-1", "scheduler.group_size"),
        ("scheduler.group_size=1", "scheduler.group_size"),
        ("scheduler.group_size=0", "scheduler.group_size"),
        ("scheduler.group_size=many", "scheduler.group_size"),
        ("scheduler.group_size=2.5", "scheduler.group_size"),
        ("steps=0", "steps"),
        ("scheduler.async_ratio=-0.5", "scheduler.async_ratio"),
        ("scheduler.async_ratio=.nan", "scheduler.async_ratio"),
        ("scheduler.async_ratio=.inf", "scheduler.async_ratio"),
        ("learner.learning_rate=.nan", "learner.learning_rate"),
        ("learner.learning_rate=0", "learner.learning_rate"),
        ("learner.loss.name=pop", "learner.loss.name"),
        ("learner.loss.dual_clip=1", "learner.loss.dual_clip"),
        ("learner.betas=[0.9]", "learner.betas"),
        ("sandbox.provider=cloud", "sandbox.provider"),
        ("name=a/b", "name"),
        ("name=..", "name"),
        ("name=", "name"),
        ("name=my run", "name: a name has only letters, digits, '.', '_' and '-', and begins with a letter or a digit"),
        ("name=2026-11-28", "YAML reads this as a date; put it in quotes (in a shell: name='\"2026-11-28\"')"),
        ("name=7", "YAML reads this as a number; put it in quotes (in a shell: name='\"7\"')"),
        ("name=on", "YAML reads this as true or false; put it in quotes (in a shell: name='\"...\"')"),
        ("model.revision=1e9", "(in a shell: model.revision='\"...\"')"),
        ("sandbox=docker", "sandbox: is a section; give keys of it, such as sandbox.provider, not 'docker'"),
        ("envs=[Maze-v0]", "envs.0: is a section; give keys of it, such as envs.0.id, not 'Maze-v0'"),
        ("envs.0.kwargs=5", "envs.0.kwargs: should be a mapping of keys to values, not 5"),
        ("policies.a=5", "policies.a: is a section; give keys of it, such as policies.a.base_url, not 5"),
        (f"name={'x' * 300}", "name: string should have at most 200 characters"),
        ("stages=[{name: My judge, entry_point: judge}]", "stages.0.name: a name has only a-z, 0-9 and _"),
        ("model=tiny", "model"),
        ("rollout.stop=5", "rollout.stop"),
        ("rollout.temperature=0.005", "rollout.temperature"),
        ("eval.seeds_from=-1", "eval.seeds_from"),
        ("envs.0.train_seeds=[5, 5]", "envs.0"),
        ("envs=[]", "envs: at least one environment is needed"),
        ("envs={id: A-v0}", "envs: should be a list, such as envs=[...], not {'id': 'A-v0'}"),
        ("learner.betas=[0.9, 1.0]", "learner.betas.1"),
        ("rollout.stop=['']", "rollout.stop.0"),
        ("envs.0.kwargs.day=2024-01-01", "envs.0.kwargs: Object of type date is not JSON serializable"),
        ("envs.0.kwargs.pays=[{1: 0.5}]", "envs.0.kwargs: The key 1 is no text, so no checkpoint can hold it"),
        ("envs.0.kwargs.most=.inf", "envs.0.kwargs: Out of range float values are not JSON compliant"),
        ("envs.0.levels=[{day: 2024-01-01}]", "envs.0.levels.0: Object of type date is not JSON serializable"),
        ("monitor.tensorboard=perhaps", "monitor.tensorboard"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_key(override: str, where: str) -> None:
    message = errors_of(SMALLEST, override)
    assert message.startswith("config: ")
    assert where in message
    assert len(message.splitlines()) == 1


def test_every_mistake_is_reported_at_once() -> None:
    message = errors_of(SMALLEST, "steps=0", "scheduler.group_size=-1", "sandbox.cpu=1")
    assert len(message.splitlines()) == 3


# Old keys, and keys of other frameworks


def tree_with(key: str, value: Any) -> dict[str, Any]:
    """The smallest tree with one more key, as a file says it."""
    section, dot, name = key.partition(".")
    return {**SMALLEST, **({section: {name: value}} if dot else {section: value})}


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_key_fails_with_the_new_one_which_is_real(old: str, new: str) -> None:
    override = errors_of(SMALLEST, f"{old}=1")
    in_file = errors_of(tree_with(old, 1))
    moved = new if new != "envs" else "envs' (a list)"
    assert f"{old!r} is now '{moved}" in override
    assert f"'{moved}" in in_file.replace("envs' (a list)", moved)
    assert len(override.splitlines()) == len(in_file.splitlines()) == 1
    assert new in all_keys(Config) or new == "envs"
    assert old not in all_keys(Config)


def test_each_old_key_of_a_file_and_of_the_command_line_has_its_line() -> None:
    old = {"model": {"path": "tiny"}, "env": {"id": "A-v0"}, "async_ratio": 1, "rollout": {"fair": True}}
    assert sorted(errors_of(old).splitlines()) == [
        "config: 'async_ratio' is now 'scheduler.async_ratio'",
        "config: 'env' is now 'envs' (a list)",
        "config: 'rollout.fair' is now 'scheduler.in_order'",
    ]
    assert errors_of(SMALLEST, "env.kwargs.size=3", "steps=2", "on_stale=wait").splitlines() == [
        "'env.kwargs.size=3': 'env.kwargs.size' is now 'envs.0.kwargs.size'",
        "'on_stale=wait': 'on_stale' is now 'scheduler.on_stale'",
    ]


@pytest.mark.parametrize(("synonym", "key"), SYNONYMS.items())
def test_a_key_of_another_framework_is_answered_with_ours(synonym: str, key: str) -> None:
    assert key in all_keys(Config)
    assert f"unknown key {synonym!r}; did you mean {key!r}?" in errors_of(SMALLEST, f"{synonym}=1")
    assert synonym not in all_keys(Config)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("name", "name"),
        ("scheduler.group_size", "scheduler.group_size"),
        ("group_size", "scheduler.group_size"),
        ("lr", "learner.learning_rate"),
        ("async_ratio", "scheduler.async_ratio"),
        ("env", "envs.0.id"),
        ("engine", None),  # two sections have one
        ("resume", None),
    ],
)
def test_a_name_finds_its_key_if_there_is_only_one(name: str, key: str | None) -> None:
    assert find_key(name, Config) == key


# Impossible settings


def test_held_out_tasks_cannot_be_training_tasks() -> None:
    assert "eval.seeds_from: the held-out seeds overlap train_seeds of Maze-v0" in errors_of(
        SMALLEST, "eval.seeds_from=999999"
    )
    assert "overlap" in errors_of(SMALLEST, "eval.seeds_from=0", "envs.0.train_seeds=[10, 20]")
    load_config(SMALLEST, ["eval.seeds_from=1000000"])
    load_config(SMALLEST, ["eval.seeds_from=0", "eval.tasks=10", "envs.0.train_seeds=[10, 20]"])


def test_a_long_wrong_value_is_shortened() -> None:
    assert len(errors_of(SMALLEST, f"steps={'x' * 5000}")) < 250


# Saving


def test_the_saved_tree_runs_again_as_it_is(tmp_path: Path) -> None:
    overrides = ["checkpoint.keep=5", "learner.loss.dual_clip=3", "envs.0.kwargs={size: 3}", "rollout.stop=['</a>']"]
    config = load_config(SMALLEST, overrides)
    saved = write(tmp_path / "config.yaml", config.to_yaml())
    assert load_config(saved) == config
    assert load_config(saved).to_yaml() == config.to_yaml()


@given(
    steps=st.integers(1, 10**6),
    ratio=st.floats(0, 64),
    rate=st.floats(1e-12, 1),
    stop=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1), max_size=3),
    kwargs=st.dictionaries(st.text("abc", min_size=1), st.integers() | st.booleans() | st.none(), max_size=3),
)
def test_any_tree_survives_saving(
    steps: int, ratio: float, rate: float, stop: list[str], kwargs: dict[str, Any]
) -> None:
    config = load_config(
        {
            **SMALLEST,
            "envs": [{"id": "Maze-v0", "kwargs": kwargs}],
            "steps": steps,
            "scheduler": {"async_ratio": ratio},
            "learner": {"learning_rate": rate},
            "rollout": {"stop": stop},
        }
    )
    assert load_config(yaml.safe_load(config.to_yaml())) == config


def test_a_home_folder_is_expanded_and_a_config_cannot_be_changed() -> None:
    config = load_config(SMALLEST, ["model.path=~/model"])
    assert config.model.path == str(Path.home() / "model")
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3


# Paths


def test_files_that_a_config_names_are_looked_for_beside_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "model", elsewhere):
        folder.mkdir(parents=True)
    for name in ("my.jsonl", "mine.py"):
        (project / name).touch()
    (elsewhere / "there.jsonl").touch()
    reward = "[exact, 'mine.py:f', {function: 'mine.py:g'}]"
    entry = f"{{id: Dataset-v0, data: my.jsonl, reward: {reward}, kwargs: {{tools: ['mine.py:search']}}}}"
    own = "{id: 'mine.py:Maze', data: {path: there.jsonl, held_out: 'mine.py:rows'}, kwargs: {folder: model}}"
    checks = "task_env: 'mine.py:Task', verifier_function: 'mine.py:check'"
    agent = f"{{id: AgentEnv-v0, kwargs: {{program_files: [mine.py], opponent: 'mine.py:move', {checks}}}}}"
    judge = "{name: judged, entry_point: reward_model, kwargs: {path: model}}"
    (project / "base.yaml").write_text("model: {path: model}")
    (project / "mine.yaml").write_text(
        f"base: base.yaml\nruns: runs\nenvs: [{entry}, {own}, {agent}]\nstages: [{judge}]"
    )
    monkeypatch.chdir(elsewhere)
    config = load_config("../project/mine.yaml")
    first, second, third = config.envs
    assert first.data is not None
    assert second.data is not None
    assert Path(config.model.path).resolve() == project / "model"
    assert Path(first.data.path).resolve() == project / "my.jsonl"
    assert [reward.label for reward in first.reward] == ["exact", "f", "g"]
    assert all(Path(reward.function.split(":")[0]).is_absolute() for reward in first.reward[1:])
    assert Path(second.id.rpartition(":")[0]).resolve() == project / "mine.py"
    assert Path(first.kwargs["tools"][0].rpartition(":")[0]).resolve() == project / "mine.py"
    assert Path((second.data.held_out or "").rpartition(":")[0]).resolve() == project / "mine.py"
    assert Path(second.kwargs["folder"]).resolve() == project / "model"
    assert Path(config.stages[0].kwargs["path"]).resolve() == project / "model"
    assert [Path(file).resolve() for file in third.kwargs["program_files"]] == [project / "mine.py"]
    for key in ("opponent", "task_env", "verifier_function"):
        assert Path(third.kwargs[key].rpartition(":")[0]).resolve() == project / "mine.py"
    assert (second.data.path, config.runs) == ("there.jsonl", "runs")
    assert load_config("../project/mine.yaml", ["envs.0.data=there.jsonl"]).envs[0].data != first.data


def test_levels_and_demonstrations_are_looked_for_beside_the_config_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "mine.py").touch()
    level = {"opponent": "mine.py:f", "verifier_function": "mine.py:f", "tools": ["mine.py:f"]}
    files = {"folder": "mine.py", "program_files": ["mine.py"]}
    tree = {
        **SMALLEST,
        "envs": [{"id": "A-v0", "levels": [level, files]}],
        "warm_start": {"demonstrations": "mine.py:f"},
    }
    write(tmp_path / "project" / "mine.yaml", tree)
    monkeypatch.chdir(tmp_path)
    config = load_config("project/mine.yaml")
    file = str(tmp_path / "project" / "mine.py")
    first, second = config.envs[0].levels
    assert first == {"opponent": f"{file}:f", "verifier_function": f"{file}:f", "tools": [f"{file}:f"]}
    assert second == {"folder": file, "program_files": [file]}
    assert config.warm_start is not None
    assert config.warm_start.demonstrations == f"{file}:f"


def test_a_split_is_not_taken_for_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "test").mkdir(parents=True)
    env = "{id: Dataset-v0, data: {path: openai/gsm8k, held_out: test}, reward: exact}"
    (tmp_path / "project" / "mine.yaml").write_text(f"model: {{path: tiny}}\nenvs: [{env}]")
    monkeypatch.chdir(tmp_path)
    (found,) = load_config("project/mine.yaml").envs
    assert found.data is not None
    assert found.data.held_out == "test"


def test_the_config_of_a_run_names_what_it_named_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run writes its model into a folder `model`: with `model.path: model` it could not be resumed."""
    monkeypatch.chdir(tmp_path)
    config = load_config({**SMALLEST, "model": {"path": "model"}})
    with RunDir.create(config, resume=False) as run:
        run.model.mkdir()
    assert load_config(config.run_folder / "config.yaml") == config
    RunDir.create(config, resume=True).close()


# The tree itself


def sections(section: type[BaseModel], prefix: str = "") -> list[tuple[str, type[BaseModel]]]:
    found = [(prefix, section)]
    for name, info in section.model_fields.items():
        for candidate in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                found += sections(candidate, f"{prefix}{name}.")
    return found


def test_every_key_is_explained() -> None:
    silent = [
        prefix + name
        for prefix, section in sections(Config)
        for name, info in section.model_fields.items()
        if not info.description
    ]
    assert silent == []


def test_the_reference_has_every_key_and_is_current() -> None:
    page = (Path(__file__).parent.parent / "docs" / "config.md").read_text()
    assert page == reference(), "docs/config.md is old: python -m roll_flash.config.reference > docs/config.md"
    named = re.findall(r"^- \*\*`(\S+)`\*\* \(", page, re.MULTILINE)
    assert sorted(named) == sorted(key.replace(".0.", ".N.") for key in all_keys(Config))


def test_every_section_refuses_unknown_keys() -> None:
    for _, section in sections(Config):
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]


def test_the_configs_that_ship_are_valid() -> None:
    """A file named base.yaml is what others build on, and the files in `hardware` describe machines."""
    found = sorted((Path(__file__).parent.parent / "configs").glob("**/*.yaml"))
    files = [file for file in found if file.name != "base.yaml" and file.parent.name != "hardware"]
    assert len(files) >= 6
    for file in files:
        load_config(file)


def test_reading_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, roll_flash.config.tree\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'gymnasium', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_auto_adapts_the_asynchronous_ratio_below_a_bound_that_the_learner_checks() -> None:
    scheduler = load_config({**SMALLEST, "scheduler": {"async_ratio": "auto", "async_ratio_bounds": [1, 3]}}).scheduler
    assert (scheduler.async_ratio, scheduler.highest_async_ratio) == ("auto", 3)
    assert load_config(SMALLEST, ["scheduler.async_ratio=2"]).scheduler.highest_async_ratio == 2


@pytest.mark.parametrize("episode_s", [60.0, 600.0, 3600.0])
def test_episodes_that_last_as_long_as_they_may_do_not_end_the_run(episode_s: float) -> None:
    config = load_config({**SMALLEST, "rollout": {"episode_timeout_s": episode_s}})
    assert config.stall_timeout_s > episode_s + config.rollout.step_timeout_s
    assert load_config(config.model_dump(mode="json"), ["monitor.stall_timeout_s=9"]).stall_timeout_s == 9


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("scheduler.async_ratio=automatic", "scheduler.async_ratio"),
        ("scheduler.async_ratio_bounds=[3,1]", "scheduler: async_ratio_bounds must be [smallest, largest]"),
        ("scheduler.extra_groups=100", "make 800 redundant episodes, which alone fill rollout.max_concurrent=64"),
        ("scheduler.in_order=true scheduler.extra_groups=1", "scheduler: in_order trains every group"),
        ("scheduler.replicate=false scheduler.group_size=65", "starts the 65 replicas of a group at once"),
        ("rollout.max_new_tokens=512 model.max_length=512", "max_new_tokens=512 leaves no room for a prompt in"),
        ("learner.minibatches=9", "learner.minibatches=9 is more than scheduler.groups_per_step=8"),
        ("inference.weight_transfer=nccl learner.device=cpu", "inference.weight_transfer=nccl needs GPUs"),
        (
            "inference.engine=transformers inference.dtype=bfloat16",
            "inference: dtype: the engine transformers computes",
        ),
        ("inference.engine=transformers inference.weight_transfer=ipc", "weight_transfer=ipc is for the engine vllm"),
        ("inference.port=65535 inference.servers=2", "inference: port=65535: 2 server(s) need ports up to 65536"),
        ("eval.pass_at=[1,8] eval.attempts=4", "eval: pass_at: pass@8 needs as many attempts, but attempts is 4"),
        ("ray.address=auto ray.num_cpus=2", "ray: num_cpus is for a Ray that is started on this machine"),
        (
            "ray.address=ray://head:10001",
            "the driver runs on a node of the cluster. Give this command on a node, or to",
        ),
        ("ray.address=local", "ray.address: local is no cluster; without an address the run starts a Ray of its own"),
        ("ray.address=head", "ray.address: 'head' is not an address: write auto (the cluster of this machine), or"),
        ("ray.address=atuo", "ray.address: 'atuo' is not an address"),
        ("ray.address=head:six", "ray.address: 'head:six' is not an address"),
        ("ray.address=head:0", "ray.address: 'head:0' is not an address"),
        ("ray.address=head:65536", "ray.address: 'head:65536' is not an address"),
        ("ray.address=http://head:6379", "ray.address: 'http://head:6379' is not an address"),
        ("ray.address=10.0.0.1:6379,10.0.0.2:6379", "is not an address"),
        ("ray.address=fd00::1:6379", "ray.address: 'fd00::1:6379' is not an address"),
    ],
)
def test_settings_that_cannot_go_together_are_refused_in_one_line(overrides: str, says: str) -> None:
    message = errors_of(SMALLEST, *overrides.split())
    assert says in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "address", ["auto", "head:6379", "ray-head.cluster_1.svc:6379", "10.0.0.1:1", "[fd00::1]:6379"]
)
def test_addresses_of_clusters(address: str) -> None:
    assert load_config({**SMALLEST, "ray": {"address": address}}).ray.address == address


def test_every_key_is_read_somewhere() -> None:
    """An option that is documented and never read is a lie."""
    package = Path(roll_flash.__file__).parent
    folders = (package, (package / "envs").resolve(), (package / "sandboxes").resolve())
    sources = {path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "config"}
    form = re.compile(r"\.(\w+)|\b(\w+): |\[\"(\w+)\"\]")
    read = {word for path in sources for words in form.findall(path.read_text()) for word in words}
    assert {key.rsplit(".", 1)[-1] for key in all_keys(Config)} - read == set()


def test_the_settings_that_the_stream_had_are_refused_with_the_reason() -> None:
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}]}
    for old in ({**tree, "stream": {"shards": 2}}, {**tree, "stream": {}}):
        with pytest.raises(ConfigError, match=r"'stream.*the trajectory stream has no settings any more; remove it"):
            load_config(old)
    with pytest.raises(ConfigError, match=r"'stream\.capacity_mb': the trajectory stream has no settings any more"):
        load_config(tree, ["stream.capacity_mb=9"])
