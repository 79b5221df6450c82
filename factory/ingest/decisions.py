"""Makes the decisions that need all documents of a shard: duplicates, the held-out split, contamination. Rows are decided in their order.

The input is the analysed chunks and the ledger's index. The output is the fates of the rows, and the remaining work on each remaining document. This
module writes nothing to disk.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from factory.ingest.document import Row
from factory.ingest.document_index import BARRED, DocumentIndex
from factory.ingest.rules import contamination, held_out_split
from factory.ingest.rules.licence_claims import COPY_RULES
from factory.ingest.rules.licence_names import normalise_licence_name
from factory.ingest.rules.near_duplicates import NearDuplicateSearch, Signatures
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.rules.word_hashes import Hashes
from factory.ingest.worker import AnalysedChunk, DocumentToFinish, read_spooled_ngrams
from factory.ledger.removals import REMOVED_FATE
from kernels.contract.message import Message

# The ledger stores this text in ``documents.detail``. 'factory check --repair' finds such rows by the text, also in ledgers of older versions.
COPY_OF_BARRED = Message("ingest.copy_of_barred", "this text came under a licence that does not allow training")
DRAWS = 4  # the most selections of held-out documents from a shard; each selection reads all n-grams of the shard


@dataclass(frozen=True)
class ShardDecisions:
    """The decisions about a shard.

    tasks: for each chunk, the work on its remaining documents. held_out: key of a new held-out document → its n-grams. licences: shard ('': this one)
    → the number of dropped copies whose original the shard has under another licence.
    """

    tasks: list[list[DocumentToFinish]]
    held_out: dict[str, Hashes]
    near: NearDuplicateSearch
    signatures: Signatures  # [undecided documents, permutations]; ``numbers`` has the row of each document
    numbers: dict[str, int]  # key → row in ``signatures``, for all documents with which later shards are compared
    licences: dict[str, int]
    groups: dict[str, Any]  # domain → the facts about its groups that a person should know (``_grouping``)


@dataclass(frozen=True)
class _Living:
    """A document that has no fate yet, with its number in the shard and the place of its content in the spool."""

    row: Row
    number: int
    chunk: int
    place: int


def decide_document_fates(
    analysed: Sequence[AnalysedChunk], index: DocumentIndex, policy: DataPolicy, spool: Path
) -> ShardDecisions:
    """Decide the fates that depend on other documents, and set them on the rows of ``analysed``."""
    signed = np.concatenate([one.signatures for one in analysed])
    near = NearDuplicateSearch(signed, policy.near_duplicates.threshold, index.find_documents_by_bands)
    living, barred = _drop_duplicates(list(_living(analysed)), index, near)
    held_out = _hold_out(living, analysed, index, policy, spool)
    tasks = _find_contamination(living, analysed, index, policy, spool, held_out)
    numbers = {one.row.key: one.number for one in (*living, *barred)}
    rows = {row.key: row for one in analysed for row in one.rows}
    groups = _grouping([one.row for one in living], index, policy)
    return ShardDecisions(tasks, held_out, near, signed, numbers, _other_licences(rows, index), groups)


def _living(analysed: Sequence[AnalysedChunk]) -> Iterator[_Living]:
    number = 0
    for chunk in analysed:
        for place, at in enumerate(chunk.undecided):
            yield _Living(chunk.rows[at], number, chunk.chunk, place)
            number += 1


def _drop_duplicates(
    living: list[_Living], index: DocumentIndex, near: NearDuplicateSearch
) -> tuple[list[_Living], list[_Living]]:
    """Drop all but the first of equal or nearly equal documents. Returns the documents that are left, and the documents that bar a text.

    A copy of a held-out document counts as contamination. A text whose licence does not allow training bars all its copies, also copies that stand
    before it in this shard.
    """
    known = index.find_documents_by_content_hash([one.row.content_sha256 or "" for one in living])
    fates = index.read_fates(sorted({key for keys in near.stored.keys.values() for key in keys}))
    here: dict[str, str] = {}  # key → fate of the first document with each text
    first: dict[str, str] = {}
    kept: list[_Living] = []
    barred: list[_Living] = []
    by_number: dict[int, str] = {}
    refusal = index.make_check_for_removed_labels()

    def match(one: _Living) -> tuple[str, str, str, str] | None:
        """Return (rule, fate of the original, text that says how similar both are, key of the original); None: the document is not a copy."""
        content = one.row.content_sha256
        assert content
        if content in known:
            key, fate = known[content]
            return "exact_duplicate", fate, Message("ingest.same", "the content is the same"), key
        if content in first:
            same = Message("ingest.same_here", "the content is the same, and both documents are in this shard")
            return "exact_duplicate", here[first[content]], same, first[content]
        if found := near.find_most_similar(one.number):
            other, similarity = found
            if isinstance(other, int):
                key = by_number[other]
                near_here = Message(
                    "ingest.near_here",
                    "the content is {similarity:.0%} similar, and both documents are in this shard",
                    similarity=similarity,
                )
                return "near_duplicate", here[key], near_here, key
            said = Message("ingest.near", "the content is {similarity:.0%} similar", similarity=similarity)
            return "near_duplicate", fates[other], said, other
        return None

    for one in sorted(
        living, key=lambda one: not one.row.licence_refusal
    ):  # barred rows come first; otherwise the order of the rows is kept
        row = one.row
        if not row.licence_refusal and (why := refusal(row.source, row.license)):
            row.drop("removed", why)
            continue
        found = match(one)
        if row.licence_refusal:
            row.drop("licence", row.licence_refusal, found and found[3])
        elif found:
            _drop_copy(row, *found)
        if (
            not found or row.licence_refusal
        ):  # a barred copy may be similar to documents to which its original is not similar
            near.add_document(one.number)
            by_number[one.number] = row.key
            assert row.content_sha256
            first.setdefault(row.content_sha256, row.key)
            here[row.key] = BARRED if row.licence_refusal else "train"
            (barred if row.licence_refusal else kept).append(one)
    return kept, barred


def _other_licences(rows: Mapping[str, Row], index: DocumentIndex) -> dict[str, int]:
    """Return shard ('': this one) → the number of this shard's texts that the shard has under another licence."""
    copies = [row for row in rows.values() if row.matched and row.rule in COPY_RULES]
    stored = index.read_licences(sorted({row.matched for row in copies if row.matched and row.matched not in rows}))
    found: Counter[str] = Counter()
    for row in copies:
        assert row.matched
        here = rows.get(row.matched)
        licence, shard = (here.license or "", "") if here else stored[row.matched]
        if normalise_licence_name(licence) != normalise_licence_name(row.license):
            found[shard] += 1
    return dict(found)


