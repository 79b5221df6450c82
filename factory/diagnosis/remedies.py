"""Acts on a diagnosis or on a person's order: quarantines documents, lowers the learning rate for a while, rewinds segments, or asks a person.

A quarantined document stays in its token shard and keeps its place in the data order, but carries no loss in segments that are planned later
(``DataPlan.masked``). Older checkpoints and sampler states therefore stay valid. No segment continues from a rewound segment: the trunk continues
from the segment before it, with the same shards.

Each decision reads and writes in one transaction, so a person can decide while the daemon runs. The daemon gives up its work on a rewound segment
(``factory.retrying.daemon_requests``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.loss_doctor.causes import CODE, HEALTHY, KERNEL, RATE
from factory.audit.audit_windows import list_merged_agent_patches
from factory.core.errors import InputError
from factory.data.exposure import DocumentExposure
from factory.data.retraining_cost import find_releases_trained_on
from factory.data.selecting import find_keys_of_unique_document
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git import repository
from factory.ingest.document import SYNTHETIC_PREFIX, copy_author_model
from factory.ledger.anomalies import (
    ASKED,
    CLOSED,
    DIAGNOSED,
    DOCUMENTS_FREED,
    DOCUMENTS_QUARANTINED,
    GAIN_ON_DEV_ONLY,
    REJECTED,
    RELEASE_MARKED,
    SEGMENT_REWOUND,
    AnomalyRow,
    read_newest_details_by_anomaly,
)
from factory.ledger.ledger import Ledger, documents, record_event, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, ReleaseRow, SegmentRow, SqlReader, Subject
from factory.ledger.snapshot import Snapshot
from factory.training.planning import RecipeOverride, has_recipe_override, read_last_checkpoint, record_recipe_override
from kernels.contract.message import Message

AT_ONCE = 16  # steps from an episode's onset in which new shards show their effect
QUARANTINED_BY_DOCTOR, QUARANTINED_BY_PERSON = (
    "loss_doctor",
    "person",
)  # values of ``documents.rule``: who quarantined the document
ReleaseExposure = Mapping[
    int, tuple[Sequence[str], bool]
]  # by release: (keys of the documents that it was trained on, whether this is certain)
KERNEL_FILES = ("kernels/", "policies/kernels.yaml")


def apply_anomaly_policy(ledger: Ledger, policy: AnomalyPolicy, number: int) -> Message:
    """Act on the diagnosis of an anomaly as the policy says. Returns a message."""
    found = _diagnosis(ledger, number)
    if tuple(found["causes"]) in HEALTHY and _at_once(found):
        _close(ledger, number, "healthy", "policy")
        return Message("diagnosis.healthy", "Nothing is wrong, so the anomaly is closed.")
    if found["guilty"] and policy.quarantine == "automatic" and not _defended(ledger) & set(found["guilty"]):
        return quarantine_and_rewind(ledger, number, "policy")
    if _override(found) and policy.rate == "automatic":
        spoiled = SegmentRow.get(ledger, found["segment"])
        if not has_recipe_override(ledger, spoiled.kind, spoiled.parent):
            return override_and_rewind(ledger, number, "policy")
    with ledger.begin() as tx:
        asked = {"anomalies": found["anomalies"], "diagnosis": found["event"]}
        record_event(tx, ASKED, Subject("anomaly", found["lead"]), asked)
    override, undo = _override(found), list(found.get("undo", ()))
    repeats = Message(
        "diagnosis.accept_repeats", " After 'accept', training repeats the segment with {values} until step {until}.",
        values=_values(override) if override else [], until=override.until if override else 0,
    )  # fmt: skip
    reverts = Message(
        "diagnosis.patch_reverted", " The factory opens a proposal that undoes proposal {proposals}.", proposals=undo
    )
    return Message(
        "diagnosis.person_decides",
        "A person must decide. Run 'factory anomalies accept {anomaly}' or 'factory anomalies reject {anomaly}'.{repeats}{reverts}",
        anomaly=found["lead"], repeats=repeats if override else "", reverts=reverts if undo else "",
    )  # fmt: skip


def find_blamed_patches(plant: Plant, causes: Sequence[str], commit: str, previous: str | None) -> list[int]:
    """Return a list with the number of the agent's patch that can be the cause; empty if no patch or several patches can be the cause.

    Only the causes "code change" and "faulty kernel" have patches. Candidates are the patches merged since the commit ``previous`` (None: all merged
    patches); for a kernel, only those that change kernels. Raises: RepositoryError.
    """
    if tuple(causes) not in ((CODE,), (KERNEL,)):
        return []
    code = plant.workspace.repository
    since = [
        row
        for row in list_merged_agent_patches(plant, commit)
        if previous is None or not repository.is_ancestor(code, previous, row.patch_commit)
    ]
    if tuple(causes) == (KERNEL,):
        files = {
            row.number: [c.path for c in repository.read_file_changes(code, row.base_commit, row.patch_commit)]
            for row in since
        }
        since = [row for row in since if any(path.startswith(KERNEL_FILES) for path in files[row.number])]
    return [row.number for row in since] if len(since) == 1 else []


def accept_diagnosis(ledger: Ledger, number: int, by: str) -> Message:
    """Do what the diagnosis proposes and close the anomaly, so that candidates may be released again. Returns a message.

    Raises: InputError when the anomaly is closed or has no diagnosis.
    """
    if AnomalyRow.get(ledger, number).kind == GAIN_ON_DEV_ONLY:
        return _noted(ledger, number, "accepted", by)
    found = _diagnosis(ledger, number)
    if found["guilty"]:
        return quarantine_and_rewind(ledger, number, by)
    if _override(found) and not _replaced(ledger, found["segment"]):
        return override_and_rewind(ledger, number, by)
    _close(ledger, number, "accepted", by)
    return Message(
        "diagnosis.accepted",
        "The anomaly is closed. If candidate N was held because of the anomaly, judge the candidate again with "
        "'factory evaluate N'.",
    )


def reject_diagnosis(ledger: Ledger, number: int, by: str) -> Message:
    """Close an anomaly whose diagnosis is wrong, and free the documents that the diagnosis quarantined. Returns a message. Raises: InputError."""
    if AnomalyRow.get(ledger, number).kind == GAIN_ON_DEV_ONLY:
        return _noted(ledger, number, REJECTED, by)
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        found = _diagnosis(db, number, also_closed=True)
        reason, detail = f"anomaly {found['lead']}: ", documents.c.detail
        written = sa.and_(detail.startswith(SYNTHETIC_PREFIX), detail.contains(f"; {reason}", autoescape=True))
        its_own = sa.or_(detail.startswith(reason, autoescape=True), written)  # no documents of another diagnosis
        which = (documents.c.key.in_(found["guilty"]), documents.c.fate == "quarantined", its_own)
        if _override(found):
            record_recipe_override(tx, SegmentRow.get(db, found["segment"]), RecipeOverride({}, 0, "rejected"))
        freed = list(tx.execute(sa.select(documents.c.key).where(*which)).scalars())
        change_document_fates(tx, freed, "train", None, None)
        _closed(tx, found, REJECTED, by, documents=found["guilty"])
    if not freed:
        return Message("diagnosis.rejected", "The anomaly is closed.")
    return Message(
        "diagnosis.rejected_freed",
        "The anomaly is closed. Training uses {documents:,|document|documents} again.",
        documents=len(freed),
    )


def change_document_fates(
    tx: sa.Connection, keys: Sequence[str], fate: str, rule: str | None, detail: str | None
) -> None:
    """Give documents another fate, with its reason. The maker of a synthetic document stays recorded."""
    c = documents.c
    for start in range(0, len(keys), 500):
        these = c.key.in_(keys[start : start + 500])
        written = tx.execute(sa.select(c.key, c.detail).where(these, c.detail.startswith(SYNTHETIC_PREFIX))).all()
        tx.execute(documents.update().where(these).values(fate=fate, rule=rule, detail=detail))
        for key, before in written:
            tx.execute(documents.update().where(c.key == key).values(detail=copy_author_model(before, detail)))


def quarantine_and_rewind(ledger: Ledger, number: int, by: str) -> Message:
    """Quarantine the guilty documents, mark the releases that saw them, rewind the segment and close the anomaly, in one transaction.

    Returns a message.
    """
    saw = find_exposed_releases(ledger, _diagnosis(ledger, number)["guilty"])
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        found = _diagnosis(db, number)
        guilty, reason = found["guilty"], _reason(found)
        change_document_fates(tx, guilty, "quarantined", QUARANTINED_BY_DOCTOR, reason)
        record_event(
            tx,
            DOCUMENTS_QUARANTINED,
            Subject("anomaly", found["lead"]),
            {"documents": guilty, "reason": reason, "by": by},
        )
        record_exposed_releases(tx, saw, found["lead"])
        mark_segments_rewound(tx, list_segment_and_descendants(db, found["segment"]), {"anomaly": found["lead"]})
        _closed(tx, found, "quarantined", by)
    return Message(
        "diagnosis.quarantined", "{documents:,|document is|documents are} quarantined, and segment {segment} is rewound.{releases}",
        documents=len(guilty), segment=found["segment"], releases=format_exposed_releases(saw),
    )  # fmt: skip


def override_and_rewind(ledger: Ledger, number: int, by: str) -> Message:
    """Override the recipe for a while, rewind the segment and close the anomaly, in one transaction. Returns a message."""
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        found = _diagnosis(db, number)
        override = _override(found)
        assert override is not None
        record_recipe_override(tx, SegmentRow.get(db, found["segment"]), override)
        mark_segments_rewound(tx, list_segment_and_descendants(db, found["segment"]), {"anomaly": found["lead"]})
        _closed(tx, found, "trained again", by)
    return Message(
        "diagnosis.rate_lowered", "Segment {segment} is rewound. Training repeats the segment with {values} until step {until}.",
        segment=found["segment"], values=_values(override), until=override.until,
    )  # fmt: skip


def _at_once(found: Mapping[str, Any]) -> bool:
    """Return whether all anomalies of the episode are near its onset. Later anomalies were not replayed, so they are not closed as healthy."""
    first, last = found["noted"]
    return bool(found["onset"] - AT_ONCE <= first and last <= found["onset"] + AT_ONCE)


def _defended(ledger: Ledger) -> set[str]:
    """Return the keys of documents that a person declared not guilty. Only a person may quarantine them again."""
    ended = [row["detail"] for row in ledger.read("SELECT detail FROM events WHERE kind = :kind", kind=CLOSED)]
    return {key for end in ended if end["how"] == REJECTED for key in end.get("documents", ())}


def _override(found: Mapping[str, Any]) -> RecipeOverride | None:
    """Return the recipe values that removed the anomaly, if the learning rate is its only cause; else None."""
    override = found.get("override")
    if tuple(found["causes"]) != (RATE,) or not override:
        return None
    return RecipeOverride(override["keys"], override["until"], _reason(found))


def _values(override: RecipeOverride) -> list[str]:
    return [f"{key} {value:g}" for key, value in override.keys.items()]


def _reason(found: Mapping[str, Any]) -> str:
    return f"anomaly {found['lead']}: {' or '.join(found['causes'])}"


def list_segment_and_descendants(db: SqlReader, segment: int) -> list[SegmentRow]:
    """Return a segment and all its descendants."""
    return [row for row in SegmentRow.select(db) if any(p.id == segment for p in SegmentRow.read_lineage(db, row.id))]


def _replaced(ledger: Ledger, segment: int) -> bool:
    """Return whether a segment was rewound and another segment replaced it. Then no override is needed."""
    spoiled = SegmentRow.get(ledger, segment)
    later = SegmentRow.select(ledger, "WHERE id > :id AND kind = :kind", id=segment, kind=spoiled.kind)
    return spoiled.state == "rewound" and any(row.parent == spoiled.parent for row in later)


def mark_segments_rewound(tx: sa.Connection, segment_rows: Sequence[SegmentRow], detail: Mapping[str, Any]) -> None:
    """Mark segments as rewound, in the caller's transaction. ``detail`` is stored with the events."""
    for row in segment_rows:
        if row.state != "rewound":  # also a failed segment, else training would wait for a person
            tx.execute(segments.update().where(segments.c.id == row.id).values(state="rewound"))
            record_event(tx, SEGMENT_REWOUND, Subject("segment", row.id), dict(detail))


