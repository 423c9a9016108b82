"""A ToolEnv runs tools, contains what goes wrong in them, and scores with its rewards."""

from __future__ import annotations

import asyncio
import copy
import functools
import re
import time
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from typing import Annotated, Any, cast

import numpy as np
import pytest
from pydantic import AfterValidator, BaseModel

import roll_flash
from roll_flash.chat.judge import Judge
from roll_flash.envs import Rubric, SandboxToolEnv, ToolEnv, reward, tool
from roll_flash.errors import EnvError
from roll_flash.sandboxes import SandboxDied, SandboxFileError, SandboxSpec, open_sandbox


def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


class Panic(BaseException):
    """As `pyo3_runtime.PanicException`."""


class Workshop(ToolEnv):
    """Tools that do all that tools can do."""

    tools = (double,)
    tool_format = "tags"
    instructions = "Work."

    async def begin(self, seed: int) -> str:
        self.log: list[str] = []
        return f"Task {seed}"

    @tool()
    async def add(self, a: int, b: int) -> int:
        """Add."""
        self.log.append("add")
        return a + b

    @tool()
    def broken(self) -> None:
        """Raise."""
        raise KeyError("no such thing")

    @tool()
    def leave(self) -> None:
        """Try to end the process."""
        raise SystemExit(3)

    @tool()
    def panic(self) -> None:
        """Raise what is no Exception in a thread, as libraries in Rust do."""
        raise Panic("index out of bounds")

    @tool()
    async def give_up(self) -> None:
        """Be cancelled, by nobody."""
        raise asyncio.CancelledError

    @tool()
    def find(self, pattern: re.Pattern[str], at: Annotated[int, AfterValidator([0, 1].__getitem__)] = 0) -> str:
        """Find."""
        return pattern.pattern

    @tool()
    def share(self, of: list[Fraction]) -> str:
        """Add up."""
        return str(sum(of))

    @tool(timeout_s=0.2)
    def hang(self) -> None:
        """Hang in a thread."""
        time.sleep(20)

    @tool(timeout_s=0.2)
    async def wait(self) -> None:
        """Hang in a coroutine."""
        await asyncio.sleep(60)

    @tool(max_characters=200)
    def flood(self) -> str:
        """Return 100 MB."""
        return "x" * 100_000_000

    @tool()
    def binary_flood(self) -> bytes:
        """Return 100 MB of bytes."""
        return b"\xff" * 100_000_000

    @tool()
    def sandbox_is_gone(self) -> None:
        """Meet a dead sandbox."""
        raise SandboxDied("gone", "killed")

    @tool()
    def no_file(self) -> None:
        """Miss a file."""
        raise SandboxFileError("no such file", 2)

    @tool()
    def submit(self) -> str:
        """End."""
        self.finish()
        return "thanks"

    @reward(weight=0.5)
    def answered_four(self) -> bool:
        return self.final_answer == "4"

    @reward(weight=0.5)
    async def used_a_tool(self) -> float:
        return 1.0 if self.log else 0.0

    @reward(weight=-0.1, when="turn")
    def an_error(self) -> bool:
        return any(not call.ok for call in self.last_calls)


def play(env: Any, *actions: str) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
    async def run() -> list[Any]:
        await env.reset(seed=3)
        steps = []
        for action in actions:
            observation, *rest = await env.step(action)
            text = observation if isinstance(observation, str) else observation[0]["content"]
            steps.append((text, *rest))
        return steps

    return asyncio.run(run())


def test_the_prompt_has_instructions_tools_and_task() -> None:
    messages, _ = asyncio.run(Workshop().reset(seed=3))
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Work.")
    assert "<double>X</double>  Twice a number." in messages[0]["content"]
    assert messages[1]["content"] == "Task 3"


