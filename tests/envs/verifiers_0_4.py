"""Tasksets of verifiers 0.4: the same tasks and rewards as their own runs give. `test_verifiers.py` runs these tests in
a process that has this version."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_run import Says, agent_episode

from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.envs.registration import make_env
from roll_flash.errors import ConfigError
from roll_flash.rollout.episodes.episode import EpisodeFailed
from roll_flash.types import Trajectory

SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        said = trace.assistant_messages[-1].content.strip()
        if said == "down":
            raise ConnectionError("the judge is down")
        return float(int(said) == int(self.data.answer))

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        said = trace.assistant_messages[-1].content
        return float("nan") if said == "nan" else float(len(said) < 5)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    largest: int = 4
    split: str = "train"


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        if self.config.split == "test":
            yield SumTask(SumData(prompt="40 plus 2?", answer="42"), self.config.task)
            return
        for a in range(self.config.largest):
            data = SumData(prompt=f"{a} plus 2?", system_prompt="Be brief.", answer=str(a + 2))
            yield SumTask(data, self.config.task)


__all__ = ["SumsTaskset"]
"""
INSIST = '''
class InsistConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class Insist(vf.Env[InsistConfig]):
    """Asks again until the answer is right, at most three times."""

    async def run(self, task, agents):
        async with agents.solver.interaction(task) as talk:
            await talk.turn()
            for _ in range(2):
                if talk.trace.assistant_messages[-1].content.strip() == task.data.answer:
                    return
                await talk.turn("No. Try again.")


__all__ = ["SumsTaskset", "Insist"]
'''


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("verifiers") / "sums.py"
    path.write_text(SUMS)
    return str(path)


async def episode(env: str, says: Says, seed: int = 0, **kwargs: Any) -> Trajectory:
    return await agent_episode("Verifiers-v0", seed, says, env=env, **kwargs)


def play(*args: Any, **kwargs: Any) -> Trajectory:
    return asyncio.run(episode(*args, **kwargs))


def test_a_task_is_asked_and_earns_what_its_rewards_say(sums: str) -> None:
    variables = dict(os.environ)
    trajectory = play(sums, lambda messages: "3", seed=5)
    assert [message["content"] for message in trajectory.messages] == ["Be brief.", "1 plus 2?", "3"]
    assert (trajectory.reward, trajectory.success) == (1.0, True)
    assert trajectory.info["rewards"] == {"right": 0.8, "short": 0.2, "turns": 1.0}
    trajectory = play(sums, lambda messages: "12345", seed=5)
    assert (trajectory.reward, trajectory.success, trajectory.info["rewards"]["right"]) == (0.0, False, 0.0)
    assert dict(os.environ) == variables, "no key stays in the environment"


def test_held_out_seeds_take_the_tasks_of_other_arguments(sums: str) -> None:
    for seed, split, asked in ((HELD_OUT_SEEDS, "test", "40 plus 2?"), (0, "test", "0 plus 2?")):
        trajectory = play(sums, lambda messages: "42", seed=seed, eval_args={"split": split})
        assert trajectory.messages[-2]["content"] == asked


def test_an_answer_that_a_reward_cannot_read_is_worth_nothing_and_other_errors_are_no_sample(sums: str) -> None:
    trajectory = play(sums, lambda messages: "I do not know")
    assert (trajectory.reward, "right raised ValueError" in trajectory.info["score_error"]) == (0.0, True)
    trajectory = play(sums, lambda messages: "nan")
    assert (trajectory.reward, "short returned nan" in trajectory.info["score_error"]) == (0.0, True)
    with pytest.raises(EpisodeFailed, match="the judge is down") as failed:
        play(sums, lambda messages: "down")
    assert failed.value.cause == "env_error"


READERS = """

class SumsTask(SumTask):
    @vf.metric
    async def read(self, trace: vf.Trace) -> float:
        return float(int(trace.assistant_messages[-1].content))

    @vf.stop
    async def is_even(self, trace: vf.Trace) -> bool:
        return int(trace.assistant_messages[-1].content) % 2 == 0 if trace.assistant_messages else False

    @vf.reward(weight=1.0)
    async def several(self, trace: vf.Trace) -> dict[str, float]:
        return {"one": float("nan") if trace.assistant_messages[-1].content == "7" else 0.0}


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        yield SumsTask(SumData(prompt="0 plus 2?", answer="2"), self.config.task)
"""


@pytest.mark.parametrize(("said", "what"), [("two", "read raised ValueError"), ("7", "several returned {'one': nan}")])
def test_an_answer_that_a_metric_or_a_stop_condition_cannot_read_is_scored_too(
    tmp_path: Path, said: str, what: str
) -> None:
    (tmp_path / "readers.py").write_text(SUMS + READERS)
    trajectory = play(str(tmp_path / "readers.py"), lambda messages: said)
    assert trajectory.reward == pytest.approx(0.2), "for being short"
    assert what in trajectory.info["score_error"]


def test_an_environment_of_theirs_continues_the_conversation_and_the_limit_of_turns_ends_it(tmp_path: Path) -> None:
    (tmp_path / "insist.py").write_text(SUMS + INSIST)
    answers = iter(["5", "2"])
    trajectory = play(str(tmp_path / "insist.py"), lambda messages: next(answers))
    said = [message["content"] for message in trajectory.messages]
    assert said == ["Be brief.", "0 plus 2?", "5", "No. Try again.", "2"]
    assert (trajectory.reward, len(trajectory.turns), trajectory.branches) == (1.0, 2, ())
    trajectory = play(str(tmp_path / "insist.py"), lambda messages: "5", max_turns=2)
    assert (len(trajectory.turns), trajectory.end, trajectory.reward) == (2, "max_turns", 0.2)


