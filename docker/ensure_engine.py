"""Make sure that a Docker engine can be used, or say in one line why the weaker `local` sandbox is used instead.

Uses the engine that runs. As root on a machine with apt and none running, installs docker.io and starts it; where
no service manager works (containers, small virtual machines) dockerd is started by hand and goes on after this
command: its log is LOG_FILE, and `kill $(cat /var/run/docker.pid)` stops it. Also installs bubblewrap for the `local`
sandbox where it can. Exit status 0 if either sandbox can be used, 1 if neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import apt

from roll_flash.doctor import Check, check_bubblewrap, check_docker

LOG_FILE = Path("/var/log/roll-flash-dockerd.log")
START_TIMEOUT_S = 60.0
SERVICE_TIMEOUT_S = 30.0
POLL_S = 0.5


class EngineUnavailable(Exception):
    """Why no engine can be had on this machine."""


def main() -> int:
    engine = check_docker()
    apt.provide("bwrap", "bubblewrap")  # of the `local` sandbox
    if not engine.ok:
        try:
            engine = _provide(engine)
        except (EngineUnavailable, apt.PackageUnavailable) as reason:
            return use_local(str(reason))
    print(f"sandbox: docker ({engine.detail})")
    return 0


def use_local(reason: str) -> int:
    """The exit status: 0 if the weaker `local` sandbox can be used instead, 1 if none can."""
    bubblewrap = check_bubblewrap()
    if bubblewrap.ok:
        print(f"sandbox: the weaker `local` sandbox (bubblewrap) is used, because {reason}")
        return 0
    print(
        f"sandbox: none can be used: {reason}; and bubblewrap: {bubblewrap.detail} ({bubblewrap.fix})", file=sys.stderr
    )
    return 1


def _provide(engine: Check) -> Check:
    """Install and start an engine. Raises EngineUnavailable, PackageUnavailable with the reason."""
    if os.environ.get("DOCKER_HOST"):
        raise EngineUnavailable(f"{engine.detail} (DOCKER_HOST is set; unset it to use an engine of this machine)")
    if os.geteuid() != 0:
        raise EngineUnavailable(f"{engine.detail}; to have one: {engine.fix}")
    if shutil.which("dockerd") is None:
        apt.install("docker.io")
    return _start_service() or _start_by_hand()


def _start_service() -> Check | None:
    """Start the engine through systemd where that is what runs the machine; None where it is not, or does not work."""
    if not Path("/run/systemd/system").is_dir() or shutil.which("systemctl") is None:
        return None
    try:
        subprocess.run(
            ["systemctl", "start", "docker"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SERVICE_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"engine: systemctl could not start it ({error}); starting dockerd by hand", flush=True)
        return None
    return _wait_for_engine(None)


def _start_by_hand() -> Check:
    program = shutil.which("dockerd")
    if program is None:
        raise EngineUnavailable("docker.io was installed, but there is no dockerd in PATH")
    print(f"engine: starting dockerd; its log is {LOG_FILE}; stop it with: kill $(cat /var/run/docker.pid)", flush=True)
    with LOG_FILE.open("ab") as log:
        # A session of its own, so that neither Ctrl-C in make nor the end of the terminal stops the engine.
        daemon = subprocess.Popen(
            [program], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd="/"
        )
    return _wait_for_engine(daemon)


def _wait_for_engine(daemon: subprocess.Popen[bytes] | None) -> Check:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        engine = check_docker()
        if engine.ok:
            return engine
        if daemon is not None and daemon.poll() is not None:
            raise EngineUnavailable(f"dockerd ended with status {daemon.returncode}: {_last_error()}")
        time.sleep(POLL_S)
    if daemon is not None:
        daemon.terminate()
    raise EngineUnavailable(f"the engine did not answer within {START_TIMEOUT_S:.0f} s: {_last_error()}")


def _last_error() -> str:
    text = LOG_FILE.read_text(errors="replace") if LOG_FILE.is_file() else ""
    return f"{apt.last_line(text)} (all of it in {LOG_FILE})" if text else "no log was written"


if __name__ == "__main__":
    sys.exit(main())