def test_an_episode_with_tools_and_an_answer_earns_its_rewards() -> None:
    steps = play(Workshop(), "<add>{'a': 1}</add>", '<add a="2" b="2"/><double>21</double>', "<answer> 4 </answer>")
    assert steps[0][0].startswith("Output: Error:")
    assert steps[0][1] == pytest.approx(-0.1)
    assert steps[1][0] == "Output: 4\nOutput: 42"
    _, total, terminated, truncated, info = steps[2]
    assert (total, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["rewards"] == {"an_error": 1.0, "answered_four": 1.0, "used_a_tool": 1.0}
    assert (info["tools"]["add"]["calls"], info["tools"]["add"]["errors"]) == (2, 1)


def test_what_rewards_of_turns_gave_is_added_up_however_the_episode_ends() -> None:
    """The record had what the last turn gave, or nothing if the run ended the episode."""
    env = Workshop()
    steps = play(env, "<broken/>", "<double>1</double>", "<broken/>")
    assert [step[4]["rewards"] for step in steps] == [{"an_error": 1.0}, {"an_error": 1.0}, {"an_error": 2.0}]
    final, info = asyncio.run(env.conclude())
    assert info["rewards"] == {"an_error": 2.0, "answered_four": 0.0, "used_a_tool": 0.0}
    weighted = {"an_error": -0.1, "answered_four": 0.5, "used_a_tool": 0.5}
    earned = final + sum(step[1] for step in steps)
    assert earned == pytest.approx(sum(weighted[name] * value for name, value in info["rewards"].items()))


@pytest.mark.parametrize(
    ("action", "says", "count"),
    [
        ("<broken/>", "broken raised KeyError: 'no such thing'", "errors"),
        ("<leave/>", "leave raised SystemExit: 3", "errors"),
        ("<panic/>", "panic raised Panic: index out of bounds", "errors"),
        ("<give_up/>", "give_up raised CancelledError", "errors"),
        ("<find>a{99999999999}</find>", "OverflowError: the repetition number is too large", "errors"),
        (f"<find>{'(' * 2000}{')' * 2000}</find>", "RecursionError", "errors"),
        ('<find pattern="a" at="7"/>', "find: its arguments: IndexError: list index out of range", "errors"),
        ('<share>{"of": ["1/2", "1E+99_999_999"]}</share>', "share: an exponent of a fraction is too large", "errors"),
        ('<share>{"of": ["1/0"]}</share>', "not a valid fraction", "errors"),
        ("<hang/>", "hang took longer than 0.2 s", "timeouts"),
        ("<wait/>", "wait took longer than 0.2 s", "timeouts"),
        ("<no_file/>", "no such file", "errors"),
        ("<fly>x</fly>", "There is no tool 'fly'", "errors"),
        ("<tool_call>{</tool_call>", "not valid JSON", "errors"),
    ],
)
def test_a_tool_that_goes_wrong_is_told_and_counted_and_the_episode_goes_on(action: str, says: str, count: str) -> None:
    began = time.monotonic()
    ((text, _, terminated, truncated, info),) = play(Workshop(), action)
    assert says in text
    assert not terminated
    assert not truncated
    assert sum(use[count] for use in info["tools"].values()) == 1
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("action", ["<half>NaN</half>", "<half>1e999</half>", '<half>{"x": -Infinity}</half>'])
def test_a_number_that_is_none_is_told_and_never_reaches_a_reward(action: str) -> None:
    """It would make a reward that is none, and of a certain 0 no sample."""

    class Halves(ToolEnv):
        tool_format = "tags"
        x = 0.0

        async def begin(self, seed: int) -> str:
            return "Halve 6."

        @tool()
        def half(self, x: float) -> float:
            """Halve."""
            self.x = x
            return x / 2

        @reward()
        def near(self) -> float:
            return -abs(self.x - 6)

    (said, *_), (_, earned, *_) = play(Halves(), action, "done")
    assert "Input should be a finite number" in said
    assert earned == -6.0


@pytest.mark.parametrize("given", ['{"values": [1, [NaN]], "about": {}}', '{"values": [], "about": {"x": -Infinity}}'])
def test_no_list_or_object_of_any_kind_has_a_number_that_could_pass_for_the_right_one(given: str) -> None:
    """`min(1.0, nan)` is 1.0, and types of such parameters say nothing of their numbers."""

    class Submits(ToolEnv):
        values: Any = None

        async def begin(self, seed: int) -> str:
            return "What is it?"

        @tool()
        def submit(self, values: list, about: dict) -> str:  # type: ignore[type-arg]
            """Submit."""
            self.values = values
            return "noted"

        @reward()
        def right(self) -> float:
            return float(self.values is not None)

    call = '<tool_call>{"name": "submit", "arguments": %s}</tool_call>'
    (said, *_), (_, earned, *_) = play(Submits(), call % given, "done")
    assert "the numbers in its arguments must be finite" in said
    assert earned == 0.0
    assert play(Submits(), call % '{"values": [1.5], "about": {}}', "done")[1][1] == 1.0


@pytest.mark.parametrize("action", ["<flood/>", "<binary_flood/>"])
def test_a_tool_that_returns_100_mb_shows_its_head_and_tail(action: str) -> None:
    ((text, _, _, _, info),) = play(Workshop(), action)
    assert len(text) < 5000
    assert "left out" in text
    assert next(iter(info["tools"].values()))["errors"] == 0


@pytest.mark.parametrize("name", ["shout", "shout_at_ease"])
def test_a_tool_that_prints_100_mb_fills_no_log(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(ToolEnv):
        async def begin(self, seed: int) -> str:
            return "go"

        @tool()
        def shout(self) -> str:
            """Print from a thread."""
            print("x" * 100_000_000)
            return "done"

        @tool()
        async def shout_at_ease(self) -> str:
            """Print from a coroutine."""
            for _ in range(100):
                print("x" * 1_000_000)
            return "done"

    ((text, _, _, _, _),) = play(Loud(), f"<{name}/>")
    assert "done" in text
    print("still here")
    printed = capsys.readouterr().out
    assert len(printed) < 100_000
    assert printed.endswith("still here\n")


def test_a_dead_sandbox_is_not_the_models_fault_and_fails_the_episode() -> None:
    with pytest.raises(SandboxDied):
        play(Workshop(), "<sandbox_is_gone/>")


def test_the_last_turn_is_scored_as_it_stands() -> None:
    steps = play(Workshop(max_turns=2), '<add a="2" b="2"/>', '<add a="2" b="2"/>')
    assert [step[2:4] for step in steps] == [(False, False), (False, True)]
    assert steps[-1][1] == 0.5
    assert steps[-1][4]["success"] is False


def test_a_tool_can_end_the_episode() -> None:
    ((text, _, terminated, _, _),) = play(Workshop(), "<submit/>")
    assert (text, terminated) == ("Output: thanks", True)


def test_more_calls_than_allowed_are_not_run() -> None:
    ((text, _, _, _, info),) = play(Workshop(), "<double>1</double>" * 20)
    assert info["tools"]["double"]["calls"] == 16
    assert "only the first 16 of 20" in text


def test_a_final_answer_can_be_answered_in_turn() -> None:
    class Chat(ToolEnv):
        async def begin(self, seed: int) -> str:
            return "Hello"

        async def answered(self, text: str) -> str | None:
            return None if text == "bye" else f"you said {text}"

    steps = play(Chat(), "hi", "<think>hm</think>bye")
    assert [(step[0], step[2]) for step in steps] == [("you said hi", False), ("", True)]


class InSandbox(SandboxToolEnv):
    async def begin(self, seed: int) -> str:
        return "go"

    @tool()
    async def sh(self, command: str) -> Any:
        """Run a command."""
        return await self.sandbox.exec(command, timeout=5)

    @reward()
    async def wrote(self) -> bool:
        return (await self.sandbox.exec("test -s out")).ok


def test_tools_and_rewards_use_the_sandbox(require_bubblewrap: None) -> None:
    async def run() -> list[Any]:
        env = InSandbox()
        async with open_sandbox(SandboxSpec(), provider="local") as env.sandbox:
            await env.reset(seed=0)
            return [
                await env.step(action)
                for action in ("<sh>echo hi; echo no >&2; exit 3</sh>", "<sh>ls>out</sh>", "done")
            ]

    first, _, last = asyncio.run(run())
    assert first[0] == [{"role": "tool", "tool_call_id": "call00000", "content": "hi\nno\n(exit code 3)"}]
    assert last[1] == 1.0
    assert last[4]["success"] is True


class Untouched(InSandbox):
    """Its reward needs no sandbox, and would be full."""

    @reward()
    async def wrote(self) -> bool:
        return self.used("sh").calls > 0


@pytest.mark.parametrize("kind", [InSandbox, Untouched])
@pytest.mark.parametrize("reason", ["oom", "killed"])
def test_a_sandbox_that_the_model_has_filled_up_is_worth_0_and_one_that_others_ended_is_no_sample(
    reason: str, kind: type[InSandbox]
) -> None:
    class Dead:
        async def exec(self, *_: Any, **__: Any) -> Any:
            raise SandboxDied("it is gone", reason)

        read = write = kill_all = exec

    async def play() -> tuple[float, bool, dict[str, Any]]:
        env = kind()
        env.sandbox = cast(Any, Dead())
        await env.reset(seed=0)
        _, earned, terminated, _, info = await env.step(
            '<tool_call>{"name": "sh", "arguments": {"command": "fill"}}</tool_call>'
        )
        return earned, terminated, info

    if reason == "oom":
        earned, terminated, info = asyncio.run(play())
        assert (earned, terminated, info["success"], info["sandbox_died"]) == (0.0, True, False, "oom")
    else:
        with pytest.raises(SandboxDied):
            asyncio.run(play())


@dataclass
class Price:
    fruit: str
    cents: Any


class Receipt(BaseModel):
    at: date
    prices: list[Price]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Price("fig", 9), '{"fruit": "fig", "cents": 9}'),
        (
            Receipt(at=date(2024, 1, 2), prices=[Price("fig", np.int64(9))]),
            '{"at": "2024-01-02", "prices": [{"fruit": "fig", "cents": 9}]}',
        ),
        (np.int64(3), "3"),
        ({np.int64(3): np.float32(0.3)}, '{"3": 0.3}'),
        (np.array([[1, 2]]), "[[1, 2]]"),
        ({"found": np.bool_(True), "raw": b"a", "of": {1}}, '{"found": true, "raw": "a", "of": [1]}'),
    ],
)
def test_the_model_sees_what_a_result_holds(value: Any, shown: str) -> None:
    """A number of NumPy was shown as a text, a model of pydantic as its `repr`."""

    class Shows(ToolEnv):
        tool_format = "tags"

        async def begin(self, seed: int) -> str:
            return "Look."

        @tool()
        def look(self) -> Any:
            """Look."""
            return value

    ((said, *_),) = play(Shows(), "<look/>")
    assert said == f"Output: {shown}"


