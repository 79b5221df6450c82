"""The profile as data, the schema of ``profile.json``. Times, bytes and FLOPs are those of one step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

FORMAT = 4


@dataclass(frozen=True)
class ProfiledLine:
    """One source line, summed over the layers. ``op`` is the kernel op that it runs for, or empty. If the step is compiled, a line has its part of
    the fused kernels that compute it (``agents.line_profiler.compiled``), and a line that compilation removed is not listed."""

    file: str
    line: int
    source: str
    op: str
    phase: str  # forward (with the backward it caused) | optimizer | data
    forward_s: float  # of its operations
    backward_s: float
    host_s: float  # Python and dispatch on the way to its operations
    calls: float  # times the line is executed
    flops: float
    bytes: float
    share: float  # of the step: of the sum over all lines
    roofline: float  # time that the roofline allows over the time taken
    bound: str  # compute | memory | launch | host
    operations: tuple[str, ...]  # the most frequent ones
    isolated_s: float | None  # the same operations, each alone: medians summed; None when one could not be called alone
    isolated_spread_s: float | None  # interquartile ranges summed

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.host_s

    @property
    def name(self) -> str:
        """The line's name in edges, fusion candidates and stream candidates."""
        return format_line_name(self.file, self.line, self.op)


def format_line_name(file: str, line: int, op: str) -> str:
    """A source line's name in edges and candidates: 'file:line', or 'file:line#op'."""
    return f"{file}:{line}" + (f"#{op}" if op else "")


@dataclass(frozen=True)
class OpCall:
    """Calls of an op with equal arguments in a step."""

    calls: int
    arguments: tuple[str, ...]  # a tensor as "bfloat16[4096, 256] strides (256, 1)", any other value as its text


@dataclass(frozen=True)
class ProfiledOp:
    """One kernel op: the sum of its lines."""

    op: str
    implementation: str
    calls: float
    forward_s: float
    backward_s: float
    share: float
    in_block: bool  # its lines are compiled with the model's blocks, where the recipe compiles them
    trained: bool  # it has gradients; the optimiser's ops have none
    implementations: dict[str, str]  # those that run on this device, and what each is
    called_with: tuple[OpCall, ...]
    implementation_s: dict[
        str, float
    ]  # seconds of a forward and backward pass alone, at the recipe's shapes; those that were timed


@dataclass(frozen=True)
class TorchProfilerComparison:
    """Seconds in operations, by ``torch.profiler`` and by the lines, for the same batch."""

    torch_s: float  # self time of all operations, summed
    lines_s: float  # forward_s + backward_s of all lines but the data loader's, of the step recorded beside it

    @property
    def ratio(self) -> float:
        return self.lines_s / self.torch_s if self.torch_s else 0.0


@dataclass(frozen=True)
class IsolationStatistics:
    """How the operations were measured outside the step."""

    signatures: int  # different (operation, shapes, strides, dtypes); each measured once
    full: int  # those that got all of their iterations
    warmup: int
    iterations: int
    seconds: float
    budget_s: float
    not_measured: tuple[str, ...]  # operation: why


@dataclass(frozen=True)
class DataFlowEdge:
    """``target`` reads what ``source`` wrote. ``conditional``: the target is in a conditional branch in which the source is not."""

    source: str  # ``ProfiledLine.name``
    target: str
    conditional: bool
    bytes: float  # that the target reads


@dataclass(frozen=True)
class FusionCandidate:
    """Memory-bound lines that pass tensors to one another which no other line reads, forward or backward.

    One kernel could keep those tensors on the chip. ``bytes_saved`` counts their writes and reads. ``gain_s`` is the time of that traffic
    at the measured bandwidth, or at the chain's own bandwidth if caches make it higher. It is an upper bound.
    """

    lines: tuple[str, ...]  # in the order in which they run
    intermediates: int
    bytes_saved: float
    gain_s: float
    gain_share: float  # of the eager step


@dataclass(frozen=True)
class ConcurrencyCandidate:
    """Two branches that start at one tensor and do not depend on each other. They could run on two streams.

    ``gain_s``: the time of the shorter branch, which the longer one could hide. It is an upper bound.
    """

    fork: str  # the line that made the tensor
    branches: tuple[tuple[str, ...], tuple[str, ...]]
    backward: bool
    times: int
    gain_s: float
    gain_share: float


@dataclass(frozen=True)
class Profile:
    """The content of ``profile.json``. A step's time includes the time to make its batch. Lines and ops are those of the step as the recipe runs it:
    compiled if it compiles (``compiled``). Edges and candidates are those of the eager step."""

    format: int
    recipe: dict[str, Any]
    kernels: dict[str, str]
    device: str
    device_kind: str  # 'cpu' or 'cuda', as kernels.yaml names it
    machine: str  # ``kernels.contract.machine.Machine`` as text: profiles of one machine can be compared
    machine_facts: dict[str, str]  # caches, vector units, cores
    torch: str
    compiled: bool  # the lines are those of a compiled step
    step_s: float  # the fastest step without a profiler, as ``compiled`` says; such steps alternate with profiled ones
    eager_step_s: float  # the same for the eager step
    recipe_step_s: float | None  # as the recipe runs it: compiled where it says so; None when not measured
    covered_s: float  # sum over the lines
    coverage: float  # covered_s / step_s
    overhead_s: float  # added to the step by the stopwatch; measured separately and subtracted from every line's time
    precision: str
    matmul_flops_per_s: float  # the roofline: the best rates of this machine that are known
    memory_bytes_per_s: float
    measured_flops_per_s: float  # the rates that this profile measured
    measured_bytes_per_s: float
    steps: int
    cross_check: TorchProfilerComparison
    isolation: IsolationStatistics | None  # None if no operation was measured outside the step
    lines: tuple[ProfiledLine, ...]  # hottest first
    ops: tuple[ProfiledOp, ...]
    edges: tuple[
        DataFlowEdge, ...
    ]  # of the forward pass and the optimiser, in the order in which they are first walked
    fusion_candidates: tuple[FusionCandidate, ...]  # largest gain first
    stream_candidates: tuple[ConcurrencyCandidate, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Profile:
        """The profile in a parsed ``profile.json``. Raises: ValueError for another format or other fields."""
        if raw.get("format") != FORMAT:
            raise ValueError(f"profile.json: format {raw.get('format')!r}, this code reads {FORMAT}")
        return TypeAdapter(cls).validate_python(raw)
