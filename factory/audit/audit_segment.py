"""Runs one audit: replays the drawn window of steps without the patches, compares the replay with live training, judges, and records the verdict.

The audit keeps the window and the finished replays. After a kill at any moment, the same call therefore continues the audit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from factory.audit.audit_windows import AuditWindow, count_audit_tries
from factory.audit.judge import compute_allowed_distance_share, find_differences, judge_audit
from factory.audit.kept_checkpoints import get_audit_folder, get_window_checkpoint_folder, keep_window_checkpoints
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
from factory.gates.patch.checkpoint_difference import (
    compute_squared_moment_distances,
    compute_weight_drift,
    find_checkpoint_difference,
)
from factory.git import repository
from factory.git.undo import make_revert_commit
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow, Subject, VerdictRow
from factory.ledger.writing import record_verdict
from factory.runs.arm import Arm, make_recipe_for_one_rank
from factory.runs.arm_runner import ArmRunner
from factory.runs.distance import find_unmatched_tensor, have_same_bits
from factory.runs.trace import RunTrace, merge_adapted_weights
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.segment_folder import make_segment_spec
from kernels.contract.choice import resolve_auto_in_text
from kernels.contract.files import replace_non_finite
from kernels.contract.message import CodedError, Message
from trainer.contract.checkpoint.format import Checkpoint, Tensors, hash_manifest, load_checkpoint
from trainer.contract.errors import TrainerError


def audit_segment(plant: Plant, segment: int) -> VerdictRow | None:
    """Audit the window that was drawn for a segment. Returns the verdict; None if no window of the segment could be kept.

    Raises: InputError if no window was drawn or the segment is not done; ConfigError.
    """
    policy = AuditPolicy.load(plant.workspace.policy_path("gates/audit.yaml"))
    row, window = SegmentRow.get(plant.ledger, segment), AuditWindow.find_for_segment(plant.ledger, segment)
    if window is None or not window.step_count:
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
    if not window.step_count:
        return None
    number = count_audit_tries(plant.ledger, segment) + 1
    title = Message(
        "audit.task",
        "audit of segment {segment}, steps {first}–{last}",
        segment=segment, first=window.first, last=window.last,
    )  # fmt: skip
    with plant.progress.task(title):
        evidence = replace_non_finite(gather_audit_evidence(plant, row, window, policy, number * policy.wall_seconds))
    verdict = judge_audit(policy, evidence)
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
            segment=segment, first=window.first, last=window.last, patches=list(window.patches), outcome=words, reason=verdict.reasons[0],
        )
    )  # fmt: skip
    if verdict.outcome != "reject":
        _clear(get_audit_folder(plant.workspace, segment), all_of_it=verdict.outcome == "promote")
    return VerdictRow.get(plant.ledger, recorded)


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
    origin: Tensors
    claims: dict[str, Any]

    def compute_drift(self, one: Checkpoint, base: Checkpoint, include_worst_tensor: bool = True) -> float:
        """Return the drift of ``one`` from ``base``, as a share of the way of ``base`` in the window."""
        ours, theirs = merge_adapted_weights(one), merge_adapted_weights(base)
        return compute_weight_drift(ours, theirs, self.origin, include_worst_tensor)

    def arm(self, name: str, commit: str, code: Path, until: int) -> Arm:
        """Return the arm of a replay. It has the segment's specification, checkpoint and data. Its code chooses the kernels, and it uses one rank.

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
        return Arm(
            name, spec, repository.read_git_line(plant.workspace.repository, "rev-parse", f"{commit}^{{tree}}"),
            recipe={} if until == window.last else {"checkpoint_every": until, "keep_checkpoints": 2},
            start=get_window_checkpoint_folder(plant, row, window.first) if window.first > row.first_step else None, until=until, kernels=kernels,
            repeat=name == "again",
        )  # fmt: skip

    def trace(self, name: str, commit: str, until: int) -> RunTrace:
        """Replay the window and return its trace. Raises: _NotMeasured, IsolationError."""
        workspace = self.runs.plant.workspace
        code = repository.checkout_commit(workspace.repository, commit, workspace.worktrees / f"audit-{self.row.id}")
        arm = self.arm(name, commit, code, until)
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
            return read_whole_trace(RunTrace(found.folder, self.window.first, until, ends=False))
        except UntrustedFileError as error:
            raise _NotMeasured(
                "audit.replay_unreadable",
                "The results of the replay '{name}' cannot be read: {error}",
                name=name, error=error.message,
            ) from error  # fmt: skip

    def compare(self, base: RunTrace, shorter: Checkpoint | None) -> dict[str, Any]:
        """Return the evidence of how live training differs from the replay ``base``. ``shorter``: the end of a replay without the last step."""
        live, window = self.live, self.window
        assert live is not None
        found: dict[str, Any] = {"same_bits": have_same_bits(live.final_checkpoint, base.final_checkpoint)}
        if missing := find_unmatched_tensor(live.final_checkpoint, base.final_checkpoint):
            unlike_tensor = Message(
                "audit.tensor_unlike",
                "Tensor {tensor} is missing from the live checkpoint, or its shape or dtype differs from the replay's.",
                tensor=missing,
            )
            return found | {"told": [unlike_tensor]}
        share = compute_allowed_distance_share(self.policy, self.claims | {"steps": window.step_count})
        away: dict[str, float] = {}
        if shorter is not None:
            away = compute_squared_moment_distances(
                remove_layout_keys(shorter), remove_layout_keys(base.final_checkpoint)
            )
            found |= {
                "drift": self.compute_drift(live.final_checkpoint, base.final_checkpoint),
                "control_drift": self.compute_drift(shorter, base.final_checkpoint, include_worst_tensor=False),
            }
        told = shorter is not None or found["same_bits"]
        state = (
            find_checkpoint_difference(
                remove_layout_keys(live.final_checkpoint), remove_layout_keys(base.final_checkpoint), away, share
            )
            if told
            else None
        )
        each = (state, find_metrics_difference(live, base, self.policy.lines), find_anomaly_difference(live, base))
        return found | {"told": [one for one in each if one]}


