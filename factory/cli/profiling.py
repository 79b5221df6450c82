"""The command ``factory profile``: times every line of the training step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.cli.app import DEFAULT, JsonOption, WorkspaceOption, app, open_plant
from factory.core.errors import InputError

if TYPE_CHECKING:
    from factory.code_loop.profiling import SweepOptions
    from factory.core.console import Terminal
    from factory.core.progress import SILENT


@app.command(
    help="""Time every line of the training step: forward, backward (counted at the forward line that caused it), optimiser and data.

The step runs as the recipe says: compiled if the recipe compiles. The time of a fused kernel is divided among its lines.
Shows the slowest lines with their time, calls, share of the step, share of the roofline, and bound (compute, memory, launch or
host). The command also names lines that could be fused or could overlap, and compares the sum of the lines with the step's own
time, and those of the eager step with torch.profiler. Every operation is also timed outside the step: 10 warm-ups, 100 calls, median.
In a workspace, a line says how many ops and files are offered to proposers, with their range over the last profiles of this commit.

The command writes three files. profile.json is for programs; agents/line_profiler/profile_schema.py has its schema. profile.html shows the
source with a heat column, a graph and the roofline, and opens offline. trace.json opens at ui.perfetto.dev. In a workspace the files
are in reports/profiles/ and among the artifacts of an MLflow run. Without a workspace, this checkout's code is profiled into --out.

First run:  factory profile --recipe demo --out profile      (about half a minute on two cores)

With --sweep, one layer of the shapes 7b, 29b, 375b and 1t is profiled at every batch and sequence length. The last two shapes have
experts. Each different operation is measured once, if it fits in memory and time. The others are estimated from the roofline.
Every line shows whether it was measured or estimated. Local processes (--workers) or the actors of a Ray cluster (--ray) share
the work.

  factory profile --sweep --models 7b,375b --batches 1,4 --sequences 1024,4096 --workers 2"""
)
def profile(
    where: WorkspaceOption = DEFAULT,
    recipe: Annotated[
        str | None,
        typer.Option(help="A recipe's name or file (default: the workspace's own, or 'demo' without a workspace)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the files. The command then profiles this checkout, not a workspace."),
    ] = None,
    alone: Annotated[
        float | None, typer.Option(min=0, help="Seconds to spend on timing single operations; 0: do not time them.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Profile layers of large model shapes instead of a recipe's step.")
    ] = False,
    models: Annotated[str | None, typer.Option(help="Shapes of a sweep, separated by commas: 7b,29b,375b,1t.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes of a sweep, separated by commas.")] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequence lengths of a sweep, separated by commas.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes, or Ray actors, of a sweep.")] = None,
    ray: Annotated[str | None, typer.Option(help="Run a sweep on a Ray cluster: 'auto' or its address.")] = None,
    budget: Annotated[float | None, typer.Option(min=1, help="Total seconds of measuring in a sweep.")] = None,
    as_json: JsonOption = False,
) -> None:
    from factory.code_loop.profiling import ProfileOptions, SweepOptions, profile_checkout
    from factory.code_loop.profiling import profile_live_code as profile_step
    from factory.core.console import Terminal
    from factory.show.unshown_items import show_unshown_items

    options = ProfileOptions(recipe, alone)
    of_sweep = SweepOptions(models, batches, sequences, workers, ray, budget)
    terminal = Terminal()
    if sweep:
        _sweep(out or Path("profile"), of_sweep, terminal, as_json)
        return
    if of_sweep != SweepOptions():
        raise InputError(
            "profiling.no_sweep", "--models, --batches, --sequences, --workers, --ray and --budget need --sweep."
        )
    if out is not None or (where == DEFAULT and not where.exists()):
        path = profile_checkout(out or Path("profile"), SILENT if as_json else terminal, options)
    else:
        plant, _ = open_plant(where, as_json)
        with plant.workspace.hold_lock("code-loop"):
            number = profile_step(plant, options)
        show_unshown_items(plant)
        path = Path(plant.ledger.read("SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"])
    if as_json:
        print(path.read_text(encoding="utf-8"))
        return
    from agents.line_profiler.profile_schema import Profile
    from agents.line_profiler.report.report import make_profile_table

    terminal.console.print(make_profile_table(Profile.from_mapping(json.loads(path.read_text(encoding="utf-8")))))
    terminal.line(f"  files: {path.with_suffix('.html')}, {path}, {path.with_name('trace.json')}")


def _sweep(out: Path, options: SweepOptions, terminal: Terminal, as_json: bool) -> None:
    from factory.code_loop.profiling import profile_model_shapes
    from factory.core.progress import SILENT

    path = profile_model_shapes(out, SILENT if as_json else terminal, options)
    words = path.read_text(encoding="utf-8")
    if as_json:
        print(words)
        return
    from agents.line_profiler.sweep.sweep import SweepResult, make_sweep_table

    terminal.line(make_sweep_table(SweepResult.from_mapping(json.loads(words))))
    terminal.line(f"  file: {path}")
