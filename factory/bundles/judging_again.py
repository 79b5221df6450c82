"""Judges a release again from what its bundle holds: from the items to the numbers, from the numbers to the verdict.

Taken as they are recorded: the noise floor, what replicas showed, the baselines, the checks, how often the champion was challenged, what
releases before lost.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleError, BundleFolder, difference, shown
from factory.bundles.two_verdicts import TwoVerdicts
from factory.core.errors import InputError
from factory.core.policy_file import policy_sha256
from factory.evals.statistics import Gain
from factory.evals.suite import identity_sha256
from factory.evals.tasks import EvalItem, ratio_bits
from factory.gates.release.evidence import FIRST_RELEASE, ReleaseEvidence
from factory.gates.release.gate import measured
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.recorded import evidence_of, evidence_sha256, judged_again
from factory.tasks.comparing import TaskEvidence, gains, scores
from kernels.contract.files import finite
from trainer.contract.strict import parse

TOLERANCE = 1e-9  # relative: sums in another order, or on another machine
_ITEMS = TypeAdapter(EvalItem)
# Of the ledger, which a bundle does not have: taken as recorded, and signed.
RECORDED = (
    "look", "lost", "releasable", "not_releasable", "disputed", "anomalies", "sealed_looks", "fresh_documents", "older_documents", "on_fresh",
    "fresh_gap", "replicas", "replica_noise", "replica_target", "watched", "rise_since", "rise_dev", "rise_sealed", "rise_gap",
    "trained_on", "candidate",
)  # fmt: skip


def policy_problems(folder: BundleFolder) -> list[str]:
    """Is the policy the one that the verdict was given under? Raises: BundleError."""
    raw = folder.read(layout.POLICY)
    _policy(folder)
    wanted = folder.object(layout.VERDICT).get("policy_sha256")
    if hashlib.sha256(raw).hexdigest() != wanted:
        return [f"the verdict was given under another policy (sha256 {shown(str(wanted), 12)})"]
    return []


def evidence_problems(folder: BundleFolder) -> list[str]:
    """Do the numbers that were judged follow from the items and measurements? Raises: BundleError."""
    stored = folder.object(layout.EVIDENCE)
    if stored.get("sha256") != evidence_sha256(stored):
        return ["the evidence does not have the hash that was recorded with it"]
    evidence, tasks = _evidence(stored)
    summaries, items = folder.object(layout.MEASUREMENTS), _items(folder)
    first = evidence.against == FIRST_RELEASE
    wanted = {layout.CANDIDATE} if first else {layout.CANDIDATE, layout.CHAMPION}
    if set(summaries) != wanted or set(items) - wanted:
        return [f"{layout.MEASUREMENTS}, {layout.ITEMS}: expected those of {' and '.join(sorted(wanted))}"]
    sides = {who: (_mapping(summaries[who], who), items.get(who, [])) for who in wanted}
    found = [words for who, side in sides.items() if (words := _summary_problem(who, *side))]
    try:
        again = measured(
            _policy(folder),
            evidence.domains,
            str(evidence.against),
            sides[layout.CANDIDATE],
            sides.get(layout.CHAMPION),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [*found, f"{layout.MEASUREMENTS} cannot be read: {shown(repr(error))}"]
    values, recorded = finite(asdict(again)), finite(asdict(evidence))
    for name in RECORDED:
        del values[name], recorded[name]
    if words := difference(recorded, values, TOLERANCE):
        found.append(f"the evidence does not follow from the items and measurements: {words}")
    if words := _task_problem(folder, tasks):
        found.append(f"the evidence of tasks does not follow from their items: {words}")
    return found


def two_verdicts(folder: BundleFolder) -> TwoVerdicts:
    """What the verdict says, and what the judge says of this policy and evidence. Raises: BundleError."""
    stored = folder.object(layout.EVIDENCE)
    evidence, _ = _evidence(stored)
    try:
        verdict = judged_again(_policy(folder), stored, layout.EVIDENCE)
    except InputError as error:
        raise BundleError(shown(str(error), 300)) from None
    against = None if evidence.against == FIRST_RELEASE else evidence.against
    return TwoVerdicts(folder.object(layout.VERDICT), verdict, against, str(stored.get("sha256")))


def held_out_problems(folder: BundleFolder) -> list[str]:
    """Are the items those of the suite that the evidence names? Raises: BundleError."""
    stored, evidence = folder.object(layout.HELD_OUT), folder.object(layout.EVIDENCE)
    if stored.get("suite_sha256") != evidence.get("suite_sha256"):
        return [f"it is of another suite than {layout.EVIDENCE}"]
    identity, halves = stored.get("identity"), {name: stored.get(name) for name in ("items", "dev")}
    for name, listed in halves.items():
        if not isinstance(listed, list) or not all(
            isinstance(row, list) and len(row) == 4 and all(isinstance(part, str) for part in row) for row in listed
        ):
            return [f"{name}: expected rows of key, domain, source and SHA-256"]
    if extra := sorted(stored.keys() - {"suite_sha256", "identity", *halves}):
        return [f"{shown(extra[0])} has no place there"]
    if isinstance(identity, dict) and identity_sha256(identity | halves) != stored["suite_sha256"]:
        return ["the items do not have the suite's hash"]
    known = {row[0]: (row[1], row[2]) for listed in halves.values() for row in listed or ()}
    for who, items in _items(folder).items():
        for item in items:
            if known.get(item.item) != (item.domain, item.cluster):
                return [f"{layout.ITEMS}: {who}'s {shown(item.item)} is not among the held-out documents"]
    return []


def _summary_problem(who: str, summary: dict[str, Any], items: list[EvalItem]) -> str:
    """Where a summary's totals are not those of its items, in words."""
    scored = [item for item in items if item.task == "bpb"]
    if any(item.weight <= 0 for item in scored):
        return f"{who}: an item without bytes"
    bits = {item.domain: ratio_bits([i for i in scored if i.domain == item.domain])[item.domain] for item in scored}
    if words := difference(summary.get("bpb"), bits, TOLERANCE, "bits per byte"):
        return f"{who}: the items say otherwise: {words}"
    cloze = [item.value for item in items if item.task == "cloze"]
    totals = {"items": len(cloze), "share_right": sum(cloze) / len(cloze) if cloze else None}
    told = summary.get("cloze")
    told = {key: told.get(key) for key in totals} if isinstance(told, dict) else told
    if words := difference(told, totals, TOLERANCE, "cloze"):
        return f"{who}: the items say otherwise: {words}"
    counted = summary.get("documents")
    for domain in bits:
        count = counted.get(domain) if isinstance(counted, dict) else None
        if not isinstance(count, int) or count < sum(item.domain == domain for item in scored):
            return f"{who}: {shown(domain)}: more items than held-out documents"
    return ""


