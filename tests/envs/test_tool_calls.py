"""Tool calls in every format that models write; wrong ones become messages a model can act on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import hypothesis
import hypothesis.strategies as st
import pydantic
import pytest

from roll_flash.envs.tools.calls import BadCall, ToolCall, parse_tool_calls
from roll_flash.envs.tools.functions import Tool, ToolDefinitionError, WrongArguments, make_tool
from roll_flash.envs.tools.prompt import TOOL_FORMATS, ToolFormat, describe_tools


def add(a: int, b: int = 1) -> int:
    """Add two integers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def sh(command: str) -> str:
    """Run a shell command."""
    return command


def write(path: str, content: str) -> None:
    """Write a file."""


TOOLS = {tool.name: tool for tool in map(make_tool, (add, sh, write))}


def calls(text: str) -> list[tuple[str, Any]]:
    found = parse_tool_calls(text, TOOLS)
    return [(call.name, dict(call.arguments) if isinstance(call, ToolCall) else call.message) for call in found]


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert TOOLS["add"].description == "Add two integers."
    assert TOOLS["add"].parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first"},
            "b": {"type": "integer", "description": "the second", "default": 1},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


def test_rich_types_and_bounds_are_in_the_schema_and_are_checked() -> None:
    def move(way: Literal["left", "right"], steps: Annotated[int, pydantic.Field(ge=1, le=9)], tags: list[str]) -> None:
        """Move."""

    tool = make_tool(move)
    assert tool.parameters["properties"]["way"]["enum"] == ["left", "right"]
    assert tool.parameters["properties"]["steps"]["maximum"] == 9
    with pytest.raises(WrongArguments, match=r"steps.*less than or equal to 9"):
        tool.check({"way": "left", "steps": 10, "tags": []})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [("add", {"a": 1, "b": 2})]),
        (
            'Both.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
            '<tool_call>{"name": "sh", "arguments": {"command": "ls"}}</tool_call> done',
            [("add", {"a": 1}), ("sh", {"command": "ls"})],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
        (
            '<tool_call>{"name": "sh", "arguments": {"command": "echo </tool_call> <sh>x</sh>"}}</tool_call>',
            [("sh", {"command": "echo </tool_call> <sh>x</sh>"})],
        ),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 4}"}</tool_call>', [("add", {"a": 4})]),
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ('{"type": "function", "function": {"name": "add", "parameters": {"a": 2}}}', [("add", {"a": 2})]),
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "sh", "parameters": {"command": "a;b"}}',
            [("add", {"a": 1}), ("sh", {"command": "a;b"})],
        ),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
        (
            'I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sh[CALL_ID]x1[ARGS]{"command": "ls"}',
            [("add", {"a": 1}), ("sh", {"command": "ls"})],
        ),
        (
            '[{"name": "add", "arguments": {"a": 1}, "id": "x"}, {"name": "sh", "arguments": {"command": "["}}]',
            [("add", {"a": 1}), ("sh", {"command": "["})],
        ),
        ('add{"a": 3}', [("add", {"a": 3})]),
        ("[add(a=1), sh('ls -l')]", [("add", {"a": 1}), ("sh", {"command": "ls -l"})]),
        ("<|python_start|>[add(1, b=-2)]<|python_end|>", [("add", {"a": 1, "b": -2})]),
        ("[see(1)] and (2)", []),
        ("[1, 2]", []),
        ("First <sh>ls -l | wc</sh>", [("sh", {"command": "ls -l | wc"})]),
        ("<sh>\ncat <<E\na\nE\n</sh>", [("sh", {"command": "cat <<E\na\nE"})]),
        ('<write path="a &quot;b&quot;">x < y</write>', [("write", {"path": 'a "b"', "content": "x < y"})]),
        ("<write path='empty'></write>", [("write", {"path": "empty", "content": ""})]),
        ('<add>{"a": 1, "b": 3}</add>', [("add", {"a": 1, "b": 3})]),
        ('<add a="1" b="2"/>', [("add", {"a": "1", "b": "2"})]),
        ("<add>7</add>", [("add", {"a": "7"})]),
        ("<think><sh>no</sh></think><sh>yes</sh>", [("sh", {"command": "yes"})]),
        ("<think>never ends <sh>no</sh>", []),
        ("The answer is 3 < 4 and {a: 1}", []),
        ("<answer>42</answer>", []),
        ("", []),
    ],
)
def test_calls_are_found_in_every_format(text: str, expected: list[tuple[str, Any]]) -> None:
    assert calls(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not valid JSON"),
        (
            '<tool_call>{"name": "ad", "arguments": {}}</tool_call>',
            "no tool 'ad'. Did you mean add? Tools: add, sh, write",
        ),
        ('<tool_call>["add"]</tool_call>', "JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '"arguments" must be a JSON object'),
        ('{"name": "add", "parameters": {"a": ', "not valid JSON"),
        ("<sh>ls", "not closed"),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
        ("[TOOL_CALLS]ad[ARGS]{}", "no tool 'ad'. Did you mean add?"),
        ("[ad(a=1)]", "no tool 'ad'. Did you mean add?"),
        ("[add(a=1]", "not a valid Python list at character"),
        ("[add(a=b)]", "plain values"),
        ("[add(a=b'x')]", "plain values"),
        ("[add(a={1, 2})]", "plain values"),
        ("[add(a=1j)]", "plain values"),
        ("[add(a=[...])]", "plain values"),
        ("[add(a={(1, 2): 3})]", "plain values"),
        (f"[add(a=0x1{'0' * 5000})]", "plain values"),
        ("[add(1, 2, 3)]", "it takes 2 arguments, 3 were given"),
        ("<shell>ls</shell>", "no tool 'shell'"),
        ("<write>text</write>", "as JSON"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
    ],
)
def test_what_is_meant_as_a_call_but_is_none_says_why(text: str, says: str) -> None:
    (found,) = parse_tool_calls(text, TOOLS)
    assert isinstance(found, BadCall)
    assert says in found.message


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("add", {"a": "x"}, "argument a: Input should be a valid integer"),
        ("add", {}, "the argument a is missing"),
        ("add", {"a": 1, "c": 2}, "there is no argument c. It takes a, b (optional)"),
        ("sh", {"command": 5}, "valid string"),
    ],
)
def test_wrong_arguments_say_which_and_what_the_tool_takes(name: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(WrongArguments) as caught:
        TOOLS[name].check(arguments)
    assert says in str(caught.value)


@hypothesis.given(st.text(alphabet=st.sampled_from('<>/{}[]":;,\\ \n=abtool_caldsh1'), max_size=60))
@hypothesis.settings(max_examples=300)
def test_no_text_breaks_the_parser(text: str) -> None:
    for wrapped in (text, f"<tool_call>{text}", f"<add {text}</add>", '{"name"' + text, f"<sh>{text}</sh>"):
        for call in parse_tool_calls(wrapped, TOOLS):
            assert isinstance(call, ToolCall | BadCall)


def test_an_argument_may_have_any_name() -> None:
    def store(copy: str, schema: int, json: bool, model_name: str, title: str = "") -> None:
        """Store."""

    tool = make_tool(store)
    given = {"copy": "a", "schema": 1, "json": True, "model_name": "m", "title": "t"}
    assert tool.check(given) == given
    assert set(tool.parameters["properties"]) == set(given)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS[1:])
