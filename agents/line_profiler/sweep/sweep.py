"""``python -m agents.line_profiler.sweep.sweep --out DIR``: times one layer for each batch, sequence and model, by line.

Every distinct operation is measured once, on any free worker. The time of an operation that does not fit in memory or time is estimated by
its roofline; every line of the result says which. The program writes DIR/sweep.json (``SweepResult``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from agents.line_profiler.capture import ROOT, is_view_or_empty
from agents.line_profiler.isolation import IsolatedTime
from agents.line_profiler.lines import PeakRates, read_source_line
from agents.line_profiler.profile_schema import format_line_name
from agents.line_profiler.session import read_device_name
from agents.line_profiler.stopwatch import make_progress_reporter
from agents.line_profiler.sweep.shapes import SHAPES
from agents.line_profiler.sweep.slices import ATTENTION, DTYPE, LayerSlice, record_slice_operations
from agents.line_profiler.sweep.sweep_items import (
    SweepItem,
    SweepLimits,
    SweepTask,
    collect_distinct_operations,
    compile_attention_kernel,
    make_attention_shape_key,
    mark_measurable_items,
    measure_sweep_item,
)
from agents.line_profiler.sweep.work_queue import (
    ProcessWorkers,
    RayActors,
    SweepError,
    UnmeasuredItem,
    Workers,
    measure_items_on_workers,
    require_ray,
)
from kernels.contract.choice import split_implementation_names
from kernels.contract.message import Message, format_error_with_code
from kernels.contract.registry import KernelError, load_choice
from trainer.contract import stopping
from trainer.contract.plan.rates import measure_matmul_rate, measure_memory_rate

FORMAT = 1
MEMORY_SHARE = 0.5  # of the free memory, for all workers together


@dataclass(frozen=True)
class SweepLineResult:
    """Seconds of one forward and backward of one layer. ``how``: 'measured', 'roofline' (estimated), or 'both'."""

    name: str
    source: str
    seconds: float
    how: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class SweepSliceResult:
    """One layer of a model at one batch size and sequence length."""

    model: str
    batch: int
    sequence: int
    seconds: float
    measured_share: float  # of the seconds
    lines: tuple[SweepLineResult, ...]  # slowest first


@dataclass(frozen=True)
class SweepItemResult:
    """One distinct operation: its measurement, or the reason why there is none."""

    what: str
    seconds: float  # median of one call; the roofline's if there is a ``why_not``
    spread_s: float
    iterations: int
    roof_s: float
    estimated_s: float  # of measuring it
    took_s: float
    why_not: str


@dataclass(frozen=True)
class SweepResult:
    """The contents of ``sweep.json``."""

    format: int
    device: str
    torch: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    workers: int
    seconds: float
    busy: float  # share of the workers' time that went into items
    slices: tuple[SweepSliceResult, ...]
    items: tuple[SweepItemResult, ...]

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> SweepResult:
        """The result in a parsed ``sweep.json``. Raises: ValueError for another format or other fields."""
        if raw.get("format") != FORMAT:
            raise ValueError(f"sweep.json: format {raw.get('format')!r}, this code reads {FORMAT}")
        return TypeAdapter(cls).validate_python(raw)


def measure_slices(
    slices: Sequence[LayerSlice],
    limits: SweepLimits,
    start: Callable[[], Workers],
    workers: int,
    attention: str,
    report: Callable[[str], None] = lambda text: None,
) -> SweepResult:
    """Measure all slices. ``start`` starts the ``workers`` workers. It is called only if an operation has to be measured.

    Raises: SweepError.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    roof = PeakRates(measure_matmul_rate(device, DTYPE), measure_memory_rate(device))
    items = mark_measurable_items(collect_distinct_operations(slices, roof), limits, workers)
    wanted = [item for item in items if not item.fits]
    report(
        Message(
            "line_profiler.sweep",
            "{slices:,|slice|slices} (each is one layer at one batch size and sequence length) with {operations:,|distinct "
            "operation|distinct operations}; {workers:,|worker measures|workers measure} {measured:,} of the operations",
            slices=len(slices),
            operations=len(items),
            workers=workers,
            measured=len(wanted),
        )
    )
    compile_attention_kernel(attention, device)
    began = time.perf_counter()
    results: list[tuple[IsolatedTime, float] | UnmeasuredItem] = []
    if wanted:
        tasks = [SweepTask(item, device.type, attention, limits) for item in wanted]
        results = measure_items_on_workers(
            start(),
            tasks,
            [item.estimated_s for item in wanted],
            make_progress_reporter(report, "operations measured: "),
        )
    seconds = time.perf_counter() - began
    by_item = dict(zip(wanted, results))
    swept = {_key(item): _swept(item, by_item.get(item)) for item in items}
    took = sum(item.took_s for item in swept.values())
    return SweepResult(
        format=FORMAT,
        device=read_device_name(device),
        torch=torch.__version__,
        matmul_flops_per_s=roof.flops_per_s,
        memory_bytes_per_s=roof.bytes_per_s,
        workers=workers,
        seconds=seconds,
        busy=took / (workers * seconds),
        slices=tuple(_slice(of, swept, roof) for of in slices),
        items=tuple(swept.values()),
    )


