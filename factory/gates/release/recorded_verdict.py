"""Reads the evidence of a recorded release verdict, and judges it again with this version's judge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from factory.core.errors import InputError
from factory.core.policy_file import hash_policy
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.judge import HOLD, Verdict, judge
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason, are_reasons_overridable
from factory.tasks.comparing import TaskEvidence
from kernels.contract.message import Message
from kernels.contract.strict import parse

BESIDE = {"suite_sha256", "evaluations", "policy", "tasks", "sha256"}  # keys that are recorded with the evidence
_TASKS = TypeAdapter(TaskEvidence)
_EVIDENCE = TypeAdapter(ReleaseEvidence)


def compute_evidence_sha256(stored: Mapping[str, Any]) -> str:
    """Return the hash of recorded evidence, without its key ``sha256``."""
    kept = {key: value for key, value in stored.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read_stored_evidence(stored: Mapping[str, Any], where: str) -> tuple[ReleaseEvidence, TaskEvidence]:
    """Return (evidence, evidence of the tasks). Raises: InputError that names ``where`` and the key."""
    own = {key: value for key, value in stored.items() if key not in BESIDE}
    if unknown := sorted(own.keys() - {field.name for field in fields(ReleaseEvidence)}):
        raise InputError(
            "release.unknown_evidence",
            "{where}: this factory's judge does not know the evidence {key!r}.",
            where=where, key=unknown[0][:100],
        )  # fmt: skip
    try:
        evidence = _EVIDENCE.validate_json(json.dumps(own), strict=True)
        tasks = _TASKS.validate_json(json.dumps(stored.get("tasks") or {}), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(
            "release.wrong_evidence",
            "{where}: {key!r}: {problem}",
            where=where, key=".".join(map(str, first["loc"]))[:200], problem=str(first["msg"])[:200],
        ) from None  # fmt: skip
    return evidence, tasks


def rejudge_stored_evidence(policy: ReleasePolicy, stored: Mapping[str, Any], where: str, **now: Any) -> Verdict:
    """Return the verdict of this version's judge on recorded evidence. ``now`` replaces values that have changed since. Raises: InputError."""
    evidence, tasks = read_stored_evidence(stored, where)
    return judge(policy, replace(evidence, **now), tasks)


def find_hold_reasons(stored: Mapping[str, Any], policy_hash: str, where: str, **now: Any) -> tuple[Reason, ...]:
    """Return the reasons to hold the candidate, by recorded evidence and policy. ``now`` as in ``rejudge_stored_evidence``.

    ``policy_hash``: the hash that the policy must have. Raises: InputError if the judge does not hold the evidence, or if a hash differs.
    """
    policy = parse(ReleasePolicy, stored.get("policy"), f"{where}: its policy", InputError)
    if hash_policy(policy) != policy_hash or stored.get("sha256") != compute_evidence_sha256(stored):
        raise InputError(
            "release.record_changed",
            "{where}: the policy or the evidence was changed after it was recorded. Judge the candidate again: 'factory evaluate N'.",
            where=where,
        )
    verdict = rejudge_stored_evidence(policy, stored, where, **now)
    if verdict.outcome != HOLD:
        raise InputError(
            "release.not_held",
            "{where}: this version of the judge decides {outcome!r}, not 'hold'. Judge the candidate again: 'factory evaluate N'.",
            where=where, outcome=verdict.outcome,
        )  # fmt: skip
    return tuple(verdict.found.missing)


def find_reason_not_overridable(reasons: Sequence[Reason]) -> Message | None:
    """Return the first reason that a person may not override. None: a person may override all reasons."""
    if are_reasons_overridable(reasons):
        return None
    no_reason = Message("release.held_for_no_reason", "The judge names no reason to hold the candidate.")
    return next((one.message for one in reasons if not are_reasons_overridable([one])), no_reason)
