"""Documents get another domain, source, licence or group in place: halves, plans, licences, refusals, and a restore."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.backups.backups import make_or_open_ledger
from factory.core.errors import InputError, WorkspaceError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.data.exposure import DocumentExposure
from factory.data.licence_settlement import settle_licence
from factory.data.relabelling import DocumentFilter, NewLabels, apply_relabelling, plan_relabelling
from factory.evals.policy import EvalPolicy
from factory.evals.suite import build_suite
from factory.gates.release.trained_licences import compute_unreleasable_shares, count_tokens_by_licence
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ingest.inbox import ingest_path
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.ledger import Ledger, agent_runs, documents, held_out, record_event, relabels
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.writing import insert_row
from factory.repairs.lost_ledger import restore_ledger
from factory.repairs.token_shards import rebuild_token_shard
from factory.training.planning import plan_trunk, read_data_plan, read_last_checkpoint
from tests.support.factory.command import command_here
from tests.support.factory.made_up_text import prose, use_policy
from tests.support.messages import codes, refused, the
from tests.support.plants.trained_plant import train_trunk

Copy = Callable[[], tuple[Workspace, Ledger]]
POLICY = "held_out: {share: 1.0e-9}\ntokenizer: {vocab_size: 400}\n"


@pytest.fixture
def plant(workspace: Workspace) -> tuple[Workspace, Ledger]:
    use_policy(workspace, POLICY)
    return workspace, make_or_open_ledger(workspace)


def ingest(plant: tuple[Workspace, Ledger], rows: list[dict[str, Any]], name: str) -> ShardReport:
    path = plant[0].inbox / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ingest_shard(Plant(*plant), path, workers=0)


def reviews(first: int, count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"text": prose(n, 40), "source": "reviews", "domain": "reviews", **more} for n in range(first, first + count)
    ]


def do(plant: tuple[Workspace, Ledger], chosen: DocumentFilter, change: NewLabels) -> list[str]:
    found = plan_relabelling(Plant(*plant), chosen, change)
    apply_relabelling(Plant(*plant), found, "ann", "as it should be")
    return found.lines


def halves(ledger: Ledger) -> dict[str, bool]:
    return {row["key"]: row["sealed"] for row in ledger.select_rows(sa.select(held_out))}


def as_one_group(ledger: Ledger, sealed: bool) -> None:
    """Make the ledger as an older factory left it: every document is of one source and in one half."""
    with ledger.begin() as tx:
        tx.execute(documents.update().values(group_key="reviews"))
        tx.execute(held_out.update().values(group_key="reviews", sealed=sealed))


def test_one_large_group_becomes_documents_in_both_halves(plant: tuple[Workspace, Ledger]) -> None:
    """Nothing has read the 16 held-out documents, all of which are in the dev half before the relabel."""
    ledger = plant[1]
    ingest(plant, reviews(0, 80), "a.jsonl")
    as_one_group(ledger, sealed=False)
    assert build_suite(ledger, EvalPolicy(), "t").documents == ()
    said = do(plant, DocumentFilter(domain=["reviews"]), NewLabels(group="document"))
    fates = ["16 held out", "64 to train on"]
    assert the(said, "data.relabels").data == {"changed": 80, "selected": 80, "fates": fates}
    assert the(said, "data.halves").data == {"groups": 16, "dealt": 16, "kept": 0}
    assert Counter(halves(ledger).values()) == {True: 8, False: 8}
    suite = build_suite(ledger, EvalPolicy(), "t")
    assert len({one.cluster for one in suite.documents}) == 8 and {one.cluster for one in suite.dev} == {
        one.key for one in suite.dev
    }
    assert {row["group_key"] for row in ledger.select_rows(sa.select(documents.c.group_key))} == {None}
    (row,) = ledger.select_rows(sa.select(relabels))
    assert (row["who"], row["why"], row["change"]) == ("ann", "as it should be", {"group": "document"})
    assert row["filter"] == {"domain": ["reviews"]} and row["counts"]["documents"] == 80
    with refused("data.same_labels", InputError, documents=80):
        plan_relabelling(Plant(*plant), DocumentFilter(domain=["reviews"]), NewLabels(group="none"))


def read(ledger: Ledger, at: float | None = None) -> None:
    """Record an agent's run, which may have read the held-out documents. ``at``: the time of the record."""
    values = {
        "agent": "a",
        "asked": "",
        "base_commit": "c",
        "profile": 1,
        "state": "nothing",
        "created_at": time.time() if at is None else at,
    }
    with ledger.begin() as tx:
        number = insert_row(tx, agent_runs, **values)
        record_event(tx, "agent_began", Subject("agent_run", number), {"agent": "a"})