def _key(item: SweepItem) -> object:
    return (
        make_attention_shape_key(item.of) if item.index < 0 else record_slice_operations(item.of)[item.index].signature
    )


def _swept(item: SweepItem, result: tuple[IsolatedTime, float] | UnmeasuredItem | None) -> SweepItemResult:
    missing = lambda why, took: SweepItemResult(
        item.what, item.roof_s, 0.0, 0, item.roof_s, item.estimated_s, took, why
    )
    if result is None:
        return missing(item.fits, 0.0)
    if isinstance(result, UnmeasuredItem):
        died = Message(
            "line_profiler.worker_died",
            "the worker died {tries:,|time|times} while it measured the operation",
            tries=result.tries,
        )
        return missing(result.error or died, 0.0)
    one, took = result
    if one.why_not:
        return missing(one.why_not, took)
    return SweepItemResult(
        item.what, one.median_s, one.spread_s, one.iterations, item.roof_s, item.estimated_s, took, ""
    )


def _slice(of: LayerSlice, swept: Mapping[object, SweepItemResult], roof: PeakRates) -> SweepSliceResult:
    """The result of a slice. A line is the sum of its operations, each measured or estimated by the roofline."""
    parts: defaultdict[tuple[str, str], list[tuple[SweepItemResult, float, float]]] = defaultdict(list)
    for event in record_slice_operations(of):
        if event.signature is not None and not is_view_or_empty(event.signature.func):
            name = format_line_name(*event.line)
            parts[name, read_source_line(*event.line[:2])].append((swept[event.signature], event.flops, event.bytes))
    cost = of.attention_cost
    flops, moved = cost.forward_flops + cost.backward_flops, cost.forward_bytes + cost.backward_bytes
    parts[f"kernels/attention/__init__.py#{ATTENTION}", ATTENTION].append(
        (swept[make_attention_shape_key(of)], flops, moved)
    )
    lines = [_line(name, text, found) for (name, text), found in parts.items()]
    every = [part for found in parts.values() for part, _, _ in found]
    seconds = sum(part.seconds for part in every)
    measured = sum(part.seconds for part in every if not part.why_not)
    ordered = tuple(sorted(lines, key=lambda line: -line.seconds))
    return SweepSliceResult(of.model, of.batch, of.sequence, seconds, measured / seconds, ordered)


def _line(name: str, text: str, parts: Iterable[tuple[SweepItemResult, float, float]]) -> SweepLineResult:
    found = list(parts)
    missing = sum(bool(part.why_not) for part, _, _ in found)
    how = "measured" if not missing else "roofline" if missing == len(found) else "both"
    seconds, flops, moved = (
        sum(column) for column in zip(*((part.seconds, flops, moved) for part, flops, moved in found))
    )
    return SweepLineResult(name, text, seconds, how, flops, moved)


