"""``python -m agents.line_profiler --recipe R --kernels K --out DIR``: writes profile.json, profile.html and trace.json into
DIR and prints the table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agents.line_profiler.capture import ROOT
from agents.line_profiler.report.page import html
from agents.line_profiler.session import ISOLATION_BUDGET_S, STEPS, ProfileSession, measure
from agents.line_profiler.trace import chrome_trace
from kernels.contract.host_memory import keep_freed_memory
from kernels.contract.registry import KernelError
from trainer.contract import stopping
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe


def write(session: ProfileSession, folder: Path) -> None:
    """profile.json, profile.html and trace.json. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.json").write_text(session.profile.to_json(), encoding="utf-8")
    (folder / "trace.json").write_text(chrome_trace(session.profile, session.events), encoding="utf-8")
    (folder / "profile.html").write_text(html(session.profile), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agents.line_profiler", description="Time every line of a recipe's training step."
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "policies" / "recipes" / "demo.yaml")
    parser.add_argument("--kernels", type=Path, default=ROOT / "policies" / "kernels.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for profile.json, .html, trace.json")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to profile; the fastest counts")
    parser.add_argument(
        "--isolation", type=float, default=ISOLATION_BUDGET_S, help="seconds for operations alone; 0 leaves them out"
    )
    parser.add_argument("--top", type=int, default=20, help="lines to print")
    parser.add_argument(
        "--no-compiled",
        action="store_true",
        help="leave out the time of the compiled step (it takes some seconds to compile)",
    )
    parser.add_argument("--json", action="store_true", help="print profile.json instead of the table")
    chosen = parser.parse_args(arguments)
    keep_freed_memory()  # as the trainer does: page faults would drown what is measured
    try:
        recipe = Recipe.load(chosen.recipe)
        progress = lambda text: print(f"profile: {text}", file=sys.stderr, flush=True)
        session = measure(
            recipe,
            chosen.kernels,
            steps=max(1, chosen.steps),
            measure_recipe_step=not chosen.no_compiled,
            isolate=chosen.isolation > 0,
            isolation_budget_s=chosen.isolation,
            report=progress,
        )
        write(session, chosen.out)
    except (TrainerError, KernelError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.json:
        print(session.profile.to_json())
    else:
        from rich.console import Console  # it may be missing on a bare GPU image

        from agents.line_profiler.report.report import table

        Console().print(table(session.profile, chosen.top))
    return 0


if __name__ == "__main__":
    stopping.end_on_sigterm(0.0)  # there is nothing to keep, and compilers are among its children
    sys.exit(main())
