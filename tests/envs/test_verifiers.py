"""Environments written for the package verifiers: the same tasks, answers and rewards as their own rollouts give.

These are for its version 0.1; the last test runs those for 0.4.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from roll_flash.envs.adapters.verifiers.tasks import Verifiers
from roll_flash.envs.check.checks import check_environment
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.envs.registration import make_env
from roll_flash.errors import ConfigError, EnvError

pytestmark = pytest.mark.adapters
ROOT = Path(__file__).parents[2]

SUMS = '''
import asyncio
import csv
import sqlite3
import subprocess
import sys

import httpx
import openai
import verifiers as vf
from datasets import Dataset


def load_environment(kind="single", fault=""):
    rows = Dataset.from_list([{"question": f"{a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(3)])
    held_out = Dataset.from_list([{"question": "40 plus 2?", "answer": "42"}])

    def right(completion, answer):
        if fault == "reward":
            raise ConnectionError("the judge is down")
        if fault == "judge":  # as verifiers' JudgeRubric raises for each error of its endpoint
            answer = httpx.Response(int(completion[-1]["content"]), request=httpx.Request("POST", "http://judge"))
            said = "This model's maximum context length is 4096 tokens."
            raise RuntimeError("Judge model API error") from openai.APIStatusError(said, response=answer, body=None)
        return float(completion[-1]["content"].strip() == answer)

    async def short(completion, **kwargs):
        return float(len(completion[-1]["content"]) < 5)

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the one
            b: the other
        """
        return a + b

    def finds(completion, answer):
        return float(next(line for line in completion[-1]["content"].splitlines() if line == answer) == answer)

    async def finds_later(completion, answer):
        return finds(completion, answer)

    def solves(completion, answer):
        raise NotImplementedError("no solution of this kind")

    def far(completion, answer):
        return -abs(float(completion[-1]["content"]) - float(answer))

    guesses = []

    def guess(number: float = 7.0) -> str:
        """Say a number.

        Args:
            number: any
        """
        guesses.append(number)
        return "noted"

    def near(completion, answer):
        return min(1.0, 1 / (1 + abs(guesses.pop() - float(answer)))) if guesses else 0.0

    def reads(completion, answer):
        said = float(completion[-1]["content"])
        return 1.0 if said == float(answer) else said - said

    async def halves(number: int) -> float:
        """Half of a number, slowly."""
        await asyncio.sleep(0.05)
        return 1 / number

    class Insist(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["asked"] = 0

        async def env_response(self, messages, state, **kwargs):
            state["asked"] += 1
            if fault == "step":
                raise vf.InfraError("their machine is gone")
            if messages[-1]["content"].strip() == state["answer"]:
                state["final_env_response"] = [vf.UserMessage(content="Well done.")]
                return state["final_env_response"]
            return [vf.UserMessage(content=f"No. Try {state['asked'] + 1}.")]

    def last_word(completion, answer, state):
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        return float(said[-1].strip() == answer) / len(said)

    def compared(states):
        return [0.0 for _ in states]

    def runs(completion, answer):
        how, _, said = completion[-1]["content"].partition(" ")
        if how == "query":
            return float(sqlite3.connect(fault or ":memory:").execute(said).fetchone() == (int(answer),))
        if how == "table":
            return float(next(csv.reader([said], strict=True)) == [answer])
        if how == "exec":
            exec(said, found := {})
            return float(found["x"] == int(answer))
        command = [sys.executable, "-I", "-c", said]
        program = subprocess.run(command, check=True, timeout=5, capture_output=True, text=True)
        return float(program.stdout.strip() == answer)

    match kind:
        case "runs":
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[runs]))
        case "reads":
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[reads]))
        case "finds" | "finds_later" | "solves" | "far":
            function = {"finds": finds, "finds_later": finds_later, "solves": solves, "far": far}[kind]
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[function], weights=[2.0]))
        case "guess":
            return vf.ToolEnv(dataset=rows, tools=[guess], rubric=vf.Rubric(funcs=[near]), max_turns=4)
        case "slow tool":
            return vf.ToolEnv(
                dataset=rows, tools=[halves], stop_errors=[ArithmeticError], rubric=vf.Rubric(funcs=[right])
            )
        case "single":
            rubric = vf.Rubric(funcs=[right, short], weights=[0.8, 0.2])
            return vf.SingleTurnEnv(dataset=rows, eval_dataset=held_out, system_prompt="Be brief.", rubric=rubric)
        case "tool":
            return vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)
        case "multi":
            return Insist(dataset=rows, rubric=vf.Rubric(funcs=[last_word]), max_turns=3)
        case "group":
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[compared]))
    raise ValueError(f"no such kind: {kind}")
