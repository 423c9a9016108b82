"""smolagents' CodeAgent as in its documentation: the model writes Python, which may call one tool, a shell."""

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIModel, tool  # type: ignore[import-not-found]


@tool  # type: ignore[untyped-decorator]
def sh(command: str) -> str:
    """Run a shell command and return its output.

    Args:
        command: the command
    """
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, errors="replace", timeout=30)
    return (done.stdout + done.stderr)[-2000:] or "(no output)"


model = OpenAIModel(
    model_id=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=int(os.environ.get("AGENT_MAX_TOKENS", "512")),
)
agent = CodeAgent(tools=[sh], model=model, max_steps=int(os.environ.get("AGENT_MAX_CALLS", "8")))
if system := os.environ.get("AGENT_SYSTEM"):
    agent.prompt_templates["system_prompt"] = system
agent.run(sys.argv[1])
