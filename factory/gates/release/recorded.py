"""What a release verdict was given on, read back from where it was recorded, and what the judge says of it now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from factory.core.errors import InputError
from factory.core.policy_file import policy_sha256
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.judge import HOLD, Verdict, judge
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason, may_be_overridden
from factory.tasks.comparing import TaskEvidence
from trainer.contract.strict import parse

BESIDE = {"suite_sha256", "evaluations", "policy", "tasks", "sha256"}  # what is recorded with the evidence
_TASKS = TypeAdapter(TaskEvidence)
_EVIDENCE = TypeAdapter(ReleaseEvidence)


def evidence_sha256(stored: Mapping[str, Any]) -> str:
    """Of evidence as it is recorded, its own ``sha256`` left out."""
    kept = {key: value for key, value in stored.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def evidence_of(stored: Mapping[str, Any], where: str) -> tuple[ReleaseEvidence, TaskEvidence]:
    """The evidence, and that of tasks. Raises: InputError naming ``where`` and the key."""
    own = {key: value for key, value in stored.items() if key not in BESIDE}
    if unknown := sorted(own.keys() - {field.name for field in fields(ReleaseEvidence)}):
        raise InputError(f"{where}: {unknown[0][:100]!r}: this factory's judge knows no such evidence")
    try:
        evidence = _EVIDENCE.validate_json(json.dumps(own), strict=True)
        tasks = _TASKS.validate_json(json.dumps(stored.get("tasks") or {}), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{where}: {'.'.join(map(str, first['loc']))[:200]!r}: {str(first['msg'])[:200]}") from None
    return evidence, tasks


def judged_again(policy: ReleasePolicy, stored: Mapping[str, Any], where: str, **now: Any) -> Verdict:
    """What the judge says now of recorded evidence; ``now``: what of it is another by now. Raises: InputError."""
    evidence, tasks = evidence_of(stored, where)
    return judge(policy, replace(evidence, **now), tasks)


def held_by(stored: Mapping[str, Any], policy_hash: str, where: str, **now: Any) -> tuple[Reason, ...]:
    """For which reasons the judge holds recorded evidence, under the policy that was recorded with it and has this hash; ``now`` as ``judged_again``.

    Raises: InputError where it does not hold it, or where evidence or policy are not what was recorded.
    """
    again = "judge it again with 'factory evaluate N'"
    policy = parse(ReleasePolicy, stored.get("policy"), f"{where}: its policy", InputError)
    if policy_sha256(policy) != policy_hash or stored.get("sha256") != evidence_sha256(stored):
        raise InputError(f"{where}: its policy or evidence is not what was recorded: {again}")
    verdict = judged_again(policy, stored, where, **now)
    if verdict.outcome != HOLD:
        raise InputError(f"{where}: this version of the judge says {verdict.outcome!r} of it, not 'hold': {again}")
    return tuple(verdict.found.missing)


def not_overridable(reasons: Sequence[Reason]) -> str:
    """The first sentence that no person overrides; '': none."""
    if may_be_overridden(reasons):
        return ""
    return next((one.text for one in reasons if not may_be_overridden([one])), "it is held for no reason")
