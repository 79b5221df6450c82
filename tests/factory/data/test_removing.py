"""Removals: plans, marks of releases, copies, held-out documents, the cost, and the undo."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from factory.bundles.shards import list_shard_rows
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.data.exposure import DocumentExposure
from factory.data.removing import (
    PlannedRemoval,
    apply_removal,
    mark_releases_trained_on_removed_documents,
    plan_removal,
    undo_removal,
)
from factory.data.retraining_cost import estimate_retraining_cost
from factory.data.selecting import list_removable_fates, select_documents_by_label, select_documents_by_name
from factory.diagnosis.remedies import quarantine_documents, rewind_segment
from factory.evals.policy import EvalPolicy
from factory.evals.suite import build_suite
from factory.gates.release.trained_licences import count_tokens_by_licence
from factory.ingest.chain import ingest_shard
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.anomalies import RELEASE_MARKED
from factory.ledger.ledger import Ledger, documents, record_event, releases
from factory.ledger.plant import Plant
from factory.ledger.removals import (
    REMOVED,
    describe_removed_training_data,
    list_releases_with_removed_data,
    list_removals,
)
from factory.ledger.rows import SegmentRow, Subject
from factory.releasable.report import make_report as releasable
from factory.show.mlflow.releases import register_candidate
from factory.show.mlflow.store import open_client
from factory.show.pages.provenance import read_document_provenance, read_release_provenance
from factory.show.pages.release_report import render_report
from factory.training.planning import plan_anneal, plan_trunk, read_data_plan
from factory.training.training import run_segment
from tests.support.factory.command import command_here, factory
from tests.support.factory.shown import reconcile
from tests.support.messages import codes, refused, the
from tests.support.plants.release_scene import add_candidate, add_shard, add_verdict, with_store
from tests.support.plants.released import release_of

Copy = Callable[[], tuple[Workspace, Ledger]]


def outlook(ledger: Ledger, name: str) -> PlannedRemoval:
    return plan_removal(ledger, select_documents_by_name(ledger, [name], list_removable_fates(False)))


def one(ledger: Ledger, where: str) -> dict[str, Any]:
    return ledger.read(f"SELECT * FROM documents WHERE {where} ORDER BY key LIMIT 1")[0]


def fates(ledger: Ledger) -> list[tuple[str, str, str | None, str | None]]:
    return [(r["key"], r["fate"], r["rule"], r["detail"]) for r in ledger.read("SELECT * FROM documents ORDER BY key")]


def trained_once(ledger: Ledger) -> str:
    """A document that the second trunk segment saw in one step, and no other segment."""
    rows = ledger.read("SELECT key, token_shard FROM documents WHERE token_shard IS NOT NULL")
    exposure = DocumentExposure(ledger, {row["key"]: row["token_shard"] for row in rows})
    seen = {number: set(exposure.list_steps_by_document(SegmentRow.get(ledger, number))) for number in (1, 2, 3)}
    return next(
        key for key in sorted(seen[2] - seen[1] - seen[3]) if len(read_document_provenance(ledger, key)[0]["seen"]) == 1
    )


def test_a_removal_masks_the_document_marks_releases_and_estimates_the_cost(copied: Copy) -> None:
    workspace, ledger = copied()
    key = trained_once(ledger)
    found = outlook(ledger, key)
    (step,) = {seen["step"] for seen in read_document_provenance(ledger, key)[0]["seen"]}
    assert 10 <= step < 20 and found.releases == {1: ([key], True)} and found.fates == {"train": 1}
    start = 15 if step >= 15 else 10
    cost = found.cost
    assert (cost.first_step, cost.segment, cost.from_step, cost.until, cost.steps) == (step, 2, start, 20, 20 - start)
    assert Path(cost.checkpoint).name == f"step-{start:08d}"
    removal = apply_removal(ledger, found, "ann", "asked for")
    assert list_releases_with_removed_data(ledger) == [{"release": 1, "documents": 1, "removal": 1, "exact": True}]
    assert read_release_provenance(ledger, 1)["marks"] == [
        describe_removed_training_data(list_releases_with_removed_data(ledger)[0])
    ]
    (shown,) = read_document_provenance(ledger, key)
    assert shown["fate"] == "removed" and shown["removal"]["why"] == "asked for" and shown["releases"][0]["times"] == 1
    number = plan_trunk(Plant(workspace, ledger), 5)
    assert read_data_plan(ledger, SegmentRow.get(ledger, number))["masked"] == [key]
    run_segment(Plant(workspace, ledger), number)  # the trainer goes on, from the checkpoint that saw it
    assert removal.number == 1 and codes([undo_removal(ledger, 1, "ann")]) == ["data.put_back"]
    assert list_releases_with_removed_data(ledger) == [] and "masked" not in read_data_plan(
        ledger, SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger), 5))
    )
    with refused("data.put_back_already", InputError, number=1):
        undo_removal(ledger, 1, "ann")
    with refused("data.no_removal", InputError, number=7, known=[1]):
        undo_removal(ledger, 7, "ann")


def test_quarantine_and_provenance_agree_about_releases(copied: Copy) -> None:
    """One document was trained on by release 1; the other is in its data plan, but no step has drawn it."""
    _, ledger = copied()
    drawn = trained_once(ledger)
    rows = ledger.read("SELECT key FROM documents WHERE fate = 'train' AND supervised_tokens > 0 ORDER BY key")
    waiting = next(row["key"] for row in rows if not read_document_provenance(ledger, row["key"])[0]["seen"])
    assert read_document_provenance(ledger, waiting)[0]["segments"]
    assert quarantine_documents(ledger, [drawn], "ann").data["releases"].data == {"releases": [1]}
    assert quarantine_documents(ledger, [waiting], "ann").data["releases"] == ""
    assert [read_document_provenance(ledger, key)[0]["releases"] != [] for key in (drawn, waiting)] == [True, False]
    assert list_releases_with_removed_data(ledger) == [{"release": 1, "documents": 1, "removal": None, "exact": True}]


def test_an_ambiguous_id_removes_no_document(copied: Copy) -> None:
    """Copies of one text with the same id count as one document."""
    workspace, ledger = copied()
    rows = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[:4]
    first, second, copy, other = (row["key"] for row in rows)
    same = f"(SELECT content_sha256 FROM documents WHERE key = '{other}')"
    with ledger.begin() as tx:
        tx.exec_driver_sql(f"UPDATE documents SET id = '3' WHERE key IN ('{first}', '{second}')")
        tx.exec_driver_sql(f"UPDATE documents SET id = '4' WHERE key IN ('{copy}', '{other}')")
        tx.exec_driver_sql(f"UPDATE documents SET content_sha256 = {same}, fate = 'dropped' WHERE key = '{copy}'")
    before = fates(ledger)
    for erase in (True, False):
        with refused("data.ambiguous_id", InputError, documents=2, id="3") as said:
            select_documents_by_name(ledger, ["3"], list_removable_fates(erase))
        assert all(f"{key} (source " in str(said.value) for key in (first, second))
    home = ["-w", str(workspace.root)]
    done = factory("data", "remove", "--document", "3", "--erase", "--yes", *home)
    assert done.returncode == 2 and "2 documents have the id '3'" in done.stderr and first in done.stderr
    assert fates(ledger) == before
    assert select_documents_by_name(ledger, [first, "4"], list_removable_fates(True)).names == (first, copy, other)
    assert select_documents_by_name(ledger, ["4"], list_removable_fates(False)).names == (other,)


def test_an_undo_restores_the_removed_documents(copied: Copy) -> None:
    workspace, ledger = copied()
    before = fates(ledger)
    licences = count_tokens_by_licence(ledger, 3)
    with ledger.begin() as tx:
        quarantined = "UPDATE documents SET fate = 'quarantined', rule = '{}', detail = '{}' WHERE key = '{}'"
        for (key, *_), rule, detail in zip(
            [row for row in before if row[1] == "train"], ("person", "loss_doctor"), ("by ann", "anomaly 1: bad data")
        ):
            tx.exec_driver_sql(quarantined.format(rule, detail, key))
    before = fates(ledger)
    found = plan_removal(ledger, select_documents_by_label(ledger, "license", ["MIT", "none"]))
    assert set(found.fates) == {"train", "held_out", "quarantined"} and found.releases[1][1] is True
    removal = apply_removal(ledger, found, "ann")
    assert removal.documents == sum(found.fates.values()) == sum(row[1] == "removed" for row in fates(ledger))
    assert count_tokens_by_licence(ledger, 3) == licences, "what a release was trained on does not change"
    undo_removal(ledger, removal.number, "ann")
    assert fates(ledger) == before


def test_removed_held_out_documents_are_no_longer_measured(copied: Copy) -> None:
    _, ledger = copied()
    suite = build_suite(ledger, EvalPolicy(), "t")
    gone = suite.documents[0]
    found = outlook(ledger, gone.key)
    assert found.fates == {"held_out": 1} and not found.releases and found.cost.first_step is None
    assert "data.measured_without" in codes(found.format_lines())
    apply_removal(ledger, found, "ann")
    after = build_suite(ledger, EvalPolicy(), "t")
    assert after.sha256 != suite.sha256 and {d.key for d in suite.documents} - {d.key for d in after.documents} == {
        gone.key
    }


def shard_of(workspace: Workspace, rows: list[dict[str, Any]], name: str = "later.jsonl") -> Path:
    path = workspace.inbox / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def raw_rows(workspace: Workspace) -> dict[str, dict[str, Any]]:
    lines = [line for path in sorted((workspace.shards / "raw").iterdir()) for line in path.read_text().splitlines()]
    return {row["id"]: row for row in map(json.loads, lines)}


def test_copies_and_later_documents_of_a_removed_source_are_refused(copied: Copy) -> None:
    workspace, ledger = copied()
    rows = raw_rows(workspace)
    named = one(ledger, "fate = 'train' AND domain = 'docs'")
    source = one(ledger, "fate = 'train' AND domain = 'chat'")["source"]
    apply_removal(ledger, outlook(ledger, named["key"]), "ann", "private")
    apply_removal(
        ledger, plan_removal(ledger, select_documents_by_label(ledger, "source", [source])), "ann", "no contract"
    )
    copy = {"text": rows[named["id"]]["text"], "domain": "docs", "source": "elsewhere", "license": "MIT"}
    near = copy | {"text": copy["text"].replace(".", "!", 1).lower().capitalize() + " Thanks."}
    fresh = {
        "text": " ".join(f"quite new word{i}" for i in range(60)),
        "domain": "docs",
        "source": "s1",
        "license": "MIT",
    }
    report = ingest_shard(
        Plant(workspace, ledger), shard_of(workspace, [copy, near, fresh | {"source": source}, fresh])
    )
    found = ledger.read("SELECT * FROM documents WHERE shard = :shard ORDER BY row", shard=report.sha256)
    assert [(row["fate"], row["rule"]) for row in found] == [("dropped", "removed")] * 3 + [("train", None)]
    assert found[0]["detail"].endswith("(the content is the same)") and found[0]["matched"] == named["key"]
    assert found[2]["detail"].endswith(f"source {source!r} (removal 2: no contract)")
    undo_removal(ledger, 2, "ann")
    again = {"text": " ".join(f"another novel term{i}" for i in range(60)), "domain": "chat", "source": source}
    report = ingest_shard(Plant(workspace, ledger), shard_of(workspace, [again], "again.jsonl"))
    assert report.counts["train"] == 1


def test_a_new_shard_with_only_removed_documents_is_left_out_of_data_plans(copied: Copy) -> None:
    workspace, ledger = copied()
    fresh = [{"text": " ".join(f"w{n}x{i}" for i in range(60)), "domain": "docs", "source": "new"} for n in range(4)]
    report = ingest_shard(Plant(workspace, ledger), shard_of(workspace, fresh))
    (shard,) = ledger.read("SELECT id FROM token_shards WHERE shard = :shard", shard=report.sha256)
    apply_removal(ledger, plan_removal(ledger, select_documents_by_label(ledger, "source", ["new"])), "ann")
    plan = lambda: {
        one["id"]
        for one in read_data_plan(ledger, SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger), 5)))[
            "token_shards"
        ]
    }
    assert shard["id"] not in plan()
    undo_removal(ledger, 1, "ann")
    assert shard["id"] in plan()


def test_a_release_made_after_a_removal_from_segments_before_it_is_marked(copied: Copy) -> None:
    workspace, ledger = copied()
    key = trained_once(ledger)
    apply_removal(ledger, outlook(ledger, key), "ann")
    number = plan_anneal(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.exec_driver_sql("UPDATE segments SET state = 'done' WHERE id = ?", (number,))
        tx.exec_driver_sql(
            "INSERT INTO checkpoints SELECT 'another', ?, step, path, created_at FROM checkpoints WHERE segment = 3",
            (number,),
        )
    release_of(ledger, number)
    said = the(mark_releases_trained_on_removed_documents(ledger), "data.release_saw_removed").data
    assert (said["release"], said["documents"]) == (2, 1) and said["removal"].startswith("removal 1 ")
    assert mark_releases_trained_on_removed_documents(ledger) == [] and [
        mark["release"] for mark in list_releases_with_removed_data(ledger)
    ] == [1, 2]


def test_a_refused_removal_changes_nothing(copied: Copy) -> None:
    workspace, ledger = copied()
    before = fates(ledger)
    for words, says in (
        ("--document nobody", "no document 'nobody' was ever ingested"),
        ("--source code/0-0x", "no document has the source 'code/0-0x'; did you mean"),
        ("--license MTI", "no document has the licence 'MTI'; did you mean 'MIT'"),
        ("--document a --source b", "exactly one of --document ID"),
        ("", "exactly one of --document ID"),
        ("--license MIT", "add '--yes'"),
    ):
        done = command_here("data", "remove", *words.split(), home=workspace)
        assert isinstance(done.exception, InputError) and says in str(done.exception)
    assert fates(ledger) == before and list_removals(ledger) == []


def test_the_commands_remove_a_document_and_show_the_removal(copied: Copy) -> None:
    workspace, ledger = copied()
    run = partial(command_here, home=workspace)
    key = trained_once(ledger)
    dry = run("data", "remove", "--document", key, "--dry-run", "--json")
    assert (
        json.loads(dry.stdout)["releases"] == [{"release": 1, "documents": 1, "exact": True}]
        and list_removals(ledger) == []
    )
    done = run("data", "remove", "--document", key, "--yes", "--why", "asked")
    assert "the trunk was first" in done.stdout and "removal 1 (" in done.stdout, done.output
    status = run("status").stdout
    assert "1 document removed by 1 removal" in status and "release 1 was trained on 1 " in status
    shown = run("provenance", "--document", key).stdout
    assert (
        "segment 2 was trained on this" in shown
        and "removed   by " in shown
        and "releases  1 (1 ×) trained on it" in shown
    )
    release = run("provenance", "--release", "1").stdout
    assert "MARKED: release 1 was trained on 1" in release and "(1 removed since)" in release
    listed = run("provenance", "--release", "1", "--documents").stdout.splitlines()
    assert {json.loads(line)["fate"] for line in listed} == {"train", "removed"}
    data = run("data", "list").stdout
    assert "licence  none" in data and "1 removed" in data and "removal  1 (1" in data
    assert estimate_retraining_cost(ledger, DocumentExposure(ledger, {})).first_step is None
    assert "1 document is put back" in run("data", "undo", "1").stdout


def test_mlflow_and_the_release_report_show_a_removal_of_training_data(workspace: Workspace, ledger: Ledger) -> None:
    add_shard(ledger)
    candidate = add_candidate(with_store(workspace), ledger)
    verdict = add_verdict(ledger, candidate)
    with ledger.begin() as tx:
        tx.execute(
            releases.insert().values(number=1, candidate=candidate, verdict=verdict, state="published", created_at=1.0)
        )
    tags = lambda: open_client(workspace).get_model_version("factory-lm", "1").tags
    register_candidate(Plant(workspace, ledger), candidate)
    assert "removed_data" not in tags() and "taken out" not in render_report(ledger, candidate)
    with ledger.begin() as tx:
        detail = {
            "by": "ann",
            "why": "",
            "column": "key",
            "names": ["k"],
            "documents": 1,
            "supervised_tokens": 9,
            "token_shards": [],
            "erase": False,
        }
        record_event(tx, REMOVED, Subject("removal", 1), detail)
        record_event(
            tx,
            RELEASE_MARKED,
            Subject("release", 1),
            {"anomaly": None, "removal": 1, "documents": ["k"], "count": 1, "exact": True},
        )
    reconcile(Plant(workspace, ledger))
    assert tags()["removed_data"] == "removal 1: 1 documents"
    assert str(describe_removed_training_data(list_releases_with_removed_data(ledger)[0])) in render_report(
        ledger, candidate
    )
    undo_removal(ledger, 1, "ann")
    reconcile(Plant(workspace, ledger))
    assert "removed_data" not in tags()


def test_documents_removed_before_the_first_step_do_not_hold_a_release_back(copied: Copy) -> None:
    """The advice of a verdict that holds for licences: take out, rewind, train again. Other documents share the token shard."""
    workspace, ledger = copied()
    rows = ledger.read("SELECT key, supervised_tokens FROM documents WHERE fate = 'train' ORDER BY key LIMIT 5")
    with ledger.begin() as tx:
        tx.execute(documents.update().values(license="MIT"))
        tx.execute(documents.update().where(documents.c.key.in_([row["key"] for row in rows])).values(license="Bad"))
    tokens = count_tokens_by_licence(ledger, 2)
    assert tokens["Bad"] == sum(row["supervised_tokens"] for row in rows) > 0
    assert command_here("data", "remove", "--license", "Bad", "--yes", home=workspace).exit_code == 0
    assert count_tokens_by_licence(ledger, 2) == tokens, "the trunk was trained on them"
    (workspace.root / "policies" / "gates" / "release.yaml").write_text("not_releasable_max: 0.0\n")
    said = lambda: next(line for line in releasable(Plant(workspace, ledger)) if line.name == "licences")
    assert said().ok is False and "'factory rewind 1'" in said().todo
    rewind_segment(ledger, 1, "ann", "")
    number = plan_trunk(Plant(workspace, ledger), 5)
    assert said().ok
    assert read_data_plan(ledger, SegmentRow.get(ledger, number))["masked"] == [row["key"] for row in rows]
    assert count_tokens_by_licence(ledger, number) == {"MIT": tokens["MIT"]}
    policy = DataPolicy.load(workspace.policy_path("data.yaml")).licences
    listed = list_shard_rows(ledger, number, policy, with_documents=False)
    assert {row["license"] for row in listed} == {"MIT"}
    assert sum(row["supervised_tokens"] for row in listed) == tokens["MIT"]
