"""Print log records safely; not part of `terminal.py`, so that `--help` need not load logging."""

from __future__ import annotations

import logging

from roll_flash.terminal import one_line, printable


class _PrintableFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format a record as one line: text of a model must not look like a log record."""
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def make_logs_printable() -> None:
    """Make the logs of this process printable, unless the user has configured logging."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
