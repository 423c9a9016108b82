"""What all tests share: what they need, checked; Ray; and a guard that nothing outlives the session.

A test marked `docker` or `vllm` skips on a machine that lacks it, naming what is missing, and fails in CI.

`make test` runs several processes of pytest-xdist. A folder goes to one of them as a whole, since its tests share
servers.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import hypothesis
import pytest
from leaks import Session

from roll_flash.doctor import Check, check_bubblewrap, check_docker, check_vllm

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
LONGEST_ROOMS = (
    *("test_training_runs.py", "sandboxes", "envs", "inference", "cluster", "learner", "gpu_check", "rollout"),
    *("replay", "test_python_api.py", "test_watchdog_runs.py", "test_model_check.py", "test_tutorial.py"),
)
"""Those whose runs need the cores, mixed with those that mostly wait for sandboxes and deadlines."""
SESSION = pytest.StashKey[Session]()
STACKS = pytest.StashKey[TextIO]()
CRASHES = "roll_flash/crashes"
"""Key of pytest's cache: tests during which a process of pytest-xdist ended, for `.ci/alone.sh`."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs like that, and what they start inherits it: Ctrl-C would do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: on a shared machine one slow example says nothing about the code. In CI the same examples every time.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if IN_CI else "here")

NEEDS = {"docker": cache(check_docker), "vllm": cache(check_vllm)}


def pytest_collection_finish() -> None:
    """What the imports made is kept out of the collector's rounds, which take a second in the middle of some test."""
    gc.collect()
    gc.freeze()


def require(check: Check) -> None:
    """Skip the test that needs this, saying what is missing; in CI fail it."""
    if check.ok:
        return
    missing = f"{check.name}: {check.detail}; {check.fix}"
    if IN_CI:
        pytest.fail(f"CI must have what this test needs: {missing}", pytrace=False)
    pytest.skip(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, look in NEEDS.items():
        if item.get_closest_marker(marker):
            require(look())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """CI has what every test needs, so that one which skips there has failed."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"CI must be able to run this, but it was skipped: {report.longrepr}"
    return report


@pytest.fixture
def require_docker() -> None:
    """For tests that need an engine only in some of their cases; else mark them `docker`."""
    require(NEEDS["docker"]())


@pytest.fixture
def require_bubblewrap() -> None:
    require(check_bubblewrap())


@pytest.fixture(scope="session")
def chromium() -> str:
    """The program of a real browser."""
    program = shutil.which("chromium")
    found = program is not None
    require(Check("chromium", found, program or "there is no such program", fix="run make browser, or install it"))
    return str(program)


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """Ray on this machine, without a dashboard, for all tests that need it; shut down with the session."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return room_of(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # by number of tests
    return ByRoom(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest rooms first, so that the processes end at about the same time."""
    places = {room: place for place, room in enumerate(LONGEST_ROOMS)}
    items.sort(key=lambda item: places.get(room_of(item.nodeid.partition("::")[0]), len(places)))


def room_of(file: str) -> str:
    """The tests in a folder share servers, those in a file right below `tests` a run."""
    _, _, inner = file.partition("tests/")
    return inner.partition("/")[0]


def is_xdist_worker(config: pytest.Config) -> bool:
    """Such a process answers to the one that was started, which looks for leaks when all of them have ended."""
    return hasattr(config, "workerinput")


def stacks_of(config: pytest.Config, worker: str) -> Path:
    return Path(config.cache.mkdir("stacks")) / worker  # type: ignore[union-attr]


@pytest.hookimpl(trylast=True)  # after pytest's own plug-in, which has stacks go to the standard error of all
def pytest_configure(config: pytest.Config) -> None:
    cached = getattr(config, "cache", None) is not None  # not with `-p no:cacheprovider`
    if not is_xdist_worker(config):
        config.stash[SESSION] = Session.begin(os.environ)  # type: ignore[arg-type]
        if cached:
            config.cache.set(CRASHES, {})  # type: ignore[union-attr]
    elif cached:
        stacks = config.stash[STACKS] = stacks_of(config, config.workerinput["workerid"]).open("w")  # type: ignore[attr-defined]
        faulthandler.enable(stacks)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any) -> None:
    """Say how a process of pytest-xdist ended in the middle of a test. Another one runs the test again; if it passes
    there, only what is noted here tells `.ci/alone.sh` of it."""
    worker = report.node
    status = worker.gateway._io.popen.wait(timeout=30)
    report.longrepr += f": {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"
    if getattr(worker.config, "cache", None) is not None:
        report.longrepr += "\n" + stacks_of(worker.config, worker.gateway.id).read_text()
        worker.config.cache.set(CRASHES, worker.config.cache.get(CRASHES, {}) | {crashitem: True})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session, green or not, for what it left behind. All fixtures have been torn down by now."""
    if is_xdist_worker(session.config):
        return
    leaks = session.config.stash[SESSION].leaks()
    if (cache := getattr(session.config, "cache", None)) is not None:  # absent with `-p no:cacheprovider`
        cache.set("roll_flash/leaks", [str(leak) for leak in leaks])  # for .ci/alone.sh
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for leak in leaks:
        if reporter is not None:
            reporter.write_line(f"LEAK: {leak}", red=True)
    if leaks and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
