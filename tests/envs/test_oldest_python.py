"""What is pinned can be installed with the oldest Python that is tried, Debian 12's."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

OLDEST = "3.11.2"


@pytest.mark.parametrize("packages", ["product", pytest.param("adapters", marks=pytest.mark.adapters)])
def test_no_package_needs_a_newer_python(packages: str) -> None:
    # The environment of the adapters has folders of what is put into sandboxes.
    beside = {info.parent for info in Path(sys.prefix).glob("*/*.dist-info")}
    assert bool(beside) == (packages == "adapters")
    found = list(metadata.distributions(path=[*sys.path, *map(str, beside)]))
    assert len(found) > 100
    needs = {f"{each.name} {each.version}": each.metadata.get("Requires-Python") or "" for each in found}
    assert [name for name, wanted in needs.items() if OLDEST not in SpecifierSet(wanted)] == []
