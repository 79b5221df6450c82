"""The choice of held-out documents for the suite: the largest share of a source, and the removal of a domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.data.removing import apply_removal, plan_removal
from factory.data.selecting import list_removable_fates, select_documents_by_label, select_documents_by_name
from factory.evals.policy import EvalPolicy
from factory.evals.suite import (
    HeldOutDocument,
    SourceCap,
    build_suite,
    compute_document_limit_by_source,
    select_held_out_documents,
)
from factory.ingest.rules.held_out_split import goes_to_sealed_half_on_tie
from factory.ledger.ledger import Ledger, documents, held_out, shards

SEALED = [name for name in (f"s{n}" for n in range(60)) if goes_to_sealed_half_on_tie(name)]
CAP = SourceCap(0.25, 2048)


def hold_out(ledger: Ledger, sizes: dict[str, Sequence[int]], domain: str = "docs") -> None:
    """Documents of a domain, by source: so many bytes each."""
    with ledger.begin() as tx:
        if not ledger.select_rows(shards.select()):
            tx.execute(shards.insert().values(sha256="a", name="", path="", bytes=1, state="ingested", ingested_at=0.0))
        for source, ones in sizes.items():
            for number, size in enumerate(ones):
                key = f"{domain}-{source}-{number}"
                row = {"key": key, "id": key, "shard": "a", "row": number, "domain": domain, "source": source}
                tx.execute(documents.insert().values(row | {"fate": "held_out", "content_sha256": key}))
                content = {"text": "é" * (size // 2) + "x" * (size % 2)}
                tx.execute(
                    held_out.insert().values(
                        key=key,
                        domain=domain,
                        group_key=source,
                        sealed=goes_to_sealed_half_on_tie(source),
                        content=content,
                    )
                )


def scored(ones: Sequence[HeldOutDocument]) -> Counter[str]:
    """By source, bytes that are scored."""
    found: Counter[str] = Counter()
    for one in ones:
        found[one.cluster] += min(2048, len(one.content["text"].encode()))
    return found


def test_no_source_gives_more_than_its_share_of_the_bytes(ledger: Ledger) -> None:
    """Of eight sources with four documents each, one has long documents: an eighth of the documents is most of the bytes."""
    sizes: dict[str, Sequence[int]] = {name: [300] * 4 for name in SEALED[:7]}
    hold_out(ledger, sizes | {SEALED[7]: [9000] * 4})
    every = select_held_out_documents(ledger, 60, sealed=True)
    assert len(every) == 32 and scored(every)[SEALED[7]] > 0.45 * scored(every).total()
    capped = select_held_out_documents(ledger, 60, sealed=True, cap=CAP)
    assert Counter(one.cluster for one in capped) == dict.fromkeys(SEALED[:7], 4) | {SEALED[7]: 1}
    assert select_held_out_documents(ledger, 60, sealed=True, cap=CAP) == capped
    assert build_suite(ledger, EvalPolicy(), "t").documents == capped
    assert [one for one in every if one in capped] == list(capped)


def test_no_document_is_left_out_if_no_source_is_above_its_share(ledger: Ledger) -> None:
    """Long documents count as what is scored of them."""
    sizes: dict[str, Sequence[int]] = {name: [2048] * 4 for name in SEALED[:7]}
    hold_out(ledger, sizes | {SEALED[7]: [90_000] * 4})
    assert select_held_out_documents(ledger, 60, sealed=True, cap=CAP) == select_held_out_documents(
        ledger, 60, sealed=True
    )


def test_only_the_answers_of_a_chat_count_as_its_bytes() -> None:
    turns = [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "éa"}]
    assert HeldOutDocument("k", "chat", "s", {"messages": turns * 2}).bytes == 6
    assert HeldOutDocument("k", "docs", "s", {"text": "éa"}).bytes == 3


some_sizes = st.dictionaries(
    st.integers(0, 20).map(str), st.lists(st.integers(0, 2048), min_size=1, max_size=8), min_size=1, max_size=12
)


@given(st.sampled_from([0.1, 0.25, 0.5, 1.0]), some_sizes)
def test_a_source_above_its_share_gives_one_document(share: float, sizes: dict[str, list[int]]) -> None:
    found = compute_document_limit_by_source(share, sizes)
    given_ = {source: sum(sizes[source][:count]) for source, count in found.items()}
    above = lambda source, of: of[source] > share * sum(of.values())
    assert set(found) == set(sizes) and all(1 <= found[source] <= len(ones) for source, ones in sizes.items())
    whole = {source: sum(ones) for source, ones in sizes.items()}
    if len(sizes) * share <= 1 or not any(above(source, whole) for source in sizes):
        assert given_ == whole
    else:
        assert not any(above(source, given_) for source in sizes if found[source] > 1)


@pytest.mark.parametrize("by", ["document", "source"])
def test_a_domain_with_too_few_documents_leaves_the_suite_when_they_are_removed(ledger: Ledger, by: str) -> None:
    """As the verdict says that holds every release for them."""
    hold_out(ledger, {name: [300] for name in SEALED[:9]})
    hold_out(ledger, {name: [300] for name in SEALED[20:23]}, "law")
    suite = build_suite(ledger, EvalPolicy(), "t")
    assert suite.domains == ["docs", "law"] and len(suite.list_documents_of_domain("law")) == 3
    names = [one.key for one in suite.list_documents_of_domain("law")]
    chosen = (
        select_documents_by_name(ledger, names, list_removable_fates(False))
        if by == "document"
        else select_documents_by_label(ledger, "source", SEALED[20:23])
    )
    assert apply_removal(ledger, plan_removal(ledger, chosen), "ann").documents == 3
    after = build_suite(ledger, EvalPolicy(), "t")
    assert after.domains == ["docs"] and after.list_documents_of_domain("docs") == suite.list_documents_of_domain(
        "docs"
    )
