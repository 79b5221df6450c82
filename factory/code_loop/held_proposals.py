"""Reads from the ledger which held proposals the gate judges again, when and why, and which proposals are one another's repeats, parts and sums.

A patch that only noise, a time limit or a missing device held says nothing about itself. The daemon has it judged again a few times, each time after
a longer wait, and only while the machine is quiet (``factory.code_loop.judging_again``). After that the patch waits for a person.

This module imports little, because 'factory status' imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from factory.core.time_formats import format_local_time
from factory.core.workspace import Workspace, load_yaml
from factory.gates.holds import DEVICE, NOISE, TIME_LIMIT, find_hold_cause, find_missing_device
from factory.ledger.rows import ProposalRow, SqlReader, Subject, VerdictRow
from kernels.contract.message import Message

MERGED_WITH = "merged-with"  # state of a proposal that was merged as a part of a sum
GROWTH = 4.0  # each wait is so many times as long as the one before, so that the judgements fall into different hours of a day


@dataclass(frozen=True)
class JudgingAgainRules:
    """When the daemon has held patches judged again: keys of policies/gates/patch.yaml (``factory.gates.patch.policy.PatchPolicy``)."""

    judge_again: int = 2
    judge_again_after_seconds: float = 3600.0
    quiet_load: float = 0.25

    def compute_wait_seconds(self, judged: int) -> float:
        """Return the seconds that must pass after the last judgement. ``judged``: how often the patch was judged, at least once.

        >>> [JudgingAgainRules().compute_wait_seconds(judged) for judged in (1, 2)]
        [3600.0, 14400.0]
        """
        return self.judge_again_after_seconds * GROWTH ** (judged - 1)

    @classmethod
    def read_unchecked(cls, workspace: Workspace) -> JudgingAgainRules:
        """Read the keys without checking the policy's schema. Raises: ConfigError for a file that is not YAML."""
        policy = load_yaml(workspace.policy_path("gates/patch.yaml"))
        keys = policy if isinstance(policy, dict) else {}
        found = {name: keys[name] for name in vars(cls()) if isinstance(keys.get(name), int | float)}
        return cls(**found)


class ProposalDescents:
    """Which proposal repeats another one's patch, and which is the sum of others, as the events 'drafted' tell: ``again_of`` and ``sum_of``.

    A *family* is a patch with all its judgements: the proposals that repeat one another. Older ledgers lack ``again_of``. There, the same edits
    (``patch_id``) make a family.
    """

    def __init__(self, db: SqlReader) -> None:
        sql = "SELECT subject, detail FROM events WHERE kind = 'drafted' ORDER BY id"
        self._drafted: dict[int, Mapping[str, Any]] = {
            Subject.parse(row["subject"]).number: row["detail"] for row in db.read(sql)
        }

    @cached_property
    def _roots(self) -> dict[int, int]:
        first_with_patch: dict[str, int] = {}
        roots: dict[int, int] = {}
        for number, detail in sorted(self._drafted.items()):
            repeated = detail.get("again_of")
            root = roots.get(repeated, repeated) if repeated else number
            if not repeated and not detail.get("sum_of") and (patch := detail.get("patch_id")):
                root = first_with_patch.setdefault(patch, number)
            roots[number] = root
        return roots

    def find_root(self, number: int) -> int:
        """Return the first proposal of a proposal's family."""
        return self._roots.get(number, number)

    def find_repeated(self, number: int) -> int | None:
        """Return the proposal whose patch this proposal has judged again, or None."""
        return self._drafted.get(number, {}).get("again_of")

    def list_parts(self, number: int) -> list[int]:
        """Return the roots of the proposals of which a proposal is the sum; [] if it is no sum."""
        parts = self._drafted.get(self.find_root(number), {}).get("sum_of") or ()
        return sorted({self.find_root(part) for part in parts})

    def list_family(self, root: int) -> list[int]:
        """Return all proposals of a family, oldest first."""
        return sorted({root} | {number for number, its in self._roots.items() if its == root})

    def list_sums(self) -> dict[int, list[int]]:
        """Return the first proposal of each sum, with its parts."""
        return {number: self.list_parts(number) for number, detail in self._drafted.items() if detail.get("sum_of")}


@dataclass(frozen=True)
class HeldPatch:
    """A held proposal that can be judged again, because nothing that its gate found speaks against the patch.

    ``judged``: how often its patch was judged. ``not_before``: seconds since 1970, from which the daemon has it judged again; None if it waits for a
    person. ``device``: the kind of device that its judge lacked. ``in_sum``: an undecided sum that contains it, and for whose decision it waits.
    """

    row: ProposalRow
    cause: str
    judged: int
    not_before: float | None
    device: str = ""
    in_sum: int | None = None
    files: tuple[str, ...] = ()
    is_sum: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "proposal": self.row.number,
            "cause": self.cause,
            "judged": self.judged,
            "not_before": self.not_before,
            "device": self.device or None,
            "in_sum": self.in_sum,
        }


