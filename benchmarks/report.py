"""Writes docs/report.md: each claim of the two papers and of this project, with the figure of benchmarks/results.

    python benchmarks/report.py [--check]

`--check` writes nothing and ends with 1 if the page is not what the results say. `make report` measures everything
again first (hours, on a quiet machine).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/report.md"
HEAD = """# Report

This page lists what the two papers claim and what this project claims, beside what was measured. It is made by
`python benchmarks/report.py` from [benchmarks/results](../benchmarks/results/README.md); each row links to a page with
the whole table, its command, its machine and its load. `make report` measures everything again, which takes hours and
needs a quiet machine. All figures come from machines with two CPU cores; none comes from a GPU.

Brackets hold the smallest and the largest seed or repetition, or the 95 % interval where the linked page says so. The
last column has the machine, and in brackets how long it takes for 10 million additions in Python; newer results name
the commit too.
"""


@dataclass(frozen=True)
class Claim:
    says: str
    published: str
    """Figure of the source."""
    result: str
    """Name of a result; empty if nothing was measured."""
    measured: Callable[[Any], str]
    remark: str = ""


def _range(found: dict[str, Any], form: str = ".2f", unit: str = "x") -> str:
    return f"{found['mean']:{form}}{unit} [{found['low']:{form}}, {found['high']:{form}}]"


def _scheduling(name: str) -> Callable[[Any], str]:
    return lambda found: _range(found["claims"][name]["figure"])


def _stream(name: str, *, lower_is_better: bool = False) -> Callable[[Any], str]:
    """Compare a figure with that of its peer; its name goes on after `name`."""

    def read(found: Any) -> str:
        row = next(row for key, row in found.items() if key.startswith(name))
        ratio = row["peer"] / row["value"] if lower_is_better else row["value"] / row["peer"]
        return _range({"mean": ratio, **row})

    return read


def _sandbox(found: Any) -> str:
    row = found["exec round trip p50"]
    return f"{row['value']:.2f} ms, SWE-ReX {row['swe_rex']:.2f} ms"


def _seeds(found: Any, key: str, form: str = ".2f") -> str:
    return ", ".join(f"{row[key]:{form}}" for row in found["rows"])


def _learned(found: Any) -> str:
    minutes = [row.get("minutes", row["training_minutes"]) for row in found["rows"]]
    return (
        f"held out {fmean(row['success_before'] for row in found['rows']):.2f} → {_seeds(found, 'success_after')} "
        f"in {min(minutes):.1f} to {max(minutes):.1f} min"
    )


def _algorithms(found: Any) -> str:
    """Held-out success of the worst run of each algorithm, and the steps it took."""
    runs: dict[str, list[Any]] = {}
    for row in found["rows"]:
        runs.setdefault(row["algorithm"], []).append(row)
    worst = {name: min(rows, key=lambda row: row["after"]["value"]) for name, rows in runs.items()}
    return ", ".join(
        f"{name} {row['before']['value']:.2f} → {row['after']['value']:.2f} in {len(row['rewards'])} steps"
        for name, row in worst.items()
    )


def _recipe(found: Any) -> str:
    rows, gain = [row for row in found["rows"] if row["order"] == "asynchronous"], found["over_seeds"]["asynchronous"]
    before, after = (fmean(row[name] for row in rows) for name in ("after_demonstrations", "after_rl"))
    shown = f"{gain['value']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}]"
    others = [row["after_rl"] for row in found["rows"] if row["order"] == "synchronous"]
    beside = f"; synchronous RL {fmean(others):.2f}" if others else ""
    return f"demonstrations {before:.2f}, then RL {after:.2f}: {shown}{beside}"


def _weights(found: Any) -> str:
    """Compare the times of two nodes with those of one server, pair by pair."""
    one, two = (found[f"whole, {what}"]["seconds"] for what in ("one server", "two nodes"))
    return f"{median(both / alone for alone, both in zip(one, two, strict=True)):.2f}x the time of one"


def _against_trl(found: Any) -> str:
    rows = found["rows"]
    times = ", ".join(f"{row['trl']['seconds'] / row['roll_flash']['seconds']:.2f}x" for row in rows)
    scores = ", ".join(f"{row['roll_flash']['success']:.2f} against {row['trl']['success']:.2f}" for row in rows)
    return f"{times} less time for the whole command; held out {scores}"


def _trl(found: Any) -> str:
    rows = [row for name, row in found["benchmarks/all.py"].items() if name.startswith("replicas_")]
    return ", ".join(f"{row['cpu_speedup_against_trl']:.2f}x" for row in rows) + " less"


def _staleness(found: Any) -> str:
    """The default and the best loss, in the worse of two tasks."""
    both = (found, json.loads((RESULTS / "staleness_same.json").read_text()))
    shares = {
        name: [
            min(each["scores"][name][age]["mean"] / each["scores"]["decoupled_ppo"]["0"]["mean"] for each in both)
            for age in ("1", "2", "4", "8")
        ]
        for name in found["scores"]
    }
    best = max(shares, key=lambda name: sum(shares[name]))
    return "; ".join(
        f"{name} {', '.join(f'{share:.2f}' for share in shares[name])}" for name in ("decoupled_ppo", best)
    )


def _none(_: Any) -> str:
    return "not measured"


SIMULATED = "real scheduler, virtual time"
PAPERS = {
    "ROLL Flash (arXiv 2510.11345)": [
        Claim(
            "queue scheduling against batch rollout, 8 x 8 with 16 extra prompts",
            "3.4x",
            "scheduling",
            _scheduling("queue scheduling against batch rollout"),
            SIMULATED,
        ),
        Claim(
            "prompt replication, 16 x 64",
            "1.95x",
            "scheduling",
            _scheduling("prompt replication"),
            f"{SIMULATED}; mean of four numbers of servers, as the paper does not name its own",
        ),
        Claim(
            "environment-level asynchronous rollout, N(10, 10) s",
            "2.46x",
            "scheduling",
            _scheduling("environment-level asynchrony"),
            SIMULATED,
        ),
        Claim(
            "redundant environments, N(10, 5) s, 36 x 9 for 32 x 8",
            "5.4x",
            "scheduling",
            _scheduling("redundant environments"),
            f"{SIMULATED}; only with environments that fail slow",
        ),
        Claim(
            "RLVR, asynchronous against synchronous",
            "2.24x",
            "scheduling",
            _scheduling("single answers (RLVR), asynchronous against synchronous"),
            f"{SIMULATED}; best of four settings of ours, so not comparable",
        ),
        Claim(
            "agentic, asynchronous against synchronous",
            "2.72x",
            "end_to_end",
            lambda found: _range(found["speedup"]),
            "real run of the tiny model; environments wait as in the paper, at 1:20",
        ),
        Claim(
            "time per step within the bound of its theory",
            "",
            "scheduling",
            _scheduling("the paper's bound"),
            f"{SIMULATED}; share of the achievable bound",
        ),
        Claim(
            "off-policy losses equal synchronous training at α 2 to 8",
            "equal",
            "staleness",
            _staleness,
            "worse of two tasks of the tiny model, share of fresh data at ages 1, 2, 4, 8; five seeds",
        ),
        Claim("8 times the GPUs", "7.6x", "", _none, "no GPUs were at hand for it"),
        Claim(
            "RLVR and agentic tasks of the paper (Qwen3, ALFWorld, SWE)", "", "", _none, "no GPUs were at hand for it"
        ),
    ],
    "AsyncFlow (arXiv 2507.01663)": [
        Claim(
            "streaming of rows to the learner against whole batches",
            "2.01x",
            "stream",
            _stream("step time", lower_is_better=True),
            "one learner rank, arrival of rows as in a run",
        ),
        Claim(
            "rows per second against TransferQueue",
            "",
            "stream",
            _stream("rows fetched by 2 processes"),
            "TransferQueue 0.1.11, the same rows and processes",
        ),
        Claim("whole system against the best baseline, 256 NPUs", "1.59x", "", _none, "no accelerator was at hand"),
        Claim("linearity at 16 times the devices", "0.65 to 0.88", "", _none, "no accelerator was at hand"),
    ],
}
OURS = [
    Claim("the quickstart learns on two cores", "", "quickstart", _learned, "SmolLM2-135M, three seeds"),
    Claim("a jsonl of one's own, by YAML alone", "", "own_data", _learned, "SmolLM2-135M, three seeds"),
    Claim(
        "critic, distillation, ratios per turn, M2PO, tis_topr, and the default with old data learn the quickstart",
        "",
        "algorithms",
        _algorithms,
        "SmolLM2-135M, the worse of two seeds, beside other work",
    ),
    Claim(
        "TextWorld Commonsense, one thing to put away",
        "",
        "recipe_twc",
        _recipe,
        "SmolLM2-135M, three seeds, 20 steps, 100 held-out games, beside other work",
    ),
    Claim(
        "MiniWoB++, eight pages in a real browser",
        "",
        "recipe_miniwob",
        _recipe,
        "SmolLM2-135M, two seeds, one of them synchronous too, 25 steps, 100 held-out tasks, beside other work",
    ),
    Claim(
        "reasoning-gym, three data sets (RLVR)",
        "",
        "recipe_reasoning",
        _recipe,
        "SmolLM2-135M, three seeds, 25 steps, 128 held-out tasks, beside other work",
    ),
    Claim(
        "two servers against one",
        "",
        "scaling",
        lambda found: f"{found['servers']['2'] / found['servers']['1']:.2f}x",
        "answers per second of servers that wait",
    ),
    Claim(
        "four workers against one",
        "",
        "scaling",
        lambda found: f"{found['workers']['4'] / found['workers']['1']:.2f}x",
        "environments that wait",
    ),
    Claim(
        "weights to four servers on two other nodes, links of 1 Gbit/s",
        "",
        "scaling",
        lambda found: _weights(found["weights over links"]),
        "three nodes in network namespaces of two cores",
    ),
    Claim(
        "the same without a limit of the links",
        "",
        "scaling",
        lambda found: _weights(found["weights"]),
        "the two cores do the copies of all three nodes",
    ),
    Claim(
        "the plan of a run against reality, mean error of a step's time",
        "",
        "plan",
        lambda found: f"{found['mean_error']:.0%}, largest {found['largest_error']:.0%}",
        "five settings not seen before",
    ),
    Claim(
        "a call into a sandbox, median",
        "",
        "sandbox",
        _sandbox,
    ),
    Claim(
        "rollouts against verifiers 0.1.14, 512 at once",
        "",
        "evaluate",
        lambda found: f"{found['ratios']['512']['rollouts_per_s_ratio']:.0f}x as many a second",
        "token servers are mocks",
    ),
    Claim(
        "all parts of scheduling and streaming against none of them",
        "",
        "ablation_waits",
        lambda found: _range(found["figures"]["all"]),
        "real run of the tiny model, environments that wait; the table has what each part earns alone, and removed",
    ),
    Claim(
        "the same training with TRL's GRPO, end to end",
        "",
        "against_trl",
        _against_trl,
        "SmolLM2-135M, a jsonl, equal samples; TRL generates with transformers",
    ),
    Claim(
        "the learner against TRL's GRPO, processor time",
        "",
        "learner_trl",
        _trl,
        "SmolLM2-135M, one group of 4, 8 and 16 replicas",
    ),
    Claim(
        "first paint of the dashboard with 100,000 episodes",
        "",
        "dashboard",
        lambda found: _range(found["plain"]["figures"]["overview_first_paint_ms"], ".0f", " ms"),
    ),
    Claim(
        "throughput that watching a run costs",
        "",
        "monitoring",
        lambda found: _range(found["slower"], ".1%", ""),
        "the tiny model",
    ),
    Claim(
        "throughput that the journal costs",
        "",
        "journal",
        lambda found: _range(found["slower"], ".1%", ""),
        "the tiny model",
    ),
    Claim(
        "faults that a run outlives with balanced books",
        "",
        "chaos",
        lambda found: str(sum(row["faults"] for row in found["rows"])),
        "kill -9, SIGSTOP, full disk and others, by a seed",
    ),
    Claim(
        "what a fault every two minutes costs the quickstart",
        "",
        "fault_cost",
        lambda found: (
            f"{fmean(found['compared']['percent_longer']):.0f}% more time; mean reward "
            + _range(found["compared"]["reward"], "+.3f", "")
        ),
        "SmolLM2-135M, three seeds with and without",
    ),
]


def page() -> str:
    """Return the page that the results say. Raises OSError, KeyError for results that are missing or have changed."""
    lines = [HEAD]
    for title, claims in {**PAPERS, "This project": OURS}.items():
        is_ours = title == "This project"
        lines += [f"## {title}", ""]
        lines += ["| claim | measured | of | machine |", "|---|---|---|---|"] if is_ours else []
        lines += [] if is_ours else ["| claim | published | measured | of | machine |", "|---|---|---|---|---|"]
        for claim in claims:
            found = json.loads((RESULTS / f"{claim.result}.json").read_text()) if claim.result else {}
            name = {"learner_trl": "learner"}.get(claim.result, claim.result)
            link = f" ([table](../benchmarks/results/{name}.md))" if name else ""
            cells = [claim.says, *([] if is_ours else [claim.published]), claim.measured(found) + link, claim.remark]
            found = found.get("benchmarks/all.py", found)
            machine = str(found.get("machine", "")).replace("10 million additions in a loop: ", "")
            lines.append(f"| {' | '.join([*cells, machine])} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
