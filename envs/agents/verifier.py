"""Checks of an agent's work: a task environment's own check, or a command in the sandbox."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_flash.chat.model_text import decimal_number
from roll_flash.envs.base import SandboxEnv
from roll_flash.errors import ConfigError
from roll_flash.sandboxes import Sandbox
from roll_flash.sandboxes.errors import SandboxFileError

VERIFIER_OUTPUT = 1 << 16
LEAST_S = 0.1
"""Least time in seconds of a check, if the removal of an agent's links took nearly all."""
CHECK_ENVIRONMENT = {
    "HOME": "/nonexistent",
    # Same effect as `python3 -I`, for every Python that the check starts.
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONPYCACHEPREFIX": "/nonexistent",  # a planted __pycache__ may stand for any source
    **dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "BASH_ENV", "ENV"), ""),
}
"""Environment of a check: its programs read no settings and import no modules from paths that an agent could write."""
_CLEAN_PATH = r"""
p= w=
while read -r _ d k o _; do
    case $d:$k:$o in /:*) ;; *:tmpfs:rw*) w=$w:$(printf %b "$d");; esac
done < /proc/mounts
IFS=:
for d in $PATH; do
    case $d/ in /tmp/*|/dev/*|"$PWD"/*|[!/]*) continue;; esac
    [ -w "$d" ] && continue
    r=$(cd -P -- "$d" 2>/dev/null && pwd -P) || continue
    for k in $w; do
        [ -z "$k" ] || case $r/ in "$k"/*) continue 2;; esac
    done
    p=$p${p:+:}$d
done
unset IFS
PATH=${p:-/usr/local/bin:/usr/bin:/bin}
unset p w d k o r _
"""
"""Shell code that removes folders an agent could write from the image's PATH, also those whose write permission it has
taken away: all that lies in memory, such as the image's volumes. The kernel writes blanks in names as \\040."""
_REMOVE_LINKS = r"""
held=
for f; do
    case $f in /*) p=$f;; *) p=$PWD/$f;; esac
    while :; do
        held="$held$p
"
        [ "$p" = / ] && break
        p=$(dirname -- "$p")
    done
done
export held
places=$(while read -r _ p kind options _; do
    case $p:$kind:$options in /:*|/.*|/proc*|/sys/*|/dev:*) ;; *:tmpfs:rw*) printf '%b\n' "$p";; esac
done < /proc/mounts)
set -f
IFS="
"
find "$PWD/." /tmp /dev/shm $places -xdev -type l -exec sh -c '
    set -f
    IFS="
"
    cd -P /proc/self/task && exec <&2 || exit 1
    for l; do
        bad=
        case $(readlink -f -- "$l") in ""|/|/dev|/proc|/proc/*|/sys|/sys/*) bad=1;; esac
        [ -e "$l" ] || bad=1
        for p in $held; do [ "$l" -ef "$p" ] && bad=1 && break; done
        [ -z "$bad" ] || rm -f -- "$l" || echo failed
    done' sh {} +
"""
"""Shell code that removes links to the files in `$@`, to folders that hold them, to nothing, and into /proc or to
folders that lead there (`/dev/stdin`). Through such a link a check would read what it compares with, or its own
environment. All that an agent may write to is searched: working directory, `/tmp`, `/dev/shm`, the image's volumes.
`/proc/self` is another folder for each program, which leads to the program's input and working directory. So links are
resolved by a program whose own lie in /proc: its input is the pipe of its errors."""
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
WRITABLE = ("/sandbox/", "/tmp/", "/dev/shm/")


@dataclass(frozen=True, slots=True)
class CommandVerifier:
    """A command run by `/bin/sh` in the sandbox, alone. With exit status 0 the last line of its output is the reward
    if it is a number from 0 to 1; a number below 0 gives 0.0, anything else 1.0.

    Any other exit status gives 0.0, whatever was printed: the last line of an aborted check may be an agent's text. A
    timeout also gives 0.0, because the checked code may never end; so do processes of the agent that do not end, and a
    file that cannot be written, because only an agent can block its path. docs/agents.md lists what a check may trust.
    """

    command: str
    files: Mapping[str, str]
    """Path and content, written only at the check: the agent has not seen them."""
    timeout_s: float

    def __post_init__(self) -> None:
        for path in self.files:
            if ".." in path.split("/") or (path.startswith("/") and not path.startswith(WRITABLE)):
                raise ConfigError(
                    f"verifier_files: {path!r}: a sandbox can be written below its working directory and /tmp only"
                )

    async def __call__(
        self, sandbox: Sandbox, env: Mapping[str, str], more_files: Mapping[str, bytes] | None = None
    ) -> tuple[float, dict[str, Any]]:
        try:
            await sandbox.kill_all()
            files: dict[str, str | bytes] = {**self.files, **(more_files or {})}
            for path, content in files.items():
                await sandbox.remove(path)
                await sandbox.write(path, content)
        except SandboxFileError as error:
            return 0.0, {"verifier_error": str(error)}
        script = f"set -- {shlex.join(files)}\n{_CLEAN_PATH}{_REMOVE_LINKS}"
        swept = await sandbox.exec(script, timeout=self.timeout_s, env=CHECK_ENVIRONMENT, max_output=VERIFIER_OUTPUT)
        if swept.timed_out or swept.stdout or swept.exit_code != 0:
            return 0.0, {"verifier_error": f"links could not be removed: {swept.stderr_text:.200}"}
        result = await sandbox.exec(
            _CLEAN_PATH + self.command,
            timeout=max(LEAST_S, self.timeout_s - swept.duration_s),  # a step has time for one of them
            env={**CHECK_ENVIRONMENT, **env},
            max_output=VERIFIER_OUTPUT,
        )
        info = {"verifier_exit": result.exit_code, "verifier_timed_out": result.timed_out}
        if result.timed_out or result.exit_code != 0:
            return 0.0, info
        return _said_reward(result.stdout_text), info


def _said_reward(output: str) -> float:
    """Return the reward of a check that exited with 0. A non-finite mean, as of an empty file, gives 0.0, and so does a
    number below 0, such as 1 minus the error of a very wrong answer.

    A line ends with a newline only: `head -n 1` and `read` treat Python's other line separators as part of the line, so
    an agent could use one to end a line of the check and start its own.
    """
    word = output.rstrip().rpartition("\n")[2].strip(" \t\r")
    if _NOT_FINITE.fullmatch(word):
        return 0.0
    value = decimal_number(word)
    return 1.0 if value is None else min(max(0.0, value), 1.0)


def check_task_environment(env: Any, env_id: str) -> SandboxEnv:
    """Return the unwrapped environment. Raises ConfigError if its task cannot be given to an agent."""
    task = env.unwrapped
    if not isinstance(task, SandboxEnv) or type(task).agent_task is SandboxEnv.agent_task:
        raise ConfigError(
            f"task_env {env_id!r} gives agents no task: it must be a SandboxEnv with "
            "`async def agent_task(self) -> str`, which sets the sandbox up and says what to do"
        )
    return task
