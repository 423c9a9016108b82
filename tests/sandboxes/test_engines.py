"""Engines that are far away, several, full, stopped, killed, or not for this user; each for real, on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from second_engine import IMAGE, SecondEngine, bare_image, why_no_second_engine
from test_no_leaks import BUSY, assert_gone, children_of, controller
from tls_forwarder import make_certificates, tls_forwarder

from roll_flash.sandboxes import (
    Sandbox,
    SandboxDied,
    SandboxDiskFull,
    SandboxEntry,
    SandboxError,
    SandboxImageMissing,
    SandboxPool,
    SandboxSpec,
    SandboxStartError,
    SandboxUnavailable,
    SandboxUnreachable,
    list_sandboxes,
    open_sandbox,
    reap,
)
from roll_flash.sandboxes.docker import engines as engine_set_module
from roll_flash.sandboxes.docker.api import (
    DEFAULT_HOST,
    NEWEST_VERSION,
    OLDEST_VERSION,
    EngineAddress,
    EngineApi,
    negotiated_version,
)
from roll_flash.sandboxes.docker.engines import EngineSet
from roll_flash.sandboxes.providers import connect_provider

SPEC = SandboxSpec(image=IMAGE, memory_mb=64)
SOCKET = ["/attack", "stream-socket", "1"]


@pytest.mark.parametrize(
    ("oldest", "newest", "chosen"),
    [("1.12", "1.41", "1.41"), ("1.24", "1.43", "1.43"), ("1.24", "1.47", "1.44"), ("1.44", "1.52", "1.44")],
    ids=["engine 20.10", "engine 24", "engine 27", "engine 29"],
)
def test_the_newest_version_that_both_sides_know_is_spoken(oldest: str, newest: str, chosen: str) -> None:
    assert negotiated_version("engine", oldest, newest) == chosen


@pytest.mark.parametrize(
    ("oldest", "newest", "says"),
    [("1.12", "1.40", f"too old.*{OLDEST_VERSION}"), ("1.60", "1.99", f"too new.*{NEWEST_VERSION}"), ("0", "0", "old")],
)
def test_an_engine_with_no_version_in_common_is_refused(oldest: str, newest: str, says: str) -> None:
    with pytest.raises(SandboxUnavailable, match=says):
        negotiated_version("engine", oldest, newest)


def containers_of(engine: SecondEngine) -> list[SandboxEntry]:
    """Folders of other runs on this machine are listed too."""
    return [entry for entry in list_sandboxes(engine.host) if entry.engine]


def what_stays(found: Callable[[], list[SandboxEntry]]) -> list[SandboxEntry]:
    """An engine that was killed removes what had ended only after its start, beside other work."""
    deadline = time.monotonic() + 30
    while (entries := found()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return entries


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[SecondEngine]:
    if why := why_no_second_engine():
        pytest.skip(why)
    engine = SecondEngine()
    try:
        engine.start()
        engine.docker("import", "-", IMAGE, given=bare_image())
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine(shared_engine: SecondEngine) -> Iterator[SecondEngine]:
    yield shared_engine
    if not shared_engine.runs:
        shared_engine.start()


def within(host: str, action: Callable[[Sandbox], Awaitable[object]], spec: SandboxSpec = SPEC) -> None:
    async def run() -> None:
        async with open_sandbox(spec, provider=f"docker:{host}") as sandbox:
            await action(sandbox)

    asyncio.run(run())


async def nothing(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(SOCKET)).stdout == b"0\n"


@pytest.mark.docker
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_an_engine_that_goes_away_ends_its_sandboxes_with_that_reason_and_serves_again(
    engine: SecondEngine, how: str
) -> None:
    async def lose(sandbox: Sandbox) -> None:
        running = asyncio.ensure_future(sandbox.exec(["/attack", "sleep", "60"], timeout=90))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(getattr(engine, how))
        with pytest.raises(SandboxDied, match="engine went away") as caught:
            await running
        assert caught.value.reason == "daemon"
        assert not sandbox.alive

    within(engine.host, lose)
    with pytest.raises(SandboxUnavailable, match=r"no Docker engine answers.*start one or set DOCKER_HOST"):
        within(engine.host, nothing)
    engine.start()
    assert what_stays(lambda: [entry for entry in containers_of(engine) if not entry.leaked]) == []

    def left() -> list[SandboxEntry]:
        """An engine that is killed while it removes a container never ends that; sweeps of pools do, again and again
        while its file system is busy."""
        reap(engine.host)
        return containers_of(engine)

    assert what_stays(left) == []
    within(engine.host, nothing)


@pytest.mark.docker
def test_a_provider_outlives_a_restart_of_its_engine(engine: SecondEngine) -> None:
    async def restart() -> None:
        provider = await connect_provider(f"docker:{engine.host}")
        try:
            await asyncio.to_thread(engine.kill)
            with pytest.raises(SandboxUnreachable, match="start one"):
                await provider.open(SPEC, run="test", timeout_s=30)
            await asyncio.to_thread(engine.start)
            sandbox = await provider.open(SPEC, run="test", timeout_s=30)
            await sandbox.close()
        finally:
            await provider.close()

    asyncio.run(restart())


@pytest.mark.docker
def test_a_full_disk_says_so_and_how_to_free_it(engine: SecondEngine) -> None:
    fill = engine.data / "fill"
    build = SandboxSpec(dockerfile=f"FROM {IMAGE}\nCOPY big /", context={"big": bytes(200_000)}, memory_mb=64)
    try:
        subprocess.run(["dd", "if=/dev/zero", f"of={fill}", "bs=64k"], capture_output=True, check=False)
        assert shutil.disk_usage(engine.data).free == 0
        for spec in (SPEC, build):
            with pytest.raises(SandboxDiskFull, match="docker system"):
                within(engine.host, nothing, spec)
    finally:
        fill.unlink()
    within(engine.host, nothing)
    assert containers_of(engine) == []


@pytest.mark.docker
def test_a_socket_that_is_not_for_this_user_says_whom_to_ask(engine: SecondEngine) -> None:
    engine.socket.chmod(0o600)
    code = f"""
        import asyncio, os
        from roll_flash.sandboxes import SandboxPermissionDenied, SandboxUnavailable
        from roll_flash.sandboxes.providers import connect_provider
        async def main():
            try:  # imports what is imported late, which that user might not read
                await connect_provider("docker:unix:///no/such.sock")
            except SandboxUnavailable:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            try:
                await connect_provider("docker:{engine.host}")
            except SandboxPermissionDenied as error:
                print(error)
        asyncio.run(main())
    """
    engine.socket.parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert "no permission on the Docker socket" in done.stdout, done.stderr
    assert "group `docker`" in done.stdout


@pytest.fixture
def two_engines(engine: SecondEngine, docker: str) -> Iterator[tuple[str, ...]]:
    """The machine's and the second, both with the bare image."""
    subprocess.run(["docker", "import", "-", IMAGE], input=bare_image(), capture_output=True, check=True)
    yield os.environ.get("DOCKER_HOST", DEFAULT_HOST), engine.host
    subprocess.run(["docker", "rmi", "-f", IMAGE], capture_output=True, check=True)