def test_every_tool_is_described_in_every_format_that_is_text(tool_format: ToolFormat) -> None:
    text = describe_tools(list(TOOLS.values()), tool_format)
    for tool in TOOLS.values():
        assert tool.name in text
        assert tool.description in text


def test_the_example_of_the_tag_format_is_itself_a_call() -> None:
    text = describe_tools([TOOLS["write"]], "tags")
    assert calls(text.splitlines()[-1]) == [("write", {"path": "...", "content": "CONTENT"})]


class Item(pydantic.BaseModel):
    name: str
    count: int = 1


def test_what_a_field_says_of_an_argument_is_shown_and_checked_wherever_it_stands() -> None:
    """In the place of the default the field itself was the value, and nothing was required; in the type it lost its
    description."""

    def find(
        text: Annotated[str, pydantic.Field(description="what", min_length=2)],
        most: int = pydantic.Field(ge=1, description="how many"),
        place: str = pydantic.Field("here", description="where"),
        again: str = pydantic.Field("", description="unused"),
    ) -> None:
        """Find.

        Args:
            again: as the text says
        """

    tool = make_tool(find)
    about = {name: part["description"] for name, part in tool.parameters["properties"].items()}
    assert about == {"text": "what", "most": "how many", "place": "where", "again": "as the text says"}
    assert tool.parameters["required"] == ["text", "most"]
    assert tool.check({"text": "ab", "most": 3}) == {"text": "ab", "most": 3, "place": "here", "again": ""}
    with pytest.raises(WrongArguments, match=r"the argument most is missing"):
        tool.check({"text": "ab"})
    with pytest.raises(WrongArguments, match=r"most: Input should be greater than or equal to 1"):
        tool.check({"text": "ab", "most": 0})


@pytest.mark.parametrize(
    "call",
    [
        '<order>[{"name": "fig", "count": 2}]</order>',
        '<order>\n[{"name": "fig", "count": 2}]\n</order>',
        """<order items='[{"name": "fig", "count": 2}]'/>""",
        '<order>{"items": [{"name": "fig", "count": 2}]}</order>',
    ],
)
def test_a_list_or_an_object_in_tags_is_read_as_json(call: str) -> None:
    """There is only text between tags: a tool could not be called as its description shows."""

    def order(items: list[Item], note: str = "") -> None:
        """Order."""

    tools = {"order": make_tool(order)}
    (found,) = parse_tool_calls(call, tools)
    assert isinstance(found, ToolCall)
    assert tools["order"].check(found.arguments) == {"items": [Item(name="fig", count=2)], "note": ""}


def test_only_what_must_be_a_list_or_an_object_is_read_as_json() -> None:
    def keep(text: str, item: Item | None = None, either: str | list[int] = "") -> None:
        """Keep."""

    tools = {"keep": make_tool(keep)}
    (found,) = parse_tool_calls("""<keep item='{"name": "a"}' either="[1]">{"text": </keep>""", tools)
    assert found == ToolCall("keep", {"item": {"name": "a"}, "either": "[1]", "text": '{"text": '})
    (found,) = parse_tool_calls("<keep item='no item' text='[1]'/>", tools)
    assert found == ToolCall("keep", {"item": "no item", "text": "[1]"})


def test_functions_that_cannot_be_tools_say_why() -> None:
    def undocumented(a: int) -> None: ...

    def untyped(a) -> None:  # type: ignore[no-untyped-def]
        """Do."""

    def variadic(*parts: str) -> None:
        """Do."""

    def unknown_type(a: object) -> None:
        """Do."""

    def odd_type(a: Tool) -> None:
        """Do."""

    cases = [(undocumented, "docstring"), (untyped, "parameter a has no type"), (variadic, "by name")]
    for function, says in cases:
        with pytest.raises(ToolDefinitionError, match=says):
            make_tool(function)
    assert make_tool(unknown_type).name == "unknown_type"
    with pytest.raises(ToolDefinitionError, match="JSON form"):
        make_tool(odd_type)