def _drop_copy(row: Row, rule: str, fate: str, how: str, key: str) -> None:
    if fate == BARRED:
        row.drop("licence", Message("ingest.barred", "{what} ({how})", what=COPY_OF_BARRED, how=how), key)
    elif fate == REMOVED_FATE:
        said = Message(
            "ingest.copy_of_removed", "the text is a copy of a document that a person removed ({how})", how=how
        )
        row.drop("removed", said, key)
    elif fate == "held_out":
        row.drop(
            "contaminated",
            Message("ingest.copy_of_held_out", "the text is a copy of a held-out document ({how})", how=how),
            key,
        )
    else:
        row.drop(rule, how, key)


def _grams(
    living: Sequence[_Living], analysed: Sequence[AnalysedChunk], spool: Path
) -> Iterator[tuple[_Living, Hashes]]:
    """Yield each document with its n-grams. Only one chunk is in memory at a time."""
    chunk, loaded = -1, []
    for one in living:
        if one.chunk != chunk:
            chunk, loaded = one.chunk, read_spooled_ngrams(spool, analysed[one.chunk])
        yield one, loaded[one.place]


def _hold_out(
    living: Sequence[_Living], analysed: Sequence[AnalysedChunk], index: DocumentIndex, policy: DataPolicy, spool: Path
) -> dict[str, Hashes]:
    """Choose the held-out documents, and set their fate. Returns key → the n-grams by which later copies are found."""
    own = [one for one in living if not one.row.synthetic_by]  # documents that a model wrote cannot measure models
    trained = index.find_trained_groups(sorted({one.row.group_key for one in own if one.row.group_key}))
    recorded = {name: half for name, half in index.read_held_out_groups().items() if name not in trained}
    select = _selecting(own, index, policy, recorded, trained)
    held: dict[int, held_out_split.HeldOutAssignment] = {}
    refused: dict[int, str] = {}
    for _ in range(DRAWS):  # in each draw, other documents replace those that share words with training data
        held = select(refused)
        candidates, overlaps = _own_words(
            [one for one in own if one.number in held], living, analysed, index, policy, spool
        )
        refused |= overlaps
        if not overlaps:
            break
    for number in refused:
        held.pop(number, None)
    groups = {one.group for one in held.values()} | recorded.keys()
    chosen: dict[str, Hashes] = {}
    for one in own:
        row = one.row
        if one.number in refused:
            row.detail = Message(
                "ingest.not_held_out",
                "the document cannot be held out, because it shares words with the training document {key}",
                key=refused[one.number],
            )
        if as_one := held.get(one.number):
            row.fate, row.held_out_group, row.is_sealed = "held_out", as_one.group, as_one.sealed
            chosen[row.key] = candidates[one.number]
        elif row.group in groups:
            limit = Message(
                "ingest.enough_held_out",
                "the factory holds out no more documents, because the limit hold_out_at_most (data.yaml) is reached",
            )
            special = Message("ingest.spells_special", "the text of the document contains a special token")
            why = row.detail or (special if row.spells_special_token else limit)
            group = Message(
                "ingest.of_held_out_group",
                "other documents of the group {group!r} are held out, so no model trains on this document. It cannot join them: "
                "{why}",
                group=row.group,
                why=why,
            )
            row.drop("held_out_group", group)
    return chosen


