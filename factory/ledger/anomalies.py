"""Anomalies and what became of them, read from the ledger alone.

An anomaly is open until an event ``anomaly_closed`` names it: what was done about it was enough, or a person said so.
``anomaly_diagnosed`` says what the loss doctor found. Both are about the first anomaly of an episode, and name all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from factory.ledger.rows import LedgerRow, Reads, SegmentRow, Subject

REPLICAS_APART = "replicas_apart"  # of a segment's end: ranks held other bits of the same weights
DEV_ALONE = "dev_alone"  # of a candidate: it gains on the dev half of what is held out, and not on the sealed half
DIAGNOSED, CLOSED = "anomaly_diagnosed", "anomaly_closed"
REJECTED = "rejected"  # as an anomaly was closed: a person says that its diagnosis is wrong
ASKED = "anomaly_asked"  # a person is to decide about a diagnosis: the policy does nothing
WORDED = "anomaly_worded"  # a language model said what a diagnosis shows, or why there are no such words
DIAGNOSIS = "diagnosis"  # gate of the verdict on a segment whose anomaly a patch is blamed for
QUARANTINED, FREED, MARKED, REWOUND = "documents_quarantined", "documents_freed", "release_marked", "segment_rewound"


@dataclass(frozen=True)
class AnomalyRow(LedgerRow):
    noun, source = "anomaly", "anomalies"

    id: int
    segment: int
    step: int
    kind: str
    detail: dict[str, Any] | None


def newest_about(db: Reads, kind: str) -> dict[int, dict[str, Any]]:
    """By anomaly, the detail of the newest event of that kind that names it in ``anomalies``, with ``lead`` and the event's number."""
    found: dict[int, dict[str, Any]] = {}
    for row in db.read("SELECT id, subject, detail FROM events WHERE kind = :kind ORDER BY id", kind=kind):
        detail = row["detail"] | {"lead": Subject.parse(row["subject"]).number, "event": row["id"]}
        found |= dict.fromkeys(row["detail"]["anomalies"], detail)
    return found


def open_anomalies(db: Reads, kinds: Collection[str]) -> list[AnomalyRow]:
    """Those of these kinds that nothing has closed, oldest first."""
    closed = newest_about(db, CLOSED)
    return [row for row in AnomalyRow.select(db) if row.kind in kinds and row.id not in closed]


def settled(db: Reads) -> set[int]:
    """Anomalies whose newest diagnosis led to something: they were closed, or a person is asked."""
    asked = newest_about(db, ASKED)
    known = newest_about(db, DIAGNOSED)
    return {n for n, found in known.items() if n in asked and asked[n]["diagnosis"] == found["event"]} | set(
        newest_about(db, CLOSED)
    )


def undiagnosed(db: Reads, kinds: Collection[str], but: Collection[int] = ()) -> int | None:
    """The oldest open anomaly, in a segment that still counts, that no diagnosis is about, or about whose diagnosis nothing was done yet;
    none of ``but``."""
    known = {*settled(db), *but}
    counts = {row.id for row in SegmentRow.select(db, "WHERE state = 'done'")}
    return next((row.id for row in open_anomalies(db, kinds) if row.id not in known and row.segment in counts), None)


def words_about(db: Reads, number: int) -> dict[str, Any] | None:
    """What a language model said about the newest diagnosis of an anomaly: ``claims``, ``dropped``, ``failed``; None: nothing yet."""
    diagnosis = newest_about(db, DIAGNOSED).get(number)
    return _worded(db).get(diagnosis["event"]) if diagnosis else None


def unworded(db: Reads, but: Collection[int] = ()) -> int | None:
    """The lead of the oldest episode whose newest diagnosis waits for words; none of ``but``."""
    said = _worded(db)
    waiting = [d for d in newest_about(db, DIAGNOSED).values() if d.get("to_word") and d["event"] not in said]
    return min((detail["lead"] for detail in waiting if detail["lead"] not in but), default=None)


