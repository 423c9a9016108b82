"""Metrics for other systems: none of them can hold up or end a run, what they lose is counted, names are legal, secrets
stay here. Prometheus and OpenTelemetry are the real libraries, which vLLM installs; test_trackers.py has the others."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from roll_flash.config.reference import reference
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError
from roll_flash.monitor.exporters import export, systems
from roll_flash.monitor.exporters.config_values import HIDDEN, leaves, without_secrets
from roll_flash.monitor.exporters.export import MOST_WAITING, Exports, check_exporters
from roll_flash.monitor.exporters.systems import EXPORTERS, PrometheusExporter, flat_name
from roll_flash.monitor.metric_table import TABLE
from roll_flash.monitor.metrics import MetricsLog, read_metrics
from tests.docs.pages import blocks_of

TREE: dict[str, Any] = {"name": "mine", "model": {"path": "tiny"}, "envs": [{"id": "TextFrozenLake-v0"}]}
LINE = {"reward": 0.5, "idle/learner": 0.25, "rewards/a.b": 1.0, "grad_norm": math.nan}


def config_with(**monitor: Any) -> dict[str, Any]:
    return load_config({**TREE, "monitor": monitor}).model_dump(mode="json")


@dataclass
class Recorder:
    """Stands for a system: keeps what it gets, and does what a test tells it."""

    opens: list[BaseException | None] = field(default_factory=list)
    """What each call of `open` raises; later ones succeed."""
    error: BaseException | None = None
    may_log: threading.Event = field(default_factory=threading.Event)
    points: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    has_begun: threading.Event = field(default_factory=threading.Event)
    newest: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    summary: Any = "not closed"
    close_error: BaseException | None = None

    def open(self) -> None:
        if self.opens and (error := self.opens.pop(0)) is not None:
            raise error

    def log(self, step: int, time_s: float, values: Any) -> None:
        self.has_begun.set()
        assert self.may_log.wait(60)
        if self.error is not None:
            raise self.error
        self.points.append((step, dict(values)))
        self.newest.put(step)

    def has_got(self, step: int) -> bool:
        """Wait for the next point that was not asked for yet."""
        return self.newest.get(timeout=60) == step

    def close(self, summary: Any) -> None:
        self.summary = summary
        if self.close_error is not None:
            raise self.close_error


def ready(**fields: Any) -> Recorder:
    recorder = Recorder(**fields)
    recorder.may_log.set()
    return recorder


# Threads and queues


def test_each_system_gets_every_finite_value_and_the_summarys_numbers(tmp_path: Path) -> None:
    one, other, notes = ready(), ready(), list[str]()
    exports = Exports({"one": one, "other": other}, notes.append)
    log = MetricsLog(tmp_path, tensorboard=False, exports=exports)
    log.log(1, LINE)
    log.log(2, {"reward": 1.0})
    log.close()
    exports.finish(
        {
            "steps": 2,
            "books": {"trained": 4, "balance": True},
            "plot": None,
            "name": "x",
            "bad": math.inf,
            "huge": 10**400,
        }
    )
    exports.close()
    first = {"reward": 0.5, "idle/learner": 0.25, "rewards/a.b": 1.0, "metrics/not_finite": 1.0, "step": 1.0}
    assert one.points == other.points == [(1, first), (2, {"reward": 1.0, "step": 2.0})]
    assert one.summary == {"summary/steps": 2.0, "summary/books/trained": 4.0, "summary/books/balance": 1.0}
    assert one.summary == other.summary
    assert notes == []


def test_a_run_that_ends_early_has_no_summary() -> None:
    system = ready()
    Exports({"it": system}, pytest.fail).close()
    assert system.summary is None


def test_a_slow_system_holds_up_nobody_and_what_it_misses_is_counted(tmp_path: Path) -> None:
    slow, quick, notes = Recorder(), ready(), list[str]()
    exports = Exports({"slow": slow, "quick": quick}, notes.append)
    log = MetricsLog(tmp_path, tensorboard=False, exports=exports)
    for step in range(1, MOST_WAITING + 4):
        log.log(step, {"reward": 0.0})
        assert quick.has_got(step)
    assert notes == [f"slow does not take the metrics ({MOST_WAITING} points wait for it); the run goes on"]
    log.log(MOST_WAITING + 4, {"reward": 0.0})
    log.close()
    assert read_metrics(tmp_path)[-1]["export/dropped_slow"] == 3
    slow.may_log.set()
    exports.close()
    assert [step for step, _ in slow.points] == list(range(1, MOST_WAITING + 1))
    assert len(quick.points) == MOST_WAITING + 4
    assert notes[1:] == ["slow did not get 4 points of metrics.jsonl, which has all"]


def test_a_system_that_hangs_is_left_behind_at_the_end_and_its_points_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "CLOSES_WITHIN_S", 0.2)
    hangs, works, notes = Recorder(), ready(), list[str]()
    exports = Exports({"hangs": hangs, "works": works}, notes.append)
    for step in (1, 2, 3):
        exports.log(step, 0.0, {"reward": 0.0})
    assert hangs.has_begun.wait(60)
    exports.close()
    assert notes == [
        "hangs does not take the metrics (it did not end within 0.2 s); the run goes on",
        "hangs did not get 3 points of metrics.jsonl, which has all",
    ]
    assert hangs.summary == "not closed"
    assert works.summary is None
    hangs.may_log.set()


@pytest.mark.parametrize("error", [OSError("away\nand more"), SystemExit(1), BaseException()])
def test_a_system_that_fails_is_said_once_and_the_points_are_counted(error: BaseException) -> None:
    system, notes = ready(error=error), list[str]()
    exports = Exports({"it": system}, notes.append)
    for step in (1, 2, 3):
        exports.log(step, 0.0, {"reward": 0.0})
    exports.close()
    assert exports.metrics() == {"export/dropped_it": 3.0}
    assert notes[0].startswith(f"it does not take the metrics ({type(error).__name__}: ")
    assert notes[1:] == ["it did not get 3 points of metrics.jsonl, which has all"]


def test_what_a_library_says_is_one_short_line_without_the_password_in_its_address() -> None:
    system, notes = ready(error=OSError("https://me:sk-1@host/x \x1b[2J" + 9999 * "x")), list[str]()
    exports = Exports({"it": system}, notes.append)
    exports.log(1, 0.0, {"reward": 0.0})
    exports.close()
    assert notes[0].startswith(f"it does not take the metrics (OSError: https://{HIDDEN}@host/x \\x1b[2Jxxx")
    assert len(notes[0]) < 400


def test_a_system_that_is_away_at_the_start_gets_the_points_from_when_it_is_there() -> None:
    system, notes = ready(opens=[OSError("away"), OSError("still away")]), list[str]()
    exports = Exports({"it": system}, notes.append)
    for step in (1, 2, 3):
        exports.log(step, 0.0, {"reward": 0.0})
    exports.close()
    assert [step for step, _ in system.points] == [2, 3]
    assert exports.metrics() == {"export/dropped_it": 1.0}
    assert notes[0] == "it does not take the metrics (OSError: away); the run goes on"


def test_one_that_never_opened_is_not_closed() -> None:
    system = ready(opens=[OSError("away")])
    Exports({"it": system}, lambda _: None).close()
    assert system.summary == "not closed"


def test_a_failure_at_the_end_is_said_after_others() -> None:
    system, notes = ready(error=OSError("busy"), close_error=OSError("disk full")), list[str]()
    exports = Exports({"it": system}, notes.append)
    exports.log(1, 0.0, {"reward": 1.0})
    exports.close()
    assert [("busy" in note, "disk full" in note) for note in notes] == [(True, False), (False, True), (False, False)]


# The config


def test_a_missing_library_is_one_line_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (make, _, packages) in EXPORTERS.items():
        monkeypatch.setitem(EXPORTERS, name, (make, "no_such_library", packages))
        with pytest.raises(ConfigError) as caught:
            check_exporters([name])
        expected = f"monitor.export: {name}: No module named 'no_such_library'; pip install {packages}"
        assert str(caught.value) == expected


def test_all_that_the_config_allows_can_be_made_and_no_library_is_imported_for_it(tmp_path: Path) -> None:
    form: Any = Config.model_json_schema()["$defs"]["MonitorConfig"]["properties"]["export"]["items"]
    assert form["enum"] == list(EXPORTERS)
    for name in EXPORTERS:
        EXPORTERS[name][0](tmp_path, config_with(export=[name]))
    assert "`monitor.export`" in reference()


def test_nothing_is_imported_and_no_thread_runs_without_the_option(tmp_path: Path) -> None:
    before = threading.active_count()
    check_exporters(config_with()["monitor"]["export"])
    Exports.of(config_with(), tmp_path, pytest.fail).close()
    assert threading.active_count() == before


def test_secrets_of_a_config_stay_here() -> None:
    tree = {
        "api_key": "sk-1",
        "headers": {"Authorization": "Bearer sk-2", "X-Api-Key": "sk-3"},
        "nested": [{"password": "sk-4", "accessToken": "sk-5"}, "https://me:sk-6@host/x?api_key=sk-7&n=1"],
        "copy_to": "s3://sk-8@bucket/runs?sig=sk-9",
        "api_key_env": "OPENAI_API_KEY",
        "max_new_tokens": 64,
        "token": None,
    }
    shown = without_secrets(tree)
    assert "sk-" not in json.dumps(shown)
    assert shown["nested"] == [
        {"password": HIDDEN, "accessToken": HIDDEN},
        f"https://{HIDDEN}@host/x?api_key={HIDDEN}&n=1",
    ]
    assert {name: shown[name] for name in ("api_key_env", "max_new_tokens", "token")} == {
        "api_key_env": "OPENAI_API_KEY",
        "max_new_tokens": 64,
        "token": None,
    }
    assert tree["api_key"] == "sk-1"


def test_no_key_of_ours_is_hidden() -> None:
    config = load_config(TREE).model_dump(mode="json")
    assert without_secrets(config) == config
    assert dict(leaves(config))["learner.loss.name"] == config["learner"]["loss"]["name"]


# Names


def test_every_metric_of_ours_has_a_legal_name_of_its_own() -> None:
    names = [metric.name.replace("{", "").replace("}", "") for metrics in TABLE.values() for metric in metrics]
    flat = [flat_name(name) for name in names]
    assert len(set(flat)) == len(names)
    assert all(name.isascii() and name.replace("_", "").isalnum() for name in flat)


# Prometheus


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, str, str], float]:
    answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60)
    answer.raise_for_status()
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, sample.labels["run"], sample.labels["metric"]): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus_scrapes_the_newest_values_on_loopback_only(tmp_path: Path, port: int) -> None:
    exporter = PrometheusExporter(tmp_path, config_with(export=["prometheus"], prometheus_port=port))
    exporter.open()
    exporter.log(1, 0.0, {"reward": 0.5, "rewards/a.b": 1.0, "rewards/a_b": 2.0})
    exporter.log(2, 0.0, {"reward": 0.75})
    assert scrape(port) == {
        ("roll_flash_reward", "mine", "reward"): 0.75,
        ("roll_flash_rewards_a_b", "mine", "rewards/a.b"): 1.0,
        ("roll_flash_rewards_a_b", "mine", "rewards/a_b"): 2.0,
    }
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=60)
    exporter.close(None)
    with pytest.raises(httpx.ConnectError):
        scrape(port)


def test_whoever_connects_to_the_port_takes_neither_threads_nor_files_of_the_run(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thousand silent connections of another user took all file descriptors and ended the run, with no checkpoint."""
    monkeypatch.setattr(systems._Scrape, "timeout", 0.3)
    exporter = PrometheusExporter(tmp_path, config_with(export=["prometheus"], prometheus_port=port))
    exporter.open()
    exporter.log(1, 0.0, {"reward": 0.5})
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(5)]
        idle[1].send(b"GET /metrics HTTP/1.1")  # and never the end
        assert scrape(port) == {("roll_flash_reward", "mine", "reward"): 0.5}
        assert threading.active_count() == threads
        assert len(list(Path("/proc/self/fd").iterdir())) <= files + len(idle) + 1
    exporter.close(None)
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monitor = {"export": ["prometheus"], "prometheus_port": taken.getsockname()[1]}
        exports = Exports.of(config_with(**monitor), tmp_path, notes.append)
        exports.log(1, 0.0, {"reward": 0.5})
        exports.close()
    assert f"port {monitor['prometheus_port']}: Address already in use; set another monitor.prometheus_port" in notes[0]
    assert exports.metrics() == {"export/dropped_prometheus": 1.0}


