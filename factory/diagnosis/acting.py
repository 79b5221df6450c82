"""What is done about a diagnosis: guilty documents are quarantined, or the rate lowered for a while, and the segment that was spoiled is
rewound; or a person is asked. And what a person does without a diagnosis.

A quarantined document stays in its token shard and keeps its place in the data order, but carries no loss in any segment that is planned
later (``DataPlan.masked``), so that checkpoints and sampler states from before it stay valid. A rewound segment is not gone on from:
the trunk goes on from the one before it, over the same shards.

Each decision reads and writes in one transaction, so that a person decides while the daemon runs: what it does at that moment with what is
rewound is given up (``factory.retrying.asking``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.loss_doctor.causes import CODE, HEALTHY, KERNEL, RATE
from factory.audit.drawing import merged_patches
from factory.core.errors import InputError
from factory.data.cost import releases_that_saw
from factory.data.exposure import Exposure
from factory.data.selecting import keys_of_one
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git import repository
from factory.ingest.document import SYNTHETIC, keeping_maker
from factory.ledger.anomalies import (
    ASKED,
    CLOSED,
    DEV_ALONE,
    DIAGNOSED,
    FREED,
    MARKED,
    QUARANTINED,
    REJECTED,
    REWOUND,
    AnomalyRow,
    newest_about,
)
from factory.ledger.ledger import Ledger, documents, record, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import Reads, ReleaseRow, SegmentRow, Subject
from factory.ledger.snapshot import Snapshot
from factory.training.planning import RecipeOverride, last_checkpoint, record_override, was_overridden

AT_ONCE = 16  # steps from an episode's onset in which what is new about shards shows
DOCTOR, PERSON = "loss_doctor", "person"  # as ``documents.rule`` names who quarantined
Saw = Mapping[
    int, tuple[Sequence[str], bool]
]  # by release, the documents that it was trained on, and whether that is known
OF_KERNELS = ("kernels/", "policies/kernels.yaml")


def act(ledger: Ledger, policy: AnomalyPolicy, lead: int) -> str:
    """Do what the policy says about the diagnosis of an anomaly; returns a line for a person."""
    found = _diagnosis(ledger, lead)
    if tuple(found["causes"]) in HEALTHY and _at_once(found):
        _close(ledger, lead, "healthy", "policy")
        return "nothing is wrong; it is closed"
    if found["guilty"] and policy.quarantine == "automatic" and not _defended(ledger) & set(found["guilty"]):
        return quarantine_and_rewind(ledger, lead, "policy")
    if _override(found) and policy.rate == "automatic":
        spoiled = SegmentRow.get(ledger, found["segment"])
        if not was_overridden(ledger, spoiled.kind, spoiled.parent):
            return override_and_rewind(ledger, lead, "policy")
    with ledger.begin() as tx:
        asked = {"anomalies": found["anomalies"], "diagnosis": found["event"]}
        record(tx, ASKED, Subject("anomaly", found["lead"]), asked)
    undone = _said(found)
    undone += "".join(f"; a proposal that undoes proposal {number} is opened" for number in found.get("undo", ()))
    return f"a person decides: 'factory anomalies accept {found['lead']}' or 'factory anomalies reject {found['lead']}'{undone}"


def blamed_patches(plant: Plant, causes: Sequence[str], commit: str, previous: str | None) -> list[int]:
    """The agents' patch that a code change or a faulty kernel can only be: merged since the commit ``previous``, in a kernel's case into
    kernels; where ``previous`` is None, ever. None where several may be. Raises: RepositoryError."""
    if tuple(causes) not in ((CODE,), (KERNEL,)):
        return []
    code = plant.workspace.repository
    since = [
        row
        for row in merged_patches(plant, commit)
        if previous is None or not repository.contains(code, previous, row.patch_commit)
    ]
    if tuple(causes) == (KERNEL,):
        files = {
            row.number: [c.path for c in repository.changes(code, row.base_commit, row.patch_commit)] for row in since
        }
        since = [row for row in since if any(path.startswith(OF_KERNELS) for path in files[row.number])]
    return [row.number for row in since] if len(since) == 1 else []


def accept(ledger: Ledger, number: int, by: str) -> str:
    """Do what the diagnosis proposes; where it proposes nothing, take the anomaly as it is, so that candidates may be released again.

    Raises: InputError when it is closed, or was not diagnosed.
    """
    if AnomalyRow.get(ledger, number).kind == DEV_ALONE:
        return _noted(ledger, number, "accepted", by)
    found = _diagnosis(ledger, number)
    if found["guilty"]:
        return quarantine_and_rewind(ledger, number, by)
    if _override(found) and not _replaced(ledger, found["segment"]):
        return override_and_rewind(ledger, number, by)
    _close(ledger, number, "accepted", by)
    return "closed; candidates that were held are judged again by 'factory evaluate N'"


def reject(ledger: Ledger, number: int, by: str) -> str:
    """The diagnosis is wrong: nothing is done, or what was done to documents is undone, and the anomaly is closed. Raises: InputError."""
    if AnomalyRow.get(ledger, number).kind == DEV_ALONE:
        return _noted(ledger, number, REJECTED, by)
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        found = _diagnosis(db, number, also_closed=True)
        reason, detail = f"anomaly {found['lead']}: ", documents.c.detail
        written = sa.and_(detail.startswith(SYNTHETIC), detail.contains(f"; {reason}", autoescape=True))
        its_own = sa.or_(detail.startswith(reason, autoescape=True), written)  # another's stay as they are
        which = (documents.c.key.in_(found["guilty"]), documents.c.fate == "quarantined", its_own)
        if _override(found):
            record_override(tx, SegmentRow.get(db, found["segment"]), RecipeOverride({}, 0, "rejected"))
        freed = list(tx.execute(sa.select(documents.c.key).where(*which)).scalars())
        change_documents(tx, freed, "train", None, None)
        _closed(tx, found, REJECTED, by, documents=found["guilty"])
    return f"closed; {len(freed)} documents are trained on again" if freed else "closed"


def change_documents(tx: sa.Connection, keys: Sequence[str], fate: str, rule: str | None, detail: str | None) -> None:
    """Give documents another fate, and a reason for it; who wrote one stays said."""
    c = documents.c
    for start in range(0, len(keys), 500):
        these = c.key.in_(keys[start : start + 500])
        written = tx.execute(sa.select(c.key, c.detail).where(these, c.detail.startswith(SYNTHETIC))).all()
        tx.execute(documents.update().where(these).values(fate=fate, rule=rule, detail=detail))
        for key, before in written:
            tx.execute(documents.update().where(c.key == key).values(detail=keeping_maker(before, detail)))


def quarantine_and_rewind(ledger: Ledger, number: int, by: str) -> str:
    """All in one transaction: documents, releases that saw them, segments that go on from what they spoiled, the anomaly."""
    saw = releases_that_were_trained_on(ledger, _diagnosis(ledger, number)["guilty"])
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        found = _diagnosis(db, number)
        guilty, reason = found["guilty"], _reason(found)
        change_documents(tx, guilty, "quarantined", DOCTOR, reason)
        record(tx, QUARANTINED, Subject("anomaly", found["lead"]), {"documents": guilty, "reason": reason, "by": by})
        mark_releases(tx, saw, found["lead"])
        mark_rewound(tx, spoiled_by(db, found["segment"]), {"anomaly": found["lead"]})
        _closed(tx, found, "quarantined", by)
    return f"{len(guilty)} documents quarantined, segment {found['segment']} rewound{saw_in_words(saw)}"


def override_and_rewind(ledger: Ledger, number: int, by: str) -> str:
    """All in one transaction: what the recipe says otherwise for a while, segments that go on from what was spoiled, the anomaly."""
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        found = _diagnosis(db, number)
        override = _override(found)
        assert override is not None
        record_override(tx, SegmentRow.get(db, found["segment"]), override)
        mark_rewound(tx, spoiled_by(db, found["segment"]), {"anomaly": found["lead"]})
        _closed(tx, found, "trained again", by)
    return f"segment {found['segment']} rewound{_said(found)}"


def _at_once(found: Mapping[str, Any]) -> bool:
    """Are all of the episode's anomalies near its onset? Those later, of which nothing was replayed, are not closed with it as healthy."""
    first, last = found["noted"]
    return bool(found["onset"] - AT_ONCE <= first and last <= found["onset"] + AT_ONCE)


