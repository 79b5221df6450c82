"""What the recipes of the tiny runs hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from factory.gates.patch.matrix.cases import CASES, MatrixCase

# What no trainer reads, or what is drawn for each verdict.
NOT_VARIED = {
    "name": "the live recipe's",
    "seed": "drawn",
    "export_dtype": "read where a release is exported",
    "batch.max_padding": "read where a segment is planned",
    "mixture.anneal_weights": "in the data plan",
    "mixture.max_epochs": "in the data plan",
    "mixture.replay": "in the data plan",
    "mixture.weights": "in the data plan, and a domain's own value counts",
    "schedule.anneal_steps": "read where a segment is planned",
    "schedule.trunk_steps": "read where a segment is planned",
    "stability.throughput_drop": "what it reports depends on a clock",
}


def keys(recipe: dict[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Each key with its value, as text."""
    for name, value in recipe.items():
        if isinstance(value, dict):
            yield from keys(value, f"{within}{name}.")
        yield within + name, repr(value)


def one_valued(cases: tuple[MatrixCase, ...]) -> set[str]:
    """The keys that have one value in all of these runs: code that put it in place of the key would leave what the key leaves."""
    values = defaultdict(set)
    for case in cases:
        for key, value in keys(case.recipe()) if not case.exit_code else ():
            values[key].add(value)
    return {key for key, found in values.items() if len(found) < 2 and not within(key, NOT_VARIED)}


def within(key: str, outer: Any) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in outer)


def test_every_key_that_the_trainer_reads_has_several_values() -> None:
    assert one_valued(CASES) == set()


@pytest.mark.parametrize(
    "without", ["Muon without Nesterov, a wider base", "truncated rows, another AdamW, a narrower base"]
)
def test_a_key_with_one_value_is_found(without: str) -> None:
    assert one_valued(tuple(case for case in CASES if case.name != without))
