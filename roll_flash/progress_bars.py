"""Progress bars of other packages: on terminals only. In a log each of their updates would be a line."""

from __future__ import annotations

import os
import sys


def progress_bars_on_terminals_only() -> None:
    """Must be called before anything imports tqdm, which reads its settings then."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