def _noted(ledger: Ledger, number: int, how: str, by: str) -> Message:
    """Close an anomaly that the judge recorded. It needs no further action, because the verdict of its candidate contains it."""
    with ledger.begin() as tx:
        check_anomaly_is_open(Snapshot(tx, ledger.root), number)
        _closed(tx, {"lead": number, "anomalies": [number]}, how, by)
    return Message(
        "diagnosis.noted", "The anomaly is closed. The candidate is still held, because its verdict has not changed."
    )


def check_anomaly_is_open(db: SqlReader, number: int) -> None:
    """Refuse an anomaly that is closed. Raises: InputError."""
    if end := read_newest_details_by_anomaly(db, CLOSED).get(number):
        raise InputError(
            "diagnosis.closed",
            "Anomaly {anomaly} is closed: {how} by {person}.",
            anomaly=number,
            how=end["how"],
            person=end["by"],
        )


def _close(ledger: Ledger, number: int, how: str, by: str) -> None:
    with ledger.begin() as tx:
        _closed(tx, _diagnosis(Snapshot(tx, ledger.root), number), how, by)


def _closed(tx: sa.Connection, found: Mapping[str, Any], how: str, by: str, **more: Any) -> None:
    detail = {"anomalies": found["anomalies"], "how": how, "by": by, **more}
    record_event(tx, CLOSED, Subject("anomaly", found["lead"]), detail)