def list_held_patches(db: SqlReader, rules: JudgingAgainRules) -> list[HeldPatch]:
    """Return the held proposals that only noise, a time limit or a missing device held, oldest first.

    Left out are proposals that were judged again since, and sums of which a part was decided.
    """
    rows = {row.number: row for row in ProposalRow.select(db)}
    held = [row for row in rows.values() if row.state == "judged" and row.outcome == "hold" and row.verdict is not None]
    if not held:
        return []
    descents = ProposalDescents(db)
    sums = _list_undecided_sums(descents, rows)
    found = []
    for row in held:
        family = [rows[number] for number in descents.list_family(descents.find_root(row.number)) if number in rows]
        if any(one.number > row.number and one.verdict for one in family):
            continue  # killed before the older proposal was marked as superseded
        if any(_is_patch_decided(descents, rows, part) for part in descents.list_parts(row.number)):
            continue
        evidence = row.read_evidence(db)
        cause = find_hold_cause(evidence, row.reasons or [])
        if not cause:
            continue
        # A judgement that failed counts as one: the patch may end the process that judges it.
        failed = [one for one in family if one.state == "failed"]
        judged = len(failed) + sum(one.outcome == "hold" for one in family)
        last = max(VerdictRow.get(db, row.verdict or 0).created_at, *(one.created_at for one in failed), 0.0)
        wait = 0.0 if cause == DEVICE else rules.compute_wait_seconds(judged)
        found.append(
            HeldPatch(
                row,
                cause,
                judged,
                last + wait if judged <= rules.judge_again else None,
                find_missing_device(evidence),
                sums.get(descents.find_root(row.number)),
                tuple(map(str, evidence.get("files") or ())),
                bool(descents.list_parts(row.number)),
            )
        )
    return found


def _list_undecided_sums(descents: ProposalDescents, rows: Mapping[int, ProposalRow]) -> dict[int, int]:
    """Return the root of each part of a sum that is being judged, or that was promoted and waits for its merge → the newest such sum.

    A sum of which a part was decided can no longer be merged, so its other parts do not wait for it.
    """
    found: dict[int, int] = {}
    for first, parts in sorted(descents.list_sums().items()):
        if any(_is_patch_decided(descents, rows, part) for part in parts):
            continue
        for row in (rows[number] for number in descents.list_family(first) if number in rows):
            if row.state in ("drafted", "written") or (row.state == "judged" and row.outcome == "promote"):
                found |= dict.fromkeys(parts, row.number)
    return found


def _is_patch_decided(descents: ProposalDescents, rows: Mapping[int, ProposalRow], root: int) -> bool:
    """Whether a proposal of this family was approved, merged with a sum, rejected by a person, or reverted."""
    decided = ("approved", MERGED_WITH, "rejected", "reverted")
    return any(rows[number].state in decided for number in descents.list_family(root) if number in rows)


def read_judging_again_facts(db: SqlReader, workspace: Workspace) -> list[dict[str, Any]]:
    """Return the data for 'factory status': for each held patch the fields of ``HeldPatch.to_json``, and ``most``, the daemon's judgements."""
    rules = JudgingAgainRules.read_unchecked(workspace)
    return [one.to_json() | {"most": rules.judge_again} for one in list_held_patches(db, rules)]


def describe_judging_again(one: Mapping[str, Any], now: float) -> str:
    """Return the line about one held patch: why it was held, and when it is judged again. ``one``: as ``read_judging_again_facts`` returns it."""
    facts = {
        "proposal": one["proposal"],
        "cause": format_hold_cause(one["cause"], one["device"]),
        "judged": one["judged"],
    }
    if one["in_sum"] is not None:
        return Message(
            "code_loop.again_after_sum",
            "proposal {proposal} was held only by {cause}; it is part of proposal {in_sum}, and waits for the decision on that proposal",
            **facts,
            in_sum=one["in_sum"],
        )
    if one["not_before"] is None:
        return Message(
            "code_loop.again_by_person",
            "proposal {proposal} was held only by {cause}, and was judged {judged:,|time|times}; to judge it again: 'factory proposals rejudge "
            "{proposal}'",
            **facts,
        )
    if one["cause"] == DEVICE:
        return Message(
            "code_loop.again_on_device",
            "proposal {proposal} was held only by {cause}; a daemon on a machine with that device judges it again",
            **facts,
        )
    when = (
        Message("code_loop.again_when_quiet", "when the machine is quiet, or at night")
        if one["not_before"] <= now
        else Message(
            "code_loop.again_after",
            "after {at}, when the machine is quiet or at night",
            at=format_local_time(one["not_before"]),
        )
    )
    return Message(
        "code_loop.again_later",
        "proposal {proposal} was held only by {cause}; the daemon judges it again {when} (time {next} of {most})",
        **facts,
        when=when,
        next=one["judged"],
        most=one["most"],
    )


def format_hold_cause(cause: str, device: str = "") -> str:
    """Return a cause of ``factory.gates.holds`` as words that follow 'held only by'."""
    if cause == NOISE:
        return Message("code_loop.held_by_noise", "noise of the timing")
    if cause == TIME_LIMIT:
        return Message("code_loop.held_by_time_limit", "a time limit")
    return Message("code_loop.held_by_device", "the lack of a {device} device", device=device)
