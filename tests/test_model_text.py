"""Every parser of what a model wrote takes time that grows with the text, whatever the text is, and bears all of it.

A parser that is added belongs into PARSERS: that is all that it takes to be held to this.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from roll_flash.chat import model_text
from roll_flash.chat.judge import Judge
from roll_flash.chat.model_text import without_thinking
from roll_flash.chat.openai_client import _error_text, _json, _reply
from roll_flash.envs.adapters.bfcl import calls as bfcl_calls
from roll_flash.envs.adapters.openenv import actions as openenv_actions
from roll_flash.envs.adapters.openenv.connection import WrongAction
from roll_flash.envs.adapters.task_folders.tests import pytest_verdict, reward_of_json, reward_of_text
from roll_flash.envs.adapters.textarena import opponents as textarena_opponents
from roll_flash.envs.agents.verifier import _said_reward
from roll_flash.envs.rewards.evaluated_answers import UnsafeAnswerError, check_answer
from roll_flash.envs.shipped import shell_math, text_game
from roll_flash.envs.tools.calls import BadCall, ToolCall, looks_native, parse_tool_calls
from roll_flash.envs.tools.functions import WrongArguments, make_tool
from roll_flash.envs.tools.tool_env import ToolEnv
from roll_flash.errors import InferenceError
from roll_flash.evaluation.pages.page import document
from roll_flash.evaluation.pages.transcript import _assistant_parts, episode_for_page
from roll_flash.gateway import model_call
from roll_flash.gateway.apis import answer_text, anthropic_messages, chat_completions, responses_api
from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.gateway.apis.request_fields import decode_object
from roll_flash.monitor.episodes import transcript
from roll_flash.terminal import one_line, printable

MOST_CPU_S_OF_A_MB = 1.0
SLACK_CPU_S = 1.0
SIZES = tuple(1 << power for power in range(10, 21))
"""Characters: 1 KiB, doubled up to 1 MiB."""


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def sh(command: str) -> str:
    """Run."""
    return command


def mean(values: list[int | float | None]) -> float:
    """Mean."""
    return 0.0


TOOLS = {tool.name: tool for tool in map(make_tool, (add, sh, mean))}
UNSEEN = type("Unseen", (), {"__module__": "nowhere"})()
"""A scorer whose source cannot be read."""
JUDGE = Judge("http://localhost:1/v1", "judge")


def bears(error: type[Exception], parse: Callable[[str], Any]) -> Callable[[str], None]:
    """`error` is how the parser says that the text is wrong."""

    def run(text: str) -> None:
        with contextlib.suppress(error):
            parse(text)

    return run


def checked_calls(text: str) -> None:
    for call in parse_tool_calls(text, TOOLS):
        if isinstance(call, ToolCall):
            bears(WrongArguments, lambda _, call=call: TOOLS[call.name].check(call.arguments))(text)  # type: ignore[misc]


def record(text: str) -> dict[str, Any]:
    turn = {"observation": text, "generate_s": 1.0, "finish_reason": "stop", "step_s": 1.0, "reward": 0.0}
    about = {"episode_id": "a:1", "task_id": "a", "kind": "failure", "cause": "x", "failed_turn": 1, "message": text}
    messages = [{"role": "assistant", "content": text, "tool_calls": [{"arguments": text}]}]
    return {**about, "turns": [turn], "messages": messages, "info": {"said": text}}


def as_body(text: str) -> dict[str, Any]:
    """A request in which an agent says it: in messages, in calls, and as results."""
    text = text.encode(errors="replace").decode()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": text}}
    return decode_object(
        msgspec.json.encode({"messages": [{"role": "assistant", "content": text, "tool_calls": [call]}]})
    )


def anthropic_body(text: str) -> dict[str, Any]:
    blocks = [{"type": "text", "text": text}, {"type": "tool_use", "id": "1", "name": "add", "input": {"a": text}}]
    return {"messages": [{"role": "assistant", "content": blocks}]}


def answered(text: str) -> None:
    """What the gateway makes of a turn, for each API."""
    thinking, rest = model_text.split_thinking(text)
    content, calls = answer_text.split_tool_calls(rest, ["add"])
    calls = (*calls, model_call.ToolCall("1", "add", text))
    answer = model_call.Answer(text, content, thinking, calls, "stop", None, ())
    reply = model_call.Reply((answer,), model_call.Usage(0, 0))
    anthropic_messages.render(reply, "model")
    chat_completions.render(reply, "model")
    responses_api.render(reply, "model", "resp_1", {})
    model_call.next_key(b"", answer.message)


PARSERS: dict[str, Callable[[str], Any]] = {
    "tool calls": checked_calls,
    "native calls": looks_native,
    "BFCL": lambda text: bfcl_calls.parse_calls(text, TOOLS),
    "thinking": without_thinking,
    "answers": lambda text: model_text.tagged(text, "answer"),
    "entities": model_text.unescaped,
    "actions": lambda text: model_text.action_line(text, 200),
    "moves": lambda text: text_game.parse_moves(text, ("left", "right")),
    "judge": JUDGE._read,
    "judge's question": lambda text: JUDGE.messages(text, text, text),
    "shell math": lambda text: (shell_math._COMMAND.fullmatch(text), shell_math._ANSWER.fullmatch(text)),
    "listed moves": lambda text: textarena_opponents.listed_moves(text),
    "OpenEnv objects": bears(WrongAction, openenv_actions.JsonActions({}).action),
    "OpenEnv numbers": bears(WrongAction, openenv_actions.TextActions("a", "number", "").action),
    "pytest": bears(ValueError, pytest_verdict),
    "a check's output": _said_reward,
    "evaluated answers": bears(UnsafeAnswerError, lambda text: check_answer(text, UNSEEN)),
    "reward.txt": bears(ValueError, reward_of_text),
    "reward.json": bears((ValueError, RecursionError), lambda text: reward_of_json(text, "a")),  # type: ignore[arg-type]
    "gateway's answers": answered,
    "gateway's bodies": bears(ApiError, lambda text: decode_object(text.encode(errors="replace"))),
    "chat completions": bears(ApiError, lambda text: chat_completions.parse(as_body(text), forwards=False)),
    "anthropic messages": bears(ApiError, lambda text: anthropic_messages.parse(anthropic_body(text))),
    "responses": bears(ApiError, lambda text: responses_api.parse({"input": text}, {})),
    "endpoint's answers": bears(InferenceError, lambda text: _reply(_json(text.encode(errors="replace"), "u"), "u", 0)),
    "endpoint's errors": lambda text: _error_text(text.encode(errors="replace"), "none"),
    "pages": lambda text: document(text, "", episode_for_page(record(text))),
    "transcripts": lambda text: transcript(record(text)),
    "terminal": lambda text: (printable(text), one_line(text)),
}

SHAPES: Sequence[tuple[str, str, str]] = [
    # begins with, repeats, ends with
    *[
        ("", unit, "")
        for unit in (" ", "\n", "a", "9", "[", "{", '"', "\\", "`", "<", "=", "&#9", "\x1b[31m", "é\u202e")
    ],
    *[("hello", unit, "") for unit in (" ", "\t\n", " [")],
    *[("", unit, "x") for unit in ("9", "0.", "-", "9e9")],
    ("", "a ", "!"),
    ("", "<think>", ""),
    ("", "<think></think>", "x"),
    ("", "</think>", "<think>"),
    ("x", "</think>", "x"),
    ("", "<tool_call>", ""),
    ("", "<tool_call> ", ""),
    ("", "<tool_call>[", ""),
    ("", '<tool_call>{"', ""),
    ("", "<tool_call>x</tool_call>", ""),
    ("", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ""),
    ('<tool_call>{"name": "add", "arguments": {"a": ', "[", ""),
    ('<tool_call>{"name": "add", "arguments": {"a": ', "9", "}}"),
    ('<tool_call>{"name": "', "x", '"}</tool_call>'),
    *[('<tool_call>{"name": "mean", "arguments": {"values": [', f"{one}, ", "1]}}") for one in ("{}", '"x"', "[[]]")],
    ('<tool_call>{"name": "add", "arguments": {"', '\\"', '": 1}}'),
    ("", "[TOOL_CALLS]add[ARGS]{}", ""),
    ("", "[TOOL_CALLS]x ", ""),
    ("add", " ", "["),
    ("add[CALL_ID]", "a", " "),
    ("<|python_tag|>", " ", "{"),
    ("", '{"name": "add", "parameters": {"a": 1}};', ""),
    ('{"name": "add", "parameters": ', '{"a":', ""),
    ("[", '{"name": "add", "arguments": {}}, ', "{}]"),
    ("[add(", "a=1, ", ")]"),
    ("[add(a=", "(", ")]"),
    ("[add(a=", "-", "1)]"),
    ("[add(a=", "9", ")]"),
    ("[add(a=0x", "f", ")]"),
    ("[", "add(a=1), ", "]"),
    ("[add", ".a", "()]"),
    ("", "f([", ""),
    ("", "<sh>", ""),
    ("", "<sh>x</sh>", ""),
    ("<sh ", "a", "/>"),
    ("<sh ", "a ", "/>"),
    ("<sh ", "a='b' ", "/>"),
    ("<sh ", 'a="', "/>"),
    ('<sh command="&#', "9", '"/>'),
    ("<sh>{", " ", "}</sh>"),
    ("<a>", "</a> ", "!"),
    ("<a ", " ", ">"),
    ("", "<answer>", ""),
    ("", "<answer>1</answer> ", ""),
    ("", "<answer></move>", ""),
    ("", "<score>", ""),
    ("", "<score>1", ""),
    ("<score>", "9", "</score"),
    ("", "valid  moves [a] ", ""),
    ("", "== short test summary info ==\n", "PASSED\n"),
    ("", "=", "\n"),
    ("", "- > . , ; ", ""),
    ("", '{"choices":[', ""),
    ("", "\ud800\x00", ""),
]
"""The ends matter: what matches to the last character but one is what makes a parser try again."""


def grown(begin: str, unit: str, end: str, size: int) -> str:
    return begin + (unit * (size // len(unit) + 1))[:size] + end


def cpu_s_of(parse: Callable[[str], object], text: str) -> float:
    began = time.process_time()
    parse(text)
    return time.process_time() - began


@pytest.mark.parametrize("name", PARSERS)
def test_the_time_of_a_parser_grows_with_the_text_whatever_it_is(name: str) -> None:
    for shape in SHAPES:
        for size in SIZES:
            text = grown(*shape, size)
            allowed = SLACK_CPU_S + MOST_CPU_S_OF_A_MB * size / SIZES[-1]
            took = cpu_s_of(PARSERS[name], text)
            if took >= allowed:  # perhaps the collector ran over all that other tests left
                took = min(cpu_s_of(PARSERS[name], text) for _ in range(3))
            assert took < allowed, f"{shape}: {took:.2f} s of CPU for {size} characters"
            if took * (SIZES[-1] / size) ** 3 < MOST_CPU_S_OF_A_MB:  # it could grow with the cube
                break


def test_of_a_text_full_of_calls_the_first_are_read_and_the_model_is_told() -> None:
    for unit in (
        "<sh>x</sh>",
        '<tool_call>{"name": "sh", "arguments": {"command": "x"}}</tool_call>',
        "[TOOL_CALLS]sh{}",
    ):
        found = parse_tool_calls(unit * 300, TOOLS)
        assert len(found) == model_text.MAX_CALLS + 1
        assert found[0].name == "sh"
        assert isinstance(found[-1], BadCall)
        assert "first 256 calls" in found[-1].message


@pytest.mark.parametrize("value", [{}, "x"])
def test_thousands_of_wrong_values_in_a_call_do_not_hold_up_the_other_episodes(value: Any) -> None:
    """Describing each of them took a worker's event loop most of a second for 100 KB of text, 7 s for 1 MB."""
    wrong = {"name": "mean", "arguments": {"values": [value] * 19_000}}
    (call,) = parse_tool_calls(f"<tool_call>{json.dumps(wrong)}</tool_call>", TOOLS)
    assert isinstance(call, ToolCall)
    began = time.process_time()
    with pytest.raises(WrongArguments, match=r"mean: [0-9]+ of the values in its arguments are of the wrong type"):
        TOOLS["mean"].check(call.arguments)
    assert time.process_time() - began < 0.4
    wrong["arguments"] = {"values": [value] * 21_000}
    (call,) = parse_tool_calls(f"<tool_call>{json.dumps(wrong)}</tool_call>", TOOLS)
    assert isinstance(call, BadCall)
    assert "more than 20000 values" in call.message