def gather_audit_evidence(
    plant: Plant, row: SegmentRow, window: AuditWindow, policy: AuditPolicy, wall_seconds: float
) -> dict[str, Any]:
    """Return the evidence for ``judge_audit``. Its key ``missing`` has the reason why a replay was not possible."""
    patches = [ProposalRow.get(plant.ledger, number) for number in window.patches]
    evidence: dict[str, Any] = {
        "segment": row.id, "first": window.first, "last": window.last, "steps": window.step_count, "patches": list(window.patches),
        "code_commit": row.code_commit, "against": patches[0].base_commit, "subject_sha256": "", **_claims(plant.ledger, patches),
    }  # fmt: skip
    runs = ArmRunner(plant, get_audit_folder(plant.workspace, row.id), "audit", Subject("segment", row.id))
    tuned = _tuned(plant, row, patches[0])
    end = get_window_checkpoint_folder(plant, row, window.last)
    try:
        evidence["subject_sha256"] = hash_manifest(end)
        origin = merge_adapted_weights(load_checkpoint(get_window_checkpoint_folder(plant, row, window.first)))
        base_commit = _without(plant.workspace, row.code_commit, patches)
        if not Path(row.folder).is_dir():
            raise _NotMeasured(
                "audit.folder_missing",
                "The folder of segment {segment} is missing: {folder}. Mount or restore the folder, then audit "
                "again: 'factory audit --segment {segment}'.",
                segment=row.id, folder=row.folder,
            )  # fmt: skip
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
        measured = _Measured(policy, runs, row, window, tuned, wall_seconds, live, origin, evidence)
        return evidence | _replay(measured, evidence, base_commit, patches)
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


