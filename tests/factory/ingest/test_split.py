"""The selection of held-out documents is a pure function: properties for any shards in any order."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from factory.ingest.rules import held_out_split
from factory.ingest.rules.held_out_split import (
    HALVES,
    EarlierHeldOutCounts,
    HeldOutAssignment,
    HeldOutCandidate,
    HeldOutTarget,
    assign_held_out_documents,
)

Row = tuple[str, int | None, bool]  # domain, number of the group, able


@dataclass
class Past:
    """The state that the ledger would have."""

    wanted: HeldOutTarget
    held: dict[str, tuple[HeldOutCandidate, HeldOutAssignment]] = field(default_factory=dict)  # by key
    trained: list[HeldOutCandidate] = field(default_factory=list)
    chosen: Counter[str] = field(default_factory=Counter)  # by domain, documents that were not of a group from before

    def recorded(self) -> dict[str, bool]:
        return {one.group: one.sealed for _, one in self.held.values()}

    def before(self) -> dict[str, EarlierHeldOutCounts]:
        of: dict[str, list[tuple[HeldOutCandidate, HeldOutAssignment]]] = defaultdict(list)
        for arrived, held in self.held.values():
            of[arrived.domain].append((arrived, held))
        whole = lambda arrived, held: held.group == (arrived.group or arrived.key)
        return {
            domain: EarlierHeldOutCounts(
                len(ones),
                {half: frozenset(h.group for a, h in ones if h.sealed == half and whole(a, h)) for half in HALVES},
                {half: sum(h.sealed == half and not whole(a, h) for a, h in ones) for half in HALVES},
            )
            for domain, ones in of.items()
        }

    def take(self, arrived: Sequence[HeldOutCandidate]) -> dict[int, HeldOutAssignment]:
        recorded, trained = self.recorded(), {one.group for one in self.trained if one.group}
        count = Counter(one.domain for one in self.trained)
        call = (recorded, trained, self.before(), lambda _: self.wanted, lambda domain: count[domain])
        held = assign_held_out_documents(arrived, *call)
        assert held == assign_held_out_documents(arrived[::-1], *call), "in any order of rows"
        taken = {one.group for one in held.values()} | recorded.keys()
        for one in arrived:
            if one.number in held:
                self.held[one.key] = one, held[one.number]
                self.chosen[one.domain] += held[one.number].group not in recorded
            elif (one.group or one.key) not in taken:
                self.trained.append(one)
        return held


def shard_of(rows: Sequence[Row], number: int) -> list[HeldOutCandidate]:
    return [
        HeldOutCandidate(
            at, f"{number}:{at}", domain, None if group is None else f"g{group}",
            hashlib.sha256(f"{number}:{at}".encode()).hexdigest(), able,
        )
        for at, (domain, group, able) in enumerate(rows)
    ]  # fmt: skip


a_row = st.tuples(
    st.sampled_from("ab"), st.none() | st.integers(0, 6) | st.integers(10, 60), st.integers(0, 9).map(bool)
)
some_shards = st.lists(st.lists(a_row, min_size=1, max_size=60), min_size=1, max_size=6)
wishes = st.builds(
    lambda share, least, at_most: HeldOutTarget(share, min(least, at_most // 2), at_most),
    st.sampled_from([1e-9, 0.05, 1.0]), st.integers(0, 8), st.sampled_from([1, 5, 24, 400]),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(some_shards, wishes)
@example([[("a", 0, True)] * 30 + [("b", 1, True)] * 2, [("a", 0, True)] * 9], HeldOutTarget(1e-9, 8, 400))
@example([[("a", 0, True)] * 8 + [("a", 1, True)] * 8], HeldOutTarget(1e-9, 8, 400))
@example([[("a", 0, True)] * 12 + [("a", 1, True)] * 12], HeldOutTarget(1e-9, 8, 400))
@example([[("a", None, True)] * 60], HeldOutTarget(1.0, 8, 400))
def test_whole_groups_are_held_out_stay_in_one_half_and_are_at_most_half_of_a_domain(
    shards: list[list[Row]], wanted: HeldOutTarget
) -> None:
    past = Past(wanted)
    for number, rows in enumerate(shards):
        arrived, recorded = shard_of(rows, number), past.recorded()
        trained = {one.group for one in past.trained if one.group}
        held = past.take(arrived)
        assert all(one.can_be_held_out for one in arrived if one.number in held)
        for one in held.values():
            assert recorded.get(one.group, one.sealed) == one.sealed, "its half was another one"
            assert one.group not in trained, "it was trained on"
        assert len(past.recorded()) == len({(one.group, one.sealed) for _, one in past.held.values()})
        count = Counter(one.domain for one, _ in past.held.values())
        assert all(n <= wanted.at_most for n in count.values())
        whole = {one.group for one in held.values()}
        for one in arrived:
            if one.group in whole and one.can_be_held_out and one.number not in held:
                assert one.group in recorded and count[one.domain] == wanted.at_most, "part of a group"
        came = count + Counter(one.domain for one in past.trained)
        for domain in came:
            assert past.chosen[domain] <= max(16, came[domain] // 2), "more than half of a domain"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 8))
def test_both_halves_get_a_document_from_the_first_shard_with_two_and_later_the_least_number(
    sizes: list[int], least: int
) -> None:
    """If documents are their own groups, the halves differ by at most one, and each has ``least`` after four times as many documents."""
    past = Past(HeldOutTarget(1e-9, least, 400))
    came = 0
    for number, size in enumerate(sizes):
        past.take(shard_of([("a", None, True)] * size, number))
        of = Counter(one.sealed for _, one in past.held.values())
        came += size
        assert abs(of[True] - of[False]) <= 1
        if size >= 2 or number >= 2:
            assert of[True] and of[False]
        if came >= 4 * least + len(sizes):
            assert of[True] == of[False] == least


def test_the_selection_is_the_same_in_every_version() -> None:
    """The same shards give the same held-out documents in every version: an older workspace's next shard is split as it always was."""
    digest = hashlib.sha256()
    for seed in range(150):
        rng = random.Random(seed)
        at_most = rng.choice([3, 16, 24, 400])
        past = Past(HeldOutTarget(rng.choice([1e-9, 0.02, 0.3]), min(rng.choice([0, 1, 2, 8]), at_most // 2), at_most))
        groups = rng.choice([[None], [None, *range(3)], range(2), range(40), [0, 0, 0, *range(9)]])
        for number in range(rng.randrange(1, 5)):
            size = rng.choice([1, 2, 5, 17, 33, 60])
            rows = [(rng.choice("aab"), rng.choice(groups), rng.random() < 0.9) for _ in range(size)]
            held = past.take(shard_of(rows, number))
            digest.update(repr([(at, one.group, one.sealed) for at, one in sorted(held.items())]).encode())
    assert digest.hexdigest()[:16] == "0d80bef93c603f91"


def test_the_name_of_a_group_without_a_source_is_its_fact_alone() -> None:
    facts = {"url-host": "example.org", "path": "a.py", "conversation": "7"}
    named = {kind: held_out_split.make_group_name(kind, None, facts, "0011") for kind in held_out_split.KINDS}
    assert named == {
        "document": None, "source": None, "path": "path:a.py", "url-host": "url-host:example.org",
        "conversation": "conversation:7", "none": None,
    }  # fmt: skip
