"""Computes the gain that the release gate can detect, before the first candidate, from the sizes of the held-out data alone.

``compute_releasability(policy, sizes)`` makes the evidence of a candidate that is as good as its champion, with an assumed spread of each document
group and item. The judge's own functions (``factory.gates.release.guards``, ``factory.tasks.comparing.find_unreliable_metrics``) then compute which
guards stand, the size that each guard needs, and the gain that is detected.

>>> found = compute_releasability(ReleasePolicy(), SuiteSizes({"code": DomainSize(8, 8, 8), "docs": DomainSize(3, 3, 1)}, cloze_items=11))
>>> [(guard.name, guard.state, guard.have, guard.needed) for guard in found.guards]
[('code', 'stands', 8, 17), ('docs', 'missing', 3, 17), ('cloze', 'aside', 11, 70)]
>>> found.gain is None, [line for line in found.holds]
(True, ['docs has only 3 held-out documents from 3 document groups. At least 8 documents from 8 groups are needed'])
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from factory.evals.power import RequiredBound, ScoredGuard, compute_variance_of_share
from factory.evals.statistics import CLOZE, Gain
from factory.gates.release.evidence import ReleaseEvidence, read_finite_number
from factory.gates.release.guards import (
    compute_detectable_gain,
    compute_guard_floors,
    count_groups_to_show_no_loss,
    list_unreliable_guards,
    make_cloze_guard,
)
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.release_line import GATE
from factory.ledger.rows import SqlReader, VerdictRow
from factory.tasks.comparing import TaskEvidence
from factory.tasks.comparing import find_unreliable_metrics as tasks_aside
from kernels.contract.message import Message

SPREAD = 0.03  # bits per byte: standard deviation of a group's difference, as the calibration of the judge draws it (``benchmarks/judge``)
RIGHT = 0.5  # assumed share of items that a champion answers right; this value gives the widest spread


@dataclass(frozen=True)
class DomainSize:
    """The held-out documents of a domain. ``spread``: standard deviation of a group's difference, in bits per byte; None: ``SPREAD``."""

    documents: int  # scored documents of the sealed half
    groups: int
    dev_groups: int
    spread: float | None = None


@dataclass(frozen=True)
class TaskSize:
    """A task: the numbers of its items and item groups, its allowed loss, and the champion's share of right answers, or an assumed share."""

    items: int
    groups: int
    margin: float
    right: float = RIGHT


@dataclass(frozen=True)
class SuiteSizes:
    domains: Mapping[str, DomainSize]
    cloze_items: int = 0
    cloze_right: float = RIGHT
    tasks: Mapping[str, TaskSize] = field(default_factory=dict)
    tasks_alpha: float = 0.05  # guards_alpha of tasks.yaml
    look: int = 1  # of the candidate against its champion


@dataclass(frozen=True)
class GuardRequirement:
    """A guard before any candidate.

    ``state``: 'stands'; 'aside': the result of the guard only informs; 'missing': too little is held out, so the guard holds every candidate.
    ``have`` and ``needed`` count the document groups of a domain, or the items of cloze and of a task. With ``needed``, four of five equally good
    models pass the guard; None: no number is enough. ``passed``: the share of equally good models that pass.
    """

    name: str
    state: Literal["stands", "aside", "missing"]
    have: int
    needed: int | None
    passed: float
    margin: float | None = None  # of a task that is aside: the smallest margin at which its items are enough


@dataclass(frozen=True)
class Releasability:
    guards: tuple[GuardRequirement, ...]
    gain: (
        float | None
    )  # the smallest gain, the same in every domain, that is detected with a probability of 80 %; None: no gain is detected
    holds: tuple[Message, ...] = ()  # problems that hold every candidate


