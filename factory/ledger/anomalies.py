"""Reads anomalies from the ledger, with their diagnoses and how they were closed.

An anomaly is open until an event ``anomaly_closed`` names it. An event ``anomaly_diagnosed`` has the loss doctor's result. The
subject of both events is the first anomaly of an episode (its lead). Their details list all anomalies of the episode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from factory.ledger.rows import LedgerRow, SegmentRow, SqlReader, Subject
from kernels.contract.message import Message

REPLICAS_DIFFER = "replicas_apart"  # kind of anomaly at a segment's end: the ranks' copies of the weights differ
GAIN_ON_DEV_ONLY = "dev_alone"  # kind of anomaly of a candidate: it gains on the dev half of the held-out documents, not on the sealed half
DIAGNOSED, CLOSED = "anomaly_diagnosed", "anomaly_closed"
REJECTED = "rejected"  # how an anomaly was closed: a person says that its diagnosis is wrong
ASKED = "anomaly_asked"  # a person has to decide about a diagnosis, because the policy allows no action
EXPLAINED = "anomaly_worded"  # a language model's explanation of a diagnosis, or why it gave none
DIAGNOSIS = "diagnosis"  # gate of the verdict on a segment with an anomaly that a patch caused
DOCUMENTS_QUARANTINED, DOCUMENTS_FREED, RELEASE_MARKED, SEGMENT_REWOUND = (
    "documents_quarantined",
    "documents_freed",
    "release_marked",
    "segment_rewound",
)


@dataclass(frozen=True)
class AnomalyRow(LedgerRow):
    noun, source = "anomaly", "anomalies"

    id: int
    segment: int
    step: int
    kind: str
    detail: dict[str, Any] | None


def read_newest_details_by_anomaly(db: SqlReader, kind: str) -> dict[int, dict[str, Any]]:
    """Return, for each anomaly, the detail of the newest event of this kind that lists it. ``lead`` and ``event`` (the event's number) are added."""
    found: dict[int, dict[str, Any]] = {}
    for row in db.read("SELECT id, subject, detail FROM events WHERE kind = :kind ORDER BY id", kind=kind):
        detail = row["detail"] | {"lead": Subject.parse(row["subject"]).number, "event": row["id"]}
        found |= dict.fromkeys(row["detail"]["anomalies"], detail)
    return found


def list_open_anomalies(db: SqlReader, kinds: Collection[str]) -> list[AnomalyRow]:
    """Return the open anomalies of these kinds, oldest first."""
    closed = read_newest_details_by_anomaly(db, CLOSED)
    return [row for row in AnomalyRow.select(db) if row.kind in kinds and row.id not in closed]


def find_settled_anomalies(db: SqlReader) -> set[int]:
    """Return the anomalies that need no further diagnosis: they are closed, or a person was asked about their newest diagnosis."""
    asked = read_newest_details_by_anomaly(db, ASKED)
    known = read_newest_details_by_anomaly(db, DIAGNOSED)
    return {n for n, found in known.items() if n in asked and asked[n]["diagnosis"] == found["event"]} | set(
        read_newest_details_by_anomaly(db, CLOSED)
    )


def find_next_undiagnosed_anomaly(db: SqlReader, kinds: Collection[str], excluded: Collection[int] = ()) -> int | None:
    """Return the oldest open anomaly of a finished segment that waits for a diagnosis or for an action, or None.

    Anomalies in ``excluded`` are left out.
    """
    known = {*find_settled_anomalies(db), *excluded}
    counts = {row.id for row in SegmentRow.select(db, "WHERE state = 'done'")}
    return next(
        (row.id for row in list_open_anomalies(db, kinds) if row.id not in known and row.segment in counts), None
    )


def find_explanation(db: SqlReader, number: int) -> dict[str, Any] | None:
    """Return a language model's explanation of the newest diagnosis of an anomaly (``claims``, ``dropped``, ``failed``), or None if there is none."""
    diagnosis = read_newest_details_by_anomaly(db, DIAGNOSED).get(number)
    return _worded(db).get(diagnosis["event"]) if diagnosis else None


def find_next_unexplained_episode(db: SqlReader, excluded: Collection[int] = ()) -> int | None:
    """Return the lead of the oldest episode whose newest diagnosis waits for a language model's explanation, or None.

    Episodes whose lead is in ``excluded`` are left out.
    """
    said = _worded(db)
    waiting = [
        d for d in read_newest_details_by_anomaly(db, DIAGNOSED).values() if d.get("to_word") and d["event"] not in said
    ]
    return min((detail["lead"] for detail in waiting if detail["lead"] not in excluded), default=None)


def describe_explanation(diagnosis: Mapping[str, Any], explanation: Mapping[str, Any] | None) -> Message:
    """Say whether a language model was asked about a diagnosis, and with what result.

    >>> print(describe_explanation({}, None))
    No language model was asked for an explanation.
    >>> describe_explanation({"to_word": True}, {"failed": "", "model": "m", "claims": [{}], "dropped": ["why"]}).data["dropped"]
    1
    """
    if explanation is None:
        if diagnosis.get("to_word"):
            return Message(
                "anomalies.words_pending", "The factory has not asked a language model for an explanation yet."
            )
        return Message("anomalies.no_words", "No language model was asked for an explanation.")
    if explanation["failed"]:
        return Message(
            "anomalies.words_failed",
            "A language model was asked for an explanation, but gave none: {why}",
            why=explanation["failed"],
        )
    dropped, count = len(explanation["dropped"]), len(explanation["dropped"]) + len(explanation["claims"])
    if dropped:
        return Message(
            "anomalies.words_with_dropped",
            "The language model {model} wrote this explanation. The factory found the cause. The model only explains the "
            "cause and decides nothing. The factory left out {dropped} of {count} sentences, because they disagreed with the "
            "record.",
            model=explanation["model"],
            dropped=dropped,
            count=count,
        )
    return Message(
        "anomalies.words_whole",
        "The language model {model} wrote this explanation. The factory found the cause. The model only explains the cause "
        "and decides nothing. All {count:,|sentence|sentences} agree with the names, outcomes and numbers of the record.",
        model=explanation["model"],
        count=count,
    )


def draft_learning_rate_proposal(diagnosis: Mapping[str, Any]) -> Message | str:
    """If the learning rate was too high, return a draft of a proposal with the command that proposes it, else ''.

    >>> diagnosis = {"to_word": True, "causes": ["rate"], "remedy": "rate × 0.1", "override": {"keys": {"optimizer.lr": 0.001}}}
    >>> draft_learning_rate_proposal(diagnosis).data["values"]
    ['optimizer.lr 0.001']
    """
    tamed = (diagnosis.get("override") or {}).get("keys")
    if not (tamed and diagnosis.get("to_word") and diagnosis["causes"] == ["rate"]):
        return ""
    written = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in tamed.items()}
    return Message(
        "anomalies.draft",
        "The remedy '{remedy}' means a recipe with {values}. To let the factory propose and judge such a recipe, run "
        "'factory propose --agent recipe-scout --target {key}'",
        values=[f"{key} {value}" for key, value in written.items()],
        remedy=diagnosis["remedy"],
        key=next(iter(tamed)),
    )


