"""Records of the log as lines of text; apart from `terminal.py`, so that `--help` need not load logging."""

from __future__ import annotations

import logging

from roll_flash.terminal import one_line, printable


class _PrintableFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """One record, one line: what a model said must not look like a record of ours."""
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def make_logs_printable() -> None:
    """Of this process, where the user has set up no logging of their own."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