def test_two_tools_of_one_name_are_refused_when_the_environment_is_made() -> None:
    class Twice(ToolEnv):
        tools = (double, double)

    with pytest.raises(EnvError, match="'double' is taken"):
        Twice()


def score(*functions: Any) -> Any:
    return asyncio.run(Rubric(functions).score(None, "final"))


def test_rewards_are_weighted_and_may_be_plain_functions() -> None:
    @reward(weight=3)
    async def slow(env: Any) -> float:
        await asyncio.sleep(0)
        return 0.5

    def plain(env: Any) -> bool:
        return True

    assert score(slow, plain).total == 2.5
    assert Rubric([slow, plain]).full_reward == 4


def test_two_rewards_of_one_name_and_one_without_are_refused() -> None:
    """The record had one value for both."""

    def near(to: int) -> Any:
        def is_near(env: Any) -> float:
            return 1.0 / to

        return is_near

    class Judged(ToolEnv):
        rewards = (near(1), near(2))

    with pytest.raises(EnvError, match="two rewards are called 'is_near'"):
        Judged()
    with pytest.raises(EnvError, match=r"reward functools\.partial.* has no name; write a function"):
        Rubric([functools.partial(near(1))])


@pytest.mark.parametrize(("options", "success"), [({"when": "turn"}, None), ({"weight": 0.0}, None), ({}, False)])
def test_an_environment_without_final_rewards_does_not_call_every_episode_a_success(
    options: dict[str, Any], success: bool | None
) -> None:
    class Idle(ToolEnv):
        @reward(**options)
        def earned(self) -> float:
            return 0.0

        async def begin(self, seed: int) -> str:
            return "work"

    async def run() -> dict[str, Any]:
        env = Idle()
        await env.reset(seed=1)
        return (await env.step("no idea"))[4]

    assert asyncio.run(run())["success"] is success