@pytest.mark.parametrize(
    "text", [json.dumps([{"name": "rad_fxle"}] * 10_000), "[" + "rad()," * 3_000 + "]"], ids=["JSON", "Python"]
)
def test_calls_in_a_list_beyond_those_that_are_read_are_not_compared_with_many_tools(text: str) -> None:
    tools = {f"read_file_{number}": TOOLS["sh"] for number in range(30)}
    assert len(parse_tool_calls(text, tools)) == model_text.MAX_CALLS + 1
    assert min(cpu_s_of(lambda said: parse_tool_calls(said, tools), text) for _ in range(2)) < 1.5


def test_many_wrong_names_are_not_all_compared_with_those_of_many_tools() -> None:
    """256 calls with the letters of a tool's name in another order held up a worker for 10 s, in 25 KB of text."""
    letters = random.Random(1)
    names = ["t" + "".join(letters.choices("abcd", k=63)) for _ in range(128)]
    tools = dict.fromkeys(names, TOOLS["sh"])
    wrong = ["t" + "".join(letters.sample(name[1:], 63)) for name in 2 * names]
    native = "".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in wrong)
    python = f"[{', '.join(f'{name}()' for name in wrong)}]"
    for text in (native, python):
        assert cpu_s_of(lambda said: parse_tool_calls(said, tools), text) < 1.0
        assert cpu_s_of(lambda said: bfcl_calls.parse_calls(said, tools), text) < 1.0
    told = parse_tool_calls('<tool_call>{"name": "ssh"}</tool_call>' * 20, TOOLS)
    hints = ["Did you mean sh?" in call.message for call in told if isinstance(call, BadCall)]
    assert hints == [True] * model_text.MAX_COMPARED + [False] * 12


