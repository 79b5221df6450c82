"""Records which of a patch's lines are executed, and the results of their conditions. Runs inside the sandbox, in the process of the patch's code.

Drivers load this file by its path. The judge imports this file for ``ExecutedCode``. The candidate's code shares the process and could forge the
record, so the record can hold a patch but never promote it.

Of a function that torch.compile traced, the traced parts count as executed. A Triton kernel counts as executed as a whole once it was launched.

Executed instructions say nothing about a condition that is used as a number: ``x * (d_model >= 100)`` is executed at every width. So changed lines
are compiled with a call around each condition (``watch_conditions.compile_watched``), which records the results.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

RECORDER_FILE = Path(__file__)
WATCH_FILE = RECORDER_FILE.with_name("watch_conditions.py")
NATIVE_LIBRARY = re.compile(r"/factory-kernels[^/\s]*/([\w.]+)-[0-9a-f]{32}\.so")  # kernels.native.load_library
Instruction = tuple[str, int]  # (name of a code object by ``make_code_object_name``, offset in it)
SourceSpan = tuple[int, int, int, int]  # first line and column, last line and column, as ``dis`` counts them
ConditionResult = tuple[
    int, str
]  # (number of a condition of its file, 'true', 'false', 'data', or the number of a chosen argument)


def make_code_object_name(code: CodeType) -> str:
    """Return a name that is the same in every process for the same code at the same place. Functions on the same line have different names."""
    made = zlib.crc32(code.co_code + repr(list(code.co_positions())).encode())
    return f"{code.co_qualname}:{code.co_firstlineno}:{made:08x}"


def iterate_code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield a module's code object and all code objects inside it."""
    pending = [code]
    while pending:
        code = pending.pop()
        yield code
        pending += [part for part in code.co_consts if isinstance(part, CodeType)]


KINDS = ("lines", "instructions", "traced", "launched", "conditions")


def list_native_libraries() -> list[str]:
    """Return the names of the C++ libraries of ``kernels.native`` that this process has loaded: ``swiglu``, or ``swiglu.fused`` for a second file."""
    try:
        return sorted(set(NATIVE_LIBRARY.findall(Path("/proc/self/maps").read_text())))
    except OSError:
        return []


