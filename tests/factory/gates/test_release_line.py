"""Looks at one champion, and losses that add up along the line of releases."""

from __future__ import annotations

import pytest

from factory.core.workspace import Workspace
from factory.gates.release.line import look_at, lost_since_best
from factory.ledger.ledger import Ledger, releases, verdicts
from tests.support.plants.release_scene import add_candidate, add_verdict


def judged(
    ledger: Ledger, candidate: int, suite: str, against: int | None, gains: dict[str, float] | None = None
) -> int:
    number = add_verdict(ledger, candidate, against=against)
    guards = {name: {"gain": gain} for name, gain in (gains or {}).items()}
    with ledger.begin() as tx:
        evidence = {"suite_sha256": suite, "guards": guards}
        tx.execute(verdicts.update().where(verdicts.c.id == number).values(evidence=evidence))
    return number


def released(ledger: Ledger, number: int, candidate: int, verdict: int) -> None:
    with ledger.begin() as tx:
        tx.execute(
            releases.insert().values(
                number=number, candidate=candidate, verdict=verdict, state="published", approved_by="policy", created_at=float(number)
            )
        )  # fmt: skip


def test_each_candidate_and_each_suite_is_a_look(workspace: Workspace, ledger: Ledger) -> None:
    first, second, third = (add_candidate(workspace, ledger) for _ in range(3))
    assert look_at(ledger, first, second, "a") == 1
    judged(ledger, second, "a", first)
    assert look_at(ledger, first, second, "a") == 1  # the same look, judged again
    assert look_at(ledger, first, second, "b") == look_at(ledger, first, third, "a") == 2
    judged(ledger, third, "b", first)
    judged(ledger, third, "b", first)  # by another policy
    assert look_at(ledger, first, third, "b") == 2 and look_at(ledger, first, second, "b") == 3
    assert look_at(ledger, second, third, "b") == 1  # another champion


def test_small_losses_add_up_from_the_best_release(workspace: Workspace, ledger: Ledger) -> None:
    line = [add_candidate(workspace, ledger) for _ in range(4)]
    gains = [None, {"code": 0.1, "docs": -0.01}, {"code": -0.02, "docs": -0.01}, {"code": -0.01, "docs": 0.05}]
    for number, (candidate, gained) in enumerate(zip(line, gains), 1):
        against = line[number - 2] if number > 1 else None
        released(ledger, number, candidate, judged(ledger, candidate, "a", against, gained))
    lost = lost_since_best(ledger, ["code", "docs", "new"])
    assert lost == pytest.approx({"code": 0.03, "docs": 0.0, "new": 0.0})
