"""Decisions that need all documents of a shard: duplicates, the held-out split, contamination. In the order of rows.

The input is the analysed chunks and the ledger's index; the output is fates on the rows, and the work left for each
remaining document. Nothing is written here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from factory.ingest.document import Row
from factory.ingest.index import BARRED, Index
from factory.ingest.rules import decontaminate, split
from factory.ingest.rules.claims import COPIES
from factory.ingest.rules.licence_names import folded
from factory.ingest.rules.near_dup import NearDuplicates, Signatures
from factory.ingest.rules.policy import DataPolicy, DomainRules
from factory.ingest.rules.words import Hashes
from factory.ingest.worker import Analysed, FinishTask, spool_ngrams
from factory.ledger.removals import FATE

DRAWS = 4  # of held-out documents from a shard, each of which reads all its n-grams


@dataclass(frozen=True)
class Decided:
    """``tasks``: by chunk, for the remaining documents; ``held_out``: n-grams of the new held-out ones; ``licences``: by shard ('': this one),
    how many of the dropped copies came there under another licence."""

    tasks: list[list[FinishTask]]
    held_out: dict[str, Hashes]
    near: NearDuplicates
    signatures: Signatures  # [alive, permutations], numbered as ``numbers``
    numbers: dict[str, int]  # key → number among the signatures, of all that later shards are compared with
    licences: dict[str, int]


@dataclass(frozen=True)
class _Living:
    """A document without a fate yet, the place of its content, and its number in the shard."""

    row: Row
    number: int
    chunk: int
    place: int


@dataclass(frozen=True)
class _Trained:
    """Of a domain, what earlier shards brought to train on: how many documents of each half (sealed or not), and which sources."""

    documents: Mapping[bool, int]
    sources: frozenset[str]


def decide(analysed: Sequence[Analysed], index: Index, policy: DataPolicy, spool: Path) -> Decided:
    signed = np.concatenate([one.signatures for one in analysed])
    near = NearDuplicates(signed, policy.near_duplicates.threshold, index.near)
    living, barred = _drop_duplicates(list(_living(analysed)), index, near)
    held_out = _hold_out(living, analysed, index, policy, spool)
    tasks = _find_contamination(living, analysed, index, policy, spool, held_out)
    numbers = {one.row.key: one.number for one in (*living, *barred)}
    rows = {row.key: row for one in analysed for row in one.rows}
    return Decided(tasks, held_out, near, signed, numbers, _other_licences(rows, index))


def _living(analysed: Sequence[Analysed]) -> Iterator[_Living]:
    number = 0
    for chunk in analysed:
        for place, at in enumerate(chunk.alive):
            yield _Living(chunk.rows[at], number, chunk.chunk, place)
            number += 1


def _drop_duplicates(living: list[_Living], index: Index, near: NearDuplicates) -> tuple[list[_Living], list[_Living]]:
    """Drop all but the first of equal or near-equal documents. A copy of a held-out document counts as contamination; a text whose licence
    does not allow training bars its copies, those before it in this shard too. Returns what is left, and the rows that bar a text."""
    known = index.kept_by_content([one.row.content_sha256 or "" for one in living])
    fates = index.fates(sorted({key for keys in near.stored.keys.values() for key in keys}))
    here: dict[str, str] = {}  # fate by key, of the first of each text
    first: dict[str, str] = {}
    kept: list[_Living] = []
    barred: list[_Living] = []
    by_number: dict[int, str] = {}
    refusal = index.refusal()

    def match(one: _Living) -> tuple[str, str, str, str] | None:
        """(rule, fate of the other, how alike they are, its key)"""
        content = one.row.content_sha256
        assert content
        if content in known:
            key, fate = known[content]
            return "exact_duplicate", fate, "the same content", key
        if content in first:
            return "exact_duplicate", here[first[content]], "the same content, in this shard", first[content]
        if found := near.match(one.number):
            other, similarity = found
            if isinstance(other, int):
                key = by_number[other]
                return "near_duplicate", here[key], f"{similarity:.0%} similar, in this shard", key
            return "near_duplicate", fates[other], f"{similarity:.0%} similar", other
        return None

    for one in sorted(living, key=lambda one: not one.row.barred):  # in the order of rows, those that bar first
        row = one.row
        if not row.barred and (why := refusal(row.source, row.license)):
            row.drop("removed", why)
            continue
        found = match(one)
        if row.barred:
            row.drop("licence", row.barred, found and found[3])
        elif found:
            _drop_copy(row, *found)
        if not found or row.barred:  # a copy bars too, what is near to it and not to the first
            near.keep(one.number)
            by_number[one.number] = row.key
            assert row.content_sha256
            first.setdefault(row.content_sha256, row.key)
            here[row.key] = BARRED if row.barred else "train"
            (barred if row.barred else kept).append(one)
    return kept, barred


def _other_licences(rows: Mapping[str, Row], index: Index) -> dict[str, int]:
    """By shard ('': this one), how many of its texts came there under another licence."""
    copies = [row for row in rows.values() if row.matched and row.rule in COPIES]
    stored = index.licences(sorted({row.matched for row in copies if row.matched and row.matched not in rows}))
    found: Counter[str] = Counter()
    for row in copies:
        assert row.matched
        here = rows.get(row.matched)
        licence, shard = (here.license or "", "") if here else stored[row.matched]
        if folded(licence) != folded(row.license):
            found[shard] += 1
    return dict(found)


def _drop_copy(row: Row, rule: str, fate: str, how: str, key: str) -> None:
    if fate == BARRED:
        row.drop("licence", f"this text came under a licence that does not allow training ({how})", key)
    elif fate == FATE:
        row.drop("removed", f"a copy of a document that was taken out ({how})", key)
    elif fate == "held_out":
        row.drop("contaminated", f"a copy of a held-out document ({how})", key)
    else:
        row.drop(rule, how, key)


def _grams(living: Sequence[_Living], analysed: Sequence[Analysed], spool: Path) -> Iterator[tuple[_Living, Hashes]]:
    """n-grams of each living document, one chunk in memory at a time."""
    chunk, loaded = -1, []
    for one in living:
        if one.chunk != chunk:
            chunk, loaded = one.chunk, spool_ngrams(spool, analysed[one.chunk])
        yield one, loaded[one.place]


def _hold_out(
    living: Sequence[_Living], analysed: Sequence[Analysed], index: Index, policy: DataPolicy, spool: Path
) -> dict[str, Hashes]:
    """Choose the held-out documents and set their fate. Returns key → the n-grams by which later copies are found."""
    before = index.held_out_documents()
    trained = functools.cache(lambda domain: _trained(index, domain))
    refused: dict[int, str] = {}
    for _ in range(DRAWS):  # others take the place of those that share words with training data
        able = [one for one in living if one.number not in refused]
        wanting = _wanting(able, policy, before, trained)
        candidates, overlaps = _own_words(wanting, living, analysed, index, policy, spool)
        refused |= overlaps
        if not overlaps:
            break
    for one in living:
        if one.number in refused:
            one.row.detail = f"not held out: shares words with {refused[one.number]}, which is trained on"
    chosen: dict[str, Hashes] = {}
    room = Counter(domain for domain, _, _ in before)
    for one in wanting:
        if one.number not in refused and room[one.row.domain] < policy.rules(one.row.domain).hold_out_at_most:
            room[one.row.domain] += 1
            chosen[one.row.key] = candidates[one.number]
            one.row.fate, one.row.sealed = "held_out", split.is_sealed(one.row.group)
    return chosen


def _trained(index: Index, domain: str) -> _Trained:
    halves: Counter[bool] = Counter()
    sources: set[str] = set()
    for key, source in index.trained_documents(domain):
        halves[split.is_sealed(split.cluster_of(key, source))] += 1
        if source:
            sources.add(source)
    return _Trained(halves, frozenset(sources))


def _own_words(
    wanting: Sequence[_Living],
    living: Sequence[_Living],
    analysed: Sequence[Analysed],
    index: Index,
    policy: DataPolicy,
    spool: Path,
) -> tuple[dict[int, Hashes], dict[int, str]]:
    """Of each, by its number: its n-grams away from common phrases; and the key of a document that is trained on and shares one of them."""
    if not wanting:
        return {}, {}
    candidates = {one.number: grams for one, grams in _grams(wanting, analysed, spool)}
    all_grams = np.unique(np.concatenate(list(candidates.values())))
    counts = np.zeros(len(all_grams), np.int64)
    if len(all_grams):
        for _, grams in _grams(living, analysed, spool):
            counts[_places(all_grams, np.unique(grams))] += 1
    trained: dict[int, set[str]] = {}
    for gram, key in index.trained_with(all_grams):
        trained.setdefault(gram, set()).add(key)
    for gram, keys in trained.items():
        counts[np.searchsorted(all_grams, np.uint64(gram))] += len(keys)
    common = all_grams[counts > policy.decontamination.common]
    overlaps: dict[int, str] = {}
    for number, grams in candidates.items():
        at_common = np.flatnonzero(np.isin(grams, common))
        grams = np.unique(grams[decontaminate.away_from(at_common, len(grams), policy.decontamination.ngram)])
        candidates[number] = grams
        if overlap := next((min(trained[gram]) for gram in grams.tolist() if gram in trained), None):
            overlaps[number] = overlap
    return candidates, overlaps


def _wanting(
    living: Sequence[_Living],
    policy: DataPolicy,
    before: Sequence[tuple[str, str, str | None]],
    trained: Callable[[str], _Trained],
) -> list[_Living]:
    """Those of the share, and what a domain with fewer than ``least`` held-out sources or documents in a half needs."""
    if not policy.held_out.share:
        return []
    by_domain: dict[str, list[_Living]] = {}
    living = [
        one for one in living if not one.row.synthetic_by
    ]  # a model's words measure no model, whatever their source
    for one in living:
        by_domain.setdefault(one.row.domain, []).append(one)
    domains = {*by_domain, *(domain for domain, _, _ in before)}
    whole = {domain for domain in domains if policy.rules(domain).hold_out_by == "source"}
    kept = {
        source for domain, _, source in before if source and domain in whole
    }  # sources that were taken stay held out, whatever their draw
    wants: set[int] = set()
    for domain, ones in by_domain.items():
        mine = {one.number for one in ones if one.row.wants_held_out or (domain in whole and one.row.source in kept)}
        wants |= mine
        least = min(policy.held_out.least, policy.rules(domain).hold_out_at_most // 2)
        clusters = [split.cluster_of(key, source) for of, key, source in before if of == domain]
        for sealed in (True, False):
            there = [cluster for cluster in clusters if split.is_sealed(cluster) == sealed]
            half = [one for one in ones if split.is_sealed(_cluster(one)) == sealed]
            earlier = functools.partial(trained, domain)
            wants |= _next_drawn(half, mine, policy.rules(domain), there, least, earlier)
    kept |= {one.row.source for one in living if one.number in wants and one.row.domain in whole and one.row.source}
    return [one for one in living if one.number in wants or (one.row.domain in whole and one.row.source in kept)]


def _cluster(one: _Living) -> str:
    return split.cluster_of(one.row.key, one.row.source)


def _next_drawn(
    ones: Sequence[_Living],
    taken: set[int],
    rules: DomainRules,
    there: Sequence[str],
    least: int,
    trained: Callable[[], _Trained],
) -> set[int]:
    """What a half of a domain needs beside those ``taken``, to have ``least`` sources and as many documents, where ``there`` are the sources
    of its documents from before: those that would be drawn next, whole sources where sources are held out; at most half of the shard's and of
    what was trained on before without as many held out, as a domain may come one document a shard."""
    mine = taken & {one.number for one in ones}
    units: dict[int, list[_Living]] = {}
    for one in ones:
        assert one.row.content_sha256
        if one.number not in mine:
            units.setdefault(split.draw(one.row.content_sha256, one.row.source, rules), []).append(one)
    seen = {*there, *(_cluster(one) for one in ones if one.number in mine)}
    found: set[int] = set()
    for of_seen in (False, True):
        for _, unit in sorted(units.items()):
            numbers, cluster = {one.number for one in unit}, _cluster(unit[0])
            count = len(there) + len(mine) + len(found) if of_seen else len(seen)
            if count >= least or numbers & found or not (of_seen or cluster not in seen):
                continue
            over = 2 * (len(mine) + len(found) + len(unit)) - len(ones)
            if over <= 0 or over <= _owed(unit, rules, there, least, trained):
                found |= numbers
                seen = seen | {cluster}
    return found


def _owed(
    unit: Sequence[_Living], rules: DomainRules, there: Sequence[str], least: int, trained: Callable[[], _Trained]
) -> int:
    """How many documents of a half were trained on before without as many held out. Where sources are held out, 0 of one that was trained on,
    and of one that leaves no room for ``least`` of its size in each half: all that comes of it later is held out too."""
    if 2 * least * len(unit) > rules.hold_out_at_most:
        return 0
    earlier, first = trained(), unit[0]
    if rules.hold_out_by == "source" and first.row.source in earlier.sources:
        return 0
    return max(0, earlier.documents.get(split.is_sealed(_cluster(first)), 0) - len(there))


def _places(ordered: Hashes, values: Hashes) -> np.ndarray:
    """The positions in ``ordered`` of those ``values`` that are there."""
    places = np.searchsorted(ordered, values)
    places[places == len(ordered)] = 0
    return places[ordered[places] == values]


def _find_contamination(
    living: Sequence[_Living],
    analysed: Sequence[Analysed],
    index: Index,
    policy: DataPolicy,
    spool: Path,
    held_out: dict[str, Hashes],
) -> list[list[FinishTask]]:
    known = decontaminate.HeldOutNgrams.of([*index.held_out_ngrams(), *held_out.items()])
    tasks: list[list[FinishTask]] = [[] for _ in analysed]
    for one, grams in _grams(living, analysed, spool):
        cuts: list[tuple[int, int]] = []
        if one.row.fate != "held_out":
            collisions = known.find(grams)
            cuts = decontaminate.spans(collisions, policy.decontamination.ngram)
            if cuts:
                one.row.matched = known.owner(grams[collisions[0]])
        tasks[one.chunk].append(FinishTask(one.place, one.row.key, one.row.fate == "held_out", cuts))
    return tasks
