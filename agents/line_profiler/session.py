"""Profiles a recipe: runs its steps eagerly and, if it compiles, compiled. Compares the sum of the operations' times with the clock, and that of the
eager step with torch.profiler."""

from __future__ import annotations

import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from agents.line_profiler.capture import ROOT, Line, OperationRecorder, RecordedOperation
from agents.line_profiler.compiled import divide_among_lines, separate_calls, watch_compiled_graphs
from agents.line_profiler.graph import find_concurrency_candidates, find_data_flow_edges, find_fusion_candidates
from agents.line_profiler.implementations import time_registered_implementations
from agents.line_profiler.isolation import ITERATIONS, WARMUP, IsolatedTime, time_operations_alone
from agents.line_profiler.lines import (
    PeakRates,
    copy_isolated_times,
    summarise_data_loader_lines,
    summarise_lines,
    summarise_ops,
)
from agents.line_profiler.machine import read_machine_facts
from agents.line_profiler.profile_schema import FORMAT, IsolationStatistics, Profile, TorchProfilerComparison
from agents.line_profiler.signature import OperationSignature, Samples
from agents.line_profiler.stopwatch import (
    TimedOperation,
    add_up_seconds,
    is_fastest_time_confirmed,
    keep_fastest_times,
    make_clock,
    make_progress_reporter,
    measure_least_overhead,
    measure_stopwatch_overhead,
    pause_garbage_collection,
    replace_recorded_times,
    time_operations,
)
from agents.line_profiler.workload import make_segment_run, shrink_recipe
from kernels.contract.choice import split_implementation_names
from kernels.contract.machine import describe_this_machine
from kernels.contract.message import Message
from kernels.contract.precision import allow_bf16_matmul
from kernels.contract.registry import Ops, load_choice
from trainer.batch import Batch, make_batch
from trainer.contract.plan.precision import DTYPES, choose_training_device, replace_auto_precision
from trainer.contract.plan.rates import measure_matmul_rate, measure_memory_rate
from trainer.contract.recipe import Recipe
from trainer.run import SegmentRun

WARMUP_STEPS = 2
STEPS = 6
ALIKE_FOR_TORCH = 1.1  # torch.profiler's own cost varies more, mostly for short steps
LEAST_S, SETTLING_S = 2.0, 10.0  # short steps are taken more often than STEPS; the longest wait for a quiet machine
ISOLATION_BUDGET_S = 18.0
IMPLEMENTATIONS_S = 12.0  # for timing the registered implementations of the slowest ops
MOST_OVER_LEAST = 3.0  # the stopwatch adds less than so many times what it adds to the simplest operation
EAGER_STEPS = 2  # timed eager steps beside a compiled one: they only say how a fused kernel's time is divided


@dataclass(frozen=True)
class ProfileSession:
    """The profile, and the operations of the recorded step in the order in which they ran."""

    profile: Profile
    events: tuple[RecordedOperation, ...]