def _replay(
    measured: _Measured, evidence: dict[str, Any], commit: str, patches: Sequence[ProposalRow]
) -> dict[str, Any]:
    """Make the replays that the decision needs, and return their evidence. Raises: _NotMeasured, FactoryError."""
    window, row, policy = measured.window, measured.row, measured.policy
    base = measured.trace("without", commit, window.last)
    if measured.live is None:
        return {"again": {"same_bits": True}, "suspects": list(window.patches)}
    found = measured.compare(base, None)
    shorter = None
    if not found["same_bits"] and not find_unmatched_tensor(measured.live.final_checkpoint, base.final_checkpoint):
        left_out = window.last - 1
        if left_out > window.first:
            shorter = measured.trace("shorter", commit, left_out).final_checkpoint
        else:  # a window of one step
            shorter = replace(base.final_checkpoint, model=measured.origin)
        found = measured.compare(base, shorter)
    claims_bits = (
        evidence.get("claimed") == 0
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
    found["suspects"] = [_suspect(measured, evidence | found, shorter, patches).number]
    return found


def _suspect(
    measured: _Measured, evidence: dict[str, Any], shorter: Checkpoint | None, patches: Sequence[ProposalRow]
) -> ProposalRow:
    """Return the patch that made the difference. Undo patches one by one, newest first, until the replay differs from live training."""
    workspace, row = measured.runs.plant.workspace, measured.row
    exact = {"exact": evidence["exact"]} if "exact" in evidence else {}
    for count in range(1, len(patches)):
        commit = _without(workspace, row.code_commit, patches[-count:])
        other = measured.trace(f"without-{count}", commit, measured.window.last)
        if find_differences(measured.policy, evidence | measured.compare(other, shorter) | exact):
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


def _claims(ledger: Ledger, patches: Sequence[ProposalRow]) -> dict[str, Any]:
    """Return two measurements of the gate; both are None if a patch was not measured so.

    ``claimed``: the distance between the patches' weights and their baselines', as a share of the effect of leaving out one step. ``gate_steps``:
    the number of steps after which the gate measured the distance.
    """
    shares, steps = [], 0
    for patch in patches:
        found = (patch.read_evidence(ledger).get("stages") or {}).get("training") or {}
        measured = [one for one in (found, found.get("again") or {}) if one.get("control_drift")]
        if not measured:
            return {"claimed": None, "gate_steps": None}
        shares.append(max(one["drift"] / one["control_drift"] for one in measured))
        steps = max(steps, found.get("steps") or 0)
    return {"claimed": sum(shares), "gate_steps": steps}


def _tuned(plant: Plant, row: SegmentRow, oldest: ProposalRow) -> dict[str, str]:
    """Return the implementations that ``auto`` stood for in the newest segment before the patches. Without such a segment: in this segment."""
    for before in SegmentRow.select(plant.ledger, "WHERE id < :id AND kind <> 'average' ORDER BY id DESC", id=row.id):
        if before.computing and not repository.is_ancestor(
            plant.workspace.repository, before.code_commit, oldest.patch_commit
        ):
            return dict(before.computing["kernels"])
    return dict(row.computing["kernels"]) if row.computing else {}


# Keys of metrics.jsonl that depend on the clock and the machine's memory.
TIME_KEYS = {"tokens_per_s", "flops_per_s", "mfu", "first_step_s", "data_wait_s", "time", "memory"}
MACHINE_ANOMALIES = (
    "throughput_drop",
    "rank_grad_norm",
)  # anomalies that a replay by one rank at another speed may lack
# Results of the step, which must agree. Other numbers are diagnoses, some of them small differences of large numbers.
LEARNT = ("loss", "grad_norm", "lr")
LAYOUT = {
    "parallel": None,
    "checkpoint_every": None,
    "keep_checkpoints": None,
}  # keys of a recipe that may differ in a replay


def read_whole_trace(trace: RunTrace) -> RunTrace:
    """Read all parts of a trace, and return the trace. Raises: UntrustedFileError if a part is missing or invalid."""
    if not all(
        bool(tensor.isfinite().all()) for tensor in trace.final_checkpoint.model.values() if tensor.is_floating_point()
    ):
        raise UntrustedFileError(
            "audit.not_finite",
            "the weights of {checkpoint} are not finite",
            checkpoint=trace.final_checkpoint_path.name,
        )
    assert trace.metric_lines_by_step is not None and trace.anomalies is not None
    return trace


def remove_layout_keys(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without the keys of state.json that may differ in a replay."""
    recipe = checkpoint.state["recipe"] | LAYOUT
    return replace(
        checkpoint, state=checkpoint.state | {"recipe": recipe, "skipped": []}
    )  # a stopped run may have skipped steps


def find_metrics_difference(live: RunTrace, base: RunTrace, tolerance: float) -> Message | None:
    """Return the first difference of metrics.jsonl between live training and the replay; None without a difference.

    A line of live training may have additional keys. Counts must be equal. A loss, a gradient's norm or a rate may differ by ``tolerance``.
    """
    if lost := sorted(base.metric_lines_by_step.keys() - live.metric_lines_by_step.keys()):
        return Message(
            "audit.lines_missing",
            "The live run's metrics.jsonl lacks the line of step {step}. In all, {missing:|line is|lines are} missing.",
            step=lost[0], missing=len(lost),
        )  # fmt: skip
    for step, theirs in sorted(base.metric_lines_by_step.items()):
        ours = live.metric_lines_by_step[step]
        for key, value in theirs.items():
            if key in TIME_KEYS:
                continue
            if key not in ours:
                return Message(
                    "audit.key_missing",
                    "In the live run's metrics.jsonl, the line of step {step} lacks {key}.",
                    key=key,
                    step=step,
                )
            other = ours[key]
            learnt = key.partition("/")[0] in LEARNT
            if isinstance(value, float) or isinstance(other, float):
                if learnt and not _near(value, other, tolerance):
                    return _other_value(key, step, other, value)
            elif other != value and (learnt or not isinstance(value, list | dict)):
                return _other_value(key, step, other, value)
    return None


def _other_value(key: str, step: int, live: object, replay: object) -> Message:
    return Message(
        "audit.value_differs",
        "At step {step}, {key} in metrics.jsonl is {live!r:.200} in the live run and {replay!r:.200} in the replay.",
        key=key, step=step, live=live, replay=replay,
    )  # fmt: skip


def _near(one: object, other: object, tolerance: float) -> bool:
    numbers = [x for x in (one, other) if isinstance(x, int | float) and math.isfinite(x)]
    if len(numbers) < 2:  # at most one of them is a finite number
        return not numbers
    return abs(numbers[0] - numbers[1]) <= tolerance * max(map(abs, numbers))


def find_anomaly_difference(live: RunTrace, base: RunTrace) -> Message | None:
    """Return a message about the first anomaly that only live training or only the replay has; None without a difference."""
    ours, theirs = (
        Counter(
            (one["step"], str(one.get("kind"))) for one in trace.anomalies if one.get("kind") not in MACHINE_ANOMALIES
        )
        for trace in (live, base)
    )
    if lost := theirs - ours:
        step, kind = min(lost)
        return Message(
            "audit.anomaly_missing",
            "The replay's anomalies.jsonl lists {kind} at step {step}, but the live run's does not.",
            kind=kind[:60], step=step,
        )  # fmt: skip
    if more := ours - theirs:
        step, kind = min(more)
        return Message(
            "audit.anomaly_added",
            "The live run's anomalies.jsonl lists {kind} at step {step}, but the replay's does not.",
            kind=kind[:60], step=step,
        )  # fmt: skip
    return None
