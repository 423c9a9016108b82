"""The dashboard's HTTP server, on 127.0.0.1 only: the front end in `pages/`, and what it asks for, as JSON."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvicorn
import yaml
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from tokenizers import Tokenizer

from roll_flash.checked_files import CONTENT_ERRORS
from roll_flash.dashboard.episode_search import Search, Selection, counts, row_for_table
from roll_flash.dashboard.folders import Source, Sources
from roll_flash.dashboard.guard import Guard
from roll_flash.dashboard.timeline import timeline
from roll_flash.dashboard.transcript import episode_page, load_tokenizer, message_text
from roll_flash.diagnosis import Finding, diagnose
from roll_flash.errors import ConfigError, RollFlashError, first_line
from roll_flash.run.learner_logprobs import read_logprobs

PAGES = Path(__file__).parent / "pages"
WAIT_S = 0.05
"""Seconds that a request waits for the index to look at the files; a large run is indexed while pages are shown."""
CLOSE_TIMEOUT_S = 2
MAX_SEARCHES = 8
"""Number of selections whose results are kept."""


class NotFoundError(ConfigError):
    """There is no such run, episode or group."""


class Reports:
    """What a browser may ask, as plain data. Raises NotFoundError, OSError, or ValueError for a damaged file."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._searches: dict[Selection, Search] = {}
        self._findings: dict[str, tuple[str, list[Finding]]] = {}
        self._diagnosing = threading.Lock()

    def source(self, name: str) -> Source:
        try:
            return self._sources[name]
        except KeyError:
            raise NotFoundError(f"{name}: no run or evaluation of this name in {self._sources.roots}") from None

    def runs(self) -> dict[str, Any]:
        cards, errors = [], []
        for source in self._sources.all().values():
            try:
                cards.append(source.card())
            except (RollFlashError, OSError, yaml.YAMLError, *CONTENT_ERRORS) as error:
                errors.append(f"{source.folder}: {_reason(error)}")
        return {"runs": cards, "errors": errors, "roots": self._sources.roots}

    def about(self, run: str) -> dict[str, Any]:
        source = self.source(run)
        with source.lock:
            source.fates.refresh()
        config, newer = source.config(), source.fates.newer
        notices = (
            [f"written by a newer version (journal format {newer}): some of it may be missing here"] if newer else []
        )
        notices += [source.removed] if source.removed else []
        inside = [each for each in self._sources.all().values() if source.folder in each.folder.parents]
        return {
            "name": source.name,
            "kind": "run" if source.is_run else "evaluation",
            "folder": str(source.folder),
            "state": source.state,
            "status": source.status(),
            "config": config,
            "summary": source.summary(),
            "evaluations": {each.name: _scores(each) for each in inside},
            "notices": notices,
        }

    def findings(self, run: str) -> dict[str, Any]:
        """Diagnose a run, again only if it has written something: it reads up to a GiB of episodes."""
        source = self.source(run)
        if not source.is_run:
            return {"findings": []}
        with self._diagnosing:
            mark, known = source.mark(), self._findings.get(run)
            if known is None or known[0] != mark:
                known = self._findings[run] = mark, diagnose(source.folder)
        found = [{**finding.as_dict(), "evidence": list(map(str, finding.evidence))} for finding in known[1]]
        return {"findings": found}

    def counts(self, run: str) -> dict[str, Any]:
        index = self.source(run).index
        index.refresh(WAIT_S)
        return counts(index)

    def episodes(self, selection: Selection, offset: int, limit: int) -> dict[str, Any]:
        source = self.source(selection.run)
        source.index.refresh(WAIT_S)
        is_complete = source.index.is_complete
        search = self._searches.pop(selection, None)
        if search is None or search.generation != source.index.generation:
            search = Search(source.index, selection)
        search.go_on()
        self._searches[selection] = search
        for old in list(self._searches)[:-MAX_SEARCHES]:
            del self._searches[old]
        with source.lock:
            source.fates.refresh()
        rows = [row_for_table(source.index, row) for row in search.rows(offset, limit)]
        return {
            "rows": [{**row, **source.fates.of_group(row["group"])} for row in rows],
            "total": search.total,
            "searched": search.searched,
            "episodes": len(source.index.ids),
            "is_complete": is_complete,
            "error": source.index.error,
        }

    def episode(self, run: str, episode: str) -> dict[str, Any]:
        source, row = self._find(run, episode)
        path = source.tokenizer_file()
        tokenizer: Tokenizer | None = None if path is None else load_tokenizer(path, path.stat().st_mtime_ns)
        columns = row_for_table(source.index, row)
        record = _record(source, row)
        fate = self._fate(source, columns["group"], episode)
        if record.get("role"):  # each sample has an advantage of its own
            fate["advantage"] = None
        learner = read_logprobs(source.folder / "logs", fate["trained"], episode) if fate["trained"] else {}
        return {
            **columns,
            **fate,
            "replicas": [source.index.ids[each] for each in source.index.rows_of_group(columns["group"])],
            **episode_page(record, tokenizer, learner),
        }

    def _fate(self, source: Source, group: str, episode: str) -> dict[str, Any]:
        with source.lock:
            source.fates.refresh()
        fates = source.fates
        advantage = fates.advantages(group, source.config()).get(episode)
        reward = fates.rewards(group).get(episode)
        return {**fates.of_group(group), "advantage": advantage, "trained_reward": reward}

    def message(self, run: str, episode: str, sample: int, message: int) -> str:
        source, row = self._find(run, episode)
        try:
            return message_text(_record(source, row), sample, message)
        except IndexError:
            raise NotFoundError(f"{episode}: has no such message") from None

    def _find(self, run: str, episode: str) -> tuple[Source, int]:
        source = self.source(run)
        is_known = source.index.row(episode) is not None
        source.index.refresh(WAIT_S if is_known else 60.0, at_once=not is_known)
        if (row := source.index.row(episode)) is None:
            raise NotFoundError(f"{episode}: {source.name} has no episode of this id")
        return source, row

    def group(self, run: str, group: str) -> dict[str, Any]:
        source = self.source(run)
        source.index.refresh(WAIT_S)
        names = [source.index.ids[row] for row in source.index.rows_of_group(group)]
        if not names:
            raise NotFoundError(f"{group}: {run} has no episode of this group yet")
        return {"group": group, "episodes": [self.episode(run, name) for name in dict.fromkeys(names)]}

    def timeline(self, run: str, begin_s: float | None, end_s: float | None) -> dict[str, Any]:
        source = self.source(run)
        source.index.refresh(WAIT_S)
        is_complete = source.index.is_complete
        return timeline(source.index, source.folder, begin_s, end_s) | {"is_complete": is_complete}


