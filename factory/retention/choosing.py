"""What goes and why the rest stays: a pure function of what is stored, what is needed, and the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from factory.ledger.rows import SegmentRow
from factory.retention.needs import Needs
from factory.retention.policy import RetentionPolicy
from factory.retention.stored import StoredFolder

DAY = 86_400.0  # seconds
OF_CODE = ("worktree", "compiled")


@dataclass(frozen=True)
class Choice:
    """``goes``: is it removed? ``why``, either way, for a person."""

    what: StoredFolder
    goes: bool
    why: str


def choose(
    policy: RetentionPolicy,
    needs: Needs,
    segments: Sequence[SegmentRow],
    ends: dict[int, int],
    found: Sequence[StoredFolder],
    now: float,
) -> list[Choice]:
    """``ends``: the step of each segment's last checkpoint; ``now``: seconds since 1970."""
    rows = {row.id: row for row in segments}
    trunk = [row.id for row in segments if row.kind == "trunk" and row.state == "done"][-policy.trunk_segments :]
    trained = [row.id for row in segments if row.kind != "average"]
    ladders = set(trained[len(trained) - policy.ladders :]) if policy.ladders else set()
    commits = list(dict.fromkeys(row.code_commit[:12] for row in reversed(segments)))[: policy.worktrees]
    candidates = {row.id for row in segments if row.kind != "trunk" and row.state == "done"}
    choices = []
    for what in found:
        reason = _needed(needs, ends, what)
        if reason:
            choices.append(Choice(what, False, reason))
            continue
        if what.kind in OF_CODE:
            kept = "its commit is one of the newest (worktrees)" if what.commit in commits else ""
            choices.append(Choice(what, not kept, kept or "no newer segment is of its commit"))
            continue
        if what.kind == "diagnosis":
            choices.append(Choice(what, True, "its anomaly is closed"))
            continue
        if what.made is not None:
            choices.append(_by_age(what, (now - what.made) / DAY, policy.log_days, "log_days", "it was written"))
            continue
        row = rows.get(what.number)
        if row is None:
            choices.append(Choice(what, False, "no segment of the ledger has its number: a person decides"))
            continue
        choices.append(_of_segment(policy, row, what, trunk, ladders, candidates, now))
    return choices


def _needed(needs: Needs, ends: dict[int, int], what: StoredFolder) -> str:
    if what.kind in OF_CODE:
        return next((why for commit, why in needs.commits.items() if commit[:12] == what.commit), "")
    if what.kind == "diagnosis":
        return needs.diagnoses.get(what.number, "")
    if what.made is not None:
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
) -> Choice:
    days = (now - (row.finished_at or row.created_at)) / DAY
    if what.kind == "ladder":
        if row.id in ladders:
            return Choice(what, False, "its segment is one of the newest (ladders)")
        return Choice(what, True, "newer segments have ladders")
    if what.kind == "log":
        return _by_age(what, days, policy.log_days, "log_days", f"segment {row.id} ended")
    if what.kind == "run":
        return _by_age(what, days, policy.run_days, "run_days", f"segment {row.id} ended")
    if what.kind == "audit":
        return _by_age(what, days, policy.candidate_days, "candidate_days", f"segment {row.id} was audited, and ended")
    if row.state != "done":
        return _by_age(what, days, policy.rewound_days, "rewound_days", f"segment {row.id} is {row.state}, and ended")
    if what.kind == "runs":
        return Choice(what, True, f"segment {row.id} is done")
    if row.id in candidates:
        return _by_age(what, days, policy.candidate_days, "candidate_days", f"segment {row.id} ended")
    if row.id in trunk:
        return Choice(what, False, "its segment is one of the newest of the trunk (trunk_segments)")
    return Choice(what, True, "the trunk went on")


def _by_age(what: StoredFolder, days: float, limit: float, key: str, said: str) -> Choice:
    ago = f"{said} {days:.1f} days ago"
    return Choice(what, days >= limit, f"{ago} ({key}: {limit:g})")
