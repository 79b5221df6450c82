"""The report before the first candidate makes the judge's own computation from the sizes of the held-out data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.judge import calibration
from factory.evals.statistics import CLOZE
from factory.gates.release.guards import compute_detectable_gain, list_unreliable_guards
from factory.gates.release.policy import ReleasePolicy, TargetPolicy
from factory.gates.release.releasability import (
    DomainSize,
    GuardRequirement,
    SuiteSizes,
    TaskSize,
    compute_releasability,
    read_group_spreads_by_domain,
)
from factory.ledger.ledger import Ledger
from tests.support.gates.release_evidence import POLICY, changed, evidence
from tests.support.plants.release_scene import add_judged

EACH = DomainSize(60, 40, 20)
ENOUGH = SuiteSizes(dict.fromkeys(("chat", "code", "docs"), EACH), cloze_items=120)


def guard(sizes: SuiteSizes, name: str, policy: ReleasePolicy = POLICY) -> GuardRequirement:
    return next(one for one in compute_releasability(policy, sizes).guards if one.name == name)


@pytest.mark.parametrize(
    ("domain", "state", "code"),
    [
        (EACH, "stands", ""),
        (
            DomainSize(3000, 1, 1),
            "missing",
            "release.too_little_held_out",
        ),
        (DomainSize(7, 7, 7), "missing", "release.too_little_held_out"),
        (DomainSize(40, 40, 0), "missing", "release.nothing_in_dev_half"),
        (DomainSize(0, 0, 0), "missing", "release.nothing_in_dev_half"),
    ],
)
def test_a_domain_with_too_few_documents_or_groups_holds(domain: DomainSize, state: str, code: str) -> None:
    found = compute_releasability(POLICY, replace(ENOUGH, domains={**ENOUGH.domains, "law": domain}))
    law = next(one for one in found.guards if one.name == "law")
    assert (law.state, law.have, law.needed) == (state, domain.groups, 17)
    assert (found.gain is None) == bool(found.holds) == (state == "missing")
    for one in found.holds:
        assert one.code == code
        assert one.data == {
            "domain": "law", "documents": domain.documents, "groups": domain.groups, "least_documents": 8, "least_groups": 8,
        }  # fmt: skip


def test_small_cloze_and_task_guards_are_set_aside_with_the_size_that_they_need() -> None:
    small = replace(
        ENOUGH,
        cloze_items=36,
        tasks={"own": TaskSize(40, 40, 0.02), "few": TaskSize(300, 3, 0.1), "large": TaskSize(400, 400, 0.1)},
    )
    states = {one.name: one.state for one in compute_releasability(POLICY, small).guards}
    assert states == {
        "chat": "stands",
        "code": "stands",
        "docs": "stands",
        CLOZE: "aside",
        "own": "aside",
        "few": "aside",
        "large": "stands",
    }
    wider = guard(small, "own").margin
    assert (
        wider is not None and 0.02 < wider < 0.3 and guard(small, "few").margin is None is guard(small, "large").margin
    )
    for margin, state in ((wider, "stands"), (wider - 0.01, "aside")):
        assert guard(replace(small, tasks={"own": TaskSize(40, 40, margin)}), "own").state == state
    for name, grown in (
        (CLOZE, lambda n: replace(small, cloze_items=n)),
        ("own", lambda n: replace(small, tasks={"own": TaskSize(n, n, 0.02)})),
    ):
        needed = guard(small, name).needed
        assert needed is not None and guard(small, name).passed < 0.8
        assert guard(grown(needed + 2), name).state == "stands" and guard(grown(needed - 2), name).state == "aside"


def test_the_report_names_the_same_gain_and_guards_as_verdicts_of_the_judge() -> None:
    """Verdicts on drawn pairs with these sizes and this spread name the same gain, and set the same guards aside."""
    kind, rng = calibration.KINDS[0], np.random.default_rng(0)
    none = dict.fromkeys(calibration.DOMAINS, 0.0)
    sizes = SuiteSizes(dict.fromkeys(calibration.DOMAINS, DomainSize(100, 100, 33, kind.spread)), cloze_items=96)
    told, drawn = compute_releasability(POLICY, sizes), []
    for _ in range(12):
        pair = calibration.with_cloze(calibration.draw(kind, rng, none), rng, 96, 0.2)
        found = calibration.evidence_of(pair, 1, none | {CLOZE: 0.0})
        drawn.append(compute_detectable_gain(POLICY, found) or 9.0)
        assert (CLOZE in list_unreliable_guards(POLICY, found)) == (guard(sizes, CLOZE).state == "aside")
    assert told.gain == pytest.approx(float(np.median(drawn)), rel=0.15)


def test_the_detectable_gain_falls_with_groups_and_rises_with_spread() -> None:
    gains = [
        compute_releasability(POLICY, SuiteSizes(dict.fromkeys("ab", DomainSize(n, n, n)))).gain or 9.0
        for n in (8, 20, 60, 200)
    ]
    assert gains == sorted(gains, reverse=True) and gains[-1] < gains[0] / 3
    wide = compute_releasability(POLICY, SuiteSizes(dict.fromkeys("ab", DomainSize(60, 60, 60, 0.3)))).gain
    assert wide is not None and wide > 3 * gains[2]
    one = compute_releasability(
        ReleasePolicy(target=TargetPolicy(weights={"a": 1.0})), SuiteSizes(dict.fromkeys("ab", DomainSize(60, 60, 60)))
    ).gain
    assert one is not None and one > gains[2], "half the groups count"
    assert compute_releasability(POLICY, SuiteSizes({})).gain is None


def test_the_spread_is_read_from_the_newest_verdict(workspace: object, ledger: Ledger) -> None:
    from tests.support.plants.release_scene import add_candidate

    assert read_group_spreads_by_domain(ledger) == {}
    for _ in range(2):
        add_candidate(workspace, ledger)  # type: ignore[arg-type]
    add_judged(ledger, 2, evidence(), against=1)
    assert read_group_spreads_by_domain(ledger) == {
        name: pytest.approx(0.01 / 2.02 * 40**0.5) for name in ("chat", "code", "docs")
    }
    add_judged(
        ledger,
        2,
        changed(replace(evidence(), look=2), "guards", "code", replace(evidence().guards["code"], error=None)),
        against=1,
    )
    assert set(read_group_spreads_by_domain(ledger)) == {"chat", "docs"}, "what was not measured is not told"
