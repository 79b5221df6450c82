"""Compares the files of the baseline's and the candidate's run of each case. Everything but clocks is compared. No file of a candidate is trusted.

Most patches leave the same bits, and then nothing else is checked. A kernel may round differently. Then a number may differ by
``MatrixCase.rounding`` of its scale. The baseline gives the scale: for weights the distance that they moved, for moments and metrics their size. The
changes of the computation for which the cases were made move some number by at least 20 times that (``tests/factory/gates/patch/matrix`` has the
numbers).

If a candidate differs by more than ``MatrixCase.rounding``, the effect of rounding is measured on the data of this verdict. Data, weights and lengths
are drawn for each verdict. In some draws a run is a hundred times as sensitive as in others: a gradient near zero decides the sign of Adam's first
step, or two experts have nearly the same score. So the baseline's code runs the case again as *twins*, in which the results of every op are some
roundings off (``train_cases.perturb_op_results``). A candidate may differ as much as the twins do.

Rounding decides some results in some runs and not in others, so a few twins may all miss an effect. If each twin shows the candidate's result with
probability p, the candidate shows it and n twins miss it with probability p (1 - p)^n: at worst 8 % for 4 twins and 1.5 % for 24. So the patch is
refused only for a case that had ``MOST_TWINS`` twins.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.gates.patch.matrix.cases import (
    CASES,
    MUON_ROUNDING,
    ROUNDING,
    TOOLS,
    MatrixCase,
    MatrixTool,
    make_tool_name,
)
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns, MatrixSide, run_cases
from factory.runs.distance import TensorDistance, find_value_differences, measure_tensor_distance, sum_distances
from factory.runs.trace import read_step_lines_in_open_folder
from factory.runs.untrusted_files import UntrustedFileError, parse_tensors, read_bytes, read_untrusted_json_object
from kernels.contract.message import Message

FILE_BYTES = 1 << 26
CLOCKED = {"time", "tokens_per_s", "flops_per_s", "mfu", "first_step_s", "data_wait_s", "memory", "seconds", "speed"}
# Keys of result.json: paths, and hashes of files with rounded numbers.
ELSEWHERE = {"checkpoint", "manifest_sha256", "skipped_checkpoints"}
TWINS_PER_CASE = 4  # for each case that differs
MOST_TWINS = 24  # for the case for which the patch is refused
# Of 140 runs with our other kernels, on data drawn twice, 137 are nearer to the baseline than the farthest twin, and the others at most
# 1.24 times as far. 9 runs are beyond ``MatrixCase.rounding``, by a factor of up to 3.1.
MARGIN = 3.0
INFINITELY_APART = TensorDistance(math.inf, 1.0)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Discrepancy:
    """One number or tensor that differs. ``total``: the name of the sum that includes it, if only totals are compared."""

    what: str
    far: TensorDistance = INFINITELY_APART
    total: str = ""

    @property
    def share_of_scale(self) -> float:
        return self.far.relative_distance


@dataclass(frozen=True)
class CaseDifference:
    """The largest difference in one case. ``share``: the difference as a share of the number's scale; infinite if any difference is too large."""

    case: str
    what: str
    share: float
    allowed: float

    @property
    def message(self) -> Message:
        if math.isinf(self.share) and isinstance(self.what, Message):
            return Message("patch.run_differs", "run '{run}': {what}", run=self.case, what=self.what)
        if math.isinf(self.share):
            return Message(
                "patch.run_value_differs",
                "run '{run}': {what} differs from the baseline's by more than rounding can cause",
                run=self.case,
                what=self.what,
            )
        return Message(
            "patch.run_apart",
            "run '{run}': {what} differs from the baseline's by {share:.2g} of its size, but rounding can cause at most {allowed:g}",
            run=self.case, what=self.what, share=self.share, allowed=self.allowed,
        )  # fmt: skip

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class CaseComparison:
    """The comparison of one case. ``same_bits``: all files hold the same numbers."""

    same_bits: bool
    worst: CaseDifference | None