def _selecting(
    living: Sequence[_Living],
    index: DocumentIndex,
    policy: DataPolicy,
    recorded: Mapping[str, bool],
    trained: Collection[str],
) -> Callable[[Collection[int]], dict[int, held_out_split.HeldOutAssignment]]:
    """Return a function that selects held-out documents. Its argument has the numbers of documents that it must not select."""
    before = index.read_held_out_counts()
    count = functools.cache(index.count_training_documents)

    def wanted(domain: str) -> held_out_split.HeldOutTarget:
        at_most = policy.find_domain_rules(domain).hold_out_at_most
        return held_out_split.HeldOutTarget(policy.held_out.share, min(policy.held_out.least, at_most // 2), at_most)

    def of(refused: Collection[int]) -> dict[int, held_out_split.HeldOutAssignment]:
        arrived = [
            held_out_split.HeldOutCandidate(
                one.number, one.row.key, one.row.domain, one.row.group_key, one.row.content_sha256 or "",
                can_be_held_out=one.number not in refused and not one.row.spells_special_token,
            )
            for one in living
        ]  # fmt: skip
        return held_out_split.assign_held_out_documents(arrived, recorded, trained, before, wanted, count)

    return of


def _grouping(rows: Sequence[Row], index: DocumentIndex, policy: DataPolicy) -> dict[str, Any]:
    """Return facts about the groups of each domain that is grouped by a key, if a person should know them.

    domain → {"group": kind, "documents": n, "groups": n, "lacking": documents without the key, "parts": documents with the key that are held out as
    groups of their own, "halves": [groups in the sealed half, groups in the dev half]}
    """
    found = {}
    before = index.read_held_out_counts()
    for domain in sorted({row.domain for row in rows}):
        kind = policy.find_domain_rules(domain).group
        if kind in held_out_split.DOCUMENT_KINDS:
            continue
        ours = [row for row in rows if row.domain == domain and not row.synthetic_by]
        known = before.get(domain, held_out_split.EarlierHeldOutCounts())
        held = [row for row in ours if row.fate == "held_out"]
        parts = sum(row.held_out_group != row.group for row in held)
        lacking = sum(row.group_key is None for row in ours)
        halves = [
            len({*known.groups.get(half, ()), *(row.held_out_group for row in held if row.is_sealed == half)})
            + known.parts.get(half, 0)
            for half in held_out_split.HALVES
        ]
        if ours and (parts or lacking or (policy.held_out.share and policy.held_out.least and not all(halves))):
            found[domain] = {
                "group": kind, "documents": len(ours), "groups": len({row.group for row in ours}), "lacking": lacking, "parts": parts,
                "halves": halves,
            }  # fmt: skip
    return found


def _own_words(
    wanting: Sequence[_Living],
    living: Sequence[_Living],
    analysed: Sequence[AnalysedChunk],
    index: DocumentIndex,
    policy: DataPolicy,
    spool: Path,
) -> tuple[dict[int, Hashes], dict[int, str]]:
    """Return (number → n-grams without common phrases, number → key of a training document that shares one of them).

    The first has all ``wanting`` documents. The second has only those that share an n-gram with a training document.
    """
    if not wanting:
        return {}, {}
    candidates = {one.number: grams for one, grams in _grams(wanting, analysed, spool)}
    all_grams = np.unique(np.concatenate(list(candidates.values())))
    counts = np.zeros(len(all_grams), np.int64)
    if len(all_grams):
        for _, grams in _grams(living, analysed, spool):
            counts[_places(all_grams, np.unique(grams))] += 1
    trained: dict[int, set[str]] = {}
    for gram, key in index.find_training_documents_by_ngram(all_grams):
        trained.setdefault(gram, set()).add(key)
    for gram, keys in trained.items():
        counts[np.searchsorted(all_grams, np.uint64(gram))] += len(keys)
    common = all_grams[counts > policy.decontamination.common]
    overlaps: dict[int, str] = {}
    for number, grams in candidates.items():
        at_common = np.flatnonzero(np.isin(grams, common))
        grams = np.unique(
            grams[contamination.make_no_overlap_mask(at_common, len(grams), policy.decontamination.ngram)]
        )
        candidates[number] = grams
        if overlap := next((min(trained[gram]) for gram in grams.tolist() if gram in trained), None):
            overlaps[number] = overlap
    return candidates, overlaps


def _places(ordered: Hashes, values: Hashes) -> np.ndarray:
    """Return the positions in ``ordered`` of those ``values`` that it contains."""
    places = np.searchsorted(ordered, values)
    places[places == len(ordered)] = 0
    return places[ordered[places] == values]


def _find_contamination(
    living: Sequence[_Living],
    analysed: Sequence[AnalysedChunk],
    index: DocumentIndex,
    policy: DataPolicy,
    spool: Path,
    held_out: dict[str, Hashes],
) -> list[list[DocumentToFinish]]:
    known = contamination.HeldOutNgrams.build([*index.read_held_out_ngrams(), *held_out.items()])
    tasks: list[list[DocumentToFinish]] = [[] for _ in analysed]
    for one, grams in _grams(living, analysed, spool):
        cuts: list[tuple[int, int]] = []
        if one.row.fate == "dropped":
            continue
        if one.row.fate != "held_out":
            collisions = known.find_collisions(grams)
            cuts = contamination.merge_spans(collisions, policy.decontamination.ngram)
            if cuts:
                one.row.matched = known.find_document_with_ngram(grams[collisions[0]])
        tasks[one.chunk].append(DocumentToFinish(one.place, one.row.key, one.row.fate == "held_out", cuts))
    return tasks
