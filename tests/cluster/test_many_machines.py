"""Runs over several machines, with real Ray between them: where the parts are, what reaches what, what may fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from roll_flash.cluster.plan import ports_text
from roll_flash.config.tree import load_config
from roll_flash.monitor.metrics import STEP_S
from roll_flash.processes.ports import MIN_PORT, connection_ports
from roll_flash.summary import check_counts
from tests.cluster.machines import Machine, machines, why_not
from tests.leaks import Session

pytestmark = [pytest.mark.ray]

ROLL_FLASH = [sys.executable, "-m", "roll_flash"]
RUN_TIMEOUT_S = 400.0
OURS = r"roll_flash\.|ServerHost|RankActor|WorkerActor|MirrorActor|NodeFiles|NodeSetup"
"""Regular expression for the processes of a run on a machine."""
PARTS = {
    "rollout.worker_resources": "{CPU: 0.1, envs: 1}",
    "inference.server_resources": "{CPU: 1, servers: 1}",
    "learner.rank_resources": "{CPU: 1, ranks: 1}",
}


@pytest.fixture(autouse=True)
def _there_can_be_machines() -> None:
    if reason := why_not():
        pytest.skip(reason)


def train(head: Machine, **settings: Any) -> list[str]:
    """Command of a run of the tiny model, whose folder is on the disk of `head` alone."""
    wanted = {
        "name": "run",
        "runs": "/tmp/runs",
        "inference.engine": "transformers",
        "ray.address": f"{head.address}:6379",
        "eval.tasks": 4,
        **PARTS,
        **settings,
    }
    values = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in wanted.items()]
    return [*ROLL_FLASH, "train", "configs/ci.yaml", *values]


def rows(head: Machine) -> list[dict[str, Any]]:
    """Metrics of the run so far."""
    status, text = head.run("cat", "/tmp/runs/run/metrics.jsonl")
    return [json.loads(line) for line in text.splitlines()] if status == 0 else []


def steps(head: Machine) -> int:
    return max((row["step"] for row in rows(head) if STEP_S in row), default=0)


def wait_for(condition: Any, process: subprocess.Popen[str], what: str, limit_s: float = RUN_TIMEOUT_S) -> float:
    """Wait until `condition()`; return how long it took."""
    began = time.monotonic()
    while not condition():
        assert process.poll() is None, f"the run ended before {what}:\n{process.communicate()[0]}"
        assert time.monotonic() - began < limit_s, f"no {what} within {limit_s:g} s"
        time.sleep(1)
    return time.monotonic() - began


def end(process: subprocess.Popen[str], head: Machine) -> str:
    """Ask a run to end; return its output. Its books must balance."""
    status, _ = head.run("pkill", "-INT", "-f", "roll_flash train")
    assert status == 0
    output, _ = process.communicate(timeout=120)
    counts = check_counts(books(head))
    assert counts["balance"], (counts, output)
    return output


def books(head: Machine) -> dict[str, Any]:
    last = [row for row in rows(head) if STEP_S in row][-1]
    return {name.removeprefix("books/"): value for name, value in last.items() if name.startswith("books/")}


def failed(head: Machine) -> dict[str, int]:
    """Failed episodes of a run by their cause, retried ones included."""
    causes: dict[str, int] = check_counts(books(head))["failed"]
    return {cause: count for cause, count in causes.items() if count}


def asks(machine: Machine, server: Machine) -> bool:
    """True if a worker on `machine` has sent a request to a model server on `server`: it keeps the connection."""
    ports = f"( dport ge :{MIN_PORT} and dport lt :{connection_ports().start} )"
    status, output = machine.run("ss", "-Htnp", "state", "established", "dst", server.address, "and", ports)
    assert status == 0, output
    return "WorkerActo" in output


def processes(machine: Machine, name: str) -> int:
    """Number of processes on a machine whose command line contains `name`."""
    _, output = machine.run("pgrep", "--count", "--full", name)
    return int(output)


def processes_left(machine: Machine, within_s: float = 30) -> int:
    """Number of processes of runs on a machine, 0 as soon as all have ended: Ray ends actors after their driver."""
    deadline = time.monotonic() + within_s
    while (left := processes(machine, OURS)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


@pytest.fixture(scope="module")
def spread_run() -> Iterator[dict[str, Any]]:
    """A run of the tiny model whose two ranks, server and workers with sandboxes are on two other machines."""
    environment: dict[str, str] = {}
    session = Session.begin(environment)
    with machines("head", "envs", "gpus") as (head, envs, gpus):
        head.join_ray(cpus=1, **environment)
        envs.join_ray(head, resources='{"envs": 2, "ranks": 1}', **environment)
        gpus.join_ray(head, resources='{"servers": 1, "ranks": 1}', **environment)
        settings = {"learner.ranks": 2, "learner.threads": 1, "rollout.workers": 2}
        first = head.run(*train(head, **settings), timeout_s=RUN_TIMEOUT_S)
        again = head.run(*train(head, **settings, steps=4), "--resume", timeout_s=RUN_TIMEOUT_S)
        check = head.run(sys.executable, ".ci/check_run.py", "/tmp/runs/run", "--few")
        left = {each.name: processes_left(each) for each in (envs, gpus)}
        yield {
            "first": first,
            "again": again,
            "check": check,
            "left": left,
            "rows": rows(head),
            "model": head.run("ls", "/tmp/runs/run/model")[1],
        }
    assert not session.leaks()


def test_a_run_over_three_machines_is_a_run_as_any_other(spread_run: dict[str, Any]) -> None:
    status, output = spread_run["first"]
    assert status == 0, output
    assert re.search(r"worker 0-1 +envs \(10\.77\.0\.2\) +0\.1 each +1 envs each", output)
    assert re.search(r"server 0 +gpus \(10\.77\.0\.3\) +1 .* 1 servers", output)
    assert "the books balance" in output
    assert spread_run["check"][0] == 0, spread_run["check"][1]
    assert max(row["weights/parity"] for row in spread_run["rows"] if "weights/parity" in row) <= 1e-4


def test_checkpoints_and_the_model_are_on_the_drivers_disk_and_a_run_goes_on_from_there(
    spread_run: dict[str, Any],
) -> None:
    assert "model.safetensors" in spread_run["model"]
    status, output = spread_run["again"]
    assert status == 0, output
    assert "step 4/4" in output
    assert "step 3/4" not in output


def test_nothing_of_a_run_stays_on_its_machines(spread_run: dict[str, Any]) -> None:
    assert spread_run["left"] == {"envs": 0, "gpus": 0}


def assert_only_turns_in_flight_were_lost(head: Machine) -> None:
    lost = failed(head)
    assert lost.keys() <= {"worker_died"}, lost
    assert sum(lost.values()) <= load_config("configs/ci.yaml").rollout.max_concurrent, "all turns in flight"


@pytest.mark.nightly
def test_a_machine_without_power_costs_its_turns_and_is_used_again_when_it_is_back() -> None:
    with machines("head", "one", "two") as (head, one, two):
        head.join_ray(cpus=2, resources='{"ranks": 1}')
        for each in (one, two):
            each.join_ray(head, resources='{"envs": 1, "servers": 1}')
        settings = {"rollout.workers": 2, "inference.servers": 2, "inference.health_timeout_s": 5, "steps": 1000}
        run = head.start(*train(head, **settings))
        wait_for(lambda: steps(head) >= 1, run, "step")

        two.power_off()
        before = steps(head)
        wait_for(lambda: steps(head) >= before + 10, run, "ten steps with one machine")

        two.power_on()
        two.join_ray(head, resources='{"envs": 1, "servers": 1}')
        wait_for(lambda: asks(two, one) or asks(two, two), run, "episode on the machine that came back")
        wait_for(lambda: asks(one, two) or asks(two, two), run, "request to the server there")
        before = steps(head)
        wait_for(lambda: steps(head) >= before + 2, run, "steps with both machines")

        status, text = head.run(*ROLL_FLASH, "scale", "/tmp/runs/run", "servers=1", "workers=1")
        assert (status, text.strip()) == (0, "1 server(s) and 1 worker(s) now")
        assert processes(two, "transformers.server") == processes(two, "WorkerActor") == 0
        status, text = head.run(*ROLL_FLASH, "scale", "/tmp/runs/run", "servers=2", "workers=3")
        assert status == 1
        assert "worker 2 needs 0.1 CPU, 1 envs, and no node has that free" in text
        assert processes(two, "transformers.server")
        assert processes(two, "WorkerActor")
        before = steps(head)
        wait_for(lambda: steps(head) >= before + 2, run, "steps after scaling")
        output = end(run, head)
        assert "interrupted; a checkpoint of step" in output, output
        assert_only_turns_in_flight_were_lost(head)


@pytest.mark.nightly
def test_a_rank_whose_machine_has_no_power_costs_no_step_and_the_learner_goes_on_with_the_others() -> None:
    with machines("head", "two") as (head, two):
        head.join_ray(cpus=3, resources='{"ranks": 1, "servers": 1, "envs": 1}')
        two.join_ray(head, resources='{"ranks": 1}')
        settings = {"learner.ranks": 2, "learner.threads": 1, "steps": 1000, "checkpoint.every": 2}
        run = head.start(*train(head, **settings))
        wait_for(lambda: steps(head) >= 3, run, "third step")
        two.power_off()
        before = steps(head)
        wait_for(lambda: steps(head) >= before + 3, run, "three steps with one rank")
        output = end(run, head)
        assert "; starting the learner again, from the checkpoint of step " in output, output
        assert "the learner has 1 of 2 ranks: rank 1 needs" in output, output
        made = [row["step"] for row in rows(head) if STEP_S in row]
        assert made == list(range(1, steps(head) + 1))


@pytest.mark.nightly
def test_a_firewall_between_driver_and_server_is_one_line_with_the_remedy() -> None:
    with machines("head", "far") as (head, far):
        head.join_ray(cpus=2, resources='{"ranks": 1, "envs": 1}')
        far.join_ray(head, resources='{"servers": 1}')
        assert far.run("iptables", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "--dport", "25000", "-j", "DROP")[0] == 0
        settings = {"inference.port": 25000}
        status, output = head.run(*train(head, **settings), timeout_s=RUN_TIMEOUT_S)
    assert status == 1
    assert (
        "node far (10.77.0.2) cannot be reached from the driver's node at port 25000 (no answer within 5 s)" in output
    )
    assert "starting servers" not in output


@pytest.mark.nightly
def test_a_firewall_between_worker_and_server_is_one_line_with_the_remedy() -> None:
    with machines("head", "envs", "far") as (head, envs, far):
        head.join_ray(cpus=2, resources='{"ranks": 1}')
        envs.join_ray(head, resources='{"envs": 1}')
        far.join_ray(head, resources='{"servers": 1}')
        drop = ("-s", envs.address, "-p", "tcp", "--dport", "25000", "-j", "DROP")
        assert far.run("iptables", "-A", "INPUT", *drop)[0] == 0
        settings = {"inference.port": 25000}
        status, output = head.run(*train(head, **settings), timeout_s=RUN_TIMEOUT_S)
    assert status == 1
    assert "node far (10.77.0.3) cannot be reached from node envs (10.77.0.2) at port 25000 (no answer" in output
    assert "; model servers listen there at 25000; open them in the firewall for the run's other nodes" in output
    assert "starting servers" not in output


@pytest.mark.nightly
def test_a_firewall_between_ranks_is_one_line_instead_of_a_start_that_hangs() -> None:
    ports = ports_text([connection_ports()])
    with machines("head", "one", "two") as (head, one, two):
        head.join_ray(cpus=2, resources='{"servers": 1, "envs": 1}')
        for each in (one, two):
            each.join_ray(head, resources='{"ranks": 1}')
        drop = ("-s", one.address, "-p", "tcp", "--syn", "--dport", ports.replace("-", ":"), "-j", "DROP")
        assert two.run("iptables", "-A", "INPUT", *drop)[0] == 0
        status, output = head.run(*train(head, **{"learner.ranks": 2, "learner.threads": 1}), timeout_s=RUN_TIMEOUT_S)
    assert status == 1
    assert "node two (10.77.0.3) cannot be reached from node one (10.77.0.2) at port " in output
    assert f"ranks use any of the ports {ports}; open them in the firewall for the run's other nodes" in output
    assert "starting servers" not in output


@pytest.mark.nightly
def test_two_runs_on_one_cluster_take_their_own_places() -> None:
    """The first run takes all servers that there are: the second is refused, and goes when another node has come."""
    with machines("head", "more") as (head, more):
        head.join_ray(cpus=4, resources='{"ranks": 2, "envs": 2, "servers": 1}')
        first = head.start(*train(head, steps=1000))
        wait_for(lambda: steps(head) >= 1, first, "step")
        second = train(head, name="second")
        status, output = head.run(*second, timeout_s=RUN_TIMEOUT_S)
        assert status == 1
        assert "server 0 needs 1 CPU, 1 servers, and no node has that free" in output, output

        more.join_ray(head, cpus=2, resources='{"servers": 1}')
        status, output = head.run(*second, timeout_s=RUN_TIMEOUT_S)
        assert status == 0, output
        assert "the books balance" in output
        before = steps(head)
        wait_for(lambda: steps(head) >= before + 2, first, "steps of the first run")
        assert "interrupted; a checkpoint of step" in end(first, head)


@pytest.mark.nightly
def test_a_cable_that_is_out_for_20_seconds_costs_at_most_the_turns_in_flight() -> None:
    """Ray may give the connection to the worker up in this time; then the worker is replaced."""
    with machines("head", "far") as (head, far):
        head.join_ray(cpus=2, resources='{"ranks": 1}')
        far.join_ray(head, resources='{"envs": 1, "servers": 1}')
        run = head.start(*train(head, steps=1000))
        wait_for(lambda: steps(head) >= 1, run, "step")
        far.cut()
        time.sleep(20)
        far.mend()
        before = steps(head)
        wait_for(lambda: steps(head) >= before + 2, run, "steps after the cable was put back")
        output = end(run, head)
        assert "interrupted; a checkpoint of step" in output, output
        assert_only_turns_in_flight_were_lost(head)