def measure_profile(
    recipe: Recipe,
    kernels: Path,
    *,
    steps: int = STEPS,
    measure_recipe_step: bool = True,
    isolate: bool = True,
    isolation_budget_s: float = ISOLATION_BUDGET_S,
    best: PeakRates | None = None,
    implementations_s: float = IMPLEMENTATIONS_S,
    report: Callable[[str], None] = lambda text: None,
) -> ProfileSession:
    """Profile a step as the recipe runs it. One recorded step gives the lines. Each operation counts with its fastest time of at least ``steps``
    timed steps. They alternate with steps that nothing watches and, if the step is eager, with steps under torch.profiler.

    If the recipe compiles, an eager step is recorded beside the compiled one, for what compiled code does not show: calls, edges and fusion
    candidates. Without ``measure_recipe_step`` only the eager step is profiled. ``best``: rates of this machine that were measured before;
    the larger ones count. ``implementations_s``: seconds for timing the registered implementations of the slowest ops.

    Raises: TrainerError, KernelError.
    """
    recipe = replace_auto_precision(recipe, choose_training_device())
    compiles = recipe.compile and measure_recipe_step
    with allow_bf16_matmul(DTYPES[recipe.precision]), tempfile.TemporaryDirectory(prefix="profile-") as folder:
        report(Message("line_profiler.eager_step", "preparing the eager step"))
        run = make_segment_run(recipe, kernels, Path(folder), steps=WARMUP_STEPS + 4, compile=False)
        device = run.ranks.device
        for _ in range(WARMUP_STEPS):
            run.train_step(make_batch(run.order).to(device))
        report(Message("line_profiler.data_loader", "timing the lines of the data loader"))
        data, making_s = _data_lines(run)
        report(Message("line_profiler.step", "recording the lines of the step"))
        # One batch for all steps, so that the same step is compared.
        batch = make_batch(run.order).to(device)
        recorder = OperationRecorder()
        with _ops_of(run, recorder.wrap_ops(run.model.ops)), pause_garbage_collection(), recorder:
            run.train_step(batch)
        rounds = _rounds(run, batch, min(steps, EAGER_STEPS) if compiles else steps, report, settle=not compiles)
        report(Message("line_profiler.stopwatch", "measuring the cost of the stopwatch"))
        crossing_s = _crossing(recipe, kernels, Path(folder))
        on_host = device.type == "cpu"
        timed = lambda events, watched: tuple(
            replace_recorded_times(events, keep_fastest_times(watched), crossing_s, on_host)
        )
        events = eager = timed(recorder.events, rounds.watched)
        check = TorchProfilerComparison(min(rounds.torch), sum(e.seconds for e in eager))
        eager_s = min(rounds.unwatched) + making_s  # the fastest: other programs only add time
        calls = _calls(run, batch, recorder)
        measured = PeakRates(measure_matmul_rate(device, DTYPES[recipe.precision]), measure_memory_rate(device))
        roof = measured.find_larger_rates(best) if best else measured
        alone, isolation = None, None
        if isolate:
            alone, isolation = _isolate(recorder.samples, eager, device, isolation_budget_s, report)
        step_s, recipe_step_s = eager_s, None if recipe.compile else eager_s
        if compiles:
            report(Message("line_profiler.recipe_step", "timing the compiled step of the recipe"))
            compiled, rounds = _compiled_rounds(recipe, kernels, Path(folder), batch, steps, report)
            events = tuple(divide_among_lines(separate_calls(timed(compiled, rounds.watched)), eager))
            step_s = recipe_step_s = min(rounds.unwatched) + making_s
        covered = sum(e.seconds + e.host_s for e in events) + sum(seconds for seconds, _ in data.values())
        choice = {op: split_implementation_names(name)[0] for op, name in load_choice(kernels, device.type).items()}
        ops = summarise_ops(events, recorder.op_calls, recorder.op_arguments, choice, covered, device.type)
        report(Message("line_profiler.implementations", "timing the registered implementations of the slowest ops"))
        ops = time_registered_implementations(ops, recipe, device, implementations_s)
    by_eager_step = summarise_lines(eager, calls, covered, roof, alone)
    by_step = copy_isolated_times(summarise_lines(events, calls, covered, roof), by_eager_step)
    lines = sorted(by_step + summarise_data_loader_lines(data, covered), key=lambda line: -line.seconds)
    found = Profile(
        format=FORMAT,
        recipe=recipe.model_dump(),
        kernels=choice,
        device=read_device_name(device),
        device_kind=device.type,
        machine=str(describe_this_machine(device.type)),
        machine_facts=read_machine_facts(device),
        torch=torch.__version__,
        compiled=compiles,
        step_s=step_s,
        eager_step_s=eager_s,
        recipe_step_s=recipe_step_s,
        covered_s=covered,
        coverage=covered / step_s,
        overhead_s=crossing_s * len(events),
        precision=recipe.precision,
        matmul_flops_per_s=roof.flops_per_s,
        memory_bytes_per_s=roof.bytes_per_s,
        measured_flops_per_s=measured.flops_per_s,
        measured_bytes_per_s=measured.bytes_per_s,
        steps=len(rounds.watched),
        cross_check=check,
        isolation=isolation,
        lines=tuple(lines),
        ops=tuple(ops),
        edges=tuple(find_data_flow_edges(eager, recorder.callers)),
        fusion_candidates=tuple(find_fusion_candidates(eager, by_eager_step, roof.bytes_per_s, eager_s)),
        stream_candidates=tuple(find_concurrency_candidates(eager, eager_s)),
    )
    return ProfileSession(found, events)