def test_tags_that_are_not_closed_are_not_searched_one_by_one_on_a_page() -> None:
    """Each of another name took a search to the end of the text."""
    text = "".join(f"<a{number}>" for number in range(130_000))
    assert cpu_s_of(lambda said: list(_assistant_parts(said)), text) < MOST_CPU_S_OF_A_MB
    found = [part["text"] for part in _assistant_parts("<a>x<b>y</a></b><b>z</b></a><a>")]
    assert found == ["x<b>y", "</b>", "z", "</a><a>"]


def test_of_calls_of_bfcl_the_first_are_read_and_the_model_is_told() -> None:
    """Each wrong name is compared with those of all functions: 1,500 of them held up a worker for a second."""
    functions = {f"read_file_{number}": TOOLS["sh"] for number in range(60)}
    found = bfcl_calls.parse_calls("[" + "rad_file()," * 1_700 + "]", functions)
    assert len(found) == model_text.MAX_CALLS + 1
    assert isinstance(found[-1], BadCall)
    assert "first 256 calls" in found[-1].message


def test_the_tags_that_are_closed_are_read_as_they_stand() -> None:
    assert model_text.tagged("<a>1</a><a>2<a>3</a></a> <b>4</A>", "a") == ["1", "2<a>3"]
    assert model_text.tagged("<A>1</b><a>\n</a><a>", "a", "b", ignore_case=True) == ["1", "\n"]
    assert model_text.tagged("<ans>1</answer>", "answer") == []


