"""The `roll-flash` command: each subcommand is a few lines that call one function.

Heavy imports are inside the subcommands, so that `--help` is fast. Errors that this package raises on purpose are one
line on standard error; a traceback is shown only with `--debug`. Exit codes: 0, 1 failure, 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

from roll_flash import __version__
from roll_flash.cli.evaluate import add_eval
from roll_flash.cli.gateway import add_gateway
from roll_flash.cli.sandbox import add_sandbox
from roll_flash.errors import ConfigError, RollFlashError
from roll_flash.terminal import printable, progress_bars_on_terminals_only, say

if TYPE_CHECKING:
    from roll_flash.config.tree import Config

INTERRUPTED = 130
EVERY_KEY = "docs/config.md lists every key of a config; python -m roll_flash.config.reference prints it."
Handler = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises SystemExit only for `--help`, `--version` and usage errors."""
    progress_bars_on_terminals_only()
    arguments = build_parser().parse_args(argv)
    from roll_flash.terminal_logs import make_logs_printable

    make_logs_printable()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `my_envs:Maze-v0` as an id finds my_envs.py in the working directory
    handler: Handler = arguments.handler
    try:
        with _terminate_like_interrupt():
            code = handler(arguments)
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        # The reader of our output has exited (`| head`); Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", INTERRUPTED)
    except RollFlashError as error:
        return _fail(arguments, str(error), error.exit_code)
    except Exception as error:
        hint = "" if arguments.debug else "; run again with --debug for the traceback"
        return _fail(arguments, f"internal error: {type(error).__name__}: {_shortened(str(error))}{hint}", 1)