def _defended(ledger: Ledger) -> set[str]:
    """Documents that a person said are not to blame: they are quarantined again by a person alone."""
    ended = [row["detail"] for row in ledger.read("SELECT detail FROM events WHERE kind = :kind", kind=CLOSED)]
    return {key for end in ended if end["how"] == REJECTED for key in end.get("documents", ())}


def _override(found: Mapping[str, Any]) -> RecipeOverride | None:
    """What of the recipe cleared the anomaly, where it was the rate and nothing else."""
    override = found.get("override")
    if tuple(found["causes"]) != (RATE,) or not override:
        return None
    return RecipeOverride(override["keys"], override["until"], _reason(found))


def _said(found: Mapping[str, Any]) -> str:
    override = _override(found)
    if override is None:
        return ""
    keys = ", ".join(f"{key} {value:g}" for key, value in override.keys.items())
    return f"; it is trained again with {keys} until step {override.until}"


def _reason(found: Mapping[str, Any]) -> str:
    return f"anomaly {found['lead']}: {' or '.join(found['causes'])}"


def spoiled_by(db: Reads, segment: int) -> list[SegmentRow]:
    """A segment and all that go on from it."""
    return [row for row in SegmentRow.select(db) if any(p.id == segment for p in SegmentRow.lineage(db, row.id))]


