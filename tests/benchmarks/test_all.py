"""What a regenerated benchmark is compared with: a figure changed when it left its interval, or moved by a tenth."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def all_benchmarks() -> ModuleType:
    sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("all_benchmarks", BENCHMARKS / "all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_a_figure_that_left_its_interval_is_marked_and_one_within_it_is_not(all_benchmarks: ModuleType) -> None:
    before = {"claims": {"queue": {"figure": {"mean": 3.5, "low": 3.3, "high": 3.7}, "rows": [{"step": 50.0}]}}}
    within = {"claims": {"queue": {"figure": {"mean": 3.35, "low": 3.0, "high": 3.6}, "rows": [{"step": 54.0}]}}}
    outside = {"claims": {"queue": {"figure": {"mean": 4.15, "low": 4.0, "high": 4.3}, "rows": [{"step": 80.0}]}}}
    assert all_benchmarks.changes(before, within) == []
    assert [change.figure for change in all_benchmarks.changes(before, outside)] == [
        "claims / queue / figure",
        "claims / queue / rows / 0 / step",
    ]


def test_figures_that_came_or_went_are_marked(all_benchmarks: ModuleType) -> None:
    came, went = all_benchmarks.changes({"old": 1.0}, {"new": 2.0})
    assert (came.figure, came.before, came.after) == ("new", None, 2.0)
    assert (went.figure, went.before, went.after) == ("old", 1.0, None)
    assert "| stream | new | none | 2 |" in all_benchmarks.table({"stream": [came]}, {})


def test_every_result_has_a_benchmark_that_makes_it(all_benchmarks: ModuleType) -> None:
    made = {one.result for one in all_benchmarks.BENCHMARKS}
    kept = {"sandbox_soak"}  # an hour of a machine of its own
    results = {file.stem for file in (BENCHMARKS / "results").glob("*.json")}
    assert {name for name in results if not name.startswith("gpu-")} <= made | kept
    for one in all_benchmarks.BENCHMARKS:
        assert (BENCHMARKS / one.arguments[0]).is_file()


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each `from MODULE import NAME`, in functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, each.name) for each in node.names)


def test_a_benchmark_imports_what_exists() -> None:
    own = ("roll_flash", "tests", *(file.stem for file in BENCHMARKS.glob("*.py")))
    missing, count = [], 0
    for file in sorted(BENCHMARKS.glob("**/*.py")):
        for module, name in imported(file):
            if module.partition(".")[0] in own:
                count += 1
                if not exists(module, name):
                    missing.append(f"{file.name}: {module}.{name}")
    assert not missing
    assert count > 100


def exists(module: str, name: str) -> bool:
    if (file := BENCHMARKS / f"{module}.py").is_file():  # read only, as it may need packages of others
        return name in defined(file)
    found = importlib.import_module(module)
    return hasattr(found, name) or (
        hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    )


def defined(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
    return names


@pytest.mark.parametrize("words", [["--seeds", "0", "1", "steps=20"], ["steps=20", "--seeds", "0", "1"]])
def test_keys_of_a_config_may_follow_an_option_with_several_values(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words])
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+")
    options, keys = importlib.import_module("options").parse(parser)
    assert (options.seeds, keys) == ([0, 1], ["steps=20"])