@pytest.mark.parametrize(("solved", "style", "success"), [(0.0, 3.0, False), (1.0, 0.5, False), (1.0, 1.0, True)])
def test_no_reward_makes_up_for_another(solved: float, style: float, success: bool) -> None:
    class Judged(ToolEnv):
        @reward()
        def is_solved(self) -> float:
            return solved

        @reward(weight=2.0)
        def has_style(self) -> float:
            return style

        async def begin(self, seed: int) -> str:
            return "work"

    async def run() -> dict[str, Any]:
        env = Judged()
        await env.reset(seed=1)
        return (await env.step("done"))[4]

    assert asyncio.run(run())["success"] is success


def test_a_reward_that_is_no_number_or_too_slow_fails_and_is_never_zero() -> None:
    @reward(timeout_s=0.1)
    def slow(env: Any) -> float:
        time.sleep(2)
        return 1.0

    def wrong(env: Any) -> str:
        return "good"

    def nothing(env: Any) -> float:
        return float("nan")

    for function, says in ((slow, "longer than 0.1 s"), (wrong, "'good'"), (nothing, "nan")):
        with pytest.raises(EnvError, match=says):
            score(function)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("tool", "step"), ("tool", "close"), ("tool", "finish"), ("reward", "answered"), ("reward", "full_reward")],
)
def test_a_tool_or_reward_that_would_replace_a_method_of_every_environment_is_refused(kind: str, name: str) -> None:
    """A reward named `answered` was called with the text, and each answer was an error without a line of the user."""

    def method(self: Any) -> bool:
        """Do it."""
        return True

    members = {name: tool()(method) if kind == "tool" else reward()(method)}
    taken: type[ToolEnv] = type("Taken", (ToolEnv,), members)
    with pytest.raises(EnvError, match=f"Taken: the {kind} '{name}' takes the place of .*; rename the method"):
        taken()


