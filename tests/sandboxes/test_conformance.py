"""Every provider passes the suite that users run with `roll-flash sandbox check`."""

from __future__ import annotations

import asyncio

import pytest

from roll_flash.sandboxes import SandboxSpec
from roll_flash.sandboxes.conformance import CHECKS, Check, run_checks


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_provider_conforms(provider: str, check: Check) -> None:
    report = asyncio.run(run_checks(provider, SandboxSpec(), [check]))
    assert report.ok, report.checks
