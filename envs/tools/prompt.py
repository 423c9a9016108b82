"""Descriptions of tools and results of calls, in the format that the model was trained on.

In the native format the chat template renders both: tools travel as schemas, results as messages of the role
`tool` (`tool_chat.py` renders them as text if the template supports neither). In other formats both are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from roll_flash.envs.tools.functions import ToolDescription
from roll_flash.errors import ConfigError
from roll_flash.types import Message

TOOL_SCHEMAS = "tool_schemas"
"""Key in the info of `reset` for the tool schemas in OpenAI form, which the chat template shows if it can."""

ToolFormat = Literal["native", "hermes", "llama3", "tags"]
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)


def known_format(tool_format: str, environment: str) -> ToolFormat:
    """Return the format. Raises ConfigError for an unknown one, in which no tool would be shown."""
    for known in TOOL_FORMATS:
        if tool_format == known:
            return known
    raise ConfigError(f"{environment}: tool_format must be one of {', '.join(TOOL_FORMATS)}, not {tool_format!r}")


def describe_tools(tools: Sequence[ToolDescription], tool_format: ToolFormat) -> str:
    """Return the part of the system message that describes the tools; empty if there are none."""
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
    """Return the tool entry of the info of `reset`; empty if the messages describe the tools."""
    return {TOOL_SCHEMAS: [tool.schema() for tool in tools]} if tools and tool_format == "native" else {}


def describe_schemas(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Describe `schemas` (OpenAI form) in the prompt format of Hermes and Qwen."""
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
    """Return the messages with `text` appended to the system message, which is added if missing."""
    own = str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
    rest = list(messages[1:] if own else messages)
    text = "\n\n".join(part for part in (own, text) if part)
    return [{"role": "system", "content": text}, *rest] if text else rest


def _as_tag(tool: ToolDescription) -> str:
    """Describe a tool as a tag: its last required argument is the text, the others are attributes."""
    required = [name for name in tool.argument_names if name in tool.parameters.get("required", ())]
    body = (required or [*tool.argument_names, ""])[-1]
    attributes = "".join(f' {name}="..."' for name in tool.argument_names if name != body)
    return f"<{tool.name}{attributes}>{body.upper()}</{tool.name}>  {tool.description.partition(chr(10))[0]}"


def show_results(results: Sequence[str], tool_format: ToolFormat) -> list[Message]:
    """Return all results in the order of the calls: one message each in the native format, else one for all."""
    if tool_format == "native":
        return tool_messages(results)
    if tool_format == "tags":
        text = "\n".join(f"Output: {result}" for result in results)
    else:
        text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return [{"role": "user", "content": text}]


def tool_messages(results: Sequence[str]) -> list[Message]:
    """Return one message of the role `tool` per result, in the order of the calls."""
    return [
        {"role": "tool", "tool_call_id": f"call{number:05d}", "content": result}
        for number, result in enumerate(results)
    ]