@dataclass
class ExecutedCode:
    """The code that was executed, by path in the worktree.

    lines: line numbers. instructions: the executed instructions of functions with watched lines. traced: the places in the watched files that
    torch.compile traced. launched: (first line, last line) of each launched Triton kernel. conditions: the results of the conditions in watched
    lines. native: the names of the loaded C++ libraries of ``kernels.native``.
    """

    lines: dict[str, set[int]] = field(default_factory=dict)
    instructions: dict[str, set[Instruction]] = field(default_factory=dict)
    traced: dict[str, set[SourceSpan]] = field(default_factory=dict)
    launched: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    conditions: dict[str, set[ConditionResult]] = field(default_factory=dict)
    native: set[str] = field(default_factory=set)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Add a record of ``ExecutionRecorder.to_json``. Raises: KeyError, TypeError, ValueError for a malformed record."""
        for path, lines in record["lines"].items():
            self.lines.setdefault(path, set()).update(int(line) for line in lines)
        for path, parts in record["instructions"].items():
            self.instructions.setdefault(path, set()).update((str(name), int(at)) for name, at in parts)
        for path, places in record["traced"].items():
            self.traced.setdefault(path, set()).update((int(a), int(b), int(c), int(d)) for a, b, c, d in places)
        for path, spans in record["launched"].items():
            self.launched.setdefault(path, set()).update((int(first), int(last)) for first, last in spans)
        for path, results in record["conditions"].items():
            self.conditions.setdefault(path, set()).update((int(number), str(result)) for number, result in results)
        self.native.update(str(name) for name in record.get("native", ()))

    def merge_executed_code(self, other: ExecutedCode) -> None:
        self.add_record({name: getattr(other, name) for name in (*KINDS, "native")})


def _load_watch_module() -> Any:
    """Load ``watch_conditions`` as a new module. torch.compile finds the globals of a traced function by the name of its module."""
    name = f"{WATCH_FILE.stem}_of_recorder"
    spec = importlib.util.spec_from_file_location(name, WATCH_FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ExecutionRecorder:
    """Traces the functions with watched lines, and no other code. ``watched``: path below ``root`` → numbers of lines."""

    def __init__(self, root: str, watched: Mapping[str, Sequence[int]]) -> None:
        self.root = root
        self.watch = _load_watch_module()
        self.watched = {f"{root}/{path}": set(lines) for path, lines in watched.items()}
        self.precise = {path: set(self._names(path)) for path in self.watched}
        self.seen: dict[
            int, tuple[CodeType, str]
        ] = {}  # by id, because hashing code is slow: (code, name; '' if the code differs from the file)
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.instructions: dict[str, set[Instruction]] = defaultdict(set)
        self.traced: dict[str, set[SourceSpan]] = defaultdict(set)
        self.launched: dict[str, set[tuple[int, int]]] = defaultdict(set)

    @property
    def conditions(self) -> dict[str, set[ConditionResult]]:
        results: dict[str, set[ConditionResult]] = self.watch.RESULTS
        return {f"{self.root}/{path}": found for path, found in results.items()}

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def watch_imports(self) -> None:
        """From now on, compile watched files so that they record the results of their conditions."""
        self.watch.install()
        loader = importlib.machinery.SourceFileLoader
        get_code = loader.get_code

        def watched(of: Any, name: str) -> CodeType | None:
            return self._compile(of.path) if of.path in self.watched else get_code(of, name)

        loader.get_code = watched  # type: ignore[method-assign, assignment]

    def _compile(self, path: str) -> CodeType:
        text, relative = Path(path).read_bytes(), os.path.relpath(path, self.root)
        code: CodeType = self.watch.compile_watched(text, relative, self.watched[path], path)[0]
        return code

    def _names(self, path: str) -> Iterator[str]:
        """Yield the names of a file's code objects that have watched lines; nothing if the file does not compile."""
        try:
            compiled = self._compile(path)
        except (OSError, SyntaxError, ValueError):
            return
        for code in iterate_code_objects(compiled):
            lines = [line for line, last, *_ in code.co_positions() if line is not None]
            if lines and self.watched[path] & set(range(min(lines), max(lines) + 1)):
                yield make_code_object_name(code)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        kinds = {name: getattr(self, name) for name in KINDS}
        by_kind: dict[str, Any] = {
            name: {os.path.relpath(path, self.root): sorted(found) for path, found in by_path.items()}
            for name, by_path in kinds.items()
        }
        return by_kind | {"native": list_native_libraries()}

    def watch_compiler(self) -> None:
        """Also record the code that torch.compile and Triton execute instead of Python. Imports torch."""
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator

        self.watch.know_compiler()
        step, note = Translator.step, self.watch.note_traced_call

        def recorded(translator: Any) -> bool:
            code: CodeType = translator.f_code
            number = translator.instruction_pointer
            if number == 0:
                note(code, translator.symbolic_locals)
            if code.co_filename in self.precise and number is not None:
                at = translator.instructions[number].positions
                if at is not None and None not in (at.lineno, at.col_offset, at.end_lineno, at.end_col_offset):
                    self.lines[code.co_filename].add(at.lineno)
                    self.traced[code.co_filename].add((at.lineno, at.col_offset, at.end_lineno, at.end_col_offset))
            return step(translator)

        Translator.step = recorded  # type: ignore[method-assign,assignment]
        try:
            from triton.runtime.interpreter import InterpretedFunction
            from triton.runtime.jit import JITFunction
        except ImportError:
            return
        for kind in (InterpretedFunction, JITFunction):
            kind.run = self._recording(kind.run)

    def _recording(self, run: Any) -> Any:
        def recorded(function: Any, *arguments: Any, **settings: Any) -> Any:
            if not settings.get("warmup"):
                code = function.fn.__code__
                if code.co_filename in self.watched:
                    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
                    self.launched[code.co_filename].add((code.co_firstlineno, last))
            return run(function, *arguments, **settings)

        return recorded

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        name = code.co_filename
        if name not in self.precise:
            return None
        if id(code) not in self.seen:
            own = make_code_object_name(code)
            self.seen[id(code)] = code, own if own in self.precise[name] else ""
        if not self.seen[id(code)][1]:
            return None  # without watched lines; or torch.compile runs its own code under the function's name
        frame.f_trace_opcodes = True
        self.lines[name].add(frame.f_lineno)
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event == "opcode":
            self.instructions[code.co_filename].add((self.seen[id(code)][1], frame.f_lasti))
        elif event == "line":
            self.lines[code.co_filename].add(frame.f_lineno)
        return self._instruction
