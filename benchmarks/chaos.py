"""Faults in every part of a run, at chosen moments, and what must hold after each of them.

    python benchmarks/chaos.py [--faults 300] [--seed 0] [--minutes M] [--vllm] [--config FILE]
        [--disk-mib N] [--json]
    python benchmarks/chaos.py --quick [--json]
    python benchmarks/chaos.py --case PART:FAULT:MOMENT:SEED ... [--vllm] [--config FILE] [--disk-mib N] [--json]

A run of the tiny model, or of another --config, with sandboxes, kept alive (`roll-flash train --keep-alive`), is hit
again and again. The faults are drawn with the seed (`tests/chaos/faults.py`); `tests/chaos/campaign.py` says what must
hold after each. Each one is appended to `benchmarks/results/chaos.jsonl` when it is over, with its machine and commit.
A campaign that is interrupted (Ctrl-C, `--minutes`, `kill -9`) goes on where it was when the same command is given
again, so that several sittings add up to one result, in `benchmarks/results/chaos.{json,md}`; of another --config in
`chaos_NAME.{json,md}`.

The first thing that does not hold ends the sitting with the case in one line; it is also recorded, and added to
`tests/chaos/regressions.txt`. `--case` repeats cases, `--quick` runs those of `tests/chaos/quick.txt` and the
regressions; both write nothing. As root on Linux the run has a disk, a network and a Docker engine of its own (but for
`--quick`). Without them, faults of these are left out. The disk is in memory, and must hold three checkpoints of the
model (`--disk-mib`: 8000 for that of the quickstart).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from tests.chaos.campaign import CONFIG, BrokenError, Campaign, Outcome  # noqa: E402
from tests.chaos.faults import Case, draw_cases, is_possible, read_cases  # noqa: E402
from tests.chaos.surroundings import DISK_MIB, Surroundings, separate_from_the_machine  # noqa: E402

RESULTS = Path(__file__).parent / "results"
RECORD = RESULTS / "chaos.jsonl"
QUICK, REGRESSIONS = (ROOT / "tests" / "chaos" / name for name in ("quick.txt", "regressions.txt"))
LONGEST_S, LONGEST_QUICK_S = 60.0, 2.0
"""Maximum duration in seconds of a fault that passes by itself."""
LAPS = ("waited_s", "lasted_s", "recovered_s", "checked_s")
TINY, VLLM = "the engine for tiny models", "vLLM"


@dataclass
class Sitting:
    """Cases for one run of the tiny model. `record` gets each line of the result, as it is known."""

    cases: Callable[[Surroundings], Sequence[Case]]
    vllm: bool
    is_quick: bool
    record: Callable[[dict[str, Any]], None] = lambda line: None
    until: float = float("inf")
    """Time of `time.monotonic` at which no new fault is begun."""
    config: str = CONFIG
    disk_mib: int = DISK_MIB

    def run(self) -> dict[str, Any]:
        """Return outcomes and books. Raises BrokenError with the case."""
        is_separate = separate_from_the_machine()
        with tempfile.TemporaryDirectory(prefix="c", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            surroundings = Surroundings(
                folder, is_separate=is_separate, own_engine=not self.is_quick, disk_mib=self.disk_mib
            )
            try:
                return self._hit(folder, surroundings)
            finally:
                surroundings.close()

    def _hit(self, folder: Path, surroundings: Surroundings) -> dict[str, Any]:
        longest_s = LONGEST_QUICK_S if self.is_quick else LONGEST_S
        campaign = Campaign(folder, surroundings, vllm=self.vllm, longest_s=longest_s, config=self.config)
        outcomes: list[Outcome] = []
        at = "the start"
        try:
            began = time.monotonic()
            campaign.start()
            start_s = time.monotonic() - began
            for case in self.cases(surroundings):
                if time.monotonic() > self.until:
                    break
                at = str(case)
                outcomes.append(campaign.strike(case))
                self.record(asdict(outcomes[-1]))
            at = "the end"
            began = time.monotonic()
            books = campaign.end(goes_on=not self.is_quick or not any(one.restarts for one in outcomes))
            self.record({"start_s": start_s, "end_s": time.monotonic() - began, "books": books})
        except BrokenError as error:
            self.record({"broken": str(error), "at": at})
            raise BrokenError(f"{at}: {error}") from None
        finally:
            campaign.close()
        return {"outcomes": [asdict(one) for one in outcomes], "books": books}


def recorder(header: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that appends a line to the record, and adds a case that broke the run to the regressions."""

    def record(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=sys.stderr, flush=True)
        RESULTS.mkdir(exist_ok=True)
        with RECORD.open("a") as file:
            file.write(json.dumps({**header, **line}) + "\n")
        if "broken" in line and line["at"].count(":") == 3 and line["at"] not in REGRESSIONS.read_text():
            with REGRESSIONS.open("a") as file:
                file.write(f"{line['at']}\n")

    return record


