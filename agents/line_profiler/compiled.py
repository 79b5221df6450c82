"""Finds the source lines of compiled code: which lines each generated kernel computes, and when it runs.

torch.compile turns a block into generated Python, which calls generated kernels (C++ or Triton) and ordinary operations. Inductor can record,
for each of these calls, the stack traces of the source lines that it computes (``trace.provenance_tracking_level``). Generated kernels do not
pass torch's dispatcher, so no dispatch mode sees them. ``watch_compiled_graphs`` therefore wraps each of them.

A fused kernel computes several lines. ``divide_among_lines`` divides its time among them in the proportion in which their eager operations take
time, because nothing measures a part of a kernel.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.line_profiler.capture import ROOT, Line, RecordedOperation, find_op_of_file, is_view_or_empty

UNNAMED: Line = ("(compiled code)", 0, "")  # generated code for which inductor recorded no line of ours
BETWEEN: Line = ("(around compiled code)", 0, "")  # guards, and the calls into compiled code and out of it
HANDLE = re.compile(r"\[Provenance debug handles\] (\S+:\d+)")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
BASIC = 2  # the level of provenance that records stack traces and leaves out inductor's passes over the graph

Watcher = Callable[
    [str, Callable[..., Any], Any, Any], Any
]  # (kernel's name, kernel, args, kwargs) → what the kernel returns


@dataclass
class CompiledGraphs:
    """The generated code of a process. ``watcher`` runs the kernels in place of the generated code; None: they run as always."""

    watcher: Watcher | None = None
    folders: tuple[str, ...] = ("trainer", "kernels")
    _places: dict[str, tuple[list[int], list[tuple[Line, ...]]]] = field(
        default_factory=dict
    )  # file → where calls begin, and their lines

    def add_graph(self, graph: Any) -> None:
        """Read a compiled graph (``CompiledFxGraph``), and wrap its kernels."""
        names = getattr(graph.current_callable, "__globals__", None)
        file = names.get("__file__") if names else None
        if names is None or file is None:
            return
        traces: dict[str, list[str]] = json.loads(graph.inductor_provenance_stack_traces_str or "{}")
        numbers, lines = [], []
        for number, text in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
            if found := HANDLE.search(text):
                numbers.append(number)
                lines.append(self.find_lines(traces.get(found[1], [])))
                kernel = found[1].rpartition(":")[0]
                if kernel in names and not isinstance(names[kernel], _WatchedKernel):
                    names[kernel] = _WatchedKernel(kernel, names[kernel], self)
        self._places[file] = numbers, lines

    def find_lines(self, traces: Iterable[str]) -> tuple[Line, ...]:
        """The lines of ours in which the traces end, each once. A line's op is the folder of ``kernels/`` that the trace enters first."""
        found: dict[Line, None] = {}
        for trace in traces:
            inner, op = None, ""
            for name, number in FRAME.findall(trace):
                path = Path(name)
                if (
                    not path.is_relative_to(ROOT)
                    or (file := str(path.relative_to(ROOT))).split("/")[0] not in self.folders
                ):
                    continue
                inner, op = (file, int(number)), op or find_op_of_file(file)
            if inner is not None:
                found[*inner, op] = None
        return tuple(found)

    def find_lines_at(self, file: str, number: int) -> tuple[Line, ...] | None:
        """The lines that the generated call at a line of generated code computes; None if the file is not generated code."""
        if file not in self._places:
            return None
        numbers, lines = self._places[file]
        position = bisect_right(numbers, number) - 1
        return (lines[position] if position >= 0 else ()) or (UNNAMED,)

    @contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        """Let ``watcher`` run the generated kernels within the block."""
        self.watcher = watcher
        try:
            yield
        finally:
            self.watcher = None


