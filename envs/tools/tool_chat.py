"""Shows an environment's tools to the model: through its chat template if that supports tools, else as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from roll_flash.chat.templates import ChatTemplate, Tools
from roll_flash.envs.tools.prompt import TOOL_SCHEMAS, describe_schemas, show_results, with_system_text
from roll_flash.types import Message

ToolsShown = Literal["template", "request", "text"]
"""Tools are shown by the chat template, in the request to an endpoint, or as text in the system message."""


def declared_tools(info: Mapping[str, Any]) -> tuple[Tools, dict[str, Any]]:
    """Return the tools in the info of `reset`, and that info with tool names only, to store with the episode."""
    tools: Tools = info.get(TOOL_SCHEMAS) or None
    rest = {key: value for key, value in info.items() if key != TOOL_SCHEMAS}
    return tools, rest | ({"offered_tools": [tool["function"]["name"] for tool in tools]} if tools else {})


class ToolChat:
    """Adds the tools to the messages of one conversation. Without tools it changes nothing."""

    def __init__(self, tools: Tools, template: ChatTemplate | None) -> None:
        """`template`: None if the messages go to an endpoint that renders them itself."""
        self._tools = tools or []
        self.native: Tools = tools if tools and template is not None and template.shows_tools else None
        """Tools passed to the chat template; None if it does not show tools."""
        self._results_are_text = bool(tools) and not (
            self.native is not None and template is not None and template.shows_tool_results
        )

    @property
    def shown(self) -> ToolsShown | None:
        return None if not self._tools else "text" if self.native is None else "template"

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """Return the first messages, with a description of the tools if the template does not show them."""
        if not self._tools or self.native is not None:
            return list(messages)
        return with_system_text(messages, describe_schemas(self._tools))

    def results(self, messages: Sequence[Message]) -> list[Message]:
        """Return the environment's messages; tool results become user text if the template has no tool role."""
        if not self._results_are_text:
            return list(messages)
        shown: list[Message] = []
        for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
            if is_result:
                shown += show_results([str(message["content"]) for message in group], "hermes")
            else:
                shown += group
        return shown


def calls_as_text(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return an answer with the tool calls that an endpoint parsed, as the text that environments expect."""
    written = [json.dumps(dict(call["function"])) for call in calls]
    return "\n".join(part for part in (text, *(f"<tool_call>\n{call}\n</tool_call>" for call in written)) if part)


def results_of_calls(messages: Sequence[Message], calls: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Pair the environment's messages with the parsed calls: endpoints need one result per call id."""
    results = [message for message in messages if message["role"] == "tool"]
    texts = [str(message["content"]) for message in results] + ["not run"] * len(calls)
    paired: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=False)
    ]
    surplus = [str(message["content"]) for message in results[len(calls) :]]
    rest = [message for message in messages if message["role"] != "tool"]
    return [*paired, *(show_results(surplus, "hermes") if surplus else []), *rest]
