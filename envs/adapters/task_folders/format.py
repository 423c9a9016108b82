"""Reads task folders of Harbor and terminal-bench into one form.

Harbor: `task.toml`, `instruction.md`, `environment/` (Dockerfile), `tests/test.sh`, `solution/solve.sh`; the tests
write a reward file. terminal-bench 1: `task.yaml`, `Dockerfile` or `docker-compose.yaml`, `run-tests.sh`, `tests/`,
`solution.sh`; the tests use pytest, and all must pass. A folder that needs unsupported features (several containers,
several steps, a separate verifier) is an error; nothing is ignored.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from roll_flash.checked_files import load_yaml, read_checked
from roll_flash.errors import ConfigError, first_line
from roll_flash.sandboxes import SandboxSpec
from roll_flash.sandboxes.files.build_context import read_build_folder
from roll_flash.terminal import say

HARBOR_FILE, TERMINAL_BENCH_FILE = "task.toml", "task.yaml"
TASK_FILES = (HARBOR_FILE, TERMINAL_BENCH_FILE, "instruction.md")
USED_FILES = (
    *(*TASK_FILES, "environment", "environment/Dockerfile", "environment/docker-compose.yaml", "tests", "solution"),
    *("tests/test.sh", "solution/solve.sh", "Dockerfile", "docker-compose.yaml", "run-tests.sh", "solution.sh"),
)
"""What is read here of tasks. Links deeper in folders stay links in the sandbox."""
MAX_TEXT_BYTES = 1 << 20
"""Largest file of settings, and largest instruction, of a task."""
DEFAULT_WORKDIR = "/app"
DEPTH = 4
"""Maximum folder depth of the search for tasks."""
MAX_NAMED = 5
"""Most folders in a message."""
HOME = "/root"
Seconds = Annotated[float, pydantic.Field(gt=0, le=7 * 86400)]
"""No command in a sandbox may take longer than a week."""
SCRATCH = "/roll-flash"
"""Path of the sandbox's own writable folder; the image's folders stay as built."""
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([MG])i?B?", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_STAGE_OR_WORKDIR = re.compile(
    r"^[^\S\n]*(?:FROM[^\S\n]+(?:--\S+[^\S\n]+)*(?P<base>\S+)(?:[^\S\n]+AS[^\S\n]+(?P<stage>\S+))?"
    r"|WORKDIR[^\S\n]+[\"']?(?P<path>[^\s\"'$]+)[\"']?)[^\S\n]*$",
    re.MULTILINE | re.IGNORECASE,
)
"""Of one line: with blanks over several lines, a Dockerfile of empty lines takes the square of its length."""


@dataclass(frozen=True, slots=True)
class FolderTask:
    """One task, ready to be played."""

    name: str
    folder: Path
    instruction: str
    spec: SandboxSpec
    workdir: str
    """Working directory of commands of the agent, the tests and the solution."""
    agent_timeout_s: float
    """Seconds for all commands of the agent together."""
    tests: Mapping[Path, str]
    """Folders and files of this machine, and their sandbox paths during the tests."""
    test_command: str
    test_env: Mapping[str, str]
    test_timeout_s: float
    verdict: Literal["reward file", "pytest"]
    solution: Mapping[Path, str]
    solution_command: str
    """Empty if the task has no solution."""
    solution_env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The user's overrides of the tasks' settings."""

    memory_mb: int | None = None
    cpus: float | None = None
    workdir: str | None = None
    user: str = "0:0"
    allow: tuple[str, ...] = ()
    """`host:port` that the sandbox may reach; no others, even if the task asks for them."""
    force_build: bool = False
    """Build `environment/Dockerfile` even if the task names an image."""


