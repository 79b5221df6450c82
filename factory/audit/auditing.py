"""One audit: replay the drawn window without the patches, compare, judge, record.

Killed at any moment, the same call goes on: the window is kept, and so are replays that ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from factory.audit.drawing import AuditWindow, tries
from factory.audit.judge import allowed_share, differences, judge_audit
from factory.audit.keeping import folder_of, keep, kept
from factory.audit.policy import AuditPolicy
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.reverting import AUDITED
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import FactoryError, InputError
from factory.core.faults import is_of_no_file
from factory.core.launching import ranks
from factory.core.policy_file import policy_sha256
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.gates.patch.likeness import differs, drift, squares
from factory.git import repository
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow, Subject, VerdictRow
from factory.ledger.writing import record_verdict
from factory.runs.arm import Arm, for_one_rank
from factory.runs.distance import same_bits, unlike
from factory.runs.running import Runs
from factory.runs.trace import Trace
from factory.runs.untrusted_files import UntrustedFileError
from factory.training.segment_folder import spec_of
from kernels.contract.choice import resolved_text
from kernels.contract.files import finite
from trainer.contract.checkpoint.format import Checkpoint, Tensors, load, manifest_sha256
from trainer.contract.errors import TrainerError


def audit(plant: Plant, segment: int) -> VerdictRow | None:
    """Audit the window that was drawn for a segment; returns its verdict. None where no window of it could be kept.

    Raises: InputError when no window was drawn or the segment is not done; ConfigError.
    """
    policy = AuditPolicy.load(plant.workspace.policy("gates/audit.yaml"))
    row, window = SegmentRow.get(plant.ledger, segment), AuditWindow.of(plant.ledger, segment)
    if window is None or not window.steps:
        raise InputError(f"segment {segment} is not audited: no window of it was drawn while it trained")
    if row.state != "done":
        raise InputError(f"segment {segment} is {row.state}: only what is done is audited")
    settled = VerdictRow.newest(plant.ledger, AUDIT, Subject("segment", segment))
    if settled is not None and settled.outcome != "hold":
        return settled
    window = keep(plant, row, window)
    if not window.steps:
        return None
    number = tries(plant.ledger, segment) + 1
    with plant.progress.task(f"audit of segment {segment}, steps {window.first}–{window.last}"):
        evidence = finite(gather(plant, row, window, policy, number * policy.wall_seconds))
    verdict = judge_audit(policy, evidence)
    subject = Subject("segment", segment)
    detail = {"outcome": verdict.outcome, "patches": list(window.patches), "suspects": evidence.get("suspects", [])}
    with plant.ledger.begin() as tx:
        recorded = record_verdict(
            tx, AUDIT, subject, against=evidence["against"], policy_sha256=policy_sha256(policy), subject_sha256=evidence["subject_sha256"],
            outcome=verdict.outcome, reasons=verdict.reasons, evidence=evidence,
        )  # fmt: skip
        record(tx, AUDITED, subject, detail)
    words = {"promote": "agrees", "hold": "not measured", "reject": "DIFFERS"}[verdict.outcome]
    patches = ", ".join(map(str, window.patches))
    plant.progress.line(
        f"  audit of segment {segment} (steps {window.first}–{window.last} without proposals {patches}): {words}; {verdict.reasons[0]}"
    )
    if verdict.outcome != "reject":
        _clear(folder_of(plant.workspace, segment), all_of_it=verdict.outcome == "promote")
    return VerdictRow.get(plant.ledger, recorded)


def _clear(folder: Path, all_of_it: bool) -> None:
    """Remove the replays, so that another try begins anew; after the last one the window too."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.name != "live" or all_of_it:
            remove(path)


# -- evidence ----------------------------------------------------------------------------------------------------------
class _NotMeasured(Exception):
    """Something that the comparison needs is not there, which says nothing about the patches."""