@dataclass(frozen=True)
class RepeatedStepTimings:
    """Times of one step that was run many times. ``unwatched``: seconds of a step that nothing watches. ``watched``: the operations of a
    step under the stopwatch. ``torch``: seconds in operations by torch.profiler; empty for a compiled step."""

    unwatched: list[float]
    watched: list[list[TimedOperation]]
    torch: list[float]

    def is_fastest_step_confirmed(self) -> bool:
        """True if other steps confirmed the fastest step of each kind."""
        ours = self.unwatched, [add_up_seconds(step) for step in self.watched]
        theirs = not self.torch or is_fastest_time_confirmed(self.torch, ALIKE_FOR_TORCH)
        return all(map(is_fastest_time_confirmed, ours)) and theirs


def _rounds(
    run: SegmentRun, batch: Batch, steps: int, report: Callable[[str], None], settle: bool = True
) -> RepeatedStepTimings:
    """Run the three kinds of step in alternation, so that other programs slow all of them. A step that is not counted follows torch.profiler,
    so that no counted step starts with colder caches. At least ``steps`` rounds run, until they are settled or the time is spent."""
    rounds = RepeatedStepTimings([], [], [])
    began = time.perf_counter()
    with pause_garbage_collection():
        while not _is_enough(rounds, steps, began, settle):
            rounds.torch.append(_torch_profiler_s(run, batch))
            run.train_step(batch)
            rounds.unwatched.append(_timed(run, batch))
            rounds.watched.append(time_operations(lambda: run.train_step(batch), make_clock(run.ranks.device)))
            _report_round(rounds, report)
    return rounds


def _is_enough(rounds: RepeatedStepTimings, steps: int, began: float, settle: bool = True) -> bool:
    spent = time.perf_counter() - began
    settled = spent > LEAST_S and rounds.is_fastest_step_confirmed()
    return len(rounds.watched) >= steps and (not settle or settled or spent > SETTLING_S)


def _report_round(rounds: RepeatedStepTimings, report: Callable[[str], None]) -> None:
    number = len(rounds.watched)
    report(Message("line_profiler.round", "timing the lines of the step: round {number}", number=number))


def _compiled_rounds(
    recipe: Recipe, kernels: Path, folder: Path, batch: Batch, steps: int, report: Callable[[str], None]
) -> tuple[list[RecordedOperation], RepeatedStepTimings]:
    """(the operations of a compiled step, times of steps that alternate with and without the stopwatch). torch.profiler does not see the generated
    kernels, so it is left out. A step replays no CUDA graph, because a graph hides its kernels."""
    with watch_compiled_graphs() as graphs:
        recipe = recipe.model_copy(update={"cuda_graphs": "off"})
        run = make_segment_run(recipe, kernels, folder, steps=WARMUP_STEPS + 1, compile=True)
        for _ in range(WARMUP_STEPS):
            run.train_step(batch)
        recorder = OperationRecorder(generated=graphs)
        with pause_garbage_collection(), recorder, graphs.watched_by(recorder.record_kernel):
            run.train_step(batch)
        rounds = RepeatedStepTimings([], [], [])
        began = time.perf_counter()
        clock = make_clock(run.ranks.device)
        with pause_garbage_collection():
            while not _is_enough(rounds, steps, began):
                rounds.unwatched.append(_timed(run, batch))
                rounds.watched.append(time_operations(lambda: run.train_step(batch), clock, graphs))
                _report_round(rounds, report)
    return recorder.events, rounds


def _crossing(recipe: Recipe, kernels: Path, folder: Path) -> float:
    run = make_segment_run(shrink_recipe(recipe), kernels, folder, steps=WARMUP_STEPS + 1, compile=False)
    for _ in range(WARMUP_STEPS):
        run.train_step(make_batch(run.order).to(run.ranks.device))
    batch = make_batch(run.order).to(run.ranks.device)
    # A busy machine makes the difference of two steps look larger than it is. Then it would take time from lines that did take it.
    most = MOST_OVER_LEAST * measure_least_overhead()
    return min(measure_stopwatch_overhead(lambda: run.train_step(batch)), most)


def _timed(run: SegmentRun, batch: Batch) -> float:
    began = time.perf_counter()
    run.train_step(batch)
    if run.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


@contextmanager
def _ops_of(run: SegmentRun, ops: Ops) -> Iterator[None]:
    """Let the model and the optimiser call ``ops`` within the block."""
    before = run.model.ops

    def use(ops: Ops) -> None:
        for module in run.model.modules():
            if hasattr(module, "ops"):
                module.ops = ops  # type: ignore[assignment]
        run.optimizer.adamw = ops.adamw
        if run.optimizer.muon is not None:
            run.optimizer.muon.orthogonalise = ops.newton_schulz

    use(ops)
    try:
        yield
    finally:
        use(before)