@pytest.mark.docker
def test_a_pool_over_two_engines_uses_both_goes_on_with_one_and_takes_the_other_back(
    two_engines: tuple[str, ...], engine: SecondEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_set_module, "INITIAL_BACKOFF_S", 0.5)
    run = f"two-engines-{os.getpid()}"

    async def lease_six(pool: SandboxPool) -> int:
        """How many of six leases side by side are on the second engine."""
        gate = asyncio.Barrier(7)

        async def one() -> None:
            async with pool.lease(SPEC) as sandbox:
                await nothing(sandbox)
                await gate.wait()
                await gate.wait()

        leases = [asyncio.ensure_future(one()) for _ in range(6)]
        async with asyncio.timeout(60):
            await gate.wait()
            there = [entry for entry in await asyncio.to_thread(list_sandboxes, *two_engines) if entry.run == run]
            await gate.wait()
            await asyncio.gather(*leases)
        return sum(entry.engine == engine.host for entry in there)

    async def use() -> None:
        async with SandboxPool(engines=two_engines, provider="docker", size=0, run=run) as pool:
            assert 2 <= await lease_six(pool) <= 4
            await asyncio.to_thread(engine.kill)
            for _ in range(2):
                async with pool.lease(SPEC) as first, pool.lease(SPEC) as second:
                    await nothing(first)
                    await nothing(second)
            await asyncio.to_thread(engine.start)
            async with asyncio.timeout(60):
                while await lease_six(pool) == 0:
                    pass

    def after_a_sweep() -> list[SandboxEntry]:
        # An engine that is killed while it removes a container never ends that. Sweeps do, once nothing uses its files.
        reap(engine.host)
        return [entry for entry in list_sandboxes(*two_engines) if entry.run == run]

    asyncio.run(use())
    assert what_stays(after_a_sweep) == []


