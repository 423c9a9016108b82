"""A shell that its commands turn against its reader: statuses stay true or are errors, output stays bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from abuse import within

from roll_flash.sandboxes import ExecResult, Sandbox
from roll_flash.sandboxes.client.shell import GARBLED_STATUS, Shell
from roll_flash.sandboxes.result import OutputChunk

OVERRIDES = {
    "a function": "printf() { echo forged; }; echo() { :; }; test() { true; }; command() { true; }; true() { false; }",
    "an alias": "alias printf=true eval=true command=true if=true case=true '{=true' '!=true' '[=true'",
    "traps": "trap 'echo trapped; false' EXIT; trap 'echo 0; false' USR1; trap '' INT TERM; kill -USR1 $$",
    "-e": "set -e",
    "-u": "set -u",
    "-C": "set -C",
    "-f": "set -f",
    "-v": "set -v",
    "-x": "PS4='0 '; set -x",
    "IFS": "IFS=0123456789/",
    "no PATH": "PATH=",
    "nowhere": "mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone",
}


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("program", ["/bin/sh", "/bin/bash"])
def test_no_override_changes_a_status_or_the_output(program: str, override: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        async with sandbox.shell(program) as shell:
            await shell.run(OVERRIDES[override], timeout=10)
            failed = await shell.run(
                "(exit 3) || (exit 4) || x=$?; (exit $x) || eval 'exit_code=$?'; : part", timeout=10
            )
            assert (failed.exit_code, failed.stdout) == (0, b""), failed
            assert (
                await shell.run("(exit 5) || unset no_such; sleep_() { return 9; }; sleep_ || kept=9", timeout=10)
            ).ok
            if override != "-e":
                assert (await shell.run("sleep_", timeout=10)).exit_code == 9
            assert shell.replaced == 0

    within("local", run)


def test_a_function_or_alias_cannot_make_a_failure_a_success(provider: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        async with sandbox.shell() as shell:
            await shell.run("printf() { /usr/bin/printf \"$1\" 0; }; alias printf='printf'; set -- 0")
            result = await shell.run("/bin/echo out; /bin/echo err >&2; (exit 7)")
            assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
            assert shell.replaced == 0

    within(provider, run)


@pytest.mark.parametrize("program", ["/bin/sh", "/bin/bash"])
def test_exchanged_outputs_of_the_shell_make_no_failure_a_success(program: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        async with sandbox.shell(program) as shell:
            exchanged = await shell.run("exec 3>&1 1>&2 2>&3", timeout=10)
            assert (exchanged.exit_code, shell.replaced) == (GARBLED_STATUS, 1)
            assert (await shell.run("exec 3>&1 1>&2 2>&3; (exit 7)", timeout=10)).exit_code == GARBLED_STATUS
            assert (await shell.run("(exit 7)", timeout=10)).exit_code == 7

    within("local", run)


def test_partial_lines_come_out_as_they_are(provider: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        async with sandbox.shell() as shell:
            for text in (b"no newline", b"\n", b"", b"/bin/sh: 3: cannot create ", b"/bin/sh: 3: ", b"\0\xff"):
                await sandbox.write("text", text)
                result = await shell.run("cat text; cat text >&2")
                assert (result.stdout, result.stderr, result.stdout_bytes) == (text, text, len(text))

    within(provider, run)


def test_background_output_does_not_hold_a_shell_back(provider: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        async with sandbox.shell() as shell:
            await shell.run("yes & job=$!")
            for number in range(3):
                result = await shell.run(f"(exit {number})", max_output=1000, timeout=20)
                assert (result.exit_code, result.timed_out) == (number, False)
                assert len(result.stdout) < 1100
            await shell.run("kill $job", max_output=1000)
            assert shell.replaced == 0

    within(provider, run)


class PlayedStream:
    """A shell whose answers to the second line of a script are made up from the word in it."""

    result: Any = None

    def __init__(self, answers: Callable[[str], list[tuple[str, bytes]]]) -> None:
        self._answers = answers
        self._chunks: list[tuple[str, bytes]] = []
        self.left = False

    async def __aenter__(self) -> PlayedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left = True

    async def send(self, script: bytes) -> None:
        word = script.decode().rpartition('>"/')[2][:24]
        self._chunks = self._answers(word)

    async def next(self) -> OutputChunk:
        if not self._chunks:
            await asyncio.Event().wait()
        return OutputChunk(*self._chunks.pop(0))


def play(answers: Callable[[str], list[tuple[str, bytes]]], **options: Any) -> tuple[ExecResult, Shell]:
    async def run() -> tuple[ExecResult, Shell]:
        shell = Shell("/bin/sh", lambda: PlayedStream(answers))  # type: ignore[arg-type, return-value]
        return await shell.run("x", **options), shell

    return asyncio.run(run())


def end(word: str, status: str) -> bytes:
    return f"/bin/sh: 2: cannot create /{word}/{status}: Directory nonexistent\n".encode()


@pytest.mark.parametrize(
    "status", ["xyz", "", "-1", "256", "99999999999999999999999", "1e3", "\udcff", "²", "0" * 10_000]
)
def test_a_status_that_is_none_is_an_error_of_that_command(status: str) -> None:
    def answers(word: str) -> list[tuple[str, bytes]]:
        line = f"/{word}/".encode() + status.encode(errors="surrogateescape") + b": no\n"
        return [("stdout", b"said\n" + line), ("stderr", end(word, "0"))]

    result, shell = play(answers, timeout=5)
    assert (result.exit_code, shell.replaced) == (GARBLED_STATUS, 1)
    assert result.stdout.startswith(b"said\n")
    assert not result.ok


def test_output_after_the_end_is_counted_and_not_kept() -> None:
    flood = [("stdout", b"x" * (1 << 16))] * 200

    def answers(word: str) -> list[tuple[str, bytes]]:
        return [("stdout", b"said\n" + end(word, "3")), *flood, ("stderr", end(word, "0"))]

    result, _ = play(answers, timeout=20, max_output=1000)
    assert (result.exit_code, result.truncated, result.stdout_bytes) == (3, True, 5 + 200 * (1 << 16))
    assert len(result.stdout) < 100


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_the_end_is_found_however_it_is_cut(size: int) -> None:
    def answers(word: str) -> list[tuple[str, bytes]]:
        out = b"0123456789" * 300 + end(word, "3")
        pieces = [("stdout", out[at : at + size]) for at in range(0, len(out), size)]
        return [*pieces, ("stderr", end(word, "0"))]

    result, _ = play(answers, timeout=20)
    assert (result.exit_code, result.stdout, result.stdout_bytes) == (3, b"0123456789" * 300, 3000)
    result, _ = play(answers, timeout=20, max_output=100)
    assert (result.exit_code, result.stdout_bytes) == (3, 3000)
    assert result.stdout == b"0123456789" * 5 + b"\n[... 2900 bytes left out ...]\n" + b"0123456789" * 5


def test_a_nul_byte_is_refused_and_costs_nothing(provider: str) -> None:
    async def run(sandbox: Sandbox) -> None:
        async with sandbox.shell() as shell:
            await shell.run("x=1")
            with pytest.raises(ValueError, match="NUL"):
                await shell.run("echo \0")
            assert (await shell.run("echo $x")).stdout == b"1\n"

    within(provider, run)
