"""The `roll-flash` command: each subcommand is a few lines that call one function.

Heavy imports are inside the subcommands, so that `--help` is fast. Errors that this package raises on purpose are one
line on standard error; a traceback is shown only with `--debug`. Exit codes: 0, 1 failure, 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from typer.main import get_command

from roll_flash import __version__
from roll_flash.cli import environments, evaluate, gateway, gpu_check, init, plan, sandbox, train
from roll_flash.cli.options import Json, example, option, show
from roll_flash.cli.run_folder import checkpoints, dash, diagnose, export, plot, replay, scale, status, verify
from roll_flash.config.user_code import find_modules_here
from roll_flash.errors import ConfigError, RollFlashError
from roll_flash.processes.terminal_logs import make_logs_printable
from roll_flash.terminal import escape_what_cannot_be_encoded, one_line, progress_bars_on_terminals_only, say

PROGRAM = "roll-flash"
USAGE_ERROR, INTERRUPTED = 2, 130
NO_MEMORY = (
    "the memory of a node is full: Ray ended processes of this command; end other programs there, or make the run "
    "smaller (inference.servers, rollout.workers, learner.ranks; see docs/errors.md)"
)
OF_THE_MACHINE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG)
"""Errors about files for which the user can do more than we: access, a disk that is full or read-only, a long name."""
EVERY_KEY = "docs/config.md lists every key of a config; python -m roll_flash.config.reference prints it."
RUN_NO_CODE = (
    *("checkpoints", "dash", "diagnose", "doctor", "eval-diff", "export", "gpu-check", "init", "plan", "plot"),
    *("sandbox", "scale", "status", "verify", "watch"),
)
"""Commands that run no code of the user's. They import nothing from the current folder: it may be a run of others."""
COMPLETION = "_ROLL_FLASH_COMPLETE"
"""Variable set by the shell's completion script, which typer installs."""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("init", epilog=example("init word-count --kind tools --model smollm2-135m"))(init.init)
app.command("train", epilog=example("train configs/quickstart.yaml name=mine steps=8", EVERY_KEY))(train.train)
app.command("eval", epilog=example("eval --model runs/mine -n 20 -k 4 --temperature 1", EVERY_KEY))(evaluate.evaluate)
app.command("eval-diff", epilog=example("eval-diff before after"))(evaluate.compare)
app.add_typer(environments.app, name="envs", help="List, check and demonstrate environments.")
app.add_typer(sandbox.app, name="sandbox", help="List, remove and check sandboxes of this machine.")
app.command("serve-gateway", epilog=example("serve-gateway --model runs/mine"))(gateway.serve_gateway)
app.command("serve", epilog=example("serve --model smollm2-135m"))(gateway.serve)
app.command("plan", epilog=example("plan configs/quickstart.yaml --from runs/mine", EVERY_KEY))(plan.plan)
app.command("status", epilog=example("status mine"))(status.status)
app.command("watch", epilog=example("watch mine"))(status.watch)
app.command("dash", epilog=example("dash runs/mine"))(dash.dash)
app.command("plot", epilog=example("plot mine mine-seed1 -o seeds.svg --dark"))(plot.plot)
app.command("scale", epilog=example("scale mine servers=2"))(scale.scale)
app.command("diagnose", epilog=example("diagnose mine"))(diagnose.diagnose)
app.command("replay", epilog=example("replay mine g00000001-r0 --at-turn 1 --fork 4"))(replay.replay)
app.command("verify", epilog=example("verify mine"))(verify.verify)
app.add_typer(checkpoints.app, name="checkpoints", help="List, verify and remove checkpoints of a run.")
app.command("gpu-check", epilog=example("gpu-check"))(gpu_check.gpu_check)
app.command("export", epilog=example("export runs/mine mine-model"))(export.export)