@pytest.mark.docker
def test_an_image_that_one_engine_lacks_is_found_on_the_other(docker: str, engine: SecondEngine) -> None:
    async def use() -> None:
        engines = EngineSet([os.environ.get("DOCKER_HOST", DEFAULT_HOST), engine.host])
        await engines.connect()
        try:
            for image in (IMAGE, "roll-flash-sandbox:latest"):
                sandbox = await engines.open(SandboxSpec(image=image, memory_mb=64), run="test", timeout_s=30)
                await sandbox.close()
            with pytest.raises(SandboxImageMissing, match="no-such-image"):
                await engines.open(SandboxSpec(image="no-such-image:none"), run="test", timeout_s=30)
        finally:
            await engines.close()

    asyncio.run(use())


class StandInEngine:
    """Starts nothing and fails as it is told, or starts what cannot be used."""

    def __init__(self, error: SandboxError | None = None) -> None:
        self._error = error
        self.live = self.asked = 0

    async def connect(self) -> None: ...

    async def open(self, spec: SandboxSpec, *, run: str, timeout_s: float) -> object:
        self.asked += 1
        await asyncio.sleep(0.01)
        if self._error is not None:
            raise self._error
        self.live += 1
        return self


def set_of(*engines: StandInEngine) -> EngineSet:
    made = EngineSet([f"unix:///{number}" for number in range(len(engines))])
    for member, engine in zip(made._members, engines, strict=True):
        member.provider = engine  # type: ignore[assignment]
    return made


async def open_at_once(engines: EngineSet, count: int) -> list[object]:
    starts = (engines.open(SPEC, run="test", timeout_s=1) for _ in range(count))
    return list(await asyncio.gather(*starts, return_exceptions=True))


def test_an_engine_that_starts_nothing_does_not_take_all_starts() -> None:
    """Its runtime may be broken. It has the fewest sandboxes of all."""
    broken, good = StandInEngine(SandboxStartError("OCI runtime create failed")), StandInEngine()

    async def use() -> None:
        engines = set_of(broken, good)
        assert await open_at_once(engines, 8) == [good] * 8
        asked = broken.asked
        assert await open_at_once(engines, 8) == [good] * 8
        assert broken.asked == asked
        (error,) = await open_at_once(set_of(broken, broken), 1)
        assert isinstance(error, SandboxStartError)
        assert str(error).count("OCI runtime") == 2
        lone = set_of(broken)
        assert [type(error) for error in await open_at_once(lone, 2)] == [SandboxStartError] * 2
        assert lone._members[0].paused_until == 0  # the spec may be at fault

    asyncio.run(use())


def test_starts_that_fail_together_pause_their_engine_once() -> None:
    """Eight of them paused it for 5 minutes, although it was away for a second."""

    async def use() -> None:
        engines = set_of(StandInEngine(SandboxUnreachable("away")), StandInEngine())
        for least_s in (5, 10):
            await open_at_once(engines, 16)
            (member, _) = engines._members
            assert least_s - 1 < member.paused_until - time.monotonic() <= least_s
            member.paused_until = 0

    asyncio.run(use())


def test_certificates_for_others_do_not_matter_to_an_engine_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/cert.pem")
    asyncio.run(EngineApi(EngineAddress(DEFAULT_HOST)).close())


def test_engines_of_which_none_answers_are_all_named() -> None:
    async def use() -> None:
        await connect_provider("docker", engines=("unix:///no/such.sock", "tcp://127.0.0.1:1"))

    with pytest.raises(SandboxUnavailable, match=r"/no/such\.sock.*127\.0\.0\.1:1"):
        asyncio.run(use())


ENSURE_IMAGE = Path(__file__).parents[2] / "docker" / "ensure_image.py"