@dataclass(frozen=True)
class _Measured:
    """What live training left, with what the replays are held against."""

    policy: AuditPolicy
    runs: Runs
    row: SegmentRow
    window: AuditWindow
    tuned: Mapping[str, str]  # op → the implementation that ``auto`` stood for before the patches
    wall_seconds: float
    live: Trace | None  # None: it cannot be read
    origin: Tensors
    claims: dict[str, Any]

    def arm(self, name: str, commit: str, code: Path, until: int) -> Arm:
        """The window again: the same specification, checkpoint and data, but for the kernels, whose choice is the code's own, and for what one
        rank cannot do. Undoing the same patches makes another commit each time, of the same tree."""
        plant, row, window = self.runs.plant, self.row, self.window
        spec = spec_of(plant.ledger, row)
        if ranks(plant.workspace) > 1:
            spec["recipe"] = for_one_rank(spec["recipe"])
        kernels = (
            resolved_text((code / KERNELS).read_bytes(), devices.kind(), self.tuned)
            if row.computing is not None
            else ""
        )
        return Arm(
            name, spec, repository.line(plant.workspace.repository, "rev-parse", f"{commit}^{{tree}}"),
            recipe={} if until == window.last else {"checkpoint_every": until, "keep_checkpoints": 2},
            start=kept(plant, row, window.first) if window.first > row.first_step else None, until=until, kernels=kernels,
            repeat=name == "again",
        )  # fmt: skip

    def trace(self, name: str, commit: str, until: int) -> Trace:
        """Of a replay. Raises: _NotMeasured, IsolationError."""
        workspace = self.runs.plant.workspace
        code = repository.checkout(workspace.repository, commit, workspace.worktrees / f"audit-{self.row.id}")
        arm = self.arm(name, commit, code, until)
        found = self.runs.alone(arm, code, Path(self.row.folder).name, self.wall_seconds)
        if found.failed:
            limit = f"; its limit was {self.wall_seconds:.0f} s (wall_seconds in policies/gates/audit.yaml)"
            raise _NotMeasured(f"the replay '{name}' failed: {found.failed}{limit if found.out_of_time else ''}")
        try:
            return read_whole(Trace(found.folder, self.window.first, until, ends=False))
        except UntrustedFileError as error:
            raise _NotMeasured(f"the replay '{name}' left nothing to compare with: {error}") from error

    def compare(self, base: Trace, shorter: Checkpoint | None) -> dict[str, Any]:
        """How live training differs from a replay, as evidence. ``shorter``: what a replay left that leaves the last step out."""
        live, window = self.live, self.window
        assert live is not None
        found: dict[str, Any] = {"same_bits": same_bits(live.left, base.left)}
        if missing := unlike(live.left, base.left):
            return found | {"told": [f"the checkpoint's {missing} is missing, or has another shape or dtype"]}
        share = allowed_share(self.policy, self.claims | {"steps": window.steps})
        away: dict[str, float] = {}
        if shorter is not None:
            away = squares(rest_of(shorter), rest_of(base.left))
            found |= {
                "drift": drift(live.left.model, base.left.model, self.origin),
                "control_drift": drift(shorter.model, base.left.model, self.origin, of_one=False),
            }
        told = shorter is not None or found["same_bits"]
        state = differs(rest_of(live.left), rest_of(base.left), away, share) if told else ""
        words = (state, lines_differ(live, base, self.policy.lines), anomalies_differ(live, base))
        return found | {"told": [word for word in words if word]}


