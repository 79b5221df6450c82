"""Judges a release again from its bundle: computes the evidence from the items, and the verdict from the evidence.

The values named in ``RECORDED`` cannot be computed from a bundle, for example the replicas' noise. They are taken as recorded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from factory.bundles.files import layout
from factory.bundles.files.folder import (
    BundleError,
    BundleFolder,
    escape_unprintable,
    find_first_json_difference,
    make_not_a_json_object_error,
    make_unexpected_key_message,
)
from factory.bundles.verdict_comparison import VerdictComparison
from factory.core.errors import InputError
from factory.core.policy_file import hash_policy
from factory.evals.statistics import Gain
from factory.evals.suite import hash_suite
from factory.evals.tasks import EvalItem, compute_bits_per_byte_by_domain
from factory.gates.release.evidence import FIRST_RELEASE, ReleaseEvidence
from factory.gates.release.gate import make_evidence_of_evaluations
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.recorded_verdict import (
    compute_evidence_sha256,
    read_stored_evidence,
    rejudge_stored_evidence,
)
from factory.tasks.comparing import TaskEvidence, compute_metric_gains, compute_metric_scores
from kernels.contract.files import replace_non_finite
from kernels.contract.message import Message
from kernels.contract.strict import parse

TOLERANCE = 1e-9  # relative; for sums in another order or on another machine
_ITEMS = TypeAdapter(EvalItem)
# Fields of the evidence that come from the ledger, which a bundle lacks. They are taken as recorded; the signature covers them.
RECORDED = (
    "look", "lost", "releasable", "not_releasable", "disputed", "anomalies", "sealed_looks", "fresh_documents", "older_documents", "on_fresh",
    "fresh_gap", "replicas", "replica_noise", "replica_target", "watched", "rise_since", "rise_dev", "rise_sealed", "rise_gap",
    "trained_on", "candidate",
)  # fmt: skip


def check_policy(folder: BundleFolder) -> list[Message]:
    """Check that the bundle has the policy of the verdict. Raises: BundleError."""
    raw = folder.read(layout.POLICY)
    _policy(folder)
    wanted = folder.read_object(layout.VERDICT).get("policy_sha256")
    if hashlib.sha256(raw).hexdigest() != wanted:
        return [
            Message(
                "judging_again.other_policy",
                "The bundle's policy is not the policy that the verdict names (sha256 {sha256})",
                sha256=escape_unprintable(str(wanted), 12),
            )
        ]
    return []


def check_evidence(folder: BundleFolder) -> list[Message]:
    """Check that items and measurements give the recorded evidence. Raises: BundleError."""
    stored = folder.read_object(layout.EVIDENCE)
    if stored.get("sha256") != compute_evidence_sha256(stored):
        return [
            Message(
                "judging_again.other_hash",
                "The hash recorded in {file} is not the hash of the file's content",
                file=layout.EVIDENCE,
            )
        ]
    evidence, tasks = _evidence(stored)
    summaries, items = folder.read_object(layout.MEASUREMENTS), _items(folder)
    first = evidence.against == FIRST_RELEASE
    wanted = {layout.CANDIDATE} if first else {layout.CANDIDATE, layout.CHAMPION}
    if set(summaries) != wanted or set(items) - wanted:
        return [
            Message(
                "judging_again.other_models", "{files} must have values of these models and of no others: {models}",
                files=[layout.MEASUREMENTS, layout.ITEMS], models=sorted(wanted),
            )
        ]  # fmt: skip
    sides = {who: (_mapping(summaries[who], who), items.get(who, [])) for who in wanted}
    found = [problem for who, side in sides.items() if (problem := _summary_problem(who, *side))]
    try:
        again = make_evidence_of_evaluations(
            _policy(folder),
            evidence.domains,
            str(evidence.against),
            sides[layout.CANDIDATE],
            sides.get(layout.CHAMPION),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [
            *found,
            Message(
                "judging_again.odd_measurements",
                "{file} cannot be evaluated: {reason}",
                file=layout.MEASUREMENTS,
                reason=escape_unprintable(repr(error)),
            ),
        ]
    values, recorded = replace_non_finite(asdict(again)), replace_non_finite(asdict(evidence))
    for name in RECORDED:
        del values[name], recorded[name]
    if problem := find_first_json_difference(recorded, values, TOLERANCE):
        found.append(
            Message(
                "judging_again.other_evidence",
                "The evidence computed from items and measurements differs from the recorded evidence: {problem}",
                problem=problem,
            )
        )
    if problem := _task_problem(folder, tasks):
        found.append(
            Message(
                "judging_again.other_task_evidence",
                "The evidence computed from the items of tasks differs from the recorded evidence: {problem}",
                problem=problem,
            )
        )
    return found


def compare_verdicts(folder: BundleFolder) -> VerdictComparison:
    """Judge the recorded evidence again, and return the comparison with the recorded verdict. Raises: BundleError."""
    stored = folder.read_object(layout.EVIDENCE)
    evidence, _ = _evidence(stored)
    try:
        verdict = rejudge_stored_evidence(_policy(folder), stored, layout.EVIDENCE)
    except InputError as error:
        raise BundleError(_shown_error(error)) from None
    against = None if evidence.against == FIRST_RELEASE else evidence.against
    return VerdictComparison(folder.read_object(layout.VERDICT), verdict, against, str(stored.get("sha256")))


def check_held_out(folder: BundleFolder) -> list[Message]:
    """Check that the items belong to the suite that the evidence names. Raises: BundleError."""
    stored, evidence = folder.read_object(layout.HELD_OUT), folder.read_object(layout.EVIDENCE)
    if stored.get("suite_sha256") != evidence.get("suite_sha256"):
        return [
            Message(
                "judging_again.other_suite",
                "{files} name different suites of held-out documents",
                files=[layout.HELD_OUT, layout.EVIDENCE],
            )
        ]
    identity, halves = stored.get("identity"), {name: stored.get(name) for name in ("items", "dev")}
    for name, listed in halves.items():
        if not isinstance(listed, list) or not all(
            isinstance(row, list) and len(row) == 4 and all(isinstance(part, str) for part in row) for row in listed
        ):
            return [
                Message(
                    "judging_again.odd_held_out",
                    "{key} must be a list of rows, each of four texts: key, domain, source and SHA-256",
                    key=name,
                )
            ]
    if extra := sorted(stored.keys() - {"suite_sha256", "identity", *halves}):
        return [make_unexpected_key_message(escape_unprintable(extra[0]))]
    if isinstance(identity, dict) and hash_suite(identity | halves) != stored["suite_sha256"]:
        return [
            Message(
                "judging_again.other_suite_hash", "The hash of the listed held-out documents is not the suite's hash"
            )
        ]
    known = {row[0]: (row[1], row[2]) for listed in halves.values() for row in listed or ()}
    for who, items in _items(folder).items():
        for item in items:
            if known.get(item.item) != (item.domain, item.cluster):
                return [
                    Message(
                        "judging_again.unknown_item", "{file}: item {item} of the {model} is not a held-out document of the suite",
                        file=layout.ITEMS, item=escape_unprintable(item.item), model=who,
                    )
                ]  # fmt: skip
    return []


def _other_totals(who: str, problem: Message) -> Message:
    return Message(
        "judging_again.other_totals",
        "The totals of the {model} do not agree with its items: {problem}",
        model=who,
        problem=problem,
    )


def _summary_problem(who: str, summary: dict[str, Any], items: list[EvalItem]) -> Message | None:
    """Return the first difference between a summary's totals and the totals of its items; None if they agree."""
    scored = [item for item in items if item.task == "bpb"]
    if any(item.weight <= 0 for item in scored):
        return Message(
            "judging_again.empty_item",
            "An item that was measured with the {model} has no bytes, so it would have no weight in the comparison",
            model=who,
        )
    bits = {
        item.domain: compute_bits_per_byte_by_domain([i for i in scored if i.domain == item.domain])[item.domain]
        for item in scored
    }
    if problem := find_first_json_difference(summary.get("bpb"), bits, TOLERANCE, "bits per byte"):
        return _other_totals(who, problem)
    cloze = [item.value for item in items if item.task == "cloze"]
    totals = {"items": len(cloze), "share_right": sum(cloze) / len(cloze) if cloze else None}
    told = summary.get("cloze")
    told = {key: told.get(key) for key in totals} if isinstance(told, dict) else told
    if problem := find_first_json_difference(told, totals, TOLERANCE, "cloze"):
        return _other_totals(who, problem)
    counted = summary.get("documents")
    for domain in bits:
        count = counted.get(domain) if isinstance(counted, dict) else None
        if not isinstance(count, int) or count < sum(item.domain == domain for item in scored):
            return Message(
                "judging_again.too_many_items", "The {model} has more items of domain {domain} than the domain has held-out documents",
                model=who, domain=escape_unprintable(domain),
            )  # fmt: skip
    return None