@pytest.mark.parametrize(("sealed", "at"), [(True, 1e11), (False, 1.0)])  # whatever the clock says
def test_read_documents_keep_their_half_and_unread_ones_fill_the_other_half(
    plant: tuple[Workspace, Ledger], sealed: bool, at: float | None
) -> None:
    ledger = plant[1]
    ingest(plant, reviews(0, 20), "a.jsonl")
    before = set(halves(ledger))
    read(ledger, at)
    ingest(plant, reviews(100, 20), "b.jsonl")
    as_one_group(ledger, sealed)
    do(plant, DocumentFilter(source=["reviews"]), NewLabels(group="document"))
    after = halves(ledger)
    assert len(before) == 10 and len(after) == 16
    assert {after[key] for key in before} == {sealed} and {after[key] for key in after.keys() - before} == {not sealed}


def test_a_joined_group_is_in_one_half_and_not_sealed_if_a_dev_document_was_read(
    plant: tuple[Workspace, Ledger],
) -> None:
    ledger = plant[1]
    ingest(plant, reviews(0, 40), "a.jsonl")
    assert Counter(halves(ledger).values()) == {True: 8, False: 8}
    read(ledger)
    do(plant, DocumentFilter(document=sorted(halves(ledger))), NewLabels(source="shop", group="source"))
    assert set(halves(ledger).values()) == {False}
    assert {row["group_key"] for row in ledger.select_rows(sa.select(held_out.c.group_key))} == {"shop"}


def test_a_group_with_a_training_document_is_not_held_out_as_a_whole(plant: tuple[Workspace, Ledger]) -> None:
    """Held-out documents stay groups of their own in their halves; later documents of the group are trained on."""
    workspace, ledger = plant
    ingest(plant, reviews(0, 40), "a.jsonl")
    before = halves(ledger)
    do(plant, DocumentFilter(domain=["reviews"]), NewLabels(group="source"))
    assert halves(ledger) == before
    assert all(row["group_key"] == row["key"] for row in ledger.select_rows(sa.select(held_out)))
    use_policy(workspace, POLICY + "domains: {default: {group: source}}\n")
    assert ingest(plant, reviews(100, 40), "b.jsonl").counts["train"] == 40


def test_a_group_is_made_of_recorded_facts_alone(plant: tuple[Workspace, Ledger]) -> None:
    ledger = plant[1]
    ingest(plant, reviews(0, 40), "a.jsonl")
    with refused("data.no_grouping_key", InputError, documents=40, key="url"):
        plan_relabelling(Plant(*plant), DocumentFilter(domain=["reviews"]), NewLabels(group="url-host"))
    ingest(plant, [row | {"url": f"https://h{n % 10}.org/{n}"} for n, row in enumerate(reviews(100, 40))], "b.jsonl")
    do(plant, DocumentFilter(shard=["b.jsonl"]), NewLabels(group="url-host"))
    d = documents.c
    named = Counter(row["group_key"] for row in ledger.select_rows(sa.select(d.group_key)))
    assert named == {None: 40, **{f"url-host:h{n}.org": 4 for n in range(10)}}
    for name in named.keys() - {None}:
        assert (
            len({row["sealed"] for row in ledger.select_rows(sa.select(held_out).where(held_out.c.group_key == name))})
            <= 1
        )
    do(plant, DocumentFilter(shard=["a.jsonl"]), NewLabels(group="path"))
    assert (
        len({row["group_key"] for row in ledger.select_rows(sa.select(d.group_key).where(d.group_key.like("path:%")))})
        == 1
    )


