"""Which documents are held out: by share, by source, and until a domain can be judged; never training documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from factory.core.workspace import Workspace
from factory.evals.policy import EvalPolicy
from factory.evals.suite import build_suite
from factory.ingest.chain import ShardReport
from factory.ingest.document import read_author_model
from factory.ingest.inbox import describe_shard
from factory.ingest.rules import held_out_split
from factory.ingest.rules.held_out_split import describe_grouping
from factory.ledger.ledger import Ledger, documents, held_out
from tests.support.factory.made_up_text import prose, texts, use_policy
from tests.support.messages import the

Ingest = Callable[..., ShardReport]


def test_a_document_that_a_model_wrote_is_never_held_out(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    use_policy(workspace, "held_out: {share: 0.5}\ndomains: {default: {group: source}}\n")
    made = [row | {"synthetic_by": "release 1 (weights 0123456789abcdef)"} for row in texts(0, 40)]
    assert ingest(made, "made.jsonl").counts == {
        "train": 40, "held_out": 0, "dropped": {}, "pii": 0, "pii_kinds": {}, "trimmed": 0,
        "not_releasable": {"MIT": {"documents": 40, "why": "unlisted"}},
    }  # fmt: skip
    # nor one of a source that is held out
    shared = [row | {"source": f"s{n}"} for n, row in enumerate(texts(500, 40))]
    mixed = [row | ({"synthetic_by": "a judge"} if n % 2 else {}) for n, row in enumerate(texts(900, 80))]
    for n, row in enumerate(mixed):
        row["source"] = shared[n // 2]["source"]
    assert ingest(mixed, "mixed.jsonl").counts["held_out"] >= 16
    rows = ledger.read("SELECT fate, detail FROM documents WHERE detail LIKE 'synthetic, by a judge%'")
    assert len(rows) == 40 and {row["fate"] for row in rows} == {"train"}


def test_the_name_of_a_model_that_wrote_a_document_is_stored_as_one_short_line(
    ledger: Ledger, ingest: Ingest, workspace: Workspace
) -> None:
    use_policy(workspace, "held_out: {share: 0}\n")
    names = ["judge\n  fate      train\x1b[31m; quarantined", " \n ", "y" * 999, "judge 1"]
    ingest([row | {"synthetic_by": name} for row, name in zip(texts(0, 4), names, strict=True)], "made.jsonl")
    rows = ledger.select_rows(sa.select(documents.c.detail).order_by(documents.c.row))
    one, two, three, four = [read_author_model(row["detail"]) for row in rows]
    assert one == "judge fate train\ufffd[31m, quarantined" and two is None and four == "judge 1"
    assert three is not None and 200 < len(three) <= 300


def test_other_documents_replace_those_that_share_words_with_training_data(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    use_policy(workspace, "held_out: {share: 0}\n")
    ingest(texts(0, 20, 200), "first.jsonl")
    use_policy(workspace, "held_out: {share: 1.0e-9}\n")
    said = lambda i: " ".join(prose(i // 4, 200).split()[:60]) if i % 4 == 0 else ""
    rows = [
        {
            "id": f"n{i}",
            "source": f"n{i}",
            "text": f"{prose(500 + i, 200)} {said(i)} {prose(700 + i, 200)}",
        }
        for i in range(80)
    ]
    assert ingest(rows, "second.jsonl").counts["held_out"] == 16
    assert halves(ledger) == {True: 8, False: 8}
    refused = ledger.select_rows(sa.select(documents.c.id).where(documents.c.detail.like("%cannot be held out%")))
    assert refused and all(int(row["id"][1:]) % 4 == 0 for row in refused)


def halves(ledger: Ledger) -> Counter[bool]:
    """How many held-out documents are in the sealed half, and how many are not."""
    rows = ledger.select_rows(sa.select(held_out.c.key, held_out.c.sealed))
    return Counter(row["sealed"] for row in rows)


def test_a_small_domain_is_held_out_until_it_can_be_judged(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """In each half, and at most half of the domain's documents; after that only by the share."""
    use_policy(workspace, "held_out: {share: 1.0e-9}\n")
    law = lambda first, count: [row | {"domain": "law"} for row in texts(first, count)]
    assert ingest(law(0, 1), "one.jsonl").counts["held_out"] == 0
    assert ingest(law(10, 11), "a.jsonl").counts["held_out"] == 6 and halves(ledger) == {True: 3, False: 3}
    assert ingest(law(30, 60), "b.jsonl").counts["held_out"] == 10
    assert halves(ledger) == {True: 8, False: 8}
    assert ingest(law(100, 40), "c.jsonl").counts["held_out"] == 0