def _task_problem(folder: BundleFolder, tasks: TaskEvidence) -> str:
    """Where the values and gains of tasks are not those of their items, in words."""
    if not tasks.evaluations:
        return ""
    of_task: dict[str, dict[str, list[EvalItem]]] = {}
    costs = set[str]()
    for number, row in enumerate(folder.rows(layout.TASK_ITEMS), 1):
        task, cost = row.pop("measured_in", None), row.pop("cost", None)
        if not isinstance(task, str) or task not in tasks.evaluations or not isinstance(cost, bool):
            raise BundleError(
                f"{layout.TASK_ITEMS}, line {number}: {shown(str(task))} is no task that was judged, or 'cost' is no truth value"
            )
        who, item = _item(layout.TASK_ITEMS, number, row)
        costs |= {item.task} if cost else set()
        of_task.setdefault(task, {}).setdefault(who, []).append(item)
    values: dict[str, float | None] = {}
    over: dict[str, Gain] = {}
    for sides in of_task.values():
        ours, theirs = (sides.get(who, []) for who in (layout.CANDIDATE, layout.CHAMPION))
        values |= {metric: gain.gain for metric, gain in scores(ours).items()}
        over |= (gains(ours, theirs, sorted(costs)) or {}) if theirs else {}
    told = {"values": dict(tasks.values), "gains": {name: asdict(gain) for name, gain in tasks.gains.items()}}
    again = {"values": values, "gains": {name: asdict(gain) for name, gain in over.items()}}
    return difference(finite(told), finite(again), TOLERANCE)


def _items(folder: BundleFolder) -> dict[str, list[EvalItem]]:
    found: dict[str, list[EvalItem]] = {}
    for number, row in enumerate(folder.rows(layout.ITEMS), 1):
        who, item = _item(layout.ITEMS, number, row)
        found.setdefault(who, []).append(item)
    return found


def _item(name: str, number: int, row: dict[str, Any]) -> tuple[str, EvalItem]:
    """(whose, the item) of a line of a file. Raises: BundleError."""
    who = row.pop("of", None)
    try:
        item = _ITEMS.validate_json(json.dumps(row), strict=True)
    except ValidationError as error:
        raise BundleError(f"{name}, line {number}: {_first(error)}") from None
    if who not in (layout.CANDIDATE, layout.CHAMPION) or set(row) != {field.name for field in fields(EvalItem)}:
        raise BundleError(f"{name}, line {number}: an item of {shown(str(who))} with other keys than an item has")
    return who, item


def _evidence(stored: dict[str, Any]) -> tuple[ReleaseEvidence, TaskEvidence]:
    try:
        return evidence_of(stored, layout.EVIDENCE)
    except InputError as error:
        raise BundleError(shown(str(error), 300)) from None


def _policy(folder: BundleFolder) -> ReleasePolicy:
    raw = folder.object(layout.POLICY)
    try:
        policy = parse(ReleasePolicy, raw, layout.POLICY, InputError)
    except InputError as error:
        raise BundleError(shown(str(error), 300)) from None
    if hashlib.sha256(folder.read(layout.POLICY)).hexdigest() != policy_sha256(policy):
        raise BundleError(f"{layout.POLICY}: it is not written as this factory writes it, or has other keys")
    return policy


def _mapping(value: Any, who: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BundleError(f"{layout.MEASUREMENTS}: {who}: expected a JSON object")
    return value


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{shown('.'.join(map(str, first['loc'])))}: {shown(str(first['msg']))}"
