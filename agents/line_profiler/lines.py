"""Sums events by source line: time, calls, bytes, FLOPs, share of the roofline, and what bounds the line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from agents.line_profiler.capture import ROOT, Line, RecordedOperation, is_view_or_empty
from agents.line_profiler.isolation import IsolatedTime
from agents.line_profiler.profile_schema import OpCall, ProfiledLine, ProfiledOp
from agents.line_profiler.signature import OperationSignature
from kernels.contract.registry import OPS

OPTIMIZER_FILES = ("trainer/optim/optimizer.py", "trainer/monitor/stability.py", "trainer/optim/muon.py")
OPTIMIZER_OPS = frozenset(name for name, op in OPS.items() if not op.gradients)
LAUNCH_BOUND = 0.1  # a line of short operations below this share of the roofline waits for its launches
SHORT_OPERATION_S = 20e-6
NOTHING_ALONE = IsolatedTime(0.0, 0.0, 0)


@dataclass(frozen=True)
class PeakRates:
    """The machine's measured peak rates: of matrix products and of copies."""

    flops_per_s: float
    bytes_per_s: float

    def estimate_least_seconds(self, flops: float, bytes: float) -> float:
        """The least time by the roofline model (Williams et al. 2009, doi 10.1145/1498765.1498785)."""
        return max(flops / self.flops_per_s, bytes / self.bytes_per_s)

    def find_larger_rates(self, other: PeakRates) -> PeakRates:
        """The larger of each rate: other programs can only make a machine look slower than it is."""
        return PeakRates(max(self.flops_per_s, other.flops_per_s), max(self.bytes_per_s, other.bytes_per_s))

    def find_limiting_resource(self, flops: float, bytes: float) -> str:
        return "compute" if flops / self.flops_per_s >= bytes / self.bytes_per_s else "memory"


def summarise_lines(
    events: Iterable[RecordedOperation],
    calls: Mapping[Line, float],
    step_s: float,
    roof: PeakRates,
    alone: Mapping[OperationSignature, IsolatedTime] | None = None,
) -> list[ProfiledLine]:
    """The lines of a recorded step. ``calls``: how often the step executes each line. ``step_s``: its time without a profiler."""
    by_line: defaultdict[Line, list[RecordedOperation]] = defaultdict(list)
    for event in events:
        by_line[event.line].append(event)
    return [_line(line, seen, calls.get(line, 0.0), step_s, roof, alone) for line, seen in by_line.items()]


def _line(
    line: Line,
    events: list[RecordedOperation],
    calls: float,
    step_s: float,
    roof: PeakRates,
    alone: Mapping[OperationSignature, IsolatedTime] | None,
) -> ProfiledLine:
    file, number, op = line
    forward = sum(e.seconds for e in events if not e.backward)
    backward = sum(e.seconds for e in events if e.backward)
    host = sum(e.host_s for e in events)
    flops, moved = sum(e.flops for e in events), sum(e.bytes for e in events)
    took = forward + backward
    reached = min(1.0, roof.estimate_least_seconds(flops, moved) / took) if took else 0.0
    isolated, spread = _isolated(events, alone)
    return ProfiledLine(
        file=file,
        line=number,
        source=read_source_line(file, number),
        op=op,
        phase=find_phase_of_line(line),
        forward_s=forward,
        backward_s=backward,
        host_s=host,
        calls=calls,
        flops=flops,
        bytes=moved,
        share=(took + host) / step_s,
        roofline=reached,
        bound=_bound(took, host, reached, len(events), roof.find_limiting_resource(flops, moved)),
        operations=tuple(name for name, _ in Counter(e.operation for e in events).most_common(4)),
        isolated_s=isolated,
        isolated_spread_s=spread,
    )


def copy_isolated_times(lines: Iterable[ProfiledLine], eager: Iterable[ProfiledLine]) -> list[ProfiledLine]:
    """The lines, each with the times alone that its operations have in the eager step. A fused kernel is not timed alone."""
    alone = {line.name: line for line in eager}
    return [
        replace(line, isolated_s=alone[line.name].isolated_s, isolated_spread_s=alone[line.name].isolated_spread_s)
        if line.name in alone
        else line
        for line in lines
    ]


def find_phase_of_line(line: Line) -> str:
    """The phase of a line, 'optimizer' or 'forward'. Lines of the data loader have no phase of these."""
    file, _, op = line
    return "optimizer" if op in OPTIMIZER_OPS or file in OPTIMIZER_FILES else "forward"


def _bound(took: float, host: float, reached: float, operations: float, roof: str) -> str:
    if host > took:
        return "host"
    return "launch" if took / operations < SHORT_OPERATION_S and reached < LAUNCH_BOUND else roof


def _isolated(
    events: list[RecordedOperation], alone: Mapping[OperationSignature, IsolatedTime] | None
) -> tuple[float | None, float | None]:
    if alone is None:
        return None, None
    found = []
    for event in events:
        still = event.signature is not None and is_view_or_empty(event.signature.func)
        one = NOTHING_ALONE if still else alone.get(event.signature) if event.signature else None
        if one is None or one.why_not:
            return None, None
        found.append(one)
    return sum(one.median_s for one in found), sum(one.spread_s for one in found)


def summarise_data_loader_lines(traced: Mapping[Line, tuple[float, float]], step_s: float) -> list[ProfiledLine]:
    """The data loader's lines. ``traced``: line → (seconds, times executed). All of this time is the host's."""
    return [
        ProfiledLine(
            file, line, read_source_line(file, line), "", "data", 0.0, 0.0, seconds, times, 0.0, 0.0, seconds / step_s, 0.0,
            "host", (), None, None,
        )
        for (file, line, _), (seconds, times) in traced.items()
    ]  # fmt: skip


def summarise_ops(
    events: Iterable[RecordedOperation],
    calls: Mapping[str, int],
    arguments: Mapping[str, Mapping[tuple[str, ...], int]],
    choice: Mapping[str, str],
    step_s: float,
    device: str,
) -> list[ProfiledOp]:
    """The times of each op, with the registry's facts about it, so that readers of a profile need not import the kernels.

    ``arguments``: for each op, the arguments of its calls, and how many calls have them.
    """
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for event in events:
        (backward if event.backward else forward)[event.line[2]] += event.seconds  # type: ignore[assignment]
    found = []
    for name, n in calls.items():
        op = OPS[name]
        share = (forward[name] + backward[name]) / step_s
        here = {i.name: i.description for i in op.implementations.values() if i.can_run_on(device)}
        times = float(n), forward[name], backward[name], share
        called = tuple(OpCall(count, given) for given, count in arguments.get(name, {}).items())
        found.append(ProfiledOp(name, choice[name], *times, op.in_block, bool(op.gradients), here, called, {}))
    return found


def read_source_line(file: str, line: int) -> str:
    text = read_source_lines(file)
    return text[line - 1].strip() if 0 < line <= len(text) else file


@cache
def read_source_lines(file: str) -> tuple[str, ...]:
    path = ROOT / file
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()