def _diagnosis(db: SqlReader, number: int, also_closed: bool = False) -> dict[str, Any]:
    """Return the newest diagnosis of an anomaly. Raises: InputError when there is none, or the anomaly is closed."""
    found = read_newest_details_by_anomaly(db, DIAGNOSED).get(number)
    if found is None:
        raise InputError(
            "diagnosis.not_diagnosed",
            "Anomaly {anomaly} has no diagnosis. Run 'factory diagnose {anomaly}'.",
            anomaly=number,
        )
    if not also_closed:
        check_anomaly_is_open(db, number)
    return found


def find_exposed_releases(ledger: Ledger, keys: Sequence[str]) -> ReleaseExposure:
    """Return, for each release: the documents of ``keys`` that it was trained on, as in ``factory provenance``, and whether this is certain."""
    c = documents.c
    rows = ledger.select_rows(sa.select(c.key, c.token_shard).where(c.key.in_(keys), c.token_shard.is_not(None)))
    exposure = DocumentExposure(ledger, {row["key"]: row["token_shard"] for row in rows})
    return find_releases_trained_on(ledger, exposure, {row.number: row.segment for row in ReleaseRow.select(ledger)})


def record_exposed_releases(tx: sa.Connection, exposed: ReleaseExposure, anomaly: int | None = None) -> None:
    """Record that releases were trained on documents that are quarantined now."""
    for release, (keys, exact) in exposed.items():
        record_event(
            tx, RELEASE_MARKED, Subject("release", release), {"anomaly": anomaly, "documents": keys, "exact": exact}
        )


