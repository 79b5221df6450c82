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


def lost_since_best(ledger: Ledger, guards: Iterable[str]) -> dict[str, float]:
    """By guard: how much worse the champion is than the best release of its line, as the verdicts that released them measured it.

    Each release was compared with the one before on the same items; their gains add up. So small losses do not.
    """
    levels = dict.fromkeys(guards, 0.0)
    best = dict(levels)
    for release in ReleaseRow.select(ledger, "ORDER BY number"):
        measured = VerdictRow.get(ledger, release.verdict).evidence(ledger).get("guards") or {}
        for name in levels:
            levels[name] += (measured.get(name) or {}).get("gain") or 0.0
            best[name] = max(best[name], levels[name])
    return {name: best[name] - levels[name] for name in levels}
