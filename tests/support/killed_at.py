"""Kills a call at one of its lines, in its own process: without finally, flush or rollback."""

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
    """Return how many lines of the files with these names a call executes."""
    return _traced(call, ours, 0)


def killed_at(line: int, call: Call, ours: Collection[str]) -> None:
    """Kill a call at its ``line``-th line of these files. The call must open its own ledger: SQLite connections do not survive a fork."""
    child = os.fork()
    if child == 0:
        for engine in [known for known in gc.get_objects() if isinstance(known, sa.Engine)]:
            engine.dispose(close=False)
        _traced(call, ours, line)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