def find_tasks(folder: str | Path) -> list[Path]:
    """Return the task folders in `folder`, sorted, or `folder` itself if it is one. Raises ConfigError if none.

    Folders beside tasks that hold none are named, once per process.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such folder")
    found = list(_tasks_below(root, DEPTH))
    if not found:
        raise ConfigError(f"{root}: no task in it; a task is a folder with {HARBOR_FILE} or {TERMINAL_BENCH_FILE}")
    _name_others(root, tuple(found))
    return found


@cache
def _name_others(root: Path, tasks: tuple[Path, ...]) -> None:
    beside = {task.parent for task in tasks if task != root}
    has_tasks = {folder for task in tasks for folder in (task, *task.parents)}
    inner = sorted(each for folder in beside for each in folder.iterdir() if each.is_dir())
    others = [str(each.relative_to(root)) for each in inner if each not in has_tasks and each.name[0] != "."]
    if others:
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        named = ", ".join(others[:MAX_NAMED]) + more
        say(f"{root}: not played, because there is no {HARBOR_FILE} or {TERMINAL_BENCH_FILE}: {named}", error=True)


def _tasks_below(folder: Path, depth: int) -> Iterator[Path]:
    if any((folder / mark).is_file() for mark in TASK_FILES):
        yield folder
    elif depth:
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.name.startswith("."):
                yield from _tasks_below(inner, depth - 1)


@cache
def longest_limits(folder: Path, options: FolderOptions) -> tuple[float, float]:
    """Return the largest agent timeout and the largest test timeout of the tasks in this folder, in seconds.

    Unreadable tasks are skipped and fail when they are played. Raises ConfigError if all are unreadable.
    """
    tasks, limits, trouble = find_tasks(folder), [], ""
    for path in tasks:
        try:
            task = load_task(path, options)
        except ConfigError as error:
            trouble = trouble or str(error)
            continue
        limits.append((task.agent_timeout_s, task.test_timeout_s))
    if not limits:
        raise ConfigError(f"{folder}: none of its {len(tasks)} tasks can be read; the first: {trouble}")
    agent_s, tests_s = (max(limit) for limit in zip(*limits, strict=True))
    return agent_s, tests_s


def load_task(folder: Path, options: FolderOptions | None = None) -> FolderTask:
    """Read one task folder. Raises ConfigError with the file and the reason."""
    options = options or FolderOptions()
    _must_be_inside(folder, *USED_FILES)
    try:
        if (folder / HARBOR_FILE).is_file():
            return _read_harbor(folder, options)
        if (folder / TERMINAL_BENCH_FILE).is_file():
            return _read_terminal_bench(folder, options)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder / HARBOR_FILE}: not valid TOML: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{folder}: not valid YAML: {' '.join(str(error).split())[:300]}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{folder}: {where + ': ' if where else ''}{first['msg']}") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:  # of shapes that no task has
        raise ConfigError(f"{folder}: cannot be read: {first_line(error)}") from None
    raise ConfigError(f"{folder}: there is no {HARBOR_FILE} in it")


class _Section(pydantic.BaseModel):
    """Ignores other keys, which belong to the task's authors."""

    env: dict[str, str] = {}


class _Harbor(pydantic.BaseModel):
    class Verifier(_Section):
        timeout_sec: Seconds = 600.0
        environment_mode: Literal["shared"] = "shared"

    class Agent(_Section):
        timeout_sec: Seconds = 600.0

    class Environment(_Section):
        docker_image: str | None = None
        cpus: pydantic.PositiveFloat = 1.0
        memory_mb: pydantic.PositiveInt | None = None
        memory: str | None = None
        workdir: str | None = None

    verifier: Verifier = Verifier()
    agent: Agent = Agent()
    environment: Environment = Environment()
    solution: _Section = _Section()
    steps: list[Any] = pydantic.Field(default=[], max_length=0)


def _read_harbor(folder: Path, options: FolderOptions) -> FolderTask:
    settings = _Harbor.model_validate(tomllib.loads(_text(folder / HARBOR_FILE)))
    environment = settings.environment
    _must_have(folder, "instruction.md", "tests/test.sh")
    if (folder / "environment/docker-compose.yaml").is_file():
        raise ConfigError(f"{folder}: environment/docker-compose.yaml: several containers are not supported here")
    build = folder / "environment"
    has_dockerfile = (build / "Dockerfile").is_file()
    if not has_dockerfile and environment.docker_image is None:
        raise ConfigError(f"{folder}: it has neither environment/Dockerfile nor environment.docker_image in task.toml")
    if has_dockerfile and (options.force_build or environment.docker_image is None):
        dockerfile, context = read_build_folder(build)
        source: dict[str, Any] = {"dockerfile": dockerfile, "context": context}
    else:
        dockerfile = _text(build / "Dockerfile") if has_dockerfile else ""
        source = {"image": environment.docker_image}
    memory_mb = environment.memory_mb or _in_mb(folder, environment.memory)
    variables = _resolved(folder, environment.env)
    has_solution = (folder / "solution/solve.sh").is_file()
    return FolderTask(
        name=folder.resolve().name,
        folder=folder,
        instruction=_text(folder / "instruction.md").strip(),
        spec=_spec(source, memory_mb, environment.cpus, variables, options),
        workdir=options.workdir or environment.workdir or _workdir_of(dockerfile),
        agent_timeout_s=settings.agent.timeout_sec,
        tests={folder / "tests": "/tests"},
        test_command="chmod +x /tests/test.sh; /tests/test.sh",
        test_env=_resolved(folder, settings.verifier.env),
        test_timeout_s=settings.verifier.timeout_sec,
        verdict="reward file",
        solution={folder / "solution": "/solution"} if has_solution else {},
        solution_command="chmod +x /solution/solve.sh; /solution/solve.sh" if has_solution else "",
        solution_env=_resolved(folder, settings.solution.env),
    )


class _TerminalBench(pydantic.BaseModel):
    instruction: str
    parser_name: Literal["pytest"] = "pytest"
    max_agent_timeout_sec: Seconds = 360.0
    max_test_timeout_sec: Seconds = 180.0
    run_tests_in_same_shell: Literal[False] = False