def make_sweep_table(found: SweepResult, top: int = 3) -> str:
    """A table for people: one row for each slice, with its slowest lines."""
    head = Message(
        "line_profiler.swept",
        "one layer, forward and backward, on {device}: {workers:,|worker|workers} measured {measured} of "
        "{operations} distinct operations in {seconds:.0f} s. The average worker was busy for {busy:.0%} of that "
        "time. The times of the other operations are estimated from the roofline.",
        device=found.device,
        workers=found.workers,
        measured=sum(not item.why_not for item in found.items),
        operations=len(found.items),
        seconds=found.seconds,
        busy=found.busy,
    )
    columns = f"{'model':<6}{'batch':>6}{'sequence':>10}{'ms':>12}{'measured':>10}"
    legend = Message(
        "line_profiler.columns",
        "{columns}  slowest lines, with their shares of the slice's time (m: measured, r: estimated from the roofline, b: both)",
        columns=columns,
    )
    lines: list[str] = [head, legend]
    for one in found.slices:
        dear = ", ".join(f"{line.name} {line.seconds / one.seconds:.0%}{line.how[0]}" for line in one.lines[:top])
        lines.append(
            f"{one.model:<6}{one.batch:>6}{one.sequence:>10}{one.seconds * 1e3:>12,.1f}{one.measured_share:>10.0%}  {dear}"
        )
    return "\n".join(lines)


def read_free_memory_bytes() -> float:
    """Free bytes of the GPU, else of the machine (Linux)."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agents.line_profiler.sweep.sweep", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(SHAPES), help="shapes, from " + ", ".join(SHAPES))
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--sequences", default="1024,4096")
    parser.add_argument("--workers", type=int, default=1, help="number of processes on this machine, or of Ray actors")
    parser.add_argument("--ray", help="'auto' or a Ray cluster's address: the workers are actors of that cluster")
    parser.add_argument("--budget", type=float, default=300.0, help="the most seconds that each worker measures")
    parser.add_argument("--item-seconds", type=float, default=2.0, help="the most seconds for one operation")
    parser.add_argument(
        "--memory-gb",
        type=float,
        help="memory of one worker; default: half of the free memory, divided among the workers",
    )
    parser.add_argument("--kernels", type=Path, default=ROOT / "policies" / "kernels.yaml")
    parser.add_argument("--json", action="store_true", help="print sweep.json instead of the table")
    chosen = parser.parse_args(arguments)
    try:
        slices = parse_slices(chosen.models, chosen.batches, chosen.sequences)
        if chosen.ray:
            require_ray()  # before anything is measured
        workers = max(1, chosen.workers)
        memory = chosen.memory_gb * 1e9 if chosen.memory_gb else MEMORY_SHARE * read_free_memory_bytes() / workers
        limits = SweepLimits(memory, chosen.item_seconds, chosen.budget, max(1, torch.get_num_threads() // workers))
        start: Callable[[], Workers] = lambda: (
            RayActors(measure_sweep_item, workers, chosen.ray)
            if chosen.ray
            else ProcessWorkers(measure_sweep_item, workers)
        )
        kernels = load_choice(chosen.kernels, "cuda" if torch.cuda.is_available() else "cpu")
        report = lambda said: print(f"profile: {said}", file=sys.stderr, flush=True)
        found = measure_slices(
            slices, limits, start, workers, split_implementation_names(kernels[ATTENTION])[0], report
        )
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "sweep.json").write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    except (SweepError, KernelError, OSError) as error:
        print(format_error_with_code(error), file=sys.stderr)
        return 2
    print(json.dumps(asdict(found), indent=1) if chosen.json else make_sweep_table(found))
    return 0


def parse_slices(models: str, batches: str, sequences: str) -> list[LayerSlice]:
    """The slices of comma-separated lists. Raises: SweepError that names the wrong part and the allowed values."""
    for model in models.split(","):
        if model not in SHAPES:
            raise SweepError(
                "line_profiler.no_shape",
                "--models: there is no shape {shape!r}. The shapes are: {known}.",
                shape=model,
                known=list(SHAPES),
            )
    numbers = {}
    for option, given in (("--batches", batches), ("--sequences", sequences)):
        if not all(part.strip().isdigit() and int(part) > 0 for part in given.split(",")):
            raise SweepError(
                "line_profiler.not_numbers",
                "{option}: expected numbers above zero, separated by commas, not {value!r}.",
                option=option,
                value=given,
            )
        numbers[option] = [int(part) for part in given.split(",")]
    return [LayerSlice(*one) for one in product(models.split(","), numbers["--batches"], numbers["--sequences"])]


if __name__ == "__main__":
    stopping.end_on_sigterm(0.0)  # and what is being measured, with it
    sys.exit(main())
