"""Has a patch judged again: on top of newer code, at the request of a person, or by the daemon if nothing but the surroundings held it.

Three causes hold a patch and say nothing about it: noise of the timing, a time limit, and a missing device. The daemon judges such a patch again by
itself, at most ``judge_again`` times, each time after a longer wait. It does so only while it has nothing else to do and the machine is quiet, or at
night. A missing device ends the wait when it appears. A patch that never ends is held each time. After these times it waits for a person, who can
have it judged at once ('factory proposals rejudge').

New measurements are no free chances. Each judgement of the same patch is another try of its target, with a smaller share of the confidence
(``factory.code_loop.submitting.compute_tries``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agents.core.improvement_policy import ImprovementPolicy
from agents.core.proposal import Edit, Proposal
from agents.core.yaml_edit import set_yaml_value
from factory.code_loop.held_proposals import (
    MERGED_WITH,
    HeldPatch,
    JudgingAgainRules,
    ProposalDescents,
    format_hold_cause,
    list_held_patches,
)
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.reverting import propose_revert_again
from factory.code_loop.submitting import LOCK, PROPOSED, remove_remains_and_get_live_commit, submit_proposal
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import InputError, WorkspaceError
from factory.gates.holds import DEVICE
from factory.gates.patch.policy import PatchPolicy
from factory.git import repository
from factory.git.repository import RepositoryError
from factory.git.scope import AgentsPolicy, FileChange
from factory.ledger.ledger import proposals
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SqlReader, Subject
from factory.ledger.writing import record_event_once
from kernels.contract.choice import read_device_section
from kernels.contract.message import Message

REFUSED = "judging_again_refused"  # event: {"live", "why"}: the patch cannot be judged on top of this live commit


@dataclass(frozen=True)
class JudgedAgain:
    """A patch that was judged again. ``rebased``: the live code had changed, so the patch was first moved on top of it."""

    proposal: int
    judged_as: int
    rebased: bool

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def judge_patch_again(plant: Plant, row: ProposalRow, live: str) -> int:
    """Have the same patch judged on top of the live code, as a new proposal. Returns the new proposal's number. Raises: InputError."""
    if row.gate == AUDIT:  # measured on a segment; the live code does not matter
        number = propose_revert_again(plant, row)
    else:
        changed = move_patch(plant.workspace.repository, row, live)
        if live != row.base_commit:
            plant.progress.line(
                Message(
                    "code_loop.code_changed",
                    "  the code changed to {commit} since proposal {proposal} was judged; the gate judges the proposal again",
                    commit=live[:12],
                    proposal=row.number,
                )
            )
        drafted = Proposal(**row.select_fields(PROPOSED), edits=tuple(changed))
        number = submit_proposal(plant, drafted, live, {"again_of": row.number})
    with plant.ledger.begin() as tx:
        tx.execute(proposals.update().where(proposals.c.number == row.number).values(state="superseded"))
    return number


def move_patch(code: Path, row: ProposalRow, live: str, onto: dict[str, str] | None = None) -> list[Edit]:
    """Return a judged patch as edits of the live code. ``onto``: texts of files that other patches already changed on top of the live code.

    Raises: InputError if the live code or ``onto`` changed the same part of a file since the patch was judged.
    """
    changes = repository.read_file_changes(code, row.base_commit, row.patch_commit)
    moved = {change.path for change in repository.read_file_changes(code, row.base_commit, live)} | set(onto or ())
    if both := sorted(moved & {change.path for change in changes} - {KERNELS}):
        raise InputError(
            "code_loop.files_changed",
            "{files} changed since proposal {proposal} was judged, so its patch no longer fits the live code. Propose the change again.",
            files=both,
            proposal=row.number,
        )
    texts = onto or {}
    return [Edit(change.path, _moved_on(code, row, change, live, texts)) for change in changes]


def check_branch_contains_judged_patch(code: Path, row: ProposalRow) -> None:
    """Raises: InputError if the proposal's branch no longer contains the judged patch."""
    commit = repository.get_branch_commit(code, row.branch)
    if commit is None:
        raise InputError(
            "code_loop.no_branch",
            "The branch {branch} no longer exists, so proposal {proposal} can be neither merged nor judged again. Propose the change again.",
            branch=row.branch,
            proposal=row.number,
        )
    judged = (row.patch_commit, row.judged_sha256)
    if (commit, repository.hash_patch(code, row.base_commit, commit)) != judged or row.patch_sha256 != judged[1]:
        raise InputError(
            "code_loop.other_patch",
            "The branch {branch} does not contain the judged patch: the judged commit is {judged}, but the branch is "
            "at {found}. Only the judged patch can be approved or judged again. Propose the new patch again.",
            branch=row.branch,
            judged=row.patch_commit[:12],
            found=commit[:12],
        )


