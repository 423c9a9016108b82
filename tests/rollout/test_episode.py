"""Episodes against environments that misbehave in every way, with a scripted policy in place of a model."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from roll_flash.config.tree import RolloutConfig
from roll_flash.envs import Env, SandboxEnv, ToolEnv, register_env, reward, tool
from roll_flash.envs.hosting.environment_threads import EnvironmentThreads
from roll_flash.envs.hosting.environments import (
    MAX_CHARACTERS,
    AsyncEnvironment,
    BadRewardError,
    EnvironmentMaker,
    _as_messages,
    _as_reward,
    check_environments,
)
from roll_flash.errors import ConfigError, InferenceError, ModelError
from roll_flash.processes.background import call_in_thread
from roll_flash.rollout.episodes.conversation import Action, ContextFullError
from roll_flash.rollout.episodes.episode import Deadlines, Progress, run_episode
from roll_flash.sandboxes import SandboxError
from roll_flash.types import Branch, EpisodeFailure, EpisodeSpec, Message, SamplingParams, Task, Trajectory

DEADLINES = Deadlines(generate_s=1.0, step_s=1.0, episode_s=60.0)
PATIENT = Deadlines(60.0, 60.0, 60.0)


class ScriptedPolicy:
    """A stand-in for a model: says the given texts, or raises the given errors, one token each."""

    def __init__(self, *script: str | BaseException, delay_s: float = 0.0) -> None:
        self._script = list(script)
        self._delay_s = delay_s
        self._messages: list[Message] = []
        self._said = 0

    tools_shown = None

    def begin(self, messages: Sequence[Message], tools: Any = None) -> None:
        self._messages = list(messages)

    async def act(self, timeout_s: float) -> Action:
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(self._delay_s)
        item = self._script.pop(0)
        if isinstance(item, BaseException):
            raise item
        self._messages.append({"role": "assistant", "content": item})
        self._said += 1
        return Action(item, self._said, self._said + 1, "stop", self._delay_s)

    def observe(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)

    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    def samples(self) -> list[Branch]:
        count = self._said + 1
        mask = np.arange(count) > 0
        tokens, versions = np.arange(count, dtype=np.int32), np.where(mask, 0, -1).astype(np.int32)
        return [Branch(tokens, mask, np.zeros(count, np.float32), versions, (), (), prompt_length=1)]


class Echo(Env):
    """Counts to `turns`; misbehaves in the way `fault` names."""

    closed = 0

    def __init__(self, turns: int = 2, fault: str = "") -> None:
        self._turns = turns
        self._fault = fault

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await self._misbehave("reset")
        info = {"tool_schemas": [{"name": "no schema"}]} if self._fault == "odd tools" else {}
        return "" if self._fault == "reset says nothing" else f"seed {seed}", info

    async def step(self, action: str) -> Any:
        await self._misbehave("step")
        self._turns -= 1
        done = self._turns == 0
        reward: Any = {"nan": float("nan"), "inf": float("inf"), "no number": "much"}.get(self._fault, 0.5)
        observation: Any = 7 if self._fault == "observation" else f"you said {action}"
        info: Any = {"no info": None, "array": {"success": np.ones(2)}}.get(self._fault, {"success": done})
        return observation, reward, done, False, info

    async def close(self) -> None:
        Echo.closed += 1
        await self._misbehave("close")

    async def _misbehave(self, where: str) -> None:
        if self._fault == f"{where} hangs":
            await asyncio.sleep(60)
        if self._fault == f"{where} raises":
            raise RuntimeError("boom")
        if self._fault == f"{where} exits":
            sys.exit("enough")
        if self._fault == f"{where} loses its sandbox":
            raise SandboxError("the container is gone")


class Sleeps(ToolEnv):
    """A tool that takes as long as a model likes."""

    max_turns = 30

    async def begin(self, seed: int) -> str:
        return "go"

    @tool()
    async def wait(self) -> str:
        """Waits."""
        await asyncio.sleep(0.2)
        return "waited"

    @reward()
    def earned(self) -> float:
        return 0.0


class Blocking(gymnasium.Env[str, str]):
    """A plain gymnasium environment that blocks its thread until all four of them do."""

    all_four = threading.Barrier(4)

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action: str) -> Any:
        self.all_four.wait(timeout=30)
        return "bye", 1.0, True, False, {"success": True}


def make_spec(max_turns: int = 5) -> EpisodeSpec:
    return EpisodeSpec("e", "g", 0, Task("t", "Echo", 3), SamplingParams(), max_turns)


def play(
    env: gymnasium.Env[Any, Any], policy: ScriptedPolicy, deadlines: Deadlines = DEADLINES, max_turns: int = 5
) -> Trajectory | EpisodeFailure:
    async def open_env() -> AsyncEnvironment:
        return AsyncEnvironment(env, threads)

    with ThreadPoolExecutor(2) as threads:
        return asyncio.run(run_episode(make_spec(max_turns), open_env, policy, deadlines, Progress()))


def test_an_episode_becomes_a_trajectory_with_every_turn() -> None:
    outcome = play(Echo(turns=2), ScriptedPolicy("a", "b"))
    assert isinstance(outcome, Trajectory)
    assert [(t.action, t.observation, t.reward) for t in outcome.turns] == [
        ("a", "you said a", 0.5),
        ("b", "you said b", 0.5),
    ]
    assert outcome.reward == 1.0
    assert outcome.success is True
    assert outcome.end == "terminated"
    assert [m["content"] for m in outcome.messages] == ["seed 3", "a", "you said a", "b"]


def test_a_blocking_environment_runs_in_a_thread_and_others_go_on() -> None:
    async def four() -> None:
        with ThreadPoolExecutor(4) as threads:

            async def open_env() -> AsyncEnvironment:
                return AsyncEnvironment(Blocking(), threads)

            runs = [run_episode(make_spec(), open_env, ScriptedPolicy("x"), PATIENT, Progress()) for _ in range(4)]
            outcomes = await asyncio.gather(*runs)
            assert all(isinstance(outcome, Trajectory) for outcome in outcomes), outcomes

    asyncio.run(four())


def test_the_log_says_when_each_turn_and_each_failure_began() -> None:
    before_s = time.time()
    outcome = play(Echo(turns=2), ScriptedPolicy("a", "b", delay_s=0.02))
    assert isinstance(outcome, Trajectory)
    first, second = (turn.started_s for turn in outcome.turns)
    assert first is not None
    assert second is not None
    assert before_s <= outcome.started_s <= first < second <= outcome.finished_s
    failure = play(Echo(fault="step raises"), ScriptedPolicy("a"))
    assert isinstance(failure, EpisodeFailure)
    assert failure.started_s is not None
    assert failure.finished_s is not None
    assert outcome.finished_s <= failure.started_s <= failure.finished_s <= time.time()


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_meanwhile_makes_an_episode_neither_longer_nor_negative(
    by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog learns from it how long episodes usually take."""
    clock = time.time

    class SetsTheClock(Echo):
        async def step(self, action: str) -> Any:
            monkeypatch.setattr(time, "time", lambda: clock() + by_s)
            return await super().step(action)

    outcome = play(SetsTheClock(), ScriptedPolicy("a", "b"))
    assert isinstance(outcome, Trajectory)
    first, second = (turn.started_s for turn in outcome.turns)
    assert first is not None
    assert second is not None
    assert outcome.started_s <= first <= second <= outcome.finished_s < outcome.started_s + PATIENT.episode_s