def gather(
    plant: Plant, row: SegmentRow, window: AuditWindow, policy: AuditPolicy, wall_seconds: float
) -> dict[str, Any]:
    """Everything ``judge_audit`` decides from; ``missing`` says why a replay was not possible."""
    patches = [ProposalRow.get(plant.ledger, number) for number in window.patches]
    evidence: dict[str, Any] = {
        "segment": row.id, "first": window.first, "last": window.last, "steps": window.steps, "patches": list(window.patches),
        "code_commit": row.code_commit, "against": patches[0].base_commit, "subject_sha256": "", **_claims(plant.ledger, patches),
    }  # fmt: skip
    runs = Runs(plant, folder_of(plant.workspace, row.id), "audit", Subject("segment", row.id))
    tuned = _tuned(plant, row, patches[0])
    end = kept(plant, row, window.last)
    try:
        evidence["subject_sha256"] = manifest_sha256(end)
        origin = load(kept(plant, row, window.first)).model
        base_commit = _without(plant.workspace, row.code_commit, patches)
        if not Path(row.folder).is_dir():
            raise _NotMeasured(
                f"{row.folder}, where segment {row.id} trained, is not there: mount or restore it, then audit again"
            )
        live = None
        try:
            live = read_whole(Trace(Path(row.folder), window.first, window.last, ends=False, where=end))
        except UntrustedFileError as error:
            evidence["told"] = [f"what segment {row.id} left cannot be read: {error}"]
        measured = _Measured(policy, runs, row, window, tuned, wall_seconds, live, origin, evidence)
        return evidence | _replay(measured, evidence, base_commit, patches)
    except (_NotMeasured, FactoryError, TrainerError, OSError) as error:  # no sandbox, files that people changed since
        if isinstance(error, repository.CheckoutError) or is_of_no_file(error):
            raise  # of a full disk, say: it is measured once that is over
        return evidence | {"missing": str(error)}
    finally:
        repository.remove_worktree(plant.workspace.repository, plant.workspace.worktrees / f"audit-{row.id}")


def _replay(
    measured: _Measured, evidence: dict[str, Any], commit: str, patches: Sequence[ProposalRow]
) -> dict[str, Any]:
    """The replays, as many as are needed. Raises: _NotMeasured, FactoryError."""
    window, row, policy = measured.window, measured.row, measured.policy
    base = measured.trace("without", commit, window.last)
    if measured.live is None:
        return {"again": {"same_bits": True}, "suspects": list(window.patches)}
    found = measured.compare(base, None)
    shorter = None
    if not found["same_bits"] and not unlike(measured.live.left, base.left):
        left_out = window.last - 1
        if left_out > window.first:
            shorter = measured.trace("shorter", commit, left_out).left
        else:  # a window of one step
            shorter = replace(base.left, model=measured.origin)
        found = measured.compare(base, shorter)
    claims_bits = evidence.get("claimed") == 0 and devices.kind() == "cpu" and ranks(measured.runs.plant.workspace) == 1
    if claims_bits and not found["same_bits"] and not differences(policy, evidence | found):
        again = measured.trace("live-code", row.code_commit, window.last)
        found["exact"] = same_bits(measured.live.left, again.left)
    if not differences(policy, evidence | found):
        return found
    again = measured.trace("again", commit, window.last)
    off = drift(again.left.model, base.left.model, measured.origin)
    found["again"] = {"same_bits": same_bits(again.left, base.left), "drift": off}
    found["suspects"] = [_suspect(measured, evidence | found, shorter, patches).number]
    return found


def _suspect(
    measured: _Measured, evidence: dict[str, Any], shorter: Checkpoint | None, patches: Sequence[ProposalRow]
) -> ProposalRow:
    """The patch that made the difference: the newest one without which, and without those after it, there is one."""
    workspace, row = measured.runs.plant.workspace, measured.row
    exact = {"exact": evidence["exact"]} if "exact" in evidence else {}
    for count in range(1, len(patches)):
        commit = _without(workspace, row.code_commit, patches[-count:])
        other = measured.trace(f"without-{count}", commit, measured.window.last)
        if differences(measured.policy, evidence | measured.compare(other, shorter) | exact):
            return patches[-count]
    return patches[0]


def _without(workspace: Workspace, commit: str, patches: Sequence[ProposalRow]) -> str:
    """A commit as ``commit`` without these patches, the newest undone first. Raises: RepositoryError when people changed their files since."""
    for patch in reversed(patches):
        message = f"without proposal {patch.number}"
        commit = repository.undoing(workspace.repository, commit, patch.base_commit, patch.patch_commit, message)
    return commit


def _claims(ledger: Ledger, patches: Sequence[ProposalRow]) -> dict[str, Any]:
    """How far the patches' weights ended from their baselines' in the gate, as a share of what leaving out a step caused; and after how many
    steps. None: not known of every patch."""
    shares, steps = [], 0
    for patch in patches:
        found = (patch.evidence(ledger).get("stages") or {}).get("training") or {}
        measured = [one for one in (found, found.get("again") or {}) if one.get("control_drift")]
        if not measured:
            return {"claimed": None, "gate_steps": None}
        shares.append(max(one["drift"] / one["control_drift"] for one in measured))
        steps = max(steps, found.get("steps") or 0)
    return {"claimed": sum(shares), "gate_steps": steps}


