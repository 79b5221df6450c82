"""A plain value is read as it is written. A value that two versions of YAML read differently is refused."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kernels.contract.message import CodedError
from kernels.contract.strict_yaml import read_yaml
from tests.support.messages import refused


def read(text: str) -> Any:
    return read_yaml(text, "x.yaml", CodedError)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("10", 10), ("-3", -3), ("+7", 7), ("0", 0), ("1_000", 1000), ("0x1F", 31), ("0b101", 5),
        ("3e-4", 3e-4), ("3.0e-4", 3e-4), ("1E6", 1e6), (".5", 0.5), ("-.5e1", -5.0), ("1.", 1.0), ("01.5", 1.5), ("-.inf", -math.inf),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("yes", "yes"), ("No", "No"), ("on", "on"), ("OFF", "OFF"), ("y", "y"),
        ("12:30", "12:30"), ("1:30:00", "1:30:00"), ("12:30.5", "12:30.5"), ("190:20:30", "190:20:30"),
        ("2026-11-26", "2026-11-26"), ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("=", "="), ("1e", "1e"), ("0o17", "0o17"), ("'010'", "010"), ('"on"', "on"), ("1.2.3", "1.2.3"), ("nan", "nan"),
    ],
)  # fmt: skip
def test_a_plain_value_is_read_as_it_is_written(written: str, value: object) -> None:
    found = read(f"key: {written}")["key"]
    assert found == value and type(found) is type(value)
    assert read(f"- {written}\n") == [value]


@pytest.mark.parametrize(("written", "bare"), [("010", "10"), ("-08", "-8"), ("007", "7"), ("0_1", "0_1"), ("00", "0")])
def test_a_leading_zero_is_refused_with_its_key(written: str, bare: str) -> None:
    for text, where, line in (
        (f"name: a\nseed: {written}", "key 'seed': ", "line 2"),
        (f"seeds: [1, {written}]", "", "line 1"),
    ):
        with refused("kernels.not_yaml", where="x.yaml") as found:
            read(text)
        reason = found.value.data["reason"]
        assert reason.code == "kernels.yaml_leading_zero"
        assert reason.data == {"where": where, "value": written, "bare": bare} and line in str(found.value)


def test_a_key_is_read_as_it_is_written() -> None:
    assert read("on: 1\nyes: 2\n") == {"on": 1, "yes": 2}
    with refused("kernels.not_yaml") as found:
        read("1: a\n0x1: b")
    assert found.value.data["reason"].code == "kernels.yaml_two_spellings"


# PyYAML writes 1e5 as text without quotes too, which is a number here.
text = st.text(max_size=9).filter(lambda one: not re.fullmatch(r"[-+]?[0-9_.]+[eE][-+]?[0-9]+", one))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | text
    | st.sampled_from(["on", "No", "010", "12:30", "2026-11-26", "0x1", "=", "<<", "~", "1_0", "nan", ".nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_a_value_that_pyyaml_writes_is_read_back(value: object) -> None:
    assert read(yaml.safe_dump(value)) == value
    assert read(yaml.safe_dump({"day": datetime.date(2026, 11, 26)})) == {"day": "2026-11-26"}
