"""Chooses which documents are held out, and in which half. The choice takes whole groups, and is a pure function of the shard and the ledger's rows.

The documents of a *group* depend on one another, so all of them are held out, or all are trained on. ``group`` of a domain in ``data.yaml``
says what a group is. A group is held out if a hash of its name draws it. More groups are held out until each domain can be judged.

Held-out documents have two halves. Only the release gate reads the *sealed* half. Everything else uses the *dev* half: the gates of the
code loop, agents, the weights of an average. A group stays in one half for ever, in all domains. The ledger records the half.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from kernels.contract.message import Message

GroupKind = Literal["document", "source", "path", "url-host", "conversation", "none"]
KINDS: tuple[GroupKind, ...] = get_args(GroupKind)
DOCUMENT_KINDS = ("document", "none")
MOST_OF_FIRST_PAIR = 16  # a domain's first two groups may together have this many documents, even if that is more than half of the domain
HALVES = (True, False)  # True is the sealed half, False the dev half


def read_grouping_facts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in a row, other than its source, by which its document may be grouped.

    >>> read_grouping_facts({"url": "https://www.Example.org:443/a?b", "conversation_id": 7, "path": "src/a.py", "text": "x"})
    {'url-host': 'example.org', 'conversation': '7', 'path': 'src/a.py'}
    >>> read_grouping_facts({"url": "example.org/a", "conversation": [{"role": "user"}]})
    {'url-host': 'example.org'}
    """
    named = {"url-host": _host(row.get("url")), "path": _word(row.get("path"))}
    named["conversation"] = _word(row.get("conversation_id")) or _word(row.get("conversation"))
    return {kind: named[kind] for kind in ("url-host", "conversation", "path") if named[kind]}


def _word(value: object) -> str:
    """Return a name as text, or '' if the value is not a name."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 1 << 128 else ""
    return value if isinstance(value, str) and len(value) <= 1000 and value.isprintable() else ""


def _host(value: object) -> str:
    url = _word(value)
    try:
        return (urlsplit(url if "://" in url else f"//{url}").hostname or "").removeprefix("www.")
    except ValueError:  # the URL has a bracket without its other half
        return ""


def make_group_name(kind: GroupKind, source: str | None, facts: Mapping[str, str], shard: str) -> str | None:
    """Return the name of a document's group, or None if the document is a group of its own. It is also one if it lacks the key that ``kind`` needs.
    The names of conversations and paths include the source. A row without a path has ``shard``, the name of its file, as its path.

    >>> facts = {"url-host": "example.org", "path": "a.py"}
    >>> [make_group_name(kind, "repo", facts, "00112233") for kind in KINDS]
    [None, 'repo', 'path:repo/a.py', 'url-host:example.org', None, None]
    >>> make_group_name("path", None, {}, "00112233")
    'path:00112233'
    """
    if kind in DOCUMENT_KINDS:
        return None
    if kind == "source":
        return source or None
    named = facts.get(kind)
    if named is None:
        return f"path:{shard}" if kind == "path" else None
    return f"{kind}:{source}/{named}" if source and kind != "url-host" else f"{kind}:{named}"


def name_held_out_draw_unit(group: str | None, content_sha256: str) -> str:
    """Return the name of the unit by which a group is drawn. A document that is its own group is drawn by its content, so its shard does not
    matter."""
    return f"content:{content_sha256}" if group is None else f"group:{group}"


def hash_draw_unit(unit: str) -> int:
    """Return a number below 2**64, a hash of the unit. The units with the lowest numbers are held out."""
    return int.from_bytes(hashlib.sha256(unit.encode("utf-8")).digest()[:8], "big")


def is_drawn_to_hold_out(unit: str, share: float) -> bool:
    """Return whether the unit is among the ``share`` of all units that is held out."""
    return hash_draw_unit(unit) < share * 2**64


def goes_to_sealed_half_on_tie(unit: str) -> bool:
    """Return whether the unit goes to the sealed half if both halves have equally many groups."""
    return hash_draw_unit(unit) % 2 == 0


@dataclass(frozen=True)
class HeldOutCandidate:
    """A document of a shard that may be held out."""

    number: int  # the position in the shard
    key: str
    domain: str
    group: str | None
    content_sha256: str
    can_be_held_out: bool = (
        True  # False if it cannot measure models, because its words are in training data or it spells a special token
    )


@dataclass(frozen=True)
class EarlierHeldOutCounts:
    """What a domain already holds out. ``documents`` is the number of documents. For each half, ``groups`` are the groups that are held out as a
    whole, and ``parts`` is the number of single documents of other groups."""

    documents: int = 0
    groups: Mapping[bool, frozenset[str]] = field(default_factory=dict)
    parts: Mapping[bool, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOutTarget:
    """How much of a domain must be held out (``data.yaml``)."""

    share: float
    least: int  # groups in each half, at least
    at_most: int  # documents of the domain


@dataclass(frozen=True)
class HeldOutAssignment:
    """The group and the half of a held-out document. The group is the document's own key if it is a group of its own."""

    group: str
    sealed: bool