def _replaced(ledger: Ledger, segment: int) -> bool:
    """Was a segment rewound, and has another one taken its place? Then nothing is trained again for what it showed."""
    spoiled = SegmentRow.get(ledger, segment)
    later = SegmentRow.select(ledger, "WHERE id > :id AND kind = :kind", id=segment, kind=spoiled.kind)
    return spoiled.state == "rewound" and any(row.parent == spoiled.parent for row in later)


def mark_rewound(tx: sa.Connection, spoiled: Sequence[SegmentRow], detail: Mapping[str, Any]) -> None:
    """In the caller's transaction. ``detail``: of the events."""
    for row in spoiled:
        if (
            row.state != "rewound"
        ):  # a failed one too: training would wait for a person to mend what nothing goes on from
            tx.execute(segments.update().where(segments.c.id == row.id).values(state="rewound"))
            record(tx, REWOUND, Subject("segment", row.id), dict(detail))


def _noted(ledger: Ledger, number: int, how: str, by: str) -> str:
    """Close an anomaly of the judge's, which nothing is to be done about: what it says of a candidate stands in that one's verdict."""
    with ledger.begin() as tx:
        _refuse_closed(Snapshot(tx, ledger.root), number)
        _closed(tx, {"lead": number, "anomalies": [number]}, how, by)
    return "closed; the candidate stays held, as its verdict says"


def _refuse_closed(db: Reads, number: int) -> None:
    if end := newest_about(db, CLOSED).get(number):
        raise InputError(f"anomaly {number} is closed: {end['how']} by {end['by']}")


def _close(ledger: Ledger, number: int, how: str, by: str) -> None:
    with ledger.begin() as tx:
        _closed(tx, _diagnosis(Snapshot(tx, ledger.root), number), how, by)


def _closed(tx: sa.Connection, found: Mapping[str, Any], how: str, by: str, **more: Any) -> None:
    detail = {"anomalies": found["anomalies"], "how": how, "by": by, **more}
    record(tx, CLOSED, Subject("anomaly", found["lead"]), detail)


def _diagnosis(db: Reads, number: int, also_closed: bool = False) -> dict[str, Any]:
    """Raises: InputError."""
    found = newest_about(db, DIAGNOSED).get(number)
    if found is None:
        raise InputError(f"anomaly {number} was not diagnosed: run 'factory diagnose {number}'")
    if not also_closed:
        _refuse_closed(db, number)
    return found


def releases_that_were_trained_on(ledger: Ledger, keys: Sequence[str]) -> Saw:
    """By release, those of these documents that it was trained on, as ``factory provenance`` says, and whether that is known."""
    c = documents.c
    rows = ledger.rows(sa.select(c.key, c.token_shard).where(c.key.in_(keys), c.token_shard.is_not(None)))
    exposure = Exposure(ledger, {row["key"]: row["token_shard"] for row in rows})
    return releases_that_saw(ledger, exposure, {row.number: row.segment for row in ReleaseRow.select(ledger)})


def mark_releases(tx: sa.Connection, saw: Saw, anomaly: int | None = None) -> None:
    """Note that releases saw documents that are quarantined now."""
    for release, (keys, exact) in saw.items():
        record(tx, MARKED, Subject("release", release), {"anomaly": anomaly, "documents": keys, "exact": exact})