def test_a_tool_may_have_such_a_name_and_a_reward_that_of_a_plain_value() -> None:
    class Walk(ToolEnv):
        tool_format = "tags"

        async def begin(self, seed: int) -> str:
            return "Walk."

        @tool(name="step")
        def move(self) -> str:
            """Go on."""
            return "moved"

        @reward()
        def success(self) -> bool:  # type: ignore[override]
            return self.used("step").calls > 0

    steps = play(Walk(), "<step/>", "done")
    assert (steps[0][0], steps[1][1], steps[1][4]["success"]) == ("Output: moved", 1.0, True)


def test_a_static_or_class_method_is_a_tool_with_all_its_arguments() -> None:
    """The first one was taken for the environment: the model did not see it, and the tool got the environment there."""

    class Counts(ToolEnv):
        tool_format = "tags"

        async def begin(self, seed: int) -> str:
            return "Count."

        @staticmethod
        @tool()
        def add(a: int, b: int) -> int:
            """Add."""
            return a + b

        @tool()
        @staticmethod
        def times(a: int, b: int) -> int:
            """Multiply."""
            return a * b

        @classmethod
        @tool()
        def named(cls, suffix: str) -> str:
            """Name."""
            return cls.__name__ + suffix

    steps = play(Counts(), '<add a="2" b="3"/>', '<times a="2" b="3"/>', "<named>!</named>")
    assert [step[0] for step in steps] == ["Output: 5", "Output: 6", "Output: Counts!"]


def test_a_static_method_is_a_reward_in_either_order_of_its_decorators() -> None:
    """With `@reward()` above it was never called, and each episode earned less."""

    class Scored(ToolEnv):
        async def begin(self, seed: int) -> str:
            return "Answer."

        @reward()
        @staticmethod
        def outer(env: ToolEnv) -> float:
            return 1.0

        @staticmethod
        @reward(weight=2.0)
        def inner(env: ToolEnv) -> float:
            return 1.0

    assert play(Scored(), "done")[-1][1] == 3.0


def test_an_async_tool_within_a_plain_decorator_is_awaited() -> None:
    """The model saw `<coroutine object look at 0x7f...>`."""

    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner

    class Looks(ToolEnv):
        tool_format = "tags"

        async def begin(self, seed: int) -> str:
            return "Look."

        @tool(timeout_s=0.2)
        @logged
        async def look(self, seconds: float) -> str:
            """Look."""
            await asyncio.sleep(seconds)
            return "a door"

    env = Looks()
    steps = play(env, "<look>0</look>", "<look>20</look>")
    assert [step[0] for step in steps] == [
        "Output: a door",
        "Output: Error: look took longer than 0.2 s and was given up",
    ]
    assert env.used("look").timeouts == 1


def test_begin_and_answered_may_be_plain_functions_as_reset_and_step() -> None:
    class Plain(ToolEnv):
        def begin(self, seed: int) -> str:  # type: ignore[override]
            return f"Task {seed}"

        def answered(self, text: str) -> str | None:  # type: ignore[override]
            return None if text == "bye" else "Go on."

    async def first() -> Any:
        return (await Plain().reset(seed=7))[0]

    assert asyncio.run(first()) == [{"role": "user", "content": "Task 7"}]
    assert [step[2] for step in play(Plain(), "hi", "bye")] == [False, True]