@dataclass(frozen=True)
class _Unit:
    """The documents of one group in this shard, or one document as a group of its own."""

    name: str
    unit: str
    able: Mapping[str, Sequence[HeldOutCandidate]]  # by domain: the documents that can be held out

    def count(self, domain: str) -> int:
        return len(self.able.get(domain, ()))


class _Domain:
    """The state of one domain during the selection: what is held out so far."""

    def __init__(
        self, wanted: HeldOutTarget, before: EarlierHeldOutCounts, here: int, trained: Callable[[], int]
    ) -> None:
        self.wanted = wanted
        self.held = before.documents
        self.groups = {half: set(before.groups.get(half, ())) for half in HALVES}
        self.parts = {half: before.parts.get(half, 0) for half in HALVES}
        self.came = before.documents + here
        self._trained = trained  # a slow count, called only where it decides

    def has_come(self, least: int) -> bool:
        return self.came >= least or self.came + self._trained() >= least

    def has_room(self, more: int) -> bool:
        """Return whether the domain can hold out ``more`` documents: at most half of its documents, and no more than the policy allows."""
        held = self.held + more
        return held <= self.wanted.at_most and self.has_come(2 * held)

    def is_small(self, group: int) -> bool:
        """Return whether a group of ``group`` documents is so small that each half can get enough such groups."""
        enough = 2 * self.wanted.least * group
        return enough <= self.wanted.at_most and self.has_come(2 * enough)

    @property
    def missing(self) -> list[bool]:
        """The halves that have no group, or no half if the policy needs no groups."""
        return [half for half in HALVES if self.wanted.least and not self.groups[half] and not self.parts[half]]

    def short(self, parts: bool) -> bool:
        """Return whether a half has fewer groups than the policy needs. ``parts``: single documents count too."""
        return any(len(self.groups[half]) + parts * self.parts[half] < self.wanted.least for half in HALVES)

    def more_sealed(self) -> int:
        """Return the number of groups in the sealed half minus the number in the dev half."""
        count = {half: len(self.groups[half]) + self.parts[half] for half in HALVES}
        return count[True] - count[False]