def saw_in_words(saw: Saw) -> str:
    """
    >>> saw_in_words({1: (["a"], True), 2: (["a"], True), 3: (["a"], False)})
    '; release 1, 2 saw them; release 3 may have seen them'
    """
    said = ""
    for known, words in ((True, "saw them"), (False, "may have seen them")):
        if numbers := ", ".join(str(release) for release, (_, exact) in saw.items() if exact is known):
            said += f"; release {numbers} {words}"
    return said


# -- without a diagnosis -----------------------------------------------------------------------------------------------
def rewind(ledger: Ledger, number: int, by: str, why: str = "") -> str:
    """Training is gone on with from before a segment, and from nothing that goes on from it; returns a line for a person.

    Raises: InputError for a segment that is rewound already, or whose predecessor's checkpoint is gone.
    """
    with ledger.begin() as tx:
        db = Snapshot(tx, ledger.root)
        row = SegmentRow.get(db, number)
        if row.state in ("rewound", "abandoned"):
            raise InputError(f"segment {number} is {row.state} already: nothing goes on from it")
        if row.parent is not None:
            before = Path(last_checkpoint(db, row.parent)["path"])
            if not (before / "manifest.json").is_file():
                raise InputError(
                    f"segment {number} is not rewound: {before}, which training would go on from, is gone; "
                    f"keep more with trunk_segments in policies/retention.yaml"
                )
        spoiled = [one for one in spoiled_by(db, number) if one.state != "rewound"]
        mark_rewound(tx, spoiled, {"by": by, "why": why})
    listed = ", ".join(str(one.id) for one in spoiled)
    goes_on = f"from the end of segment {row.parent}" if row.parent is not None else "anew, at step 0"
    ids = {one.id for one in spoiled}
    made = ", ".join(str(one.number) for one in ReleaseRow.select(ledger) if one.segment in ids)
    stays = f"; release {made} is made of it and stays ('factory release --rollback N' takes another)" if made else ""
    return f"rewound: segment {listed}; training goes on {goes_on}, over the same shards{stays}"


def quarantine(ledger: Ledger, names: Sequence[str], by: str, why: str = "") -> str:
    """Documents carry no loss in any segment that is planned later; returns a line for a person.

    ``names``: ids or keys. Raises: InputError for one that is not trained on; nothing is changed then.
    """
    keys = _keys(ledger, names, "train", None, "is not trained on")
    saw = releases_that_were_trained_on(ledger, keys)
    detail = f"by {by}" + (f": {why}" if why else "")
    with ledger.begin() as tx:
        change_documents(tx, keys, "quarantined", PERSON, detail)
        record(tx, QUARANTINED, "documents", {"documents": keys, "reason": why, "by": by})
        mark_releases(tx, saw)
    return f"{len(keys)} documents quarantined: they carry no loss from the next segment on{saw_in_words(saw)}"


def free(ledger: Ledger, names: Sequence[str], by: str) -> str:
    """Documents that a person quarantined are trained on again. Raises: InputError, as ``quarantine``."""
    keys = _keys(ledger, names, "quarantined", PERSON, "was not quarantined by a person")
    with ledger.begin() as tx:
        change_documents(tx, keys, "train", None, None)
        record(tx, FREED, "documents", {"documents": keys, "by": by})
    return f"{len(keys)} documents are trained on again from the next segment on"


def _keys(ledger: Ledger, names: Sequence[str], fate: str, rule: str | None, otherwise: str) -> list[str]:
    """Of the documents of these ids or keys, which all have that fate."""
    c = documents.c
    fits = sa.and_(c.fate == fate, c.rule == rule) if rule else c.fate == fate
    found: list[str] = []
    for name in names:
        try:
            keys = keys_of_one(ledger, name, fits)
        except InputError as error:
            said = str(error)
            raise InputError(said if "nothing was changed" in said else f"{said}; nothing was changed") from error
        rows = ledger.rows(sa.select(c.key, c.fate).where(c.key.in_(keys)).order_by(c.key))
        fitting = [row["key"] for row in ledger.rows(sa.select(c.key).where(c.key.in_(keys), fits).order_by(c.key))]
        if not fitting:
            raise InputError(f"document {name!r} {otherwise} (its fate: {rows[0]['fate']}); nothing was changed")
        found += fitting
    return list(dict.fromkeys(found))
