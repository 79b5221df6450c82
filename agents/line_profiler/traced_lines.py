"""A line tracer: how long, and how often, a block of Python executes each of our lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from agents.line_profiler.capture import ROOT, Line

COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # frames of their own before Python 3.12


@contextmanager
def traced_lines(
    folders: tuple[str, ...] = ("trainer",), op: Callable[[], str] = lambda: ""
) -> Iterator[dict[Line, list[float]]]:
    """Time every line of ours that this thread executes in the block: line → [seconds, times entered].

    A line's time excludes that of our lines which it calls. ``op`` returns the kernel op that is running.
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
