"""The profile of a recipe: run it, count what each line cost, hold it against the roofline and against the step
without a profiler."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from agents.line_profiler.capture import ROOT, Line, LineTime, Recorder, mode_overhead, traced_lines
from agents.line_profiler.workload import make_run
from kernels.precision import matrix_units
from kernels.registry import Ops, load_choice
from trainer.batch import make_batch
from trainer.metrics import matmul_rate
from trainer.recipe import Recipe
from trainer.run import DTYPES, Run

FORMAT = 1
WARMUP = 1
OPTIMIZER_FILES = ("trainer/optimizer.py", "trainer/stability.py", "kernels/adamw.py", "kernels/newton_schulz.py")
LAUNCH_BOUND = 0.1  # a line that reaches less than this share of the roofline with short operations waits for the host
SHORT_OPERATION_S = 20e-6


@dataclass(frozen=True)
class ProfiledLine:
    """One source line, per step. ``op`` is the kernel op that it runs for, or empty."""

    file: str
    line: int
    source: str
    op: str
    phase: str  # forward (with the backward it caused) | optimizer | data
    forward_s: float
    backward_s: float
    calls: float
    flops: float
    bytes: float
    share: float  # of the eager step
    roofline: float  # time that the roofline allows over the time taken
    bound: str  # compute | memory | launch | host
    operations: tuple[str, ...]  # the most frequent ones

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class ProfiledOp:
    """One kernel op, all of its lines, per step."""

    op: str
    implementation: str
    calls: float
    forward_s: float
    backward_s: float
    share: float


@dataclass(frozen=True)
class Profile:
    """What ``profile.json`` holds (``format`` 1). Times are seconds a step, the batch of it made in the step, not
    ahead of it."""

    format: int
    recipe: dict[str, Any]
    kernels: dict[str, str]
    device: str
    torch: str
    eager_step_s: float  # mean, no profiler, taken in turn with the profiled steps
    recipe_step_s: float | None  # as the recipe runs it: compiled where it says so; None when not measured
    covered_s: float  # sum over the lines
    coverage: float  # covered_s / eager_step_s; the rest is Python and dispatch between operations
    overhead_s: float  # what profiling added to a step, outside of the times in the table
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    steps: int
    lines: tuple[ProfiledLine, ...]  # hottest first
    ops: tuple[ProfiledOp, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Profile:
        """From parsed ``profile.json``. Raises: ValueError for another format."""
        if raw.get("format") != FORMAT:
            raise ValueError(f"profile.json: format {raw.get('format')!r}, this code reads {FORMAT}")
        lines = tuple(ProfiledLine(**{**line, "operations": tuple(line["operations"])}) for line in raw["lines"])
        return cls(**{**raw, "lines": lines, "ops": tuple(ProfiledOp(**o) for o in raw["ops"])})


def profile(
    recipe: Recipe,
    kernels: Path,
    *,
    steps: int = 2,
    measure_recipe_step: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Profile ``steps`` eager steps. Raises: TrainerError, KernelError."""
    with matrix_units(DTYPES[recipe.precision]), tempfile.TemporaryDirectory(prefix="profile-") as folder:
        report("eager step")
        run = make_run(recipe, kernels, Path(folder), steps=WARMUP + 2 * steps + 4, compile=False)
        synchronize = torch.cuda.synchronize if run.ranks.device.type == "cuda" else None
        for _ in range(WARMUP):
            _step(run)
        report("lines of the data loader")
        data = _data_lines(run)
        report("lines of the step")
        recorder = Recorder(synchronize=synchronize)
        watched = recorder.watch(run.model.ops)
        eager_times = []
        for _ in range(steps):  # in turn, so that whatever else the machine does falls on both
            eager_times.append(_timed(run, synchronize))
            batch = make_batch(run.order)
            with recorder, _ops_of(run, watched):
                run.train_step(batch.to(run.ranks.device))
        eager = statistics.fmean(eager_times)
        recipe_step: float | None = eager
        if recipe.compile:
            recipe_step = None
            if measure_recipe_step:
                report("the step as the recipe compiles it")
                compiled = make_run(recipe, kernels, Path(folder), steps=WARMUP + steps + 3, compile=True)
                for _ in range(WARMUP + 1):
                    _step(compiled)
                recipe_step = statistics.median(_timed(compiled, synchronize) for _ in range(steps + 1))
    rate = matmul_rate(run.ranks.device, DTYPES[recipe.precision])
    bandwidth = memory_rate(run.ranks.device)
    lines = sorted(_lines(recorder.lines, data, steps, eager, rate, bandwidth), key=lambda line: -line.seconds)
    covered = sum(line.seconds for line in lines)
    choice = load_choice(kernels, run.ranks.device.type)
    return Profile(
        format=FORMAT,
        recipe=recipe.model_dump(),
        kernels=choice,
        device=_device_name(run.ranks.device),
        torch=torch.__version__,
        eager_step_s=eager,
        recipe_step_s=recipe_step,
        covered_s=covered,
        coverage=covered / eager,
        overhead_s=mode_overhead() * recorder.operations / steps,
        matmul_flops_per_s=rate,
        memory_bytes_per_s=bandwidth,
        steps=steps,
        lines=tuple(lines),
        ops=tuple(_ops(recorder, choice, steps, eager)),
    )