def test_a_group_named_by_its_source_gets_the_new_name_and_keeps_its_half(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    use_policy(workspace, POLICY + "domains: {default: {group: source}}\n")
    ingest(plant, [row | {"source": f"s{n % 20}"} for n, row in enumerate(reviews(0, 100))], "a.jsonl")
    before = {row["group_key"]: row["sealed"] for row in ledger.select_rows(sa.select(held_out))}
    read(ledger)
    name = next(iter(before))
    do(plant, DocumentFilter(source=[name]), NewLabels(source="the right name"))
    after = {row["group_key"]: row["sealed"] for row in ledger.select_rows(sa.select(held_out))}
    assert after == {"the right name" if old == name else old: half for old, half in before.items()}
    assert ledger.read("SELECT COUNT(*) AS n FROM documents WHERE source = :name", name=name)[0]["n"] == 0


def test_a_filter_by_shard_accepts_the_name_of_a_file_or_of_its_parts(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    use_policy(workspace, POLICY + "limits: {max_rows: 30}\n")
    (workspace.root / "a.json").write_text(json.dumps(reviews(0, 60)))
    assert len(ingest_path(Plant(workspace, ledger), workspace.root / "a.json")) == 2
    ingest(plant, reviews(100, 20, license=None), "b.jsonl")
    (first, *_) = do(plant, DocumentFilter(shard=["a.json"]), NewLabels(license="MIT"))
    assert (first.data["changed"], first.data["selected"]) == (60, 60)
    near = "; did you mean 'a.json'?"
    with refused("data.no_document_has", InputError, noun="shard", name="c.json", near=near):
        plan_relabelling(Plant(*plant), DocumentFilter(shard=["c.json"]), NewLabels(license="MIT"))
    with refused("data.same_labels", InputError, documents=30):
        plan_relabelling(Plant(*plant), DocumentFilter(shard=["a.json#2.jsonl.zst"]), NewLabels(license="MIT"))
    (workspace.root / "c.jsonl").write_text(
        "".join(json.dumps(row | {"license": "BSD"}) + "\n" for row in reviews(0, 5))
    )
    ingest_path(Plant(workspace, ledger), workspace.root / "c.jsonl")
    assert settle_licence(ledger, "MIT", [], ["a.json"], "ann", "")


def test_a_new_source_renames_the_conversation_groups_within_it(plant: tuple[Workspace, Ledger]) -> None:
    """Later documents of a held-out conversation come under the right source: they are held out too, and never trained on."""
    workspace, ledger = plant
    use_policy(workspace, POLICY + "domains: {default: {group: conversation}}\n")
    ingest(plant, [row | {"conversation_id": f"c{n % 40}"} for n, row in enumerate(reviews(0, 80))], "a.jsonl")
    before = {row["group_key"]: row["sealed"] for row in ledger.select_rows(sa.select(held_out))}
    assert len(before) == 16 and all(one.startswith("conversation:reviews/c") for one in before)
    read(ledger)
    do(plant, DocumentFilter(source=["reviews"]), NewLabels(source="shop"))
    after = {row["group_key"]: row["sealed"] for row in ledger.select_rows(sa.select(held_out))}
    assert after == {one.replace(":reviews/", ":shop/"): half for one, half in before.items()}
    more = [row | {"conversation_id": f"c{n}", "source": "shop"} for n, row in enumerate(reviews(200, 40))]
    assert ingest(plant, more, "b.jsonl").counts["held_out"] == 16


def test_an_impossible_or_removed_name_is_refused(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    ingest(plant, [row | {"source": "gone"} for row in reviews(0, 6)], "a.jsonl")
    ingest(plant, reviews(10, 6, license="CC-BY-NC-4.0"), "b.jsonl")
    ingest(plant, reviews(20, 6, license="MIT"), "c.jsonl")
    remove = lambda *words: command_here("data", "remove", *words, "--yes", home=workspace)
    assert [remove("--source", "gone").exit_code, remove("--license", "CC-BY-NC-4.0").exit_code] == [0, 0]
    cases: tuple[tuple[NewLabels, str, dict[str, Any]], ...] = (
        (NewLabels(source="gone"), "data.removed_name", {"noun": "source", "name": "gone", "removal": 1}),
        (
            NewLabels(license="cc by-nc-4.0"),
            "data.removed_name",
            {"noun": "licence", "name": "cc by-nc-4.0", "removal": 2},
        ),
        (NewLabels(source="a\x1b[31m"), "data.unusable_name", {"label": "source", "limit": 1000}),
        (NewLabels(license="x" * 1001), "data.unusable_name", {"label": "license", "limit": 1000}),
    )
    for change, code, data in cases:
        with refused(code, InputError, **data):
            plan_relabelling(Plant(*plant), DocumentFilter(license=["MIT"]), change)
    assert (
        plan_relabelling(Plant(*plant), DocumentFilter(license=["MIT"]), NewLabels(source="", license="none")).selected
        == 6
    )


def test_none_blank_and_missing_licences_mean_no_licence(plant: tuple[Workspace, Ledger]) -> None:
    ledger = plant[1]
    ingest(plant, reviews(0, 8, license="MIT"), "a.jsonl")
    do(plant, DocumentFilter(license=["MIT"]), NewLabels(license=" "))
    assert {row["license"] for row in ledger.select_rows(sa.select(documents.c.license))} == {None}
    do(plant, DocumentFilter(license=["none"]), NewLabels(license="MIT"))
    with ledger.begin() as tx:  # as an older factory may have left it
        tx.execute(documents.update().values(license=""))
    assert plan_relabelling(Plant(*plant), DocumentFilter(license=["none"]), NewLabels(license="MIT")).selected == 8


def test_a_licence_counts_at_the_release_gate_at_once(copied: Copy) -> None:
    workspace, ledger = copied()
    rules = DataPolicy.load(workspace.policy_path("data.yaml")).licences
    held_back = lambda: compute_unreleasable_shares(rules, count_tokens_by_licence(ledger, 3, rules))
    assert set(held_back()) == {"no licence"}
    do((workspace, ledger), DocumentFilter(license=["none"], domain=["code"]), NewLabels(license="MIT"))
    assert held_back() == {}
    assert {row["releasable"] for row in ledger.read("SELECT releasable FROM documents WHERE fate <> 'dropped'")} == {
        True
    }
    with refused("data.licence_forbids", InputError, licence="proprietary"):
        plan_relabelling(Plant(workspace, ledger), DocumentFilter(license=["MIT"]), NewLabels(license="proprietary"))


def test_later_segments_have_the_new_domain_and_older_ones_are_replayed_unchanged(
    copied: Copy,
) -> None:
    """The trunk has seen the documents; it continues from its checkpoint."""
    workspace, ledger = copied()
    trained = ledger.read(
        "SELECT key, token_shard FROM documents WHERE token_shard IS NOT NULL AND domain = 'docs' ORDER BY key"
    )
    part = trained[::2]
    exposure = lambda: DocumentExposure(
        ledger, {row["key"]: row["token_shard"] for row in trained}
    ).list_steps_by_document(SegmentRow.get(ledger, 2))
    before, plan = exposure(), read_data_plan(ledger, SegmentRow.get(ledger, 2))
    said = do((workspace, ledger), DocumentFilter(document=[row["key"] for row in part]), NewLabels(domain="law"))
    assert codes(said)[-1] == "data.order_begins_anew"
    assert exposure() == before and read_data_plan(ledger, SegmentRow.get(ledger, 2)) == plan
    count = lambda domain: sum(
        row["domains"].get(domain, {"documents": 0})["documents"]
        for row in ledger.read("SELECT domains FROM token_shards")
    )
    assert (count("law"), count("docs")) == (len(part), len(trained) - len(part))
    assert sum(row["domains"]["law"]["documents"] for row in ledger.read("SELECT domains FROM shards")) == len(part)
    number = train_trunk(workspace, ledger, 10)
    row = SegmentRow.get(ledger, number)
    assert row.state == "done" and (row.first_step, row.last_step) == (20, 30)
    moved = [one["moved"] for one in read_data_plan(ledger, row)["token_shards"]]
    assert len(moved) == 2 and all(list(one) == ["law"] for one in moved)
    state = json.loads((Path(read_last_checkpoint(ledger, number)["path"]) / "state.json").read_text())
    assert {"law/1", "docs/1"} <= state["sampler"]["streams"].keys()
    seen = DocumentExposure(ledger, {one["key"]: one["token_shard"] for one in part}).list_steps_by_document(row)
    assert seen and seen.keys() <= {one["key"] for one in part}
    # back again
    do((workspace, ledger), DocumentFilter(domain=["law"]), NewLabels(domain="docs"))
    again = read_data_plan(ledger, SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger), 5)))
    assert count("law") == 0 and all(list(one["moved"]) == ["docs"] for one in again["token_shards"])


