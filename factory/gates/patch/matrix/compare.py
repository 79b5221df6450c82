"""Do two sides' runs of a case leave the same files? Everything but clocks is compared; nothing that a candidate wrote is trusted.

Most patches leave the same bits, and then nothing else is asked. A kernel may round differently: then a number may differ by
``MatrixCase.rounding`` of its scale. Scales are the baseline's own: of weights how far they moved, of moments and metrics their size. Every
change in what is computed that the cases were made for moves some number by 20 times that or more (``tests/factory/gates/matrix``
has the numbers).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from factory.core.faults import is_of_no_file
from factory.gates.patch.matrix.cases import CASES, IN_MUON, ROUNDING, TOOLS, MatrixCase, MatrixTool, name_of
from factory.gates.patch.matrix.runs import MatrixPlan, MatrixRuns
from factory.runs.untrusted_files import UntrustedFileError, object_of, read_bytes, read_object, tensors_of

FILE_BYTES = 1 << 26
CLOCKED = {"time", "tokens_per_s", "flops_per_s", "mfu", "first_step_s", "data_wait_s", "memory", "seconds", "speed"}
# Of result.json: paths, and hashes of files that hold rounded numbers.
ELSEWHERE = {"checkpoint", "manifest_sha256", "skipped_checkpoints"}
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Discrepancy:
    """One number or tensor that differs. ``total``: what it is summed into where only totals are compared."""

    what: str
    apart: float = math.inf
    scale: float = 1.0
    total: str = ""

    @property
    def share(self) -> float:
        share = self.apart / self.scale if self.scale else (math.inf if self.apart else 0.0)
        return math.inf if math.isnan(share) else share


@dataclass(frozen=True)
class Difference:
    """What differs in one case. ``share``: the difference as a share of the number's scale; infinite where nothing may differ."""

    case: str
    what: str
    share: float
    allowed: float

    def __str__(self) -> str:
        if math.isinf(self.share):
            return f"run '{self.case}': {self.what}"
        return f"run '{self.case}': {self.what} differs by {self.share:.2g} of its scale; at most {self.allowed:g} is allowed (rounding)"


@dataclass(frozen=True)
class Compared:
    """One case. ``same_bits``: all files hold the same numbers."""

    same_bits: bool
    worst: Difference | None


def compare_runs(
    plan: MatrixPlan,
    baseline: MatrixRuns,
    candidate: MatrixRuns,
    cases: Sequence[MatrixCase] = CASES,
    tools: Sequence[MatrixTool] = TOOLS,
) -> list[Compared]:
    """Each case, then each tool."""
    runs = [
        compare_case(case, baseline.opened[case.name], candidate.opened[case.name], plan.weights_before(case))
        for case in cases
        if not case.exit_code  # what was refused left nothing
    ]
    return runs + [compare_tool(name_of(tool), baseline, candidate) for tool in tools]


def compare_tool(name: str, baseline: MatrixRuns, candidate: MatrixRuns) -> Compared:
    """What a tool printed, but for the path of its own folder, and the checkpoint that it left, if it did."""
    found: list[Discrepancy] = []
    try:
        ours, theirs = (
            read_bytes(side.opened[name], ["printed.txt"], FILE_BYTES).replace(str(side.folders[name]).encode(), b"")
            for side in (baseline, candidate)
        )
        if ours != theirs:
            found.append(Discrepancy("it prints something else"))
        found += _all_checkpoints(baseline.opened[name], candidate.opened[name], None)
    except UntrustedFileError as error:
        found.append(Discrepancy(str(error)))
    worst = max(found, key=lambda part: part.share, default=Discrepancy("", 0.0))
    return Compared(not found, Difference(name, worst.what, worst.share, ROUNDING) if worst.share > ROUNDING else None)


def compare_case(case: MatrixCase, baseline: int, candidate: int, start: Weights | None) -> Compared:
    """Compare the folders of one case, by descriptor. ``start``: the weights that both began with; None: they made their own."""
    found = find_discrepancies(case, baseline, candidate, start)
    worst, allowed = farthest(case, found), case.rounding
    return Compared(
        not found, Difference(case.name, worst.what, worst.share, allowed) if worst.share > allowed else None
    )


def find_discrepancies(case: MatrixCase, baseline: int, candidate: int, start: Weights | None) -> list[Discrepancy]:
    """Everything that is not the same."""
    try:
        return list(_differences(baseline, candidate, start))
    except UntrustedFileError as error:
        return [Discrepancy(str(error))]


