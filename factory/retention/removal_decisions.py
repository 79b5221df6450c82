"""Decides which stored folders are removed, and why the others stay: a pure function of the folders, the needs and the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from factory.ledger.rows import SegmentRow
from factory.retention.needs import RetentionNeeds
from factory.retention.policy import RetentionPolicy
from factory.retention.stored_folders import StoredFolder
from kernels.contract.message import Message

DAY = 86_400.0  # seconds
OF_CODE = ("worktree", "compiled")


@dataclass(frozen=True)
class RetentionDecision:
    """The decision whether a folder is removed, and the reason for a person."""

    folder: StoredFolder
    is_removed: bool
    reason: str


def decide_folder_removals(
    policy: RetentionPolicy,
    needs: RetentionNeeds,
    segments: Sequence[SegmentRow],
    last_steps: dict[int, int],
    folders: Sequence[StoredFolder],
    now: float,
) -> list[RetentionDecision]:
    """Decide about each folder. ``last_steps``: the step of each segment's last checkpoint; ``now``: seconds since 1970."""
    rows = {row.id: row for row in segments}
    trunk = [row.id for row in segments if row.kind == "trunk" and row.state == "done"][-policy.trunk_segments :]
    trained = [row.id for row in segments if row.has_steps]
    ladders = set(trained[len(trained) - policy.ladders :]) if policy.ladders else set()
    commits = list(dict.fromkeys(row.code_commit[:12] for row in reversed(segments)))[: policy.worktrees]
    candidates = {row.id for row in segments if row.kind != "trunk" and row.state == "done"}
    choices = []
    for what in folders:
        reason = _needed(needs, last_steps, what)
        if reason:
            choices.append(RetentionDecision(what, False, reason))
            continue
        if what.kind in OF_CODE:
            if what.commit in commits:
                why = Message(
                    "removal_decisions.new_commit",
                    "its commit is one of the newest, which are kept (worktrees in policies/retention.yaml)",
                )
                choices.append(RetentionDecision(what, False, why))
            else:
                why = Message("removal_decisions.old_commit", "no recent segment has its commit")
                choices.append(RetentionDecision(what, True, why))
            continue
        if what.kind == "diagnosis":
            choices.append(
                RetentionDecision(what, True, Message("removal_decisions.closed_anomaly", "its anomaly is closed"))
            )
            continue
        if what.made_at is not None:
            written = Message("removal_decisions.written", "the file was written")
            choices.append(_by_age(what, (now - what.made_at) / DAY, policy.log_days, "log_days", written))
            continue
        row = rows.get(what.number)
        if row is None:
            why = Message(
                "removal_decisions.no_segment", "the ledger has no segment with its number, so a person must decide"
            )
            choices.append(RetentionDecision(what, False, why))
            continue
        choices.append(_of_segment(policy, row, what, trunk, ladders, candidates, now))
    return choices


def _needed(needs: RetentionNeeds, ends: dict[int, int], what: StoredFolder) -> str:
    if what.kind in OF_CODE:
        return next((why for commit, why in needs.commits.items() if commit[:12] == what.commit), "")
    if what.kind == "diagnosis":
        return needs.diagnoses.get(what.number, "")
    if what.made_at is not None:
        return ""
    if what.kind in ("export", "model"):
        return needs.exports.get(what.number, "")
    if why := needs.segments.get(what.number):
        return why
    if what.kind == "run":
        return needs.exports.get(what.number, "")
    if what.kind == "audit":
        return needs.audits.get(what.number, "")
    if what.kind != "checkpoint":
        return ""
    last = needs.ends.get(what.number, "") if ends.get(what.number) == what.step else ""
    return needs.checkpoints.get(what.number, "") or needs.steps.get((what.number, what.step), "") or last


def _of_segment(
    policy: RetentionPolicy,
    row: SegmentRow,
    what: StoredFolder,
    trunk: Sequence[int],
    ladders: set[int],
    candidates: set[int],
    now: float,
) -> RetentionDecision:
    days = (now - (row.finished_at or row.created_at)) / DAY
    ended = Message("removal_decisions.ended", "segment {segment} ended", segment=row.id)
    if what.kind == "ladder":
        if row.id in ladders:
            return RetentionDecision(
                what,
                False,
                Message(
                    "removal_decisions.new_ladder",
                    "its segment is recent, and the ladders of recent segments are kept (ladders in policies/retention.yaml)",
                ),
            )
        return RetentionDecision(
            what,
            True,
            Message("removal_decisions.old_ladder", "its segment is old, and only ladders of recent segments are kept"),
        )
    if what.kind == "log":
        return _by_age(what, days, policy.log_days, "log_days", ended)
    if what.kind == "run":
        return _by_age(what, days, policy.run_days, "run_days", ended)
    if what.kind == "audit":
        audited = Message("removal_decisions.audited", "the audited segment {segment} ended", segment=row.id)
        return _by_age(what, days, policy.candidate_days, "candidate_days", audited)
    if row.state != "done":
        not_done = Message(
            "removal_decisions.not_done", "segment {segment} ({state}) ended", segment=row.id, state=row.state
        )
        return _by_age(what, days, policy.rewound_days, "rewound_days", not_done)
    if what.kind == "runs":
        return RetentionDecision(
            what, True, Message("removal_decisions.done", "segment {segment} is done", segment=row.id)
        )
    if row.id in candidates:
        return _by_age(what, days, policy.candidate_days, "candidate_days", ended)
    if row.id in trunk:
        why = Message(
            "removal_decisions.new_trunk",
            "its segment is recent, and recent segments of the trunk are kept (trunk_segments in policies/retention.yaml)",
        )
        return RetentionDecision(what, False, why)
    return RetentionDecision(
        what,
        True,
        Message("removal_decisions.old_trunk", "its segment is old, and only recent segments of the trunk are kept"),
    )


def _by_age(what: StoredFolder, days: float, limit: float, key: str, event: Message) -> RetentionDecision:
    why = Message(
        "removal_decisions.age",
        "{event} {days:.1f} days ago, and the limit is {limit:g} days ({key} in policies/retention.yaml)",
        event=event,
        days=days,
        key=key,
        limit=limit,
    )
    return RetentionDecision(what, days >= limit, why)