def format_exposed_releases(exposed: ReleaseExposure) -> str:
    """Return sentences that name the releases that were trained on some documents.

    >>> format_exposed_releases({1: (["a"], True), 2: (["a"], True), 3: (["a"], False)})
    ' Releases trained on these documents: 1, 2. Releases possibly trained on these documents: 3.'
    """
    certain, possible = (
        [release for release, (_, exact) in exposed.items() if exact is known] for known in (True, False)
    )
    said: list[str] = []
    if certain:
        said.append(
            Message("diagnosis.releases_saw", " Releases trained on these documents: {releases}.", releases=certain)
        )
    if possible:
        said.append(
            Message(
                "diagnosis.releases_may_have_seen",
                " Releases possibly trained on these documents: {releases}.",
                releases=possible,
            )
        )
    return said[0] if len(said) == 1 else "".join(said)


# -- without a diagnosis -----------------------------------------------------------------------------------------------
def rewind_segment(ledger: Ledger, number: int, by: str, why: str = "") -> Message:
    """Rewind a segment and its descendants, so that training continues from its parent. Returns a message.

    Raises: InputError for a segment that is already rewound, or whose parent has no checkpoint on disk.
    """
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        row = SegmentRow.get(db, number)
        if row.kind == IMPORT:
            first = SegmentRow.find_first(
                db, "WHERE parent = :parent AND state <> 'rewound' ORDER BY id", parent=number
            )
            way = (
                Message(
                    "diagnosis.rewind_first",
                    " To train it anew from its own weights: 'factory rewind {segment}'.",
                    segment=first.id,
                )
                if first
                else ""
            )
            raise InputError(
                "diagnosis.import_stays",
                "Segment {segment} is the imported model, which was not trained here. Nothing was rewound.{way}",
                segment=number,
                way=way,
            )
        if row.state in ("rewound", "abandoned"):
            raise InputError(
                "diagnosis.already_rewound",
                "Segment {segment} is already {state}, so no segment continues from it.",
                segment=number,
                state=row.state,
            )
        if row.parent is not None:
            before = Path(read_last_checkpoint(db, row.parent)["path"])
            if not (before / "manifest.json").is_file():
                raise InputError(
                    "diagnosis.no_checkpoint_to_rewind_to",
                    "Segment {segment} was not rewound, because the checkpoint {checkpoint} before it is missing. "
                    "To keep more checkpoints, raise trunk_segments in policies/retention.yaml.",
                    segment=number,
                    checkpoint=before,
                )
        spoiled = [one for one in list_segment_and_descendants(db, number) if one.state != "rewound"]
        mark_segments_rewound(tx, spoiled, {"by": by, "why": why})
    ids = [one.id for one in spoiled]
    made = [one.number for one in ReleaseRow.select(ledger) if one.segment in ids]
    stays = Message(
        "diagnosis.releases_stay", " Release {releases} was made from a rewound segment, and is not withdrawn. To return to another "
        "release, run 'factory release --rollback N'.", releases=made,
    )  # fmt: skip
    return Message(
        "diagnosis.rewound", "Segment {segments} is rewound. Training continues from {start} with the same shards.{releases}",
        segments=ids, start=f"the end of segment {row.parent}" if row.parent is not None else "step 0", parent=row.parent,
        releases=stays if made else "",
    )  # fmt: skip