def farthest(case: MatrixCase, found: Sequence[Discrepancy]) -> Discrepancy:
    """What differs most, as the case is judged. An anomaly's onset is a step, which rounding moves or not: it counts where nothing else differs."""
    steady = [part for part in found if ": onset: " not in part.what] or found
    weighed = _weighed(steady, case.rounding)
    judged = _totals(weighed) if case.totals else weighed
    return max(judged, key=lambda part: part.share, default=Discrepancy("", 0.0))


def _differences(baseline: int, candidate: int, start: Weights | None) -> Iterator[Discrepancy]:
    """Everything that is not the same. Raises: UntrustedFileError."""
    for name in ("metrics.jsonl", "anomalies.jsonl"):
        ours, theirs = (_lines(folder, name) for folder in (baseline, candidate))
        if name == "anomalies.jsonl":  # a throughput drop is the machine's
            ours, theirs = (
                [line for line in lines if line.get("kind") != "throughput_drop"] for lines in (ours, theirs)
            )
        if len(ours) != len(theirs):
            yield Discrepancy(f"{name} has {len(theirs)} lines, the baseline's {len(ours)}")
            continue
        for number, (one, other) in enumerate(zip(ours, theirs)):
            yield from _values(f"{name}, line {number + 1}", one, other, CLOCKED)
    one, other = (read_object(folder, ["result.json"], FILE_BYTES) for folder in (baseline, candidate))
    yield from _values("result.json", one, other, CLOCKED | ELSEWHERE)
    for side, folder in ((one, baseline), (other, candidate)):
        yield from _names_its_checkpoint(side, folder)
    if len(one["skipped_checkpoints"]) != len(other.get("skipped_checkpoints") or []):
        yield Discrepancy("result.json names other skipped checkpoints")
    if read_bytes(baseline, ["parameters.txt"], FILE_BYTES) != read_bytes(candidate, ["parameters.txt"], FILE_BYTES):
        yield Discrepancy("parameters.txt is another")
    yield from _all_checkpoints(baseline, candidate, start)


def _names_its_checkpoint(result: dict[str, Any], folder: int) -> Iterator[Discrepancy]:
    name = str(result.get("checkpoint")).rpartition("/")[2]
    manifest = read_bytes(folder, ["checkpoints", name or ".", "manifest.json"], FILE_BYTES)
    if hashlib.sha256(manifest).hexdigest() != result.get("manifest_sha256"):
        yield Discrepancy("result.json has not the hash of its checkpoint's manifest")


def _all_checkpoints(baseline: int, candidate: int, start: Weights | None) -> Iterator[Discrepancy]:
    steps = [_checkpoints(folder) for folder in (baseline, candidate)]
    if steps[0] != steps[1]:
        yield Discrepancy(
            f"it left the checkpoints {', '.join(steps[1]) or 'none'}, the baseline {', '.join(steps[0])}"
        )
        return
    for name in steps[0]:
        yield from _checkpoint(name, baseline, candidate, start)


def _checkpoint(name: str, baseline: int, candidate: int, start: Weights | None) -> Iterator[Discrepancy]:
    one, other = (
        read_object(folder, ["checkpoints", name, "state.json"], FILE_BYTES) for folder in (baseline, candidate)
    )
    yield from _values(f"{name}, state.json", one, other, CLOCKED | {"throughput", "skipped"})
    files = [_listed(folder, name) for folder in (baseline, candidate)]
    if files[0].keys() != files[1].keys():
        yield Discrepancy(f"{name} has the files {', '.join(files[1])}, the baseline's {', '.join(files[0])}")
        return
    for file in sorted(files[0]):
        stored = [read_bytes(folder, ["checkpoints", name, file], FILE_BYTES) for folder in (baseline, candidate)]
        if name.startswith("step-") and hashlib.sha256(stored[1]).hexdigest() != files[1][file]:
            yield Discrepancy(f"{name}: {file} is not what its manifest says")
        if not file.endswith(".safetensors"):
            continue
        ours, theirs = (tensors_of(content, file) for content in stored)
        if ours.keys() != theirs.keys():
            yield Discrepancy(f"{name}: {file} has other tensors: {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}")
            continue
        for key, tensor in ours.items():
            found = theirs[key]
            if tensor.shape != found.shape or tensor.dtype != found.dtype:
                yield Discrepancy(f"{name}: {key} has shape {list(found.shape)} and {found.dtype}")
            elif lost_bits(tensor, found):
                yield Discrepancy(f"{name}: {key} holds numbers of a lower precision than the baseline's")
            elif tensor.numpy().tobytes() != found.numpy().tobytes():
                total = f"{name}: {key.partition('.')[0] if file.startswith('optimizer') else 'weights'}"
                yield Discrepancy(f"{name}: {key}", *_apart(key, tensor, found, start), total)