def _read_terminal_bench(folder: Path, options: FolderOptions) -> FolderTask:
    settings = _TerminalBench.model_validate(load_yaml(read_checked(folder / TERMINAL_BENCH_FILE, MAX_TEXT_BYTES)))
    _must_have(folder, "run-tests.sh")
    source = _compose_source(folder)
    tests = {folder / "tests": "/tests"} if (folder / "tests").is_dir() else {}
    has_solution = (folder / "solution.sh").is_file()
    return FolderTask(
        name=folder.resolve().name,
        folder=folder,
        instruction=settings.instruction.strip(),
        spec=_spec(source, None, 1.0, {"TEST_DIR": "/tests"}, options),
        workdir=options.workdir or _workdir_of(str(source.get("dockerfile", ""))),
        agent_timeout_s=settings.max_agent_timeout_sec,
        tests={**tests, folder / "run-tests.sh": "/tests/run-tests.sh"},
        test_command="bash /tests/run-tests.sh",
        test_env={},
        test_timeout_s=settings.max_test_timeout_sec,
        verdict="pytest",
        solution={folder / "solution.sh": "/oracle/solution.sh"} if has_solution else {},
        solution_command="bash /oracle/solution.sh" if has_solution else "",
        solution_env={},
    )


def _compose_source(folder: Path) -> dict[str, Any]:
    """Return image or Dockerfile of a compose file's only service; without a compose file, the folder's Dockerfile."""
    compose = folder / "docker-compose.yaml"
    build: Any = {}
    if compose.is_file():
        services = (load_yaml(read_checked(compose, MAX_TEXT_BYTES)) or {}).get("services") or {}
        if list(services) != ["client"]:
            raise ConfigError(
                f"{compose}: the services are {', '.join(services) or 'none'}; only one, called client, is supported"
            )
        service = services["client"] or {}
        if "build" not in service and "image" in service:
            return {"image": str(service["image"])}
        build = service.get("build") or {}
    settings = {"context": build} if isinstance(build, str) else dict(build)
    context = folder / settings.get("context", ".")
    name = settings.get("dockerfile", "Dockerfile")
    _must_be_inside(folder, settings.get("context", "."), Path(settings.get("context", "."), name))
    _must_have(context, name)
    if name == "Dockerfile":
        dockerfile, packed = read_build_folder(context)
        return {"dockerfile": dockerfile, "context": packed}
    raise ConfigError(f"{compose}: the Dockerfile must be called Dockerfile, not {name}")


def _spec(
    source: Mapping[str, Any], memory_mb: int | None, cpus: float, env: Mapping[str, str], options: FolderOptions
) -> SandboxSpec:
    return SandboxSpec(
        **source,
        memory_mb=options.memory_mb or memory_mb or 2048,
        cpus=options.cpus or cpus,
        pids=512,
        network="allowlist" if options.allow else "none",
        allow=options.allow,
        env=tuple(sorted({"HOME": HOME, **env}.items())),
        workdir=SCRATCH,
        user=options.user,
        writable_root=True,
    )


def _text(file: Path) -> str:
    return read_checked(file, MAX_TEXT_BYTES).decode().replace("\r\n", "\n")


def _must_have(folder: Path, *names: str) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: {name} is missing")


def _must_be_inside(folder: Path, *names: str | Path) -> None:
    """Raise ConfigError for what a link or `..` takes from elsewhere: a model would see files of this machine."""
    for name in names:
        if not Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder)):
            raise ConfigError(f"{folder / name}: it leads out of the task's folder; copy there what the task needs")


def _in_mb(folder: Path, text: str | None) -> int | None:
    if text is None:
        return None
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{folder / HARBOR_FILE}: environment.memory {text!r} is no size; write 512M or 2G")
    return int(float(match[1]) * (1024 if match[2].upper() == "G" else 1))


def _workdir_of(dockerfile: str) -> str:
    """Return the last WORKDIR with a plain path of the last stage; the settings of a base image are unknown."""
    workdir, stage, workdirs = "", "", dict[str, str]()
    for line in _STAGE_OR_WORKDIR.finditer(dockerfile):
        if (path := line["path"]) is not None:
            workdir = path if path.startswith("/") else f"{workdir}/{path}"
        else:
            workdir, stage = workdirs.get(line["base"].lower(), ""), (line["stage"] or "").lower()
        workdirs[stage] = workdir
    return workdir or DEFAULT_WORKDIR


def _resolved(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Replace `${NAME}` and `${NAME:-default}` by variables of this process, as in Harbor, and say so."""

    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match[1], match[2])
        if value is None:
            raise ConfigError(f"{folder / HARBOR_FILE}: the environment variable {match[1]} is not set")
        if match[1] in os.environ:
            _name_variable(match[1])
        return value

    def resolved(text: str) -> str:
        head, end, rest = text.rpartition("}")  # without an end to find, each beginning would be searched to the end
        return _VARIABLE.sub(value_of, head + end) + rest

    return {name: resolved(text) for name, text in variables.items()}


@cache
def _name_variable(name: str) -> None:
    say(f"tasks get the variable {name} of this machine: their {HARBOR_FILE} asks for it", error=True)
