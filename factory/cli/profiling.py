"""``factory profile``: time every line of the training step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Where, app, open_plant
from factory.core.errors import InputError

if TYPE_CHECKING:
    from factory.code_loop.profiling import SweepOptions
    from factory.core.console import Terminal
    from factory.core.progress import SILENT

HELP = """Time every line of the training step: forward, backward (at the forward line that caused it), optimiser, data.

Shows the hottest lines with their time, calls, share of the step, percent of the roofline, and what bounds them (compute,
memory, launch, host); which lines could be fused and which could overlap; and how far the sum is from the step's own time
and from torch.profiler's. Every operation is also called alone: 10 warm-ups, 100 calls, median.

Leaves profile.json (for programs; its schema is in agents/line_profiler/table.py), profile.html (source with a heat column,
graph, roofline; opens offline) and trace.json (open it at ui.perfetto.dev). In a workspace they lie under reports/profiles/
and are artifacts of an MLflow run; without one, the code of this checkout is profiled and they lie in --out.

First run:  factory profile --recipe demo --out profile      (about half a minute on two cores)

With --sweep: one layer of the shapes 7b, 29b, 375b and 1t (the last two of experts) at every batch and sequence, line by
line. Each different operation is measured once, where it fits in memory and time; the others stand at the roofline, and
every line says which. Local processes share the work (--workers), or a Ray cluster's actors (--ray).

  factory profile --sweep --models 7b,375b --batches 1,4 --sequences 1024,4096 --workers 2"""


@app.command(help=HELP)
def profile(
    where: Where = DEFAULT,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe's name or path; the workspace's own when not given, else 'demo'.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Profile this checkout, without a workspace, and leave the files here.")
    ] = None,
    alone: Annotated[
        float | None, typer.Option(min=0, help="Seconds to spend on operations alone; 0 leaves them out.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Model shapes instead of a recipe's step.")] = False,
    models: Annotated[str | None, typer.Option(help="Of a sweep: 7b,29b,375b,1t.")] = None,
    batches: Annotated[str | None, typer.Option(help="Of a sweep: rows, with commas.")] = None,
    sequences: Annotated[str | None, typer.Option(help="Of a sweep: positions of a row, with commas.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Of a sweep: processes, or Ray actors.")] = None,
    ray: Annotated[str | None, typer.Option(help="Of a sweep: 'auto' or a Ray cluster's address.")] = None,
    budget: Annotated[float | None, typer.Option(min=1, help="Of a sweep: seconds to measure in all.")] = None,
    as_json: AsJson = False,
) -> None:
    from factory.code_loop.profiling import ProfileOptions, SweepOptions, profile_checkout
    from factory.code_loop.profiling import profile as profile_step
    from factory.core.console import Terminal
    from factory.show.catching_up import catch_up

    options = ProfileOptions(recipe, alone)
    of_sweep = SweepOptions(models, batches, sequences, workers, ray, budget)
    terminal = Terminal()
    if sweep:
        _sweep(out or Path("profile"), of_sweep, terminal, as_json)
        return
    if of_sweep != SweepOptions():
        raise InputError("--models, --batches, --sequences, --workers, --ray and --budget need --sweep")
    if out is not None or (where == DEFAULT and not where.exists()):
        path = profile_checkout(out or Path("profile"), SILENT if as_json else terminal, options)
    else:
        plant, _ = open_plant(where, as_json)
        with plant.workspace.lock("code-loop"):
            number = profile_step(plant, options)
        catch_up(plant)
        path = Path(plant.ledger.read("SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"])
    if as_json:
        print(path.read_text(encoding="utf-8"))
        return
    from agents.line_profiler.report.report import table
    from agents.line_profiler.table import Profile

    terminal.console.print(table(Profile.from_mapping(json.loads(path.read_text(encoding="utf-8")))))
    terminal.line(f"  files: {path.with_suffix('.html')}, {path}, {path.with_name('trace.json')}")


def _sweep(out: Path, options: SweepOptions, terminal: Terminal, as_json: bool) -> None:
    from factory.code_loop.profiling import sweep
    from factory.core.progress import SILENT

    path = sweep(out, SILENT if as_json else terminal, options)
    words = path.read_text(encoding="utf-8")
    if as_json:
        print(words)
        return
    from agents.line_profiler.sweep.sweep import Sweep, text

    terminal.line(text(Sweep.from_mapping(json.loads(words))))
    terminal.line(f"  file: {path}")
