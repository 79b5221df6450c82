"""The step as a Chrome trace: opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are those of the
table: the cost of watching is subtracted, so that the events lie as close as in a step that nothing watches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agents.line_profiler.capture import Event
from agents.line_profiler.lines import phase, source
from agents.line_profiler.table import Profile, line_name

ROWS = {"forward": 1, "backward": 2, "optimizer": 3, "data": 4}


def chrome_trace(profile: Profile, events: Sequence[Event]) -> str:
    """JSON text. One row each for forward, backward, optimiser and data; names are lines, arguments the operations."""
    made: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
        for name, number in ROWS.items()
    ]
    now = 0.0

    def add(row: str, name: str, seconds: float, arguments: dict[str, Any]) -> None:
        nonlocal now
        times = {"ts": round(now * 1e6, 3), "dur": round(seconds * 1e6, 3)}
        made.append({"ph": "X", "name": name, "pid": 1, "tid": ROWS[row], **times, "args": arguments})
        now += seconds

    for line in profile.lines:
        if line.phase == "data":
            add("data", line.name, line.seconds, {"source": line.source})
    for event in events:
        file, number, _ = event.line
        row = "backward" if event.backward else phase(event.line)
        now += event.host_s
        about = {
            "operation": event.operation,
            "source": source(file, number),
            "shapes": str(event.signature) if event.signature else "",
            "host_us": round(event.host_s * 1e6, 3),
            "bytes": event.bytes,
            "flops": event.flops,
        }
        add(row, line_name(*event.line), event.seconds, about)
    return json.dumps({"traceEvents": made, "displayTimeUnit": "ms"})