def compare_runs(
    plan: MatrixPlan,
    baseline: MatrixRuns,
    candidate: MatrixRuns,
    cases: Sequence[MatrixCase] = CASES,
    tools: Sequence[MatrixTool] = TOOLS,
) -> list[CaseComparison]:
    """Return the comparisons of all cases, followed by those of all tools."""
    found = []
    for case in cases:
        if not case.exit_code:  # a run that the trainer refused left no files
            parts = find_discrepancies(plan, case, baseline, candidate)
            found.append((case.name, parts, find_largest_discrepancy(case, parts), case.rounding))
    for name in map(make_tool_name, tools):
        parts = _tool_differs(name, baseline, candidate)
        found.append((name, parts, _worst(parts), ROUNDING))
    return [
        CaseComparison(
            not parts,
            CaseDifference(name, worst.what, worst.share_of_scale, allowed) if worst.share_of_scale > allowed else None,
        )
        for name, parts, worst, allowed in found
    ]


def _tool_differs(name: str, baseline: MatrixRuns, candidate: MatrixRuns) -> list[Discrepancy]:
    """Return the differences of a tool's output, without the path of its folder, and of its checkpoints."""
    try:
        ours, theirs = (
            read_bytes(side.opened[name], ["printed.txt"], FILE_BYTES).replace(str(side.folders[name]).encode(), b"")
            for side in (baseline, candidate)
        )
        printed = (
            []
            if ours == theirs
            else [
                Discrepancy(
                    Message(
                        "patch.prints_other",
                        "the tool's output with the candidate's code differs from its output with the baseline's code",
                    )
                )
            ]
        )
        return printed + list(_all_checkpoints(baseline.opened[name], candidate.opened[name], None))
    except UntrustedFileError as error:
        return [Discrepancy(error.message)]


def find_discrepancies(
    plan: MatrixPlan, case: MatrixCase, baseline: MatrixRuns, candidate: MatrixRuns
) -> list[Discrepancy]:
    """Return all differences of two runs. Files are read through descriptors of folders that were opened before the runs."""
    opened = baseline.opened[case.name], candidate.opened[case.name]
    try:
        return list(_differences(*opened, plan.read_start_weights(case)))
    except UntrustedFileError as error:
        return [Discrepancy(error.message)]


def find_largest_discrepancy(case: MatrixCase, found: Sequence[Discrepancy]) -> Discrepancy:
    """Return the difference by which the case is judged. The onset of an anomaly counts only if nothing else differs: rounding may move it."""
    lasting = [part for part in found if ": onset: " not in part.what] or found
    weighed = _weighed(lasting, case.rounding)
    judged = _totals(weighed) if case.totals else weighed
    return _worst(judged)


def _worst(parts: Iterable[Discrepancy]) -> Discrepancy:
    return max(parts, key=lambda part: part.share_of_scale, default=Discrepancy("", TensorDistance(0.0, 1.0)))