def words_state(diagnosis: Mapping[str, Any], said: Mapping[str, Any] | None) -> str:
    """A sentence for a person: was a language model asked about a diagnosis, and what became of it?

    >>> words_state({}, None)
    'No language model was asked.'
    >>> words_state({"to_word": True}, {"failed": "", "model": "m", "claims": [{}], "dropped": ["why"]})
    'By m, which was told the cause and decides nothing; 1 of its 2 sentences did not hold against the record and is left out.'
    """
    if said is None:
        return "A language model is still to be asked." if diagnosis.get("to_word") else "No language model was asked."
    if said["failed"]:
        return f"A language model was to say more, and did not: {said['failed']}"
    dropped, count = len(said["dropped"]), len(said["dropped"]) + len(said["claims"])
    left_out = "all of its sentences hold against the record by name, outcome and number"
    if dropped:
        left_out = f"{dropped} of its {count} sentences did not hold against the record and {'is' if dropped == 1 else 'are'} left out"
    return f"By {said['model']}, which was told the cause and decides nothing; {left_out}."


def draft_of(diagnosis: Mapping[str, Any]) -> str:
    """What a person may have proposed about a rate that is too high, with the command; '': nothing. The values are the replay's.

    >>> draft_of({"to_word": True, "causes": ["rate"], "remedy": "rate × 0.1", "override": {"keys": {"optimizer.lr": 0.001}}})
    "Draft: optimizer.lr 0.001, as in 'rate × 0.1'. 'factory propose --agent recipe-scout --target optimizer.lr' has a value proposed and judged."
    """
    tamed = (diagnosis.get("override") or {}).get("keys")
    if not (tamed and diagnosis.get("to_word") and diagnosis["causes"] == ["rate"]):
        return ""
    written = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in tamed.items()}
    values = ", ".join(f"{key} {value}" for key, value in written.items())
    command = f"'factory propose --agent recipe-scout --target {next(iter(tamed))}'"
    return f"Draft: {values}, as in '{diagnosis['remedy']}'. {command} has a value proposed and judged."


def in_words(said: Mapping[str, Any]) -> str:
    """The claims of a language model as the end of a proposal's text; '': it made none that hold.

    >>> in_words({"claims": [{"says": "It stays.", "rests_on": "fp32", "shows": "there"}]})
    " In a language model's words: It stays. [fp32: there]"
    """
    words = " ".join(f"{claim['says']} [{claim['rests_on']}: {claim['shows']}]" for claim in said["claims"])
    return f" In a language model's words: {words}" if words else ""


def _worded(db: Reads) -> dict[int, dict[str, Any]]:
    """By the number of a diagnosis's event."""
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=WORDED)
    return {row["detail"]["diagnosis"]: row["detail"] for row in rows}


def open_in(db: Reads, segment: int, kinds: Collection[str]) -> list[AnomalyRow]:
    """The open anomalies of a segment and of all that it goes on from."""
    lineage = {row.id for row in SegmentRow.lineage(db, segment)}
    return [row for row in open_anomalies(db, kinds) if row.segment in lineage]


def rewound_in(db: Reads, segment: int) -> list[int]:
    """Which of a segment and of all that it goes on from were rewound: it stays spoiled, whatever became of the anomaly."""
    return [row.id for row in SegmentRow.lineage(db, segment) if row.state == "rewound"]


def every_anomaly(db: Reads) -> list[dict[str, Any]]:
    """All, oldest first, with ``state``: open, diagnosed, closed, or rewound with its segment; ``causes`` and ``how`` it was closed."""
    diagnosed, closed = newest_about(db, DIAGNOSED), newest_about(db, CLOSED)
    rewound = {row.id for row in SegmentRow.select(db, "WHERE state = 'rewound'")}
    found = []
    for row in AnomalyRow.select(db):
        diagnosis, end = diagnosed.get(row.id), closed.get(row.id)
        state = "closed" if end else "rewound" if row.segment in rewound else "diagnosed" if diagnosis else "open"
        told: dict[str, Any] = {"lead": None, "causes": [], "why": "", "guilty": []}
        told |= {key: diagnosis[key] for key in told} if diagnosis else {}
        found.append(row.only("id segment step kind") | {"state": state, "how": end and end["how"]} | told)
    return found
