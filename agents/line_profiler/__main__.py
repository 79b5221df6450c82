"""``python -m agents.line_profiler --recipe R --kernels K --out DIR``: writes DIR/profile.json and prints the table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agents.line_profiler.capture import ROOT
from agents.line_profiler.table import profile
from kernels.registry import KernelError
from trainer.errors import TrainerError
from trainer.recipe import Recipe


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agents.line_profiler", description="Time every line of a recipe's training step."
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "policies" / "recipes" / "demo.yaml")
    parser.add_argument("--kernels", type=Path, default=ROOT / "policies" / "kernels.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder that profile.json is written to")
    parser.add_argument("--steps", type=int, default=2, help="steps to profile")
    parser.add_argument("--top", type=int, default=20, help="lines to print")
    parser.add_argument(
        "--no-compiled",
        action="store_true",
        help="leave out the time of the compiled step (it takes some seconds to compile)",
    )
    parser.add_argument("--json", action="store_true", help="print profile.json instead of the table")
    chosen = parser.parse_args(arguments)
    try:
        recipe = Recipe.load(chosen.recipe)
        progress = lambda text: print(f"profile: {text}", file=sys.stderr, flush=True)
        found = profile(
            recipe,
            chosen.kernels,
            steps=max(1, chosen.steps),
            measure_recipe_step=not chosen.no_compiled,
            report=progress,
        )
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "profile.json").write_text(found.to_json(), encoding="utf-8")
    except (TrainerError, KernelError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.json:
        print(found.to_json())
    else:
        from agents.line_profiler.report import show  # rich may be missing on a bare GPU image

        show(found, top=chosen.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
