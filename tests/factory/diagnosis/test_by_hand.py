"""A person rewinds a segment and quarantines documents: what follows, what is said, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.diagnosis.acting import free, quarantine, rewind
from factory.ledger.anomalies import MARKED
from factory.ledger.ledger import (
    Ledger,
    candidates,
    checkpoints,
    data_plans,
    documents,
    events,
    releases,
    segments,
    shards,
    verdicts,
)
from factory.ledger.rows import SegmentRow
from factory.training.planning import _left_out
from tests.support.factory.command import factory


@pytest.fixture
def past(workspace: Workspace, ledger: Ledger) -> Ledger:
    """Trunk 1 → trunk 2 → anneal 3 (release 1) and trunk 4, over a token shard with three documents."""
    plan = {"token_shards": [{"id": "t", "path": "t", "generation": 1}]}
    with ledger.begin() as tx:
        tx.execute(data_plans.insert().values(id="p", plan=plan, created_at=0.0))
        for number, kind, parent in ((1, "trunk", None), (2, "trunk", 1), (3, "anneal", 2), (4, "trunk", 2)):
            folder = workspace.segments / f"{number:05d}-{kind}"
            path = folder / "checkpoints" / "step-00000005"
            path.mkdir(parents=True)
            (path / "manifest.json").write_text("{}")
            tx.execute(
                segments.insert().values(
                    id=number, kind=kind, parent=parent, generation=1, recipe="r", recipe_json={}, recipe_sha256="r", data_plan="p",
                    code_commit="c", first_step=0, last_step=5, state="done", result={}, folder=str(folder), created_at=0.0,
                )
            )  # fmt: skip
            tx.execute(
                checkpoints.insert().values(id=f"c{number}", segment=number, step=5, path=str(path), created_at=0.0)
            )
        tx.execute(
            candidates.insert().values(
                id=1, segment=3, checkpoint="c3", export_path="e", export_sha256="e", created_at=0.0
            )
        )
        tx.execute(
            verdicts.insert().values(
                id=1, gate="release", subject="candidate:1", policy_sha256="p", subject_sha256="e", outcome="promote", reasons=[],
                evidence={}, created_at=0.0,
            )
        )  # fmt: skip
        tx.execute(releases.insert().values(number=1, candidate=1, verdict=1, state="published", created_at=0.0))
        tx.execute(shards.insert().values(sha256="s", name="s", path="s", bytes=1, state="ingested", ingested_at=0.0))
        for key, fate in (("s:0", "train"), ("s:1", "train"), ("s:2", "held_out")):
            tx.execute(
                documents.insert().values(
                    key=key, id=f"d{key[-1]}", shard="s", row=int(key[-1]), domain="x", fate=fate, token_shard="t"
                )
            )
    return ledger


def states(ledger: Ledger) -> dict[int, str]:
    return {row.id: row.state for row in SegmentRow.select(ledger)}


def test_a_rewound_segment_takes_all_that_goes_on_from_it(past: Ledger) -> None:
    said = rewind(past, 2, "ann", "wrong data")
    assert said == (
        "rewound: segment 2, 3, 4; training goes on from the end of segment 1, over the same shards; release 1 is made of it and stays "
        "('factory release --rollback N' takes another)"
    )
    assert states(past) == {1: "done", 2: "rewound", 3: "rewound", 4: "rewound"}
    (found,) = past.rows(sa.select(events).where(events.c.subject == "segment:4"))
    assert (found["kind"], found["detail"]) == ("segment_rewound", {"by": "ann", "why": "wrong data"})
    with pytest.raises(InputError, match="segment 3 is rewound already"):
        rewind(past, 3, "ann")
    assert "training goes on anew, at step 0" in rewind(past, 1, "ann")


def test_a_segment_whose_predecessor_is_gone_is_not_rewound(past: Ledger) -> None:
    (Path(SegmentRow.get(past, 2).folder) / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    with pytest.raises(
        InputError, match=r"segment 4 is not rewound: .*00002-trunk.*is gone; keep more with trunk_segments"
    ):
        rewind(past, 4, "ann")
    assert set(states(past).values()) == {"done"}


def test_a_left_out_document_is_masked_until_it_is_freed(past: Ledger) -> None:
    said = quarantine(past, ["d0", "s:1"], "ann", "private")
    assert said == "2 documents quarantined: they carry no loss from the next segment on; release 1 may have seen them"
    assert sorted(_left_out(past, {"t"})) == ["s:0", "s:1"]
    (mark,) = past.rows(sa.select(events).where(events.c.kind == MARKED))
    assert mark["subject"] == "release:1" and mark["detail"]["documents"] == ["s:0", "s:1"]
    assert free(past, ["d0"], "ann") == "1 documents are trained on again from the next segment on"
    assert _left_out(past, {"t"}) == ["s:1"]


def test_who_wrote_a_document_stays_said(past: Ledger) -> None:
    maker = "synthetic, by release 1 (weights 0123456789abcdef)"
    with past.begin() as tx:
        tx.execute(documents.update().where(documents.c.key == "s:0").values(detail=f"{maker}; replaced: 1 email"))
    detail = lambda: [
        row["detail"] for row in past.read("SELECT detail FROM documents WHERE fate <> 'held_out' ORDER BY key")
    ]
    quarantine(past, ["s:0", "s:1"], "ann", "private")
    assert detail() == [f"{maker}; by ann: private", "by ann: private"]
    free(past, ["s:0", "s:1"], "ann")
    assert detail() == [maker, None]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["d0", "nobody"], "no document 'nobody' was ever ingested"),
        (["d0", "d2"], r"document 'd2' is not trained on \(its fate: held_out\)"),
    ],
)
def test_one_wrong_name_changes_nothing(past: Ledger, names: list[str], says: str) -> None:
    with pytest.raises(InputError, match=f"{says}.*; nothing was changed"):
        quarantine(past, names, "ann")
    assert _left_out(past, {"t"}) == []
    with pytest.raises(InputError, match="was not quarantined by a person"):
        free(past, ["d0"], "ann")


def test_of_several_documents_of_one_id_none_is_taken_until_one_is_named(past: Ledger) -> None:
    with past.begin() as tx:
        tx.execute(documents.update().where(documents.c.key != "s:1").values(id="3"))
        tx.execute(documents.insert().values(key="s:3", id="3", shard="s", row=3, domain="x", fate="train", source="b"))
    says = (
        "2 documents have the id '3'; nothing was changed: name the key of the one that is meant: "
        "s:0 (s, train); s:3 (source b, s, train)"
    )
    for names in (["3"], ["s:1", "3"]):
        with pytest.raises(InputError) as refused:
            quarantine(past, names, "ann")
        assert str(refused.value) == says
    assert _left_out(past, {"t"}) == []
    quarantine(past, ["s:0"], "ann")
    quarantine(past, ["3"], "ann")  # the only one of them that is trained on
    with pytest.raises(InputError, match="2 documents have the id '3'; nothing was changed"):
        free(past, ["3"], "ann")


def test_the_commands(past: Ledger, workspace: Workspace) -> None:
    home = ["-w", str(workspace.root)]
    assert factory("quarantine", "d1", "--why", "private", *home).stdout.startswith("  1 documents quarantined")
    assert factory("quarantine", "d1", "--undo", *home).stdout.startswith("  1 documents are trained on again")
    assert '"says": "rewound: segment 4;' in factory("rewind", "4", "--json", *home).stdout
