"""The line of releases in the ledger: how often a champion was challenged, and the losses on the way to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, Subject, VerdictRow

GATE = "release"


def count_champion_comparisons(ledger: Ledger, champion_id: int, candidate_id: int, suite_sha256: str) -> int:
    """The number of this comparison with a champion, from 1. A candidate that is judged again on other items is another comparison."""
    champion_, subject = Subject("candidate", champion_id), Subject("candidate", candidate_id)
    looked: list[tuple[str, Any]] = []
    for row in VerdictRow.select(
        ledger, "WHERE gate = :gate AND against = :champion ORDER BY id", gate=GATE, champion=str(champion_)
    ):
        look = row.subject, row.evidence(ledger).get("suite_sha256")
        if look not in looked:
            looked.append(look)
    mine = str(subject), suite_sha256
    return looked.index(mine) + 1 if mine in looked else len(looked) + 1


def guard_losses_since_best_release(ledger: Ledger, champion_id: int, guards: Iterable[str]) -> dict[str, float]:
    """The loss of the champion since the best release that it descends from, by guard, as the verdicts measured it.

    Each release was compared with the champion before it on the same items, so the gains add up, and small losses cannot accumulate unseen. A
    release that was rolled back does not count, because no later release descends from it. Example: releases 1 and 2 (which lost 0.018), a
    rollback to 1, and 3 (which gained 0.001 over 1): nothing is lost.
    """
    released = {row.candidate: row for row in ReleaseRow.select(ledger)}
    above, lost = dict.fromkeys(guards, 0.0), dict.fromkeys(guards, 0.0)
    row, seen = released.get(champion_id), set[int]()
    while row is not None and row.number not in seen:
        seen.add(row.number)
        verdict = VerdictRow.get(ledger, row.verdict)
        measured = verdict.evidence(ledger).get("guards") or {}
        for name in above:  # the gain of the release before over this one
            above[name] -= (measured.get(name) or {}).get("gain") or 0.0
            lost[name] = max(lost[name], above[name])
        row = released.get(Subject.parse(verdict.against).number) if verdict.against else None
    return lost
