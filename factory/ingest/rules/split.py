"""Which documents are held out, and in which half: whole groups, by a pure function of what is here and what was recorded.

A *group* is what rises and falls together: documents of it are all held out, or all trained on. What names it is ``group`` of the domain in
``data.yaml``. Held out are those groups that a hash of their name draws, and as many others as each domain needs to be judged.

What is held out has two halves. The *sealed* half is read by the release gate alone. The *dev* half is for all else: the gates of the code
loop, agents, the weights of an average. A group lies in one half, in all domains, for ever: the ledger records it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

Kind = Literal["document", "source", "path", "url-host", "conversation", "none"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BY_DOCUMENT = ("document", "none")
PAIR = 16  # documents of a domain's first two groups that may be held out though they are more than half of it
HALVES = (True, False)  # sealed, dev


def facts_of(row: Mapping[str, Any]) -> dict[str, str]:
    """What a row names, beside its source, that its document may be grouped by.

    >>> facts_of({"url": "https://www.Example.org:443/a?b", "conversation_id": 7, "path": "src/a.py", "text": "x"})
    {'url-host': 'example.org', 'conversation': '7', 'path': 'src/a.py'}
    >>> facts_of({"url": "example.org/a", "conversation": [{"role": "user"}]})
    {'url-host': 'example.org'}
    """
    named = {"url-host": _host(row.get("url")), "path": _word(row.get("path"))}
    named["conversation"] = _word(row.get("conversation_id")) or _word(row.get("conversation"))
    return {kind: named[kind] for kind in ("url-host", "conversation", "path") if named[kind]}


def _word(value: object) -> str:
    """A name as text; '': it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 1 << 128 else ""
    return value if isinstance(value, str) and len(value) <= 1000 and value.isprintable() else ""


def _host(value: object) -> str:
    url = _word(value)
    try:
        return (urlsplit(url if "://" in url else f"//{url}").hostname or "").removeprefix("www.")
    except ValueError:  # of a bracket without its other
        return ""


def group_of(kind: Kind, source: str | None, facts: Mapping[str, str], shard: str) -> str | None:
    """The name of a document's group; None: it is a group of its own, also where it lacks what ``kind`` names. Conversations and paths are
    named within their source; ``shard``, a name of the file it came in, is the path of a row that names none.

    >>> facts = {"url-host": "example.org", "path": "a.py"}
    >>> [group_of(kind, "repo", facts, "00112233") for kind in KINDS]
    [None, 'repo', 'path:repo/a.py', 'url-host:example.org', None, None]
    >>> group_of("path", None, {}, "00112233")
    'path:00112233'
    """
    if kind in BY_DOCUMENT:
        return None
    if kind == "source":
        return source or None
    named = facts.get(kind)
    if named is None:
        return f"path:{shard}" if kind == "path" else None
    return f"{kind}:{source}/{named}" if source and kind != "url-host" else f"{kind}:{named}"


def unit_of(group: str | None, content_sha256: str) -> str:
    """What is drawn: a group by its name; a document that is its own, by its content, so that the shard it comes in decides nothing."""
    return f"content:{content_sha256}" if group is None else f"group:{group}"


def draw(unit: str) -> int:
    """A number below 2**64: the lowest are held out."""
    return int.from_bytes(hashlib.sha256(unit.encode("utf-8")).digest()[:8], "big")


def drawn(unit: str, share: float) -> bool:
    """Is it among the ``share`` that is held out?"""
    return draw(unit) < share * 2**64


def is_sealed(unit: str) -> bool:
    """The half that a tie goes to."""
    return draw(unit) % 2 == 0


@dataclass(frozen=True)
class Arrived:
    """A document of a shard that may be held out."""

    number: int  # in the shard
    key: str
    domain: str
    group: str | None
    content_sha256: str
    able: bool = True  # False: it can measure nothing, as its words were trained on, or spell a special token


