"""Which documents are held out: by share, by source, until a domain can be judged; never what was trained on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ingest.document import maker_of
from factory.ingest.rules import split
from factory.ledger.ledger import Ledger, documents, held_out
from tests.support.factory.made_up_text import held_out_texts, prose, texts, use_policy

Ingest = Callable[..., ShardReport]


def test_training_data_is_never_held_out_later(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    use_policy(workspace, "held_out: {share: 0}\n")
    ingest(texts(0, 20, 200), "first.jsonl")
    use_policy(workspace, "held_out: {share: 0.5, least: 0}\n")
    rows = [
        {"id": f"n{i}", "text": f"{prose(500 + i, 200)} {' '.join(prose(i, 200).split()[:60])} {prose(600 + i, 200)}"}
        for i in range(20)
    ]
    report = ingest(rows, "second.jsonl")
    assert report.counts["held_out"] == 0 and report.counts["train"] == 20
    said = ledger.rows(sa.select(documents.c.detail).where(documents.c.detail.like("not held out: shares words%")))
    assert 4 <= len(said) <= 16  # those whose content was chosen


def test_what_a_model_wrote_is_never_held_out(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    use_policy(workspace, "held_out: {share: 0.5}\ndomains: {default: {hold_out_by: source}}\n")
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


def test_a_makers_name_is_one_short_line_whatever_a_shard_says(
    ledger: Ledger, ingest: Ingest, workspace: Workspace
) -> None:
    use_policy(workspace, "held_out: {share: 0}\n")
    names = ["judge\n  fate      train\x1b[31m; quarantined", " \n ", "y" * 999, "judge 1"]
    ingest([row | {"synthetic_by": name} for row, name in zip(texts(0, 4), names, strict=True)], "made.jsonl")
    rows = ledger.rows(sa.select(documents.c.detail).order_by(documents.c.row))
    one, two, three, four = [maker_of(row["detail"]) for row in rows]
    assert one == "judge fate train\ufffd[31m, quarantined" and two is None and four == "judge 1"
    assert three is not None and 200 < len(three) <= 300


def test_no_more_documents_are_held_out_than_the_policy_allows(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    use_policy(workspace, "held_out: {share: 0.5}\ndomains: {default: {hold_out_at_most: 3}}\n")
    assert ingest(texts(0, 30), "a.jsonl").counts["held_out"] == 3
    assert ingest(texts(100, 30), "b.jsonl").counts["held_out"] == 0


def test_the_split_does_not_depend_on_order_or_other_documents(
    workspace: Workspace, tmp_path: Path, ingest: Ingest, ledger: Ledger
) -> None:
    """But for the few that each domain needs first."""
    use_policy(workspace, "held_out: {share: 0.05, least: 0}\ntokenizer: {vocab_size: 400}\n")
    rows = texts(0, 150)
    ingest(rows)
    other = Workspace.create(tmp_path / "other")
    shutil.copytree(workspace.root / "policies", other.root / "policies", dirs_exist_ok=True)
    other_ledger = Ledger.create(other.ledger_url)
    for number, part in enumerate((rows[100:][::-1], rows[:100])):
        path = other.inbox / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        ingest_shard(other, other_ledger, path, SILENT, workers=0)
    assert sorted(t for _, t in held_out_texts(ledger)) == sorted(t for _, t in held_out_texts(other_ledger))


def test_others_take_the_place_of_those_that_share_words_with_training_data(
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
    refused = ledger.rows(sa.select(documents.c.id).where(documents.c.detail.like("not held out: shares words%")))
    assert refused and all(int(row["id"][1:]) % 4 == 0 for row in refused)


def halves(ledger: Ledger) -> Counter[bool]:
    """How many held-out documents are in the sealed half, and how many are not."""
    rows = ledger.rows(sa.select(held_out.c.key, held_out.c.source))
    return Counter(split.is_sealed(split.cluster_of(row["key"], row["source"])) for row in rows)


def test_a_small_domain_is_held_out_until_it_can_be_judged(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """In each half, at most half of what a shard has of it, of as many sources as there are; then the share alone."""
    use_policy(workspace, "held_out: {share: 1.0e-9}\n")
    law = lambda first, count, source: [
        row | {"domain": "law", "source": source(number)} for number, row in enumerate(texts(first, count))
    ]
    sources = lambda: Counter(row["source"] for row in ledger.rows(sa.select(held_out.c.source)))
    assert ingest(law(0, 1, str), "one.jsonl").counts == {**ingest(law(0, 1, str), "one.jsonl").counts, "held_out": 0}
    first = ingest(law(10, 11, lambda number: "many" if number < 6 else str(number)), "a.jsonl").counts["held_out"]
    assert 3 <= first <= 5 and halves(ledger)[True] <= 5
    assert sources()["many"] <= 2, "other sources come first"
    assert ingest(law(30, 60, str), "b.jsonl").counts["held_out"] == 16 - first
    assert halves(ledger) == {True: 8, False: 8}
    assert ingest(law(100, 40, str), "c.jsonl").counts["held_out"] == 0


def test_a_domain_that_comes_one_document_a_shard_is_held_out_too(
    workspace: Workspace, tmp_path: Path, ledger: Ledger, ingest: Ingest
) -> None:
    """In each half every second one, until it has ``least``; the same again for the same shards in the same order."""
    policy = "held_out: {share: 1.0e-9, least: 2}\ntokenizer: {vocab_size: 400}\n"
    use_policy(workspace, policy)
    rows = [row | {"domain": "law"} for row in texts(0, 14)]
    for number, row in enumerate(rows):
        fates = [ingest([row], f"{number}.jsonl").counts for _ in range(2)]
        assert fates[0] == fates[1], "a shard that was ingested is not ingested again"
    kept = ledger.rows(sa.select(documents.c.id, documents.c.fate, documents.c.source, documents.c.key))
    fate = {row["id"]: row["fate"] for row in kept}
    for sealed in (True, False):
        half = [row["id"] for row in rows if split.is_sealed(row["source"]) == sealed]
        assert len(half) >= 5
        assert [fate[name] for name in half] == ["train", "held_out"] * 2 + ["train"] * (len(half) - 4)
    other = Workspace.create(tmp_path / "other")
    use_policy(other, policy)
    other_ledger = Ledger.create(other.ledger_url)
    for number, row in enumerate(rows):
        path = other.inbox / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        ingest_shard(other, other_ledger, path, SILENT, workers=0)
    again = other_ledger.rows(sa.select(documents.c.id, documents.c.fate))
    assert {row["id"]: row["fate"] for row in again} == fate


def test_what_was_trained_on_before_holds_out_no_source_that_it_is_of(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """Nor one that leaves no room for others: all that comes of a held-out source later is held out too."""
    use_policy(
        workspace, "held_out: {share: 1.0e-9}\ndomains: {default: {hold_out_by: source, hold_out_at_most: 32}}\n"
    )
    sealed = [f"s{n}" for n in range(40) if split.is_sealed(f"s{n}")]
    counts = lambda first, count, source, name: ingest(
        [row | {"source": source} for row in texts(first, count)], f"{name}.jsonl"
    ).counts["held_out"]
    assert counts(0, 8, sealed[0], "a") == 0
    assert counts(20, 1, sealed[0], "b") == 0, "it was trained on"
    assert counts(40, 3, sealed[1], "c") == 0, "eight such sources in each half are more than 32 documents"
    assert counts(60, 2, sealed[2], "d") == 2
    assert counts(80, 2, sealed[3], "e") == 2


def test_what_a_model_wrote_does_not_count_as_what_came_before(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    use_policy(workspace, "held_out: {share: 1.0e-9}\n")
    sealed = next(n for n in range(40) if split.is_sealed(f"s{n}"))
    ingest([row | {"synthetic_by": "a judge"} for row in texts(100, 20)], "made.jsonl")
    assert ingest(texts(sealed, 1), "own.jsonl").counts["held_out"] == 0


def test_a_source_that_was_held_out_for_want_of_others_stays_so(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    use_policy(workspace, "held_out: {share: 1.0e-9, least: 2}\ndomains: {default: {hold_out_by: source}}\n")
    row = lambda number: texts(number, 1)[0] | {"source": f"s{number % 4}"}
    assert ingest([row(number) for number in range(8)], "a.jsonl").counts["held_out"] == 2
    (source,) = {held["source"] for held in ledger.rows(sa.select(held_out.c.source))}
    assert ingest([row(number) for number in range(8, 20)], "b.jsonl").counts["held_out"] == 3
    other = [row(number) | {"domain": "notes"} for number in range(20, 28)]
    assert ingest(other, "c.jsonl").counts["held_out"] == 2, "all domains of a source together"
    assert {held["source"] for held in ledger.rows(sa.select(held_out.c.source))} == {source}