@app.command(epilog=example("doctor --only docker,ray"))
def doctor(
    only: Annotated[str, option("CHECKS", "Only these checks, separated by commas.")] = "", as_json: Json = False
) -> int:
    """Check this machine: engine, Docker, Ray, GPUs, memory."""
    from roll_flash.doctor import check_machine, is_usable, report

    checks = check_machine([name.strip() for name in only.split(",") if name.strip()])
    is_ok = is_usable(checks)
    show({"ok": is_ok, "checks": [asdict(check) for check in checks]}, report(checks), as_json=as_json)
    return 0 if is_ok else 1


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _begin(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Asynchronous reinforcement learning for language-model agents."""
    make_logs_printable()
    os.umask(os.umask(0) | stat.S_IWOTH)  # compiled code and models that are kept, and the folder of runs
    if os.path.expanduser("~") == "~":
        raise ConfigError("this user has no home folder: set HOME to one that you can write")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder has been removed; go to another one with cd") from None
    if context.invoked_subcommand not in RUN_NO_CODE:
        find_modules_here()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if COMPLETION in os.environ:
        app(prog_name=PROGRAM)
    progress_bars_on_terminals_only()
    escape_what_cannot_be_encoded()
    given = list(sys.argv[1:] if argv is None else argv)
    words = [word for word in given if word != "--debug"]
    try:
        with _terminate_like_interrupt():
            return _run(words)
    except typer.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:
        # The reader of our output has exited (`| head`); Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, Exception) as error:
        message, code = _explain(error, words)
        if "--debug" in given and not isinstance(error, typer.TyperException):
            say(traceback.format_exc(), error=True, end="")
        say(message, error=True)
        return code


def _run(words: list[str]) -> int:
    program = get_command(app)
    with program.make_context(PROGRAM, words) as context:
        code: int = program.invoke(context)
    sys.stdout.flush()
    return code


def _explain(error: BaseException, words: Sequence[str]) -> tuple[str, int]:
    """Return the line for the user, and the exit code."""
    match error:
        case typer.TyperException():
            return _explain_usage(error, words), USAGE_ERROR
        case KeyboardInterrupt():
            message, code = "interrupted", INTERRUPTED
        case RollFlashError():
            message, code = _with_page(error), error.exit_code
        case _ if type(error).__module__ == "ray.exceptions" and type(error).__name__ == "OutOfMemoryError":
            message, code = NO_MEMORY, 1
        case OSError() if error.filename and error.errno in OF_THE_MACHINE:
            text = f"{error.filename}: {error.strerror}"
            message, code = f"{text}; mend that, or name another place (--debug shows which part wanted it)", 1
        case _:
            text = f"internal error: {type(error).__name__}: {_shortened(str(error))}"
            message, code = f"{text}; run again with --debug for the traceback", 1
    return f"{PROGRAM}: {'; '.join([message, *getattr(error, '__notes__', ())])}", code


def _with_page(error: RollFlashError) -> str:
    """Return the error's text with the page that tells more, unless it names one."""
    text = str(error)
    return text if error.page is None or "docs/" in text else f"{text} (see {error.page})"


def _explain_usage(error: typer.TyperException, words: Sequence[str]) -> str:
    context: typer.Context | None = getattr(error, "ctx", None)
    message, path = error.format_message().rstrip("."), context.command_path if context else PROGRAM
    unknown = getattr(error, "option_name", None) if hasattr(error, "possibilities") else None
    sets_config = context is not None and any(param.name == "words" for param in context.command.params)
    if unknown and sets_config and (override := _as_override(unknown, words)):
        message = f"{error.message}; write it as {override}"
    return one_line(f"{path}: {message} (see {path} --help)")


def _as_override(option: str, words: Sequence[str]) -> str | None:
    """Return `key=value` for the words `--key value` or `--key=value`, None if it is no key of the config."""
    from roll_flash.config.mistakes import find_key
    from roll_flash.config.tree import Config

    key = find_key(option.removeprefix("--").replace("-", "_"), Config)
    if key is None or not option.startswith("--"):
        return None
    place = next(number for number, word in enumerate(words) if word.startswith(option))
    _, equals, value = words[place].partition("=")
    following = [word for word in words[place + 1 : place + 2] if not word.startswith("--")]
    return f"{key}={value if equals else ''.join(following) or 'VALUE'}"


def _shortened(text: str) -> str:
    """Return one line; of a long one the beginning and the end, where forwarded errors name their subject."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:100]} ... {line[-290:]}"


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM (a scheduler's stop, `docker stop`) and SIGHUP (a closed terminal) end a command as cleanly as
    Ctrl-C; under nohup SIGHUP stays ignored."""

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    # A shell script starts background commands with SIGINT ignored; SIGTERM must still end them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