def _shortened(text: str) -> str:
    """Return one line; of a long one the beginning and the end, where forwarded errors name their subject."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:100]} ... {line[-290:]}"


def _fail(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        say(traceback.format_exc(), error=True, end="")
    say(f"roll-flash: {message}", error=True)
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="roll-flash", description="Asynchronous reinforcement learning for language-model agents.")
    parser.add_argument("--version", action="version", version=f"roll-flash {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in (_add_train, _add_eval, _add_envs, _add_sandbox, _add_gateway, _add_export, _add_doctor):
        add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Report errors in one line, with the nearest known word; accept `a.b=c` words between options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: {message} (see {self.prog} --help)\n"))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        found, unknown = self.parse_known_args(given, namespace)
        for word in unknown:
            if word.startswith("-") or not hasattr(found, "words"):
                override = _as_override(word, given) if getattr(found, "sets_config", False) else None
                hint = f"; write it as {override}" if override else ""
                hint = hint or _nearest(word.partition("=")[0], _all_options(self))
                self.error(f"unknown argument {word}{hint}")
        if unknown:
            found.words = [*found.words, *unknown]
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = _nearest(str(value), known) or f"; one of: {', '.join(known)}"
            self.error(f"unknown {str(action.metavar or action.dest).lower()} {value!r}{hint}")


def _as_override(word: str, given: Sequence[str]) -> str | None:
    """Return `key=value` for the words `--key value` or `--key=value`, None if it is no key of the config."""
    from roll_flash.config.mistakes import find_key
    from roll_flash.config.tree import Config

    name, equals, value = word.removeprefix("--").partition("=")
    key = find_key(name.replace("-", "_"), Config)
    if not word.startswith("--") or key is None:
        return None
    if not equals:
        following = given[given.index(word) + 1 :]
        value = following[0] if following and not following[0].startswith("--") else "VALUE"
    return f"{key}={value}"


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _all_options(parser: argparse.ArgumentParser) -> list[str]:
    found: list[str] = []
    for action in parser._actions:
        found.extend(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found.extend(_all_options(child))
    return found


def _command(
    commands: Any, name: str, handler: Handler, text: str, usage: str | None = None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, usage=usage)
    parser.set_defaults(handler=handler)
    parser.add_argument("--json", action="store_true", help="print one JSON object or list for scripts")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def _config_and_overrides(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `CONFIG a.b=c ...`, in any order."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r}: one CONFIG is enough; an override is written key=value")
    return (files[0] if files else None), [word for word in words if "=" in word]


def _print_json(value: Any) -> None:
    say(json.dumps(value, indent=2, default=str))


def _standard_output_for_json(wanted: bool) -> AbstractContextManager[Any]:
    """With `--json` standard output carries only the one object; progress goes to standard error."""
    return redirect_stdout(sys.stderr) if wanted else nullcontext()


def _add_train(commands: Any) -> None:
    text = "run a training job; Ctrl-C stops it cleanly with a checkpoint"
    usage = "roll-flash train CONFIG [a.b=c ...] [--resume] [--dry-run] [--json] [--debug]"
    parser = _command(commands, "train", _train, text, usage)
    parser.epilog = EVERY_KEY
    parser.set_defaults(sets_config=True)
    parser.add_argument("words", nargs="*", metavar="CONFIG a.b=c", help="a YAML file, and keys to set, as steps=5")
    parser.add_argument(
        "--resume", action="store_true", help="continue the run of this name from its newest checkpoint"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything that can be checked, and stop")


def _train(arguments: argparse.Namespace) -> int:
    from roll_flash.config.tree import load_config

    source, overrides = _config_and_overrides(arguments.words)
    if source is None:
        raise ConfigError("train needs a CONFIG file, for example: roll-flash train configs/quickstart.yaml")
    config = load_config(source, overrides)
    if arguments.dry_run:
        return _dry_run(arguments, config)
    from roll_flash.summary import closing_text
    from roll_flash.trainer import train

    try:
        with _standard_output_for_json(arguments.json):
            summary = train(config, resume=arguments.resume)
    except KeyboardInterrupt:
        return _fail(arguments, f"interrupted; {_how_to_go_on(config)}", INTERRUPTED)
    except RollFlashError as error:
        if error.exit_code == 2 or "checkpoint of step" not in (way := _how_to_go_on(config)):
            raise
        return _fail(arguments, f"{error}; {way}", error.exit_code)
    if arguments.json:
        _print_json(summary)
    else:
        say(closing_text(summary))
    return 0


def _dry_run(arguments: argparse.Namespace, config: Config) -> int:
    """Print the resolved config, which can be run as is, with the passed checks as comments."""
    from roll_flash.cli.dry_run import dry_run

    with _standard_output_for_json(arguments.json):
        checks = dry_run(config, resume=arguments.resume)
    if arguments.json:
        _print_json({"checks": checks, "config": config.model_dump(mode="json")})
    else:
        say("\n".join(f"# {check}" for check in checks))
        say(config.to_yaml(), end="")
    return 0


def _how_to_go_on(config: Config) -> str:
    from roll_flash.run.run_dir import list_checkpoints

    found = list_checkpoints(config.run_folder)
    if not found:
        return f"no checkpoint was written yet; the run folder is {config.run_folder}"
    return f"a checkpoint of step {found[-1].step} is in {config.run_folder}; go on with the same command and --resume"


def _add_eval(commands: Any) -> None:
    add_eval(lambda *arguments: _command(commands, *arguments), _config_and_overrides)


def _add_envs(commands: Any) -> None:
    parser = commands.add_parser("envs", help="registered environments", description="Registered environments.")
    actions = parser.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    listing = _command(actions, "list", _envs_list, "ids that `envs` of a config takes, with what each is about")
    listing.add_argument("--all", action="store_true", help="gymnasium's own environments too")
    usage = "roll-flash envs check ID [key=value ...] [--seeds N] [--provider NAME] [--json] [--debug]"
    checking = _command(actions, "check", _envs_check, "is an environment fit to train on? plays it to find out", usage)
    checking.add_argument("id", metavar="ID", help="a registered id, module:ID or path/to/file.py:ID")
    checking.add_argument("words", nargs="*", metavar="key=value", help="arguments of the environment")
    checking.add_argument("--seeds", type=int, default=4, metavar="N", help="tasks that each agent plays")
    checking.add_argument("--provider", default="auto", metavar="NAME", help="of sandboxes: docker, local, or auto")
    creating = _command(actions, "new", _envs_new, "write a small project with an environment, its test and a config")
    creating.add_argument("name", metavar="NAME", help="such as word-count; the folder must not exist")


def _envs_list(arguments: argparse.Namespace) -> int:
    from roll_flash.cli.catalog import list_environments

    found = list_environments(everything=arguments.all)
    if arguments.json:
        _print_json([{"id": env.id, "entry_point": env.entry_point, "about": env.about} for env in found])
        return 0
    width = max((len(env.id) for env in found), default=0)
    for env in found:
        say(f"{env.id:<{width}}  {env.about}")
    return 0


def _envs_check(arguments: argparse.Namespace) -> int:
    from roll_flash.config.files import apply_override
    from roll_flash.envs.check.checks import check_environment

    kwargs: dict[str, Any] = {}
    for word in arguments.words:
        kwargs = apply_override(kwargs, word)
    with _standard_output_for_json(arguments.json):
        found = check_environment(arguments.id, kwargs, provider=arguments.provider, seeds=arguments.seeds)
    if arguments.json:
        _print_json({**dataclasses.asdict(found), "ok": found.ok})
    else:
        say(found.as_table())
    return 0 if found.ok else 1


def _envs_new(arguments: argparse.Namespace) -> int:
    from roll_flash.envs.check.new_project import write_project

    project = write_project(arguments.name)
    if arguments.json:
        _print_json({"folder": str(project.folder), "files": list(project.files), "env_id": project.env_id})
    else:
        say(f"{project.folder}: {', '.join(project.files)}")
        say(f"try it:  cd {project.folder} && roll-flash envs check {project.source}:{project.env_id}")
    return 0


def _add_sandbox(commands: Any) -> None:
    parser = commands.add_parser("sandbox", help="sandboxes on this machine", description="Sandboxes on this machine.")
    actions = parser.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    add_sandbox(lambda name, handler, text: _command(actions, name, handler, text))


def _add_gateway(commands: Any) -> None:
    add_gateway(lambda *arguments: _command(commands, *arguments))


def _add_export(commands: Any) -> None:
    parser = _command(commands, "export", _export, "write a checkpoint as a Hugging Face model folder")
    parser.add_argument("run", metavar="RUN[@step]", help="a run's name or folder; without @step its newest checkpoint")
    parser.add_argument("folder", metavar="DIR", help="a folder that does not exist or is empty")


def _export(arguments: argparse.Namespace) -> int:
    from roll_flash.run.run_dir import export_checkpoint

    checkpoint, folder = export_checkpoint(arguments.run, arguments.folder)
    if arguments.json:
        _print_json({"folder": str(folder), "step": checkpoint.step, "checkpoint": str(checkpoint.folder)})
    else:
        say(f"{folder}: model of step {checkpoint.step}")
    return 0


def _add_doctor(commands: Any) -> None:
    _command(commands, "doctor", _doctor, "check this machine: engine, Docker, Ray, GPUs, memory")


def _doctor(arguments: argparse.Namespace) -> int:
    from roll_flash.doctor import as_json, check_machine, is_usable, report

    checks = check_machine()
    say(as_json(checks) if arguments.json else report(checks))
    return 0 if is_usable(checks) else 1


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
