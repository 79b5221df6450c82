from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.ledger.ledger import Ledger, record_event, releases, segments
from factory.ledger.plant import Plant
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import CandidateRow, ProposalRow, ReleaseRow, SegmentRow, Subject, VerdictRow, find_champion
from factory.ledger.status import read_status
from factory.ledger.writing import find_next_key, insert_row, record_verdict
from tests.support.factory.errands import due_of
from tests.support.messages import refused
from tests.support.plants.release_scene import add_candidate, add_shard


@pytest.fixture(params=["sqlite", "postgresql"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
    """Every test once with each database."""
    url = ""
    if request.param == "postgresql":
        new_database: Callable[[], str] = request.getfixturevalue("postgres")
        url = new_database()
    return Workspace.create(tmp_path / "workspace", WorkspaceConfig(ledger_url=url))


@pytest.fixture
def ledger(workspace: Workspace) -> Ledger:
    """Two candidates: the first promoted and released, the second rejected."""
    made = Ledger.create(workspace.ledger_url)
    add_shard(made)
    first, second = add_candidate(workspace, made), add_candidate(workspace, made)
    verdict = {"policy_sha256": "p", "subject_sha256": "e", "reasons": ["why"], "evidence": {"gain": {"code": 0.5}}}
    with made.begin() as tx:
        tx.execute(segments.update().values(recipe_json={"precision": "fp32"}))
        one = record_verdict(tx, "release", Subject("candidate", first), against=None, outcome="promote", **verdict)
        number = insert_row(
            tx,
            releases,
            number=find_next_key(tx, releases),
            candidate=first,
            verdict=one,
            state="published",
            created_at=1.0,
        )
        record_event(tx, "promoted", Subject("release", number))
        against = Subject("candidate", first)
        record_verdict(tx, "release", Subject("candidate", second), against=against, outcome="reject", **verdict)
    return made


def test_a_ledger_and_a_reader_return_the_same_rows(workspace: Workspace, ledger: Ledger) -> None:
    reader = LedgerReader(workspace)
    for kind in (SegmentRow, CandidateRow, VerdictRow, ReleaseRow, ProposalRow):
        assert kind.select(reader) == kind.select(ledger)
    newest = VerdictRow.find_newest(ledger, "release", Subject("candidate", 2))
    assert newest and (newest.id, newest.subject_number, newest.against, newest.reasons) == (
        2,
        2,
        "candidate:1",
        ["why"],
    )
    assert newest.read_evidence(ledger) == {"gain": {"code": 0.5}}
    assert ReleaseRow.get(ledger, 1).export_sha256 == CandidateRow.get(ledger, 1).export_sha256


def test_an_unknown_key_is_an_error_that_lists_the_known_keys(ledger: Ledger) -> None:
    with refused("rows.unknown_key", InputError, noun="candidate", key=7, known=["1", "2"]):
        CandidateRow.get(ledger, 7)
    with refused("rows.no_rows", InputError, noun="proposal", key=1):
        ProposalRow.get(ledger, 1)


def test_the_status_and_the_ledger_have_the_same_champion(workspace: Workspace, ledger: Ledger) -> None:
    best = find_champion(ledger)
    facts = json.loads(json.dumps(read_status(workspace)))
    assert best and best == find_champion(LedgerReader(workspace))
    assert facts["champion"] == best.select_fields("number candidate mlflow_version export_path created_at")
    assert [c["verdict"]["outcome"] for c in facts["candidates"]] == ["promote", "reject"]
    assert [due_of(Plant(workspace, ledger), name) for name in ("judge", "finish_release", "release")] == [[], [], []]