class _WatchedKernel:
    """A generated kernel: a function (C++), or an object with ``run`` (Triton)."""

    def __init__(self, name: str, kernel: Any, graphs: CompiledGraphs) -> None:
        self.name, self.kernel, self.graphs = name, kernel, graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = self.graphs.watcher
        return self.kernel(*args, **kwargs) if watcher is None else watcher(self.name, self.kernel, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        watcher = self.graphs.watcher
        return (
            self.kernel.run(*args, **kwargs) if watcher is None else watcher(self.name, self.kernel.run, args, kwargs)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


@contextmanager
def watch_compiled_graphs() -> Iterator[CompiledGraphs]:
    """Record the lines of all graphs that torch.compile makes in the block. Graphs are made anew: a cached one has the line numbers of the checkout
    that made it. (The compiled C++ and Triton code still comes from its caches.)"""
    from torch._functorch import config as autograd_config
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    graphs = CompiledGraphs()
    finish = CompiledFxGraph.post_compile

    def finish_and_read(graph: Any, *args: Any, **kwargs: Any) -> None:
        graphs.add_graph(graph)
        finish(graph, *args, **kwargs)

    CompiledFxGraph.post_compile = finish_and_read  # type: ignore[method-assign, assignment]
    try:
        with (
            config.patch(
                {"trace.provenance_tracking_level": BASIC, "fx_graph_cache": False, "fx_graph_remote_cache": False}
            ),
            autograd_config.patch({"enable_autograd_cache": False}),
        ):
            yield graphs
    finally:
        CompiledFxGraph.post_compile = finish  # type: ignore[method-assign]


def divide_among_lines(
    events: Sequence[RecordedOperation], eager: Iterable[RecordedOperation]
) -> list[RecordedOperation]:
    """The events of a compiled step, each of one line: an event of several lines becomes a part for each of them.

    ``eager``: the timed operations of the eager step. The lines of an ordinary operation, such as a matrix product, are those that call it in the
    eager step too. A fused kernel's time is divided by the eager time of all other operations of its lines.
    """
    whole = {packet_of(event.operation) for event in events if event.among and event.signature is not None}
    called: defaultdict[str, set[Line]] = defaultdict(set)
    weights: Counter[tuple[Line, bool]] = Counter()
    for event in eager:
        called[packet_of(event.operation)].add(event.line)
        moves_nothing = event.signature is not None and is_view_or_empty(event.signature.func)
        if packet_of(event.operation) not in whole and not moves_nothing:
            weights[event.line, event.backward] += event.seconds  # type: ignore[assignment]
    found = []
    for event in events:
        among = event.among or (event.line,)
        if event.signature is not None and len(among) > 1:
            among = tuple(line for line in among if line in called[packet_of(event.operation)]) or among
        shares = [float(weights[line, event.backward]) for line in among]
        total = sum(shares)
        for line, share in zip(among, shares):
            part = share / total if total else 1 / len(among)
            if part:
                amounts = {name: getattr(event, name) * part for name in ("seconds", "host_s", "flops", "bytes")}
                found.append(replace(event, line=line, among=(), **amounts))
    return found


def separate_calls(events: Sequence[RecordedOperation]) -> list[RecordedOperation]:
    """The events, with the time between an eager and a compiled operation, or between two compiled graphs, as events of the line ``BETWEEN``."""
    found: list[RecordedOperation] = []
    before = 0
    for event in events:
        if event.graph != before and event.host_s:
            found.append(replace(
                event, line=BETWEEN, among=(), operation="call", seconds=0.0, flops=0.0, bytes=0.0, reads=(), writes=(), signature=None
            ))  # fmt: skip
            event = replace(event, host_s=0.0)
        before = event.graph
        found.append(event)
    return found


def packet_of(operation: str) -> str:
    """An operation's name without its overload.

    >>> packet_of("aten.mm.out"), packet_of("cpp_fused_add_0")
    ('aten.mm', 'cpp_fused_add_0')
    """
    return operation.rpartition(".")[0] or operation
