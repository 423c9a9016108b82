"""What all tests of environments share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from roll_flash.envs.adapters import textworld_express


@pytest.fixture(scope="session", autouse=True)
def java_ends_with_the_tests() -> Iterator[None]:
    """It would end with this process, which is after the search for what the tests left behind."""
    yield
    if textworld_express._gateway is not None:
        textworld_express._stop_java(textworld_express._gateway, os.getpid())