class _Selection:
    def __init__(self, domains: Mapping[str, _Domain]) -> None:
        self.domains = domains
        self.held: dict[int, HeldOutAssignment] = {}

    def take(self, unit: _Unit, sealed: bool, part: bool = False) -> None:
        for name, ones in unit.able.items():
            domain = self.domains[name]
            ordered = sorted(
                ones, key=lambda one: (hash_draw_unit(name_held_out_draw_unit(None, one.content_sha256)), one.key)
            )
            ordered = ordered[
                : max(0, domain.wanted.at_most - domain.held)
            ]  # a group of which documents are already held out may exceed the limit
            self.held |= {one.number: HeldOutAssignment(unit.name, sealed) for one in ordered}
            domain.held += len(ordered)
            if part:
                domain.parts[sealed] += 1
            elif ordered:
                domain.groups[sealed].add(unit.name)

    def half_of(self, unit: _Unit) -> bool:
        """Return the half (True: sealed) that has fewer groups of the unit's domains."""
        more = sum(self.domains[name].more_sealed() for name in unit.able)
        return goes_to_sealed_half_on_tie(unit.unit) if more == 0 else more < 0

    def is_free(self, unit: _Unit) -> bool:
        return not any(one.number in self.held for ones in unit.able.values() for one in ones)

    def fits(self, unit: _Unit, but: str = "") -> bool:
        return all(self.domains[name].has_room(unit.count(name)) for name in unit.able if name != but)

    def first_of_each_half(self, name: str, units: Iterable[_Unit], part: bool) -> None:
        """Give each half of a domain that has no group yet the smallest free group. Both halves get a group even if these few documents are more than
        half of the domain."""
        domain, missing = self.domains[name], self.domains[name].missing
        free = [unit for unit in units if unit.count(name) and self.fits(unit, but=name)]
        chosen = sorted(free, key=lambda unit: (unit.count(name), hash_draw_unit(unit.unit), unit.name))[: len(missing)]
        while chosen:
            count = sum(unit.count(name) for unit in chosen)
            few = domain.held + count <= min(MOST_OF_FIRST_PAIR, domain.wanted.at_most)
            if len(chosen) == len(missing) and (few or domain.has_room(count)):
                break
            if (few or domain.is_small(count)) and domain.has_room(count):
                break
            chosen.pop()
        for unit in chosen:
            half = self.half_of(unit)
            half = half if half in missing else missing[0]
            missing.remove(half)
            self.take(unit, half, part)

    def others(self, units: Sequence[_Unit], part: bool) -> None:
        """Take the units that are drawn, and units that a domain still needs. Small units go first, because large units would leave no room for
        enough groups."""
        for large in (False, True):
            for unit in units:
                of = [(self.domains[name], unit.count(name)) for name in unit.able]
                is_wanted = any(domain.short(part) for domain, _ in of)
                is_wanted |= not part and any(is_drawn_to_hold_out(unit.unit, domain.wanted.share) for domain, _ in of)
                is_right = all(not domain.missing if large else domain.is_small(count) for domain, count in of)
                if is_wanted and is_right and self.fits(unit) and self.is_free(unit):
                    self.take(unit, self.half_of(unit), part)


def assign_held_out_documents(
    new_documents: Sequence[HeldOutCandidate],
    half_by_held_out_group: Mapping[str, bool],
    trained_groups: Collection[str],
    earlier_counts: Mapping[str, EarlierHeldOutCounts],
    target_of_domain: Callable[[str], HeldOutTarget],
    count_trained_documents: Callable[[str], int],
) -> dict[int, HeldOutAssignment]:
    """Return the documents of a shard that are held out, by number.

    ``half_by_held_out_group`` has the half of each group that is already held out. ``trained_groups`` are the groups with a training document;
    such a group is not held out as a whole. ``earlier_counts``, ``target_of_domain`` and ``count_trained_documents`` are by domain.

    These documents are held out, in this order:

    1. All documents of a group that is already held out, in that group's half.
    2. The first group of each half of each domain (``first_of_each_half``).
    3. Groups that are drawn, then the next groups of domains with fewer than ``least`` groups in a half. Each goes into the half with fewer
       groups of its domains. At most half of a domain, and at most ``at_most`` documents, are held out.
    4. Single documents, each as a group of its own, if a half of a domain still has no group (the domain is one source, or has few large ones).
       The same limits apply. A domain that is judged by such documents is better than a domain that is not judged.
    """
    here = Counter(one.domain for one in new_documents)
    domains = {
        name: _Domain(
            target_of_domain(name),
            earlier_counts.get(name, EarlierHeldOutCounts()),
            count,
            partial(count_trained_documents, name),
        )
        for name, count in here.items()
    }
    selection, free = _Selection(domains), []
    for name, ones in _by(new_documents, lambda one: one.group or one.key).items():
        able = _by((one for one in ones if one.can_be_held_out), lambda one: one.domain)
        unit = _Unit(name, name_held_out_draw_unit(ones[0].group, ones[0].content_sha256), able)
        if name in half_by_held_out_group:
            selection.take(unit, half_by_held_out_group[name])
        elif name not in trained_groups and 0 < len(ones) <= 2 * sum(map(len, able.values())):
            free.append(unit)
    asked = [name for name in sorted(here) if domains[name].wanted.share]
    free = _in_order(unit for unit in free if all(name in asked for name in unit.able))
    for name in asked:
        if domains[name].missing:
            selection.first_of_each_half(name, filter(selection.is_free, free), part=False)
    selection.others(free, part=False)
    for name in asked:
        domain = domains[name]
        if all(domain.groups.values()) or not domain.wanted.least or not domain.has_come(4):
            continue
        rest = (
            one
            for one in new_documents
            if one.domain == name and one.can_be_held_out and one.group not in {None, *half_by_held_out_group}
        )
        own = _in_order(
            _Unit(one.key, name_held_out_draw_unit(None, one.content_sha256), {name: [one]}) for one in rest
        )
        own = [unit for unit in own if selection.is_free(unit)]
        if domain.missing:
            selection.first_of_each_half(name, own, part=True)
        selection.others(own, part=True)
    return selection.held