def _differences(baseline: int, candidate: int, start: Weights | None) -> Iterator[Discrepancy]:
    """Yield all differences of the files in two folders. Raises: UntrustedFileError."""
    for name in ("metrics.jsonl", "anomalies.jsonl"):
        ours, theirs = (read_step_lines_in_open_folder(folder, name) for folder in (baseline, candidate))
        if name == "anomalies.jsonl":  # the machine causes a throughput drop
            ours, theirs = (
                [line for line in lines if line.get("kind") != "throughput_drop"] for lines in (ours, theirs)
            )
        if len(ours) != len(theirs):
            yield Discrepancy(
                Message(
                    "patch.other_lines",
                    "{file} has {candidate} lines in the candidate's run, and {baseline} lines in the baseline's run",
                    file=name, candidate=len(theirs), baseline=len(ours),
                )
            )  # fmt: skip
            continue
        for number, (one, other) in enumerate(zip(ours, theirs)):
            yield from _values(f"{name}, line {number + 1}", one, other)
    one, other = (read_untrusted_json_object(folder, ["result.json"], FILE_BYTES) for folder in (baseline, candidate))
    yield from _values("result.json", one, other, ELSEWHERE)
    for side, folder in ((one, baseline), (other, candidate)):
        yield from _names_its_checkpoint(side, folder)
    if len(one["skipped_checkpoints"]) != len(other.get("skipped_checkpoints") or []):
        yield Discrepancy(
            Message(
                "patch.other_skipped",
                "the candidate's and the baseline's result.json do not list the same number of skipped checkpoints",
            )
        )
    if read_bytes(baseline, ["parameters.txt"], FILE_BYTES) != read_bytes(candidate, ["parameters.txt"], FILE_BYTES):
        yield Discrepancy(Message("patch.other_parameters", "parameters.txt differs from the baseline's"))
    yield from _all_checkpoints(baseline, candidate, start)


def _names_its_checkpoint(result: dict[str, Any], folder: int) -> Iterator[Discrepancy]:
    name = str(result.get("checkpoint")).rpartition("/")[2]
    manifest = read_bytes(folder, ["checkpoints", name or ".", "manifest.json"], FILE_BYTES)
    if hashlib.sha256(manifest).hexdigest() != result.get("manifest_sha256"):
        yield Discrepancy(
            Message(
                "patch.other_hash",
                "the SHA-256 in result.json is not the SHA-256 of the checkpoint's manifest",
            )
        )


def _all_checkpoints(baseline: int, candidate: int, start: Weights | None) -> Iterator[Discrepancy]:
    steps = [_checkpoints(folder) for folder in (baseline, candidate)]
    if steps[0] != steps[1]:
        yield Discrepancy(
            Message(
                "patch.other_checkpoints",
                "the candidate left the checkpoints [{candidate}], and the baseline left [{baseline}]",
                candidate=steps[1], baseline=steps[0],
            )
        )  # fmt: skip
        return
    for name in steps[0]:
        yield from _checkpoint(name, baseline, candidate, start)


def _checkpoint(name: str, baseline: int, candidate: int, start: Weights | None) -> Iterator[Discrepancy]:
    one, other = (
        read_untrusted_json_object(folder, ["checkpoints", name, "state.json"], FILE_BYTES)
        for folder in (baseline, candidate)
    )
    yield from _values(f"{name}, state.json", one, other, {"throughput", "skipped"})
    files = [_listed(folder, name) for folder in (baseline, candidate)]
    if files[0].keys() != files[1].keys():
        yield Discrepancy(
            Message(
                "patch.other_files",
                "{checkpoint} consists of the files {candidate} in the candidate's run, and of {baseline} in the baseline's run",
                checkpoint=name, candidate=list(files[1]), baseline=list(files[0]),
            )
        )  # fmt: skip
        return
    for file in sorted(files[0]):
        stored = [read_bytes(folder, ["checkpoints", name, file], FILE_BYTES) for folder in (baseline, candidate)]
        if name.startswith("step-") and hashlib.sha256(stored[1]).hexdigest() != files[1][file]:
            yield Discrepancy(
                Message(
                    "patch.not_as_manifest",
                    "{checkpoint}: {file} does not have the SHA-256 that the checkpoint's manifest lists",
                    checkpoint=name,
                    file=file,
                )
            )
        if not file.endswith(".safetensors"):
            continue
        ours, theirs = (parse_tensors(content, file) for content in stored)
        if ours.keys() != theirs.keys():
            yield Discrepancy(
                Message(
                    "patch.other_tensors",
                    "{checkpoint}: {file} has other tensors in the candidate's run than in the baseline's run. Only one of the two has {tensors}",
                    checkpoint=name, file=file, tensors=sorted(ours.keys() ^ theirs.keys())[:3],
                )
            )  # fmt: skip
            continue
        for key, tensor in ours.items():
            found = theirs[key]
            if tensor.shape != found.shape or tensor.dtype != found.dtype:
                yield Discrepancy(
                    Message(
                        "patch.other_shape",
                        "{checkpoint}: {tensor} has the shape [{shape}] and the dtype {dtype}, but the baseline's tensor has another shape or dtype",
                        checkpoint=name, tensor=key, shape=list(found.shape), dtype=str(found.dtype),
                    )
                )  # fmt: skip
            elif has_lost_precision(tensor, found):
                yield Discrepancy(
                    Message(
                        "patch.lower_precision",
                        "{checkpoint}: {tensor} has numbers of a lower precision than in the baseline's checkpoint",
                        checkpoint=name, tensor=key,
                    )
                )  # fmt: skip
            elif tensor.numpy().tobytes() != found.numpy().tobytes():
                total = f"{name}: {key.partition('.')[0] if file.startswith('optimizer') else 'weights'}"
                yield Discrepancy(f"{name}: {key}", _apart(key, tensor, found, start), total)


