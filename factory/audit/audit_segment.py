"""Runs one audit: replays the drawn windows of steps without the patches, compares the replays with live training, judges, and records the verdict.

The audit keeps the windows and the finished replays. After a kill at any moment, the same call therefore continues the audit.

How far live training may be from a replay is measured with trusted code alone: a further replay without the patches begins with weights that are one
rounding error off. A window that begins with new weights has no checkpoint at its start. There, the effect of rounding is measured from its second
step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from factory.audit.audit_average import compare_average
from factory.audit.audit_windows import AuditWindow, count_audit_tries
from factory.audit.judge import find_differences, is_hidden_by_rounding, judge_audit
from factory.audit.kept_checkpoints import get_audit_folder, get_window_checkpoint_folder, keep_window_checkpoints
from factory.audit.live_records import (
    find_anomaly_difference,
    find_metrics_difference,
    read_whole_trace,
    remove_layout_keys,
)
from factory.audit.policy import AuditPolicy
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.reverting import AUDITED
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import FactoryError, InputError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.launching import count_ranks
from factory.core.path_removal import remove_path
from factory.core.policy_file import hash_policy
from factory.core.workspace import Workspace
from factory.gates.patch.changed_ops import NO_OP
from factory.gates.patch.checkpoint_difference import compute_weight_drift, find_checkpoint_difference
from factory.gates.release.judge import Verdict
from factory.git import repository
from factory.git.undo import make_revert_commit
from factory.ledger.ledger import record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow, Subject, VerdictRow
from factory.ledger.writing import record_verdict
from factory.runs.arm import Arm, make_recipe_for_one_rank
from factory.runs.arm_runner import ArmRunner
from factory.runs.distance import (
    find_unmatched_tensor,
    have_same_bits,
    measure_tensor_distances,
    save_perturbed_checkpoint,
    sum_moment_distances_by_kind,
)
from factory.runs.trace import RunTrace, merge_adapted_weights
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.preflight import ROUNDING
from factory.training.segment_folder import make_segment_spec
from kernels.contract.choice import resolve_auto_in_text
from kernels.contract.files import replace_non_finite
from kernels.contract.message import CodedError, Message
from trainer.contract.checkpoint.format import Checkpoint, Tensors, hash_manifest, load_checkpoint
from trainer.contract.errors import TrainerError

PERTURBED_REPLAYS = 2  # the second one only if live training is beyond what the first one allows
WORST_FIRST = ("reject", "hold", "promote")  # of several windows, the first verdict in this order counts


def audit_segment(plant: Plant, segment: int) -> VerdictRow | None:
    """Audit the windows that were drawn for a segment. Returns the verdict; None if no window of the segment could be kept.

    Raises: InputError if no window was drawn or the segment is not done; ConfigError.
    """
    policy = AuditPolicy.load(plant.workspace.policy_path("gates/audit.yaml"))
    row, window = SegmentRow.get(plant.ledger, segment), AuditWindow.find_for_segment(plant.ledger, segment)
    if window is None or not window.is_audited:
        raise InputError(
            "audit.not_drawn",
            "Segment {segment} cannot be audited. The factory chooses the steps to audit before a segment trains, "
            "and it chose none for this segment.",
            segment=segment,
        )
    if row.state != "done":
        raise InputError(
            "audit.not_done",
            "Only a segment whose state is 'done' can be audited. The state of segment {segment} is '{state}'.",
            segment=segment, state=row.state,
        )  # fmt: skip
    settled = VerdictRow.find_newest(plant.ledger, AUDIT, Subject("segment", segment))
    if settled is not None and settled.outcome != "hold":
        return settled
    window = keep_window_checkpoints(plant, row, window)
    if not window.is_audited:
        return None
    number = count_audit_tries(plant.ledger, segment) + 1
    judged = _judge_windows(plant, row, window, policy, number * policy.wall_seconds)
    part, verdict, evidence = min(judged, key=lambda one: WORST_FIRST.index(one[1].outcome))
    evidence |= {"windows": [[one.first, one.last] for one, *_ in judged]}
    subject = Subject("segment", segment)
    detail = {"outcome": verdict.outcome, "patches": list(window.patches), "suspects": evidence.get("suspects", [])}
    with plant.ledger.begin() as tx:
        recorded = record_verdict(
            tx, AUDIT, subject, against=evidence["against"], policy_sha256=hash_policy(policy), subject_sha256=evidence["subject_sha256"],
            outcome=verdict.outcome, reasons=verdict.reasons, evidence=evidence,
        )  # fmt: skip
        record_event(tx, AUDITED, subject, detail)
    words = {"promote": "agrees", "hold": "not measured", "reject": "DIFFERS"}[verdict.outcome]
    plant.progress.line(
        Message(
            "audit.judged",
            "  audit of segment {segment}: {outcome}. Steps {first}–{last} were replayed without proposals "
            "{patches}. {reason}",
            segment=row.id, first=part.first, last=part.last, patches=list(window.patches), outcome=words, reason=verdict.reasons[0],
        )
    )  # fmt: skip
    if verdict.outcome != "reject":
        _clear(get_audit_folder(plant.workspace, segment), all_of_it=verdict.outcome == "promote")
    return VerdictRow.get(plant.ledger, recorded)


def _judge_windows(
    plant: Plant, row: SegmentRow, window: AuditWindow, policy: AuditPolicy, wall_seconds: float
) -> list[tuple[AuditWindow, Verdict, dict[str, Any]]]:
    """Return (window, verdict, evidence) of each window, up to the first one that differs."""
    judged: list[tuple[AuditWindow, Verdict, dict[str, Any]]] = []
    for part in window.list_parts():
        title = Message(
            "audit.task",
            "audit of segment {segment}, steps {first}–{last}",
            segment=row.id, first=part.first, last=part.last,
        )  # fmt: skip
        with plant.progress.task(title):
            evidence = replace_non_finite(gather_audit_evidence(plant, row, part, policy, wall_seconds))
        evidence |= {"hidden_by_rounding": is_hidden_by_rounding(policy, evidence)}
        judged.append((part, judge_audit(policy, evidence), evidence))
        if judged[-1][1].outcome == "reject":
            break
    return judged


def _clear(folder: Path, all_of_it: bool) -> None:
    """Remove the replays, so that the next try starts from scratch. ``all_of_it``: also remove the window's checkpoints."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.name != "live" or all_of_it:
            remove_path(path)


