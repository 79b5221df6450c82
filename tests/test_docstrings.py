"""The examples in docstrings are true: each is executed, and its output is compared."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("agents", "factory", "kernels", "trainer")
    for path in (ROOT / folder).rglob("*.py")
    if "    >>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_give_what_the_docstring_shows(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0 and found.failed == 0


def test_the_modules_of_training_data_have_worked_examples() -> None:
    """These modules change the form of data: a chat's mask, packing, the data order, a batch with its loss weights."""
    changing_form = {f"trainer.contract.data.{name}" for name in ("token_shard", "packing", "data_order")}
    assert changing_form | {"trainer.batch"} <= set(WITH_EXAMPLES)