@pytest.mark.parametrize("prompt", [None, 5, ["a text"], [{"content": "no role"}]])
def test_a_begin_without_a_prompt_is_named(prompt: Any) -> None:
    class Forgets(ToolEnv):
        async def begin(self, seed: int) -> Any:
            return prompt

    with pytest.raises(EnvError, match=f"begin returned {type(prompt).__name__}, not the prompt"):
        play(Forgets())


def test_decorators_need_no_brackets_and_one_function_needs_its_comma() -> None:
    class Bare(ToolEnv):
        async def begin(self, seed: int) -> str:
            return "Go."

        @tool
        def look(self) -> str:
            """Look."""
            return "a door"

        @reward
        def looked(self) -> bool:
            return self.used("look").calls > 0

    assert play(Bare(tool_format="tags"), "<look/>", "done")[1][1] == 1.0
    for name, function in (("tools", double), ("rewards", score)):
        wrong: type[ToolEnv] = type("NoComma", (ToolEnv,), {name: function})
        with pytest.raises(EnvError, match=rf"NoComma: {name} is a tuple of functions; write {name} = \(FUNCTION,\)"):
            wrong()


def test_a_tool_or_reward_is_not_lost_by_a_method_without_its_decorator() -> None:
    class Base(ToolEnv):
        async def begin(self, seed: int) -> str:
            return "Go."

        @tool()
        def look(self) -> str:
            """Look."""
            return "a door"

        @reward()
        def right(self) -> bool:
            return True

    def other(self: Any) -> str:
        return "a window"

    for name, kind in (("look", "tool"), ("right", "reward")):
        lost: type[ToolEnv] = type("Lost", (Base,), {name: other})
        says = rf"Lost: '{name}' takes the place of a {kind} of Base and is none; write @{kind}\(\) above it too"
        with pytest.raises(EnvError, match=says):
            lost()
        without: type[ToolEnv] = type("Without", (Base,), {name: None})
        assert play(without(), "done")[0][1] == (0.0 if kind == "reward" else 1.0)


def test_tools_of_an_instance_are_refused_and_not_left_out() -> None:
    class Late(ToolEnv):
        def __init__(self) -> None:
            super().__init__()
            self.tools = [double]  # type: ignore[misc]

        async def begin(self, seed: int) -> str:
            return "Go."

    with pytest.raises(EnvError, match=r"Late: self\.tools is not read; set tools = \(\.\.\.\) in the class Late"):
        play(Late())


@pytest.mark.parametrize(
    ("decorator", "options", "says"),
    [
        (reward, {"when": "end"}, "when='end': must be one of turn, final"),
        (reward, {"timeout_s": 0}, "timeout_s=0: must be more than 0"),
        (tool, {"timeout_s": -1}, "timeout_s must be more than 0"),
        (tool, {"max_characters": 0}, "max_characters at least 1"),
    ],
)
def test_options_with_which_a_reward_never_counts_or_a_tool_never_runs_are_refused(
    decorator: Any, options: dict[str, Any], says: str
) -> None:
    """A reward for the moment `end` was never called, and no episode earned anything."""
    with pytest.raises(ValueError, match=says):
        decorator(**options)


def test_a_tool_that_yields_is_refused() -> None:
    class Yields(ToolEnv):
        @tool()
        def lines(self) -> Any:
            """Read lines."""
            yield "one"

    with pytest.raises(EnvError, match="tool lines: it yields"):
        Yields()


def test_the_public_names_are_there() -> None:
    assert roll_flash.ToolEnv is ToolEnv
    assert roll_flash.tool is tool
    assert roll_flash.Judge is Judge


def test_nesting_that_can_just_be_read_is_told_and_reaches_no_tool() -> None:
    """What a tool, or an adapter, does with arguments does not go as deep as reading JSON: it would raise."""

    class Parrot(ToolEnv):
        tool_format = "tags"
        max_turns = 10_000

        async def begin(self, seed: int) -> str:
            return "Talk."

        @tool()
        async def say(self, words: Any) -> Any:
            """Say."""
            return copy.deepcopy(words)

    depths = range(60, 1000, 3)
    actions = [
        f'<tool_call>{{"name": "say", "arguments": {{"words": {"[" * depth + "]" * depth}}}}}</tool_call>'
        for depth in depths
    ]
    for depth, (said, *_) in zip(depths, play(Parrot(), *actions), strict=True):
        assert ("Error" in said) == (depth > 63), (depth, said[:100])
