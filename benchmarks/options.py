"""Options of a benchmark that also takes keys of a config, `a.b=c`, anywhere among them."""

from __future__ import annotations

import argparse
import sys


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the keys. argparse alone takes a key after `--seeds 0 1` for another seed."""
    words = sys.argv[1:]
    keys = [word for word in words if "=" in word and not word.startswith("-")]
    return parser.parse_args([word for word in words if word not in keys]), keys
