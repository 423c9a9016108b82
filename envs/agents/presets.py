"""Agents that others wrote, ready to run in `AgentEnv`: how each is started in the image of `make agents-image`.

Nothing of theirs is changed: each is told by its own options and variables where the model is and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

AGENTS_IMAGE = "roll-flash-agents:latest"
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class AgentPreset:
    """What `AgentEnv(agent=NAME)` takes where its own arguments say nothing."""

    command: tuple[str, ...]
    """With `{instruction}` and `{model}` where those belong; `{folder}` holds the files below."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Name in `{folder}` of the sandbox, and the file here."""
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
