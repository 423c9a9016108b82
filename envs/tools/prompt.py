"""What the model is told about its tools, in the form that it was taught, and how results are shown to it.

In the native format that is the chat template's matter: tools travel as schemas, results as messages of the role
`tool` (`rollout/tool_chat.py` makes text of both where the template knows neither). In the others both are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll_flash.envs.tools.functions import ToolDescription
from roll_flash.errors import ConfigError
from roll_flash.types import Message

TOOL_SCHEMAS = "tool_schemas"
"""In the info of `reset`: tools in OpenAI's form, for the chat template to show where it can."""

ToolFormat = Literal["native", "hermes", "llama3", "tags"]
TOOL_FORMATS: tuple[ToolFormat, ...] = ("native", "hermes", "llama3", "tags")


def known_format(tool_format: str, environment: str) -> ToolFormat:
    """Raises ConfigError for a format that there is not: no tool would be shown in it."""
    for known in TOOL_FORMATS:
        if tool_format == known:
            return known
    raise ConfigError(f"{environment}: tool_format must be one of {', '.join(TOOL_FORMATS)}, not {tool_format!r}")


def describe_tools(tools: Sequence[ToolDescription], tool_format: ToolFormat) -> str:
    """The part of the system message that is about tools; empty if there are none."""
    if not tools:
        return ""
    match tool_format:
        case "native":
            return ""
        case "hermes":
            return describe_schemas([tool.schema() for tool in tools])
        case "llama3":
            listed = "\n\n".join(json.dumps(tool.schema(), indent=4) for tool in tools)
            return (
                "Given the following functions, please respond with a JSON for a function call with its proper "
                'arguments. Respond in the format {"name": function name, "parameters": dictionary of argument name '
                f"and its value}}. Do not use variables.\n\n{listed}"
            )
        case "tags":
            return "Tools, called by writing:\n" + "\n".join(_as_tag(tool) for tool in tools)


def tool_info(tools: Sequence[ToolDescription], tool_format: ToolFormat) -> dict[str, Any]:
    """What the info of `reset` says of tools; nothing where the messages describe them."""
    return {TOOL_SCHEMAS: [tool.schema() for tool in tools]} if tools and tool_format == "native" else {}


def describe_schemas(schemas: Sequence[Mapping[str, Any]]) -> str:
    """As Hermes and Qwen were taught; `schemas` in OpenAI's form."""
    listed = "\n".join(json.dumps(schema) for schema in schemas)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def with_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages, with `text` at the end of the system message; one is made where there is none."""
    own = str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
    rest = list(messages[1:] if own else messages)
    text = "\n\n".join(part for part in (own, text) if part)
    return [{"role": "system", "content": text}, *rest] if text else rest


def _as_tag(tool: ToolDescription) -> str:
    """The last argument that must be given stands between the tags, the others are attributes."""
    required = [name for name in tool.argument_names if name in tool.parameters.get("required", ())]
    body = (required or [*tool.argument_names, ""])[-1]
    attributes = "".join(f' {name}="..."' for name in tool.argument_names if name != body)
    return f"<{tool.name}{attributes}>{body.upper()}</{tool.name}>  {tool.description.partition(chr(10))[0]}"


def show_results(results: Sequence[str], tool_format: ToolFormat) -> list[Message]:
    """All results, in the order of the calls: a message each in the native format, else one."""
    if tool_format == "native":
        return tool_messages(results)
    if tool_format == "tags":
        text = "\n".join(f"Output: {result}" for result in results)
    else:
        text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return [{"role": "user", "content": text}]


def tool_messages(results: Sequence[str]) -> list[Message]:
    """One message of the role `tool` for each result, in the order of the calls."""
    return [
        {"role": "tool", "tool_call_id": f"call{number:05d}", "content": result}
        for number, result in enumerate(results)
    ]
