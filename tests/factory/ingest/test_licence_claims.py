"""If one text has several licences, the strictest claim counts in every order of arrival, until a person settles the conflict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.data.licence_settlement import group_licence_conflicts, settle_licence
from factory.data.selecting import select_documents_by_label
from factory.ingest.chain import ShardReport
from factory.ingest.inbox import describe_shard
from factory.ingest.rules.licence_claims import find_licence_conflicts, find_strictest_licence
from factory.ingest.rules.policy import DataPolicy, LicencePermissions, LicenceRules
from factory.ledger.ledger import Ledger, documents
from tests.support.factory.command import command_here
from tests.support.factory.made_up_text import prose, texts, use_policy
from tests.support.messages import the

Ingest = Callable[..., ShardReport]
NC, FORBIDDEN = "CC-BY-NC-4.0", "proprietary"
POLICY = f"""
held_out: {{share: 0}}
tokenizer: {{vocab_size: 400}}
licences:
  known:
    MIT: {{train: true, release: true}}
    Apache-2.0: {{train: true, release: true}}
    {NC}: {{train: true, release: false}}
    {FORBIDDEN}: {{train: false, release: false}}
"""
TEXT = prose(7, 200)
NEAR = TEXT + " and one more sentence"


@pytest.fixture
def rules(workspace: Workspace, ingest: Ingest) -> LicenceRules:
    use_policy(workspace, POLICY)
    return DataPolicy.load(workspace.policy_path("data.yaml")).licences


def row(text: str, licence: str | None, name: str) -> dict[str, Any]:
    return {"id": name, "text": text, **({"license": licence} if licence else {})}


def shard(ingest: Ingest, licence: str | None, name: str, text: str = TEXT) -> ShardReport:
    """Ingest a shard with the text under a licence, among texts that no other shard has."""
    return ingest([*texts(100 * (1 + ord(name)), 3), row(text, licence, name)], f"{name}.jsonl")


def states(ledger: Ledger) -> dict[str, tuple[str, str | None]]:
    """Fate and rule of each row of the text, by id."""
    rows = ledger.read("SELECT id, fate, rule FROM documents WHERE length(id) = 1")
    return {one["id"]: (one["fate"], one["rule"]) for one in rows}


@pytest.mark.parametrize(("order", "copy"), [(("MIT", NC), TEXT), ((NC, "MIT"), NEAR), ((None, "MIT"), TEXT)], ids=str)
def test_the_strictest_claim_counts_in_either_order(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, rules: LicenceRules, order: Sequence[str | None], copy: str
) -> None:
    shard(ingest, order[0], "a")
    report = shard(ingest, order[1], "b", copy)
    assert states(ledger)["b"] == ("dropped", "exact_duplicate" if copy is TEXT else "near_duplicate")
    strict = next(name for name in order if name != "MIT") or ""
    (one,) = find_licence_conflicts(ledger)
    assert one.find_effective_licence(rules) == strict and not one.is_settled and one.fate == "train"
    assert [(claim.license, claim.shard) for claim in one.claims] == [
        (order[0] or "", "a.jsonl"),
        (order[1] or "", "b.jsonl"),
    ]
    # said where it arrives, in the list, and of the document: with both shards
    assert report.counts["other_licences"] == {"a.jsonl": 1}
    said = describe_shard(report.name, report.state, report.rows, report.counts, report.reason)
    assert the(said.data["parts"], "ingest.other_licence").data == {"texts": 1, "shard": "a.jsonl"}
    assert the(said.data["parts"], "ingest.strictest_licence").data["shard"] == "b.jsonl"
    shown = command_here("data", "claims", home=workspace).stdout
    assert f"{order[0] or 'none'} in a.jsonl, {order[1] or 'none'} in b.jsonl" in shown
    assert f"{strict or 'none'}" in shown and "allows training" in shown and one.key in shown
    assert "'factory data settle LICENCE" in shown
    assert "1 document has several licences" in command_here("data", "list", home=workspace).stdout
    of_document = command_here("provenance", "--document", "a", home=workspace).stdout
    for claim in one.claims:
        assert f"claimed   {claim.license or 'no licence'} in {claim.shard} ({claim.key})" in of_document
    assert json.loads(command_here("data", "claims", "--json", home=workspace).stdout)[0]["release"] is False


@pytest.mark.parametrize("names", [("MIT", "Apache-2.0", NC), (NC, "MIT", "Apache-2.0")], ids=str)
def test_three_claims_give_the_same_answer_in_any_order(
    ledger: Ledger, ingest: Ingest, rules: LicenceRules, names: Sequence[str]
) -> None:
    ingest([row(TEXT, names[0], "a"), row(NEAR, names[1], "b"), row(TEXT, names[2], "c")], "one.jsonl")
    (one,) = find_licence_conflicts(ledger)
    assert one.find_effective_licence(rules) == NC and {claim.shard for claim in one.claims} == {"one.jsonl"}
    assert ledger.read("SELECT counts FROM shards")[0]["counts"]["other_licences"] == {"one.jsonl": 2}


def test_the_first_of_equally_strict_claims_counts(ledger: Ledger, ingest: Ingest, rules: LicenceRules) -> None:
    shard(ingest, "MIT", "a")
    shard(ingest, "Apache-2.0", "b")
    shard(ingest, "MIT", "c")
    (one,) = find_licence_conflicts(ledger)
    assert one.find_effective_licence(rules) == "MIT" and len(one.claims) == 2
    assert find_strictest_licence(["MIT", "Y", "X"], rules) == "X"  # neither order nor number of claims counts
    # the answer is the policy's as it is now
    now = LicenceRules(known=rules.known | {"Apache-2.0": LicencePermissions(train=True, release=False)})
    assert one.find_effective_licence(now) == "Apache-2.0"


@pytest.mark.parametrize("copy", [TEXT, NEAR], ids=["exact", "near"])
def test_a_text_under_a_forbidding_licence_bars_later_copies(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, rules: LicenceRules, copy: str
) -> None:
    assert ingest([row(TEXT, FORBIDDEN, "a")], "a.jsonl").counts["dropped"] == {"licence": 1}  # a shard of nothing else
    report = shard(ingest, "MIT", "b", copy)
    assert states(ledger) == {"a": ("dropped", "licence"), "b": ("dropped", "licence")}
    assert report.counts["other_licences"] == {"a.jsonl": 1}
    (one,) = find_licence_conflicts(ledger)
    assert one.find_effective_licence(rules) == FORBIDDEN and one.id == "a"
    assert "does not allow training" in command_here("data", "claims", home=workspace).stdout
    # a person says that the first was wrong: what comes from then on is accepted
    settle_licence(ledger, "MIT", ["b"], [], "ann", "the author wrote to us")
    shard(ingest, "MIT", "c", copy)
    assert states(ledger)["c"] == ("train", None)
    # ... and the policy can, too
    use_policy(workspace, POLICY.replace("{train: false", "{train: true"))
    shard(ingest, FORBIDDEN, "d", prose(8, 200))
    assert states(ledger)["d"] == ("train", None)


def test_a_forbidding_licence_bars_earlier_copies_in_the_same_shard(
    ledger: Ledger, ingest: Ingest, rules: LicenceRules
) -> None:
    ingest([row(TEXT, "MIT", "a"), *texts(50, 3), row(NEAR, FORBIDDEN, "b"), row(TEXT, NC, "c")], "one.jsonl")
    assert states(ledger) == dict.fromkeys("abc", ("dropped", "licence"))
    (one,) = find_licence_conflicts(ledger)
    assert one.id == "b" and {claim.license for claim in one.claims} == {FORBIDDEN, "MIT", NC}


def test_a_later_forbidding_claim_flags_the_document(ledger: Ledger, ingest: Ingest, rules: LicenceRules) -> None:
    shard(ingest, "MIT", "a")
    shard(ingest, FORBIDDEN, "b", NEAR)
    shard(ingest, "MIT", "c")
    assert states(ledger) == {"a": ("train", None), "b": ("dropped", "licence"), "c": ("dropped", "exact_duplicate")}
    (group,) = group_licence_conflicts(ledger, rules)
    assert (group["counts_as"], group["train"], group["release"]) == (FORBIDDEN, False, False)


def test_a_settled_licence_counts_until_another_claim_comes(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, rules: LicenceRules
) -> None:
    shard(ingest, "MIT", "a")
    shard(ingest, NC, "b", NEAR)
    for words, message in (
        (["GPL", "--document", "a"], "the licence 'GPL'"),
        (["MIT", "--document", "nothing"], "no document 'nothing' was ever ingested"),
        (["MIT", "--shard", "z.jsonl"], "the licences of z.jsonl are not in conflict"),
        (["MIT"], "--document ID or --shard NAME"),
    ):
        done = command_here("data", "settle", *words, home=workspace)
        assert isinstance(done.exception, InputError) and message in str(done.exception), done.exception
    assert not find_licence_conflicts(ledger)[0].is_settled
    done = command_here("data", "settle", "MIT", "--shard", "b.jsonl", "--why", "b mislabels all", home=workspace)
    assert "1 document has the licence MIT" in done.stdout
    (one,) = find_licence_conflicts(ledger)
    assert (
        one.is_settled
        and one.find_effective_licence(rules) == "MIT"
        and [claim.is_set_aside for claim in one.claims] == [False, True]
    )
    assert "settled as MIT" in command_here("data", "claims", home=workspace).stdout
    (event,) = ledger.read("SELECT detail FROM events WHERE kind = 'licence_settled'")
    assert (event["detail"]["why"], event["detail"]["license"]) == ("b mislabels all", "MIT")
    shard(ingest, NC, "c")  # somebody else says so too
    (one,) = find_licence_conflicts(ledger)
    assert not one.is_settled and one.find_effective_licence(rules) == NC
    settle_licence(ledger, NC, [], ["c.jsonl"], "ann", "")
    (one,) = find_licence_conflicts(ledger)
    assert (
        one.is_settled
        and one.find_effective_licence(rules) == NC
        and [claim.is_set_aside for claim in one.claims] == [True, False, False]
    )


def test_a_removal_by_licence_includes_texts_whose_copies_came_under_it(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, rules: LicenceRules
) -> None:
    shard(ingest, "MIT", "a")
    shard(ingest, NC, "b", NEAR)
    (part,) = select_documents_by_label(ledger, "license", [NC]).build_batched_sql_conditions()
    taken = ledger.select_rows(sa.select(documents.c.id).where(part, documents.c.fate == "train"))
    assert [row["id"] for row in taken] == ["a"]
    (part,) = select_documents_by_label(ledger, "license", ["MIT"]).build_batched_sql_conditions()
    assert len(ledger.select_rows(sa.select(documents.c.id).where(part, documents.c.fate == "train"))) == 7
    done = command_here("data", "remove", "--license", NC, "--yes", home=workspace)
    assert "1 document: 1 to train on" in done.stdout, done.stdout
    assert states(ledger)["a"][0] == "removed"
    command_here("data", "undo", "1", home=workspace)
    assert states(ledger)["a"] == ("train", None)


@pytest.mark.parametrize("name", ["PROPRIETARY\n", "(MIT) and Proprietary"])
def test_no_spelling_of_a_forbidding_licence_allows_training(
    ledger: Ledger, ingest: Ingest, rules: LicenceRules, name: str
) -> None:
    shard(ingest, name, "a")
    assert states(ledger)["a"] == ("dropped", "licence")
    shard(ingest, "MIT", "b")  # and its copies are barred
    assert states(ledger)["b"] == ("dropped", "licence")


def test_spellings_of_one_licence_do_not_conflict(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, rules: LicenceRules
) -> None:
    shard(ingest, "MIT", "a")
    assert "other_licences" not in shard(ingest, " mit", "b").counts
    assert find_licence_conflicts(ledger) == []
    shard(ingest, NC, "c")
    command_here("data", "settle", "Mit", "--document", "a", home=workspace)
    (one,) = find_licence_conflicts(ledger)
    assert (
        one.is_settled
        and one.find_effective_licence(rules) == "MIT"
        and [c.is_set_aside for c in one.claims] == [False, True, False]
    )
    command_here("data", "remove", "--license", NC, "--yes", home=workspace)
    shard(ingest, NC.lower(), "d", prose(9, 200))  # refused like the other spelling
    assert states(ledger)["d"] == ("dropped", "removed")


def test_a_near_copy_of_a_barred_document_is_barred(ledger: Ledger, ingest: Ingest, rules: LicenceRules) -> None:
    words = TEXT.split()
    second = [f"changed{n}" if n in (20, 65, 110, 155) else word for n, word in enumerate(words)]
    third = [f"again{n}" if n in (40, 85, 130, 175) else word for n, word in enumerate(second)]
    shard(ingest, "MIT", "a")
    shard(ingest, FORBIDDEN, "b", " ".join(second))
    shard(ingest, "MIT", "c", " ".join(third))  # near to b, and no more to a
    assert states(ledger) == {"a": ("train", None), "b": ("dropped", "licence"), "c": ("dropped", "licence")}
    by_key = {one.key: one.id for one in find_licence_conflicts(ledger)}
    assert sorted(by_key.values()) == ["a", "b"]
    # of which a person may let in the one and the other at once
    settle_licence(ledger, "MIT", ["b"], [], "ann", "")
    shard(ingest, "MIT", "d", " ".join(third))
    assert states(ledger)["d"] == ("train", None) and all(one.is_settled for one in find_licence_conflicts(ledger))
    # two words that contradict one another about the row between them: the strictest counts
    settle_licence(ledger, FORBIDDEN, ["a"], [], "ann", "")
    settle_licence(ledger, "MIT", ["c"], [], "ann", "")
    assert {one.id: one.find_effective_licence(rules) for one in find_licence_conflicts(ledger)}["a"] == FORBIDDEN


def test_a_claim_about_a_removed_document_counts_after_an_undo(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, rules: LicenceRules
) -> None:
    shard(ingest, "MIT", "a")
    command_here("data", "remove", "--document", "a", "--yes", home=workspace)
    shard(ingest, NC, "b")
    assert states(ledger) == {"a": ("removed", "removal 1 of train"), "b": ("dropped", "removed")}
    command_here("data", "undo", "1", home=workspace)
    (one,) = find_licence_conflicts(ledger)
    assert one.fate == "train" and one.find_effective_licence(rules) == NC


def test_a_text_that_a_person_allowed_can_be_barred_again(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, rules: LicenceRules
) -> None:
    shard(ingest, FORBIDDEN, "a")
    shard(ingest, "MIT", "b")
    settle_licence(ledger, "MIT", ["a"], [], "ann", "the author wrote to us")
    shard(ingest, "MIT", "c")
    by_id = lambda: {one.id: one.find_effective_licence(rules) for one in find_licence_conflicts(ledger)}
    assert states(ledger)["c"] == ("train", None) and by_id() == {"a": "MIT", "c": "MIT"}
    settle_licence(ledger, FORBIDDEN, ["a"], [], "ann", "it was a forgery")
    assert by_id() == {"a": FORBIDDEN, "c": FORBIDDEN}
