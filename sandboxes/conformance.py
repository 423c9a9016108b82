"""Conformance checks that run on a real provider: used by `roll-flash sandbox check` and by our own tests.

Each check takes a function that opens a sandbox, and raises AssertionError with the observed value if it fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from roll_flash.sandboxes.errors import SandboxDied, SandboxFileError
from roll_flash.sandboxes.protocol import DescribesIsolation, Provider, Sandbox
from roll_flash.sandboxes.providers import START_TIMEOUT_S, connect_provider
from roll_flash.sandboxes.scratch import scratch_folder
from roll_flash.sandboxes.spec import SandboxSpec

CHECK_TIMEOUT_S = 120.0
PATIENCE_S = 20.0
"""Extra seconds that an answer may take on a busy machine. The time limits themselves are checked against
`duration_s`, which is measured in the sandbox."""

Open = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]
Check = Callable[[Open], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def assert_equal(seen: object, wanted: object) -> None:
    if seen != wanted:
        raise AssertionError(f"{seen!r} where {wanted!r} is due")


def assert_true(condition: bool, what: object) -> None:
    if not condition:
        raise AssertionError(str(what))


async def assert_refused(operation: Awaitable[object], what: str) -> None:
    try:
        await operation
    except SandboxFileError:
        return
    raise AssertionError(f"{what} was not refused")


async def _until(sandbox: Sandbox, line: str, otherwise: str) -> None:
    """Wait until a shell line succeeds."""
    end = time.monotonic() + PATIENCE_S
    while not (await sandbox.exec(line, timeout=PATIENCE_S)).ok:
        assert_true(time.monotonic() < end, otherwise)
        await asyncio.sleep(0.1)


@check
async def a_command_returns_its_output_and_exit_code(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        result = await sandbox.exec("echo out; echo err >&2; exit 3")
        assert_equal((result.exit_code, result.stdout, result.stderr), (3, b"out\n", b"err\n"))
        assert_equal((await sandbox.exec(["echo", "a b", "$HOME"])).stdout, b"a b $HOME\n")


@check
async def everything_inside_can_be_killed_at_once(open: Open) -> None:
    """Includes processes that left their command or restart themselves, with no free process slot."""
    again = "f() { (sleep 0.02; f) & }; f"
    async with open(SandboxSpec(pids=16)) as sandbox:
        await sandbox.exec(f"(trap '' TERM; setsid sleep 600 & {again}) >/dev/null 2>&1", timeout=5)
        async with sandbox.stream("echo begun; exec sleep 600", timeout=PATIENCE_S) as running:
            assert_true(await running.next() is not None, "a command began")
            await sandbox.kill_all()
            assert_equal((await running.wait()).signal, 9)
        left = await sandbox.exec("for p in /proc/[0-9]*; do case ${p#/proc/} in 1|$$) ;; *) echo $p;; esac; done")
        assert_equal(left.stdout, b"")


@check
async def a_fresh_one_is_the_same_less_what_was_done(open: Open) -> None:
    async with open(SandboxSpec(files=(("given", b"1"),), env=(("NAME", "x"),))) as sandbox:
        await sandbox.exec("echo 2 > given; echo 3 > /tmp/left")
        async with sandbox.fresh() as untouched:
            assert_equal((await untouched.exec("cat given; ls /tmp; echo $NAME")).stdout, b"1x\n")
        assert_true(not untouched.alive, "the fresh one ends with its `async with`")
        assert_equal(await sandbox.read("given"), b"2\n")


@check
async def a_command_that_cannot_be_started_is_a_result(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        assert_equal((await sandbox.exec(["no-such-program"])).exit_code, 127)
        assert_equal((await sandbox.exec(["/etc/passwd"])).exit_code, 126)
        assert_true(
            (await sandbox.exec("true", cwd="/no/such/folder")).exit_code in (126, 127), "exit code of a missing cwd"
        )
        assert_equal((await sandbox.exec("kill -9 $$")).signal, 9)


@check
async def stdin_environment_and_directory_arrive(open: Open) -> None:
    async with open(SandboxSpec(env=(("FROM_SPEC", "one"),))) as sandbox:
        assert_equal((await sandbox.exec("cat", stdin=b"\0\xff" * 500_000)).stdout_bytes, 1_000_000)
        result = await sandbox.exec('echo "$FROM_SPEC $ADDED $(pwd)"', env={"ADDED": "two"}, cwd="/tmp")
        assert_equal(result.stdout, b"one two /tmp\n")
        assert_equal((await sandbox.exec("head -c 3", stdin="abcdef" * 100_000)).stdout, b"abc")


@check
async def a_timeout_returns_the_partial_output_in_time(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        began = time.monotonic()
        result = await sandbox.exec("echo before; sleep 60; echo after", timeout=0.5, grace=0.2)
        assert_true(result.timed_out and result.stdout == b"before\n", result)
        assert_true(result.duration_s < 0.5 + 0.2 + 1.0, f"took {result.duration_s:.2f} s")
        assert_true(time.monotonic() - began < 0.5 + 0.2 + 1.0 + PATIENCE_S, f"took {time.monotonic() - began:.2f} s")


@check
async def a_timeout_kills_the_whole_tree_and_nothing_else(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        other = asyncio.ensure_future(sandbox.exec("sleep 1.5; echo fine", timeout=20))
        tree = (
            "trap '' TERM; setsid sleep 7771 & (setsid sh -c 'trap \"\" TERM; sleep 7772; sleep 7773' &) ; sleep 7774"
        )
        result = await sandbox.exec(tree, timeout=0.4, grace=0.3)
        assert_true(result.timed_out and result.duration_s < 0.4 + 0.3 + 1.0, result)
        left = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert_true("777" not in left.stdout_text, left.stdout_text)
        assert_equal((await other).stdout, b"fine\n")


@check
async def background_children_do_not_hold_a_command_back(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        result = await sandbox.exec("(sleep 2; echo late; touch /tmp/lived) & echo started", timeout=20)
        assert_equal((result.stdout, result.timed_out), (b"started\n", False))
        assert_true(result.duration_s < 1.5, "the command was held back by its background child")
        await _until(sandbox, "test -e /tmp/lived", "the background child did not live on")


@check
async def output_is_capped_at_both_ends_with_true_totals(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        result = await sandbox.exec("seq 1 200000; echo err >&2", max_output=1000)
        assert_true(
            result.truncated and result.stdout.startswith(b"1\n2\n") and result.stdout.endswith(b"\n200000\n"), result
        )
        assert_equal((result.stdout_bytes, result.stderr), (1_288_895, b"err\n"))
        assert_true(len(result.stdout) < 1100, len(result.stdout))
        exact = await sandbox.exec("head -c 1000 /dev/zero", max_output=1000)
        assert_equal((len(exact.stdout), exact.truncated), (1000, False))


@check
async def commands_run_side_by_side(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        began = time.monotonic()
        results = await asyncio.gather(*(sandbox.exec(f"sleep 2; echo {i}", timeout=60) for i in range(16)))
        assert_equal([int(result.stdout) for result in results], list(range(16)))
        assert_true(time.monotonic() - began < 2 + PATIENCE_S, f"16 times 2 s took {time.monotonic() - began:.1f} s")


@check
async def cancelling_ends_the_command(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        task = asyncio.ensure_future(sandbox.exec("sleep 8881", timeout=60))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait({task})
        assert_true(task.cancelled(), "the task was not cancelled")
        gone = "! cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'sleep 888[1]'"
        await _until(sandbox, gone, "the command still runs")


@check
async def a_stream_gives_output_as_it_comes_and_takes_input(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox, sandbox.stream("cat", stdin=True, timeout=30) as stream:
        for text in (b"one", b"two"):
            await stream.send(text)
            chunk = await stream.next()
            assert_equal(chunk and chunk.data, text)
        await stream.close_stdin()
        assert_equal((await stream.wait()).exit_code, 0)


@check
async def a_stream_waits_for_a_slow_reader(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox, sandbox.stream("head -c 20000000 /dev/zero", timeout=60) as stream:
        await asyncio.sleep(0.5)
        total = 0
        async for chunk in stream:
            total += len(chunk.data)
        assert_equal(total, 20_000_000)
        assert_equal(stream.result and stream.result.exit_code, 0)


@check
async def a_shell_keeps_its_state_and_is_replaced_after_a_timeout(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox, sandbox.shell() as shell:
        await shell.run("cd /tmp; x=5; f() { echo f$1; }")
        assert_equal((await shell.run("pwd; echo $x; f 1; (exit 4)")).stdout, b"/tmp\n5\nf1\n")
        assert_equal((await shell.run("(exit 4)")).exit_code, 4)
        assert_equal((await shell.run("echo oops >&2; false")).stderr, b"oops\n")
        result = await shell.run("echo part; sleep 60", timeout=0.5)
        assert_true(result.timed_out and result.stdout.startswith(b"part"), result)
        assert_equal((await shell.run("echo ${x:-gone}")).stdout, b"gone\n")
        assert_equal((await shell.run("exit 7")).exit_code, 7)
        assert_equal((await shell.run("echo again")).stdout, b"again\n")


@check
async def files_are_written_whole_and_read_back(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        content = bytes(range(256)) * 8192
        await sandbox.write("deep/er/file.bin", content, mode=0o755)
        assert_equal(await sandbox.read("deep/er/file.bin") == content, True)
        assert_true((await sandbox.exec("test -x deep/er/file.bin")).ok, "the mode was lost")
        await sandbox.write("empty", b"")
        assert_equal(await sandbox.read("empty"), b"")
        assert_equal((await sandbox.exec("ls -A deep/er")).stdout, b"file.bin\n")


@check
async def what_is_no_regular_file_is_refused(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        await sandbox.exec(
            "mkfifo fifo; mkdir folder; ln -s /dev/zero zero; ln -s loop loop; head -c 9000 /dev/zero > big"
        )
        for path in ("fifo", "folder", "zero", "loop", "missing", "/dev/zero", "/proc/self/environ"):
            await assert_refused(sandbox.read(path), f"reading {path}")
        for path in ("fifo", "folder", "/proc/self/comm"):
            await assert_refused(sandbox.write(path, b"x"), f"writing {path}")
        await assert_refused(sandbox.read("big", max_bytes=8999), "reading a file over the limit")


@check
async def trees_go_in_and_come_out(open: Open) -> None:
    with scratch_folder("conformance") as folder:
        source, target = folder / "in", folder / "out"
        (source / "a/b").mkdir(parents=True)
        (source / "a/b/file").write_bytes(b"x" * 100_000)
        (source / "run.sh").write_text("echo hello")
        (source / "run.sh").chmod(0o755)
        (source / "link").symlink_to("a/b/file")
        async with open(SandboxSpec()) as sandbox:
            report = await sandbox.put_tree(source, "tree")
            assert_equal((report.files, report.bytes), (2, 100_010))
            assert_equal((await sandbox.exec("./run.sh; wc -c < link", cwd="/sandbox/tree")).stdout, b"hello\n100000\n")
            await sandbox.exec("ln -s /etc/passwd evil; mkfifo pipe; ln -s ../../x out", cwd="/sandbox/tree")
            report = await sandbox.get_tree("tree", target)
        assert_equal((target / "a/b/file").read_bytes(), b"x" * 100_000)
        assert_equal((target / "link").is_symlink(), True)
        assert_equal(sorted(report.left_out), ["evil", "out", "pipe"])
        assert_equal(sorted(path.name for path in target.iterdir()), ["a", "link", "run.sh"])


@check
async def a_spec_brings_files_and_a_snapshot_forks_them(open: Open) -> None:
    async with open(SandboxSpec(files=(("given/file", b"given"),))) as sandbox:
        assert_equal(await sandbox.read("given/file"), b"given")
        await sandbox.exec(
            "echo one > turn; mkdir -p deep/er; ln -s ../turn deep/link; echo x > /tmp/x; chmod 700 turn"
        )
        fork = await sandbox.snapshot()
        await sandbox.exec("echo two > turn")
    async with open(fork) as first, open(fork) as second:
        await first.exec("echo other > turn")
        assert_equal(
            (await second.exec("cat deep/link /tmp/x given/file; stat -c %a turn; ls -d deep/er")).stdout,
            b"one\nx\ngiven700\ndeep/er\n",
        )


@check
async def a_closed_sandbox_says_so(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        await sandbox.ping()
        waiting = asyncio.ensure_future(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.2)
        await sandbox.close()
        await sandbox.close()
        for task in (waiting, asyncio.ensure_future(sandbox.exec("true"))):
            try:
                await task
            except SandboxDied as error:
                assert_equal(error.reason, "closed")
                continue
            raise AssertionError("a closed sandbox ran a command")
        assert_true(not sandbox.alive, "a closed sandbox says that it is alive")


@check
async def two_sandboxes_do_not_see_each_other(open: Open) -> None:
    async with open(SandboxSpec()) as first, open(SandboxSpec()) as second:
        await first.write("/tmp/secret", b"x")
        assert_equal((await second.exec("test -e /tmp/secret")).exit_code, 1)
        running = asyncio.ensure_future(first.exec("sleep 9991", timeout=5))
        await asyncio.sleep(0.2)
        seen = await second.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert_true("9991" not in seen.stdout_text, "processes of another sandbox are seen")
        running.cancel()


@check
async def there_is_no_network_but_loopback(open: Open) -> None:
    async with open(SandboxSpec()) as sandbox:
        devices = (await sandbox.exec("tail -n +3 /proc/net/dev")).stdout_text.split()
        assert_equal([word for word in devices if word.endswith(":")], ["lo:"])
        routes = (await sandbox.exec("tail -n +2 /proc/net/route")).stdout
        assert_equal(routes, b"")


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    ok: bool
    detail: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The report that `roll-flash sandbox check` prints."""

    provider: str
    isolation: str
    checks: list[CheckResult] = field(default_factory=list)
    measures: dict[str, str] = field(default_factory=dict)
    """Isolation measures for sandboxes of the spec, by name; empty if the provider cannot describe them."""

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.checks)