# OpenTelemetry


@dataclass
class Receiver:
    """A receiver of OTLP over HTTP: what it got, and the headers with it."""

    url: str
    requests: list[ExportMetricsServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/metrics"
            found.requests.append(ExportMetricsServiceRequest.FromString(body))
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(found.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiver(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        yield found
        server.shutdown()


def test_opentelemetry_gets_each_step_as_gauges(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20sk-1")
    exports = Exports.of(config_with(export=["otel"]), tmp_path, pytest.fail)
    exports.log(3, 1.5e9, LINE)
    exports.close()
    (request,), (headers,) = receiver.requests, receiver.headers
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert about["service.name"] == "roll-flash"
    assert headers["authorization"] == "Bearer sk-1"
    points = {metric.name: metric.gauge.data_points[0] for metric in scope.metrics}
    assert {name: point.as_double for name, point in points.items()} == {
        "roll_flash_reward": 0.5,
        "roll_flash_idle_learner": 0.25,
        "roll_flash_rewards_a_b": 1.0,
        "roll_flash_step": 3.0,
    }
    labels = {each.key: each.value.string_value for each in points["roll_flash_idle_learner"].attributes}
    assert labels == {"run": "mine", "metric": "idle/learner"}
    assert {point.time_unix_nano for point in points.values()} == {1_500_000_000 * 10**9}
    assert not list(tmp_path.rglob("*"))


def test_a_receiver_that_refuses_is_said_with_its_reason_once(
    tmp_path: Path, receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver.status = 401
    notes: list[str] = []
    exports = Exports.of(config_with(export=["otel"]), tmp_path, notes.append)
    for step in (1, 2):
        exports.log(step, 0.0, {"reward": 0.5})
    exports.close()
    assert exports.metrics() == {"export/dropped_otel": 2.0}
    assert "401" in notes[0]
    assert len(notes) == 2
    assert capfd.readouterr() == ("", "")


# The page


def test_the_pages_configs_and_names_are_right() -> None:
    """docs/exporters.md"""
    blocks = blocks_of("docs/exporters.md")
    (text,) = (block.text for block in blocks if block.language == "yaml")
    config = load_config({**TREE, **yaml.safe_load(text)})
    assert config.monitor.export == ("wandb", "prometheus")
    (source,) = (block.text for block in blocks if block.language == "python")
    exec(compile(source, "docs/exporters.md", "exec"), {"__name__": "example"})