def get_held_proposal(plant: Plant, number: int, live: str) -> ProposalRow:
    """Return a held proposal whose patch fits the live code. Raises: InputError that says why it cannot be judged again, and what to do."""
    row = ProposalRow.get(plant.ledger, number)
    if row.state in ("approved", MERGED_WITH):
        raise InputError(
            "code_loop.already_merged",
            "Proposal {proposal} is merged already, so there is nothing to judge. To see it: 'factory proposals show {proposal}'.",
            proposal=number,
        )
    if row.state == "superseded":
        descents = ProposalDescents(plant.ledger)
        raise InputError(
            "code_loop.judged_since",
            "Proposal {proposal} was judged again as proposal {newest}. Name that proposal.",
            proposal=number,
            newest=max(descents.list_family(descents.find_root(number))),
        )
    if (row.state, row.outcome) != ("judged", "hold"):
        raise InputError(
            "code_loop.not_held",
            "Only a held proposal can be judged again or combined. Proposal {proposal} has the state {state} and the verdict {outcome}. To see it: "
            "'factory proposals show {proposal}'.",
            proposal=number,
            state=row.state,
            outcome=(row.outcome or "none").upper(),
        )
    check_branch_contains_judged_patch(plant.workspace.repository, row)
    move_patch(plant.workspace.repository, row, live)
    return row


def judge_proposals_again(plant: Plant, numbers: Iterable[int]) -> list[JudgedAgain]:
    """Have held proposals judged again at once, for a person. All are checked before the first is judged.

    The caller holds the workspace's ``code-loop`` lock. Raises: InputError for a proposal that cannot be judged again; RepositoryError;
    IsolationError.
    """
    live = remove_remains_and_get_live_commit(plant)
    rows = [get_held_proposal(plant, number, live) for number in dict.fromkeys(numbers)]
    return [JudgedAgain(row.number, judge_patch_again(plant, row, live), live != row.base_commit) for row in rows]


def judge_every_held_patch_again(plant: Plant) -> tuple[list[JudgedAgain], list[dict[str, Any]]]:
    """Have each patch judged again that only its surroundings held, whatever the waits. Returns what was judged, and the refused proposals with why.

    The caller holds the workspace's ``code-loop`` lock. Raises: as ``judge_proposals_again``, without InputError.
    """
    done, refused = [], []
    remove_remains_and_get_live_commit(plant)
    for one in list_held_patches(plant.ledger, read_judging_again_rules(plant)):
        try:
            done += judge_proposals_again(plant, [one.row.number])
        except InputError as error:
            refused.append({"proposal": one.row.number, "why": error.message})
    return done, refused


def read_judging_again_rules(plant: Plant) -> JudgingAgainRules:
    """Return the rules of policies/gates/patch.yaml. Raises: ConfigError."""
    policy = PatchPolicy.load(plant.workspace.policy_path("gates/patch.yaml"))
    return JudgingAgainRules(policy.judge_again, policy.judge_again_after_seconds, policy.quiet_load)


def find_patches_to_judge_again(plant: Plant, db: SqlReader, now: float | None = None) -> list[HeldPatch]:
    """Return the held patches that the daemon shall have judged again now, oldest first. Raises: ConfigError.

    A patch that waits for the decision on a sum is left out. So is one that does not fit the live code.
    """
    now = time.time() if now is None else now
    rules = read_judging_again_rules(plant)
    ready = [
        one
        for one in list_held_patches(db, rules)
        if one.not_before is not None
        and one.not_before <= now
        and one.in_sum is None
        and (one.cause != DEVICE or one.device == devices.get_device_kind())
    ]
    if not ready or not is_machine_quiet(rules, read_improvement_policy(plant), now):
        return []
    live = repository.get_live_commit(plant.workspace.repository)
    return [one for one in ready if not _was_refused(db, one.row.number, live)]


def read_improvement_policy(plant: Plant) -> ImprovementPolicy:
    """Return the section ``improve`` of agents.yaml. Raises: ConfigError."""
    return AgentsPolicy.load(plant.workspace.policy_path("agents.yaml")).improve