def test_an_episode_ends_at_its_turn_limit() -> None:
    outcome = play(Echo(turns=9), ScriptedPolicy("a", "b", "c"), max_turns=2)
    assert isinstance(outcome, Trajectory)
    assert (outcome.end, len(outcome.turns)) == ("max_turns", 2)


class CatchesAll(Env):
    """Catches its cancellation, as a bare `except` around a request does, and never ends by itself."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "go", {}

    async def step(self, action: str) -> Any:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(60.0)
        return "on", 1.0, False, False, {}


class ScoredAtTheEnd(ToolEnv):
    """Its only reward is for the whole episode."""

    async def begin(self, seed: int) -> str:
        return "work"

    @tool()
    async def work(self) -> str:
        """Work."""
        return "worked"

    @reward()
    async def has_worked(self) -> bool:
        return self.used("work").calls > 1


class Slow(ToolEnv):
    """Three calls may take longer than a step."""

    @tool(timeout_s=1.5)
    async def rest(self) -> None:
        """Rest."""
        await asyncio.sleep(60)

    async def begin(self, seed: int) -> str:
        return "rest"

    @reward()
    async def is_lazy(self) -> float:
        return 0.0


def test_calls_that_a_model_makes_slow_are_cut_and_do_not_void_its_episode() -> None:
    """Else a policy could get rid of episodes that go badly."""
    calls = '{"name": "rest", "parameters": {}}\n' * 3
    outcome = play(Slow(), ScriptedPolicy(calls, "done"), Deadlines(generate_s=5.0, step_s=4.0, episode_s=30.0))
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 0.0
    told = outcome.turns[0].observation
    assert "rest took longer than 1.5 s" in told
    assert told.count("took longer than") == 2
    assert told.count("not run: the calls of this turn have taken all of its time") == 1


EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
CHECKED = {"command": "x", "instruction": "x", "verifier": "x", "partial_credit": "x"}


@pytest.mark.parametrize(
    ("env_id", "kwargs", "step_s", "episode_s"),
    [
        ("TaskFolder-v0", {"folder": str(EXAMPLES)}, 160, 220),
        ("TaskFolder-v0", {"folder": str(EXAMPLES), "command_timeout_s": 5}, 105, 220),
        ("AgentEnv-v0", {**CHECKED, "verifier_timeout_s": 30, "time_limit_s": 900}, 65, 965),
    ],
)
def test_limits_that_a_slow_model_could_use_to_void_its_episodes_are_refused_at_the_start(
    env_id: str, kwargs: dict[str, Any], step_s: float, episode_s: float
) -> None:
    enough = {"step_timeout_s": step_s, "episode_timeout_s": episode_s}
    tasks = [Task("t", env_id, 0, kwargs)]
    check_environments(tasks, RolloutConfig(**enough))
    for name, least_s in enough.items():
        with pytest.raises(ConfigError, match=rf"{env_id}: rollout.{name}=60 .* to {least_s} or more"):
            check_environments(tasks, RolloutConfig(**{**enough, name: 60}))


WORK = '{"name": "work", "parameters": {}}'


@pytest.mark.parametrize(
    ("script", "end"), [([WORK, WORK], "max_turns"), ([WORK, WORK, ContextFullError("full")], "context_limit")]
)
def test_an_episode_that_the_run_ends_is_scored_as_it_stands(script: list[Any], end: str) -> None:
    outcome = play(ScoredAtTheEnd(), ScriptedPolicy(*script), max_turns=len(script))
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.end, outcome.reward, outcome.success) == (end, 1.0, True)
    assert outcome.info["tools"]["work"]["calls"] == 2


def test_a_full_context_ends_the_episode_but_keeps_what_was_played() -> None:
    outcome = play(Echo(turns=9), ScriptedPolicy("a", ContextFullError("full")))
    assert isinstance(outcome, Trajectory)
    assert (outcome.end, len(outcome.turns)) == ("context_limit", 1)


@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [
        ("reset raises", "env_error", "reset raised RuntimeError: boom"),
        ("step raises", "env_error", "step raised RuntimeError: boom"),
        ("step exits", "env_error", "step raised SystemExit: enough"),
        ("reset hangs", "env_timeout", "reset took longer than 1 s"),
        ("step hangs", "env_timeout", "step took longer than 1 s"),
        ("nan", "bad_reward", "nan"),
        ("inf", "bad_reward", "inf"),
        ("no number", "bad_reward", "'much'"),
        ("observation", "env_error", "must be a str or a list of messages"),
        ("no info", "env_error", "info must be a dict, not NoneType"),
        ("array", "env_error", "step raised ValueError: The truth value of an array"),
        ("reset says nothing", "env_error", "reset returned an empty observation"),
        ("odd tools", "env_error", "reset raised KeyError: 'function'"),
        ("step loses its sandbox", "sandbox_error", "the container is gone"),
    ],
)
def test_what_an_environment_does_wrong_is_a_failure_with_its_cause(fault: str, cause: str, says: str) -> None:
    closed = Echo.closed
    outcome = play(Echo(fault=fault), ScriptedPolicy("a", "b"))
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == cause
    assert says in outcome.message
    assert Echo.closed == closed + 1


def test_a_conclude_that_returns_no_pair_is_told_what_is_wanted() -> None:
    class Concludes(Echo):
        async def conclude(self) -> Any:
            return 0.5

    outcome = play(Concludes(turns=9), ScriptedPolicy("a"), max_turns=1)
    assert isinstance(outcome, EpisodeFailure)
    assert "conclude returned float, not (reward, info)" in outcome.message


def test_an_error_of_an_environment_is_its_own_whatever_its_text_is() -> None:
    """Without a text it was called a mistake of ours, and a failure with megabytes went to the driver as it was."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Raises(Echo):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self._error = error

        async def step(self, action: str) -> Any:
            raise self._error

    mute, long = (play(Raises(error), ScriptedPolicy("a")) for error in (Mute(), KeyError("x" * 10_000_000)))
    assert isinstance(mute, EpisodeFailure)
    assert isinstance(long, EpisodeFailure)
    assert mute.cause == "env_error"
    assert mute.message.startswith("step raised Mute: no text, because of RuntimeError (test_episode.py:")
    assert (long.cause, len(long.message) < 11_000) == ("env_error", True)


