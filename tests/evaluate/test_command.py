"""From what a user types after `roll-flash eval` to what is run, or one clear error before anything starts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_runner import ScriptedRunner

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import Config, EnvConfig, load_config
from roll_flash.errors import ConfigError, InferenceError, ModelError
from roll_flash.evaluation.evaluation import evaluate_environments, is_complete
from roll_flash.evaluation.journal import transcript_name
from roll_flash.evaluation.tasks import build_episodes, held_out_tasks
from roll_flash.evaluator import EvalRequest, plan_evaluation, run_evaluation
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.json_lines import JsonLinesFile
from roll_flash.processes.background import background_task
from roll_flash.run.run_dir import RunDir, locked_run
from roll_flash.run.trained_tasks import TRAINED_TASKS
from roll_flash.types import EpisodeSpec, SamplingParams

TREE: dict[str, Any] = {
    "name": "maze",
    "model": {"path": "tiny", "max_length": 999},
    "envs": [{"id": "Maze-v0", "kwargs": {"size": 3}}],
    "eval": {"tasks": 7},
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_folder(path: Path, text: str = "{}") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(text)
    return path


def finished_run(*steps: int, tree: dict[str, Any] | None = None) -> Config:
    config = load_config(tree or TREE)
    with RunDir.create(config, resume=False) as run:
        for step in steps:
            with run.writing_checkpoint(step) as folder:
                model_folder(folder / "hf")
    return config


def config_file() -> str:
    Path("maze.yaml").write_text(json.dumps(TREE))
    return "maze.yaml"


def test_an_environment_and_a_model_folder_are_enough() -> None:
    folder = model_folder(Path("my-model"))
    plan = plan_evaluation(EvalRequest(env="Maze-v0", model=str(folder), tasks=5, attempts=2, max_concurrent=3))
    assert plan.model == "my-model"
    assert plan.config.envs[0].id == "Maze-v0"
    assert (plan.config.eval.tasks, plan.config.eval.attempts, plan.config.eval.max_concurrent) == (5, 2, 3)


def test_a_config_brings_its_model_and_options_go_on_top() -> None:
    plan = plan_evaluation(EvalRequest(config=config_file(), temperature=0.7, overrides=("model.max_length=70",)))
    assert (plan.model, plan.config.model.max_length) == ("tiny", 70)
    assert (plan.config.eval.tasks, plan.config.eval.temperature) == (7, 0.7)


def test_a_run_brings_its_config_and_its_newest_checkpoint() -> None:
    finished_run(3, 12)
    plan = plan_evaluation(EvalRequest(model="maze"))
    assert plan.model == "runs/maze/checkpoints/step_12/hf"
    assert plan.about["model"] == "maze@12"
    assert plan.config.envs[0].kwargs == {"size": 3}
    assert plan.config.model.max_length == 999


@pytest.mark.parametrize("reference", ["maze@3", "runs/maze@3", "runs/maze@step_3"])
def test_a_checkpoint_is_chosen_by_its_step(reference: str) -> None:
    finished_run(3, 12)
    assert plan_evaluation(EvalRequest(model=reference)).model == "runs/maze/checkpoints/step_3/hf"


def test_a_run_can_be_evaluated_on_another_environment() -> None:
    model = {**TREE["model"], "thinking": "strip", "chat_template_kwargs": {"enable_thinking": True}}
    finished_run(3, tree={**TREE, "model": model, "rollout": {"max_new_tokens": 512, "stop": ["END"]}})
    plan = plan_evaluation(EvalRequest(model="maze", env="Other-v0", overrides=("rollout.max_new_tokens=500",)))
    assert (plan.config.envs[0].id, plan.config.envs[0].kwargs) == ("Other-v0", {})
    assert plan.model == "runs/maze/checkpoints/step_3/hf"
    assert plan.config.model.model_dump(include=model.keys() - {"path"}) == {
        key: value for key, value in model.items() if key != "path"
    }
    assert (plan.config.rollout.max_new_tokens, plan.config.rollout.stop) == (500, ("END",))


def test_a_model_by_name_is_not_mistaken_for_a_run() -> None:
    assert plan_evaluation(EvalRequest(env="Maze-v0", model="tiny")).model == "tiny"


def test_an_endpoint_takes_the_model_as_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    request = EvalRequest(env="Maze-v0", model="org/model:1e5", endpoint="http://localhost:1/v1", api_key_env="KEY")
    plan = plan_evaluation(request)
    assert (plan.model, plan.endpoint) == ("org/model:1e5", "http://localhost:1/v1")
    assert "secret" not in str(plan)


@pytest.mark.parametrize("name", ["1e5", "null", "true", "a: b"])
def test_a_model_name_that_looks_like_yaml_stays_a_name(name: str) -> None:
    plan = plan_evaluation(EvalRequest(config=config_file(), model=name, endpoint="http://localhost:1/v1"))
    assert plan.config.model.path == name


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (EvalRequest(), "give a CONFIG file, --env ID, or a run's --model"),
        (EvalRequest(env="Maze-v0"), "--env needs --model"),
        (EvalRequest(env="Maze-v0", endpoint="http://h/v1"), "--endpoint needs --model NAME"),
        (EvalRequest(env="Maze-v0", model="m", endpoint="localhost:80"), "must look like http://host:port/v1"),
        (EvalRequest(env="Maze-v0", model="m", endpoint="http://h/v1", api_key_env="NO_SUCH"), "NO_SUCH is not set"),
        (EvalRequest(env="Maze-v0", model="m", api_key_env="KEY"), "--api-key-env is for an --endpoint"),
        (EvalRequest(env="Maze-v0", model="nobody@3"), "no run of this name"),
        (EvalRequest(env="Maze-v0", model="tiny", tasks=0), r"eval\.tasks: .*greater than or equal to 1"),
        (EvalRequest(env="Maze-v0", model="tiny", overrides=("eval.task=3",)), r"did you mean 'eval\.tasks'\?"),
        (EvalRequest(config="nothing.yaml"), "no such config file"),
        (EvalRequest(config="runs/maze"), "runs/maze: is a run; evaluate its model with --model runs/maze"),
    ],
)
def test_what_cannot_be_run_is_one_clear_error(request_: EvalRequest, words: str) -> None:
    finished_run(3)
    with pytest.raises(ConfigError, match=words):
        plan_evaluation(request_)


def test_the_same_command_resumes_and_a_different_one_gets_a_folder_of_its_own() -> None:
    folder = model_folder(Path("my-model"))
    request = EvalRequest(env="Maze-v0", model=str(folder))
    first = plan_evaluation(request).folder
    assert first == plan_evaluation(request).folder
    assert first == plan_evaluation(EvalRequest(env="Maze-v0", model=str(folder), tasks=500, attempts=8)).folder
    assert first != plan_evaluation(EvalRequest(env="Maze-v0", model=str(folder), temperature=0.5)).folder


def test_another_environment_than_that_of_the_config_has_its_own_tasks() -> None:
    env = {"id": "Riddle-v0", "task_source": {"entry_point": "riddles.py:riddles"}}
    config = load_config({"model": {"path": "tiny"}, "envs": [env]})
    kept, other = (plan_evaluation(EvalRequest(config=config, env=id)) for id in ("Riddle-v0", "Maze-v0"))
    assert kept.config.envs == config.envs
    assert [task.task_id for task in held_out_tasks(other.config.envs[0], EvalConfig(tasks=1, seeds_from=5))] == [
        "Maze-v0:5"
    ]
    assert kept.folder != plan_evaluation(EvalRequest(env="Riddle-v0", model="tiny")).folder


def test_results_of_weights_that_were_replaced_are_not_reused() -> None:
    folder = model_folder(Path("my-model"))
    request = EvalRequest(env="Maze-v0", model=str(folder))
    first = plan_evaluation(request).folder
    model_folder(folder, '{"new": 1}')
    assert first != plan_evaluation(request).folder


@pytest.mark.parametrize(
    "override",
    [
        "envs.0.reward=number",
        "envs.0.data.system=Think.",
        "envs.0.success_above=0.5",
        "model.max_length=64",
        "model.thinking=strip",
        "sandbox={image: other}",
    ],
)
def test_results_of_other_settings_are_not_reused(override: str) -> None:
    """After `reward: exact` had given 0, `reward: number` gave the same 0, and nothing was played."""
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": 2}\n{"prompt": "1 + 2?", "answer": 3}\n')
    env = {"id": "Dataset-v0", "data": {"path": "rows.jsonl"}, "reward": "exact"}
    config = load_config({"model": {"path": "tiny"}, "rollout": {"max_new_tokens": 8}, "envs": [env]})
    first = plan_evaluation(EvalRequest(config=config))
    other = plan_evaluation(EvalRequest(config=config, overrides=(override,)))
    assert first.folder != other.folder
    played = evaluate_environments(
        ScriptedRunner(lambda spec: True),
        first.config,
        Path("results"),
        label=first.label,
        max_concurrent=1,
        about=first.about,
    )
    asyncio.run(played)
    assert is_complete(first.config, Path("results"), label=first.label, about=first.about)
    key = override.partition("=")[0].removeprefix("envs.0.").replace("model.", "about.")
    key = f"about.{key}" if key == "sandbox" else key
    with pytest.raises(ConfigError, match=f"holds an evaluation with {key} [^N].*, not .*; choose another folder"):
        is_complete(other.config, Path("results"), label=other.label, about=other.about)


def test_weights_that_were_replaced_are_seen_also_if_the_config_names_them() -> None:
    folder = model_folder(Path("my-model"))
    config = load_config({**TREE, "model": {"path": str(folder)}})
    first = plan_evaluation(EvalRequest(config=config)).folder
    model_folder(folder, '{"new": 1}')
    assert first != plan_evaluation(EvalRequest(config=config)).folder


@pytest.mark.parametrize(
    ("file", "marks"),
    [
        ("model/chat_template.jinja", ["config.json"]),
        ("model/adapter_model.safetensors", ["adapter_config.json"]),
        ("model.gguf", []),
    ],
)
def test_results_of_a_replaced_template_adapter_or_gguf_file_are_not_reused(file: str, marks: list[str]) -> None:
    """An adapter that was trained on gave the scores of the one before."""
    changed = Path(file)
    Path("model").mkdir()
    for name in marks:
        Path("model", name).write_text("{}")
    changed.write_text("before")
    request = EvalRequest(env="Maze-v0", model=file.partition("/")[0])
    first = plan_evaluation(request).folder
    assert first == plan_evaluation(request).folder
    changed.write_text("after it was trained on")
    assert first != plan_evaluation(request).folder


def test_a_misspelt_model_does_not_take_the_folder() -> None:
    request = EvalRequest(env="TextFrozenLake-v0", model="tinny", out="results")
    with pytest.raises(ModelError, match="tinny: no such model folder"):
        asyncio.run(run_evaluation(request))
    plan = plan_evaluation(replace(request, model="tiny"))
    assert not is_complete(plan.config, plan.folder, label=plan.label, about=plan.about)


def test_attempts_at_rows_that_have_changed_are_played_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = ScriptedRunner(lambda spec: True)

    @asynccontextmanager
    async def open_runner(*_: Any) -> AsyncIterator[ScriptedRunner]:
        yield runner

    monkeypatch.setattr("roll_flash.evaluator._open_runner", open_runner)
    rows = [{"prompt": f"{number} + 1?", "answer": number + 1} for number in range(8)]

    def play() -> int:
        Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        before = len(runner.ran)
        asyncio.run(run_evaluation(EvalRequest(config=config, out="results")))
        return len(runner.ran) - before

    Path("train.jsonl").write_text('{"prompt": "Hm?", "answer": "x"}\n')
    data = {"path": "train.jsonl", "held_out": "rows.jsonl"}
    config = load_config(
        {"model": {"path": "tiny", "max_length": 256}, "envs": [{"id": "Dataset-v0", "data": data, "reward": "exact"}]}
    )
    assert play() == 8
    assert play() == 0
    assert "nothing to play: results has all attempts" in capsys.readouterr().err
    rows[3]["answer"] = 5
    assert play() == 1
    assert play() == 0


def test_two_processes_do_not_evaluate_into_one_folder() -> None:
    request = EvalRequest(env="TextFrozenLake-v0", model="tiny", tasks=2, out="results")
    with locked_run(Path("results")), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}; wait"):
        asyncio.run(run_evaluation(replace(request, overrides=("inference.engine=transformers",))))
    assert not (Path("results") / "results.json").exists()


def test_planning_writes_nothing(tmp_path: Path) -> None:
    plan_evaluation(EvalRequest(env="Maze-v0", model="tiny"))
    assert list(tmp_path.iterdir()) == []


TASKS = Path(__file__).parents[2] / "examples" / "tasks"


def test_a_folder_of_tasks_is_evaluated_each_its_own_row() -> None:
    request = EvalRequest(config=str(TASKS), model="m", endpoint="http://localhost:1/v1", attempts=2)
    plan = plan_evaluation(request)
    tasks = held_out_tasks(plan.config.envs[0], plan.config.eval)
    names = sorted(folder.name for folder in TASKS.iterdir() if (folder / "task.toml").is_file())
    assert [task.task_id for task in tasks] == [f"TaskFolder-v0:{name}" for name in names]
    assert [Path(task.kwargs["folder"]).name for task in tasks] == names
    specs = build_episodes(tasks, plan.config.envs[0], plan.config.eval, SamplingParams(), "x")
    assert len({spec.episode_id for spec in specs}) == 2 * len(names)
    assert transcript_name({"episode_id": specs[-1].episode_id, "task_id": tasks[-1].task_id, "seed": 0}) == (
        f"{names[-1]}_attempt_1.md"
    )
    assert plan.config.rollout.step_timeout_s > 100  # what the tasks allow, not what training allows


def test_tasks_whose_names_look_alike_are_not_taken_for_each_other(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a/b", "a-b", "加", "减")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "task.toml").touch()
    env = EnvConfig(id="TaskFolder-v0", kwargs={"folder": str(tmp_path)})
    eval = EvalConfig(tasks=9, attempts=2)
    specs = build_episodes(held_out_tasks(env, eval), env, eval, SamplingParams(), "x")
    assert len({spec.episode_id for spec in specs}) == 2 * len(folders)
    named = [{"episode_id": s.episode_id, "task_id": s.task.task_id, "seed": s.task.seed} for s in specs]
    assert len({transcript_name(record) for record in named}) == 2 * len(folders)


def test_one_task_folder_and_the_first_of_several_can_be_chosen() -> None:
    endpoint = {"model": "m", "endpoint": "http://localhost:1/v1"}
    one = plan_evaluation(EvalRequest(config=str(next(TASKS.glob("*/task.toml")).parent), **endpoint)).config
    assert len(held_out_tasks(one.envs[0], one.eval)) == 1
    first = plan_evaluation(EvalRequest(config=str(TASKS), tasks=2, **endpoint)).config
    assert len(held_out_tasks(first.envs[0], first.eval)) == 2


def test_task_folders_ask_no_more_of_a_model_than_it_was_made_for() -> None:
    """By its name too: smollm2-135m takes 8,192 tokens, and vLLM would refuse to start with more."""
    tasks = str(Path(__file__).parents[2] / "examples/tasks")
    for model, longest in (("smollm2-135m", 8192), ("tiny", 16_384)):
        assert plan_evaluation(EvalRequest(config=tasks, model=model)).config.model.max_length == longest
    served = EvalRequest(config=tasks, model="smollm2-135m", endpoint="http://127.0.0.1:1/v1")
    assert plan_evaluation(served).config.model.max_length == 16_384


def test_task_folders_that_cannot_be_evaluated_are_one_clear_error() -> None:
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match="no task in it"):
        plan_evaluation(EvalRequest(config="empty", model="m"))
    Path("broken/one").mkdir(parents=True)
    Path("broken/one/task.toml").write_text('version = "1.0"\n')
    with pytest.raises(ConfigError, match=r"none of its 1 tasks can be read; the first: .*broken/one"):
        plan_evaluation(EvalRequest(config="broken", model="m"))
    with pytest.raises(ConfigError, match="--env an environment; give one of them"):
        plan_evaluation(EvalRequest(config=str(TASKS), model="m", env="Maze-v0"))
    with pytest.raises(ConfigError, match="needs --model"):
        plan_evaluation(EvalRequest(config=str(TASKS)))


def test_budget_prices_and_ks_are_options() -> None:
    request = EvalRequest(
        env="Maze-v0",
        model="tiny",
        max_tokens_total=1000,
        max_cost=2.5,
        max_minutes=3,
        price_prompt=1,
        price_completion=4,
        pass_at="1,3",
        attempts=4,
    )
    eval = plan_evaluation(request).config.eval
    assert (eval.max_tokens_total, eval.max_cost, eval.max_minutes) == (1000, 2.5, 3)
    assert (eval.price_prompt, eval.price_completion, eval.pass_at) == (1, 4, (1, 3))
    with pytest.raises(ConfigError, match="max_cost needs price_prompt"):
        plan_evaluation(EvalRequest(env="Maze-v0", model="tiny", max_cost=1))
    with pytest.raises(ConfigError, match="numbers separated by commas"):
        plan_evaluation(EvalRequest(env="Maze-v0", model="tiny", pass_at="1;2"))


def test_a_budget_does_not_make_it_another_evaluation() -> None:
    plain = plan_evaluation(EvalRequest(env="Maze-v0", model="tiny")).folder
    assert plan_evaluation(EvalRequest(env="Maze-v0", model="tiny", max_minutes=1, max_tokens_total=5)).folder == plain


def test_each_environment_of_a_config_is_evaluated_into_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {**TREE, "envs": [{"id": "TextFrozenLake-v0"}, {"id": "TextSokoban-v0"}]}
    Path("two.yaml").write_text(json.dumps(tree))
    runner = ScriptedRunner(lambda spec: spec.task.env_id == "TextSokoban-v0")

    @asynccontextmanager
    async def open_runner(*_: Any) -> AsyncIterator[ScriptedRunner]:
        yield runner

    monkeypatch.setattr("roll_flash.evaluator._open_runner", open_runner)
    request = EvalRequest(config="two.yaml", tasks=2, out="results")
    result, folder = asyncio.run(run_evaluation(request))
    assert result.success is not None
    assert result.success.value == 0
    assert result.others["env_1"].success is not None
    assert result.others["env_1"].success.value == 1
    assert "TextSokoban-v0 with tiny" in result.table()
    assert (folder / "env_1" / "report.html").is_file()
    assert asyncio.run(run_evaluation(request))[0].others["env_1"].scored == 2
    assert len(runner.ran) == 4  # nothing was run again
    only = plan_evaluation(EvalRequest(config="two.yaml", env="TextSokoban-v0"))
    assert [env.id for env in only.config.envs] == ["TextSokoban-v0"]


def test_one_environment_of_a_config_is_evaluated_with_its_own_settings() -> None:
    envs = [{"id": "A-v0", "kwargs": {"size": 3}}, {"id": "B-v0", "kwargs": {"size": 5}, "max_turns": 2}]
    Path("two.yaml").write_text(json.dumps({**TREE, "envs": envs}))
    (second,) = plan_evaluation(EvalRequest(config="two.yaml", env="B-v0")).config.envs
    assert (second.id, second.kwargs, second.max_turns) == ("B-v0", {"size": 5}, 2)
    (another,) = plan_evaluation(EvalRequest(config="two.yaml", env="C-v0")).config.envs
    assert (another.id, another.kwargs) == ("C-v0", {"size": 3})


def test_an_environment_of_a_file_is_found_in_a_config_of_another_folder() -> None:
    """The config has the whole path, as it is in another folder; the settings of the first environment were taken."""
    Path("project").mkdir()
    Path("project", "games.py").touch()
    envs = [{"id": "games.py:A", "kwargs": {"size": 3}}, {"id": "games.py:B", "max_turns": 2}]
    Path("project", "two.yaml").write_text(json.dumps({**TREE, "envs": envs}))
    (second,) = plan_evaluation(EvalRequest(config="project/two.yaml", env="project/games.py:B")).config.envs
    assert (second.kwargs, second.max_turns) == ({}, 2)


def test_a_config_without_environments_takes_the_one_of_the_command_line() -> None:
    Path("none.yaml").write_text(json.dumps({key: value for key, value in TREE.items() if key != "envs"}))
    (env,) = plan_evaluation(EvalRequest(config="none.yaml", env="C-v0", overrides=("envs.0.max_turns=2",))).config.envs
    assert (env.id, env.max_turns) == ("C-v0", 2)


def test_an_evaluation_of_a_run_knows_what_it_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class NamedTasks(ScriptedRunner):
        def _outcome(self, spec: EpisodeSpec) -> Any:
            return replace(super()._outcome(spec), info={"task": spec.task.seed})

    @asynccontextmanager
    async def open_runner(*_: Any) -> AsyncIterator[ScriptedRunner]:
        yield NamedTasks(lambda spec: True)

    monkeypatch.setattr("roll_flash.evaluator._open_runner", open_runner)
    run = finished_run().run_folder
    with RunDir.create(load_config(TREE), resume=True) as run_dir, run_dir.writing_checkpoint(3) as folder:
        shutil.copytree(resolve_model("tiny"), folder / "hf")
    request = EvalRequest(model="maze", env="TextFrozenLake-v0", tasks=2)
    before, _ = asyncio.run(run_evaluation(replace(request, out="before")))
    with closing(JsonLinesFile(run / "logs" / TRAINED_TASKS)) as tasks:
        tasks.write({"step": 1, "tasks": sorted(before.task_hashes)})
    after, _ = asyncio.run(run_evaluation(replace(request, out="after")))
    assert (before.trained_on, after.trained_on) == (0, 2)
    assert after.kind.startswith("not held out")


def test_one_budget_is_for_all_environments_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {**TREE, "envs": [{"id": "TextFrozenLake-v0"}, {"id": "TextSokoban-v0"}]}
    Path("two.yaml").write_text(json.dumps(tree))
    runner = ScriptedRunner(lambda spec: True, tokens=(10, 3))

    @asynccontextmanager
    async def open_runner(*_: Any) -> AsyncIterator[ScriptedRunner]:
        yield runner

    monkeypatch.setattr("roll_flash.evaluator._open_runner", open_runner)
    request = EvalRequest(config="two.yaml", tasks=5, max_concurrent=1, out="results", max_tokens_total=5 * 13 + 20)
    result, _ = asyncio.run(run_evaluation(request))
    other = result.others["env_1"]
    used = [found.usage.prompt_tokens + found.usage.completion_tokens for found in (result, other)]
    assert result.scored == 5
    assert sum(used) <= 5 * 13 + 20
    assert other.stopped is not None
    assert "78 of 85 tokens are used" in other.stopped
    request = replace(request, max_tokens_total=1_000_000)
    assert asyncio.run(run_evaluation(request))[0].others["env_1"].scored == 5


def test_background_work_that_dies_ends_the_evaluation_at_once_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it ends a training run: nobody waits for episodes that will never come."""

    class NeverEnds:
        async def run(self, episodes: Any, *, max_concurrent: int) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

    async def dies() -> None:
        raise InferenceError("server http://127.0.0.1:1 died 4 times within 30 minutes")

    @asynccontextmanager
    async def open_runner(*_: Any) -> AsyncIterator[NeverEnds]:
        async with background_task(dies(), "the supervision of a server"):
            yield NeverEnds()

    monkeypatch.setattr("roll_flash.evaluator._open_runner", open_runner)
    Path("counting.yaml").write_text(json.dumps({**TREE, "envs": [{"id": "TextFrozenLake-v0"}]}))

    async def evaluated() -> None:
        async with asyncio.timeout(30):
            await run_evaluation(EvalRequest(config="counting.yaml", tasks=2, out="results"))

    with pytest.raises(InferenceError, match="died 4 times"):
        asyncio.run(evaluated())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_results_are_not_written_where_another_user_could_read_and_change_them() -> None:
    Path("theirs").mkdir()
    os.chown("theirs", 12345, 12345)
    request = EvalRequest(config=config_file(), out="theirs")
    with pytest.raises(ConfigError, match="theirs: belongs to the user with id 12345"):
        asyncio.run(run_evaluation(request))
    assert list(Path("theirs").iterdir()) == []
