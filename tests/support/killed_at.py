"""A call that the kernel kills at one of its lines, in a process of its own: no finally, no flush, no rollback."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import sqlalchemy as sa

Call = Callable[[], object]


def _traced(call: Call, ours: Collection[str], limit: int) -> int:
    seen = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal seen
        if Path(frame.f_code.co_filename).name not in ours or "factory" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen += 1
            if seen == limit:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return seen


def lines_run(call: Call, ours: Collection[str]) -> int:
    """How many lines of the files of these names a call runs."""
    return _traced(call, ours, 0)


def killed_at(line: int, call: Call, ours: Collection[str]) -> None:
    """Kill a call at the so-many-th of them. It opens its own ledger: SQLite connections must not be used across a fork."""
    child = os.fork()
    if child == 0:
        for engine in [known for known in gc.get_objects() if isinstance(known, sa.Engine)]:
            engine.dispose(close=False)
        _traced(call, ours, line)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