def format_claims(explanation: Mapping[str, Any]) -> Message | str:
    """Return the claims of a language model as the end of a proposal's text, or '' if no claim agrees with the record.

    >>> str(format_claims({"claims": [{"says": "It stays.", "rests_on": "fp32", "shows": "there"}]}))
    " In a language model's words: It stays. [fp32: there]"
    """
    words = " ".join(f"{claim['says']} [{claim['rests_on']}: {claim['shows']}]" for claim in explanation["claims"])
    return Message("anomalies.claims", " In a language model's words: {claims}", claims=words) if words else ""


def _worded(db: SqlReader) -> dict[int, dict[str, Any]]:
    """Return the details of ``EXPLAINED`` events, by the number of the event of the diagnosis."""
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=EXPLAINED)
    return {row["detail"]["diagnosis"]: row["detail"] for row in rows}


def list_open_anomalies_of_lineage(db: SqlReader, segment: int, kinds: Collection[str]) -> list[AnomalyRow]:
    """Return the open anomalies of a segment and of its ancestors."""
    lineage = {row.id for row in SegmentRow.read_lineage(db, segment)}
    return [row for row in list_open_anomalies(db, kinds) if row.segment in lineage]


def list_rewound_segments_of_lineage(db: SqlReader, segment: int) -> list[int]:
    """Return the rewound segments among a segment and its ancestors. A rewound segment stays unusable after its anomaly is closed."""
    return [row.id for row in SegmentRow.read_lineage(db, segment) if row.state == "rewound"]


def list_anomalies(db: SqlReader) -> list[dict[str, Any]]:
    """Return all anomalies, oldest first, with ``state`` (open, diagnosed, closed, or rewound with its segment), ``causes``, and ``how`` it was
    closed."""
    diagnosed, closed = read_newest_details_by_anomaly(db, DIAGNOSED), read_newest_details_by_anomaly(db, CLOSED)
    rewound = {row.id for row in SegmentRow.select(db, "WHERE state = 'rewound'")}
    found = []
    for row in AnomalyRow.select(db):
        diagnosis, end = diagnosed.get(row.id), closed.get(row.id)
        state = "closed" if end else "rewound" if row.segment in rewound else "diagnosed" if diagnosis else "open"
        told: dict[str, Any] = {"lead": None, "causes": [], "why": "", "guilty": []}
        told |= {key: diagnosis[key] for key in told} if diagnosis else {}
        found.append(row.select_fields("id segment step kind") | {"state": state, "how": end and end["how"]} | told)
    return found
