"""Which source line causes which time: a dispatch mode that times every tensor operation of an eager step.

*Forward*: an operation belongs to the innermost frame in ``trainer/`` or ``kernels/``. *Backward*: the node that
autograd runs carries the
sequence number it got in the forward pass, at the moment its operation was dispatched; that operation's line caused
it. A hand-written
backward has frames of its own and keeps them. Regions through torch.compile cannot be seen into: their call, and
their backward node, are
timed whole and belong to the line that calls them. *Data* lines are timed by a line tracer and scaled to the
untraced time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kernels.registry import Ops

ROOT = Path(__file__).parents[2]
Line = tuple[str, int, str]  # file relative to the root, line, the kernel op it runs for ("" outside of any)


@dataclass
class LineTime:
    """What one line did, summed over the profiled steps."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    calls: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)


class Recorder(TorchDispatchMode):
    """Times every operation between ``__enter__`` and ``__exit__``, on the thread that entered."""

    def __init__(
        self, folders: tuple[str, ...] = ("trainer", "kernels"), synchronize: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.roots = tuple(f"{ROOT / folder}/" for folder in folders)
        self.synchronize = synchronize
        self.lines: defaultdict[Line, LineTime] = defaultdict(LineTime)
        self.op_calls: Counter[str] = Counter()
        self.current_op = ""
        self.operations = 0
        self._by_sequence: dict[int, Line] = {}
        self._where: dict[str, str | None] = {}  # co_filename → path relative to the root, None when it is not ours
        self.seen_s = 0.0  # of operations seen so far: regions that hide some subtract it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line, backward = self._locate(sys._getframe(1))
        began = time.perf_counter()
        out = func(*args, **kwargs)
        if self.synchronize:
            self.synchronize()
        spent = time.perf_counter() - began
        self.seen_s += spent
        self.operations += 1
        entry = self.lines[line]
        if backward:
            entry.backward_s += spent
        else:
            entry.forward_s += spent
            entry.calls += 1
        entry.operations[str(func)] += 1
        entry.bytes += _bytes(args, kwargs, out, func)
        formula = flop_registry.get(func._overloadpacket) or flop_registry.get(func)
        if formula is not None:
            entry.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _locate(self, frame: FrameType | None) -> tuple[Line, bool]:
        backward = torch._C._current_graph_task_id() != -1
        while frame is not None:
            name = frame.f_code.co_filename
            if backward and name.endswith("torch/autograd/graph.py"):
                break  # nothing of ours runs inside the engine: the node says whose it is
            if name not in self._where:
                ours = name.startswith(self.roots)
                self._where[name] = str(Path(name).relative_to(ROOT)) if ours else None
            where = self._where[name]
            if where is not None:
                line = (where, frame.f_lineno, self.current_op)
                if not backward:
                    # Autograd makes an operation's node just before dispatching it: the newest number is this one's,
                    # if it is new.
                    self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, line)
                return line, backward
            frame = frame.f_back
        if backward:
            node = torch._C._current_autograd_node()
            if node is not None and node._sequence_nr() in self._by_sequence:
                return self._by_sequence[node._sequence_nr()], True
        return ("(gradient accumulation)" if backward else "(outside)", 0, ""), backward

    def watch(self, ops: Ops) -> Ops:
        """The same ops, told apart: what runs inside of one is marked with its name, and what is hidden from the
        mode is timed whole."""
        return replace(ops, **{f.name: self._watched(f.name, getattr(ops, f.name)) for f in fields(ops)})

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        opaque = hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "get_compiler_config")

        def watched(*args: Any) -> Any:
            outer, self.current_op = self.current_op, name
            self.op_calls[name] += 1
            line, _ = self._locate(sys._getframe(1))
            seen, began = self.seen_s, time.perf_counter()
            try:
                out = function(*args)
            finally:
                self.current_op = outer
            if opaque:
                hidden = time.perf_counter() - began - (self.seen_s - seen)
                self.lines[line].forward_s += hidden
                self.seen_s += hidden
                self.lines[line].calls += 1
                self.lines[line].operations["compiled region"] += 1
                first = out[0] if isinstance(out, tuple) else out
                self._watch_backward(first, line)
            return out

        return watched

    def _watch_backward(self, out: Tensor, line: Line) -> None:
        node = out.grad_fn
        if node is None or "Compiled" not in node.name():
            return
        started: list[tuple[float, float]] = []
        node.register_prehook(lambda gradients: started.append((time.perf_counter(), self.seen_s)))

        def finished(*_: Any) -> None:
            began, seen = started.pop()
            hidden = time.perf_counter() - began - (self.seen_s - seen)
            self.lines[line].backward_s += hidden
            self.seen_s += hidden

        node.register_hook(finished)


def _bytes(args: Any, kwargs: Any, out: Any, func: Any) -> float:
    """Read once and written once; views move nothing."""
    if func.is_view:
        return 0.0
    return float(sum(t.numel() * t.element_size() for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)))


def mode_overhead(calls: int = 2000) -> float:
    """Seconds that the mode adds to one operation, outside of the time it records: it slows the profiled step, not
    the table."""
    x = torch.zeros(1)
    for _ in range(200):
        x.add_(0)
    began = time.perf_counter()
    for _ in range(calls):
        x.add_(0)
    plain = time.perf_counter() - began
    recorder = Recorder()
    began = time.perf_counter()
    with recorder:
        for _ in range(calls):
            x.add_(0)
    return max(0.0, (time.perf_counter() - began - plain) / calls)


@contextmanager
def traced_lines(folders: tuple[str, ...] = ("trainer",)) -> Iterator[dict[Line, list[float]]]:
    """Time every line of ours that this thread executes in the block: line → [seconds, times]. A line's callees of
    ours are their own lines'."""
    roots = tuple(f"{ROOT / folder}/" for folder in folders)
    found: dict[Line, list[float]] = {}
    last: list[Any] = [None, 0.0]

    def settle(now: float) -> None:
        if last[0] is not None:
            entry = found.setdefault(last[0], [0.0, 0.0])
            entry[0] += now - last[1]
            entry[1] += 1

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        settle(time.perf_counter())
        if event == "line":
            last[0] = (str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_lineno, "")
        elif event == "return":
            back = frame.f_back
            ours = back is not None and back.f_code.co_filename.startswith(roots)
            last[0] = (
                (str(Path(back.f_code.co_filename).relative_to(ROOT)), back.f_lineno, "") if ours and back else None
            )
        last[1] = time.perf_counter()
        return local

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(roots) else None

    assert threading.current_thread() is threading.main_thread() or sys.gettrace() is None
    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield found
    finally:
        sys.settrace(before)
