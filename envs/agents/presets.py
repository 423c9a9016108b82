"""Third-party agents that are ready to run in `AgentEnv`: the command of each in the image of `make agents-image`.

Their code is unchanged: options and variables tell each agent the model's address and the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

AGENTS_IMAGE = "roll-flash-agents:latest"
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class AgentPreset:
    """Defaults of `AgentEnv(agent=NAME)`."""

    command: tuple[str, ...]
    """Command with the placeholders `{instruction}` and `{model}`; `{folder}` holds the files below."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Name in `{folder}` of the sandbox, and path of the file on this machine."""
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mb: int = 512


_MINI_SWE_AGENT = (
    "python3 -m minisweagent --yolo --exit-immediately --model openai/{model} --config mini.yaml "
    "--config model.cost_tracking=ignore_errors --output {folder}/trajectory.json --task"
)

PRESETS = {
    "openai": AgentPreset(
        ("python3", "{folder}/openai_loop.py", "{instruction}"), {"openai_loop.py": PROGRAMS / "openai_loop.py"}
    ),
    "mini-swe-agent": AgentPreset(
        (*_MINI_SWE_AGENT.split(), "{instruction}"),
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini-swe-agent",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        memory_mb=1024,
    ),
    "smolagents": AgentPreset(
        ("python3", "{folder}/smolagents_code.py", "{instruction}"),
        {"smolagents_code.py": PROGRAMS / "smolagents_code.py"},
    ),
}