def _tuned(plant: Plant, row: SegmentRow, oldest: ProposalRow) -> dict[str, str]:
    """What ``auto`` stood for in the newest segment before the patches, else in this one."""
    for before in SegmentRow.select(plant.ledger, "WHERE id < :id AND kind <> 'average' ORDER BY id DESC", id=row.id):
        if before.computing and not repository.contains(
            plant.workspace.repository, before.code_commit, oldest.patch_commit
        ):
            return dict(before.computing["kernels"])
    return dict(row.computing["kernels"]) if row.computing else {}


# Of a line of metrics.jsonl, what depends on the clock and the machine's memory.
OF_THE_CLOCK = {"tokens_per_s", "flops_per_s", "mfu", "first_step_s", "data_wait_s", "time", "memory"}
OF_THE_MACHINE = (
    "throughput_drop",
    "rank_grad_norm",
)  # anomalies that a replay by one rank at another speed need not have
# Computed by what the step learns from: must agree. Other numbers are diagnoses, some of them small differences of large ones.
LEARNT = ("loss", "grad_norm", "lr")
LAYOUT = {
    "parallel": None,
    "checkpoint_every": None,
    "keep_checkpoints": None,
}  # of a recipe, what a replay may have otherwise


def read_whole(trace: Trace) -> Trace:
    """All of what a window left, read. Raises: UntrustedFileError saying what is missing or wrong."""
    if not all(bool(tensor.isfinite().all()) for tensor in trace.left.model.values() if tensor.is_floating_point()):
        raise UntrustedFileError(f"the weights of {trace.checkpoint.name} are not finite")
    assert trace.lines is not None and trace.anomalies is not None
    return trace


def rest_of(left: Checkpoint) -> Checkpoint:
    """Without what a replay may have otherwise in state.json."""
    recipe = left.state["recipe"] | LAYOUT
    return replace(left, state=left.state | {"recipe": recipe, "skipped": []})  # of a run that was stopped


def lines_differ(live: Trace, base: Trace, share: float) -> str:
    """The first way in which what live code wrote down is not what the replay did; '': none.

    A line may say more than the replay's. Counts are equal; a loss, a gradient's norm or a rate may differ by ``share``.
    """
    if lost := sorted(base.lines.keys() - live.lines.keys()):
        return f"metrics.jsonl has no line of step {lost[0]}, and {len(lost)} are missing in all"
    for step, theirs in sorted(base.lines.items()):
        ours = live.lines[step]
        for key, value in theirs.items():
            if key in OF_THE_CLOCK:
                continue
            if key not in ours:
                return f"metrics.jsonl has no {key} of step {step}"
            other = ours[key]
            learnt = key.partition("/")[0] in LEARNT
            if isinstance(value, float) or isinstance(other, float):
                if learnt and not _near(value, other, share):
                    return f"metrics.jsonl has {key} {other} of step {step}, the replay {value}"
            elif other != value and (learnt or not isinstance(value, list | dict)):
                return f"metrics.jsonl has {key} {other!r} of step {step}, the replay {value!r}"
    return ""


def _near(one: object, other: object, share: float) -> bool:
    numbers = [x for x in (one, other) if isinstance(x, int | float) and math.isfinite(x)]
    if len(numbers) < 2:  # neither, or one alone, is a finite number
        return not numbers
    return abs(numbers[0] - numbers[1]) <= share * max(map(abs, numbers))


def anomalies_differ(live: Trace, base: Trace) -> str:
    """The first anomaly that one of them has and the other has not; '': none."""
    ours, theirs = (
        Counter((one["step"], str(one.get("kind"))) for one in trace.anomalies if one.get("kind") not in OF_THE_MACHINE)
        for trace in (live, base)
    )
    for words, more in (("does not have", theirs - ours), ("has", ours - theirs)):
        if more:
            step, kind = min(more)
            other = "the replay has" if words != "has" else "the replay does not have"
            return f"anomalies.jsonl {words} the {kind[:60]} of step {step} that {other}"
    return ""
