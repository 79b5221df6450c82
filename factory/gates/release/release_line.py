"""Reads the line of releases from the ledger: the number of comparisons with a champion, and the losses of the releases up to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, Subject, VerdictRow

GATE = "release"


def find_ordinal_of_comparison(ledger: Ledger, champion_id: int, candidate_id: int, suite_sha256: str) -> int:
    """Return the number of this comparison with a champion, from 1. If a candidate is judged again on another suite, this is another comparison."""
    champion_, subject = Subject("candidate", champion_id), Subject("candidate", candidate_id)
    looked: list[tuple[str, Any]] = []
    for row in VerdictRow.select(
        ledger, "WHERE gate = :gate AND against = :champion ORDER BY id", gate=GATE, champion=str(champion_)
    ):
        look = row.subject, row.read_evidence(ledger).get("suite_sha256")
        if look not in looked:
            looked.append(look)
    mine = str(subject), suite_sha256
    return looked.index(mine) + 1 if mine in looked else len(looked) + 1


def compute_guard_losses_since_best_release(
    ledger: Ledger, champion_id: int, guards: Iterable[str]
) -> dict[str, float]:
    """Return guard → the champion's loss since the best release that it descends from, as the verdicts measured it.

    Each release was compared with the champion before it on the same items, so the gains add up, and small losses cannot accumulate unseen. A
    release that was rolled back does not count, because no later release descends from it. Example: release 2 lost
    0.018, a rollback made release 1 the champion again, and release 3 gained 0.001 over release 1. Then release 3 has lost nothing.
    """
    released = {row.candidate: row for row in ReleaseRow.select(ledger)}
    above, lost = dict.fromkeys(guards, 0.0), dict.fromkeys(guards, 0.0)
    row, seen = released.get(champion_id), set[int]()
    while row is not None and row.number not in seen:
        seen.add(row.number)
        verdict = VerdictRow.get(ledger, row.verdict)
        measured = verdict.read_evidence(ledger).get("guards") or {}
        for name in above:  # the gain of the previous release over this one
            above[name] -= (measured.get(name) or {}).get("gain") or 0.0
            lost[name] = max(lost[name], above[name])
        row = released.get(Subject.parse(verdict.against).number) if verdict.against else None
    return lost