def quarantine_documents(ledger: Ledger, names: Sequence[str], by: str, why: str = "") -> Message:
    """Quarantine documents, so that they carry no loss in segments that are planned later. Returns a message.

    ``names``: ids or keys. Raises: InputError for a document that is not a training document. Then nothing is changed.
    """
    refusal = lambda name, fate: InputError(
        "diagnosis.not_trained_on", "Training does not use the document {document!r}, because its fate is {fate!r}. Nothing was changed.",
        document=name, fate=fate,
    )  # fmt: skip
    keys = _keys(ledger, names, "train", None, refusal)
    saw = find_exposed_releases(ledger, keys)
    detail = f"by {by}" + (f": {why}" if why else "")
    with ledger.begin() as tx:
        change_document_fates(tx, keys, "quarantined", QUARANTINED_BY_PERSON, detail)
        record_event(tx, DOCUMENTS_QUARANTINED, "documents", {"documents": keys, "reason": why, "by": by})
        record_exposed_releases(tx, saw)
    return Message(
        "diagnosis.quarantined_by_person", "{documents:,|document is|documents are} quarantined. From the next segment on, quarantined documents "
        "do not count in the loss.{releases}", documents=len(keys), releases=format_exposed_releases(saw),
    )  # fmt: skip


def end_document_quarantine(ledger: Ledger, names: Sequence[str], by: str) -> Message:
    """End the quarantine of documents that a person quarantined, so that training uses them again. Returns a message.

    Raises: InputError, as ``quarantine_documents`` does.
    """
    refusal = lambda name, fate: InputError(
        "diagnosis.not_quarantined", "The document {document!r} was not quarantined by a person. Its fate is {fate!r}. Nothing was changed.",
        document=name, fate=fate,
    )  # fmt: skip
    keys = _keys(ledger, names, "quarantined", QUARANTINED_BY_PERSON, refusal)
    with ledger.begin() as tx:
        change_document_fates(tx, keys, "train", None, None)
        record_event(tx, DOCUMENTS_FREED, "documents", {"documents": keys, "by": by})
    return Message(
        "diagnosis.freed",
        "From the next segment on, training uses {documents:,|document|documents} again.",
        documents=len(keys),
    )


def _keys(
    ledger: Ledger, names: Sequence[str], fate: str, rule: str | None, refusal: Callable[[str, str], InputError]
) -> list[str]:
    """Return the keys of the documents with these ids or keys. Raises: ``refusal(name, fate)`` when a document has another fate or rule."""
    c = documents.c
    fits = sa.and_(c.fate == fate, c.rule == rule) if rule else c.fate == fate
    found: list[str] = []
    for name in names:
        try:
            keys = find_keys_of_unique_document(ledger, name, fits)
        except InputError as error:
            if "nothing was changed" in str(error).lower():
                raise
            raise InputError("diagnosis.unknown_document", "{error}. Nothing was changed.", error=error) from error
        rows = ledger.select_rows(sa.select(c.key, c.fate).where(c.key.in_(keys)).order_by(c.key))
        fitting = [
            row["key"] for row in ledger.select_rows(sa.select(c.key).where(c.key.in_(keys), fits).order_by(c.key))
        ]
        if not fitting:
            raise refusal(name, rows[0]["fate"])
        found += fitting
    return list(dict.fromkeys(found))