def test_a_key_that_puts_a_domain_into_one_group_is_reported_with_the_remedy(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """A part of the group is held out; when other sources arrive, whole sources come first."""
    use_policy(workspace, "held_out: {share: 1.0e-9}\ndomains: {default: {group: source}}\n")
    one = [row | {"domain": "reviews", "source": "shop"} for row in texts(0, 60)]
    report = ingest(one, "one.jsonl")
    said = describe_shard(report.name, report.state, report.rows, report.counts, None)
    assert said.data["rows"] == 60 and the(said.data["parts"], "ingest.kept").data == {"train": 44, "held_out": 16}
    grouped = the(said.data["parts"], "held_out_split.single_documents")
    assert grouped.data == {"domain": "reviews", "kind": "source", "groups": 1, "documents": 60, "parts": 16}
    assert grouped.endswith("--domain reviews --group document'")
    assert halves(ledger) == {True: 8, False: 8}
    suite = build_suite(ledger, EvalPolicy(), "t")
    assert len(suite.documents) == 8 == len({one.cluster for one in suite.documents})
    others = [row | {"domain": "reviews", "source": f"s{number}"} for number, row in enumerate(texts(100, 60))]
    more = ingest(others, "more.jsonl")
    assert more.counts["held_out"] == 16 and halves(ledger) == {True: 16, False: 16} and "groups" not in more.counts
    assert (
        ingest([row | {"source": "shop", "domain": "reviews"} for row in texts(300, 20)], "b.jsonl").counts["held_out"]
        == 0
    )


def test_nothing_is_held_out_of_few_documents_of_one_source_and_that_is_reported(
    workspace: Workspace, ingest: Ingest
) -> None:
    use_policy(workspace, "held_out: {share: 1.0e-9}\ndomains: {default: {group: source}}\n")
    report = ingest([row | {"domain": "reviews", "source": "shop"} for row in texts(0, 3)], "one.jsonl")
    said = describe_shard(report.name, report.state, report.rows, report.counts, None).data["parts"][-1]
    assert said.code == "held_out_split.empty_half" and said.endswith("--domain reviews --group document'")
    assert said.data == {"domain": "reviews", "kind": "source", "groups": 1, "documents": 3, "sealed": 0, "dev": 0}


GROUPS = {
    "url-host": lambda n: {"url": f"https://www.h{n % 20}.org/{n}"},
    "conversation": lambda n: {"conversation_id": n % 20},
    "path": lambda n: {"path": f"src/{n % 20}.txt"},
}


@pytest.mark.parametrize("kind", GROUPS)
def test_documents_are_grouped_by_a_key_and_stay_single_without_the_key(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, kind: str
) -> None:
    use_policy(workspace, f"held_out: {{share: 1.0e-9, least: 4}}\ndomains: {{default: {{group: {kind}}}}}\n")
    rows = [{"text": row["text"], "domain": "web"} for row in texts(0, 100)]
    rows = [row | (GROUPS[kind](n) if n >= 10 else {}) for n, row in enumerate(rows)]
    counts = ingest(rows, "web.jsonl").counts
    d = documents.c
    found = ledger.select_rows(sa.select(d.group_key, d.key, d.fate, d.row, d.facts).order_by(d.row))
    named = {row["group_key"] for row in found[10:]}
    assert len(named) == 20 and all(name.startswith(f"{kind}:") for name in named)
    assert all(list(row["facts"]) == [kind] for row in found[10:]) and found[0]["facts"] is None
    if kind == "path":  # the file it came in
        assert {row["group_key"] for row in found[:10]} == {f"path:{found[0]['key'].partition(':')[0]}"}
    else:
        assert {row["group_key"] for row in found[:10]} == {None} and counts["groups"]["web"]["lacking"] == 10
        (said,) = describe_grouping("web", counts["groups"]["web"])
        assert said.code == "held_out_split.lacking" and (said.data["lacking"], said.data["documents"]) == (10, 100)
    for name in named:
        assert len({row["fate"] for row in found if row["group_key"] == name}) == 1, "whole groups"
    assert halves_of_groups(ledger) == {True: 4, False: 4}


def halves_of_groups(ledger: Ledger) -> Counter[bool]:
    found = ledger.select_rows(sa.select(held_out.c.group_key, held_out.c.sealed).distinct())
    return Counter(row["sealed"] for row in found)


def test_documents_of_a_held_out_group_are_never_trained_on(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """Also documents that share words with training data, or exceed the policy's limit. A group with a training document is not held out."""
    use_policy(
        workspace,
        "held_out: {share: 1.0e-9, least: 1}\ndomains: {default: {group: source, hold_out_at_most: 6}}\n",
    )
    source = lambda name, rows: [row | {"source": name} for row in rows]
    assert ingest(source("a", texts(0, 3)), "a.jsonl").counts["held_out"] == 0
    assert ingest([*source("b", texts(10, 2)), *source("c", texts(15, 1))], "b.jsonl").counts["held_out"] == 3
    assert ingest(source("a", texts(20, 1)), "a2.jsonl").counts["held_out"] == 0, "it was trained on"
    shared = {"text": f"{prose(900)} {prose(0)} {prose(901)}", "id": "shared"}
    counts = ingest(source("b", [shared, *texts(30, 5)]), "b2.jsonl").counts
    assert (counts["held_out"], counts["train"], counts["dropped"]) == (3, 0, {"held_out_group": 3})
    d = documents.c
    why = [
        row["detail"]
        for row in ledger.select_rows(sa.select(d.detail).where(d.rule == "held_out_group").order_by(d.row))
    ]
    assert "shares words with" in why[0] and "'b'" in why[1] and "hold_out_at_most" in why[1]


def test_documents_that_a_model_wrote_do_not_count_for_the_held_out_share(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    use_policy(workspace, "held_out: {share: 1.0e-9}\n")
    sealed = next(n for n in range(40) if held_out_split.goes_to_sealed_half_on_tie(f"s{n}"))
    ingest([row | {"synthetic_by": "a judge"} for row in texts(100, 20)], "made.jsonl")
    assert ingest(texts(sealed, 1), "own.jsonl").counts["held_out"] == 0


def test_later_documents_of_an_old_trained_cluster_can_be_held_out(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """An older factory held out single documents and counted their source as one cluster."""
    rows = lambda first, count: [row | {"source": "shop", "domain": "reviews"} for row in texts(first, count)]
    ingest(rows(0, 40), "a.jsonl")
    with ledger.begin() as tx:
        tx.execute(documents.update().values(group_key="shop"))
        tx.execute(held_out.update().values(group_key="shop", sealed=False))
    use_policy(workspace, "held_out: {share: 1.0e-9}\ndomains: {default: {group: source, hold_out_at_most: 20}}\n")
    counts = ingest(rows(100, 40), "b.jsonl").counts
    assert counts["dropped"] == {} and counts["train"] >= 20