def test_a_token_shard_is_made_again_after_a_relabel(copied: Copy) -> None:
    workspace, ledger = copied()
    do((workspace, ledger), DocumentFilter(domain=["docs"]), NewLabels(domain="law", source="x", license="CC0-1.0"))
    row = ledger.read("SELECT id, path FROM token_shards LIMIT 1")[0]
    with open(f"{row['path']}/tokens.bin", "r+b") as file:
        file.write(b"damage")
    assert rebuild_token_shard(Plant(workspace, ledger), row["id"]) == ""
    assert plan_trunk(Plant(workspace, ledger), 5)


def test_held_out_documents_get_the_new_domain_and_a_restored_ledger_has_it_too(
    plant: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = plant
    ingest(plant, reviews(0, 60) + reviews(100, 60, domain="notes"), "a.jsonl")
    (workspace.shards / "raw").mkdir(exist_ok=True)
    before = halves(ledger)
    do(plant, DocumentFilter(domain=["reviews"], source=["reviews"]), NewLabels(domain="law"))
    domains = lambda at: Counter(row["domain"] for row in at.select_rows(sa.select(held_out)))
    assert domains(ledger) == {"law": 16, "notes": 16} and halves(ledger) == before
    fates = ledger.read("SELECT key, domain, fate FROM documents ORDER BY key")
    assert {row["domain"] for row in fates} == {"law", "notes"}
    ledger.engine.dispose()
    (workspace.root / "ledger.db").unlink()
    restore_ledger(workspace.root, "", SILENT)
    again = Ledger.open(workspace.ledger_url, workspace.root)
    assert again.read("SELECT key, domain, fate FROM documents ORDER BY key") == fates
    assert domains(again) == {"law": 16, "notes": 16} and halves(again) == before
    assert len(again.select_rows(sa.select(relabels))) == 1


def test_a_domain_that_no_recipe_can_train_is_refused(copied: Copy) -> None:
    workspace, ledger = copied()
    path = workspace.root / "policies" / "recipes" / "tiny.yaml"
    path.write_text(
        path.read_text() + "\nmixture: {weights: {docs: 1.0}}\n"
        if "mixture:" not in path.read_text()
        else weights(path.read_text())
    )
    with refused("data.no_plan_left", InputError, recipe="tiny", domain="law"):
        plan_relabelling(Plant(workspace, ledger), DocumentFilter(domain=["docs"]), NewLabels(domain="law"))
    said = plan_relabelling(Plant(workspace, ledger), DocumentFilter(domain=["chat"]), NewLabels(domain="law")).lines
    assert the(said, "data.domain_without_weight").data == {"recipe": "tiny", "domain": "law"}


def weights(recipe: str) -> str:
    import yaml

    raw = yaml.safe_load(recipe)
    return yaml.safe_dump(raw | {"mixture": raw["mixture"] | {"weights": {"docs": 1.0}}})


def test_an_impossible_relabel_is_an_error_of_one_line(plant: tuple[Workspace, Ledger]) -> None:
    ingest(plant, reviews(0, 6), "a.jsonl")
    for words, code, name in (
        ("--to-domain law", "data.no_filter", None),
        ("--domain reviews", "data.no_change", None),
        ("--domain review --group none", "data.no_document_has", "review"),
        ("--shard b.jsonl --group none", "data.no_document_has", "b.jsonl"),
        ("--source revew --group none", "data.no_document_has", "revew"),
        ("--domain reviews --license none --to-domain All", "ingest.domain_name", "All"),
    ):
        done = command_here("data", "relabel", *words.split(), "--yes", home=plant[0])
        assert isinstance(done.exception, InputError) and "\n" not in str(done.exception)
        assert (done.exception.code, done.exception.data.get("name")) == (code, name)
    done = command_here("data", "relabel", "--domain", "reviews", "--group", "host", "--yes", home=plant[0])
    assert isinstance(done.exception, InputError) and "named 'host'" in str(done.exception)
    assert plant[1].select_rows(sa.select(relabels)) == []


def test_factory_data_relabel_needs_a_confirmation_and_a_stopped_daemon(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    ingest(plant, reviews(0, 30), "a.jsonl")
    as_one_group(ledger, sealed=True)
    words = ["data", "relabel", "--domain", "reviews", "--group", "document"]
    shown = command_here(*words, "--dry-run", home=workspace)
    assert shown.exit_code == 0, shown.output
    assert "30 of 30 selected" in shown.output and "(15 held out, 15 to train on)" in shown.output
    unsaid = command_here(*words, home=workspace)
    assert isinstance(unsaid.exception, InputError) and unsaid.exception.code == "options.not_confirmed"
    assert unsaid.exception.data["action"] == "relabel the documents"
    with workspace.hold_lock("model-loop"):
        held = command_here(*words, "--yes", home=workspace)
    assert isinstance(held.exception, WorkspaceError) and "stop it" in str(held.exception)
    assert ledger.select_rows(sa.select(relabels)) == [] and set(halves(ledger).values()) == {True}
    done = command_here(*words, "--yes", "--why", "one source", "--json", home=workspace)
    assert json.loads(done.output)["relabel"] == 1 and set(halves(ledger).values()) == {True, False}
    (event,) = ledger.read("SELECT detail FROM events WHERE kind = 'relabelled'")
    assert event["detail"]["why"] == "one source" and event["detail"]["held_out"] == 15
