"""Finds the source line that causes each operation: a dispatch mode that records every tensor operation of an eager step.

*Forward*: an operation belongs to the innermost frame in ``trainer/`` or ``kernels/``. *Backward*: an autograd node has the sequence
number that it got when its forward operation was dispatched, so the backward operation belongs to the line of that forward operation. A
hand-written backward has frames of its own: its operations belong to their own lines, and to the kernel op that made the node.

Recording takes longer than most operations, so their times come from another step (``stopwatch``).
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from agents.line_profiler.signature import OperationSignature, Samples, copy_nonrandom_inputs, make_operation_signature
from kernels.contract.registry import OPS, Ops

ROOT = Path(__file__).parents[2]
Line = tuple[str, int, str]  # file relative to the root, line, the kernel op it runs for ("" outside of any)


@dataclass(frozen=True)
class RecordedOperation:
    """One operation of the recorded step. Times are in seconds; those that the recorder measures are rough."""

    line: Line
    called_from: str  # the line that called the kernel op which it is part of, or empty
    backward: bool
    operation: str
    seconds: float
    host_s: float  # since the operation before it ended: Python and dispatch on the way to it
    flops: float
    bytes: float  # inputs read once, outputs written once; 0 for a view
    reads: tuple[int, ...]  # numbers of the storages it reads and writes; a view does neither
    writes: tuple[int, ...]
    signature: OperationSignature | None  # None: the operation cannot be called again outside the step
    among: tuple[
        Line, ...
    ] = ()  # of compiled code: the lines that the operation computes; empty if it is ``line`` alone
    graph: int = 0  # the call of compiled code that it belongs to, from 1 on; 0: it is eager


class GeneratedCode(Protocol):
    """What knows the source lines of generated code (``agents.line_profiler.compiled.CompiledGraphs``)."""

    def find_lines_at(self, file: str, number: int) -> tuple[Line, ...] | None:
        """The source lines of a line of generated code; None if the file is not generated code."""
        ...


class OperationRecorder(TorchDispatchMode):
    """Records every operation between ``__enter__`` and ``__exit__``, on the thread that entered.

    ``callers`` maps each line to the lines of ours that called it when it was first seen, innermost first. ``generated``: the compiled code of
    the step; the ops of a compiled step cannot be wrapped, so an op is then known by its folder.
    """

    def __init__(
        self, folders: tuple[str, ...] = ("trainer", "kernels"), generated: GeneratedCode | None = None
    ) -> None:
        super().__init__()
        self.generated = generated
        self.roots = tuple(f"{ROOT / folder}/" for folder in folders)
        self.events: list[RecordedOperation] = []
        self.samples: dict[OperationSignature, Samples] = {}
        self.callers: dict[Line, tuple[tuple[str, int], ...]] = {}
        self.op_calls: Counter[str] = Counter()
        self.op_arguments: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(
            Counter
        )  # op → its calls' arguments, as text
        self.current_op = self.current_call = ""
        self._by_sequence: dict[int, tuple[Line, str]] = {}
        self._where: dict[str, str | None] = {}  # co_filename → path relative to the root, None when it is not ours
        self._storages: dict[int, int] = {}  # address of a storage → its number
        self._made = 0
        self._calls = 0  # of compiled code
        self._last_call = ("", 0)  # file and line: later lines of the same file belong to the same call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code stays compiled while this mode is active."""
        return True

    def record_kernel(self, name: str, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a generated kernel, which no dispatch mode sees, and record it."""
        among, backward, graph = self._find_generated_lines(sys._getframe(1)) or ((), False, 0)
        began = time.perf_counter()
        out = kernel(*args, **kwargs)
        seconds = time.perf_counter() - began
        moved = float(sum(t.numel() * t.element_size() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)))
        line = among[0] if among else ("(compiled code)", 0, "")
        self.events.append(
            RecordedOperation(line, "", backward, name, seconds, 0.0, 0.0, moved, (), (), None, among or (line,), graph)
        )
        return out

    def _find_generated_lines(self, frame: FrameType | None) -> tuple[tuple[Line, ...], bool, int] | None:
        """(lines, True in the backward pass, number of the call) of the generated code above; None if there is none below our own code."""
        if self.generated is None:
            return None
        while frame is not None and self._ours(frame) is None:
            lines = self.generated.find_lines_at(frame.f_code.co_filename, frame.f_lineno)
            if lines is not None:
                # The frame itself is not kept: it would keep its tensors, and autograd copies a gradient that something else holds.
                file, number = self._last_call
                self._calls += file != frame.f_code.co_filename or frame.f_lineno <= number
                self._last_call = frame.f_code.co_filename, frame.f_lineno
                return lines, torch._C._current_graph_task_id() != -1, self._calls
            frame = frame.f_back
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if generated := self._find_generated_lines(sys._getframe(1)):
            (line, *_), call = generated[0], ""
            among, backward, graph = generated
        else:
            among, graph, self._last_call = (), 0, ("", 0)
            line, call, backward = self._locate(sys._getframe(1))
        signature = self._describe(func, args, kwargs)
        reads = () if is_view_or_empty(func) else self._numbers((args, kwargs))
        began = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - began
        writes = () if is_view_or_empty(func) else self._written(func, args, kwargs, out)
        moved = _bytes(args, kwargs, out, func)
        flops = _flops(func, args, kwargs, out)
        self.events.append(
            RecordedOperation(
                line, call, backward, str(func), seconds, 0.0, flops, moved, reads, writes, signature, among, graph
            )
        )
        return out

    def _describe(self, func: Any, args: Any, kwargs: Any) -> OperationSignature | None:
        try:
            signature = make_operation_signature(func, args, kwargs)
            if signature not in self.samples:
                self.samples[signature] = copy_nonrandom_inputs(args, kwargs)
        except (TypeError, RuntimeError):  # not comparable by value, or a tensor without a storage
            return None
        return signature

    def _numbers(self, tree: Any, fresh: bool = False) -> tuple[int, ...]:
        """Numbers of the storages of a tree's tensors. ``fresh``: the tensors are results of a call, so their storages get new numbers.
        An address may be that of a storage that was freed (weak references to storages would keep their memory)."""
        found = []
        for address in {t.untyped_storage()._cdata: None for t in tree_leaves(tree) if isinstance(t, Tensor)}:
            if fresh or address not in self._storages:
                self._storages[address] = self._made = self._made + 1
            found.append(self._storages[address])
        return tuple(found)

    def _written(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, ...]:
        if not func._schema.is_mutable:
            return self._numbers(out, fresh=True)
        given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return self._numbers([given.get(name) for name in written])

    def _locate(self, frame: FrameType | None) -> tuple[Line, str, bool]:
        """(the line, the line that called the kernel op, True in the backward pass)."""
        backward = torch._C._current_graph_task_id() != -1
        while frame is not None:
            if backward and frame.f_code.co_filename.endswith("torch/autograd/graph.py"):
                break  # none of our frames is inside the engine: the node names the line
            where = self._ours(frame)
            if where is not None:
                op, call = self._op_of_node() if backward else (self.current_op, self.current_call)
                if self.generated is not None:
                    op = self._op_of_folders(frame) or op
                line = (where, frame.f_lineno, op)
                if line not in self.callers:
                    self.callers[line] = self._above(frame)
                if not backward:
                    # Autograd makes an operation's node just before dispatching it: a new number is this operation's.
                    self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, (line, call))
                return line, call, backward
            frame = frame.f_back
        if backward and (caused_by := self._caused_by()) is not None:
            return (*caused_by, True)
        return ("(gradient accumulation)" if backward else "(outside)", 0, ""), "", backward

    def _caused_by(self) -> tuple[Line, str] | None:
        """The forward line that made the node which autograd is running, and the line that called its kernel op."""
        node = torch._C._current_autograd_node()
        return self._by_sequence.get(node._sequence_nr()) if node is not None else None

    def _op_of_node(self) -> tuple[str, str]:
        """(kernel op, line that called it) of a backward written by hand."""
        caused_by = self._caused_by()
        return (caused_by[0][2], caused_by[1]) if caused_by is not None else ("", "")

    def _op_of_folders(self, frame: FrameType | None) -> str:
        """The op whose folder the trainer entered, by the frames from the innermost one on; empty if they enter none."""
        op = ""
        while frame is not None:
            where = self._ours(frame)
            op = (find_op_of_file(where) if where else "") or op
            frame = frame.f_back
        return op

    def _ours(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._where:
            self._where[name] = str(Path(name).relative_to(ROOT)) if name.startswith(self.roots) else None
        return self._where[name]

    def _above(self, frame: FrameType) -> tuple[tuple[str, int], ...]:
        found = []
        above = frame.f_back
        while above is not None:
            where = self._ours(above)
            if where is not None:
                found.append((where, above.f_lineno))
            above = above.f_back
        return tuple(found)

    def wrap_ops(self, ops: Ops) -> Ops:
        """The ops, wrapped so that the operations inside an op are recorded with its name."""
        return replace(ops, **{name: self._watched(name, getattr(ops, name)) for name in OPS})

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            line, _, _ = self._locate(sys._getframe(1))
            outer = self.current_op, self.current_call
            self.current_op, self.current_call = name, f"{line[0]}:{line[1]}"
            self.op_calls[name] += 1
            self.op_arguments[name][describe_arguments(args)] += 1
            try:
                return function(*args)
            finally:
                self.current_op, self.current_call = outer

        return watched


def describe_arguments(args: Iterable[Any]) -> tuple[str, ...]:
    """The arguments of an op as text: a tensor by its kind, shape and strides, lists by their first tensor and length, other values as they are.

    >>> describe_arguments((torch.ones(2, 3).T, [torch.ones(4)] * 7, 1e-6))
    ('float32[3, 2] strides (1, 3)', '7 × float32[4] strides (1,)', '1e-06')
    """
    words = []
    for value in args:
        if isinstance(value, Tensor):
            words.append(
                f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {tuple(value.stride())}"
            )
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            words.append(f"{len(value)} × {describe_arguments(value[:1])[0]}")
        else:
            words.append(str(value)[:60])
    return tuple(words)


def find_op_of_file(file: str) -> str:
    """The op in whose folder a file is; empty if it is in none.

    >>> find_op_of_file("kernels/swiglu/cpp.py"), find_op_of_file("kernels/contract/op.py"), find_op_of_file("trainer/run.py")
    ('swiglu', '', '')
    """
    parts = file.split("/")
    return parts[1] if parts[0] == "kernels" and len(parts) > 2 and parts[1] in OPS else ""


def is_view_or_empty(func: Any) -> bool:
    """True if an operation moves no memory: it returns a view, or a tensor without values."""
    return func.is_view or func._overloadpacket in MOVE_NOTHING


def _bytes(args: Any, kwargs: Any, out: Any, func: Any) -> float:
    """The bytes that an operation moves if it reads each input once and writes each output once; 0 for a view."""
    if is_view_or_empty(func):
        return 0.0
    return float(sum(t.numel() * t.element_size() for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)))


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """The FLOPs of matrix products, attention and the native kernels (torch's FLOP registry and ours); 0 for all other operations."""
    if func._overloadpacket in MORE_FLOPS:
        return float(MORE_FLOPS[func._overloadpacket](*args))
    formula = flop_registry.get(func._overloadpacket) or flop_registry.get(func)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _grouped_mm_flops(a: Tensor, b: Tensor, *_: Any) -> int:
    """FLOPs of [M, K] × [E, K, N], each row times its group's matrix, or of [K, M] × [M, N], one product for each group of M."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention_flops(q_BHTK: Tensor, k_BHSK: Tensor, *_: Any) -> int:
    """FLOPs of two products over the whole square, as torch counts them for its other attention kernels."""
    return 4 * q_BHTK.numel() * k_BHSK.shape[-2]


def _attention_backward_flops(grad: Tensor, q_BHTK: Tensor, k_BHSK: Tensor, *_: Any) -> int:
    """FLOPs of five products, where the forward pass has two."""
    return 5 * _attention_flops(q_BHTK, k_BHSK) // 2


aten = torch.ops.aten
MOVE_NOTHING = frozenset((aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided))
MORE_FLOPS: dict[Any, Callable[..., int]] = {  # what torch's registry leaves out
    aten._grouped_mm: _grouped_mm_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