@dataclass(frozen=True)
class HeldBefore:
    """What of a domain was held out before, by half: documents, groups that were held out whole, and documents that were taken from a group."""

    documents: int = 0
    groups: Mapping[bool, frozenset[str]] = field(default_factory=dict)
    parts: Mapping[bool, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """How much of a domain is held out (``data.yaml``)."""

    share: float
    least: int  # groups, in each half
    at_most: int  # documents


@dataclass(frozen=True)
class Held:
    """A document that is held out: as one of which group (its key where it is its own), and in which half."""

    group: str
    sealed: bool


@dataclass(frozen=True)
class _Unit:
    """A group's documents of this shard, or one document of it that stands for itself."""

    name: str
    unit: str
    able: Mapping[str, Sequence[Arrived]]  # by domain

    def count(self, domain: str) -> int:
        return len(self.able.get(domain, ()))


class _Domain:
    """What is held out of a domain, as the selection goes on."""

    def __init__(self, wanted: Wanted, before: HeldBefore, here: int, trained: Callable[[], int]) -> None:
        self.wanted = wanted
        self.held = before.documents
        self.groups = {half: set(before.groups.get(half, ())) for half in HALVES}
        self.parts = {half: before.parts.get(half, 0) for half in HALVES}
        self.came = before.documents + here
        self._trained = trained  # asked for only where it decides: it is a long count

    def has_come(self, least: int) -> bool:
        return self.came >= least or self.came + self._trained() >= least

    def has_room(self, more: int) -> bool:
        """Would at most half of what came be held out, and no more than the policy allows?"""
        held = self.held + more
        return held <= self.wanted.at_most and self.has_come(2 * held)

    def is_small(self, group: int) -> bool:
        """May each half have enough groups of so many documents?"""
        enough = 2 * self.wanted.least * group
        return enough <= self.wanted.at_most and self.has_come(2 * enough)

    @property
    def missing(self) -> list[bool]:
        """Halves without a group, of a domain of which some are needed."""
        return [half for half in HALVES if self.wanted.least and not self.groups[half] and not self.parts[half]]

    def short(self, parts: bool) -> bool:
        """Has a half fewer groups than are needed?"""
        return any(len(self.groups[half]) + parts * self.parts[half] < self.wanted.least for half in HALVES)

    def more_sealed(self) -> int:
        count = {half: len(self.groups[half]) + self.parts[half] for half in HALVES}
        return count[True] - count[False]


class _Selection:
    def __init__(self, domains: Mapping[str, _Domain]) -> None:
        self.domains = domains
        self.held: dict[int, Held] = {}

    def take(self, unit: _Unit, sealed: bool, part: bool = False) -> None:
        for name, ones in unit.able.items():
            domain = self.domains[name]
            ordered = sorted(ones, key=lambda one: (draw(unit_of(None, one.content_sha256)), one.key))
            ordered = ordered[: max(0, domain.wanted.at_most - domain.held)]  # of a group that was held out before
            self.held |= {one.number: Held(unit.name, sealed) for one in ordered}
            domain.held += len(ordered)
            if part:
                domain.parts[sealed] += 1
            elif ordered:
                domain.groups[sealed].add(unit.name)

    def half_of(self, unit: _Unit) -> bool:
        """The half that has fewer groups of its domains."""
        more = sum(self.domains[name].more_sealed() for name in unit.able)
        return is_sealed(unit.unit) if more == 0 else more < 0

    def is_free(self, unit: _Unit) -> bool:
        return not any(one.number in self.held for ones in unit.able.values() for one in ones)

    def fits(self, unit: _Unit, but: str = "") -> bool:
        return all(self.domains[name].has_room(unit.count(name)) for name in unit.able if name != but)

    def first_of_each_half(self, name: str, units: Iterable[_Unit], part: bool) -> None:
        """Where a half of a domain has no group: the smallest, for both halves also if these few documents are more than half of it."""
        domain, missing = self.domains[name], self.domains[name].missing
        free = [unit for unit in units if unit.count(name) and self.fits(unit, but=name)]
        chosen = sorted(free, key=lambda unit: (unit.count(name), draw(unit.unit), unit.name))[: len(missing)]
        while chosen:
            count = sum(unit.count(name) for unit in chosen)
            few = domain.held + count <= min(PAIR, domain.wanted.at_most)
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
        """Those that are drawn, and those that a domain needs: small ones first, as large ones leave no room for enough of them."""
        for large in (False, True):
            for unit in units:
                of = [(self.domains[name], unit.count(name)) for name in unit.able]
                is_wanted = any(domain.short(part) for domain, _ in of)
                is_wanted |= not part and any(drawn(unit.unit, domain.wanted.share) for domain, _ in of)
                is_right = all(not domain.missing if large else domain.is_small(count) for domain, count in of)
                if is_wanted and is_right and self.fits(unit) and self.is_free(unit):
                    self.take(unit, self.half_of(unit), part)


def select(
    arrived: Sequence[Arrived],
    recorded: Mapping[str, bool],
    trained: Collection[str],
    before: Mapping[str, HeldBefore],
    wanted: Callable[[str], Wanted],
    trained_documents: Callable[[str], int],
) -> dict[int, Held]:
    """Which of the documents of a shard are held out, by their numbers.

    ``recorded``: groups that were held out, with their half; ``trained``: groups of which a document was trained on: none of these is held
    out whole any more. ``before``, ``wanted``, ``trained_documents`` (how many were trained on before): by domain.

    1. Of a group that was held out before, all, in its half.
    2. Of each domain the first group of each half (``first_of_each_half``).
    3. Groups that are drawn, and those drawn next of domains that have fewer than ``least`` in a half, each into the half that has fewer of
       its domains, as long as at most half of what came of a domain is held out, and ``at_most`` documents.
    4. Of a domain that is grouped so that a half has no group (one source, say, or few large ones) single documents, each as a group of its
       own, within the same bounds: it is better judged by them than not at all.
    """
    here = Counter(one.domain for one in arrived)
    domains = {
        name: _Domain(wanted(name), before.get(name, HeldBefore()), count, partial(trained_documents, name))
        for name, count in here.items()
    }
    selection, free = _Selection(domains), []
    for name, ones in _by(arrived, lambda one: one.group or one.key).items():
        able = _by((one for one in ones if one.able), lambda one: one.domain)
        unit = _Unit(name, unit_of(ones[0].group, ones[0].content_sha256), able)
        if name in recorded:
            selection.take(unit, recorded[name])
        elif name not in trained and 0 < len(ones) <= 2 * sum(map(len, able.values())):
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
        rest = (one for one in arrived if one.domain == name and one.able and one.group not in {None, *recorded})
        own = _in_order(_Unit(one.key, unit_of(None, one.content_sha256), {name: [one]}) for one in rest)
        own = [unit for unit in own if selection.is_free(unit)]
        if domain.missing:
            selection.first_of_each_half(name, own, part=True)
        selection.others(own, part=True)
    return selection.held


def _in_order(units: Iterable[_Unit]) -> list[_Unit]:
    return sorted(units, key=lambda unit: (draw(unit.unit), unit.name))


def _by(ones: Iterable[Arrived], name: Callable[[Arrived], str]) -> dict[str, list[Arrived]]:
    """In the order of names."""
    found: dict[str, list[Arrived]] = {}
    for one in sorted(ones, key=lambda one: (name(one), one.number)):
        found.setdefault(name(one), []).append(one)
    return found


def grouping_lines(domain: str, found: Mapping[str, Any]) -> list[str]:
    """What a person should know of how a domain of a shard is grouped (``factory.ingest.decide``).

    >>> told = {"group": "source", "documents": 800, "groups": 1, "lacking": 0, "parts": 16, "halves": [8, 8]}
    >>> for line in grouping_lines("reviews", told): print(line)
    reviews: 'group: source' makes 1 group of its 800 documents, and none can be held out whole in each half: 16 documents of it are held out, \
which the release gate takes as independent. Bring documents of more groups; or accept it: 'factory data relabel --domain reviews --group document'
    """
    kind, remedy = found["group"], f"'factory data relabel --domain {domain} --group document'"
    lines = []
    if found["lacking"]:
        what = {"source": "source", "url-host": "url", "conversation": "conversation_id", "path": "path"}[kind]
        lines.append(
            f"{domain}: {found['lacking']:,} of {found['documents']:,} documents name no {what}, so each is a group of its own ('group: {kind}')"
        )
    groups = f"{found['groups']:,} group{'s' if found['groups'] != 1 else ''}"
    makes = f"{domain}: 'group: {kind}' makes {groups} of its {found['documents']:,} documents"
    if found["parts"]:
        lines.append(
            f"{makes}, and none can be held out whole in each half: {found['parts']:,} documents of it are held out, which the release gate takes "
            f"as independent. Bring documents of more groups; or accept it: {remedy}"
        )
    elif not all(found["halves"]):
        sealed, dev = found["halves"]
        lines.append(
            f"{makes}: {sealed} are held out in the sealed half and {dev} in the dev half, so no release can be judged on it yet. Bring documents "
            f"of more groups, or {remedy}"
        )
    return lines