def only_bubblewrap(folder: Path) -> Path:
    """A PATH without debootstrap and apt."""
    folder.mkdir()
    for name in ("bwrap", "true"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def ensure_image(engine: SecondEngine, path: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DOCKER_HOST": engine.host, "PATH": path}
    command = [sys.executable, str(ENSURE_IMAGE)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.docker
def test_an_engine_without_the_sandbox_image_means_the_local_sandbox_and_one_line_says_why(
    engine: SecondEngine, require_bubblewrap: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.host)

    async def name(spec: SandboxSpec | None, engines: tuple[str, ...] = ()) -> str:
        provider = await connect_provider("auto", spec=spec, engines=engines)
        await provider.close()
        return provider.name

    assert asyncio.run(name(None)) == asyncio.run(name(SandboxSpec(), (engine.host,))) == "local"
    said = [record.getMessage() for record in caplog.records if record.name.startswith("roll_flash")]
    assert [line.count("has no image roll-flash-sandbox") for line in said] == [1, 1]
    assert asyncio.run(name(SPEC)) == "docker"  # an image of one's own is the engine's business


@pytest.mark.docker
def test_where_no_image_can_be_made_the_set_up_goes_on_with_the_local_sandbox(
    engine: SecondEngine, require_bubblewrap: None, tmp_path: Path
) -> None:
    done = ensure_image(engine, str(only_bubblewrap(tmp_path / "bin")))
    assert done.returncode == 0, done.stderr
    assert "the weaker `local` sandbox (bubblewrap) is used, because" in done.stdout.splitlines()[-1]
    assert "debootstrap" in done.stdout.splitlines()[-1]


@pytest.mark.docker
def test_the_set_up_installs_debootstrap_where_the_image_needs_it(
    engine: SecondEngine, require_bubblewrap: None, tmp_path: Path
) -> None:
    """`apt-get` is a stand-in here; the real one runs in .ci/clean_root.sh."""
    folder = only_bubblewrap(tmp_path / "bin")
    program(folder, "debootstrap-of-apt", "echo 'E: no mirror' && exit 1")
    program(folder, "apt-get", f'[ "$1" = update ] || /bin/mv {folder}/debootstrap-of-apt {folder}/debootstrap')
    done = ensure_image(engine, str(folder))
    assert "installing the system package debootstrap" in done.stdout
    assert "debootstrap bookworm failed: E: no mirror" in done.stdout.splitlines()[-1]


@pytest.fixture
def tls_host(docker: str, tmp_path: Path) -> Iterator[str]:
    socket = EngineAddress.from_environment().socket_path
    assert socket is not None
    with tls_forwarder(socket, tmp_path / "certificates") as host:
        yield host


@pytest.mark.docker
def test_an_engine_behind_tls_is_used_with_its_certificates(tls_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("cat", stdin=b"x" * 300_000)).stdout_bytes == 300_000
        assert [entry.name for entry in await asyncio.to_thread(list_sandboxes, tls_host)].count(sandbox.name) == 1

    within(tls_host, use, SandboxSpec())
    assert [entry for entry in reap(tls_host) if entry.engine] == []
    host, _, folder = tls_host.partition("?certificates=")
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", folder)
    within("", use, SandboxSpec())


@pytest.mark.docker
def test_a_controller_killed_on_an_engine_behind_tls_leaves_nothing(tls_host: str) -> None:
    run = f"tls-{os.getpid()}"
    with controller(BUSY, f"docker:{tls_host}", run, "4") as process:
        below = children_of(process.pid)
    assert_gone("docker", run, below, 60.0)  # a call of the guard may take 10 s where a processor is busy


@pytest.mark.docker
def test_certificates_that_do_not_fit_are_told_from_an_engine_that_is_not_there(tls_host: str, tmp_path: Path) -> None:
    host = tls_host.partition("?")[0]
    make_certificates(tmp_path / "others")
    for address, says in (
        (f"{host}?certificates={tmp_path}/others", "is not the one that .*/others/ca.pem signed for"),
        (f"{host}?certificates={tmp_path}/missing", "must hold ca.pem, cert.pem, key.pem"),
        (host, "does not answer properly"),
        ("http://127.0.0.1:1", "unix:///path or tcp://host:port"),
    ):
        with pytest.raises(SandboxUnavailable, match=says):
            within(address, nothing)