def _task_problem(folder: BundleFolder, tasks: TaskEvidence) -> Message | None:
    """Return the first difference between the recorded values and gains of tasks and those computed from the items; None if they agree."""
    if not tasks.evaluations:
        return None
    of_task: dict[str, dict[str, list[EvalItem]]] = {}
    costs = set[str]()
    for number, row in enumerate(folder.read_rows(layout.TASK_ITEMS), 1):
        task, cost = row.pop("measured_in", None), row.pop("cost", None)
        if not isinstance(task, str) or task not in tasks.evaluations:
            raise BundleError(
                "judging_again.unknown_task", "{file}, line {line}: task {task} was not judged",
                file=layout.TASK_ITEMS, line=number, task=escape_unprintable(str(task)),
            )  # fmt: skip
        if not isinstance(cost, bool):
            raise BundleError(
                "judging_again.odd_cost",
                "{file}, line {line}: key 'cost' must be true or false",
                file=layout.TASK_ITEMS,
                line=number,
            )
        who, item = _item(layout.TASK_ITEMS, number, row)
        costs |= {item.task} if cost else set()
        of_task.setdefault(task, {}).setdefault(who, []).append(item)
    values: dict[str, float | None] = {}
    over: dict[str, Gain] = {}
    for sides in of_task.values():
        ours, theirs = (sides.get(who, []) for who in (layout.CANDIDATE, layout.CHAMPION))
        values |= {metric: gain.gain for metric, gain in compute_metric_scores(ours).items()}
        over |= (compute_metric_gains(ours, theirs, sorted(costs)) or {}) if theirs else {}
    told = {"values": dict(tasks.values), "gains": {name: asdict(gain) for name, gain in tasks.gains.items()}}
    again = {"values": values, "gains": {name: asdict(gain) for name, gain in over.items()}}
    return find_first_json_difference(replace_non_finite(told), replace_non_finite(again), TOLERANCE)


