"""Two properties of the release judge: neither missing evidence nor worse measurements make a verdict better."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from factory.evals.parity import CHECKS
from factory.evals.statistics import Gain
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.guards import list_unreliable_guards
from factory.gates.release.judge import judge
from factory.gates.release.policy import GuardsPolicy, ReleasePolicy
from tests.support.gates.release_evidence import DOMAINS, FIRST, MEASURES, POLICY, evidence, gain

close = st.floats(-0.06, 0.06)
gains = st.builds(gain, close, st.floats(0.0005, 0.03), st.integers(6, 60))
later = st.builds(
    lambda base, target, guards, checks, noise, count: replace(
        base, target=target, guards=dict(zip(MEASURES, guards)), noise_floor=dict(zip(DOMAINS, noise)),
        checks={name: (ok, "") for name, ok in zip(CHECKS, checks)}, documents=dict.fromkeys(DOMAINS, count),
    ),
    st.sampled_from([replace(evidence(), cloze_items=items) for items in (24, 60, 90)]), gains, st.tuples(*[gains] * 4),
    st.lists(st.integers(0, 30).map(bool), min_size=len(CHECKS), max_size=len(CHECKS)),
    st.tuples(*[st.floats(0, 0.025)] * 3), st.integers(6, 40),
)  # fmt: skip
first = st.builds(
    lambda bits, trigram: replace(FIRST, bits_per_byte=dict(zip(DOMAINS, bits)), trigram_bits_per_byte=dict(zip(DOMAINS, trigram))),
    st.tuples(*[st.floats(1, 5)] * 3), st.tuples(*[st.floats(2, 5)] * 3),
)  # fmt: skip
some_evidence = st.one_of(later, first)
some_policy = st.builds(
    lambda margin: ReleasePolicy(guards=GuardsPolicy(bits_per_byte_margin=margin)), st.floats(0, 0.05)
)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in nested dicts, inner ones too."""
    found = [path] if path else []
    if isinstance(tree, dict):
        found += [inner for key, part in tree.items() for inner in leaves(part, (*path, key))]
    return found


def tree_of(given_: ReleaseEvidence) -> dict[str, Any]:
    tree = dict(vars(given_))
    for name in ("target",):
        tree[name] = dict(vars(tree[name])) if tree[name] else None
    tree["guards"] = {name: dict(vars(guard)) for name, guard in tree["guards"].items()}
    return copy.deepcopy(tree)


def evidence_of(tree: dict[str, Any]) -> ReleaseEvidence:
    tree = {name: value for name, value in tree.items() if not (name == "target" and value is None)}
    if "target" in tree:
        tree["target"] = Gain(**tree["target"])
    if "guards" in tree:
        tree["guards"] = {name: Gain(**guard) for name, guard in tree["guards"].items()}
    return ReleaseEvidence(**tree)


def at(tree: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        tree = tree[key]
    return tree


@given(some_policy, some_evidence, st.data())
def test_removing_evidence_never_promotes(policy: ReleasePolicy, given_: ReleaseEvidence, data: st.DataObject) -> None:
    tree = tree_of(given_)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(leaves(tree)))
        del at(tree, path)[path[-1]]
    poorer = judge(policy, evidence_of(tree))
    if judge(policy, given_).outcome != "promote":
        assert poorer.outcome != "promote", poorer.reasons


@given(some_policy, later, st.data())
def test_removing_evidence_or_numbers_sets_no_guard_aside(
    policy: ReleasePolicy, given_: ReleaseEvidence, data: st.DataObject
) -> None:
    tree = tree_of(given_)
    path = data.draw(st.sampled_from(leaves(tree)))
    if not isinstance(at(tree, path)[path[-1]], float):
        del at(tree, path)[path[-1]]
    else:
        at(tree, path)[path[-1]] = math.nan
    assert list_unreliable_guards(policy, evidence_of(tree)).keys() <= list_unreliable_guards(policy, given_).keys()
    assert judge(policy, given_).outcome == "promote" or judge(policy, evidence_of(tree)).outcome != "promote"


@given(some_policy, later, st.floats(-1, 1), st.floats(0, 10))
def test_no_measurement_of_a_candidate_sets_a_guard_aside(
    policy: ReleasePolicy, given_: ReleaseEvidence, middle: float, width: float
) -> None:
    cloze = replace(given_.guards["cloze"], gain=middle, error=width)
    other = replace(given_, guards={**given_.guards, "cloze": cloze}, cloze=0.1, bits_per_byte={}, target=gain(middle))
    assert list_unreliable_guards(policy, other) == list_unreliable_guards(policy, given_)


def test_every_single_piece_of_evidence_is_needed() -> None:
    spare = {"cloze", "trigram_bits_per_byte"}  # shown for people, or needed by a first release only
    for base, ignored in ((evidence(), spare), (FIRST, {"cloze"})):
        for path in leaves(tree_of(base)):
            tree = tree_of(base)
            del at(tree, path)[path[-1]]
            if path[0] not in ignored and at(tree_of(base), path)[path[-1]] not in (None, {}):
                outcome = judge(POLICY, evidence_of(tree)).outcome
                assert outcome == "hold", path


@given(some_policy, some_evidence, st.data())
def test_a_number_that_is_not_finite_never_promotes(
    policy: ReleasePolicy, given_: ReleaseEvidence, data: st.DataObject
) -> None:
    tree = tree_of(given_)
    numbers = [path for path in leaves(tree) if isinstance(at(tree, path)[path[-1]], float)]
    path = data.draw(st.sampled_from(numbers))
    at(tree, path)[path[-1]] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    if judge(policy, given_).outcome != "promote":
        assert judge(policy, evidence_of(tree)).outcome != "promote"


@given(some_policy, some_evidence, st.data())
def test_worse_measurements_never_promote(policy: ReleasePolicy, given_: ReleaseEvidence, data: st.DataObject) -> None:
    tree = tree_of(given_)
    by = data.draw(st.floats(0, 0.2))
    name = data.draw(st.sampled_from([*MEASURES, "target", "checks", "bits_per_byte", "trigram", "documents"]))
    guard = tree["target"] if name == "target" else tree["guards"].get(name)
    domain = data.draw(st.sampled_from(DOMAINS))
    if guard:
        guard["gain"] -= by
    elif name == "checks":
        tree["checks"][data.draw(st.sampled_from(CHECKS))] = (False, "broken")
    elif name == "bits_per_byte":
        tree["bits_per_byte"][domain] += by
    elif name == "trigram":
        tree["trigram_bits_per_byte"][domain] -= by
    elif name == "documents":
        tree["documents"][domain] -= 5
    if judge(policy, given_).outcome != "promote":
        assert judge(policy, evidence_of(tree)).outcome != "promote"