def check_provider(provider: str = "auto", *, spec: SandboxSpec | None = None) -> CheckReport:
    """Run every check on a provider, one after another. Raises SandboxError if the provider is unusable."""
    return asyncio.run(run_checks(provider, spec or SandboxSpec(), CHECKS))


async def run_checks(provider: str, spec: SandboxSpec, checks: Sequence[Check]) -> CheckReport:
    connected = await connect_provider(provider)
    try:
        described = connected.describe_isolation(spec) if isinstance(connected, DescribesIsolation) else {}
        report = CheckReport(connected.name, connected.isolation, measures=described)
        for one in checks:
            report.checks.append(await _run_one(one, opener(connected, spec)))
        return report
    finally:
        await connected.close()


def opener(provider: Provider, base: SandboxSpec) -> Open:
    """Return a function that opens the spec of a check with the image, runtime and user namespace of `base`."""

    @asynccontextmanager
    async def open_one(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        chosen = {"image": spec.image or base.image, "runtime": base.runtime, "userns": base.userns}
        wanted = spec.model_copy(update=chosen)
        sandbox = await provider.open(wanted, run="check", timeout_s=START_TIMEOUT_S)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    return open_one


async def _run_one(one: Check, open_one: Open) -> CheckResult:
    began = time.monotonic()
    name = getattr(one, "__name__", "check").replace("_", " ")
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await one(open_one)
    except TimeoutError:
        return CheckResult(name, False, f"not done within {CHECK_TIMEOUT_S:g} s", time.monotonic() - began)
    except Exception as error:
        return CheckResult(name, False, f"{type(error).__name__}: {error}", time.monotonic() - began)
    return CheckResult(name, True, "", time.monotonic() - began)