def _items(folder: BundleFolder) -> dict[str, list[EvalItem]]:
    found: dict[str, list[EvalItem]] = {}
    for number, row in enumerate(folder.read_rows(layout.ITEMS), 1):
        who, item = _item(layout.ITEMS, number, row)
        found.setdefault(who, []).append(item)
    return found


def _item(name: str, number: int, row: dict[str, Any]) -> tuple[str, EvalItem]:
    """Return (the model that an item belongs to, the item) from a row of a file. Raises: BundleError."""
    who = row.pop("of", None)
    try:
        item = _ITEMS.validate_json(json.dumps(row), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BundleError(
            "judging_again.odd_item", "{file}, line {line}: {key}: {reason}",
            file=name, line=number, key=escape_unprintable(".".join(map(str, first["loc"]))), reason=escape_unprintable(str(first["msg"])),
        ) from None  # fmt: skip
    if who not in (layout.CANDIDATE, layout.CHAMPION):
        raise BundleError(
            "judging_again.unknown_model", "{file}, line {line}: {model} is not one of: {models}",
            file=name, line=number, model=escape_unprintable(str(who)), models=[layout.CANDIDATE, layout.CHAMPION],
        )  # fmt: skip
    if set(row) != (known := {field.name for field in fields(EvalItem)}):
        raise BundleError(
            "judging_again.item_keys",
            "{file}, line {line}: an item must have exactly these keys: {keys}",
            file=name,
            line=number,
            keys=known,
        )
    return who, item


def _evidence(stored: dict[str, Any]) -> tuple[ReleaseEvidence, TaskEvidence]:
    try:
        return read_stored_evidence(stored, layout.EVIDENCE)
    except InputError as error:
        raise BundleError(_shown_error(error)) from None


def _policy(folder: BundleFolder) -> ReleasePolicy:
    raw = folder.read_object(layout.POLICY)
    try:
        policy = parse(ReleasePolicy, raw, layout.POLICY, InputError)
    except InputError as error:
        raise BundleError(_shown_error(error)) from None
    if hashlib.sha256(folder.read(layout.POLICY)).hexdigest() != hash_policy(policy):
        raise BundleError(
            "judging_again.odd_policy",
            "{file} has keys or a format that this factory does not write",
            file=layout.POLICY,
        )
    return policy


def _shown_error(error: InputError) -> Message:
    """Return the message of an error that may quote a bundle, safe to print."""
    return Message.from_parts(error.code, escape_unprintable(str(error), 300), error.data)


def _mapping(value: Any, who: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise make_not_a_json_object_error(f"{layout.MEASUREMENTS}: {who}")
    return value