def read_record(seed: int, engine: str) -> list[dict[str, Any]]:
    lines = map(json.loads, RECORD.read_text().splitlines()) if RECORD.exists() else ()
    return [line for line in lines if (line["seed_of_campaign"], line["engine"]) == (seed, engine)]


def commit() -> str:
    """Return the commit of this checkout, with a mark if the product differs from it."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    changed = git("diff", "--quiet", "HEAD", "--", "roll_flash", "envs", "sandboxes").returncode
    return (git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown") + ("-changed" if changed else "")


def rows(outcomes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per kind of fault: how many, how often the run was started again, and how long it took."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        kinds[outcome["part"], outcome["fault"]].append(outcome)
    return [
        {
            "part": part,
            "fault": fault,
            "faults": len(found),
            "restarts": sum(one["restarts"] for one in found),
            "median_s": round(statistics.median(one["recovered_s"] for one in found), 1),
            "max_s": round(max(one["recovered_s"] for one in found), 1),
        }
        for (part, fault), found in sorted(kinds.items())
    ]


def engine_of(vllm: bool, config: str) -> str:
    """Return what is hit, in words: campaigns of different ones do not add up."""
    return (VLLM if vllm else TINY) + ("" if config == CONFIG else f", {config}")


def name_of(vllm: bool, config: str) -> str:
    """Return the name of the result of a campaign."""
    return "chaos" + ("" if config == CONFIG else f"_{Path(config).stem}") + ("_vllm" if vllm else "")


def summary(lines: Sequence[dict[str, Any]], seed: int, engine: str, command: str) -> dict[str, Any]:
    """Return the result of all sittings."""
    outcomes = [line for line in lines if "part" in line]
    sittings: dict[str, dict[str, Any]] = {}
    for line in lines:
        sitting = sittings.setdefault(
            line["sitting"], {"commit": line["commit"], "machine": line["machine"], "faults": 0, "end": "interrupted"}
        )
        sitting["faults"] += "part" in line
        if "books" in line:
            sitting |= {"end": "books balance, nothing left", "start_s": line["start_s"], "books": line["books"]}
        if "broken" in line:
            sitting |= {"end": f"broken at {line['at']}", "broken": line["broken"]}
    moments: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        moments[outcome["moment"]] += 1
    return {
        "benchmark": "chaos",
        "machine": outcomes[-1]["machine"] if outcomes else machine(),
        "seed": seed,
        "engine": engine,
        "command": command,
        "faults": len(outcomes),
        "rows": rows(outcomes),
        "moments": dict(moments),
        "mean_s": {lap: round(statistics.fmean(one[lap] for one in outcomes), 1) for lap in LAPS} if outcomes else {},
        "sittings": [{"began": began, **sitting} for began, sitting in sittings.items()],
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    head = "| part | fault | faults | starts of the run | s to the next step, median | max |\n|---|---|---|---|---|---|"
    names = ("part", "fault", "faults", "restarts", "median_s", "max_s")
    lines = [f"| {' | '.join(str(one[name]) for name in names)} |" for one in found]
    return "\n".join([head, *lines])


def save(result: dict[str, Any], name: str) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    sittings = [
        f"| {one['began']} | {one['commit']} | {one['machine']} | {one['faults']} | {one['end']} |"
        for one in result["sittings"]
    ]
    mean = result["mean_s"]
    total_s = sum(mean.values())
    where = f"until the moment {mean['waited_s']:g}, the fault {mean['lasted_s']:g}, to the next step "
    where += f"{mean['recovered_s']:g}, checks {mean['checked_s']:g}"
    text = [
        "# Faults",
        f"`{result['command']}`: {result['faults']} faults in runs with "
        f"{result['engine']} and Docker sandboxes. A fault is counted when the run has trained a step after it and "
        "`roll-flash verify` has found nothing wrong. `benchmarks/results/chaos.jsonl` has each of them.",
        table(result["rows"]),
        "Moments: " + ", ".join(f"{name} {count}" for name, count in sorted(result["moments"].items())) + ".",
        f"A fault takes {total_s:.0f} s on average: {where}.",
        "| sitting | commit | machine | faults | end |\n|---|---|---|---|---|\n" + "\n".join(sittings),
    ]
    (RESULTS / f"{name}.md").write_text("\n\n".join(text) + "\n")


def carry_on(
    seed: int, faults: int, *, vllm: bool, minutes: float, config: str = CONFIG, disk_mib: int = DISK_MIB
) -> dict[str, Any]:
    """Run what is left of a campaign, and return the result of all its sittings. Raises BrokenError."""
    engine = engine_of(vllm, config)
    command = f"python benchmarks/chaos.py --faults {faults} --seed {seed}" + " --vllm" * vllm
    command += ("" if config == CONFIG else f" --config {config}") + f" --disk-mib {disk_mib}" * (disk_mib != DISK_MIB)
    done = sum("part" in line for line in read_record(seed, engine))
    began = datetime.now(UTC).isoformat(timespec="seconds")
    header = {"sitting": began, "commit": commit(), "machine": machine(), "engine": engine, "seed_of_campaign": seed}
    sitting = Sitting(
        cases=lambda place: draw_cases(seed, faults, place.has)[done:],
        vllm=vllm,
        is_quick=False,
        record=recorder(header),
        until=time.monotonic() + 60 * minutes,
        config=config,
        disk_mib=disk_mib,
    )
    try:
        if done < faults:
            sitting.run()
    finally:
        result = summary(read_record(seed, engine), seed, engine, command)
        if result["faults"]:
            save(result, name_of(vllm, config))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no fault after so long")
    parser.add_argument("--case", nargs="+", default=[], type=Case.parse, metavar="PART:FAULT:MOMENT:SEED")
    parser.add_argument("--vllm", action="store_true", help="vLLM in the place of the engine for tiny models")
    parser.add_argument("--config", default=CONFIG, help="what is trained, such as configs/quickstart.yaml")
    parser.add_argument("--disk-mib", type=int, default=DISK_MIB, help="size of the run's disk, which is in memory")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run, too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
    try:
        if arguments.quick or arguments.case:
            cases = arguments.case or [*read_cases(QUICK), *read_cases(REGRESSIONS)]
            found = Sitting(
                lambda place: [case for case in cases if is_possible(case.part, place.has)],
                arguments.vllm,
                arguments.quick,
                record=lambda line: print(json.dumps(line), file=sys.stderr, flush=True),
                config=arguments.config,
                disk_mib=arguments.disk_mib,
            ).run()
            result = {"benchmark": "chaos", "machine": machine(), "rows": rows(found["outcomes"]), **found}
        else:
            result = carry_on(
                arguments.seed,
                arguments.faults,
                vllm=arguments.vllm,
                minutes=arguments.minutes,
                config=arguments.config,
                disk_mib=arguments.disk_mib,
            )
    except BrokenError as error:
        sys.exit(f"BROKEN: {error}")
    print(json.dumps(result) if arguments.json else f"{result['machine']}\n{table(result['rows'])}")


if __name__ == "__main__":
    main()