def _listed(folder: int, name: str) -> dict[str, str]:
    """File → SHA-256, as a checkpoint's manifest has them. Raises: UntrustedFileError."""
    try:
        files = read_object(folder, ["checkpoints", name, "manifest.json"], FILE_BYTES)["files"]
        return {str(file): str(about["sha256"]) for file, about in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UntrustedFileError(f"{name}: its manifest lists no files") from error


def lost_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Are fp32 numbers of ``theirs`` of a format with at least 8 bits fewer, as bf16's are? In runs in bf16 rounding would hide that.

    The low bits of a few numbers that were computed in fp32 are never all zero; those of numbers that came from bf16 are.
    """
    if ours.dtype != torch.float32 or ours.numel() < 4:
        return False
    used = [int(np.bitwise_or.reduce(x.numpy().view(np.int32), axis=None)) & 0x7FFFFF for x in (ours, theirs)]
    lowest = [(bits & -bits).bit_length() or 24 for bits in used]  # of the 23 bits of the fraction, counted from 1
    return lowest[1] >= lowest[0] + 8


def _apart(key: str, ours: torch.Tensor, theirs: torch.Tensor, start: Weights | None) -> tuple[float, float]:
    """(how far two tensors are apart, how far the baseline's moved or, where that is unknown, its size); infinite: nothing to measure."""
    if not ours.is_floating_point() or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return math.inf, 1.0
    where = ours.isfinite()
    one, other = ours[where].double(), theirs[where].double()
    begun = start.get(key) if start is not None else None
    if begun is not None and begun.shape != ours.shape:
        begun = None  # a rank's part of it
    scale = float((one - begun[where].double()).norm()) if begun is not None else float(one.norm())
    return float((one - other).norm()), scale


def _weighed(parts: Sequence[Discrepancy], allowed: float) -> Iterator[Discrepancy]:
    """The noise scale is a difference of nearly equal sums, in which a rounding becomes a hundred times as large.

    In runs whose rounding is large its sign may change, and it is not there then. Where nothing but it differs, no rounding did that.
    """
    estimates = [part for part in parts if ": noise_scale" in part.what or "state.json: monitor: " in part.what]
    for part in parts:
        if part not in estimates:
            yield part
        elif len(estimates) == len(parts):
            yield Discrepancy(part.what)
        elif not math.isinf(part.apart):
            yield replace(part, apart=part.apart / 100)
        elif allowed < IN_MUON:
            yield part


def _totals(parts: Iterable[Discrepancy]) -> Iterator[Discrepancy]:
    """For runs in which rounding grows: tensors together by checkpoint and kind; of other numbers the loss and the rate."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for part in parts:
        if part.total:
            sums[part.total][0] += part.apart**2
            sums[part.total][1] += part.scale**2
        elif math.isinf(part.apart) or part.what.endswith((": loss", ": lr")):
            yield part
    for total, (apart, scale) in sums.items():
        yield Discrepancy(f"{total} together", math.sqrt(apart), math.sqrt(scale))


def _values(where: str, one: Any, other: Any, ignored: Collection[str]) -> Iterator[Discrepancy]:
    """Two JSON values. Floats differ by a share of the larger one; everything else differs wholly or not at all."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            yield Discrepancy(f"{where}: other keys: {', '.join(sorted(map(str, one.keys() ^ other.keys()))[:5])}")
            return
        for key in one:
            if key not in ignored:
                yield from _values(f"{where}: {key}", one[key], other[key], ignored)
            elif type(one[key]) is not type(other[key]):
                yield Discrepancy(f"{where}: {key} is no {type(one[key]).__name__}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other)):
            yield from _values(f"{where}[{number}]", *pair, ignored)
    elif type(one) is float and type(other) is float:
        if one != other and not (math.isnan(one) and math.isnan(other)):
            both = max(abs(one), abs(other))
            alike = math.isfinite(one) and math.isfinite(other)
            yield Discrepancy(where, abs(one - other), both) if alike else Discrepancy(where)
    elif type(one) is not type(other) or one != other:
        yield Discrepancy(f"{where}: {str(other)[:80]} where the baseline has {str(one)[:80]}")


def _lines(folder: int, name: str) -> list[dict[str, Any]]:
    text = read_bytes(folder, [name], FILE_BYTES)
    return [object_of(line, name) for line in text.splitlines()]


def _checkpoints(folder: int) -> list[str]:
    """Names in ``checkpoints``; at most a hundred are read."""
    try:
        handle = os.open("checkpoints", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if is_of_no_file(error):
            raise
        raise UntrustedFileError(f"checkpoints is not there: {error.strerror}") from None
    try:
        return sorted(name for name in os.listdir(handle)[:100] if name.startswith(("step-", "bad-")))
    finally:
        os.close(handle)
