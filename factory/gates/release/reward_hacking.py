"""Detects reward hacking: over the line of candidates, the dev half of the held-out documents improves and the sealed half does not.

The loop, agents and people choose candidates by the dev half. The verdict on each candidate has its gains over its champion on both halves. The gains
along the line of champions add up, so any two candidates of the line can be compared, even on different suites. So a sum of small steps can show an
effect that no single step shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from factory.evals.statistics import Gain
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.release_line import GATE
from factory.ledger.rows import SqlReader, Subject, VerdictRow

NEWEST = 10  # the number of earlier candidates that a new candidate is compared with
HALVES = ("on_dev", "on_sealed", "halves_gap")


@dataclass(frozen=True)
class JudgedCandidate:
    """A judged candidate, with its gains over the candidate ``against``, which was the champion at that time."""

    candidate: int
    against: int | None
    gains: Mapping[str, Gain]


def add_dev_only_gain_evidence(
    db: SqlReader, candidate: int, champion: int, evidence: ReleaseEvidence
) -> ReleaseEvidence:
    """Return the evidence with the gains since one of the ``NEWEST`` candidates: the one since which the dev half most clearly rose alone."""
    here = {name: getattr(evidence, name) or Gain() for name in HALVES}
    line = [point for point in read_judged_candidates(db) if point.candidate != candidate]
    mine = JudgedCandidate(candidate, champion, here)
    rises = [(compute_gain_between_candidates(before, mine, line), before.candidate) for before in line[-NEWEST:]]
    seen = [(rise, since) for rise, since in rises if rise["halves_gap"].error]
    if not seen:
        return replace(evidence, watched=0)
    rise, since = min(seen, key=lambda one: (one[0]["halves_gap"].gain or 0.0) / (one[0]["halves_gap"].error or 1.0))
    return replace(
        evidence,
        watched=len(seen),
        rise_since=since,
        rise_dev=rise["on_dev"],
        rise_sealed=rise["on_sealed"],
        rise_gap=rise["halves_gap"],
    )


def read_judged_candidates(db: SqlReader) -> list[JudgedCandidate]:
    """Return the candidates with the newest verdict of each that compared both halves, in the order of these verdicts."""
    found: dict[int, JudgedCandidate] = {}
    for row in VerdictRow.select(db, "WHERE gate = :gate ORDER BY id", gate=GATE):
        stored = row.read_evidence(db)
        against = Subject.parse(row.against).number if row.against else None
        if against is None:
            found.setdefault(
                row.subject_number,
                JudgedCandidate(row.subject_number, None, dict.fromkeys(HALVES, Gain(0.0, 0.0, 0, math.inf))),
            )
        elif all(isinstance(stored.get(name), dict) for name in HALVES):
            found.pop(row.subject_number, None)
            found[row.subject_number] = JudgedCandidate(
                row.subject_number, against, {name: _gain(stored[name]) for name in HALVES}
            )
    return list(found.values())


def compute_gain_between_candidates(
    before: JudgedCandidate, now: JudgedCandidate, line: Sequence[JudgedCandidate]
) -> dict[str, Gain]:
    """Return half → the gain of ``now`` over ``before``, computed through the champion that both descend from.

    Errors are added as if they came from different documents, which errs on the safe side. The degrees of freedom are those of Welch (1947) and
    Satterthwaite (1946). The gain is empty if no common champion is known.

    >>> step = lambda number, against: JudgedCandidate(number, against, {"on_dev": Gain(0.01, 0.003, 20, 21.0)})
    >>> line = [step(2, 1), step(3, 2), step(4, 2)]
    >>> found = compute_gain_between_candidates(line[0], step(5, 3), line)["on_dev"]  # 5 over 3, 3 over 2
    >>> round(found.gain, 3), round(found.error, 4), round(found.effective, 1)
    (0.02, 0.0042, 41.0)
    >>> round(compute_gain_between_candidates(line[2], step(5, 3), line)["on_dev"].gain, 3)  # 4 over 2 is left
    0.01
    """
    by_number = {point.candidate: point for point in line}
    ours, theirs = _path(now, by_number), _path(before, by_number)
    if (ours[-1].against, ours[-1].candidate) != (theirs[-1].against, theirs[-1].candidate) and ours[
        -1
    ].against != theirs[-1].against:
        return dict.fromkeys(now.gains, Gain())  # no common champion is known
    shared = {point.candidate for point in ours} & {point.candidate for point in theirs}
    up = [point for point in ours if point.candidate not in shared]
    down = [point for point in theirs if point.candidate not in shared]
    return {name: _sum([p.gains[name] for p in up], [p.gains[name] for p in down]) for name in now.gains}


def _path(point: JudgedCandidate, line: Mapping[int, JudgedCandidate]) -> list[JudgedCandidate]:
    """Return a candidate, its champion, that champion's champion, and so on."""
    path = [point]
    while (before := path[-1].against) is not None and before in line and line[before] not in path:
        path.append(line[before])
    return path


def _sum(up: Sequence[Gain], down: Sequence[Gain]) -> Gain:
    every = [*up, *down]
    if any(one.gain is None or one.error is None or (one.effective or 0) <= 1 for one in every):
        return Gain()
    gain = math.fsum(one.gain or 0.0 for one in up) - math.fsum(one.gain or 0.0 for one in down)
    squares = [(one.error or 0.0) ** 2 for one in every]
    total = math.fsum(squares)
    below = math.fsum(square**2 / ((one.effective or 0.0) - 1) for square, one in zip(squares, every, strict=True))
    clusters = sum(one.clusters or 0 for one in every)
    return (
        Gain(gain, math.sqrt(total), clusters, total**2 / below + 1) if below else Gain(gain, 0.0, clusters, math.inf)
    )


def _gain(stored: Mapping[str, Any]) -> Gain:
    return Gain(**{key: stored.get(key) for key in ("gain", "error", "clusters", "effective")})