def compute_releasability(policy: ReleasePolicy, sizes: SuiteSizes) -> Releasability:
    """Return which guards stand, the size that each guard needs, and the gain that is detected. Pure."""
    assumed = _assumed(policy, sizes)
    found = []
    holds = []
    floor, _, _ = compute_guard_floors(policy, assumed)
    for name, domain in sorted(sizes.domains.items()):
        few = domain.documents < policy.documents_min or domain.groups < policy.clusters_min or domain.dev_groups < 1
        eight = Gain(0.0, (domain.spread or SPREAD) / math.sqrt(8), 8, 8.0)
        needed = count_groups_to_show_no_loss(eight, policy.guards.alpha, floor[name])
        passed = RequiredBound(assumed.guards[name], policy.guards.alpha, floor[name]).compute_pass_probability(0.0)
        size = None if needed is None else max(needed, policy.clusters_min)
        found.append(GuardRequirement(name, "missing" if few else "stands", domain.groups, size, passed))
        if few:
            held = {"domain": name, "documents": domain.documents, "groups": domain.groups}
            least = {"least_documents": policy.documents_min, "least_groups": policy.clusters_min}
            holds.append(
                Message(
                    "release.too_little_held_out",
                    "{domain} has only {documents} held-out documents from {groups:|document group|document groups}. At least {least_documents} "
                    "documents from {least_groups} groups are needed",
                    **held, **least,
                )
                if domain.dev_groups
                else Message(
                    "release.nothing_in_dev_half",
                    "{domain} has {documents} held-out documents from {groups:|document group|document groups}, but no document in the dev half. "
                    "At least {least_documents} documents from {least_groups} groups are needed",
                    **held, **least,
                )
            )  # fmt: skip
    if (cloze := make_cloze_guard(policy, assumed)) is not None:
        found.append(_scored(CLOZE, cloze, CLOZE in list_unreliable_guards(policy, assumed)))
    tasks = _assumed_tasks(sizes)
    apart = tasks_aside(tasks, policy.clusters_min)
    for name, task in sorted(sizes.tasks.items()):
        known = ScoredGuard(task.items, float(task.groups), tasks.variances[name], task.margin, sizes.tasks_alpha)
        mine = _scored(name, known, name in apart)
        if mine.state == "aside" and task.groups >= policy.clusters_min:
            mine = replace(mine, margin=known.find_margin_needed())
        found.append(mine)
    return Releasability(tuple(found), None if holds else compute_detectable_gain(policy, assumed), tuple(holds))


def read_group_spreads_by_domain(db: SqlReader) -> dict[str, float]:
    """Return domain → standard deviation of a group's difference in bits per byte, from the newest verdict against a champion."""
    for row in VerdictRow.select(db, "WHERE gate = :gate AND against IS NOT NULL ORDER BY id DESC LIMIT 1", gate=GATE):
        guards: Mapping[str, Any] = row.read_evidence(db).get("guards") or {}
        known = {name: _spread(stored) for name, stored in guards.items() if name != CLOZE}
        return {name: value for name, value in known.items() if value}
    return {}


def _spread(stored: Any) -> float | None:
    error, effective = (stored.get(key) for key in ("error", "effective")) if isinstance(stored, dict) else (None, None)
    error, effective = read_finite_number(error), read_finite_number(effective)
    return (
        error * math.sqrt(effective)
        if error is not None and effective is not None and min(error, effective) > 0
        else None
    )


def _scored(name: str, known: ScoredGuard, is_aside: bool) -> GuardRequirement:
    return GuardRequirement(
        name, "aside" if is_aside else "stands", known.items, known.find_items_needed(), known.pass_rate_of_equal_models
    )


def _assumed(policy: ReleasePolicy, sizes: SuiteSizes) -> ReleaseEvidence:
    """Return the evidence of a candidate that is as good as the champion, for groups of equal size with the assumed spread."""
    guards = {
        name: Gain(0.0, (one.spread or SPREAD) / math.sqrt(max(one.groups, 1)), one.groups, float(one.groups))
        for name, one in sizes.domains.items()
    }
    weights = policy.target.weights or dict.fromkeys(sizes.domains, 1.0)
    shares = {name: weights.get(name, 0.0) for name in sizes.domains}
    total = sum(shares.values())
    target = None
    if total:
        parts = {name: share / total for name, share in shares.items()}
        error = math.sqrt(sum((part * (guards[name].error or 0.0)) ** 2 for name, part in parts.items()))
        effective = 1 / max(sum(part**2 / max(sizes.domains[name].groups, 1) for name, part in parts.items()), 1e-12)
        groups = sum(sizes.domains[name].groups for name, part in parts.items() if part)
        target = Gain(0.0, error, groups, effective)
    if sizes.cloze_items:
        groups = min(sizes.cloze_items, sum(one.groups for one in sizes.domains.values()))
        guards[CLOZE] = Gain(0.0, 0.0, groups, float(groups))
    return ReleaseEvidence(
        domains=tuple(sorted(sizes.domains)),
        noise_floor=dict.fromkeys(sizes.domains, 0.0),
        cloze_items=sizes.cloze_items,
        champion_cloze=sizes.cloze_right,
        guards=guards,
        lost=dict.fromkeys(guards, 0.0),
        target=target,
        look=sizes.look,
    )


def _assumed_tasks(sizes: SuiteSizes) -> TaskEvidence:
    return TaskEvidence(
        gains={name: Gain(0.0, 0.0, task.groups, float(task.groups)) for name, task in sizes.tasks.items()},
        margins={name: task.margin for name, task in sizes.tasks.items()},
        items={name: task.items for name, task in sizes.tasks.items()},
        variances={name: compute_variance_of_share(task.right, task.items) for name, task in sizes.tasks.items()},
        alpha=sizes.tasks_alpha,
    )
