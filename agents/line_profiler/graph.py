"""Finds relations between the recorded operations: lines that feed others, lines that could be fused, branches that could overlap.

All functions are pure: they compare the storages that the events read and write.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations

from agents.line_profiler.capture import Line, RecordedOperation
from agents.line_profiler.lines import read_source_lines
from agents.line_profiler.profile_schema import (
    ConcurrencyCandidate,
    DataFlowEdge,
    FusionCandidate,
    ProfiledLine,
    format_line_name,
)

LEAST_GAIN = 1e-3  # share of the step: smaller candidates are not listed
MOST_LISTED = 20
Callers = Mapping[Line, tuple[tuple[str, int], ...]]


def find_data_flow_edges(events: Sequence[RecordedOperation], callers: Callers) -> list[DataFlowEdge]:
    """Edges from the line that last wrote a storage to the line that reads it, in the forward pass and the optimiser. All layers of the
    model run the same lines, so they share edges.

    ``callers``: the lines that called each line. A line also depends on the conditions of its callers.
    """
    writer: dict[int, Line] = {}
    walked: Counter[tuple[Line, Line]] = Counter()
    for event in events:
        if event.backward:
            continue
        for storage in event.reads:
            source = writer.get(storage)
            if source is not None and source != event.line:
                walked[source, event.line] += event.bytes / max(1, len(event.reads) + len(event.writes))  # type: ignore[assignment]
        writer |= dict.fromkeys(event.writes, event.line)
    conditions = {line: _conditions_above(line, callers) for edge in walked for line in edge}
    return [
        DataFlowEdge(
            format_line_name(*source), format_line_name(*target), bool(conditions[target] - conditions[source]), moved
        )
        for (source, target), moved in walked.items()
    ]


def _conditions_above(line: Line, callers: Callers) -> frozenset[tuple[str, int]]:
    every = ((line[0], line[1]), *callers.get(line, ()))
    return frozenset((file, test) for file, number in every for test in find_conditions_of_lines(file).get(number, ()))


@cache
def find_conditions_of_lines(file: str) -> dict[int, frozenset[int]]:
    """For each line, the lines of the conditions on which it depends: an ``if`` around it, or an earlier ``if`` that returns."""
    found: dict[int, frozenset[int]] = {}

    def visit(body: Iterable[ast.stmt], outer: frozenset[int]) -> None:
        for statement in body:
            for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                found[number] = outer
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                visit(statement.body, frozenset())
            elif isinstance(statement, ast.If):
                inside = outer | {statement.lineno}
                visit(statement.body, inside)
                visit(statement.orelse, inside)
                if isinstance(statement.body[-1], (ast.Return, ast.Continue, ast.Raise)):
                    outer = inside  # what follows runs only when the test fails
            elif isinstance(statement, (ast.For, ast.While, ast.With)):
                visit(statement.body, outer)
            elif isinstance(statement, ast.Try):
                visit([*statement.body, *statement.orelse, *statement.finalbody], outer)

    visit(ast.parse("\n".join(read_source_lines(file))).body, frozenset())
    return found


def find_fusion_candidates(
    events: Sequence[RecordedOperation], lines: Iterable[ProfiledLine], bytes_per_s: float, step_s: float
) -> list[FusionCandidate]:
    """Chains of memory-bound lines with intermediates that no other line reads; largest gain first.

    A line is joined to another if no third line reads the tensors that the first writes, in the forward pass or in the backward pass of
    either: the backward of a fused kernel computes the intermediate again. A line of several operations may be a chain by itself.
    """
    by_line = {(line.file, line.line, line.op): line for line in lines if line.bound == "memory"}
    memory_bound = by_line.keys()
    makers: defaultdict[int, set[Line]] = defaultdict(set)
    readers: defaultdict[int, set[Line]] = defaultdict(set)
    made_by: defaultdict[Line, set[int]] = defaultdict(set)  # in the forward pass
    existed = set[int]()  # before the step: parameters, their states, the batch
    for event in events:
        for storage in event.reads:
            readers[storage].add(event.line)
            if storage not in makers:
                existed.add(storage)
        for storage in event.writes:
            makers[storage].add(event.line)
            if not event.backward:
                made_by[event.line].add(storage)
    links = []
    for line in memory_bound & made_by.keys():
        others = set[Line]().union(*(readers[storage] | makers[storage] for storage in made_by[line])) - {line}
        if len(others) == 1 and others <= memory_bound:
            links.append((line, *others))
    chain = _joined([*links, *((line,) for line in memory_bound)])
    saved: Counter[Line] = Counter()
    inside = defaultdict[Line, set[int]](set)
    for event in events:
        operands = (*event.reads, *event.writes)
        for storage in operands:
            users = readers[storage] | makers[storage]
            if readers[storage] and storage not in existed and len({chain.get(user) for user in users}) == 1:
                root = chain.get(event.line)
                if root is not None:
                    inside[root].add(storage)
                    # An event's traffic is shared evenly by its operands: those of pointwise lines are of one size.
                    saved[root] += event.bytes / len(operands)  # type: ignore[assignment]
    order = {line: number for number, line in reversed(list(enumerate(e.line for e in events)))}
    found = []
    for root, total in saved.items():
        members = sorted((line for line in chain if chain[line] == root and line in order), key=order.__getitem__)
        chained = [by_line[member] for member in members]
        # What stays in cache moves faster than a copy, so the gain is at most the bytes' share of the chain's time.
        reached = sum(line.bytes for line in chained) / sum(line.seconds for line in chained)
        gain = total / max(bytes_per_s, reached)
        if gain >= LEAST_GAIN * step_s:
            names = tuple(format_line_name(*line) for line in members)
            found.append(FusionCandidate(names, len(inside[root]), total, gain, gain / step_s))
    return sorted(found, key=lambda c: -c.gain_s)[:MOST_LISTED]


def _joined(groups: Iterable[Sequence[Line]]) -> dict[Line, Line]:
    """Line → the line that represents its group (union-find)."""
    parent: dict[Line, Line] = {}

    def root(line: Line) -> Line:
        parent.setdefault(line, line)
        while parent[line] != line:
            line = parent[line]
        return line

    for first, *others in groups:
        root(first)
        for other in others:
            parent[root(other)] = root(first)
    return {line: root(line) for line in parent}


def find_concurrency_candidates(events: Sequence[RecordedOperation], step_s: float) -> list[ConcurrencyCandidate]:
    """Pairs of branches that start at one tensor and do not depend on each other, largest gain first. All layers share their lines.

    A branch is its first operation and all operations that depend on it, without those that depend on the other branch too. A kernel op
    counts for the line that calls it, so that two calls of one op are two branches.
    """
    working = [event for event in events if event.reads or event.writes]
    places = [event.called_from or format_line_name(*event.line) for event in working]
    above, forks = _ancestors(working)
    below = _descendants(above)
    seconds = lambda bits: sum(working[n].seconds for n in _members(bits))
    found: defaultdict[tuple[str, str, bool], list[tuple[float, int, int, int]]] = defaultdict(list)
    for producer, readers in forks.items():
        starts: defaultdict[tuple[str, bool], int] = defaultdict(int)
        for n in readers:
            starts[places[n], working[n].backward] |= 1 << n
        for (one, first), (another, second) in combinations(starts.items(), 2):
            if one[1] != another[1]:
                continue
            follows, others = (_united(below, bits) for bits in (first, second))
            if not follows & second and not others & first:
                mine, other = follows & ~others, others & ~follows
                gain = min(seconds(mine), seconds(other))
                found[one[0], another[0], one[1]].append((gain, producer, mine, other))
    candidates = []
    for (_, _, backward), pairs in found.items():
        pairs.sort(reverse=True)
        used, gain, times = 0, 0.0, 0
        for each, _, mine, other in pairs:  # several forks may lead to the same branches: each operation counts once
            if not used & (mine | other):
                used, gain, times = used | mine | other, gain + each, times + 1
        _, producer, mine, other = pairs[0]
        branches = tuple(tuple(dict.fromkeys(places[n] for n in _members(bits))) for bits in (mine, other))
        if gain >= LEAST_GAIN * step_s:
            fork = places[producer]
            candidates.append(
                ConcurrencyCandidate(fork, (branches[0], branches[1]), backward, times, gain, gain / step_s)
            )
    return sorted(candidates, key=lambda c: -c.gain_s)[:MOST_LISTED]


def _united(below: Sequence[int], starts: int) -> int:
    """The given operations and all that depend on them."""
    bits = starts
    for n in _members(starts):
        bits |= below[n]
    return bits


def _ancestors(events: Sequence[RecordedOperation]) -> tuple[list[int], dict[int, list[int]]]:
    """(for each event, the events on which it depends, as bits of an integer; event → the events that read its output)."""
    writer: dict[int, int] = {}
    above: list[int] = []
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        sources = {writer[storage] for storage in (*event.reads, *event.writes) if storage in writer}
        needed = 0
        for source in sources:
            needed |= above[source] | 1 << source
        above.append(needed)
        for source in {writer[storage] for storage in event.reads if storage in writer}:
            readers[source].append(number)
        writer |= dict.fromkeys(event.writes, number)
    return above, {source: found for source, found in readers.items() if len(found) > 1}


def _descendants(above: Sequence[int]) -> list[int]:
    below = [0] * len(above)
    for number, needed in enumerate(above):
        for source in _members(needed):
            below[source] |= 1 << number
    return below


def _members(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
