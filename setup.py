"""Builds the sandbox agent into the wheel, for every processor that the compiler at hand can build for.

Everything else about the package is in pyproject.toml. An editable install builds the agent at its first use instead.
"""

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-Os", "-s", "-static")
PROCESSORS = ("x86_64", "aarch64")


def compiler(processor: str) -> list[str] | None:
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{processor}-linux-musl"]
    native = shutil.which("musl-gcc") or shutil.which("cc")
    return [native] if native and platform.machine() == processor else None


class BuildWithAgent(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sources = sorted(Path("sandboxes/agent").glob("*.c"))
        for processor in PROCESSORS:
            if (command := compiler(processor)) is None:
                self.warn(f"no compiler for the sandbox agent on {processor}; it is built at its first use")
                continue
            target = Path(self.build_lib) / "roll_flash/sandboxes/agent" / f"agent-{processor}"
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([*command, *FLAGS, *map(str, sources), "-o", str(target)], check=True)


setup(cmdclass={"build_py": BuildWithAgent})
