"""The systems that can get the metrics of a run, each through its own library, which is imported when it is opened.

W&B and MLflow keep runs, with our names of metrics; a resumed run goes on there. Prometheus and OpenTelemetry have
metrics of many services: a metric has its `flat_name` there, and the labels `run` and `metric`, our name of it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from roll_flash.monitor.exporters.config_values import leaves
from roll_flash.monitor.metric_table import find_metric

OPENS_WITHIN_S, FINISHES_WITHIN_S = 30.0, 10.0
"""Deadlines in seconds of W&B, of its server to answer first and to take the rest."""
SENDS_METRICS_ONLY = {"disable_git": True, "save_code": False, "x_disable_meta": True, "x_disable_stats": True}
"""Settings of W&B. Its metadata would have the command line, with the values that the config hides."""
PARAMETERS_AT_ONCE = 100
"""Most that MLflow takes."""
LOOPBACK = "127.0.0.1"
SCRAPE_S, BETWEEN_SCRAPES_S, MAX_HEAD_BYTES = 2.0, 0.02, 1 << 16
"""Seconds in which Prometheus must send its request, and take the answer; pause in seconds after an answer, so that
scrapes without end take no more than a share of the run's Python."""
OTLP = "opentelemetry.exporter.otlp.proto.http.metric_exporter"

Config = Mapping[str, Any]
"""As config.yaml has it, without secrets."""
Values = Mapping[str, float]
"""Finite values by the names of `metrics.jsonl`, and `step`."""


class Exporter(Protocol):
    """One system. `open` begins a run there, or goes on with that of before; if it fails, it is called again. `close`
    gets the numbers of `summary.json`, as `summary/...`, or None if the run ended early. All are called in one thread;
    they may block, and raise anything."""

    def open(self) -> None: ...
    def log(self, step: int, time_s: float, values: Values) -> None: ...
    def close(self, summary: Values | None) -> None: ...


class WandbExporter:
    """Its x axis is our `step`: W&B's own counts calls and cannot go back, as a resumed run does."""

    def __init__(self, run_folder: Path, config: Config) -> None:
        self._folder, self._config = run_folder, config
        self._run: Any = None

    def open(self) -> None:
        import wandb

        monitor = self._config["monitor"]
        deadlines = {"init_timeout": OPENS_WITHIN_S, "finish_timeout": FINISHES_WITHIN_S}
        settings = wandb.Settings(silent=True, console="off", **SENDS_METRICS_ONLY, **deadlines)
        wandb.setup(settings)  # silent: it must not ask for a key on the terminal
        self._run = wandb.init(
            project=monitor["export_project"],
            name=self._config["name"],
            id=_run_id(self._folder / "wandb.id", partial(secrets.token_hex, 4)),
            resume="allow",
            mode="offline" if monitor["export_offline"] else None,
            dir=self._folder,
            config=dict(self._config),
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time_s: float, values: Values) -> None:
        self._run.log(dict(values))

    def close(self, summary: Values | None) -> None:
        self._run.summary.update(summary or {})
        self._run.finish(exit_code=int(summary is None))


class MlflowExporter:
    """Works by MLflow's client, so that a run which the user's code has begun stays what it is."""

    def __init__(self, run_folder: Path, config: Config) -> None:
        self._folder, self._config = run_folder, config
        self._client: Any = None
        self._run_id, self._step = "", 0
        self._lacks_parameters = False

    def open(self) -> None:
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it prints what it does to its database
        offline = self._config["monitor"]["export_offline"]
        uri = f"sqlite:///{(self._folder / 'mlflow.db').resolve()}" if offline else None
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = _run_id(self._folder / "mlflow.id", self._begin)
        if self._lacks_parameters:  # after the id is on the disk: a server that fails here must not get a run per try
            self._log_parameters()
            self._lacks_parameters = False
        self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, time_s: float, values: Values) -> None:
        from mlflow.entities import Metric

        self._step, at_ms = step, int(1000 * time_s)
        metrics = [Metric(re.sub(r"[^\w\-. /]", "_", name), value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, summary: Values | None) -> None:
        self.log(self._step, time.time(), summary or {})
        self._client.set_terminated(self._run_id, "FAILED" if summary is None else "FINISHED")

    def _begin(self) -> str:
        """Create the run, and return its id."""
        project = self._config["monitor"]["export_project"]
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self._lacks_parameters = True
        return str(self._client.create_run(experiment, run_name=self._config["name"]).info.run_id)

    def _log_parameters(self) -> None:
        """They stay when the run is resumed: MLflow refuses others."""
        from mlflow.entities import Param

        parameters = [Param(key, str(value)) for key, value in leaves(self._config)]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=parameters[first : first + PARAMETERS_AT_ONCE])


