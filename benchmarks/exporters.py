"""What it costs to send metrics to other systems (`monitor.export`): writes results/exporters.{json,md}.

    python benchmarks/exporters.py [--quick] [--lines N]

Each system in a process of its own, five times: lines with every metric of ours are logged, one after another, to
`metrics.jsonl` and the system. Counted is the processor time of the process and of those that the library starts,
beyond that of a process which only writes `metrics.jsonl`; importing and opening apart. W&B and MLflow write to the
disk (`monitor.export_offline`); OpenTelemetry sends to a receiver in another process. A system whose library is missing
is left out; wandb and mlflow are in the environment of `make test-adapters`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SYSTEMS = ("none", "wandb", "mlflow", "prometheus", "otel")
REPEATS, CHILD_TIMEOUT_S = 5, 900
GOAL = 0.01
"""At most this share of what all cores do in a step."""


def child(system: str, lines: int) -> dict[str, float]:
    """Log lines to one system in this process, and return the processor seconds to open it and for each line."""
    sys.path.insert(0, str(ROOT))
    from roll_flash.config.tree import load_config
    from roll_flash.monitor.exporters.export import Exports, check_exporters
    from roll_flash.monitor.metric_table import TABLE
    from roll_flash.monitor.metrics import MetricsLog

    names = [metric.name.replace("{", "").replace("}", "") for metrics in TABLE.values() for metric in metrics]
    monitor = {"export": [] if system == "none" else [system], "export_offline": True}
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "TextFrozenLake-v0"}], "monitor": monitor}
    config = load_config(tree).model_dump(mode="json")
    folder = Path.cwd()
    began_s = used_s()
    check_exporters(config["monitor"]["export"])
    exports = Exports.of(config, folder, lambda line: sys.exit(line))
    log = MetricsLog(folder, tensorboard=False, exports=exports)
    wait_until_taken(exports)
    opened_s = used_s()
    for step in range(lines):
        log.log(step, {name: step / (1 + place) for place, name in enumerate(names)})
        wait_until_taken(exports)
    logged_s = used_s()
    log.close()
    exports.close()
    if exports.metrics():
        sys.exit(f"{system} did not take all lines")
    return {"open_s": opened_s - began_s, "line_s": (logged_s - opened_s) / lines, "metrics": len(names)}


def wait_until_taken(exports: Any) -> None:
    """Wait until no line waits, so that a queue never fills up."""
    while any(each._added > each._settled or not each._is_open for each in exports._threads):
        time.sleep(0.002)


def used_s() -> float:
    """Processor seconds of this process and of its children, which may still run."""
    import psutil

    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(each.cpu_times()[:2]) for each in children)


def measure(system: str, lines: int, address: str) -> dict[str, float] | None:
    """Run a child in a new folder; None without its library."""
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": address}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", system, "--lines", str(lines)]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
    if "pip install" in done.stderr:
        return None
    if done.returncode:
        sys.exit(f"{system}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class Receiver(BaseHTTPRequestHandler):
    """Takes everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def compare(lines: int, repeats: int) -> dict[str, Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        runs = {system: [measure(system, lines, address) for _ in range(repeats)] for system in SYSTEMS}
        server.shutdown()
    base_s = fmean(run["line_s"] for run in runs["none"] if run)
    rows = {}
    for system, found in runs.items():
        if system != "none" and None not in found:
            more_ms = sorted(1000 * (run["line_s"] - base_s) for run in found if run)
            rows[system] = {
                "open_s": fmean(run["open_s"] for run in found if run),
                "line_ms": {"mean": fmean(more_ms), "low": more_ms[0], "high": more_ms[-1]},
            }
    metrics = next(run["metrics"] for run in runs["none"] if run)
    return {
        "cores": os.cpu_count(),
        "rows": rows,
        "metrics": metrics,
        "left_out": [name for name in SYSTEMS[1:] if name not in rows],
    }


def as_markdown(report: dict[str, Any]) -> str:
    out = [
        "# What it costs to send metrics to other systems",
        "",
        f"`python benchmarks/exporters.py --lines {report['lines']}` on {report['machine']}.",
        "",
        " ".join(__doc__.split("\n\n")[2].split()),
        "",
        f"A line has {report['metrics']:.0f} metrics, and a step has one line. In brackets: the range of "
        f"{report['repeats']} processes. The goal is at most {GOAL:.0%} of all cores; longer steps keep it.",
        "",
        f"| system | processor time of a line | is {GOAL:.0%} of a step of | to import and open it |",
        "|---|---|---|---|",
    ]
    for system, row in report["rows"].items():
        line = row["line_ms"]
        step_s = line["mean"] / 1000 / GOAL / report["cores"]
        out.append(
            f"| `{system}` | {line['mean']:.1f} ms [{line['low']:.1f}, {line['high']:.1f}] | {step_s:.2f} s | "
            f"{row['open_s']:.1f} s |"
        )
    return "\n".join([*out, *(f"\n`{name}` was left out: it is not installed." for name in report["left_out"]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few lines, one process each; writes nothing")
    parser.add_argument("--lines", type=int, help="default: 200, with --quick 5")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lines, repeats = options.lines or (5 if options.quick else 200), 1 if options.quick else REPEATS
    if options.child:
        print(json.dumps(child(options.child, lines)))
        return
    report = {"benchmark": "exporters", "machine": machine(), "lines": lines, "repeats": repeats}
    report |= compare(lines, repeats)
    if not options.quick:
        (RESULTS / "exporters.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "exporters.md").write_text(as_markdown(report))
    print(as_markdown(report))


if __name__ == "__main__":
    main()
