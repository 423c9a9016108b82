"""Make sure that the dashboard's tests have a browser: as root on a machine with apt, install Debian's chromium."""

from __future__ import annotations

import shutil

import apt


def main() -> None:
    apt.provide("chromium", "chromium")
    found = shutil.which("chromium")
    print(f"browser: {found}" if found else "browser: no chromium, so the dashboard's tests are skipped; install it")


if __name__ == "__main__":
    main()
