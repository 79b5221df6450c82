"""The line of releases, as the ledger has it: how often a champion was challenged, and what was lost on the way to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, Subject, VerdictRow

GATE = "release"


def look_at(ledger: Ledger, champion_id: int, candidate_id: int, suite_sha256: str) -> int:
    """1 for the first candidate that is judged against a champion; one that is judged again on other items is another look."""
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


def lost_since_best(ledger: Ledger, champion_id: int, guards: Iterable[str]) -> dict[str, float]:
    """By guard: how much worse the champion's candidate is than the best release that it descends from, as their verdicts measured it.

    Each was compared with the champion of its day on the same items; their gains add up. So small losses do not. A release that was rolled back
    is not among them, for nothing descends from it any more: of releases 1, 2 (which lost 0.018), a rollback to 1 and 3 (which gained 0.001
    over 1), nothing is lost.
    """
    released = {row.candidate: row for row in ReleaseRow.select(ledger)}
    above, lost = dict.fromkeys(guards, 0.0), dict.fromkeys(guards, 0.0)
    row, seen = released.get(champion_id), set[int]()
    while row is not None and row.number not in seen:
        seen.add(row.number)
        verdict = VerdictRow.get(ledger, row.verdict)
        measured = verdict.evidence(ledger).get("guards") or {}
        for name in above:  # how much better the release before was
            above[name] -= (measured.get(name) or {}).get("gain") or 0.0
            lost[name] = max(lost[name], above[name])
        row = released.get(Subject.parse(verdict.against).number) if verdict.against else None
    return lost