def _step(run: Run) -> None:
    run.train_step(make_batch(run.order).to(run.ranks.device))


def _timed(run: Run, synchronize: Callable[[], None] | None) -> float:
    began = time.perf_counter()
    _step(run)
    if synchronize:
        synchronize()
    return time.perf_counter() - began


@contextmanager
def _ops_of(run: Run, ops: Ops) -> Iterator[None]:
    """The model calls ``ops`` within the block."""
    before = run.model.ops
    holders = [module for module in run.model.modules() if hasattr(module, "ops")]
    for module in holders:
        module.ops = ops  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in holders:
            module.ops = before  # type: ignore[assignment]


def _data_lines(run: Run) -> dict[Line, tuple[float, float]]:
    """Line → (seconds, times) of making one batch; the tracer's own time is taken out by scaling to an untraced
    batch."""
    began = time.perf_counter()
    make_batch(run.order)
    untraced = time.perf_counter() - began
    with traced_lines() as found:
        make_batch(run.order)
    traced = sum(seconds for seconds, _ in found.values()) or 1.0
    return {line: (seconds * min(1.0, untraced / traced), times) for line, (seconds, times) in found.items()}


def _lines(
    recorded: Mapping[Line, LineTime],
    data: Mapping[Line, tuple[float, float]],
    steps: int,
    eager: float,
    rate: float,
    bandwidth: float,
) -> Iterable[ProfiledLine]:
    for (file, line, op), spent in recorded.items():
        seconds = (spent.forward_s + spent.backward_s) / steps
        compute, memory = spent.flops / steps / rate, spent.bytes / steps / bandwidth
        reached = min(1.0, max(compute, memory) / seconds) if seconds else 0.0
        count = sum(spent.operations.values())
        short = count and seconds * steps / count < SHORT_OPERATION_S
        bound = "launch" if short and reached < LAUNCH_BOUND else "compute" if compute >= memory else "memory"
        yield ProfiledLine(
            file=file,
            line=line,
            source=_source(file, line),
            op=op,
            phase="optimizer" if file in OPTIMIZER_FILES else "forward",
            forward_s=spent.forward_s / steps,
            backward_s=spent.backward_s / steps,
            calls=spent.calls / steps,
            flops=spent.flops / steps,
            bytes=spent.bytes / steps,
            share=seconds / eager,
            roofline=reached,
            bound=bound,
            operations=tuple(name for name, _ in spent.operations.most_common(4)),
        )
    for (file, line, _), (seconds, times) in data.items():
        yield ProfiledLine(
            file, line, _source(file, line), "", "data", seconds, 0.0, times, 0.0, 0.0, seconds / eager, 0.0, "host", ()
        )


def _ops(recorder: Recorder, choice: Mapping[str, str], steps: int, eager: float) -> Iterable[ProfiledOp]:
    for op, calls in recorder.op_calls.items():
        forward = sum(t.forward_s for (_, _, name), t in recorder.lines.items() if name == op) / steps
        backward = sum(t.backward_s for (_, _, name), t in recorder.lines.items() if name == op) / steps
        yield ProfiledOp(op, choice[op], calls / steps, forward, backward, (forward + backward) / eager)


def _source(file: str, line: int) -> str:
    path = ROOT / file
    if not line or not path.is_file():
        return file
    return path.read_text(encoding="utf-8").splitlines()[line - 1].strip()


def memory_rate(device: torch.device, size: int = 1 << 26) -> float:
    """Bytes read and written a second by a copy of 64 MiB: the best of five."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