def is_machine_quiet(rules: JudgingAgainRules, improve: ImprovementPolicy, now: float) -> bool:
    """Return whether a measurement has a good chance to be clear now: it is night (``improve.night``), or the load is low.

    The load is the system's average of the last minute per core. It counts other people's processes. It also counts the factory's own, but the
    daemon asks only when it has nothing else to do, and what it did before has left the average after a minute or two.
    """
    clock = time.localtime(now)
    if improve.is_night_at_minute_of_day(clock.tm_hour * 60 + clock.tm_min):
        return True
    try:
        load = os.getloadavg()[0]
    except OSError:  # the system tells no load
        return False
    return load / (os.cpu_count() or 1) < rules.quiet_load


def list_due_judgements(plant: Plant, db: SqlReader) -> list[int]:
    """Return the proposals that the daemon judges again now; none while another process holds the code loop, or the checkout has uncommitted
    changes. Raises: ConfigError."""
    found = [one.row.number for one in find_patches_to_judge_again(plant, db)]
    if not found:
        return []
    try:
        with plant.workspace.hold_lock(LOCK):
            repository.check_nothing_uncommitted(plant.workspace.repository)
    except (WorkspaceError, RepositoryError):
        return []
    return found


def judge_held_patch_again(plant: Plant, number: int) -> int | None:
    """Have a held patch judged again, for the daemon. Returns the new proposal; None if it is no longer due, or if it cannot be judged.

    A patch that does not fit the live code is reported once, and is tried again when the live code changes. Raises: RepositoryError,
    IsolationError, WorkspaceError.
    """
    with plant.workspace.hold_lock(LOCK):
        live = remove_remains_and_get_live_commit(plant)
        due = {one.row.number: one for one in find_patches_to_judge_again(plant, plant.ledger)}
        if number not in due:
            return None
        try:
            row = get_held_proposal(plant, number, live)
        except InputError as error:
            refusal = {"live": live, "why": str(error)}
            if record_event_once(plant.ledger, REFUSED, Subject("proposal", number), refusal):
                plant.print_line(
                    Message(
                        "code_loop.not_again",
                        "  proposal {proposal} cannot be judged again now: {problem}",
                        proposal=number,
                        problem=error.message,
                    )
                )
            return None
        plant.print_line(
            Message(
                "code_loop.judged_again",
                "  proposal {proposal} was held only by {held_by}; the gate judges the proposal again",
                held_by=format_hold_cause(due[number].cause, due[number].device),
                proposal=number,
            )
        )
        return judge_patch_again(plant, row, live)


def _was_refused(db: SqlReader, number: int, live: str) -> bool:
    sql = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1"
    newest = db.read(sql, kind=REFUSED, subject=str(Subject("proposal", number)))
    return bool(newest) and newest[0]["detail"].get("live") == live


def _moved_on(code: Path, row: ProposalRow, change: FileChange, live: str, texts: Mapping[str, str]) -> str:
    """Return the text of a file that the patch changes, for the live code. In kernels.yaml, choices of other ops since then are kept.

    ``texts``: path → text of a file that another patch already changed on top of the live code.

    Raises: InputError if the patch and a merged patch chose for the same op, or if the patch changes more in kernels.yaml than choices.
    """
    text = (change.content or b"").decode()
    if change.path != KERNELS:
        return text
    base = repository.read_file_text(code, row.base_commit, KERNELS)
    now = texts.get(KERNELS) or repository.read_file_text(code, live, KERNELS)
    if now == base:
        return text
    replayed = base
    for device in yaml.safe_load(text):
        old, new, held = (read_device_section(version, device) for version in (base, text, now))
        for op in (op for op in new if old.get(op) != new[op]):
            if held.get(op) != old.get(op):
                raise InputError(
                    "code_loop.choice_changed",
                    "{file}: the kernel chosen for {op} changed since proposal {proposal} was judged. Propose the "
                    "change again.",
                    file=KERNELS,
                    op=op,
                    proposal=row.number,
                )
            replayed, now = (set_yaml_value(version, (device, op), new[op]) for version in (replayed, now))
    if yaml.safe_load(replayed) != yaml.safe_load(text):
        raise InputError(
            "code_loop.more_than_choices",
            "{file} changed since proposal {proposal} was judged, and the patch changes more in this file than the "
            "choice of kernels. Propose the change again.",
            file=KERNELS,
            proposal=row.number,
        )
    return now