class PrometheusExporter:
    """Serves the newest values as `/metrics` on this machine's loopback address while the run goes on."""

    def __init__(self, run_folder: Path, config: Config) -> None:
        self._run, self._port = config["name"], config["monitor"]["prometheus_port"]
        self._gauges: dict[str, Any] = {}

    def open(self) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._registry = CollectorRegistry()
        try:
            self._server = _ScrapeServer((LOOPBACK, self._port), _Scrape)
        except OSError as error:
            raise OSError(f"port {self._port}: {error.strerror}; set another monitor.prometheus_port") from None
        self._server.set_app(make_wsgi_app(self._registry))
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def log(self, step: int, time_s: float, values: Values) -> None:
        from prometheus_client import Gauge

        for name, value in values.items():
            if (flat := flat_name(name)) not in self._gauges:
                known = find_metric(name)
                meaning = known.meaning if known else name
                self._gauges[flat] = Gauge(flat, meaning, ("run", "metric"), registry=self._registry)
            self._gauges[flat].labels(self._run, name).set(value)

    def close(self, summary: Values | None) -> None:
        self._server.shutdown()
        self._server.server_close()


class _ScrapeServer(WSGIServer):
    """Answers one connection after the other. The library's own server has a thread and a file descriptor of the run
    for each connection: any user of this machine, who needs no key, could use up all of them."""

    def finish_request(self, request: Any, client_address: Any) -> None:
        super().finish_request(request, client_address)
        time.sleep(BETWEEN_SCRAPES_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that was too slow, or has gone."""


class _Scrape(WSGIRequestHandler):
    timeout = SCRAPE_S

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BytesIO(self.connection.recv(MAX_HEAD_BYTES))  # in one piece: each further one could be late

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""

    def get_stderr(self) -> TextIO:
        return io.StringIO()  # else a client that takes no answer prints a traceback


class OtelExporter:
    """Sends gauges by OTLP over HTTP. The library reads address, headers, certificates and timeout from the variables
    OTEL_EXPORTER_OTLP_*: nothing of them is in a config."""

    def __init__(self, run_folder: Path, config: Config) -> None:
        self._run = config["name"]
        self._reason = ""

    def open(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import Resource

        logging.getLogger(OTLP).addFilter(self._keep_reason)
        self._exporter = OTLPMetricExporter()
        self._resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "roll-flash")})

    def log(self, step: int, time_s: float, values: Values) -> None:
        """Raises OSError with the library's reason if the receiver does not take them."""
        from opentelemetry.sdk.metrics import export as otel
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._reason, metrics = "", []
        for name, value in values.items():
            point = otel.NumberDataPoint({"run": self._run, "metric": name}, 0, int(1e9 * time_s), value)
            metrics.append(otel.Metric(flat_name(name), None, None, otel.Gauge([point])))
        scope = otel.ScopeMetrics(InstrumentationScope("roll_flash"), metrics, "")
        sent = self._exporter.export(otel.MetricsData([otel.ResourceMetrics(self._resource, [scope], "")]))
        if sent is not otel.MetricExportResult.SUCCESS:
            raise OSError(self._reason)

    def close(self, summary: Values | None) -> None:
        self._exporter.shutdown()
        logging.getLogger(OTLP).removeFilter(self._keep_reason)

    def _keep_reason(self, record: logging.LogRecord) -> bool:
        """Keep the first line of what the library would print at each failure."""
        self._reason = self._reason or record.getMessage()
        return False


EXPORTERS: dict[str, tuple[Callable[[Path, Config], Exporter], str, str]] = {
    "wandb": (WandbExporter, "wandb", "wandb"),
    "mlflow": (MlflowExporter, "mlflow", "mlflow"),
    "prometheus": (PrometheusExporter, "prometheus_client", "prometheus-client"),
    "otel": (OtelExporter, OTLP, "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"),
}
"""By name: what makes one, from a run folder and a config; the module that it needs; the packages to install."""


def flat_name(name: str) -> str:
    """Return `roll_flash_` and the name of a metric, with `_` for each character that is no letter, digit or `_`."""
    return "roll_flash_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _run_id(file: Path, begin: Callable[[], str]) -> str:
    """Read the id of this run in another system, or begin one. Raises ValueError for any other content."""
    if not file.exists():
        file.write_text(begin())
    with file.open() as opened:
        text = opened.read(65)
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise ValueError(f"{file} has no id; remove it to begin a new run there")
    return text
