"""Measures whether a candidate was fitted to held-out documents: compares its gain on them with its gain on similar documents.

The sealed half and the dev half of the held-out documents are drawn alike, so a model has the same expected gain on both. A model that gains more on
the sealed half was trained on documents of it. A model that gains more on the dev half was chosen by it. A model that gains less on documents that
arrived after its training than on older documents has memorised the older ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from factory.evals.statistics import Gain, compare_items, subtract_gains
from factory.evals.suite import Suite
from factory.evals.tasks import DEV, EvalItem
from factory.ledger.ledger import Ledger, data_plans, eval_items, evaluations, token_shards
from factory.ledger.rows import CandidateRow, SegmentRow

TASK = "bpb"


def compare_gains_of_two_document_sets(
    ours: Sequence[EvalItem], theirs: Sequence[EvalItem], keys: Collection[str], weights: Mapping[str, float]
) -> tuple[Gain, Gain, Gain] | None:
    """Return (gain on the documents ``keys``, gain on the other documents, their difference), over the domains that both sets have.

    Documents of the sealed half and of the dev half count. None: no domain is in both sets, or the items cannot be compared.
    """
    inside, outside = (
        [[item for item in _alike(side) if (item.item in keys) == within] for side in (ours, theirs)]
        for within in (True, False)
    )
    both = {item.domain for item in inside[0]} & {item.domain for item in outside[0]}
    shares = {domain: weights.get(domain, 0.0) if weights else 1.0 for domain in both}
    found = []
    for pair in (inside, outside):
        mine, other = ([item for item in side if item.domain in both] for side in pair)
        compared = compare_items(mine, other, shares)
        if compared is None:
            return None
        found.append(compared[0])
    return found[0], found[1], subtract_gains(found[0], found[1])


def find_fresh_documents(ledger: Ledger, candidate_id: int, suite: Suite) -> frozenset[str]:
    """Return the keys of a suite's documents that arrived after a candidate's training. They are from shards that it was not trained on."""
    plans = {row.data_plan for row in SegmentRow.read_lineage(ledger, CandidateRow.get(ledger, candidate_id).segment)}
    read = ledger.select_rows(sa.select(data_plans.c.plan).where(data_plans.c.id.in_(sorted(plans))))
    known = {shard["id"] for row in read for shard in row["plan"]["token_shards"]}
    c = token_shards.c
    before = {row["shard"][:16] for row in ledger.select_rows(sa.select(c.id, c.shard)) if row["id"] in known}
    every = (*suite.documents, *suite.dev)
    return frozenset(document.key for document in every if document.key.partition(":")[0] not in before)


def compute_mean_candidates_per_sealed_document(ledger: Ledger, candidate_id: int, suite: Suite) -> float:
    """Return the number of other candidates that were scored on a document of the sealed half, as the mean over the suite's documents."""
    if not suite.documents:
        return 0.0
    i, e = eval_items.c, evaluations.c
    counted = (
        sa.select(i.item, sa.func.count(sa.distinct(e.candidate)).label("candidates"))
        .join(evaluations, e.id == i.evaluation)
        .where(i.task == TASK, e.candidate != candidate_id)
        .group_by(i.item)
    )
    times = {row["item"]: row["candidates"] for row in ledger.select_rows(counted)}
    return sum(times.get(document.key, 0) for document in suite.documents) / len(suite.documents)


def _alike(items: Sequence[EvalItem]) -> list[EvalItem]:
    return [replace(item, task=TASK) for item in items if item.task in (TASK, DEV)]