def test_an_answer_that_an_environment_of_theirs_cannot_read_is_worth_nothing_and_a_sample(tmp_path: Path) -> None:
    """The package has no text for an empty answer."""
    (tmp_path / "insist.py").write_text(SUMS + INSIST)
    trajectory = play(str(tmp_path / "insist.py"), lambda messages: "")
    assert (trajectory.reward, trajectory.success, len(trajectory.turns)) == (0.0, False, 1)
    assert "run raised AttributeError" in trajectory.info["score_error"]
    failing = INSIST.replace("await talk.turn()", 'await talk.turn()\n            raise ConnectionError("it is down")')
    (tmp_path / "down.py").write_text(SUMS + failing)
    with pytest.raises(EpisodeFailed, match="it is down"):
        play(str(tmp_path / "down.py"), lambda messages: "")


READS = "trace.assistant_messages[-1].content.strip()"
ONCE = INSIST.replace(f"if talk.{READS} == task.data.answer", "if True")
OF_TASK = f"    def finalize(self, trace):\n        {READS}\n\n    @vf.metric"
OF_ENV = (
    f"\n    async def finalize(self, task, episode):\n        trace = episode.traces[0]\n        {READS}\n\n__all__"
)
FINALIZE = {
    "of the task": SUMS.replace("    @vf.metric", OF_TASK),
    "of the environment": SUMS + ONCE.replace("\n\n__all__", OF_ENV),
}


@pytest.mark.parametrize("where", FINALIZE)
def test_an_answer_that_the_end_of_an_episode_cannot_read_is_worth_nothing_and_a_sample(
    where: str, tmp_path: Path
) -> None:
    (tmp_path / "finalize.py").write_text(FINALIZE[where])
    assert play(str(tmp_path / "finalize.py"), lambda messages: "2").reward == 1.0
    trajectory = play(str(tmp_path / "finalize.py"), lambda messages: "")
    assert (trajectory.reward, len(trajectory.turns)) == (0.0, 1)
    assert "finalize raised AttributeError" in trajectory.info["score_error"]


def test_code_that_misses_the_reward_of_a_judge_that_is_down_is_not_the_fault_of_an_answer(tmp_path: Path) -> None:
    run, ended, rest = INSIST.partition("            await talk.turn()\n")
    reads = '        talk.trace.rewards["right"].value\n\n\n__all__' + rest.partition("__all__")[2]
    (tmp_path / "judged.py").write_text(SUMS + run + ended + reads)
    assert play(str(tmp_path / "judged.py"), lambda messages: "2").reward == 1.0
    with pytest.raises(EpisodeFailed, match="the judge is down"):
        play(str(tmp_path / "judged.py"), lambda messages: "down")


def test_the_taskset_of_the_page_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        (Path(__file__).parents[2] / "docs" / "adapters.md").read_text().partition("### Tasksets of verifiers 0.4")[2]
    )
    source, config = (re.findall(rf"```{language}\n(.*?)```", page, re.S)[0] for language in ("python", "yaml"))
    (tmp_path / "sums_taskset.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    ((entry,),) = yaml.safe_load(config).values()
    arguments = dict(entry["kwargs"])
    for seed, asked, answer in ((1, "1 plus 2?", "3"), (HELD_OUT_SEEDS, "plus 2?", "no")):
        trajectory = play(says=lambda _, said=answer: said, seed=seed, **arguments)
        assert asked in trajectory.messages[-2]["content"]
        assert trajectory.reward == float(answer == "3")


def test_episodes_at_the_same_time_are_kept_apart(sums: str) -> None:
    async def several() -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode(sums, lambda _, n=n: str(n + 2), seed=n)) for n in range(4)]
        return [task.result() for task in tasks]

    assert [trajectory.reward for trajectory in asyncio.run(several())] == [1.0] * 4


def test_what_cannot_be_played_is_one_line(sums: str, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "two.py").write_text(
        SUMS + INSIST.replace("solver: vf", "asker: vf.AgentConfig = vf.AgentConfig()\n    solver: vf")
    )
    (tmp_path / "box.py").write_text(
        SUMS.replace(
            "class SumTask(vf.Task[SumData]):", "class SumTask(vf.Task[SumData]):\n    NEEDS_CONTAINER = True\n"
        )
    )
    for kwargs, reason in (
        ({"env": "no-such-taskset"}, "no-such-taskset.*not found"),
        ({"env": str(tmp_path / "empty.py")}, "defines no `__all__`"),
        ({"env": str(tmp_path / "two.py")}, "has the agents asker, solver"),
        ({"env": str(tmp_path / "box.py")}, "needs a container"),
        ({"env": sums, "env_args": {"colour": 1}}, "ValidationError: .*colour"),
        ({"env": sums, "env_args": {"largest": 0}}, "has no tasks"),
    ):
        with pytest.raises(ConfigError, match=reason) as error:
            make_env("Verifiers-v0", **kwargs)
        assert "\n" not in str(error.value)
