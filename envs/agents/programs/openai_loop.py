"""Agent loop in the usual style of the `openai` package: one tool, called until the model answers in text."""

import json
import os
import subprocess
import sys
from typing import Any

from openai import OpenAI

SYSTEM = os.environ.get("AGENT_SYSTEM") or "You work in a shell. Use the tool sh; say done when the task is solved."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "sh",
        "description": "Run a shell command and see its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def sh(command: str) -> str:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, errors="replace", timeout=30)
    return (done.stdout + done.stderr)[-2000:] or "(no output)"


client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.argv[1]}]
for _ in range(int(os.environ.get("AGENT_MAX_CALLS", "8"))):
    answer = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"],
        messages=messages,
        tools=[TOOL],
        max_tokens=int(os.environ.get("AGENT_MAX_TOKENS", "512")),
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    print("said:", message.content, flush=True)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        if call.type != "function":
            continue
        try:
            output = sh(**json.loads(call.function.arguments))
        except Exception as error:  # the model wrote the arguments, so it is told the error
            output = f"error: {type(error).__name__}: {error}"
        print("called:", call.function.arguments, "->", output, flush=True)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
