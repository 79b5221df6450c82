"""From a release to the documents that it wrote, to the release trained on them, and back, with real training and ingest."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_and_move
from factory.ledger.ledger import Ledger, record_event, releases, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, Subject
from factory.show.pages.provenance import read_document_provenance, read_release_provenance
from factory.show.pages.release_report import render_report
from factory.training.exporting import export_candidate
from tests.support.factory.command import command_here
from tests.support.plants.trained_plant import fill, lenient_plant, train_anneal, train_trunk


def release(workspace: Workspace, ledger: Ledger) -> int:
    """Anneal and export, and write the rows of the gate and the release: the result is the champion."""
    candidate = export_candidate(Plant(workspace, ledger), train_anneal(workspace, ledger))
    judged = {"gate": "release", "subject": f"candidate:{candidate}", "outcome": "promote", "policy_sha256": "p"}
    with ledger.begin() as tx:
        row = verdicts.insert().values(**judged, subject_sha256="e", reasons=["better"], evidence={}, created_at=0.0)
        key = tx.execute(row).inserted_primary_key
        assert key
        made = {"number": candidate, "candidate": candidate, "verdict": key[0], "state": "published"}
        tx.execute(releases.insert().values(**made, created_at=time.time()))
        record_event(tx, "promoted", Subject("release", candidate))
    return candidate


@pytest.mark.slow("two releases are trained and exported, and the first writes")
def test_documents_link_the_release_that_wrote_them_to_the_release_trained_on_them(
    tmp_path: Path, code_repository: Path
) -> None:
    workspace = lenient_plant(tmp_path, code_repository)
    ledger = fill(workspace)
    train_trunk(workspace, ledger, 40)
    first = release(workspace, ledger)
    words = ["--count", "80", "--tokens", "22", "--opening-tokens", "8", "--temperature", "0.2", "--inbox"]
    said = json.loads(command_here("generate", *words, "--json", home=workspace).stdout)
    ingest_and_move(Plant(workspace, ledger), Path(said["inbox"]))
    kept = ledger.read("SELECT key, id FROM documents WHERE detail LIKE 'synthetic, by %' AND fate = 'train'")
    rules = ledger.read("SELECT rule, COUNT(*) AS n FROM documents WHERE detail LIKE 'synthetic, by %' GROUP BY rule")
    assert len(kept) > 3, rules
    train_trunk(workspace, ledger, 10)
    second = release(workspace, ledger)

    one, two = read_release_provenance(ledger, first), read_release_provenance(ledger, second)
    maker = f"release {first} (weights {ReleaseRow.get(ledger, first).export_sha256[:16]})"
    assert said["written_by"] == maker and one["synthetic"] == [] and two["wrote"] == {"documents": 0, "releases": []}
    assert one["wrote"] == {"documents": len(kept), "releases": [second]}
    (written,) = two["synthetic"]
    assert (written["maker"], written["release"], written["documents"]) == (maker, first, len(kept))
    shown = command_here("provenance", "--release", str(second), home=workspace).stdout
    assert f"OUR OWN RELEASES WROTE {written['supervised_tokens'] / sum(two['licences'].values()):.1%}" in shown
    assert f" in the data of releases {second}" in (
        command_here("provenance", "--release", str(first), home=workspace).stdout
    )
    (document,) = read_document_provenance(ledger, kept[0]["id"])
    assert document["synthetic_by"] == maker and not document["steps_unknown"]
    assert {row["release"] for row in document["releases"]} <= {second}
    share = written["supervised_tokens"] / sum(two["licences"].values())
    listed = command_here("releases", "show", str(second), home=workspace).stdout
    assert f"  synthetic  by {maker}: {written['supervised_tokens']:,} supervised tokens, {share:.1%}" in listed
    assert f"written by models: {maker} {share * 100:.1f} %" in render_report(ledger, second)
