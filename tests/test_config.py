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

import roll_flash.config.tree as config_module
from roll_flash.config.tree import Config, Section, load_config
from roll_flash.errors import ConfigError

SMALLEST: dict[str, Any] = {"model": {"path": "tiny"}, "env": {"id": "Maze-v0"}}

SELF_EXPLANATORY = {
    *("name", "seed", "steps", "model", "env", "sandbox", "rollout", "inference", "learner", "weights", "checkpoint"),
    *("monitor", "eval", "ray", "loss", "threads", "ranks", "device", "engine", "servers", "tasks"),
    *("memory_mb", "cpus", "pids", "temperature", "learning_rate", "warmup_steps", "weight_decay", "betas"),
    *("max_grad_norm", "tensorboard", "num_cpus", "max_num_seqs", "gpu_memory_utilization", "advantage"),
    *("clip_low", "clip_high", "parity_text", "before_and_after"),
}
"""Names that need no words, beside those that end in `_timeout_s`."""


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
    assert (config.async_ratio, config.learner.loss.name, config.learner.loss.correction) == (
        1.0,
        "decoupled_ppo",
        "tis",
    )
    assert config.run_folder == Path("runs") / "run"


def test_a_file_builds_on_its_base_key_by_key(tmp_path: Path) -> None:
    base = {**SMALLEST, "steps": 5, "rollout": {"group_size": 4, "groups_per_step": 2}}
    write(tmp_path / "bases" / "root.yaml", base)
    write(tmp_path / "bases" / "middle.yaml", {"base": "root.yaml", "rollout": {"group_size": 6}})
    top = write(tmp_path / "top.yaml", {"base": "bases/middle.yaml", "steps": 7})
    config = load_config(top)
    assert (config.steps, config.rollout.group_size, config.rollout.groups_per_step) == (7, 6, 2)


def test_a_list_or_value_replaces_that_of_the_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", {**SMALLEST, "rollout": {"stop": ["a", "b"]}})
    top = write(tmp_path / "top.yaml", {"base": "base.yaml", "rollout": {"stop": ["c"]}})
    assert load_config(top).rollout.stop == ("c",)


def test_a_base_that_leads_back_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", {"base": "b.yaml"})
    write(tmp_path / "b.yaml", {"base": "a.yaml"})
    assert "`base` leads back" in errors_of(tmp_path / "a.yaml")
    assert "`base` leads back" in errors_of(write(tmp_path / "self.yaml", {"base": "self.yaml"}))


def test_one_base_may_be_reached_on_two_ways(tmp_path: Path) -> None:
    write(tmp_path / "root.yaml", SMALLEST)
    write(tmp_path / "one.yaml", {"base": "root.yaml"})
    assert load_config(write(tmp_path / "two.yaml", {"base": "one.yaml"})).env.id == "Maze-v0"


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


def test_a_folder_or_a_binary_file_is_no_config(tmp_path: Path) -> None:
    assert "cannot be read" in errors_of(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "cannot be read" in errors_of(tmp_path / "binary.yaml")


# Overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("steps=3", ("steps",), 3),
        ("rollout.group_size=4", ("rollout", "group_size"), 4),
        ("learner.learning_rate=1e-5", ("learner", "learning_rate"), 1e-5),
        ("learner.loss.dual_clip=null", ("learner", "loss", "dual_clip"), None),
        ("rollout.stop=[</a>, x=y]", ("rollout", "stop"), ("</a>", "x=y")),
        ("env.kwargs.size=5", ("env", "kwargs"), {"size": 5}),
        ("env.kwargs={size: 5, slip: 1e-3}", ("env", "kwargs"), {"size": 5, "slip": "1e-3"}),
        ("env.kwargs.slip=1e-3", ("env", "kwargs"), {"slip": 0.001}),
        ('model.path="1e5"', ("model", "path"), "1e5"),
        ("env.id=my_pkg.envs:Maze-v0", ("env", "id"), "my_pkg.envs:Maze-v0"),
        ("checkpoint.keep=5", ("checkpoint", "keep"), 5),
        ("monitor.tensorboard=false", ("monitor", "tensorboard"), False),
        ("name=second", ("name",), "second"),
    ],
)
def test_an_override_sets_one_key(override: str, key: tuple[str, ...], value: Any) -> None:
    found: Any = load_config(SMALLEST, [override])
    for part in key:
        found = getattr(found, part)
    assert found == value


def test_the_last_override_wins_and_the_source_stays_as_it_was() -> None:
    source = {**SMALLEST, "rollout": {"group_size": 3}}
    before = copy.deepcopy(source)
    config = load_config(source, ["rollout.group_size=4", "rollout.group_size=5", "env.kwargs.size=2"])
    assert config.rollout.group_size == 5
    assert source == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps", "written key=value"),
        ("=3", "written key=value"),
        ("steps=[1", "not valid YAML"),
        ("steps.more=3", "steps"),
        ("model.path.more=3", "path is a value, not a section"),
    ],
)
def test_an_override_that_cannot_be_meant_is_explained(override: str, words: str) -> None:
    assert words in errors_of({**SMALLEST, "steps": 1}, override)


# Mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepz=3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("rollout.groupsize=3", "unknown key 'rollout.groupsize'; did you mean 'rollout.group_size'?"),
        ("learner.loss.clip_hihg=0.2", "did you mean 'learner.loss.clip_high'?"),
        ("group_size=3", "did you mean 'rollout.group_size'?"),
        ("checkpoint.evry=3", "did you mean 'checkpoint.every'?"),
        ("monitor.qqqqqq=1", "known keys here: tensorboard, stall_timeout_s"),
    ],
)
def test_an_unknown_key_comes_with_the_one_that_was_meant(override: str, words: str) -> None:
    assert words in errors_of(SMALLEST, override)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("rollout.group_size=-1", "rollout.group_size"),
        ("rollout.group_size=1", "rollout.group_size"),
        ("rollout.group_size=0", "rollout.group_size"),
        ("rollout.group_size=many", "rollout.group_size"),
        ("rollout.group_size=2.5", "rollout.group_size"),
        ("steps=0", "steps"),
        ("async_ratio=-0.5", "async_ratio"),
        ("async_ratio=.nan", "async_ratio"),
        ("async_ratio=.inf", "async_ratio"),
        ("learner.learning_rate=.nan", "learner.learning_rate"),
        ("learner.learning_rate=0", "learner.learning_rate"),
        ("learner.loss.name=pop", "learner.loss.name"),
        ("learner.loss.dual_clip=1", "learner.loss.dual_clip"),
        ("learner.betas=[0.9]", "learner.betas"),
        ("sandbox.provider=cloud", "sandbox.provider"),
        ("name=a/b", "name"),
        ("name=..", "name"),
        ("name=", "name"),
        ("model=tiny", "model"),
        ("rollout.stop=5", "rollout.stop"),
        ("rollout.temperature=0.005", "rollout.temperature"),
        ("eval.seeds_from=-1", "eval.seeds_from"),
        ("env.train_seeds=[5, 5]", "env"),
        ("env.kwargs.day=2024-01-01", "env.kwargs: Object of type date is not JSON serializable"),
        ("env.levels=[{day: 2024-01-01}]", "env.levels.0: Object of type date is not JSON serializable"),
        ("monitor.tensorboard=perhaps", "monitor.tensorboard"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_key(override: str, where: str) -> None:
    message = errors_of(SMALLEST, override)
    assert message.startswith("config: ")
    assert where in message
    assert len(message.splitlines()) == 1


def test_every_mistake_is_reported_at_once() -> None:
    message = errors_of(SMALLEST, "steps=0", "rollout.group_size=-1", "sandbox.cpu=1")
    assert len(message.splitlines()) == 3


def test_held_out_tasks_cannot_be_training_tasks() -> None:
    assert "eval.seeds_from: the held-out seeds overlap train_seeds of Maze-v0" in errors_of(
        SMALLEST, "eval.seeds_from=999999"
    )
    assert "overlap" in errors_of(SMALLEST, "eval.seeds_from=0", "env.train_seeds=[10, 20]")
    load_config(SMALLEST, ["eval.seeds_from=1000000"])
    load_config(SMALLEST, ["eval.seeds_from=0", "eval.tasks=10", "env.train_seeds=[10, 20]"])


def test_a_long_wrong_value_is_shortened() -> None:
    assert len(errors_of(SMALLEST, f"steps={'x' * 5000}")) < 250


# Saving


def test_the_saved_tree_runs_again_as_it_is(tmp_path: Path) -> None:
    overrides = ["checkpoint.keep=5", "learner.loss.dual_clip=3", "env.kwargs={size: 3}", "rollout.stop=['</a>']"]
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
            "env": {"id": "Maze-v0", "kwargs": kwargs},
            "steps": steps,
            "async_ratio": ratio,
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


# The tree itself


def sections(section: type[BaseModel], prefix: str = "") -> list[tuple[str, type[BaseModel]]]:
    found = [(prefix, section)]
    for name, info in section.model_fields.items():
        for candidate in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                found += sections(candidate, f"{prefix}{name}.")
    return found


def test_every_key_that_does_not_explain_itself_has_words() -> None:
    silent = [
        prefix + name
        for prefix, section in sections(Config)
        for name, info in section.model_fields.items()
        if not info.description and name not in SELF_EXPLANATORY and not name.endswith("_timeout_s")
    ]
    assert silent == []


def test_every_section_refuses_unknown_keys() -> None:
    for _, section in sections(Config):
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]


def test_the_configs_that_ship_are_valid() -> None:
    """A file named base.yaml is what others build on, no run of its own."""
    found = sorted((Path(__file__).parent.parent / "configs").glob("**/*.yaml"))
    files = [file for file in found if file.name != "base.yaml"]
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
    config = load_config({**SMALLEST, "async_ratio": "auto", "async_ratio_bounds": [1, 3]})
    assert (config.async_ratio, config.highest_async_ratio) == ("auto", 3)
    assert load_config({**SMALLEST, "async_ratio": 2}).highest_async_ratio == 2


@pytest.mark.parametrize("episode_s", [60.0, 600.0, 3600.0])
def test_episodes_that_last_as_long_as_they_may_do_not_end_the_run(episode_s: float) -> None:
    config = load_config({**SMALLEST, "rollout": {"episode_timeout_s": episode_s}})
    assert config.stall_timeout_s > episode_s + config.rollout.step_timeout_s
    assert load_config(config.model_dump(mode="json"), ["monitor.stall_timeout_s=9"]).stall_timeout_s == 9


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("async_ratio=automatic", "async_ratio"),
        ("async_ratio_bounds=[3, 1]", "smallest, largest"),
        ("rollout.extra_groups=100", "alone fill"),
    ],
)
def test_scheduling_settings_that_make_no_sense_are_refused(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(SMALLEST, [override])


def test_every_key_is_read_somewhere() -> None:
    """An option that is documented and never read is a lie."""
    sources = [
        path
        for path in Path(config_module.__file__).parent.rglob("*.py")
        if path.name not in ("config.py", "learner_config.py")
    ]
    text = "\n".join(path.read_text() for path in sources)
    keys = [key.rsplit(".", 1)[-1] for key in config_module._all_keys(Config)]
    assert [key for key in keys if not re.search(rf"\.{key}\b|\b{key}: ", text)] == []
