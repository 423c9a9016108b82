"""What the benchmark of agents says of episodes that did not end as most do."""

from __future__ import annotations

import runpy
from pathlib import Path

AGENTS = Path(__file__).parents[2] / "benchmarks" / "agents.py"


def test_an_episode_whose_sandbox_ran_out_of_memory_is_counted_and_has_no_processor_time() -> None:
    common = {"kind": "trajectory", "success": False, "reward": 0.0, "policy_tokens": 3}
    gateway = {"calls": 1, "rewrites": 0}
    ended = [
        {"agent_ended": "finished", "agent_s": 2.0, "agent_cpu_s": 1.0, "gateway": gateway},
        {"agent_ended": "out_of_memory", "agent_s": 4.0, "gateway": gateway},
    ]
    row = runpy.run_path(str(AGENTS))["of_episodes"]([{**common, "info": info} for info in ended])
    assert (row["episodes"], row["agent_s"], row["agent_cpu_s"]) == (2, 3.0, 1.0)
    assert row["ended"] == {"finished": 1, "out_of_memory": 1}