def _data_lines(run: SegmentRun) -> tuple[dict[Line, tuple[float, float]], float]:
    """(line → (seconds, times executed) while one batch is made, seconds to make a batch without the tracer). The lines are scaled to the
    time without the tracer, which removes the tracer's own time."""
    untraced = []
    for _ in range(2):
        began = time.perf_counter()
        make_batch(run.order)
        untraced.append(time.perf_counter() - began)
    with time_executed_lines() as found:
        make_batch(run.order)
    making = min(untraced)
    scale = making / (sum(seconds for seconds, _ in found.values()) or 1.0)
    return {line: (seconds * scale, times) for line, (seconds, times) in found.items()}, making


def _calls(run: SegmentRun, batch: Batch, recorder: OperationRecorder) -> dict[Line, float]:
    """How often a step executes each line, counted by a tracer in a step of its own."""
    counted = recorder.op_calls.copy()
    with (
        _ops_of(run, recorder.wrap_ops(run.model.ops)),
        time_executed_lines(("trainer", "kernels"), lambda: recorder.current_op) as found,
    ):
        run.train_step(batch)
    recorder.op_calls = counted
    return {line: times for line, (_, times) in found.items()}


def _torch_profiler_s(run: SegmentRun, batch: Batch) -> float:
    """Seconds of self time of all operations of the step by torch.profiler: on the GPU if there is one."""
    cuda = run.ranks.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch_profile(activities=activities, acc_events=True) as found:
        run.train_step(batch)
    rows = found.key_averages()
    return sum(row.self_device_time_total if cuda else row.self_cpu_time_total for row in rows) / 1e6


def _isolate(
    recorded: Mapping[OperationSignature, Samples],
    events: Sequence[RecordedOperation],
    device: torch.device,
    budget_s: float,
    report: Callable[[str], None],
) -> tuple[dict[OperationSignature, IsolatedTime], IsolationStatistics]:
    estimates = {event.signature: event.seconds for event in events if event.signature is not None}
    began = time.perf_counter()
    report(
        Message(
            "line_profiler.isolation",
            "timing {operations} distinct operations outside the step, for at most {seconds:.0f} s",
            operations=len(recorded),
            seconds=budget_s,
        )
    )
    alone = time_operations_alone(
        recorded, estimates, device, budget_s, make_progress_reporter(report, "operations timed: ")
    )
    why = tuple(f"{signature.operation_name}: {one.why_not}" for signature, one in alone.items() if one.why_not)
    full = sum(one.iterations == ITERATIONS for one in alone.values())
    spent = time.perf_counter() - began
    return alone, IsolationStatistics(len(alone), full, WARMUP, ITERATIONS, spent, budget_s, why)


def read_device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # frames of their own before Python 3.12


@contextmanager
def time_executed_lines(
    folders: tuple[str, ...] = ("trainer",), op: Callable[[], str] = lambda: ""
) -> Iterator[dict[Line, list[float]]]:
    """Time every line of ``folders`` that this thread executes in the block. Yields a dictionary: line → [seconds, times executed].

    A line's time excludes the time of lines of ``folders`` that it calls. ``op`` returns the kernel op that is running.
    """
    roots = tuple(f"{ROOT / folder}/" for folder in folders)
    found: dict[Line, list[float]] = {}
    last: list[Any] = [None, 0.0]

    def here(frame: FrameType) -> Line:
        return (str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_lineno, op())

    def of_frame() -> Callable[[FrameType, str, Any], Any]:
        at = [0]  # the frame's line: a comprehension that stays on it is one execution

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            if last[0] is not None:
                found.setdefault(last[0], [0.0, 0])[0] += time.perf_counter() - last[1]
            if event == "line":
                last[0] = here(frame)
                if frame.f_lineno != at[0] and frame.f_code.co_name not in COMPREHENSIONS:
                    found.setdefault(last[0], [0.0, 0])[1] += 1
                at[0] = frame.f_lineno
            elif event == "return":
                back = frame.f_back
                last[0] = here(back) if back is not None and back.f_code.co_filename.startswith(roots) else None
            last[1] = time.perf_counter()
            return local

        return local

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        return of_frame() if frame.f_code.co_filename.startswith(roots) else None

    assert threading.current_thread() is threading.main_thread() or sys.gettrace() is None
    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield found
    finally:
        sys.settrace(before)
