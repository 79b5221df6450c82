"""Conditions that record their results: what is one, what is recorded, and that no value changes."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from factory.gates.patch import watch_conditions
from factory.gates.patch.watch_conditions import RESULTS, compile_watched


def recorded(text: str, *calls: tuple[Any, ...]) -> tuple[dict[str, set[str]], list[Any]]:
    """Source of each condition of ``f`` → its results in ``calls``, and what ``f`` returned."""
    text = dedent(text)
    path = f"trainer/{abs(hash(text))}.py"
    code, found = compile_watched(text, path, range(1, 99), path)
    watch_conditions.install()
    watch_conditions.know_compiler()
    RESULTS.pop(path, None)
    names: dict[str, Any] = {"np": np, "torch": torch}
    plain: dict[str, Any] = dict(names)
    exec(code, names)
    exec(compile(text, path, "exec"), plain)
    values = [names["f"](*call) for call in calls]
    assert repr(values) == repr([plain["f"](*call) for call in calls]), "watching changes no value"
    results: dict[str, set[str]] = {}
    for number, condition in enumerate(found):
        results.setdefault(condition.source, set()).update(of for at, of in RESULTS[path] if at == number)
    return results, values


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 2 * (x > 1)", {"x > 1": {"true", "false"}}),
        ("return 1 if x > 9 else 2", {"x > 9": {"false"}}),
        ("return x in (0, 9)", {"x in (0, 9)": {"true", "false"}}),
        ("return 0 <= x < 2", {"0 <= x": {"true"}, "x < 2": {"true", "false"}}),
        ("return x and y", {"x": {"true", "false"}}),
        ("return 3 if x and y else 4", {"x": {"true", "false"}, "y": {"true"}}),
        ("return not x", {"x": {"true", "false"}}),
        ("return [one for one in range(5) if one > x]", {"one > x": {"true", "false"}}),
        ("return y[x > 0]", {"x > 0": {"true", "false"}}),
        ("return min(1, x)", {"min(1, x)": {"0", "1"}}),
        ("return max((2, x))", {"max((2, x))": {"0", "1"}}),
        ("return min(x, x)", {"min(x, x)": {"several"}}),
        ("z = x > 1\n    return 2 ** z", {"x > 1": {"true", "false"}, "z": {"true", "false"}}),
        ("return int(bool(x))", {"bool(x)": {"true", "false"}, "x": set()}),
        ("assert x < 9\n    return x", {}),
        ("assert str(x < 9)\n    return x", {"x < 9": {"true"}}),
        ("while x > 0:\n        x -= 1\n    return x", {"x > 0": {"true", "false"}}),
        ("return float((torch.arange(3) > x).sum())", {"torch.arange(3) > x": {"true", "false"}}),
        ("return float((torch.tensor(x) >= 0))", {"torch.tensor(x) >= 0": {"true"}}),
        ("return int((np.arange(3) >= 0).sum())", {"np.arange(3) >= 0": {"true"}}),
        ("def g(a: int | None, b: str = 'x') -> int | None:\n        return a\n    return g(x)", {}),
    ],
)
def test_the_results_of_conditions_are_recorded(body: str, expected: dict[str, set[str]]) -> None:
    found, _ = recorded(f"from __future__ import annotations\ndef f(x, y):\n    {body}\n", (0, "ab"), (3, "ab"))
    found.pop("(torch.arange(3) > x).sum()", None)
    assert {source: of for source, of in found.items() if of or source in expected} == expected


def test_only_conditions_in_watched_lines_are_numbered() -> None:
    text = "a = 1 > 0\nb = 2 > 0\nc = (3 >\n     0)\n"
    numbered = lambda *lines: [condition.source for condition in compile_watched(text, "a", lines, "a")[1]]
    assert numbered() == [] and numbered(2) == ["2 > 0"] and numbered(4) == ["3 > 0"] and len(numbered(1, 2, 3)) == 3
    plain = compile(text, "a", "exec", dont_inherit=True)
    assert compile_watched(text, "a", (), "a")[0].co_code == plain.co_code


def test_a_condition_that_only_decides_a_refusal_names_its_raise() -> None:
    text = "if a > 1 or f(b > 2):\n    raise ValueError\nif c > 3:\n    raise ValueError\nelse:\n    pass\n"
    found = {one.source: one.refuses for one in compile_watched(text, "a", range(1, 9), "a")[1]}
    assert found == {"a > 1": (2, 4, 2, 20), "f(b > 2)": (2, 4, 2, 20), "b > 2": None, "c > 3": None}


def test_a_pattern_and_a_link_behind_a_call_cannot_be_watched() -> None:
    chain, wild, open_ended = (
        compile_watched(text, "a", range(1, 9), "a")[1]
        for text in (
            "x = a < f() < b\n",
            "match a:\n    case 1:\n        b = 1\n    case _:\n        b = 2\n",
            "match a:\n    case 1:\n        b = 1\n",
        )
    )
    assert [one.results for one in chain] == [(), ("true", "false")] and wild == []
    assert [one.results for one in open_ended] == [()]