@pytest.mark.parametrize(
    ("text", "thinking", "rest"),
    [
        ("4", "", "4"),
        ("<think>5</think>4", "5", "4"),
        ("5\n</think>\n\n4", "5", "\n\n4"),
        ("<think>5", "5", ""),
        ("a<think>5</think>b<think>6</think>c", "5\n6", "abc"),
        ("<think>\n\n</think>\n\n4", "", "\n\n4"),
        ("5</think>4<think>6", "5\n6", "4"),
    ],
)
def test_thinking_never_counts_also_if_the_prompt_opened_it(text: str, thinking: str, rest: str) -> None:
    assert model_text.split_thinking(text) == (thinking, rest)
    assert model_text.last_answer(text) == rest.strip()


def test_a_tool_call_in_thoughts_that_the_prompt_opened_is_not_made() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert parse_tool_calls(f"perhaps {call}\n</think>\nNo.", TOOLS) == []
    (made,) = parse_tool_calls(f"perhaps\n</think>\n{call}", TOOLS)
    assert isinstance(made, ToolCall)


def test_a_number_without_end_in_a_call_is_told_to_the_model() -> None:
    class Numbers(ToolEnv):
        """Numbers."""

        tools = (add,)

        async def begin(self, seed: int) -> str:
            return "Add."

    import asyncio

    async def play(text: str) -> str:
        env = Numbers()
        await env.reset(seed=0)
        observation, *_ = await env.step(text)
        return json.dumps(observation)

    for text in ("[add(a=0x" + "f" * 9000 + ", b='x')]", "[add(a=0x" + "f" * 9000 + ")]", f"<add>{'9' * 9000}</add>"):
        assert "Error" in asyncio.run(play(text)), text[:20]