@pytest.mark.parametrize("fault", ["close raises", "close hangs"])
def test_an_environment_that_cannot_close_keeps_its_trajectory(fault: str) -> None:
    outcome = play(Echo(fault=fault), ScriptedPolicy("a", "b"))
    assert isinstance(outcome, Trajectory)
    assert outcome.reward == 1.0
    assert "close" in outcome.info["close_error"]


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (ScriptedPolicy(InferenceError("server gone")), "generate_error"),
        (ScriptedPolicy("a", delay_s=60.0), "generate_timeout"),
        (ScriptedPolicy(ContextFullError("600 tokens")), "prompt_too_long"),
    ],
)
def test_what_goes_wrong_with_the_model_is_a_failure_with_its_cause(policy: ScriptedPolicy, cause: str) -> None:
    outcome = play(Echo(), policy)
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == cause


def test_an_environment_that_catches_everything_keeps_no_episode_beyond_its_deadline() -> None:
    policy = ScriptedPolicy("a", "b", "c")
    outcome = play(CatchesAll(), policy, Deadlines(60.0, 60.0, 0.2))
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == "episode_timeout"
    assert [message["content"] for message in policy.messages()] == ["go", "a", "on"]


def test_what_runs_out_in_a_thread_is_heard_of_at_once() -> None:
    """asyncio drops a StopIteration that a thread hands over, so that a step took as long as it may."""

    def first_of_none() -> Any:
        return next(iter(()))

    async def run() -> None:
        async with asyncio.timeout(30):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await call_in_thread(first_of_none)
            with pytest.raises(RuntimeError, match="StopIteration"):
                await asyncio.get_running_loop().run_in_executor(EnvironmentThreads(1), first_of_none)

    asyncio.run(run())


