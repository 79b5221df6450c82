"""Finds out why a patch was held, from its verdict. Three causes say nothing about the patch: noise, a time limit, and a missing device.

A patch that only such a cause held can be judged again later (``factory.code_loop.held_proposals``). Imports nothing slow, because 'factory status'
uses this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOISE, TIME_LIMIT, DEVICE = "noise", "time limit", "device"
CLOSED_STATES = ("passed", "not needed")  # states of a stage that hold nothing
# Verdicts from before December 2026 have no key ``undecided``. These codes of a verdict's first reason say that noise held the patch.
NOISE_CODES = frozenset({"patch.too_noisy", "patch.held_by_noise", "patch.gain_likely", "patch.second_unsure"})


def find_only_missing_stage(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the evidence of the only stage that did not pass, if it is missing; else {}. ``evidence``: of the patch's verdict."""
    stages = evidence.get("stages") or {}
    found = [stage for stage in stages.values() if stage["state"] not in CLOSED_STATES]
    return found[0] if len(found) == 1 and found[0]["state"] == "missing" else {}


def was_held_by_time_limit_only(evidence: Mapping[str, Any]) -> bool:
    """True if only a time limit held a patch. ``evidence``: of the patch's verdict."""
    return find_only_missing_stage(evidence).get("out_of_time") is True


def was_held_by_noise_only(evidence: Mapping[str, Any], reasons: Sequence[str]) -> bool:
    """True if a held patch passed everything but the clarity of its timing. ``evidence`` and ``reasons``: of the patch's verdict.

    >>> passed = {"state": "passed"}
    >>> was_held_by_noise_only({"stages": {"scope": passed, "training": {"state": "missing", "undecided": True}}}, [])
    True
    >>> was_held_by_noise_only({"stages": {"scope": passed, "training": {"state": "missing"}}}, [])
    False
    """
    stages = evidence.get("stages") or {}
    training = stages.get("training") or {}
    if any(stage["state"] not in CLOSED_STATES for name, stage in stages.items() if name != "training"):
        return False
    if training.get("state") == "missing":
        return training.get("undecided") is True or _begins_with_noise(training.get("reasons") or ())
    return training.get("state") == "passed" and _begins_with_noise(reasons)


def _begins_with_noise(reasons: Sequence[Any]) -> bool:
    """Whether the first reason has a code of ``NOISE_CODES``. A reason is a ``Message`` or, in evidence, its JSON."""
    first = next(iter(reasons), None)
    code = first.get("code") if isinstance(first, Mapping) else getattr(first, "code", "")
    return code in NOISE_CODES


def find_hold_cause(evidence: Mapping[str, Any], reasons: Sequence[str]) -> str:
    """Return the only cause that held a patch: NOISE, TIME_LIMIT or DEVICE; '' if the patch itself, or several causes, held it."""
    if was_held_by_time_limit_only(evidence):
        return TIME_LIMIT
    if find_missing_device(evidence):
        return DEVICE
    return NOISE if was_held_by_noise_only(evidence, reasons) else ""


def find_missing_device(evidence: Mapping[str, Any]) -> str:
    """Return the kind of device ('cuda' or 'cpu') whose lack alone held a patch; '' if another cause held the patch."""
    return str(find_only_missing_stage(evidence).get("waits_for") or "")