# -- evidence ----------------------------------------------------------------------------------------------------------
class _NotMeasured(CodedError):
    """A part of the comparison could not be measured. This says nothing about the patches."""


@dataclass(frozen=True)
class _Measured:
    """The files of live training, and the other inputs of its comparison with replays."""

    policy: AuditPolicy
    runs: ArmRunner
    row: SegmentRow
    window: AuditWindow
    tuned: Mapping[str, str]  # op → the implementation that ``auto`` stood for before the patches
    wall_seconds: float
    live: RunTrace | None  # None: unreadable
    base_commit: str  # without the patches

    @cached_property
    def start_checkpoint(self) -> Path:
        """The checkpoint at the window's first step; of new weights, that of a replay after one step."""
        plant, row, first = self.runs.plant, self.row, self.window.first
        if first == row.first_step and row.parent is None:
            return self.trace("start", self.base_commit, first + 1).final_checkpoint_path
        return get_window_checkpoint_folder(plant, row, first)

    @cached_property
    def origin(self) -> Tensors:
        return merge_adapted_weights(load_checkpoint(self.start_checkpoint))

    def compute_drift(self, one: Checkpoint, base: Checkpoint, origin_of_one: Tensors | None = None) -> float:
        """Return the drift of ``one`` from ``base``, as a share of the way of ``base`` in the window."""
        ours, theirs = merge_adapted_weights(one), merge_adapted_weights(base)
        return compute_weight_drift(ours, theirs, self.origin, candidate_origin=origin_of_one)

    def measure_rounding(self, number: int, base: RunTrace) -> dict[str, Any]:
        """Return the distance from ``base`` of a replay without the patches that begins with other rounding errors. Raises: _NotMeasured."""
        unit = ROUNDING[self.row.recipe_json["precision"]]
        start = save_perturbed_checkpoint(
            self.start_checkpoint, self.runs.home / f"perturbed-{self.window.first}-{number}", unit, number
        )
        replay = self.trace(f"rounded {number + 1}", self.base_commit, self.window.last, start).final_checkpoint
        moved = merge_adapted_weights(load_checkpoint(start))
        return {
            "drift": self.compute_drift(replay, base.final_checkpoint, moved),
            "moments": measure_moments(replay, base.final_checkpoint),
        }

    def arm(self, name: str, commit: str, code: Path, until: int, start: Path | None) -> Arm:
        """Return the arm of a replay. It has the segment's specification, checkpoint and data. Its code chooses the kernels, and it uses one rank.

        ``start``: another checkpoint to start from.

        The hash of the code's tree names the arm, not the commit: each undoing of the same patches makes a new commit of the same tree.
        """
        plant, row, window = self.runs.plant, self.row, self.window
        spec = make_segment_spec(plant.ledger, row)
        if count_ranks(plant.workspace) > 1:
            spec["recipe"] = make_recipe_for_one_rank(spec["recipe"])
        kernels = (
            resolve_auto_in_text((code / KERNELS).read_bytes(), devices.get_device_kind(), self.tuned)
            if row.computing is not None
            else ""
        )
        own = get_window_checkpoint_folder(plant, row, window.first) if window.first > row.first_step else None
        return Arm(
            name, spec, repository.read_git_line(plant.workspace.repository, "rev-parse", f"{commit}^{{tree}}"),
            recipe={} if until == window.last else {"checkpoint_every": until, "keep_checkpoints": row.last_step // until + 1},
            start=start or own, until=until, kernels=kernels, repeat=name == "again",
        )  # fmt: skip

    def trace(self, name: str, commit: str, until: int, start: Path | None = None) -> RunTrace:
        """Replay the window up to step ``until``, from its first step or from ``start``. Returns the trace. Raises: _NotMeasured, IsolationError."""
        workspace = self.runs.plant.workspace
        code = repository.checkout_commit(workspace.repository, commit, workspace.worktrees / f"audit-{self.row.id}")
        arm = self.arm(name, commit, code, until, start)
        found = self.runs.train_in_own_sandbox(arm, code, Path(self.row.folder).name, self.wall_seconds)
        if found.failed:
            if found.out_of_time:
                raise _NotMeasured(
                    "audit.replay_stopped",
                    "The replay '{name}' did not end within {seconds:.0f} s: {problem}. To allow more time, raise "
                    "wall_seconds in policies/gates/audit.yaml.",
                    name=name, problem=found.failed, seconds=self.wall_seconds,
                )  # fmt: skip
            raise _NotMeasured(
                "audit.replay_failed", "The replay '{name}' failed: {problem}", name=name, problem=found.failed
            )
        try:
            return read_whole_trace(RunTrace(found.folder, arm.first_step, until, ends=False))
        except UntrustedFileError as error:
            raise _NotMeasured(
                "audit.replay_unreadable",
                "The results of the replay '{name}' cannot be read: {error}",
                name=name, error=error.message,
            ) from error  # fmt: skip

    def compare(self, base: RunTrace, rounding: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the evidence of how live training differs from the replay ``base``. ``rounding``: of ``measure_rounding``."""
        live = self.live
        assert live is not None
        found: dict[str, Any] = {"same_bits": have_same_bits(live.final_checkpoint, base.final_checkpoint)}
        if missing := find_unmatched_tensor(live.final_checkpoint, base.final_checkpoint):
            unlike_tensor = Message(
                "audit.tensor_unlike",
                "Tensor {tensor} is missing from the live checkpoint, or its shape or dtype differs from the replay's.",
                tensor=missing,
            )
            return found | {"told": [unlike_tensor]}
        moments = measure_moments(live.final_checkpoint, base.final_checkpoint)
        if rounding:
            drift = self.compute_drift(live.final_checkpoint, base.final_checkpoint)
            found |= {"drift": drift, "moments": moments, "rounding": list(rounding)}
        state = find_checkpoint_difference(
            remove_layout_keys(live.final_checkpoint),
            remove_layout_keys(base.final_checkpoint),
            dict.fromkeys(moments, math.inf),  # the judge compares the moments
            1.0,
        )
        each = (state, find_metrics_difference(live, base, self.policy.lines), find_anomaly_difference(live, base))
        return found | {"told": [one for one in each if one]}


def measure_moments(one: Checkpoint, base: Checkpoint) -> dict[str, float]:
    """Return the distance of two optimiser states by kind, as a share of the size of ``base``."""
    each = sum_moment_distances_by_kind(measure_tensor_distances(base.optimizer, one.optimizer))
    return {kind: distance.relative_distance for kind, distance in each.items()}


def gather_audit_evidence(
    plant: Plant, row: SegmentRow, window: AuditWindow, policy: AuditPolicy, wall_seconds: float
) -> dict[str, Any]:
    """Return the evidence for ``judge_audit``. Its key ``missing`` has the reason why a replay was not possible."""
    patches = [ProposalRow.get(plant.ledger, number) for number in window.patches]
    evidence: dict[str, Any] = {
        "segment": row.id, "first": window.first, "last": window.last, "steps": window.step_count, "patches": list(window.patches),
        "code_commit": row.code_commit, "against": patches[0].base_commit, "subject_sha256": "",
        "claims_same_bits": all(claims_same_bits(patch.read_evidence(plant.ledger)) for patch in patches),
    }  # fmt: skip
    runs = ArmRunner(plant, get_audit_folder(plant.workspace, row.id), "audit", Subject("segment", row.id))
    tuned = _tuned(plant, row, patches[0])
    end = get_window_checkpoint_folder(plant, row, window.last)
    try:
        evidence["subject_sha256"] = hash_manifest(end)
        base_commit = _without(plant.workspace, row.code_commit, patches)
        if not Path(row.folder).is_dir():
            raise _NotMeasured(
                "audit.folder_missing",
                "The folder of segment {segment} is missing: {folder}. Mount or restore the folder, then audit "
                "again: 'factory audit --segment {segment}'.",
                segment=row.id, folder=row.folder,
            )  # fmt: skip
        if not row.has_steps:
            return evidence | compare_average(runs, row, base_commit, end, policy, wall_seconds, window.patches)
        live = None
        try:
            live = read_whole_trace(RunTrace(Path(row.folder), window.first, window.last, ends=False, where=end))
        except UntrustedFileError as error:
            unreadable = Message(
                "audit.segment_unreadable",
                "The files of segment {segment} cannot be read: {error}",
                segment=row.id, error=error.message,
            )  # fmt: skip
            evidence["told"] = [unreadable]
        measured = _Measured(policy, runs, row, window, tuned, wall_seconds, live, base_commit)
        return evidence | _replay(measured, evidence, patches)
    except (
        _NotMeasured,
        FactoryError,
        TrainerError,
        OSError,
    ) as error:  # no sandbox, or lines that people changed since
        if isinstance(error, repository.CheckoutError) or is_machine_fault_unrelated_to_files(error):
            raise  # a fault of the machine, such as a full disk: the audit is made afterwards
        return evidence | {"missing": error.message if isinstance(error, CodedError) else str(error)}
    finally:
        repository.remove_worktree(plant.workspace.repository, plant.workspace.worktrees / f"audit-{row.id}")


def _replay(measured: _Measured, evidence: dict[str, Any], patches: Sequence[ProposalRow]) -> dict[str, Any]:
    """Make the replays that the decision needs, and return their evidence. Raises: _NotMeasured, FactoryError."""
    window, row, policy, commit = measured.window, measured.row, measured.policy, measured.base_commit
    base = measured.trace("without", commit, window.last)
    if measured.live is None:
        return {"again": {"same_bits": True}, "suspects": list(window.patches)}
    found, rounding = measured.compare(base, ()), list[dict[str, Any]]()
    if not found["same_bits"] and not find_unmatched_tensor(measured.live.final_checkpoint, base.final_checkpoint):
        for number in range(PERTURBED_REPLAYS):
            rounding.append(measured.measure_rounding(number, base))
            found = measured.compare(base, rounding)
            if not find_differences(policy, evidence | found):
                break
    claims_bits = (
        evidence["claims_same_bits"]
        and devices.get_device_kind() == "cpu"
        and count_ranks(measured.runs.plant.workspace) == 1
    )
    if claims_bits and not found["same_bits"] and not find_differences(policy, evidence | found):
        again = measured.trace("live-code", row.code_commit, window.last)
        found["exact"] = have_same_bits(measured.live.final_checkpoint, again.final_checkpoint)
    if not find_differences(policy, evidence | found):
        return found
    again = measured.trace("again", commit, window.last)
    off = measured.compute_drift(again.final_checkpoint, base.final_checkpoint)
    found["again"] = {"same_bits": have_same_bits(again.final_checkpoint, base.final_checkpoint), "drift": off}
    found["suspects"] = [_suspect(measured, evidence | found, rounding, patches).number]
    return found


def _suspect(
    measured: _Measured, evidence: dict[str, Any], rounding: Sequence[dict[str, Any]], patches: Sequence[ProposalRow]
) -> ProposalRow:
    """Return the patch that made the difference. Undo patches one by one, newest first, until the replay differs from live training."""
    workspace, row = measured.runs.plant.workspace, measured.row
    exact = {"exact": evidence["exact"]} if "exact" in evidence else {}
    for count in range(1, len(patches)):
        commit = _without(workspace, row.code_commit, patches[-count:])
        other = measured.trace(f"without-{count}", commit, measured.window.last)
        if find_differences(measured.policy, evidence | measured.compare(other, rounding) | exact):
            return patches[-count]
    return patches[0]


def _without(workspace: Workspace, commit: str, patches: Sequence[ProposalRow]) -> str:
    """Return a commit without these patches; the newest is undone first. Raises: RepositoryError if people changed the same lines since."""
    for patch in reversed(patches):
        message = f"without proposal {patch.number}"
        commit = make_revert_commit(
            workspace.repository, commit, patch.base_commit, patch.patch_commit, message, drop_edited_new_files=True
        )
    return commit


def claims_same_bits(evidence: Mapping[str, Any]) -> bool:
    """Return whether a patch must change no bit of live training, by its verdict's evidence: each training run of the gate had the same bits, or all
    tiny runs had and the patch changed no op. What a patch changed in the gate never allows it a difference here."""
    stages = evidence.get("stages") or {}
    training, matrix, oracle = ((stages.get(name) or {}) for name in ("training", "matrix", "oracle"))
    measured = [one for one in (training, training.get("again") or {}) if one.get("control_drift")]
    if measured and all(one["drift"] == 0 for one in measured):
        return True
    return (
        oracle.get("state") == NO_OP["state"] and bool(matrix.get("runs")) and matrix["runs"] == matrix.get("same_bits")
    )


def _tuned(plant: Plant, row: SegmentRow, oldest: ProposalRow) -> dict[str, str]:
    """Return the implementations that ``auto`` stood for in the newest segment before the patches. Without such a segment: in this segment."""
    for before in SegmentRow.select(plant.ledger, "WHERE id < :id AND kind <> 'average' ORDER BY id DESC", id=row.id):
        if before.computing and not repository.is_ancestor(
            plant.workspace.repository, before.code_commit, oldest.patch_commit
        ):
            return dict(before.computing["kernels"])
    return dict(row.computing["kernels"]) if row.computing else {}
