"""Turn messages and tools into tokens with the model's chat template, also if it has no tool support.

If the template does not know tools (plain ChatML), the system message describes them in the format of Hermes and Qwen
models, and calls and results become text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from roll_flash.chat.templates import Tools, chat_template_of
from roll_flash.gateway.apis.answer_text import CALL_CLOSE, CALL_OPEN
from roll_flash.gateway.apis.api_error import bad_request, unsupported
from roll_flash.gateway.model_call import ModelCall, parsed_arguments
from roll_flash.types import Message

_TOOLS_TEXT = """# Tools

You may call one or more functions. They are described within <tools></tools>:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


MAX_MESSAGES = 1000
"""Maximum new messages and tool calls of one request. Some chat templates (gpt-oss) compare each message with all later
ones: 20,000 of them took minutes, in one of the few threads that all sessions share."""
MAX_TOOLS = 1000
"""Maximum tools of one request. A bare name becomes a hundred characters, so that a body of 1 MB took half a minute."""


class PromptText:
    """Prompts of one tokenizer. All results are token ids."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises ModelError for a tokenizer without a chat template."""
        self._template = chat_template_of(tokenizer)
        source = str(tokenizer.chat_template)
        self.knows_tools = "tools" in source
        self._calls_are_bare = self.knows_tools and CALL_OPEN not in source

    def whole(self, call: ModelCall, room: int | None = None) -> list[int]:
        """Tokenize a conversation without a recorded prefix. Raises ModelError for roles that the template rejects.

        With `room`, a conversation with far more tokens than `room` is cut to its beginning."""
        messages = self._shown(call.messages)
        tools = self._tools(call)
        if call.tools and not self.knows_tools:
            messages = _with_tools_described(messages, call.tools)
        return [*self._template.prompt(messages, tools, room), *self.forced(call)]

    def continued(self, messages: Sequence[Message], call: ModelCall, after: int, room: int) -> list[int]:
        """Tokenize the messages after a recorded model turn that ended with token `after`. `room` as in `whole`."""
        delta = self._template.delta(self._shown(messages), after=after, tools=self._tools(call), room=room)
        return [*delta, *self.forced(call)]

    def forced(self, call: ModelCall) -> list[int]:
        """Beginning of a tool call, prefilled if the model must make one; these are not policy tokens."""
        text = self.forced_text(call)
        return self._template.tokens_of_turn(text) if text else []

    def before_answer(self, call: ModelCall) -> str:
        """Text at the end of the prompt that belongs to the answer: a forced call, or `<think>`."""
        return self.forced_text(call) or self._template.opened_thinking

    def forced_text(self, call: ModelCall) -> str:
        if call.tool_choice in ("auto", "none"):
            return ""
        if not call.tools:
            raise unsupported("tool_choice", "no tools are declared that could be called")
        _, _, name = call.tool_choice.partition(":")
        if name and all(tool["function"]["name"] != name for tool in call.tools):
            raise bad_request(f"tool_choice names {name[:60]!r}, which is not among the tools", "tool_choice")
        opening = "" if self._calls_are_bare else f"{CALL_OPEN}\n"
        arguments = "parameters" if self._calls_are_bare else "arguments"
        rest = f'{json.dumps(name)}, "{arguments}": ' if name else '"'
        return f'{opening}{{"name": {rest}'

    def _tools(self, call: ModelCall) -> Tools:
        if len(call.tools) > MAX_TOOLS:
            raise bad_request(f"there are more than {MAX_TOOLS} tools", "tools")
        return list(call.tools) if call.tools and self.knows_tools else None

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        if sum(1 + len(message.get("tool_calls") or ()) for message in messages) > MAX_MESSAGES:
            raise bad_request(f"there are more than {MAX_MESSAGES} new messages and tool calls", "messages")
        shown = [_for_template(message) for message in messages]
        return shown if self.knows_tools else [_in_text(message) for message in shown]


def _for_template(message: Message) -> Message:
    """Parse the arguments of calls: templates expect objects."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _in_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [
        f"{CALL_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_CLOSE}"
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": "\n".join([*filter(None, [message["content"]]), *calls])}


def _with_tools_described(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    text = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
