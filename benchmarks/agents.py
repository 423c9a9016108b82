"""Third-party agents, evaluated and trained in one run: `python benchmarks/agents.py [--quick] [--json]`.

The three of configs/agents/, in one config: `roll-flash eval` (greedy, held-out tasks), then `roll-flash train`, with a
real vLLM server, real sandboxes and SmolLM2-135M (`--quick`: the tiny random model and the engine `transformers`).
Needs `make agents-image`. It shows that they run, are recorded and are trained; in a few steps a model learns nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from roll_flash.monitor.episodes import read_episodes
from roll_flash.processes.supervise import end_with_parent

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs" / "agents"
AGENTS = ("openai", "mini-swe-agent", "smolagents")
TIMEOUT_S = 3600.0
FULL: dict[str, Any] = {
    "steps": 3,
    "scheduler": {"groups_per_step": 3, "group_size": 4},
    "rollout": {"max_concurrent": 12, "max_new_tokens": 48},
}
QUICK: dict[str, Any] = {
    "steps": 2,
    "model": {"path": "tiny", "max_length": 6000},
    "inference": {"engine": "transformers"},
    "learner": {"learning_rate": 3.0e-3},
    "scheduler": {"groups_per_step": 3, "group_size": 2},
    "rollout": {"max_concurrent": 3, "max_new_tokens": 16},
}


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    config, out = write_config(folder, QUICK if quick else FULL), folder / "evaluation"
    began = time.monotonic()
    run("eval", config, "--model", "tiny" if quick else "smollm2-135m", "-n", "1" if quick else "2", "--out", str(out))
    eval_s = time.monotonic() - began
    began = time.monotonic()
    run("train", config, "name=agents", f"runs={folder}")
    train_s = time.monotonic() - began
    evaluated = [record for path in out.rglob("episodes.jsonl") for record in records(path)]
    trained = read_episodes(folder / "agents/episodes")
    return {
        "eval": {"wall_s": eval_s, "agents": by_agent(evaluated)},
        "train": {"wall_s": train_s, "agents": by_agent(trained), **of_training(folder / "agents")},
    }


def write_config(folder: Path, settings: dict[str, Any]) -> str:
    """The agents of configs/agents/ in one file."""
    envs = [env for agent in AGENTS for env in yaml.safe_load((CONFIGS / f"{agent}.yaml").read_text())["envs"]]
    config = {**settings, "base": str(CONFIGS / "base.yaml"), "name": "agents", "envs": envs}
    path = folder / "agents.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def by_agent(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    ids = sorted({episode["env_id"] for episode in episodes if "env_id" in episode})
    return {env_id: of_episodes([e for e in episodes if e.get("env_id") == env_id]) for env_id in ids}


def run(*arguments: str) -> None:
    """Raises RuntimeError with what the command said last."""
    command = [sys.executable, "-m", "roll_flash", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} failed:\n{done.stdout[-3000:]}")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_episodes(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    played = [episode for episode in episodes if episode["kind"] == "trajectory"]
    infos = [episode["info"] for episode in played]
    return {
        "episodes": len(episodes),
        "scored": len(played),
        "success": mean([bool(episode["success"]) for episode in played]),
        "reward": mean([episode["reward"] for episode in played]),
        "calls": sum(info["gateway"]["calls"] for info in infos),
        "rewrites": sum(info["gateway"]["rewrites"] for info in infos),
        "policy_tokens": sum(episode["policy_tokens"] for episode in played),
        "agent_s": mean([info["agent_s"] for info in infos]),
        # Of one that filled its memory until its sandbox died it is not known.
        "agent_cpu_s": mean([info["agent_cpu_s"] for info in infos if "agent_cpu_s" in info]),
        "ended": dict(Counter(info["agent_ended"] for info in infos)),
    }


def of_training(run_folder: Path) -> dict[str, Any]:
    rows = records(run_folder / "metrics.jsonl")
    steps = [row for row in rows if "rows" in row]
    return {
        "steps": len(steps),
        "rows": [row["rows"] for row in steps],
        "policy_tokens": [row["computed_policy_tokens"] for row in steps],
        "groups_without_signal": [row["groups_without_signal"] for row in steps],
        "grad_norm": [row["grad_norm"] for row in steps],
        "parity_max": max((row["weights/parity"] for row in rows if "weights/parity" in row), default=None),
    }


def mean(values: list[Any]) -> float:
    return sum(values) / max(1, len(values))


def table(result: dict[str, Any]) -> str:
    lines = [
        "| agent | | episodes | scored | success | reward | calls | history rewritten | tokens sampled | own CPU, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for part in ("eval", "train"):
        for agent, row in result[part]["agents"].items():
            lines.append(
                f"| {agent} | {part} | {row['episodes']} | {row['scored']} | {row['success']:.2f} "
                f"| {row['reward']:.3f} | {row['calls']} | {row['rewrites']} | {row['policy_tokens']} "
                f"| {row['agent_cpu_s']:.1f} |"
            )
    train = result["train"]
    lines += ["", "| step | rows trained | policy tokens trained | groups without signal | gradient norm |"]
    lines.append("|---|---|---|---|---|")
    names = ("rows", "policy_tokens", "groups_without_signal", "grad_norm")
    for step, values in enumerate(zip(*(train[name] for name in names), strict=True), 1):
        lines.append("| {} | {:.0f} | {:.0f} | {:.2f} | {:.3f} |".format(step, *values))
    parity = "not measured" if train["parity_max"] is None else f"{train['parity_max']:.1e}"
    lines += ["", f"Largest parity difference: {parity}. Evaluation {result['eval']['wall_s']:.0f} s, training "]
    lines[-1] += f"{train['wall_s']:.0f} s, starting everything included."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model, for a look at the whole way")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help="keep what is played and trained here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roll-flash-agents-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(folder, quick=options.quick)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