def _scores(source: Source) -> dict[str, Any]:
    """Return success and reward of an evaluation with their intervals; nothing before its end, or if it is damaged."""
    try:
        summary = source.summary()
    except (RollFlashError, OSError, *CONTENT_ERRORS):
        return {}
    return {name: summary.get(name) for name in ("success", "reward")} if isinstance(summary, dict) else {}


def _record(source: Source, row: int) -> dict[str, Any]:
    if not source.index.line(row):
        raise NotFoundError(f"{source.name}: {source.removed}")
    return source.index.record(row)


def make_app(sources: Sources, token: str) -> ASGIApp:
    """Return the application. Every request needs `token` (`guard.py`)."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for kind in (RollFlashError, OSError, yaml.YAMLError, RequestValidationError, *CONTENT_ERRORS, Exception):
        app.add_exception_handler(kind, _explain)
    app.mount("/pages", StaticFiles(directory=PAGES))
    _add_routes(app, Reports(sources))
    return Guard(app, token)


def _add_routes(app: FastAPI, reports: Reports) -> None:
    # Not `async`: each runs in a thread, since it reads files.
    @app.get("/")
    def index() -> Response:
        return FileResponse(PAGES / "index.html")

    @app.get("/api/runs")
    def runs() -> Response:
        return _json(reports.runs())

    @app.get("/api/run")
    def about(run: str) -> Response:
        return _json(reports.about(run))

    @app.get("/api/findings")
    def findings(run: str) -> Response:
        return _json(reports.findings(run))

    @app.get("/api/mark")
    def mark(run: str) -> Response:
        return _json({"mark": reports.source(run).mark()})

    @app.get("/api/metrics")
    def metrics(run: str, name: Annotated[list[str] | None, Query()] = None) -> Response:
        return _json(reports.source(run).metrics(name or []))

    @app.get("/api/counts")
    def counted(run: str) -> Response:
        return _json(reports.counts(run))

    @app.get("/api/episodes")
    def episodes(request: Request, offset: int = 0, limit: int = 100) -> Response:
        given = {name: value for name, value in request.query_params.items() if name not in ("offset", "limit")}
        return _json(reports.episodes(Selection.model_validate(given), max(0, offset), max(0, limit)))

    @app.get("/api/episode")
    def episode(run: str, id: str) -> Response:
        return _json(reports.episode(run, id))

    @app.get("/api/message")
    def message(run: str, id: str, sample: int, message: int) -> Response:
        return PlainTextResponse(reports.message(run, id, sample, message))

    @app.get("/api/group")
    def group(run: str, group: str) -> Response:
        return _json(reports.group(run, group))

    @app.get("/api/timeline")
    def shown(run: str, begin: float | None = None, end: float | None = None) -> Response:
        return _json(reports.timeline(run, begin, end))


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data, enc_hook=str), media_type="application/json")


def _explain(request: Request, error: Exception) -> Response:
    """Answer with one line; the page shows it."""
    kinds: dict[type[Exception], int] = {NotFoundError: 404, OSError: 503}
    kinds |= dict.fromkeys((RollFlashError, RequestValidationError, yaml.YAMLError, *CONTENT_ERRORS), 422)
    status = next((status for kind, status in kinds.items() if isinstance(error, kind)), 500)
    reason = _reason(error)
    if isinstance(error, CONTENT_ERRORS) and not isinstance(error, RollFlashError) and not hasattr(error, "errors"):
        reason = f"{request.query_params.get('run', '?')}: {reason}"
    return Response(msgspec.json.encode({"error": reason}), status, media_type="application/json")


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, RequestValidationError) or hasattr(error, "errors"):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    if isinstance(error, RollFlashError):
        return first_line(error)
    text = f"{type(error).__name__}: {first_line(error)}"
    return f"its files are not as a run writes them: {text}" if isinstance(error, CONTENT_ERRORS) else text


def bind(port: int) -> socket.socket:
    """Return a socket of this machine only; `port` 0 is any free one. Raises ConfigError if it is in use."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
        bound.listen()
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        other = "is another dashboard there? " if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise ConfigError(f"port {port}: {reason}; {other}choose another with --port") from None
    return bound


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Return a server whose `run(sockets=[...])` answers until Ctrl-C or SIGTERM, or until `should_exit` is set."""
    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=CLOSE_TIMEOUT_S
        )
    )