def _in_order(units: Iterable[_Unit]) -> list[_Unit]:
    return sorted(units, key=lambda unit: (hash_draw_unit(unit.unit), unit.name))


def _by(ones: Iterable[HeldOutCandidate], name: Callable[[HeldOutCandidate], str]) -> dict[str, list[HeldOutCandidate]]:
    """Return the documents by name, in the order of the names."""
    found: dict[str, list[HeldOutCandidate]] = {}
    for one in sorted(ones, key=lambda one: (name(one), one.number)):
        found.setdefault(name(one), []).append(one)
    return found


def describe_grouping(domain: str, group_counts: Mapping[str, Any]) -> list[Message]:
    """Describe the groups of a domain in a shard (``factory.ingest.decisions``), if a person has to know or decide something about them.

    >>> told = {"group": "source", "documents": 800, "groups": 1, "lacking": 0, "parts": 16, "halves": [8, 8]}
    >>> for line in describe_grouping("reviews", told): print(line)
    reviews: 'group: source' puts 800 documents into 1 group. The held-out documents have two halves, and both need whole groups. The groups are too \
few for this. Instead, the factory holds out 16 single documents, and the release gate treats each held-out document as independent. Ingest \
documents of more groups, or accept the single documents: 'factory data relabel --domain reviews --group document'
    """
    kind = group_counts["group"]
    lines = []
    if group_counts["lacking"]:
        lines.append(
            Message(
                "held_out_split.lacking",
                "{domain}: {lacking:,} of {documents:,} documents have no {key}. 'group: {kind}' makes each of them a group "
                "of its own",
                domain=domain,
                lacking=group_counts["lacking"],
                documents=group_counts["documents"],
                key={"source": "source", "url-host": "url", "conversation": "conversation_id", "path": "path"}[kind],
                kind=kind,
            )
        )
    known = {"domain": domain, "kind": kind, "groups": group_counts["groups"], "documents": group_counts["documents"]}
    if group_counts["parts"]:
        lines.append(
            Message(
                "held_out_split.single_documents",
                "{domain}: 'group: {kind}' puts {documents:,|document|documents} into {groups:,|group|groups}. The held-out "
                "documents have two halves, and both need whole groups. The groups are too few for this. Instead, the "
                "factory holds out {parts:,|single document|single documents}, and the release gate treats each held-out "
                "document as independent. Ingest documents of more groups, or accept the single documents: 'factory data "
                "relabel --domain {domain} --group document'",
                parts=group_counts["parts"],
                **known,
            )
        )
    elif not all(group_counts["halves"]):
        sealed, dev = group_counts["halves"]
        lines.append(
            Message(
                "held_out_split.empty_half",
                "{domain}: 'group: {kind}' puts {documents:,|document|documents} into {groups:,|group|groups}. The sealed half has "
                "{sealed:,|held-out group|held-out groups} and the dev half has {dev:,|held-out group|held-out groups}. Both halves "
                "need a group before a release can be judged on this domain. Ingest documents of more groups, or group by document: "
                "'factory data relabel --domain {domain} --group document'",
                sealed=sealed,
                dev=dev,
                **known,
            )
        )
    return lines