def _listed(folder: int, name: str) -> dict[str, str]:
    """Return file → SHA-256 as a checkpoint's manifest lists them. Raises: UntrustedFileError."""
    try:
        files = read_untrusted_json_object(folder, ["checkpoints", name, "manifest.json"], FILE_BYTES)["files"]
        return {str(file): str(about["sha256"]) for file, about in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UntrustedFileError(
            "patch.no_files_listed", "{checkpoint}: the checkpoint's manifest lists no files", checkpoint=name
        ) from error


def has_lost_precision(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """True if the fp32 numbers of ``theirs`` have at least 8 bits fewer than those of ``ours``, as numbers that were stored in bf16 have.

    The lowest bits of several numbers that were computed in fp32 are never all zero. The lowest bits of converted bf16 numbers are. In bf16 runs, the
    allowed rounding would hide such a conversion.
    """
    if ours.dtype != torch.float32 or ours.numel() < 4:
        return False
    used = [int(np.bitwise_or.reduce(x.numpy().view(np.int32), axis=None)) & 0x7FFFFF for x in (ours, theirs)]
    lowest = [(bits & -bits).bit_length() or 24 for bits in used]  # of the 23 bits of the fraction, counted from 1
    return lowest[1] >= lowest[0] + 8


def _apart(key: str, ours: torch.Tensor, theirs: torch.Tensor, start: Weights | None) -> TensorDistance:
    """Return the distance of two tensors, relative to the distance that the baseline's tensor moved; relative to its size if the start is unknown.

    The distance is infinite if the tensors are not floats, or are not finite in the same places.
    """
    if not ours.is_floating_point() or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return INFINITELY_APART
    where = ours.isfinite()
    begun = start.get(key) if start is not None else None
    whole = begun is not None and begun.shape == ours.shape  # otherwise the tensor is a rank's part of a weight
    return measure_tensor_distance(
        ours[where], theirs[where], *([begun[where]] * 2 if begun is not None and whole else [])
    )


def _weighed(parts: Sequence[Discrepancy], allowed: float) -> Iterator[Discrepancy]:
    """Yield the differences, with those of the gradient noise scale divided by 100.

    The noise scale is computed from the difference of nearly equal sums, so a rounding of the sums changes it a hundred times as much. In runs with
    large rounding its sign may change, and then the value is absent. If nothing but the noise scale differs, rounding is not the cause.
    """
    estimates = [part for part in parts if ": noise_scale" in part.what or "state.json: monitor: " in part.what]
    for part in parts:
        if part not in estimates:
            yield part
        elif len(estimates) == len(parts):
            yield Discrepancy(part.what)
        elif not math.isinf(part.far.apart):
            yield replace(part, far=replace(part.far, apart=part.far.apart / 100))
        elif allowed < MUON_ROUNDING:
            yield part


def _totals(parts: Iterable[Discrepancy]) -> Iterator[Discrepancy]:
    """Yield the differences that count in runs in which rounding grows: sums of tensors by checkpoint and kind, the loss and the rate."""
    sums: dict[str, list[TensorDistance]] = defaultdict(list)
    for part in parts:
        if part.total:
            sums[part.total].append(part.far)
        elif math.isinf(part.far.apart) or part.what.endswith((": loss", ": lr")):
            yield part
    yield from (Discrepancy(f"{total} together", sum_distances(each)) for total, each in sums.items())


def _values(where: str, one: Any, other: Any, ignored: Set[str] = frozenset()) -> Iterator[Discrepancy]:
    return (Discrepancy(what, far) for what, far in find_value_differences(one, other, CLOCKED | ignored, where))


def _checkpoints(folder: int) -> list[str]:
    """Return the names of the checkpoints in a run's folder, sorted; at most a hundred. Raises: UntrustedFileError."""
    try:
        handle = os.open("checkpoints", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise UntrustedFileError(
            "patch.no_checkpoints", "the run left no folder 'checkpoints': {error}", error=error.strerror
        ) from None
    try:
        return sorted(name for name in os.listdir(handle)[:100] if name.startswith(("step-", "bad-")))
    finally:
        os.close(handle)


# -- the effect of rounding on a run ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RoundingEffect:
    """The effect of rounding.

    beyond: the differences that are larger than this effect. undecided: the cases with a difference that has no size (such as a step that one side
    skipped) and that rounding alone can cause. problem: the reason that the effect could not be measured; '': none.
    """

    beyond: list[CaseDifference] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    problem: str = ""


def measure_rounding_effect(
    plan: MatrixPlan, side: MatrixSide, baseline: MatrixRuns, compared: Sequence[CaseComparison]
) -> RoundingEffect:
    """Measure the effect of rounding in the cases that differ. side: approved code, with the folder for the twins. Raises: IsolationError."""
    measured = _Twins(plan, side, baseline, {one.worst.case: one.worst for one in compared if one.worst is not None})
    for _ in range(TWINS_PER_CASE):
        measured.once_more(measured.beyond())
    for _ in range(TWINS_PER_CASE, MOST_TWINS):
        if beyond := measured.beyond():
            measured.once_more(beyond[:1])
    undecided = [name for name, difference in measured.worst.items() if math.isinf(difference.allowed)]
    return RoundingEffect([measured.worst[name] for name in measured.beyond()], undecided, measured.problem)


@dataclass
class _Twins:
    """The twins so far. ``worst``: case → the largest difference, whose ``allowed`` grows with the effect of rounding in the twins."""

    plan: MatrixPlan
    side: MatrixSide
    baseline: MatrixRuns
    worst: dict[str, CaseDifference]
    runs: int = 0
    problem: str = ""

    def beyond(self) -> list[str]:
        """Return the cases that rounding does not explain, the least explained first; none after a problem."""
        found = [one for one in self.worst.values() if one.share > one.allowed and not self.problem]
        return [one.case for one in sorted(found, key=lambda one: one.allowed / one.share)]

    def once_more(self, names: Sequence[str]) -> None:
        """Run a twin of each of these cases: the baseline's code, perturbed with a new seed."""
        cases = [case for case in CASES if case.name in names]  # tools have no twins, because they round nothing
        if not cases:
            return
        self.runs += 1
        folder = self.side.folder / str(self.runs)
        twins = run_cases(self.plan, replace(self.side, folder=folder, disturbed=self.runs), cases)
        self.problem = twins.failed
        for case in cases if not self.problem else ():
            share = find_largest_discrepancy(
                case, find_discrepancies(self.plan, case, self.baseline, twins)
            ).share_of_scale
            was = self.worst[case.name]
            self.worst[case.name] = replace(was, allowed=max(was.allowed, MARGIN * share))
