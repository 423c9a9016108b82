"""Files of JSON lines: always valid JSON, and never in the way after a crash."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.errors import RunError
from roll_flash.monitor.json_lines import AppendedFile, JsonLinesFile, cut_half_line, encode, plain, read_lines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def with_nulls(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [with_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: with_nulls(item) for key, item in value.items()}
    return value


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_any_record_comes_back_with_null_for_what_is_not_finite(record: dict[str, Any]) -> None:
    line = encode(record)
    assert "\n" not in line
    assert json.loads(line, parse_constant=pytest.fail) == with_nulls(record)


def test_numbers_that_are_not_finite_are_null_in_arrays_too() -> None:
    array = np.array([1.0, np.nan, -np.inf], np.float32)
    assert encode({"a": math.inf, "b": [1.0, math.nan], "c": array}) == '{"a":null,"b":[1.0,null],"c":[1.0,null,null]}'


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-20, 0, width=32), max_size=50))
def test_float32_numbers_read_as_the_same_and_are_as_short_as_can_be(numbers: list[float]) -> None:
    array = np.array(numbers, np.float32)
    written = json.loads(encode({"x": array}))["x"]
    assert np.array_equal(np.array(written, np.float32), array)
    shortest = [float(str(number)) + 0.0 for number in array]  # zeros have no sign
    assert [len(repr(number)) for number in written] == [len(repr(number)) for number in shortest]


def test_text_that_is_no_unicode_does_not_stop_a_run() -> None:
    assert json.loads(encode({"output": "a\udcffb"})) == {"output": "a?b"}


@given(whole=st.lists(st.binary(max_size=8).filter(lambda b: b"\n" not in b), max_size=5), half=st.binary(max_size=8))
def test_cutting_removes_exactly_what_follows_the_last_newline(
    tmp_path_factory: pytest.TempPathFactory, whole: list[bytes], half: bytes
) -> None:
    half = half.replace(b"\n", b"")
    path = tmp_path_factory.mktemp("cut") / "file"
    kept = b"".join(line + b"\n" for line in whole)
    path.write_bytes(kept + half)
    cut_half_line(path)
    assert path.read_bytes() == kept


def test_a_half_line_longer_than_a_block_is_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"{}\n" + b"x" * 200_000)
    cut_half_line(path)
    assert path.read_bytes() == b"{}\n"


def test_a_full_disk_is_one_line_with_what_to_do() -> None:
    file = AppendedFile(Path("/dev/full"))
    with pytest.raises(
        RunError, match=r"/dev/full: cannot be written: No space left on device; free space on its disk"
    ):
        file.append(b"x")
    file.close()


def test_each_line_is_on_disk_before_write_returns(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path / "deep" / "file.jsonl")
    file.write({"a": 1})
    assert list(read_lines(tmp_path / "deep" / "file.jsonl")) == [{"a": 1}]
    file.close()


@pytest.mark.parametrize(
    "value", [{"\ud800": 1}, {"a": {"\udfff": 1}}, {"a": ValueError("\ud800")}, {"a": {"\ud800"}}, {"a?": 16**9000}]
)
def test_half_a_character_or_a_number_without_end_stops_no_run(tmp_path: Path, value: dict[str, Any]) -> None:
    """Also in the names of what an environment took from a model's JSON."""
    file = JsonLinesFile(tmp_path / "file.jsonl")
    file.write(value)
    file.close()
    assert "?" in str(list(read_lines(tmp_path / "file.jsonl")))


def test_what_is_plain_can_be_written_and_read_however_deep_it_was_nested() -> None:
    """Plain where it was made, it is written with more around it by who has called more functions by then."""

    def written(record: Any, calls: int) -> str:
        return written(record, calls - 1) if calls else encode({"step": {"episode": record}})

    for depth in (*range(1, 100), 400, 900, 5000):
        nested: Any = 1
        for _ in range(depth):
            nested = [nested]
        try:
            record = plain({"info": nested})
        except RecursionError:
            assert depth >= 64
        else:
            assert json.loads(written(record, 300))["step"]["episode"] == {"info": nested}


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a":' + b"[" * 100_000 + b"\n")
    with pytest.raises(ValueError, match=r"line 1: not a record .*remove that line"):
        list(read_lines(path))
    path.write_text("{}\n[1]\n")
    with pytest.raises(ValueError, match=r"line 2: not a record .*got `array`"):
        list(read_lines(path))


def test_what_a_full_disk_took_of_a_line_is_cut(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path / "a.jsonl")
    file.write({"n": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(RunError, match="bytes could be written; free space on its disk"):
            file.write({"n": "2" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.write({"n": 3})
    file.close()
    assert [row["n"] for row in read_lines(tmp_path / "a.jsonl", dict[str, Any])] == [1, 3]