@pytest.mark.parametrize("method", ["begin", "observe"])
def test_what_a_chat_template_cannot_show_is_the_environments_failure(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It will be the same at the next attempt, so an evaluation does not try it again."""

    def refuse(*_: Any) -> None:
        raise ModelError("tiny: the chat template refuses the roles user, critic")

    policy = ScriptedPolicy("a", "b")
    monkeypatch.setattr(policy, method, refuse)
    outcome = play(Echo(), policy)
    assert isinstance(outcome, EpisodeFailure)
    assert (outcome.cause, outcome.message) == ("env_error", "tiny: the chat template refuses the roles user, critic")


def test_an_episode_over_its_deadline_says_what_it_waited_for() -> None:
    outcome = play(Echo(fault="step hangs"), ScriptedPolicy("a"), Deadlines(1.0, 60.0, 0.2))
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == "episode_timeout"
    assert "the environment's step" in outcome.message


def test_a_cancelled_episode_closes_its_environment() -> None:
    async def cancel() -> None:
        with ThreadPoolExecutor(1) as threads:

            async def open_env() -> AsyncEnvironment:
                return AsyncEnvironment(Echo(fault="step hangs"), threads)

            task = asyncio.create_task(run_episode(make_spec(), open_env, ScriptedPolicy("a"), PATIENT, Progress()))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()

    closed = Echo.closed
    asyncio.run(cancel())
    assert Echo.closed == closed + 1


def test_a_registered_async_environment_is_made_by_gymnasium() -> None:
    register_env("EchoForTest-v0", Echo, kwargs={"turns": 1})

    async def reset() -> Any:
        with ThreadPoolExecutor(1) as threads:
            env = await EnvironmentMaker(threads).open(Task("t", "EchoForTest-v0", 5))
            return await env.reset(5)

    assert asyncio.run(reset())[0] == [{"role": "user", "content": "seed 5"}]


class Takes(Echo):
    """Takes what it needs from the lists and objects that it was given, as environments do."""

    def __init__(self, words: list[str], rules: dict[str, int]) -> None:
        super().__init__(turns=rules.pop("turns"))
        self._words = words

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._words.pop(), {}


def test_no_episode_sees_what_another_has_changed_in_the_arguments_of_their_task() -> None:
    """Replicas of a group come to a worker with one task: each found what the others had left. Checks at the start,
    which make environments too, changed what all workers got."""
    register_env("TakesForTest-v0", Takes)
    task = Task("t", "TakesForTest-v0", 0, {"words": ["cat"], "rules": {"turns": 1}})

    async def openings() -> list[Any]:
        with ThreadPoolExecutor(1) as threads:
            maker = EnvironmentMaker(threads)
            return [(await (await maker.open(task)).reset(0))[0][0]["content"] for _ in range(3)]

    check_environments([task], RolloutConfig())
    assert asyncio.run(openings()) == ["cat"] * 3
    assert task.kwargs == {"words": ["cat"], "rules": {"turns": 1}}


class Long(ToolEnv):
    max_turns = 20


@pytest.mark.parametrize(
    ("env_id", "kwargs", "max_turns", "own"),
    [
        ("LongForTest-v0", {}, 8, 20),
        ("LongForTest-v0", {}, 9, None),
        ("LongForTest-v0", {"max_turns": 4}, 8, None),
        ("TextFrozenLake-v0", {"max_turns": 30}, 8, 30),
        ("TextFrozenLake-v0", {}, 8, None),
        ("StepsForTest-v0", {}, 8, 50),
    ],
)
def test_an_environment_that_the_default_of_a_run_would_cut_short_is_said(
    env_id: str, kwargs: dict[str, Any], max_turns: int, own: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """A class with 20 turns ended after 8 without a word."""
    register_env("LongForTest-v0", Long)
    gymnasium.register("StepsForTest-v0", Blocking, max_episode_steps=50)
    check_environments([Task("t", env_id, seed, kwargs, max_turns) for seed in range(2)], RolloutConfig())
    said = [line for line in capfd.readouterr().err.splitlines() if "has up to" in line]
    line = (
        f"{env_id} has up to {own} turns, but the run ends its episodes after 8, the default of max_turns of its entry"
    )
    assert said == ([] if own is None else [f"{line} of envs: set that to {own}"])


def test_a_sandbox_spec_that_is_none_is_one_clear_line() -> None:
    """A dict was an internal error: "unhashable type"."""

    class WithDict(SandboxEnv):
        sandbox_spec = {"memory_mb": 512}  # type: ignore[assignment]  # noqa: RUF012

    register_env("WithDict-v0", WithDict)
    with pytest.raises(ConfigError, match=r"sandbox_spec must be a roll_flash\.SandboxSpec, not \{'memory_mb': 512\}"):
        check_environments([Task("t", "WithDict-v0", 0)], RolloutConfig())


@pytest.mark.parametrize("how", ["class", "function"])
def test_an_environment_of_a_notebook_is_refused_since_no_worker_has_it(how: str) -> None:
    """It was found in this process, and each episode failed in a worker: "is not registered"."""

    class OfNotebook(Echo): ...

    def make(**kwargs: Any) -> Echo:
        return Echo(**kwargs)

    OfNotebook.__module__ = make.__module__ = "__main__"
    register_env(f"Notebook{how}-v0", OfNotebook if how == "class" else make)
    with pytest.raises(ConfigError, match=r"defined in the script or notebook .* an id such as my_envs\.py:"):
        check_environments([Task("t", f"Notebook{how}-v0", 0)], RolloutConfig())


@pytest.mark.parametrize(
    ("env_id", "kwargs", "says"),
    [
        ("Nobody-v0", {}, "is not registered"),
        ("ShelMath-v0", {}, "ShellMath"),
        ("no_such_module:Env-v0", {}, "no_such_module"),
        ("ShellMath-v0", {"operands": 1}, "operands >= 2"),
        ("ShellMath-v0", {"colour": 1}, "colour"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_clear_line(env_id: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_environments([Task("t", env_id, 0, kwargs)], RolloutConfig())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reward", ["1.0", b"1", None, [1], "nan", float("inf"), 1e300, -1e7, 10**400, float("nan")])
def test_a_reward_that_is_no_number_or_too_large_is_a_bad_reward(reward: Any) -> None:
    assert [_as_reward(good) for good in (True, 2, -1e6, np.float32(0.5))] == [1.0, 2.0, -1e6, 0.5]
    with pytest.raises(BadRewardError, match="the reward is"):
        _as_reward(reward)


def test_halves_of_characters_that_a_tool_echoes_can_be_tokenised() -> None:
    said = "a\ud800b"
    assert _as_messages(said) == [{"role": "user", "content": "a?b"}]
    assert _as_messages([{"role": "tool", "content": said}, {"role": "user", "content": None}]) == [
        {"role": "tool", "content": "a?b"},
        {"role": "user", "content": None},
    ]
    parts = [{"type": "text", "text": said}, {"type": "text", "text": "c"}]
    (message,) = _as_messages([{"role": "user", "content": parts}])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a?b"}, parts[1]]}


def test_an_answer_that_fits_into_no_context_is_not_written_whole_with_its_episode() -> None:
    """An action can make one of many megabytes, which were written twice with each episode."""

    class Prints(Echo):
        async def step(self, action: str) -> Any:
            return int(action) * "x", 0.0, False, False, {}

    longest = MAX_CHARACTERS
    found = play(Prints(), ScriptedPolicy(str(longest), str(10 * longest), ContextFullError("full")), PATIENT)
    assert isinstance(found, Trajectory)
    assert [len(turn.observation) == longest for turn in found.turns] == [True, False]
    assert len(found.turns[1].observation) < longest + 100
    assert f"[... {9 * longest} of {10 * longest} characters left out ...]" in found.turns[1].observation
    assert found.messages[-1]["content"] == found.turns[1].observation


def test_an_answer_in_parts_that_fits_into_no_context_is_not_kept_whole_either() -> None:
    class Prints(Echo):
        async def step(self, action: str) -> Any:
            parts = [{"type": "text", "text": int(action) * "x"}] * 2
            return [{"role": "user", "content": parts}], 0.0, False, False, {}

    found = play(Prints(), ScriptedPolicy("10", str(MAX_CHARACTERS), ContextFullError("full")), PATIENT)
    assert isinstance(found, Trajectory)
    assert found.messages[2]["content"] == [{"type": "text", "text": 10 * "x"}] * 2
    assert len(found.turns[1].observation) < MAX_CHARACTERS + 100
    assert "characters left out" in found.messages[-1]["content"]


def test_the_messages_of_an_answer_share_what_is_kept_of_it() -> None:
    """As of an action that calls 256 tools. With megabytes of each, a line of the log had gigabytes: a worker stood
    still for seconds, and the run could not be resumed."""

    class Calls(Echo):
        async def step(self, action: str) -> Any:
            return [{"role": "tool", "content": int(action) * "x"} for _ in range(64)], 0.0, False, False, {}

    share = MAX_CHARACTERS // 64
    found = play(Calls(), ScriptedPolicy(str(share), str(share + 1), ContextFullError("full")), PATIENT)
    assert isinstance(found, Trajectory)
    assert len(found.turns[0].observation) == 64 * share + 63
    assert len(found.turns[1].observation) < 64 * (share + 100)
    assert all("characters left out" in str(message["content"]) for message in found.messages[-64:])


def test_a_prompt_that_fits_into_no_context_is_refused_before_it_is_tokenised() -> None:
    class Novel(Echo):
        async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return "x" * (MAX_CHARACTERS + 1), {}

    found = play(Novel(), ScriptedPolicy("a"))
    assert isinstance(found, EpisodeFailure)
    assert (found.cause, "message of more than 4,194,304 characters" in found.message) == ("env_error", True)


def test_an_episode_whose_tools_are_made_slow_is_scored_and_not_given_up() -> None:
    """No sample would be better for a policy than the 0 it deserves."""
    policy = ScriptedPolicy(*['<tool_call>{"name": "wait", "arguments": {}}</tool_call>'] * 30)
    outcome = play(Sleeps(), policy, Deadlines(generate_s=1.0, step_s=1.0, episode_s=3.0), max_turns=30)
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, len(outcome.turns)) == (0.0, 30)
    assert "waited" in outcome.turns[0].observation
    assert "not run: the calls of this episode have taken all of its time" in outcome.turns[-1].observation