'''


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("verifiers") / "sums.py"
    path.write_text(SUMS)
    return str(path)


def play(env: Verifiers, *actions: str, seed: int = 7) -> tuple[list[str], float, dict[str, Any]]:
    """What the model is told, and the last reward and info. Seed 7 asks for 2 plus 1."""

    async def run() -> tuple[list[str], float, dict[str, Any]]:
        messages, _ = await env.reset(seed=seed)
        told, earned, info = ["\n".join(str(message["content"]) for message in messages)], 0.0, {}
        for action in actions:
            news, earned, terminated, _, info = await env.step(action)
            told.append("".join(str(message["content"]) for message in news if isinstance(message, dict)))
            if terminated:
                break
        await env.close()
        return told, earned, info

    return asyncio.run(run())


def test_an_environment_is_fit_to_train_on(sums: str) -> None:
    report = check_environment("Verifiers-v0", {"env": sums, "env_args": {"kind": "multi"}}, seeds=3, timeout_s=120)
    assert report.ok, report.as_table()


def test_a_single_turn_earns_what_the_rubric_says(sums: str) -> None:
    told, earned, info = play(Verifiers(sums), "3")
    assert told[0] == "Be brief.\n2 plus 1?"
    assert (earned, info["success"], info["rewards"]["right"]) == (1.0, True, 1.0)
    _, earned, info = play(Verifiers(sums), "It is 3.")
    assert (earned, info["success"], info["rewards"]) == (0.0, False, {"right": 0.0, "short": 0.0, "num_turns": 1.0})


def test_held_out_seeds_take_the_evaluation_data(sums: str) -> None:
    assert "40 plus 2?" in play(Verifiers(sums), seed=HELD_OUT_SEEDS + 5)[0][0]
    assert "40 plus 2?" in play(Verifiers(sums, split="eval"))[0][0]
    assert "40 plus 2?" not in play(Verifiers(sums, split="train"), seed=HELD_OUT_SEEDS)[0][0]


def test_tools_are_described_called_and_counted_and_wrong_calls_are_explained(sums: str) -> None:
    call = '<tool_call>{"name": "%s", "arguments": {"a": 2, "b": 1}}</tool_call>'
    told, earned, info = play(Verifiers(sums, {"kind": "tool"}, tool_format="hermes"), call % "add", call % "sum", "3")
    assert '"name": "add"' in told[0]
    assert "\n3\n" in told[1]
    assert "There is no tool 'sum'" in told[2]
    assert (earned, info["rewards"]["add_calls"]) == (1.0, 1.0)
    assert info["tools"]["add"]["calls"] == 1
    _, told_of = asyncio.run(Verifiers(sums, {"kind": "tool"}).reset(seed=7))
    assert told_of["tool_schemas"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("kind", ["finds", "finds_later", "solves"])
def test_an_answer_in_which_a_reward_function_finds_nothing_earns_nothing_and_is_a_sample(sums: str, kind: str) -> None:
    """`next` without anything to return: Python makes another error of that, which counted as one of the machine."""
    _, earned, info = play(Verifiers(sums, {"kind": kind}), "four")
    assert (earned, info["success"], f"{kind} raised" in info["score_error"]) == (0.0, False, True)
    assert kind == "solves" or play(Verifiers(sums, {"kind": kind}), "3")[1] == 2.0


def test_an_answer_that_is_wrong_by_more_than_can_be_trained_is_a_sample(sums: str) -> None:
    assert play(Verifiers(sums, {"kind": "far"}), "13")[1] == -20.0
    for said in ("1e308", "-1e9"):
        assert play(Verifiers(sums, {"kind": "far"}), said)[1] == -1e6


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_tool_gets_no_number_that_could_pass_for_the_right_one(sums: str, number: str) -> None:
    """`min(1.0, nan)` is 1.0. A call that is refused is not made, also if all of its arguments have defaults."""
    call = '<tool_call>{"name": "guess", "arguments": {"number": %s}}</tool_call>'
    told, earned, info = play(Verifiers(sums, {"kind": "guess"}, tool_format="hermes"), call % number, "done")
    assert "the numbers in its arguments must be finite" in told[1]
    assert (earned, info["tools"]["guess"]) == (0.0, {**info["tools"]["guess"], "calls": 1, "errors": 1})
    assert play(Verifiers(sums, {"kind": "guess"}, tool_format="hermes"), call % "3", "done")[1] == 1.0


def test_several_turns_are_answered_by_env_response_until_it_ends_them(sums: str) -> None:
    told, earned, info = play(Verifiers(sums, {"kind": "multi"}), "5", "3")
    assert told[1:] == ["No. Try 2.", ""]
    assert (earned, info["stop_condition"]) == (0.5, "has_final_env_response")
    _, earned, info = play(Verifiers(sums, {"kind": "multi"}), "5", "5", "5")
    assert (earned, info["stop_condition"]) == (0.0, "max_turns_reached")


def test_their_own_rollout_with_the_same_answers_earns_the_same(sums: str) -> None:
    """PlayedEpisode by verifiers' own loop, with a client of theirs that says our lines."""
    import verifiers as vf
    from verifiers.clients import Client

    from roll_flash.envs.adapters.verifiers.loading import load

    lines = iter(["5", "3"])

    class Says(Client):  # type: ignore[type-arg]
        setup_client = to_native_tool = to_native_prompt = get_native_response = None
        raise_from_native_response = from_native_response = close = None

        async def get_response(self, *args: Any, **kwargs: Any) -> vf.Response:
            message = vf.ResponseMessage(content=next(lines), finish_reason="stop", is_truncated=False)
            return vf.Response(id="1", created=0, model="m", message=message)

    theirs = load(sums, {"kind": "multi"})

    async def rollout() -> Any:
        state = await theirs.rollout(dict(theirs.get_dataset()[7]), Says(None), "m", {})
        await theirs.rubric.score_rollout(state)
        return state

    state = asyncio.run(rollout())
    _, earned, info = play(Verifiers(sums, {"kind": "multi"}), "5", "3")
    assert (state["reward"], state["metrics"]) == (earned, info["rewards"])


@pytest.mark.parametrize(
    ("args", "actions", "reason"),
    [
        ({"fault": "reward"}, ["3"], "right raised ConnectionError: the judge is down"),
        ({"fault": "judge"}, ["500"], "right raised RuntimeError: Judge model API error"),
        ({"kind": "runs", "fault": "/no/base"}, ["query select 3"], "runs raised OperationalError: unable to open"),
        ({"kind": "multi", "fault": "step"}, ["5"], "env_response: InfraError: their machine is gone"),
    ],
)
def test_what_fails_for_no_fault_of_the_model_is_no_zero(
    sums: str, args: dict[str, str], actions: list[str], reason: str
) -> None:
    with pytest.raises(EnvError, match=reason):
        play(Verifiers(sums, args), *actions)


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        ("I do not know", "reads raised ValueError"),
        ("nan", "reads returned nan"),
        ("1e999", "reads returned nan"),
        ("", "reads raised ValueError"),
    ],
)
def test_an_answer_that_a_reward_function_cannot_read_is_worth_nothing(sums: str, said: str, trouble: str) -> None:
    """As for verifiers; no sample would be better for a policy than the 0 it deserves."""
    _, earned, info = play(Verifiers(sums, {"kind": "reads"}), said)
    assert (earned, info["success"]) == (0.0, False)
    assert trouble in info["score_error"]
    assert play(Verifiers(sums, {"kind": "reads"}), "3.0")[1] == 1.0


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("program print(3)", "program 1/0", "CalledProcessError"),
        ("program print(3)", "program while True: pass", "TimeoutExpired"),
        ("query select 3", "query selekt 3", "OperationalError"),
        ("query select 3", "query select 3; select 4", "ProgrammingError"),
        ("table 3", 'table "3', "Error"),
        ("exec x = 3", "exec raise SystemExit", "SystemExit"),
    ],
)
def test_a_program_or_query_that_cannot_run_is_worth_nothing(sums: str, right: str, wrong: str, error: str) -> None:
    env = Verifiers(sums, {"kind": "runs"})
    assert play(env, right)[1] == 1.0
    _, earned, info = play(env, wrong)
    assert (earned, info["success"]) == (0.0, False)
    assert f"runs raised {error}" in info["score_error"]


def test_an_answer_that_exceeds_the_context_of_a_judge_is_worth_nothing(sums: str) -> None:
    _, _, info = play(Verifiers(sums, {"fault": "judge"}), "400")
    assert (info["rewards"]["right"], info["success"]) == (0.0, False)
    assert "Judge model API error" in info["score_error"]


CALL = '<tool_call>{"name": "halves", "arguments": {"number": %d}}</tool_call>'


def test_a_call_that_ends_the_rollout_by_its_arguments_is_scored(sums: str) -> None:
    _, earned, info = play(Verifiers(sums, {"kind": "slow tool"}), CALL % 0, "3")
    assert (earned, info["success"], info["stop_condition"]) == (0.0, False, "has_error")
    assert "ToolCallError" in info["score_error"]


def test_many_slow_calls_of_one_turn_are_told_that_its_time_is_over(sums: str) -> None:
    """They made the step fail by its time, which is no sample."""
    env = Verifiers(sums, {"kind": "slow tool"})
    env.step_timeout_s = 1.0
    began = time.monotonic()
    told, earned, _ = play(env, (CALL % 4) * 256, "3")
    assert time.monotonic() - began < 5  # alone they would take 13 s
    assert "0.25" in told[1]
    assert "given up: the calls of this turn have taken all of its time" in told[1]
    assert "not run: the calls of this turn have taken all of its time" in told[1]
    assert earned == 1.0


def test_an_episode_that_the_run_ends_is_scored_as_it_stands(sums: str) -> None:
    async def run() -> tuple[float, dict[str, Any]]:
        env = Verifiers(sums, {"kind": "tool"})
        await env.reset(seed=7)
        await env.step('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 1}}</tool_call>')
        return await env.conclude()

    earned, info = asyncio.run(run())
    assert (earned, info["success"]) == (0.0, False)


def test_wrong_names_and_what_cannot_be_played_are_one_line(sums: str, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    for kwargs, reason in (
        ({"env": "no-such-environment"}, "no-such-environment.*is installed"),
        ({"env": str(tmp_path / "empty.py")}, "no function load_environment"),
        ({"env": sums, "env_args": {"kind": "cake"}}, "ValueError: no such kind: cake"),
        ({"env": sums, "env_args": {"colour": 1}}, "TypeError: .*colour"),
        ({"env": sums, "env_args": {"kind": "group"}}, "scores groups of rollouts"),
        ({"env": sums, "split": "test"}, "split must be"),
    ):
        with pytest.raises(ConfigError, match=reason) as error:
            make_env("Verifiers-v0", **kwargs)
        assert "\n" not in str(error.value)


def test_it_is_loaded_in_any_thread_and_leaves_ctrl_c_alone(sums: str) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(Verifiers(sums, {"kind": "single", "fault": "thread"})))
    thread.start()
    thread.join(60)
    Verifiers(sums, {"kind": "single", "fault": "here"})
    assert len(made) == 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_tasksets_of_verifiers_0_4_pass_their_tests_in_a_process_that_has_it() -> None:
    """No environment holds two versions of a package."""
    newer = Path(sys.prefix) / "verifiers-0.4"
    assert (newer / "verifiers").is_dir(), f"{newer} is missing; `make test-adapters` installs it"
    path = os.pathsep.join([str(newer), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/envs/verifiers_0_4.py"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
