"""``python -m agents.line_profiler --recipe R --kernels K --out DIR``: writes profile.json, profile.html and trace.json into
DIR and prints the table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.line_profiler.capture import ROOT, RecordedOperation
from agents.line_profiler.lines import PeakRates, find_phase_of_line, read_source_line
from agents.line_profiler.profile_schema import Profile, format_line_name
from agents.line_profiler.report.page import render_profile_page
from agents.line_profiler.session import (
    IMPLEMENTATIONS_S,
    ISOLATION_BUDGET_S,
    STEPS,
    ProfileSession,
    measure_profile,
)
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.message import format_error_with_code
from kernels.contract.registry import KernelError
from trainer.contract import stopping
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe


def write_profile_files(session: ProfileSession, folder: Path) -> None:
    """Write profile.json, profile.html and trace.json. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.json").write_text(session.profile.to_json(), encoding="utf-8")
    (folder / "trace.json").write_text(make_chrome_trace(session.profile, session.events), encoding="utf-8")
    (folder / "profile.html").write_text(render_profile_page(session.profile), encoding="utf-8")


ROWS = {"forward": 1, "backward": 2, "optimizer": 3, "data": 4}


def make_chrome_trace(profile: Profile, events: Sequence[RecordedOperation]) -> str:
    """The step as JSON that opens in Perfetto (ui.perfetto.dev) or chrome://tracing. It has one row each for forward, backward, optimiser and
    data. An event is named after its source line, and its arguments describe the operation.

    Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are those of the table. The
    profiler's own cost is subtracted, so that the events lie as close together as without the profiler.
    """
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
        row = "backward" if event.backward else find_phase_of_line(event.line)
        now += event.host_s
        about = {
            "operation": event.operation,
            "source": read_source_line(file, number),
            "shapes": str(event.signature) if event.signature else "",
            "host_us": round(event.host_s * 1e6, 3),
            "bytes": event.bytes,
            "flops": event.flops,
        }
        add(row, format_line_name(*event.line), event.seconds, about)
    return json.dumps({"traceEvents": made, "displayTimeUnit": "ms"})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agents.line_profiler", description="Time every line of a recipe's training step."
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "policies" / "recipes" / "demo.yaml")
    parser.add_argument("--kernels", type=Path, default=ROOT / "policies" / "kernels.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for profile.json, .html, trace.json")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to profile; the fastest counts")
    parser.add_argument(
        "--isolation",
        type=float,
        default=ISOLATION_BUDGET_S,
        help="seconds for timing single operations; 0: do not time them",
    )
    parser.add_argument(
        "--implementations",
        type=float,
        default=IMPLEMENTATIONS_S,
        help="seconds for timing the registered implementations of the slowest ops",
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs=2,
        metavar=("FLOP/S", "BYTES/S"),
        help="the best rates of this machine that were measured before; larger ones of now count",
    )
    parser.add_argument("--top", type=int, default=20, help="number of lines to print")
    parser.add_argument(
        "--no-compiled",
        action="store_true",
        help="profile the eager step of a recipe that compiles (compiling takes some seconds)",
    )
    parser.add_argument("--json", action="store_true", help="print profile.json instead of the table")
    chosen = parser.parse_args(arguments)
    keep_freed_memory()  # as the trainer does: page faults would drown what is measured
    try:
        recipe = Recipe.load(chosen.recipe)
        progress = lambda text: print(f"profile: {text}", file=sys.stderr, flush=True)
        session = measure_profile(
            recipe,
            chosen.kernels,
            steps=max(1, chosen.steps),
            measure_recipe_step=not chosen.no_compiled,
            isolate=chosen.isolation > 0,
            isolation_budget_s=chosen.isolation,
            best=PeakRates(*chosen.rates) if chosen.rates else None,
            implementations_s=chosen.implementations,
            report=progress,
        )
        write_profile_files(session, chosen.out)
    except (TrainerError, KernelError, OSError) as error:
        print(format_error_with_code(error), file=sys.stderr)
        return 2
    if chosen.json:
        print(session.profile.to_json())
    else:
        from rich.console import Console  # it may be missing on a bare GPU image

        from agents.line_profiler.report.report import make_profile_table

        Console().print(make_profile_table(session.profile, chosen.top))
    return 0


if __name__ == "__main__":
    stopping.end_on_sigterm(0.0)  # there is nothing to keep, and compilers are among its children
    sys.exit(main())
